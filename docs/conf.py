"""How the documentation is built. Needs no network; every warning is an error (``scripts/docs``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memlog.version import VERSION

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "memlog"
copyright = "2026, the memlog authors"  # noqa: A001 - Sphinx's name for it
version = release = VERSION

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"memlog {version}"
html_copy_source = False
html_show_sourcelink = False

autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
add_module_names = False

# Names of other projects, and names that signatures use without their module, lead nowhere. What begins with memlog
# must be found.
nitpick_ignore_regex = [
    ("py:.*", r"(?!memlog\b).*"),
    ("py:class", r"memlog\.replay\.(Pages|T)"),  # what pages() returns is only iterated over
]


def _is_prose(_app: Sphinx, what: str, *details: Any) -> None:
    # napoleon reads "Where to go on: behind the last item" as a type and its description.
    lines: list[str] = details[-1]
    if what in ("property", "attribute"):
        lines[:1] = [line.replace(": ", " \N{EN DASH} ") for line in lines[:1]]


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", _is_prose, priority=100)
