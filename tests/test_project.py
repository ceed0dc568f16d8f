"""Habits of the project that nobody should have to remember."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from memlog.version import VERSION

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SCRIPTS = [ROOT / "scripts" / name for name in ("demo", "docs", "test")] + [ROOT / ".ci" / "run"]

TEXT = {".py", ".md", ".toml", ".sh", ".txt", ".cfg", ""}
NOT_OURS = {".git", ".venv", ".venvs", ".hypothesis", "__pycache__", "_build", "build", "dist", "htmlcov"}

# Put together here, so that this file does not find itself.
FOREIGN = {
    "a path of somebody's machine": "|".join(["/" + "root/", "/" + "work/", "/" + r"home/\w", "/" + r"Users/\w"]),
    "a package index": "|".join(["py" + r"pi\.org", "python" + "hosted", "--index" + "-url", "PIP_" + "INDEX"]),
}


def shipped() -> list[Path]:
    """Everything that a clone holds, but for data: found by walking, so that it works without git, too."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in NOT_OURS and not name.endswith(("_cache", ".egg-info"))]
        if Path(folder) != ROOT / "examples" / "data":
            found += [Path(folder) / name for name in names if Path(name).suffix in TEXT]
    return [path for path in found if not path.name.startswith((".coverage", ".git"))]


def test_the_changelog_begins_with_the_version_that_is_built() -> None:
    """Whoever raises one raises the other."""
    newest = re.search(
        r"^## \[?(\d+\.\d+\.\d+)\]? - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )

    assert newest is not None
    assert newest[1] == VERSION


@pytest.mark.parametrize("what", FOREIGN)
def test_nothing_shipped_names(what: str) -> None:
    """The project works where it is put, and says nothing of where it was made."""
    pattern = re.compile(FOREIGN[what])
    files = shipped()

    assert len(files) > 50
    found = []
    for path in files:
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert found == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_is_run(path: Path) -> None:
    """Under 60 lines, first of which says what it is for; and `test_examples.py` runs it."""
    text = path.read_text("utf-8")

    assert len(text.splitlines()) < 60
    assert text.startswith('"""')
    assert path.stem in (ROOT / "tests" / "test_examples.py").read_text("utf-8")


def test_the_readme_begins_with_how_to_install() -> None:
    """By the distribution's name, which is not the import's."""
    blocks = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)

    assert blocks[0] == ("shell", "pip install memlog-sdk\n")
    assert PYPROJECT["project"]["name"] == "memlog-sdk"
    assert blocks[1][0] == "python"
    assert [line.split()[0] for line in blocks[2][1].splitlines()] == ["scripts/demo", "scripts/test"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_can_be_started_and_stops_at_its_first_error(path: Path) -> None:
    """Executable, strict, and parsed by bash without complaint."""
    assert os.access(path, os.X_OK)
    assert "set -euo pipefail" in path.read_text("utf-8")
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=10)


def test_dependencies_have_no_upper_bound() -> None:
    """An upper bound in a library breaks the resolver of whoever installs it."""
    extras = PYPROJECT["project"]["optional-dependencies"].values()
    wanted = [*PYPROJECT["project"]["dependencies"], *(entry for extra in extras for entry in extra)]

    assert [entry for entry in wanted if re.search(r"<|==|~=", entry)] == []


def test_types_are_shipped() -> None:
    """Without the marker a type checker would not look."""
    assert (ROOT / "memlog" / "py.typed").exists()
