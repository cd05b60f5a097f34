"""Models, data and sinks of installed packages: the files of the documents, and what can be wrong with them."""

import json
import re
import tomllib

import pytest
from harness import ROOT, crius

FILE = re.compile(r"<!-- file: (?:mypackage/)?(?P<name>\S+) -->\n```\w+\n(?P<text>.*?)```", re.DOTALL)
SHORT = ["--training.seq_len", "16", "--steps", "2", "--metrics.log_interval", "1", "--validation.interval", "0"]
BROKEN = {
    "crius.models": {"broken": "broken:SPEC", "other": "losses:Losses", "llama3": "broken:SPEC"},
    "crius.data": {"failing": "failing:KIND", "strange": "losses:Losses", "odd": "odd:KIND"},
    "crius.sinks": {
        "failing": "failing:Sink",
        "exits": "failing:Exits",
        "number": "failing:NUMBER",
        "leaves": "leaves:Sink",
    },
}
FAILING = """
from crius.data.documents import FileKind
def read(file, text_field):
    yield "no piece at all"
KIND = FileKind(suffix=".md", read=read)
NUMBER = 5
class Exits:
    def __init__(self, run_dir, resumed_step): pass
    def write(self, record): raise SystemExit(0)
    def close(self): pass
class Sink:
    def __init__(self, run_dir, resumed_step): pass
    def write(self, record): raise OSError("the line is dead")
    def close(self): pass
"""


def install(folder, name, points):
    """What pip leaves of a package: its name and its entry points."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    if name != "nameless":
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = [
        "\n".join([f"[{group}]", *(f"{key} = {value}" for key, value in rows.items())])
        for group, rows in points.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups) + "\n")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with notes, and the variable that makes the packages known."""
    site, here = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("here")
    for page in ("plugins.md", "extend.md", "adding_a_model.md"):
        for match in FILE.finditer((ROOT / "docs" / page).read_text()):
            (site / match["name"]).write_text(match["text"])
    install(site, "mypackage", tomllib.loads((site / "pyproject.toml").read_text())["project"]["entry-points"])
    (site / "broken.py").write_text("import json\n1 / 0\n")
    (site / "failing.py").write_text(FAILING)
    (site / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (site / "odd.py").write_text(
        "from crius.data.documents import FileKind\nKIND = FileKind(suffix='.md', read=print, version=1)\n"
    )
    install(site, "otherpackage", BROKEN)
    install(site, "nameless", {"crius.models": {"nobodys": "broken:SPEC"}})
    (here / "notes").mkdir()
    (here / "notes" / "a.md").write_text("first section\n# second section " + "word " * 400)
    return here, {"PYTHONPATH": f"{site}:{ROOT}", "XDG_CACHE_HOME": str(here / "cache")}


@pytest.mark.page("docs/plugins.md", "docs/extend.md")
@pytest.mark.long
def test_the_example_trains(place):
    here, environ = place
    flags = ["--data.source", "Mark-Down", "--data.path", "notes", "--metrics.sinks", "losses"]
    short = [*SHORT, "--validation.interval", "1", "--validation.path", "notes", "--validation.num_samples", "2"]
    run = ["train", "--model.name", "mymodel", *flags, *short, "--validation.fraction", "0", "--job.run_dir", "r"]
    done = crius(*run, cwd=here, **environ)
    assert done.returncode == 0, done.stderr
    assert "model: mymodel/small" in done.stdout + done.stderr
    assert "2 documents" in done.stdout + done.stderr
    records = [json.loads(line) for line in (here / "r/metrics.jsonl").read_text().splitlines()]
    losses = [f"{record['step']} {record['loss']}" for record in records if "loss" in record]
    assert (here / "r/losses.txt").read_text().splitlines() == losses and len(losses) == 2
    again = crius("train", "--config", "r/run.toml", "--steps", "3", "--job.run_dir", "r", cwd=here, **environ)
    assert again.returncode == 0, again.stderr
    assert len((here / "r/losses.txt").read_text().splitlines()) == 3


def test_nothing_is_imported_that_is_not_named(place):
    """``broken`` would fail, and calls itself llama3 too."""
    here, environ = place
    done = crius("plan", "--model", "llama3", "--flavor", "8b", "--gpus", "8", "--gpu", "h100", cwd=here, **environ)
    assert done.returncode == 0, done.stderr


def test_a_malformed_list_of_entry_points_ends_no_run_that_names_none(place, tmp_path):
    here, environ = place
    install(tmp_path, "malformed", {})
    (tmp_path / "malformed-1.0.dist-info" / "entry_points.txt").write_text("[crius.sinks]\nnoequals\n")
    environ = environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = crius("config", "show", "--model.flavor", "1b", cwd=here, **environ)
    assert done.returncode == 0, done.stderr


@pytest.mark.page("docs/plugins.md", "docs/extend.md")
@pytest.mark.long
@pytest.mark.parametrize(("name", "why"), [("failing", "OSError: the line is dead"), ("exits", "SystemExit: 0")])
def test_a_sink_that_fails_ends_no_run(place, name, why):
    here, environ = place
    done = crius("train", "--metrics.sinks", name, *SHORT, "--job.run_dir", name, cwd=here, **environ)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert said.count(f"{name} failed and gets no more records: {why}") == 1 and "step 2/2" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--model.name", "broken"],
            ["broken (broken:SPEC) cannot be imported: ZeroDivisionError", "broken.py, line 2"],
        ),
        (["--model.name", "other"], ["other is not a crius.models.spec.ModelSpec, but type"]),
        (["--model.name", "mymodle"], ["no model is called mymodle, did you mean mymodel?"]),
        (["--model.name", "nobodys"], ["nobodys (broken:SPEC) cannot be imported"]),
        (["--data.source", "odd", "--data.path", "notes"], ["version of a FileKind must be text"]),
        (["--data.source", "markdown", "--data.path", "notes", "--data.split", "x"], ["data.split has no effect"]),
        (["--data.source", "markdwn", "--data.path", "notes"], ["did you mean markdown?"]),
        (
            ["--metrics.sinks", "number", "--metrics.sinks", "leaves", "--metrics.sinks", "losess"],
            [
                "sink number cannot be called",
                "leaves (leaves:Sink) cannot be imported: SystemExit",
                "no sink is called losess, did you mean losses?",
            ],
        ),
        (["--data.source", "strange", "--data.path", "notes"], ["strange is not a crius.data.documents.FileKind"]),
        (
            ["--data.source", "failing", "--data.path", "notes"],
            ["data.source failing failed on notes/a.md: ValueError"],
        ),
    ],
)
def test_what_is_wrong_is_one_error(place, flags, said):
    here, environ = place
    done = crius("train", *flags, *SHORT, cwd=here, **environ)
    assert done.returncode == (1 if "failed on" in said[0] else 2)
    assert [words for words in said if words not in done.stderr] == [], done.stderr
    assert "Traceback" not in done.stderr and "step 1" not in done.stdout
