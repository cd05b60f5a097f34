import hashlib
import html.parser
import json
import os
import re
import stat
from base64 import b64encode
from pathlib import Path

import pytest
from report_runs import write_run

from crius import cli
from crius.cli import report as report_verb
from crius.cli.report import write_last_report
from crius.config.run import RunConfig, replace_fields
from crius.tools.report import page as page_file
from crius.tools.report.curves import thinned
from crius.tools.report.history import RunHistory, read_run
from crius.tools.report.page import page
from crius.tools.report.payload import MOST_INCIDENTS, payload

SPIKE = {
    **{"step": 2, "kind": "spike", "action": "warned", "loss": 9.5, "lr": {"decayed": 0.001, "1d": 0.002}},
    **{"scores": [{"name": "loss", "value": 9.5, "z": 14.0}], "sample_ids": [4, 5], "rank": None},
    "layers": [{"name": f"layers.{number}", "grad_norm": "nan"} for number in range(20)],
}
WITNESS = {"rank": 1, "step": 3, "phase": "forward", "stack": ["line"], "threads": "many"}


class Elements(html.parser.HTMLParser):
    """The elements of a page, the attributes of each, and what is in those whose content is no markup."""

    def __init__(self, text):
        super().__init__()
        self.found, self.content, self.key = [], {}, ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        self.key = dict(attributes).get("id", tag)

    def handle_endtag(self, tag):
        self.key = ""

    def handle_data(self, data):
        self.content[self.key] = self.content.get(self.key, "") + data

    def count(self, tag):
        return sum(name == tag for name, _ in self.found)


def shown(folder, *more, **given):
    return payload([read_run(path) for path in (folder, *more)], **given)


def history(steps):
    """Of a run with many records; the values repeat, so that making them takes no time."""
    numbers = [float(step % 977) for step in range(1000)] * (steps // 1000)
    columns = {"step": list(range(1, steps + 1)), **dict.fromkeys(("loss", "grad_norm", "lr", "mfu"), numbers)}
    return RunHistory(
        path=page_file.Path("many"),
        settings={},
        starts=[],
        steps=columns,
        validations={},
        summary=None,
        plan=None,
        incidents={},
    )


@pytest.mark.parametrize("most", [4, 10, 99])
@pytest.mark.parametrize("number", [4, 100, 1001])
def test_a_thinned_curve_keeps_its_least_and_largest_value_and_its_end(number, most):
    values = [float((7 * place) % 53) for place in range(number)]
    values[number // 2], values[number // 3] = -1.0, 99.0  # wherever a group begins
    steps, kept = thinned((list(range(number)), values), most)
    assert len(steps) == len(kept) <= most
    assert (min(kept), max(kept), steps[-1]) == (-1.0, 99.0, number - 1)
    assert steps == sorted(set(steps)) and all(values[step] == value for step, value in zip(steps, kept, strict=True))


def test_a_thinned_curve_keeps_a_gap_that_is_longer_than_a_group():
    steps, values = thinned((list(range(100)), [None if 20 <= step < 60 else 1.0 for step in range(100)]), 20)
    assert None in values and all(
        (value is None) == (20 <= step < 60) for step, value in zip(steps, values, strict=True)
    )


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ((4.0, 2.0, 1.0), (3, 0, 0.0, 1, None)),
        ((4.0, 2.000001, 1.0), (3, 0, 5e-7, 2, None)),
        ((4.0, 2.5, 1.25), (3, 0, 0.2, 2, 2)),
        ((4.0, None, 1.25), (3, 1, 0.2, 3, 2)),
    ],
)
def test_the_distance_of_two_losses_is_the_largest_relative_one_in_a_common_step(other, expected, tmp_path):
    runs = (write_run(tmp_path / "a", (4.0, 2.0, 1.0)), write_run(tmp_path / "b", other))
    [found] = shown(*runs)["apart"]
    names = ("num_steps", "num_not_finite", "largest", "step", "parts")
    assert found["first_not_finite"] == (2 if expected[1] else None)
    assert tuple(found[name] for name in names) == (*expected[:2], pytest.approx(expected[2], rel=1e-6), *expected[3:])


def test_a_report_shows_the_settings_that_are_not_the_defaults_and_their_origin(tmp_path):
    run = write_run(tmp_path / "run", settings={"optimizer.lr": 0.5, "training.steps": 7})
    found = {row["name"]: row for row in shown(run, origins={"optimizer.lr": "command line"})["runs"][0]["settings"]}
    assert found["optimizer.lr"] == {
        **{"name": "optimizer.lr", "value": 0.5, "default": RunConfig().optimizer.lr, "origin": "command line"}
    }
    assert found.keys() == {"optimizer.lr", "training.steps"}


