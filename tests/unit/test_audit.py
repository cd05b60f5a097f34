"""The sample log, and the audit that reads it."""

import errno
import json
import os
import random
import sys

import numpy as np
import pytest

from crius import cli
from crius.data import sample_log
from crius.data.loader import BatchLoader
from crius.data.mixture import Plan, Walk, opened
from crius.data.sample_log import Attempt, SampleLog, next_attempt, samples_path, to_ranges
from crius.data.source import Rows
from crius.errors import ConfigError, DataError
from crius.tools.data_audit import audit as audits
from crius.tools.data_audit.audit import audit

BATCH, EPOCH = 12, 100


class Counting:
    """A source of sequences that nobody looks at."""

    seq_len, num_shards, num_samples, identity = 2, 0, EPOCH, "counting"

    def read(self, sample_ids):
        return Rows(*np.zeros((3, len(sample_ids), 2), np.int64))

    def cursors(self, shards):
        return {}

    def restore(self, cursors):
        pass


def run_attempt(run_dir, ranks, after, steps, *, batch=BATCH, sample=None, only=None, order=sorted, end=0):
    """What an attempt of ``steps`` steps leaves: the batches of the real loader, in the real log.

    ``only`` is the number of steps that each rank logs before the attempt is killed.
    """
    sample = after * batch if sample is None else sample
    number = next_attempt(run_dir)
    for rank in range(ranks):
        sizes = {"global_batch_size": batch, "rank": rank, "num_ranks": ranks, "end_sample": end}
        loader = BatchLoader(Counting(), **sizes, prefetch=0)
        loader.load_state_dict({"step": after, "next_sample": sample, "source": "counting", "cursors": {}})
        start = Attempt(
            **{"attempt": number, "after": after, "sample": sample, "ranks": ranks, "batch": batch},
            **{"epoch_samples": EPOCH, "source": "counting", "end": end},
        )
        log = SampleLog(run_dir, rank, start)
        for _ in range(only[rank] if only else steps):
            ids = next(loader).sample_ids
            log.write(loader.step, order(ids))
        log.close()


def lines_of(run_dir, rank):
    return samples_path(run_dir, rank).read_text().splitlines(keepends=True)


def rewrite(run_dir, rank, change):
    """Put ``change(record)`` in place of each line of a log; None drops it."""
    records = (change(json.loads(line)) for line in lines_of(run_dir, rank))
    text = "".join(json.dumps(record) + "\n" for record in records if record is not None)
    samples_path(run_dir, rank).write_text(text)


@pytest.fixture
def elastic(tmp_path):
    """10 steps on 4 ranks, 10 on 2, 10 on 3."""
    for ranks, after in ((4, 0), (2, 10), (3, 20)):
        run_attempt(tmp_path, ranks, after, 10)
    return tmp_path


