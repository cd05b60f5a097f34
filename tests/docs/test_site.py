"""The site: every page is in the contents, the reference says what the program says, and no link leads nowhere."""

import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import CUT, FAINT, WIDER, needs_chromium, opened
from harness import ROOT

from crius import __version__
from crius.cli import VERBS, app
from crius.cli.verbs import Verbs
from crius.config.run import RunConfig
from crius.config.toml_file import flatten

DOCS = ROOT / "docs"
SCROLLED = "(all) => all.filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.textContent)"


@pytest.fixture(scope="module")
def generated():
    sys.path.insert(0, str(DOCS))
    import generated

    yield generated
    sys.path.remove(str(DOCS))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder that the recipe of ``make docs`` fills, elsewhere; a warning of Sphinx fails it."""
    out = tmp_path_factory.mktemp("site")
    recipe = (ROOT / "Makefile").read_text().split("\ndocs:")[1].splitlines()[1].strip()
    assert recipe.startswith("$(BIN)/python -m sphinx -W --keep-going ") and recipe.endswith(" . docs/_build/html")
    words = [sys.executable, *shlex.split(recipe.replace("docs/_build", str(out)))[1:]]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return out / "html"


class Page(HTMLParser):
    """What a page has as anchors, what it links to, and what a browser loads for it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors, self.links, self.loads = set(), [], []
        self.feed(file.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag in ("script", "img", "link", "source"):
            self.loads += [found[name] for name in ("src", "href") if name in found]


def test_every_page_is_in_the_contents():
    contents = re.sub(r"<!--.*?-->", "", (DOCS / "README.md").read_text(), flags=re.DOTALL)
    linked = {(DOCS / target).resolve() for target in re.findall(r"^- \[[^]]+\]\(([^)#]+)\)", contents, re.MULTILINE)}
    pages = {page for page in DOCS.rglob("*.md") if not page.is_relative_to(DOCS / "_build")}
    pages -= {DOCS / "README.md", *(DOCS / "decisions").glob("[0-9]*.md")}
    assert sorted(pages - linked) == []
    decisions = (DOCS / "decisions" / "README.md").read_text()
    assert all(f"({page.name})" in decisions for page in (DOCS / "decisions").glob("[0-9]*.md"))


def test_the_reference_has_type_default_and_text_of_every_setting(generated):
    parts = dict(part.split("\n", 1) for part in generated.settings().split("### ")[1:])
    assert list(parts) == list(flatten(RunConfig()))
    for name, part in parts.items():
        notes, text = part.strip().split("\n\n", 1)
        assert "; default " in notes and len(text.split("\n\n## ")[0]) > 10, name
    assert "one of `adamw`, `muon`; default `adamw`" in parts["optimizer.name"]
    assert "`bool`; default unset" in parts["model.tied_embeddings"]
    assert "on the command line alone" in parts["compile.cache_dir"]
    assert "also `--metrics.log_freq`" in parts["metrics.log_interval"]


def test_the_reference_has_every_verb_and_flag(generated):
    heads = [line.removeprefix("## crius ") for line in generated.verbs().splitlines() if line.startswith("## ")]
    assert heads == [verb for verb in VERBS if not verb.startswith("_")]
    verbs = [verb for member in app for verb in (member if isinstance(member, Verbs) else [member])]
    below = {" ".join(verb.words) for verb in verbs if len(verb.words) == 2}
    heads = re.findall(r"^### crius (\w+ \w+)$", generated.verbs(), re.MULTILINE)
    assert set(heads) == below and {"verify parity", "plan check", "data doctor"} < below
    text = generated.verbs()
    assert "- `--dry_run`: " in text and "--training.steps`:" not in text


def test_docstrings_as_markdown_keep_their_characters_and_link_what_they_name(generated):
    assert generated.text("of ``a_b`` in runs/<name>, *all*\n of it.") == r"of `a_b` in runs/\<name\>, \*all\* of it."
    assert generated.text("see docs/data.md, --optimizer.lr and --json") == (
        "see [docs/data.md](../data.md), [`--optimizer.lr`](settings.md#optimizerlr) and `--json`"
    )


def test_the_changelog_begins_with_this_version_and_each_release_says_how_to_upgrade():
    releases = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    assert releases[0].split()[0] == __version__
    assert all("\n### Upgrading\n" in release for release in releases)


@pytest.mark.slow
def test_no_link_of_the_site_leads_nowhere_and_nothing_is_loaded_from_elsewhere(site):
    pages = {file: Page(file) for file in site.rglob("*.html")}
    assert {site / "index.html", site / "docs/reference/settings.html", site / "CHANGELOG.html"} <= set(pages)
    wrong = []
    for file, page in pages.items():
        for link in (*page.links, *page.loads):
            url = urlsplit(link)
            if url.scheme or url.netloc:
                wrong += [f"{file.name} loads {link}"] if link in page.loads else []
                wrong += (
                    [f"{file.name}: a page as a file, {link}"] if "/blob/main/docs/" in link and ".md" in link else []
                )
                continue
            target = (file.parent / unquote(url.path)).resolve() if url.path else file
            if not target.exists():
                wrong.append(f"{file.name} links to {link}")
            elif url.fragment and target.suffix == ".html" and unquote(url.fragment) not in pages[target].anchors:
                wrong.append(f"{file.name} links to {link}, where no such part is")
    assert wrong == []
    assert sum(len(page.links) for page in pages.values()) > 1000


@pytest.mark.slow
def test_the_side_bar_has_ten_entries_and_only_the_part_of_the_page_is_open(site):
    (part,) = re.findall(r"<details open><summary>([^<]*)</summary>", (site / "docs/lora.html").read_text())
    bar = (site / "docs/lora.html").read_text().partition('class="sidebar-tree"')[2].partition("</aside>")[0]
    assert part == "Train" and bar.count("<details") + 1 == 10
    assert bar.partition("<details")[0].count("<li") == 1 and bar.rpartition("</details>")[2].count("<li") == 0


@pytest.mark.slow
def test_commands_can_be_copied_and_what_they_print_cannot(site):
    script = (site / "_static/copybutton.js").read_text()
    assert "div.highlight-sh pre" in script and "highlight-none" not in script


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_a_browser_shows_pages_whole_and_legible(site, width, scheme):
    for name in ("index", "docs/which_model_fits", "docs/extend", "docs/reference/settings"):
        url = (site / f"{name}.html").as_uri()
        with opened(url, own="file:", scheme=scheme, width=width) as page:
            assert (page.evaluate(WIDER), page.evaluate(CUT), page.evaluate(FAINT)) == (0, [], []), name
            scrolled = page.locator(".highlight-sh pre").evaluate_all(SCROLLED)
            assert scrolled == [] or width < 1280, name


@pytest.mark.slow
def test_the_site_shows_what_is_generated(site):
    settings = Page(site / "docs/reference/settings.html")
    assert {name.replace(".", "") for name in flatten(RunConfig())} <= settings.anchors