@pytest.mark.parametrize(
    ("degree", "ranks", "more"),
    [(-1, 2, " --nproc 2 --import mine"), (-1, 1, " --import mine"), (2, 2, " --import mine")],
)
def test_the_command_that_repeats_a_run_works_as_it_stands(degree, ranks, more, tmp_path):
    settings, start = {"parallelism.data_parallel_shard_degree": degree}, {"time": 1.0, "step": 0, "ranks": ranks}
    run = write_run(tmp_path / "my $(run)", settings=settings, files={"starts.jsonl": json.dumps(start) + "\n"})
    (run / "run.toml").write_text("# --import mine\n" + (run / "run.toml").read_text())
    assert shown(run)["runs"][0]["repeat"] == f"crius train --config '{run}/run.toml'{more}"


def test_the_command_that_repeats_a_run_below_this_folder_has_a_relative_path(tmp_path, monkeypatch):
    run = write_run(tmp_path / "here" / "runs" / "a")
    monkeypatch.chdir(tmp_path / "here")
    assert shown(run)["runs"][0]["repeat"] == "crius train --config runs/a/run.toml"
    monkeypatch.chdir(run)
    assert shown(Path("../a"))["runs"][0]["repeat"] == "crius train --config run.toml"


def test_runs_of_a_report_are_in_the_order_of_their_validation_losses(tmp_path):
    files = {"starts.jsonl": json.dumps({"time": 1.0, "step": 0}) + "\n"}
    runs = []
    for name, rate, val_loss in (("a", 1.0, 2.5), ("b", 2.0, 2.0)):
        run = write_run(tmp_path / name, settings={"optimizer.lr": rate}, files=files)
        runs.append(run)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 3, "val_loss": val_loss}) + "\n")
    found = shown(*runs, write_run(tmp_path / "c", files=files))["ranking"]
    assert (found["order"], found["best"], found["why"]) == ([1, 0, 2], 1, "")
    assert found["losses"] == [2.5, 2.0, None]
    assert found["settings"] == {"optimizer.lr": [1.0, 2.0, RunConfig().optimizer.lr]}


def test_a_name_that_is_not_utf8_has_a_report(tmp_path):
    run = write_run(tmp_path / os.fsdecode(b"run\xe9"))
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "new.html")]) == 0
    assert "<title>run\\udce9 - Crius report</title>" in (tmp_path / "new.html").read_text()
    assert run.exists()


def test_runs_are_compared_by_settings_and_losses(tmp_path):
    layout = "parallelism.data_parallel_shard_degree"
    first = write_run(tmp_path / "a" / "run", settings={"job.name": "a"})
    second = write_run(tmp_path / "b" / "run", (3.0, 2.5, 2.0), settings={layout: 2, "job.name": "b"})
    found = shown(first, second)
    assert [run["name"] for run in found["runs"]] == [str(first), str(second)]  # both are called run
    assert found["settings"] == [{"name": layout, "values": [-1, 2]}]
    [apart] = found["apart"]
    assert (apart["num_steps"], apart["step"], apart["parts"]) == (3, 3, 3)
    assert apart["largest"] == pytest.approx(0.25 / 2.25) and apart["curve"][1][:2] == [0.0, 0.0]


def test_curves_are_those_that_a_run_has(tmp_path):
    fields = {"mfu": None, "load_max_over_mean": 1.5, "dead_experts": 2}
    run = write_run(tmp_path / "run", (3.0, None, float("nan")), fields=fields)
    with (run / "metrics.jsonl").open("a") as file:
        for name in ("web", "code"):
            file.write(json.dumps({"step": 3, "val_loss": 2.0, "val_set": name}) + "\n")
    [found] = shown(run)["runs"]
    assert found["curves"]["loss"] == [[1, 2, 3], [3.0, None, None]]
    assert "mfu" not in found["curves"] and found["curves"]["dead_experts"] == [[1, 2, 3], [2.0, 2.0, 2.0]]
    assert found["validations"] == {"web": [[3], [2.0]], "code": [[3], [2.0]]}
    assert found["results"]["loss"] is None and found["results"]["validations"] == {"web": 2.0, "code": 2.0}


