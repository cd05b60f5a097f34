"""What a run reports: the records, where they go, and the sums in them."""

import dataclasses
import functools
import io
import itertools
import json
import logging
import os
import pty
import re
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import torch

import crius
from crius.config.layout import Layout
from crius.config.operation import MetricsConfig
from crius.data.loader import IGNORE_INDEX, Batch
from crius.launch.environment import single_placement
from crius.metrics import device as devices
from crius.metrics import sinks as sink_file
from crius.metrics.ledger import TimeLedger
from crius.metrics.record import StepMetrics, ValidationMetrics
from crius.metrics.sinks import ConsoleSink, JsonlSink, build_sinks
from crius.parallel.runtime import World
from crius.train.reports import Meter, Pace, Recovery
from crius.train.state import TrainState
from crius.train.step import StepResult, largest_loss

STEP = StepMetrics(
    step=120,
    loss=3.52861,
    grad_norm=0.4121,
    lr=3e-4,
    tokens=245_760,
    tokens_per_second=23_684.0,
    tokens_per_second_per_rank=11_842.0,
    mfu=0.413,
    tflops=408.6,
    step_seconds=0.25,
    data_seconds=0.001,
    memory_gib=61.2,
)
VALIDATION = ValidationMetrics(
    step=120, val_loss=2.5, val_perplexity=12.182, val_bits_per_byte=1.25, val_samples=128, val_seconds=3.21
)
ESCAPE = "\x1b"


def test_records_have_the_fields_that_scripts_rely_on():
    assert [field.name for field in dataclasses.fields(StepMetrics)] == [
        *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "tokens_per_second_per_rank"),
        *("mfu", "tflops", "step_seconds", "data_seconds", "memory_gib", "skipped_steps", "rolled_back_steps"),
        *("goodput", "max_loss", "max_active_gib", "max_reserved_gib", "num_alloc_retries", "num_ooms"),
        *("load_max_over_mean", "load_entropy", "dead_experts", "aux_loss", "sources"),
    ]
    names = {field.name for field in dataclasses.fields(ValidationMetrics)}
    assert names >= {"step", "val_loss", "val_perplexity", "val_bits_per_byte"}
    assert "loss" not in names  # its absence is how a reader tells the two apart


def test_jsonl_is_flushed_at_once_and_at_full_precision(tmp_path):
    sink = JsonlSink(tmp_path)
    third = dataclasses.replace(STEP, loss=1 / 3, mfu=None, sources={"loss/web": 0.1})
    sink.write(third)
    sink.write(VALIDATION)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close
    validation = dataclasses.asdict(VALIDATION)
    assert validation.pop("val_set") == ""  # the only set needs no name
    step = dataclasses.asdict(third)
    assert step.pop("sources") == {"loss/web": 0.1}
    assert [json.loads(line) for line in lines] == [step | {"loss/web": 0.1}, validation]
    sink.close()


