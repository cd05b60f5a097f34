"""Sphinx settings of the site, and what happens to a page while it is built: decision 044. ``make docs`` builds it.

The source folder is the repository, so that each relative link means the same on the site and on the repository's host.
"""

import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import generated  # noqa: E402  in the folder of this file

from crius import __version__  # noqa: E402

with (ROOT / "pyproject.toml").open("rb") as file:
    REPOSITORY = tomllib.load(file)["project"]["urls"]["Source"]

project = "Crius"
version = release = __version__
copyright = "the Crius authors"
language = "en"
smartquotes = False
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
root_doc = "README"
include_patterns = [
    "README.md",
    "AGENTS.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/**",
    "benchmarks/**",
]
exclude_patterns = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in ("docs", "benchmarks")]
exclude_patterns += ["docs/_build", "benchmarks/results"]
suppress_warnings = ["misc.highlighting_failure", "myst.header"]  # JSON with a line of "..."; H3 below H1

myst_heading_anchors = 4
highlight_language = "none"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"Crius {version}"
html_copy_source = False
html_logo = html_favicon = "site/logo.svg"
html_static_path = ["site"]
html_css_files = ["crius.css"]
html_theme_options = {
    "top_of_page_buttons": [],
    "light_css_variables": {"color-brand-primary": "#4338ca", "color-brand-content": "#4338ca"},
    "dark_css_variables": {"color-brand-primary": "#a5b4fc", "color-brand-content": "#a5b4fc"},
}
copybutton_selector = ", ".join(f"div.highlight-{language} pre" for language in ("sh", "toml", "python", "json"))

CONTENTS = "docs/README"
LISTED = re.compile(r"^- \[(?P<title>[^]]+)\]\((?P<page>[^)#]+)\.md\)", re.MULTILINE)
LINK = re.compile(r"(?<!!)(\[[^]]*\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
CAPTION = re.compile(
    r'<p class="caption"[^>]*><span class="caption-text">(?P<part>[^<]*)</span></p>'
    r'(?P<entries>.*?)(?=<p class="caption"|\Z)',
    re.DOTALL,
)
MADE = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def toctrees(contents: str) -> str:
    """The side bar: one part for each section of docs/README.md, whose lists of links are the order of the pages.

    Args:
        contents: Markdown of docs/README.md.
    """
    trees = []
    for section in COMMENT.sub("", contents).split("\n## ")[1:]:
        entries = []
        for match in LISTED.finditer(section):
            page = (ROOT / "docs" / match["page"]).resolve().relative_to(ROOT).as_posix()
            entries.append("self" if page == root_doc else f"{match['title']} <{page}>")
        if entries:
            trees.append(_toctree(f":caption: {section.splitlines()[0]}", *entries))
    return _toctree("", f"Contents <{CONTENTS}>") + "".join(trees)


def _toctree(option: str, *entries: str) -> str:
    return "\n".join(["\n\n```{toctree}", ":hidden:", *filter(None, [option]), "", *entries, "```\n"])


def linked(text: str, folder: Path, pages: set[Path]) -> str:
    """``text`` with links to files that are not pages as links to the repository's host.

    Args:
        text: Markdown.
        folder: of its file.
        pages: files that are on the site.
    """

    def replaced(match: re.Match[str]) -> str:
        if "://" in match[2] or match[2].startswith("mailto:"):
            return match[0]
        target = (folder / match[2]).resolve()
        if target in pages or not target.exists():  # what does not exist is Sphinx's to report
            return match[0]
        kind = "tree" if target.is_dir() else "blob"
        return f"{match[1]}{REPOSITORY}/{kind}/main/{target.relative_to(ROOT).as_posix()}{match[3]}"

    return LINK.sub(replaced, text)


def read(app: Sphinx, page: str, source: list[str]) -> None:
    """Complete one page: generated parts, the side bar, links to files."""
    file = Path(app.env.doc2path(page))
    text = MADE.sub(lambda match: getattr(generated, match[1])(), source[0])
    text = linked(text, file.parent, {Path(app.env.doc2path(name)).resolve() for name in app.env.found_docs})
    if page == root_doc:
        text += toctrees((ROOT / f"{CONTENTS}.md").read_text())
    elif page == "docs/decisions/README":
        text += _toctree(":glob:", "[0-9]*")
    source[0] = text


def fold(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Each part of the side bar is one entry, which opens; the part of this page is open."""

    def folded(part: re.Match[str]) -> str:
        state = " open" if "current-page" in part["entries"] else ""
        return f"<details{state}><summary>{part['part']}</summary>{part['entries']}</details>"

    context["furo_navigation_tree"] = CAPTION.sub(folded, context["furo_navigation_tree"])


def finish(app: Sphinx, failed: Exception | None) -> None:
    """The first page is what a browser finds in the folder."""
    if failed is None and app.builder.format == "html":
        shutil.copy(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", read)
    app.connect("html-page-context", fold, priority=900)  # after Furo, which makes the tree
    app.connect("build-finished", finish)
