# shellcheck shell=bash
# Sourced by the scripts beside it: finds a Python, and keeps .venv in working order.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

fail() {
    printf "scripts/${0##*/}: %s\n" "$@" >&2
    exit 1
}

recent_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11 python; do
        if recent_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer found." "Install one, or name it: PYTHON=/path/to/python3 scripts/${0##*/}"
}

# Make .venv where there is none, or one whose Python is gone.
need_venv() {
    if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -c '' 2>/dev/null; then
        local python
        python=$(find_python)
        echo "Making $venv with $("$python" --version) ..."
        "$python" -m venv --clear "$venv" ||
            fail "no virtual environment could be made." "On Debian and Ubuntu: apt install python3-venv"
    elif ! recent_enough "$venv/bin/python"; then
        fail "$venv holds $("$venv/bin/python" --version), at least 3.11 is needed." "Remove it and run this again."
    fi
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null ||
        fail "$venv has no pip." "Remove it and run this again."
}

# Install this checkout with an extra, unless that was done from this place and this pyproject.toml.
need_install() {
    local stamp="$venv/.memlog-$1"
    need_venv
    if ! { echo "$root" && cat "$root/pyproject.toml"; } | cmp -s - "$stamp"; then
        echo "Installing into $venv ..."
        "$venv/bin/python" -m pip install -q --disable-pip-version-check -e "$root[$1]" ||
            fail "the installation failed, see above. It needs a package index."
        { echo "$root" && cat "$root/pyproject.toml"; } >"$stamp"
    fi
}