def test_jsonl_goes_on_after_the_step_of_a_resume_and_keeps_what_was_lost(tmp_path):
    before = [json.dumps({"step": step, "loss": float(step)}) for step in (1, 2, 3, 4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(before) + '\n{"step": 5, "lo')  # killed while it wrote
    sink = JsonlSink(tmp_path, resumed_step=2)
    sink.write(dataclasses.replace(STEP, step=3))
    sink.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert (tmp_path / "metrics.lost.jsonl").read_text().splitlines() == [*before[2:], '{"step": 5, "lo']
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.lost.jsonl"]


def test_jsonl_keeps_the_files_of_earlier_runs(tmp_path):
    for run in (1, 2, 3):
        sink = JsonlSink(tmp_path)
        sink.write(dataclasses.replace(STEP, step=run))
        sink.close()
    steps = {path.name: json.loads(path.read_text())["step"] for path in tmp_path.iterdir()}
    assert steps == {"metrics.jsonl": 3, "metrics.1.jsonl": 1, "metrics.2.jsonl": 2}


def console_lines(caplog, *records, steps=10_000, total=None):
    sink = ConsoleSink(steps, total, show_bar=True)  # standard output is captured: not a terminal
    with caplog.at_level(logging.INFO, logger="crius.metrics"):
        for record in records:
            sink.write(record)
    sink.close()
    return caplog.messages


def test_step_line_is_one_aligned_fact_line_with_units(caplog):
    (line,) = console_lines(caplog, STEP, total=79.6)
    assert line == (
        "step   120/10000  loss 3.5286  grad_norm 0.412  lr 3.0e-04  tokens/s/rank 11,842  mfu 41.3%  "
        "mem 61.20/80 GiB  data 0.4%"
    )


def test_any_bit_of_metrics_jsonl_may_flip_and_a_resume_moves_the_damaged_line_aside(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("crius"), "propagate", True)
    lines = [json.dumps({"step": step, "loss": 1.0 / step}) + "\n" for step in (1, 2, 3)]
    path, lost = tmp_path / "metrics.jsonl", tmp_path / "metrics.lost.jsonl"
    data = "".join(lines).encode()
    for at in range(len(data)):
        for bit in range(8):
            path.write_bytes(flipped := data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
            lost.unlink(missing_ok=True)
            caplog.clear()
            JsonlSink(tmp_path, resumed_step=3).close()
            kept = path.read_bytes()
            assert all(isinstance(json.loads(line)["step"], int) for line in kept.splitlines())
            assert lines[2].encode() in kept or at >= len("".join(lines[:2])) - 1
            gone = lost.read_bytes() if lost.exists() else b""
            assert len(kept + gone) in (len(flipped), len(flipped) + 1)  # a last line gets its end
            assert bool(gone) >= bool(caplog.text)
            if gone and b'"step": ' not in gone:
                assert "moved to metrics.lost.jsonl" in caplog.text


@pytest.mark.parametrize("end", [b"\x0b", b""])
def test_a_last_record_without_its_end_of_line_is_kept(end, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}' + end)
    JsonlSink(tmp_path, resumed_step=2).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("line", ["7", "[1]", "null", '"x"', "[" * 100_000, '{"step": true}', '{"step": "1"}', "{}"])
def test_a_line_of_metrics_jsonl_that_is_no_record_is_moved_aside(line, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    JsonlSink(tmp_path, resumed_step=2).close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (tmp_path / "metrics.lost.jsonl").read_text() == f"{line}\n"


def test_step_line_counts_lost_steps_once_there_are_any(caplog):
    (line,) = console_lines(
        caplog, dataclasses.replace(STEP, num_alloc_retries=3, skipped_steps=2, rolled_back_steps=7)
    )
    assert line.endswith("  data 0.4%  alloc_retries 3  skipped 2  rolled_back 7")


def test_step_line_says_what_is_not_known(caplog):
    (line,) = console_lines(caplog, dataclasses.replace(STEP, mfu=None), steps=120)
    assert line.startswith("step 120/120  loss ")
    assert "  mfu n/a  mem 61.20 GiB  " in line


def test_validation_line_is_told_apart_by_its_first_word(caplog):
    (line,) = console_lines(caplog, VALIDATION)
    assert line == (
        "validation at step 120  loss 2.5000  perplexity 12.182  bits_per_byte 1.2500  (128 samples, 3.2 s)"
    )


PROGRAM = """
from pathlib import Path
import sys
from crius.metrics.record import StepMetrics, ValidationMetrics
from crius.metrics.sinks import ConsoleSink
from crius.train.setup import log, start_logging
start_logging(0, Path(sys.argv[1]), is_own_file=False)
log.info("data: " + "many words, " * 12 + "and an end")
sink = ConsoleSink(3, None, show_bar=sys.argv[2] == "bar")
for step in (1, 2, 3):
    sink.write(StepMetrics(step=step, loss=3.5, grad_norm=0.4, lr=3e-4, tokens=1, tokens_per_second=23684.0,
        tokens_per_second_per_rank=11842.0, mfu=None, tflops=1.0, step_seconds=0.5, data_seconds=0.0, memory_gib=1.0,
        load_max_over_mean=1.5, dead_experts=0.0))
sink.write(ValidationMetrics(step=3, val_loss=2.5, val_perplexity=12.182, val_bits_per_byte=1.25, val_samples=128,
    val_seconds=3.21, val_set="books"))
sink.close()
"""


def on_terminal(run_dir, show_bar, columns=200, **environ):
    """What three steps and a validation put on a terminal."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (40, columns))
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    root = str(Path(crius.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(run_dir), "bar" if show_bar else ""],
        stdout=follower,
        env={**kept, "PYTHONPATH": root, "TERM": "xterm-256color", **environ},
    )
    os.close(follower)
    text = b""
    try:
        while part := os.read(leader, 65536):
            text += part
    except OSError:  # how Linux says that the other end has closed
        pass
    os.close(leader)
    assert process.wait(timeout=60) == 0
    return text.decode()


@pytest.mark.long
def test_a_pipe_gets_plain_lines(tmp_path):
    root = str(Path(crius.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "bar"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": root, "FORCE_COLOR": "1"},
    )
    assert ESCAPE not in done.stdout and "\r" not in done.stdout
    assert [line[:8] for line in done.stdout.splitlines()] == [
        "data: ma",
        "step 1/3",
        "step 2/3",
        "step 3/3",
        "validati",
    ]


COLOUR = re.compile(ESCAPE + r"\[[0-9;]*(3[0-8]|4[0-8]|9[0-7])[0-9;]*m")


@pytest.mark.long
def test_a_terminal_gets_a_bar_and_whole_lines_above_it(tmp_path):
    text = on_terminal(tmp_path, show_bar=True)
    assert COLOUR.search(text)
    assert "left" in text
    for step in (1, 2, 3):
        assert f"step {step}/3  loss 3.5000  grad_norm 0.400  lr 3.0e-04  tokens/s/rank 11,842  mfu n/a" in text
    log = (tmp_path / "logs" / "rank-0.log").read_text()
    assert ESCAPE not in log and log.count("\n") == 5


@pytest.mark.long
@pytest.mark.parametrize(
    ("columns", "step", "validation", "live"),
    [
        (
            80,
            "step 1/3  loss 3.5000  grad_norm 0.400  lr 3.0e-04  tokens/s/rank 11,842",
            "validation of books at step 3  loss 2.5000  perplexity 12.182",
            "step 3/3  0:00:00  loss 3.5000  tokens/s 23,684  left 0:00:00",
        ),
        (
            50,
            "step 1/3  loss 3.5000  tokens/s/rank 11,842",
            "validation of books at step 3  loss 2.5000",
            "step 3/3  0:00:00  loss 3.5000  left 0:00:00",
        ),
    ],
)
def test_a_narrow_terminal_gets_step_lines_with_fewer_fields_and_folds_other_lines(
    columns, step, validation, live, tmp_path
):
    text = on_terminal(tmp_path, show_bar=True, columns=columns)
    lines = re.split(r"[\r\n]+", re.sub(ESCAPE + r"\[[0-9;?]*[a-zA-Z]", "", text))
    assert max(map(len, lines)) <= columns
    assert {step, validation, live} <= {line.rstrip() for line in lines}
    folded = [line for line in lines if "many words" in line]
    assert len(folded) > 1 and all(line.startswith("    ") for line in folded[1:])
    log = (tmp_path / "logs" / "rank-0.log").read_text().splitlines()
    assert log[0].startswith("data: ") and log[0].endswith("and an end")
    assert log[1].endswith("mfu n/a  mem 1.00 GiB  data 0.0%  load 1.50  dead 0")  # files have whole lines
    assert log[4].endswith("bits_per_byte 1.2500  (128 samples, 3.2 s)")


def test_the_remaining_time_is_known_though_records_are_minutes_apart(monkeypatch):
    clock = itertools.count(0, 60.0)
    now = [next(clock)]
    console = functools.partial(sink_file.Console, file=io.StringIO(), force_terminal=True, get_time=lambda: now[0])
    monkeypatch.setattr(sink_file, "Console", console)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    sink = ConsoleSink(100, None, show_bar=True)
    try:
        for step in (10, 20, 30):
            now[0] = next(clock)
            sink.write(dataclasses.replace(STEP, step=step))
        assert sink._bar.tasks[0].time_remaining == pytest.approx(7 * 60, abs=1)
    finally:
        sink.close()


@pytest.mark.long
def test_no_color_leaves_a_terminal_without_colours(tmp_path):
    assert not COLOUR.search(on_terminal(tmp_path, show_bar=True, NO_COLOR="1"))


@pytest.mark.long
def test_without_the_bar_a_terminal_gets_plain_lines(tmp_path):
    text = on_terminal(tmp_path, show_bar=False)
    assert ESCAPE not in text
    assert text.count("\n") == 5


def test_tensorboard_has_torchtitans_tags_and_reads_back(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sinks = build_sinks(MetricsConfig(enable_tensorboard=True), tmp_path, 120, 80.0)
    more = {"max_loss": 3.75, "max_active_gib": 62.0, "max_reserved_gib": 68.0, "num_alloc_retries": 3, "num_ooms": 1}
    for sink in sinks:
        sink.write(dataclasses.replace(STEP, **more))
        sink.write(VALIDATION)
        sink.write(dataclasses.replace(VALIDATION, val_set="books", val_loss=2.25))
        sink.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    found = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    want = {
        "loss_metrics/global_avg_loss": 3.52861,
        "grad_norm": 0.4121,
        "lr": 3e-4,
        "n_tokens_seen": 245_760,
        "throughput(tps)": 11_842.0,
        "tflops": 408.6,
        "mfu(%)": 41.3,
        "time_metrics/end_to_end(s)": 0.25,
        "time_metrics/data_loading(s)": 0.001,
        "time_metrics/data_loading(%)": 0.4,
        "memory/max_active(GiB)": 62.0,
        "memory/max_active(%)": 77.5,
        "memory/max_reserved(GiB)": 68.0,
        "memory/max_reserved(%)": 85.0,
        "memory/num_alloc_retries": 3.0,
        "memory/num_ooms": 1.0,
        "loss_metrics/global_max_loss": 3.75,
        "goodput": 0.0,
        "validation_metrics/loss": 2.5,
        "validation_metrics/perplexity": 12.182,
        "validation_metrics/bits_per_byte": 1.25,
        "validation_metrics/books/loss": 2.25,
        "validation_metrics/books/perplexity": 12.182,
        "validation_metrics/books/bits_per_byte": 1.25,
    }
    # event files hold float32
    assert found == {tag: [(120, pytest.approx(value, rel=1e-6))] for tag, value in want.items()}
    assert not (tmp_path / "tb" / "metrics.jsonl").exists() and (tmp_path / "metrics.jsonl").exists()


def test_a_record_names_its_validation_set_where_there_are_several(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    sinks = build_sinks(MetricsConfig(), tmp_path, 120, None)
    for sink in sinks:
        sink.write(VALIDATION)
        sink.write(dataclasses.replace(VALIDATION, val_set="books"))
        sink.close()
    alone, named = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert "val_set" not in alone and named == alone | {"val_set": "books"}
    first, second = (line for line in caplog.messages if line.startswith("validation"))
    assert first.startswith("validation at step 120  loss 2.5000")
    assert second == first.replace("validation at", "validation of books at")


def test_the_largest_loss_is_the_mean_of_one_rank_over_its_own_tokens():
    """Rank 0: 3 tokens, 6 nats together; rank 1: 1 token, 5 nats. Their means are 2 and 5, that of all is 11 / 4."""

    class Pair(World):
        def gather(self, values):
            return torch.stack((values, torch.tensor([5 / 4, 1.0], dtype=torch.float64)))

    labels = torch.tensor([[1, 2, 3, IGNORE_INDEX]])
    batch = Batch(labels, labels, labels, (0,))
    shares = torch.tensor([4 / 4, 2 / 4], dtype=torch.float64)  # two microbatches
    result = StepResult(step=1, loss=shares, grad_norm=shares, local_losses=shares, squared_norms=shares, sample_ids=())
    layout = Layout(dp_shard=2)
    assert largest_loss(result, batch, Pair(0, 2, torch.device("cpu")), layout).item() == 5.0


def test_tensorboard_is_written_only_when_asked(tmp_path):
    for sink in build_sinks(MetricsConfig(), tmp_path, 120, None):
        sink.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def spend(clock, ledger, **seconds):
    for name, amount in seconds.items():
        with ledger.phase(name):
            clock[0] += amount


def test_phases_and_the_rest_add_up_to_the_wall_time(clock):
    ledger = TimeLedger(started=97.5)
    spend(clock, ledger, initialise=4)
    for _ in range(3):
        spend(clock, ledger, compute=2)
        clock[0] += 0.5  # in no phase
    with pytest.raises(KeyError), ledger.phase("compute"):
        clock[0] += 1
        raise KeyError
    assert ledger.seconds == {"initialise": 6.5, "compute": 7.0}
    assert ledger.wall() == 2.5 + 4 + 3 * 2.5 + 1
    assert ledger.summary() == "15.0 s = initialise 6.5 + compute 7.0 + other 1.5; goodput 46.7%"


def test_the_ledger_of_a_run_that_failed_goes_on_with_what_was_lost_and_down(clock, tmp_path):
    first = TimeLedger(started=100.0)
    first.mirror_to(tmp_path / "ledger.json")
    spend(clock, first, initialise=5, compute=10, save_blocked=1)
    saved = dict(first.seconds)
    spend(clock, first, compute=7, data=2)
    clock[0] += 3  # into the step that failed
    failed_at = clock[0]
    clock[0] += 4
    second = TimeLedger(started=100.0)
    second.take_over(tmp_path / "ledger.json", failed_at)
    spend(clock, second, initialise=6)
    second.lose(saved)
    spend(clock, second, compute=20)
    expected = {"initialise": 11, "compute": 30, "save_blocked": 1, "lost": 7 + 2 + 3, "down": 4, "data": 0}
    assert second.seconds == expected
    assert sum(second.parts().values()) == second.wall() == 58
    assert second.goodput() == 30 / 58


def test_a_recovery_is_told_once_with_the_step_that_the_failed_attempt_had_not_finished(clock, tmp_path):
    (tmp_path / "attempts.json").write_text(json.dumps([{"step": 7, "failed": 100.0, "ended": 101.0}]))
    placement = dataclasses.replace(single_placement(), attempt=1, scratch=tmp_path, log_dir=tmp_path)
    clock[0] = 103.0
    recovery = Recovery(placement, TimeLedger(started=90.0))
    clock[0] = 108.0
    recovery.resumed({}, step=4)
    recovery.ready()
    for step in (5, 6, 7, 8):
        clock[0] += 2
        recovery.step(step)
    [line] = (tmp_path / "recoveries.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "attempt": 1,
        "step": 7,
        "seconds": 14.0,
        "process_seconds": 3.0,
        "load_seconds": 5.0,
        "steps_again": 2,
        "goodput": 0.0,
    }


PEAKS = [
    ("NVIDIA H100 80GB HBM3", 989.4),
    ("NVIDIA H100 PCIe", 756.0),
    ("NVIDIA H100 NVL", 835.0),
    ("NVIDIA H200", 989.4),
    ("NVIDIA B200", 2250.0),
    ("NVIDIA A100-SXM4-80GB", 312.0),
    ("NVIDIA GB200", 2500.0),
    ("NVIDIA H20", 148.0),
    ("NVIDIA H800", 989.4),
    ("NVIDIA H800 PCIe", 756.0),
    ("NVIDIA H200 NVL", 835.0),
    ("NVIDIA A800 80GB PCIe", 312.0),
    ("NVIDIA A10G", 70.0),
    ("NVIDIA L4", 121.0),
    ("NVIDIA RTX A6000", 154.8),
    ("NVIDIA L40S", 362.0),
    ("NVIDIA GeForce RTX 4090", 165.2),
    ("AMD Instinct MI300X", 1307.4),
    ("AMD Instinct MI250X / MI250", 191.5),
    ("NVIDIA T4", None),
]


@pytest.mark.parametrize(("name", "peak"), PEAKS)
def test_peak_is_the_dense_bf16_figure_of_the_device(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert devices.peak_tflops(torch.device("cuda", 0)) == peak


def test_a_cpu_has_no_peak_and_no_memory_limit_but_a_resident_set():
    cpu = torch.device("cpu")
    assert devices.peak_tflops(cpu) is None and devices.total_memory_gib(cpu) is None
    assert 0.05 < devices.peak_memory(cpu)["memory_gib"] < 100  # GiB: torch alone is more than 50 MiB


def test_rates_and_mfu_are_over_the_steps_since_the_last_report():
    """3 steps of 2048 tokens in 0.5 s on 4 ranks, at 2 GFLOP a token against a peak of 4 TFLOP/s."""
    world = World(rank=0, size=4, device=torch.device("cpu"))
    meter = Meter(flops_per_token=2e9, peak_tflops=4.0, world=world)
    state = TrainState(parts=[], optimizer=None, schedule=None, step=7, tokens=14_336)
    for _ in range(3):
        meter.count(2048, 0.5, 0.125)
    record = meter.report(state, 1e-3, 0.5, {"loss": 3.5, "grad_norm": 0.25})
    assert (record.step, record.tokens, record.loss, record.grad_norm, record.lr) == (7, 14_336, 3.5, 0.25, 1e-3)
    assert record.tokens_per_second == 3 * 2048 / 1.5
    assert record.tokens_per_second_per_rank == 1024.0
    assert record.tflops == pytest.approx(1024 * 2e9 / 1e12, rel=1e-12)  # float64 rounding
    assert record.mfu == pytest.approx(2.048 / 4, rel=1e-12)
    assert (record.step_seconds, record.data_seconds) == (0.5, 0.125)
    meter.count(2048, 2.0, 0.0)
    assert meter.report(state, 1e-3, 0.5, {"loss": 3.5, "grad_norm": 0.25}).tokens_per_second == 1024.0


def test_mfu_is_unknown_without_a_peak():
    meter = Meter(flops_per_token=2e9, peak_tflops=None, world=World(0, 1, torch.device("cpu")))
    meter.count(2048, 0.5, 0.0)
    assert meter.report(TrainState(None, None, None), 1.0, 0.5, {"loss": 1.0, "grad_norm": 1.0}).mfu is None


def test_a_phase_may_last_three_times_the_slowest_step_but_one_of_a_hundred():
    pace = Pace("cpu")
    for _ in range(2):
        pace.count(1000.0)  # they compile
    for seconds in range(1, 8):
        pace.count(seconds)
    assert pace.limit_seconds() == 0.0
    for seconds in range(8, 101):
        pace.count(seconds)
    assert pace.limit_seconds() == 3 * 99