def test_a_mixture_is_told_by_source(tmp_path, capsys):
    of_sources = {"loss/web": 2.5, "share/web": 0.4, "epochs/web": 1.5}
    run = write_run(tmp_path / "run", fields=of_sources)
    [found] = shown(run)["runs"]
    assert found["results"]["sources"] == of_sources
    other = write_run(tmp_path / "other", fields=of_sources | {"share/web": 0.6})
    assert cli.main(["compare", str(run), str(other), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert (results["share/web"], results["epochs/web"]) == ([0.4, 0.6], [1.5, 1.5])


def test_a_restart_is_told_with_what_its_recovery_took(tmp_path):
    recovery = {"attempt": 1, "step": 97, "steps_again": 16, "seconds": 5.5}
    files = {"logs/recoveries.jsonl": json.dumps(recovery) + "\n"}
    [found] = shown(write_run(tmp_path / "run", starts=(0, 80, 120), files=files))["runs"]
    by_failure, by_hand = found["restarts"]
    assert (by_failure["step"], by_failure["failed_step"], by_failure["seconds"]) == (80, 97, 5.5)
    assert by_hand["step"] == 120 and "seconds" not in by_hand and found["results"]["restarts"] == 2


def test_incidents_are_told_in_the_order_of_steps_with_their_texts(tmp_path):
    files = {
        "incidents/step-2.json": SPIKE,
        "incidents/hang-0.json": [WITNESS],
        "incidents/hang-0.txt": "HangError: rank 1 does not go on.\n" + 20_000 * "x",
        "incidents/hang-0.rank-1.flight.json": {"step": 1},
        "incidents/out-of-memory-rank-0.json": {"kind": "out of memory", "step": 1, "plan": [{"part": "weights"}]},
        "incidents/step-9.json": "{cut o",
    }
    [run] = shown(write_run(tmp_path / "run", files=files))["runs"]
    full, spike, hang, unread = run["incidents"]
    assert (full["step"], full["title"], full["tables"][0]["rows"]) == (1, "out of memory", [["weights"]])
    assert (spike["step"], spike["title"]) == (2, "spike: warned")
    assert ["lr", "decayed 0.001, 1d 0.002"] in spike["values"] and ["sample_ids", "4, 5"] in spike["values"]
    assert [table["name"] for table in spike["tables"]] == ["scores", "layers"] and spike["tables"][1]["more"] == 12
    assert (hang["step"], hang["title"], hang["tables"][0]["columns"]) == (
        3,
        "HangError: rank 1 does not go on.",
        ["rank", "step", "phase"],
    )
    assert len(hang["text"]) == 12_000 and hang["cut"] > 8_000
    assert (unread["step"], unread["text"]) == (None, "This file cannot be read.")


def test_samples_are_those_since_the_run_began_by_prompt_and_step(tmp_path):
    told = [(5, "b", 3), (6, "a", 3), (7, "b", 6), (8, "b", 5), (-1, "of an earlier run", 9)]
    lines = [{"time": 1.8e9 + when, "step": step, "prompt": prompt, "text": "x"} for when, prompt, step in told]
    text = "".join(json.dumps(line) + "\n" for line in [*lines, {"time": 1.9e9, "prompt": 1}, []])
    [found] = shown(write_run(tmp_path / "run", files={"samples.jsonl": text}))["runs"]
    assert [(one["prompt"], one["step"]) for one in found["samples"]] == [("b", 3), ("b", 5), ("b", 6), ("a", 3)]


def test_a_summary_of_before_the_run_went_on_is_not_shown(tmp_path):
    summary = {"steps": 2, "stopped_by": None, "seconds": {"compute": 1.0}}
    runs = [
        write_run(tmp_path / name, losses, files={"summary.json": summary})
        for name, losses in (("a", (3.0, 2.0)), ("b", (3.0, 2.0, 1.0)))
    ]
    assert [run["summary"] for run in shown(*runs)["runs"]] == [summary, None]


def test_a_plan_without_a_summary_stands_beside_what_the_records_say(tmp_path):
    plan = {"hardware": None, "memory_bytes": {"parameters": 2**30}, "tokens_per_second_per_rank": None}
    fields = {"tokens_per_second_per_rank": 50.0}
    [found] = shown(write_run(tmp_path / "run", [2.0] * 12, fields=fields, files={"plan.json": plan}))["runs"]
    assert found["plan"] == {"plan": plan, "measured": {"tokens_per_second_per_rank": 50.0, "memory_bytes": 2.0**29}}


def test_damaged_lines_are_counted_but_not_one_that_is_being_written(tmp_path):
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo\n[]\n{"step": 5, "loss": 1.0}\n{"step": 3, "loss": 7.0}\n{"st')
    [found] = shown(run)["runs"]
    assert found["damaged"] == 2
    assert found["curves"]["loss"] == [[1, 2, 3, 5], [3.0, 2.5, 7.0, 1.0]]  # of two records the later one counts


def test_what_comes_from_a_run_never_becomes_markup(tmp_path):
    evil = "</script><img src=x onerror=alert(1)><!-- <script>"
    files = {"incidents/step-2.json": SPIKE | {"action": evil + "\ud800"}, "incidents/hang-0.txt": evil}
    run = write_run(tmp_path / "<b>run<!--data--><!--", settings={"data.path": evil}, files=files)
    text = page(shown(run))
    elements = Elements(text)
    assert (elements.count("script"), elements.count("img"), elements.count("b")) == (2, 0, 0)
    assert elements.content["title"] == f"{run.name} - Crius report"
    [found] = json.loads(elements.content["data"])["runs"]
    assert found["name"] == run.name and found["incidents"][0]["title"] == f"spike: {evil}\ud800"
    assert "<" not in elements.content["data"]


def test_a_page_allows_its_own_script_and_style_and_no_network(tmp_path):
    text = page(shown(write_run(tmp_path / "run")))
    elements = Elements(text)
    [policy] = [found["content"] for tag, found in elements.found if tag == "meta" and "http-equiv" in found]
    hashes = {
        name: f"'sha256-{b64encode(hashlib.sha256(elements.content[name].encode()).digest()).decode()}'"
        for name in ("script", "style")
    }
    assert policy.split("; ") == [
        "default-src 'none'",
        f"script-src {hashes['script']}",
        f"style-src {hashes['style']}",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    assert not any(found.keys() & {"src", "href"} for _, found in elements.found)
    assert not re.search(
        r"@import|url\(|fetch\(|XMLHttp|innerHTML|eval\(", elements.content["style"] + page_file._asset("report.js")
    )
    assert "Permission is hereby granted" in elements.content["script"]  # uPlot's licence comes along


@pytest.mark.full
@pytest.mark.parametrize(("number", "steps"), [(1, 200_000), (40, 5_000)])
def test_a_page_stays_small(number, steps):
    run = history(steps)
    found = payload([run] * number)
    assert len(page(found)) < 2e6
    assert (
        found["runs"][0]["records"] == steps
        and len(found["runs"][0]["curves"]["loss"][0]) <= found["runs"][0]["points"]
    )


def test_a_report_of_many_incidents_shows_the_first_and_counts_the_others(tmp_path):
    files = {f"incidents/step-{step}.json": {**SPIKE, "step": step} for step in range(1, 51)}
    [found] = shown(write_run(tmp_path / "run", files=files))["runs"]
    assert len(found["incidents"]) == MOST_INCIDENTS and found["more_incidents"] == 50 - MOST_INCIDENTS


def test_a_report_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    write_run(tmp_path / "run")
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    assert [Path(path).name.partition(".partial-")[0] for path in synced] == ["report.html", "run"]


def test_the_verb_writes_into_the_folder_of_one_run_or_here(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run, other = write_run(tmp_path / "run"), write_run(tmp_path / "other", files={"incidents/step-2.json": SPIKE})
    assert cli.main(["report", "run", str(run)]) == 0  # twice the same
    assert capsys.readouterr().out == "report: run/report.html\n"
    assert cli.main(["report", "run", "other"]) == 0
    assert capsys.readouterr().out == "report: report.html\n"
    assert cli.main(["report", "run", "--out", "new/mine.html"]) == 0
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new/mine.html", "report.html")]
    assert modes == [0o644, 0o600]  # with the texts of incidents it is for its owner
    assert not (other / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "no run folder is given.*crius report runs/NAME"),
        (["missing"], 2, "missing does not exist.*fix +give the folder of a run"),
        (["empty"], 2, "empty is not a run folder: it has no run.toml and no metrics.jsonl and no run.lock"),
        (["run", "--out", "run"], 2, "run is a folder.*--out run/report.html"),
        (["run", "--out", "run/metrics.jsonl"], 2, "run/metrics.jsonl exists and is not a report.*would be lost"),
        (["run", "--out", "link.html"], 2, "run.toml exists and is not a report"),
        (["run", "--out", "mine.html"], 2, "mine.html exists and is not a report.*would be lost"),
        (["run", "--out", "pipe"], 2, "pipe exists and is not a report"),
        (["run", "--out", "run/run.toml/report.html"], 1, "report.html cannot be written: File exists.*--out"),
    ],
)
def test_wrong_arguments_are_answered(arguments, code, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")
    (tmp_path / "link.html").symlink_to("run/run.toml")
    (tmp_path / "mine.html").write_text("<!DOCTYPE html><title>my report</title>")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert cli.main(["report", *arguments]) == code and (tmp_path / "run" / "metrics.jsonl").read_text() == before
    assert re.search(said, capsys.readouterr().err, re.DOTALL)


@pytest.mark.parametrize("name", ["run.toml", "metrics.jsonl", "starts.jsonl"])
def test_a_run_whose_files_cannot_be_read_has_no_report(name, tmp_path, capsys):
    run = write_run(tmp_path / "run")
    (run / name).unlink()
    (run / name).mkdir()
    assert cli.main(["report", str(run)]) == 1
    assert f"{run / name} cannot be read: it is not a regular file" in capsys.readouterr().err
    assert not (run / "report.html").exists()


def test_incidents_that_cannot_be_read_say_so(tmp_path):
    run = write_run(tmp_path / "run")
    for name in ("step-1.json", "hang-0.txt"):
        (run / "incidents" / name).mkdir(parents=True)
    texts = [incident["text"] for incident in shown(run)["runs"][0]["incidents"]]
    assert texts == ["This file cannot be read: it is not a regular file.", "This file cannot be read."]


def test_a_run_with_damaged_lines_only_says_so(tmp_path, capsys):
    run = write_run(tmp_path / "run", ())
    (run / "metrics.jsonl").write_bytes(b"\xff\x00\n")
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().err == f"{run}: metrics.jsonl has damaged lines only\n"


def test_columns_are_in_the_order_of_the_records(tmp_path):
    assert [*read_run(write_run(tmp_path / "run")).steps][:3] == ["step", "loss", "tokens_per_second"]


def test_losses_that_are_not_finite_are_counted(tmp_path):
    [found] = shown(write_run(tmp_path / "run", (3.0, None, float("nan"), 2.0)))["runs"]
    assert found["not_finite"] == {"number": 2, "first": 2}


def test_a_run_without_a_record_has_a_report_that_says_so(tmp_path, capsys):
    run = write_run(tmp_path / "run", ())
    (run / "metrics.jsonl").unlink()
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().err == f"{run}: no step has been reported yet\n"
    assert shown(run)["runs"][0]["curves"] == {}


@pytest.mark.parametrize(
    "broken",
    [
        {"summary.json": {"steps": "many", "seconds": 3}},
        {"summary.json": {"steps": 9, "seconds": [1], "plan": 4}, "plan.json": {}},
        {"plan.json": "[1]", "starts.jsonl": '[]\n{"step": "x"}\n{"step": 5}\n'},
        {"logs/recoveries.jsonl": '{"step": null}\n7\n', "incidents/step-1.json": "7", "run.toml": "= ="},
    ],
)
def test_files_with_other_content_than_a_run_writes_break_nothing(broken, tmp_path):
    run = write_run(tmp_path / "run", files=broken, fields={"lr": "fast", "mfu": [1], "grad_norm": 10**400})
    [found] = shown(run)["runs"]
    assert found["records"] == 3 and found["curves"].keys() == {"loss", "tokens_per_second", "memory_gib", "goodput"}


def test_the_report_at_the_end_of_a_run_is_turned_off_or_costs_a_warning(tmp_path, monkeypatch, capsys):
    run, empty = write_run(tmp_path / "run"), write_run(tmp_path / "empty", ())
    off = replace_fields(RunConfig(), {"metrics.enable_report": False})
    for config, folder in ((off, run), (RunConfig(), empty), (RunConfig(), tmp_path / "gone")):
        write_last_report(config, folder)
    written = [folder.name for folder in (run, empty) if (folder / "report.html").exists()]
    assert written == [] and capsys.readouterr().err == ""
    write_last_report(RunConfig(), run)
    assert (run / "report.html").stat().st_size > 50_000
    monkeypatch.setattr("crius.cli.report.write_report", lambda *_: 1 / 0)
    write_last_report(RunConfig(), run)
    assert capsys.readouterr().err == "warning: no report of this run: ZeroDivisionError: division by zero\n"


def test_the_report_of_a_run_that_trains_is_written_again_by_another_process(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run")
    clock = [0.0]
    monkeypatch.setattr(report_verb.time, "monotonic", lambda: clock[0])
    live = report_verb.LiveReport(run, is_on=True)
    live.poll()
    assert live._process is None  # not yet
    clock[0] = 60.0
    live.poll()
    process = live._process
    live.close()
    assert process.returncode == 0 and (run / "report.html").stat().st_size > 50_000
    clock[0] = 62.0
    live.poll()
    assert live._process is None and live._due == 60 + 100 * 2  # it took two seconds: at most 1 % of the time
    clock[0] = 259.0
    live.poll()
    assert live._process is None
    off = report_verb.LiveReport(run, is_on=False)
    clock[0] = 1e9
    off.poll()
    assert off._process is None