def test_4_then_2_then_3_ranks_train_on_each_sample_once(elastic, capsys):
    report = audit(elastic)
    assert (report.steps, report.last_step, report.first_sample, report.end_sample) == (30, 30, 0, 360)
    assert (report.repeated, report.skipped, report.problems, report.epochs_crossed) == (0, 0, (), 3)
    assert [(one.ranks, one.last, one.redone) for one in report.attempts] == [(4, 10, 0), (2, 20, 0), (3, 30, 0)]
    assert cli.main(["data", "audit", str(elastic)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 repeated, 0 skipped"
    assert cli.main(["data", "audit", str(elastic), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["steps"] == 30 and shown["attempts"][2]["ranks"] == 3 and shown["epochs_crossed"] == 3


def test_work_that_is_lost_is_no_data_that_is_lost(tmp_path):
    """Killed at step 13 with the last checkpoint at 10, then at 14 with none since, then at 26 while one rank logs."""
    run_attempt(tmp_path, 4, 0, 0, only=[13, 12, 13, 12])
    run_attempt(tmp_path, 2, 10, 0, only=[4, 4])
    run_attempt(tmp_path, 2, 10, 0, only=[0, 0])
    run_attempt(tmp_path, 3, 10, 0, only=[16, 15, 16])
    report = audit(tmp_path)
    assert (report.repeated, report.skipped, report.problems) == (0, 0, ())
    assert [(one.last, one.redone) for one in report.attempts] == [(10, 3), (10, 4), (10, 0), (25, 0)]
    assert report.steps == 25 and report.end_sample == 300


def test_a_run_that_is_set_back_counts_from_there(tmp_path):
    for after in (0, 10, 5):
        run_attempt(tmp_path, 2, after, 10)
    report = audit(tmp_path)
    assert [(one.last, one.redone) for one in report.attempts] == [(5, 5), (10, 10), (15, 0)]
    assert report.problems == () and report.steps == 15


def test_another_batch_size_goes_on_where_the_samples_stopped(tmp_path):
    run_attempt(tmp_path, 4, 0, 5, batch=8)
    run_attempt(tmp_path, 2, 5, 5, batch=12, sample=40)
    report = audit(tmp_path)
    assert (report.end_sample, report.problems) == (100, ()) and report.epochs_crossed == 0


def test_a_run_that_began_in_the_middle_counts_from_its_first_sample(tmp_path):
    run_attempt(tmp_path, 2, 50, 5)
    report = audit(tmp_path)
    assert (report.first_sample, report.end_sample, report.steps, report.problems) == (600, 660, 5, ())


def test_epochs_that_end_within_a_batch_are_whole(tmp_path):
    """Of the ninth step of twelve samples there are four, on four of six ranks; the next epoch starts after them."""
    run_attempt(tmp_path, 6, 0, 9, end=EPOCH)
    report = audit(tmp_path)
    assert (report.steps, report.end_sample, report.repeated, report.skipped, report.problems) == (9, EPOCH, 0, 0, ())
    assert json.loads(lines_of(tmp_path, 5)[-1])["ids"] == []
    run_attempt(tmp_path, 2, 9, 4, sample=EPOCH, end=2 * EPOCH)
    report = audit(tmp_path)
    assert (report.steps, report.end_sample, report.problems) == (13, 148, ())
    rewrite(tmp_path, 1, lambda record: None if record.get("step") == 9 else record)
    report = audit(tmp_path)
    assert report.skipped == 1 and "sample 97 skipped" in report.problems[1]
    assert report.problems[0] == "step 9 of attempt 0 was not logged by rank 1"


def replaced(step, old, new):
    """A change of the sample ``old`` of ``step`` into ``new``."""

    def change(record):
        if record.get("step") == step:
            ids = [number for part in record["ids"] for number in range(*part)]
            ids[ids.index(old)] = new
            record["ids"] = [[part.start, part.stop, part.step] for part in to_ranges(ids)]
        return record

    return change


def test_samples_that_are_repeated_and_skipped_are_named_with_their_steps(elastic, capsys):
    rewrite(elastic, 1, replaced(3, 29, 28))
    report = audit(elastic)
    assert (report.repeated, report.skipped) == (1, 1)
    assert report.problems == (
        "sample 28 repeated: step 3 of attempt 0 on rank 0, step 3 of attempt 0 on rank 1",
        "sample 29 skipped: near step 3 of attempt 0 on rank 0",
    )
    assert cli.main(["data", "audit", str(elastic)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 repeated, 1 skipped"


def test_a_batch_that_two_attempts_had_is_found(tmp_path):
    """The cursor of the second was saved one batch too early: it trains on the samples of step 10 again."""
    run_attempt(tmp_path, 4, 0, 10)
    run_attempt(tmp_path, 2, 10, 10, sample=108)
    report = audit(tmp_path)
    assert (report.repeated, report.skipped) == (12, 12)  # the last 12 of 240 did not come
    assert report.problems[0].startswith("samples 108 to 119 repeated: step 10 of attempt 0 on rank 0, step 11 of at")
    assert report.problems[1] == "samples 228 to 239 skipped: near step 20 of attempt 1 on rank 1"


def test_a_batch_that_no_attempt_had_is_found(tmp_path):
    """What a prefetching thread had taken was saved as done."""
    run_attempt(tmp_path, 4, 0, 10)
    run_attempt(tmp_path, 2, 10, 10, sample=144)
    report = audit(tmp_path)
    assert (report.repeated, report.skipped) == (0, 24)
    assert report.problems == ("samples 120 to 143 skipped: near step 10 of attempt 0 on rank 3",)


@pytest.mark.parametrize(
    ("drop", "problem"),
    [
        (lambda record: None if record.get("step") == 5 else record, "step 5 of attempt 0 was not logged by rank 3"),
        (
            lambda record: None if record.get("step", 0) in (8, 9, 10) else record,
            "steps 8 to 10 of attempt 0 were not logged by rank 3",
        ),
        (lambda record: None, "steps 1 to 10 of attempt 0 were not logged by rank 3"),
    ],
)
def test_a_line_that_is_missing_in_the_middle_is_found(elastic, drop, problem):
    rewrite(elastic, 3, drop)
    report = audit(elastic)
    assert report.problems[0] == problem and report.skipped and not report.repeated


def test_a_log_that_is_missing_is_found(elastic):
    samples_path(elastic, 1).unlink()
    assert audit(elastic).problems[:2] == (
        "steps 1 to 10 of attempt 0 were not logged by rank 1",
        "steps 11 to 20 of attempt 1 were not logged by rank 1",
    )


def test_an_attempt_without_a_start_is_found(elastic):
    rewrite(elastic, 0, lambda record: None if record["attempt"] == 2 else record)
    problems = audit(elastic).problems
    assert problems[0] == "attempt 2 has steps of rank 1 and no start on rank 0" and len(problems) == 2


def test_other_data_under_the_same_numbers_is_noted(elastic):
    rewrite(elastic, 0, lambda record: record | ({"source": "other"} if record.get("after") == 20 else {}))
    report = audit(elastic)
    assert report.problems == () and report.notes[0].startswith("attempt 2 read other data than attempt 1")


def test_the_order_of_the_samples_in_a_batch_does_not_matter(tmp_path):
    run_attempt(tmp_path, 2, 0, 6, order=lambda ids: random.Random(0).sample(ids, len(ids)))
    assert audit(tmp_path).problems == ()
    assert json.loads(lines_of(tmp_path, 1)[1]) == {"attempt": 0, "step": 1, "ids": [[1, 13, 2]]}


@pytest.mark.parametrize(
    ("ids", "ranges"),
    [
        ([], []),
        ([7], [range(7, 8)]),
        ([3, 1, 5, 7], [range(1, 9, 2)]),
        ([4, 4, 5], [range(4, 5), range(4, 6)]),
        ([0, 5, 6, 7, 20], [range(0, 10, 5), range(6, 8), range(20, 21)]),
    ],
)
def test_samples_are_few_ranges(ids, ranges):
    assert list(to_ranges(ids)) == ranges
    assert sorted(number for part in ranges for number in part) == sorted(ids)


@pytest.mark.parametrize("line", ["7", "[1]", '{"attempt": 1e999}', '{"attempt": "5"}', "[" * 60_000, "\udcff\x00"])
def test_a_damaged_line_of_the_sample_log_does_not_stop_the_next_attempt(line, tmp_path):
    path = samples_path(tmp_path, 0)
    path.parent.mkdir()
    path.write_bytes(f'{{"attempt": 3}}\n{{"attempt": 2}}\n{line}\n'.encode(errors="surrogateescape"))
    assert next_attempt(tmp_path) == 4  # a bit of the last number may have flipped: no number is used twice


def test_a_torn_line_is_told_and_the_next_attempt_begins_on_its_own(tmp_path):
    run_attempt(tmp_path, 2, 0, 4)
    path = samples_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-7])
    run_attempt(tmp_path, 2, 3, 4)
    report = audit(tmp_path)
    assert report.problems == () and report.notes == (f"{path}:5 cannot be read and is not counted",)
    assert [(one.attempt, one.last, one.redone) for one in report.attempts] == [(0, 3, 1), (1, 7, 0)]


NO_LINES = ['{"ids": 1}', "[]", "null", "{", '{"attempt":0,"step":1,"ids":[[0,9e30,1]]}', "\x00", '{"attempt":1}']
NO_LINES += ['{"attempt":0,"step":1,"ids":[[0,4611686018427387000,1]]}', '{"attempt":0,"step":1,"ids":[[0,4,0]]}']
NO_LINES += ['{"attempt":0,"step":"1","ids":[[0,4,1]]}', '{"attempt":[],"step":1,"ids":[[0,4,1]]}']


@pytest.mark.parametrize("line", NO_LINES)
def test_a_line_that_is_none_of_a_log_does_not_count(line, elastic):
    with samples_path(elastic, 0).open("a") as file:
        file.write(line + "\n")
    report = audit(elastic)
    assert report.problems == () and len(report.notes) == 1
    assert next_attempt(elastic) in (1, 2, 3)


def test_a_disk_that_fails_is_warned_of_once_and_ends_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sample_log._log.parent, "propagate", True)
    start = Attempt(attempt=0, after=0, sample=0, ranks=1, batch=2, epoch_samples=0, source="")
    log = SampleLog(tmp_path, 0, start)
    log.write(1, [0, 1])
    write = os.write
    with monkeypatch.context() as patch:
        failures = iter([OSError(errno.ENOSPC, "No space left on device"), None])

        def fail(file, line):
            if error := next(failures):
                raise error
            return write(file, line[:5])

        patch.setattr(sample_log.os, "write", fail)
        log.write(2, [2, 3])
        log.write(3, [4, 5])
    log.write(4, [6, 7])
    log.close()
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    report = audit(tmp_path)
    assert report.problems[0] == "steps 2 to 3 of attempt 0 were not logged by rank 0" and report.skipped == 4
    blocked = tmp_path / "file"
    blocked.write_text("")
    SampleLog(blocked, 0, start).write(1, [0])
    assert len(caplog.records) == 2


def test_a_rank_whose_data_another_one_logs_writes_nothing(tmp_path):
    SampleLog(
        tmp_path, None, Attempt(attempt=0, after=0, sample=0, ranks=1, batch=2, epoch_samples=0, source="")
    ).write(1, [0])
    assert list(tmp_path.iterdir()) == []


def test_a_stream_has_no_epochs_that_the_audit_knows(tmp_path):
    run_attempt(tmp_path, 1, 0, 2)
    rewrite(tmp_path, 0, lambda record: record | ({"epoch_samples": 0} if "after" in record else {}))
    assert audit(tmp_path).epochs_crossed is None


def test_many_steps_are_looked_at_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(audits, "_CHUNK", 50)
    run_attempt(tmp_path, 3, 0, 20)
    rewrite(tmp_path, 2, replaced(20, 230, 2))
    report = audit(tmp_path)
    assert (report.repeated, report.skipped, report.end_sample) == (1, 1, 240)


def test_a_folder_without_logs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no sample log"):
        audit(tmp_path)


def test_the_audit_needs_no_torch(elastic, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["data", "audit", str(elastic)]) == 0


MIXED = """
[training]
seq_len = 8
[data]
mix = [{ name = "a", path = "a", weight = 1 }, { name = "b", path = "b", weight = 1, on_end = "share" }]
stage = [{ from = 2, weights = { a = 3, b = 1 } }]
"""


def mixed_attempt(run_dir):
    """What two steps of a mixture leave. Returns its record."""
    plan = Plan(names=("a", "b"), sizes=(7, 9), limits=(0, 9), stops=(False, False), stages=((0, (1, 1)), (4, (3, 1))))
    walk = Walk(plan)
    start = Attempt(attempt=0, after=0, sample=0, ranks=1, batch=4, epoch_samples=0, source="mixture")
    sample_log.log_mixture(run_dir, 0, plan, walk.place)
    log = SampleLog(run_dir, 0, start)
    for step in (1, 2):
        log.write(step, range(4 * step - 4, 4 * step), walk.take(4)[0].tolist())
    log.close()
    (run_dir / "run.toml").write_text(MIXED)
    return json.loads((run_dir / "data" / "mixture.jsonl").read_text())


COLUMNS = ("names", "sizes", "weights", "before", "counts")
DAMAGED = [
    *(
        {name: value}
        for name in ("names", "sizes", "weights", "before", "counts")
        for value in ("x", [], [[], 1, 2], 3)
    ),
    *(
        {"stages": value}
        for value in ([], [[0, [1, "x"]]], [[0, [1]]], [[0, [1, 1.5]]], [["x", [1, 1]]], [[5, [1, 1]]])
    ),
    *({"first": value} for value in (None, -1, 1.5)),
    {"limits": [float("nan"), 0]},
    {"sizes": [0, 9]},
    {"weights": [None, 1]},
    {"before": [10**30, 0]},
    {"counts": [5, 0]},
]


def test_a_damaged_record_of_a_mixture_is_an_error_and_so_is_an_unknown_source(tmp_path):
    right = mixed_attempt(tmp_path)
    assert not audit(tmp_path).problems
    for damage in DAMAGED:
        (tmp_path / "data" / "mixture.jsonl").write_text(json.dumps(right | damage))
        with pytest.raises(DataError, match="cannot be read"):
            audit(tmp_path)
    (tmp_path / "data" / "mixture.jsonl").write_text(json.dumps(right))
    path = samples_path(tmp_path, 0)
    whole = path.read_text()
    path.write_text(whole.replace('"mix":{"0":3', '"mix":{"7":1,"0":3'))
    assert audit(tmp_path).problems == ("step 2 of attempt 0 on rank 0 has 1 sequences of 7, the schedule has 0",)
    path.write_text(whole.replace('"step":2', f'"step":{1 << 62}'))
    assert "cannot be read" in audit(tmp_path).notes[0]


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (("from = 2", "from = 3"), "other stages"),
        (("a = 3", "a = 2"), "other stages"),
        (('path = "a", weight = 1', 'path = "a", weight = 2'), "other stages"),
        (('name = "a"', 'name = "c"'), "other names"),
        (("share", "repeat"), "other limits"),
        (("share", "stop"), "other stops"),
        (("[data]", "[["), "run.toml has no mixture"),
        (("seq_len = 8", "seq_len = 0"), ""),
        (("mix =", "mix = 3\nold ="), "run.toml has no mixture"),
        (("mix =", "alpha = 1e308\nmix ="), "run.toml has no mixture"),
    ],
)
def test_a_mixture_is_that_of_run_toml(edit, problem, tmp_path):
    mixed_attempt(tmp_path)
    (tmp_path / "run.toml").write_text(MIXED.replace(*edit))
    problems = audit(tmp_path).problems
    assert any(problem in one for one in problems) == bool(problem), problems


def test_logs_that_end_before_the_run_are_a_problem(tmp_path):
    mixed_attempt(tmp_path)
    for steps, is_whole in ((2, True), (3, False)):
        (tmp_path / "summary.json").write_text(json.dumps({"steps": steps}))
        assert not audit(tmp_path).problems == is_whole


def test_a_later_attempt_of_a_mixture_may_have_other_sources_or_none(tmp_path):
    mixed_attempt(tmp_path)
    settings = 'mix = [{ name = "b", path = "b", on_end = "share" }, { name = "c", path = "c" }]'
    (tmp_path / "run.toml").write_text(f"[training]\nseq_len = 8\n[data]\n{settings}\nstage = []\nalpha = 0.0\n")
    plan = Plan(names=("b", "c"), sizes=(9, 5), limits=(9, 0), stops=(False, False), stages=((0, (1, 1)),))
    walk = Walk(plan, opened(plan, 8, (3, 0)))
    sample_log.log_mixture(tmp_path, 1, plan, walk.place)
    for attempt in (1, 2):
        after = attempt + 1
        log = SampleLog(
            tmp_path,
            0,
            Attempt(attempt=attempt, after=after, sample=4 * after, ranks=1, batch=4, epoch_samples=0, source="other"),
        )
        log.write(after + 1, range(4 * after, 4 * after + 4), walk.take(4)[0].tolist() if attempt == 1 else None)
        log.close()
        assert not audit(tmp_path).problems
