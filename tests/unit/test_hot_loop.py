"""What the loop costs beside forward, backward and update: no wait for the device, reports late, no idle wrapper."""

import dataclasses
import functools
import hashlib
import json
import math
import time
import types

import pytest
import torch
from harness import SMALL, llama, parse, read_metrics, run_job, steps_of
from mixture_samples import mixture_flags
from torch.utils._python_dispatch import TorchDispatchMode

from crius.data.loader import BatchLoader
from crius.errors import DataError, SpikeError
from crius.kernels import linear_cross_entropy
from crius.kernels.choice import applied, current
from crius.launch.environment import single_placement
from crius.launch.local import run_workers
from crius.launch.status import status
from crius.models import registry
from crius.parallel import apply
from crius.parallel.allocate import allocate
from crius.parallel.gradients import Gradients
from crius.shards import local_tensor, named_parameters
from crius.train import job, loop, reports
from crius.train.checkpoints import Checkpoints
from crius.train.guard import UpdateGuard
from crius.train.loop import Loop
from crius.train.step import Late

TINY = [*SMALL, "--model.num_layers", "2", "--validation.interval", "0"]
# whose result the host reads, or whose shape depends on the numbers: on a GPU it waits for them
WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "_unique2", "unique_dim")
PLANTED = 4


def run(target, flags, run_dir):
    """``target`` as a forked worker, with a config, a folder and the start."""
    run_dir.mkdir(exist_ok=True)
    assert run_workers(functools.partial(target, parse(flags), run_dir, time.monotonic()), 1, run_dir) == 0


class Waits(TorchDispatchMode):
    """The operators that would make the host wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in WAITS:
            self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def count_waits(config, run_dir, started, placement):
    found, step_of, update, tolist, clip = {}, Loop._step, UpdateGuard.update, torch.Tensor.tolist, Gradients.clip

    def step(loop):
        with Waits() as waits:
            torch.Tensor.tolist = lambda tensor: waits.found.append("tolist") or tolist(tensor)
            step_of(loop)
            torch.Tensor.tolist = tolist
        found[loop.state.step] = waits.found

    def update_late(guard, result):  # as with an optimizer on a GPU, which leaves out a bad update by itself
        guard._looks_late = True
        update(guard, result)

    def clip_and_look(gradients, norm, max_norm):
        if len(found) + 1 == PLANTED:
            norm.item()
        clip(gradients, norm, max_norm)

    Loop._step, UpdateGuard.update, Gradients.clip = step, update_late, clip_and_look
    linear_cross_entropy._scored = lambda labels, chunks: None  # as on a GPU, where nobody counts labels
    run_job(config, run_dir, started, placement)
    (run_dir / "waits.json").write_text(json.dumps(found))


@pytest.mark.parametrize("data", ["one corpus", "a mixture"])
def test_a_step_that_reports_nothing_waits_for_the_device_once_and_for_the_step_before(data, tmp_path):
    """The one wait is the guard's look at the last result; of ``PLANTED`` one more is found."""
    flags = TINY if data == "one corpus" else [*mixture_flags(tmp_path / "data"), "--validation.interval", "0"]
    run(count_waits, [*flags, "--training.steps", "6", "--metrics.log_interval", "6"], tmp_path)
    waits = json.loads((tmp_path / "waits.json").read_text())
    assert {step: waits[step] for step in "345"} == {  # 2 writes the report of 1
        **dict.fromkeys("35", ["tolist"]),
        str(PLANTED): ["_local_scalar_dense", "tolist"],
    }


def report_late(config, run_dir, started, placement):
    """Numbers arrive when the host waits for them, as on a GPU that is behind."""
    read, save, seen = Late.read, Checkpoints.save, {}

    def late_read(late):
        late.was_read = True
        return read(late)

    def late_save(checkpoints, *args, **kwargs):
        seen[checkpoints._parts.state.step] = len(steps_of(read_metrics(run_dir)))
        return save(checkpoints, *args, **kwargs)

    Late.read, Late.has_arrived, Checkpoints.save = late_read, lambda late: hasattr(late, "was_read"), late_save
    run_job(config, run_dir, started, placement)
    (run_dir / "seen.json").write_text(json.dumps(seen))


def test_reports_whose_numbers_come_late_say_the_same_and_are_there_when_the_run_is_saved(tmp_path):
    flags = [*TINY, "--training.steps", "5", "--metrics.log_interval", "1", "--checkpoint.interval", "3"]
    run(run_job, flags, tmp_path / "soon")
    begin = time.monotonic()
    run(report_late, flags, tmp_path / "late")
    wall = time.monotonic() - begin
    soon, late = (steps_of(read_metrics(tmp_path / name)) for name in ("soon", "late"))
    for name in ("step", "loss", "grad_norm", "lr", "tokens"):
        assert [record[name] for record in late] == [record[name] for record in soon]
    assert [record["step"] for record in late] == [1, 2, 3, 4, 5]
    assert 0 < sum(record["step_seconds"] for record in late) < wall
    assert json.loads((tmp_path / "late" / "seen.json").read_text()) == {"3": 3, "5": 5}


BAD_STEP = 3
GAP, VALIDATION = 1_000.0, 1_000_000.0  # seconds: what else passes is nothing beside them


def be_a_gpu(looks):
    """Look at results late; numbers are there when they were waited for, or at the look after ``looks`` others."""
    read, update = Late.read, UpdateGuard.update

    def late_read(late):
        late.looks = math.inf
        return read(late)

    def has_arrived(late):
        late.looks = getattr(late, "looks", 0) + 1
        return late.looks > looks

    def update_late(guard, result):
        guard._looks_late = True
        update(guard, result)

    Late.read, Late.has_arrived, UpdateGuard.update = late_read, has_arrived, update_late


def end_badly(config, run_dir, started, placement, end, looks):
    be_a_gpu(looks)
    update, train_step, next_batch = UpdateGuard.update, loop.train_step, BatchLoader.__next__

    def step(number, *args):
        result = train_step(number, *args)
        is_bad = "nan" in end and number == BAD_STEP
        return dataclasses.replace(result, loss=result.loss * torch.nan) if is_bad else result

    def batch(loader):
        if "data" in end and status.step == BAD_STEP + 1:
            raise DataError("the disk is gone.", why="for a test", fix="none")
        return next_batch(loader)

    def spike(guard, result):
        if end == "spike" and result.step == BAD_STEP:
            raise SpikeError("a spike.", why="for a test", fix="none")
        update(guard, result)

    UpdateGuard.update, loop.train_step, BatchLoader.__next__ = spike, step, batch
    run_job(config, run_dir, started, placement)


def reports_of_a_bad_end(run_dir, end, looks):
    config = parse([*TINY, "--training.steps", "6", "--metrics.log_interval", "1"])
    target = functools.partial(end_badly, config, run_dir, time.monotonic(), end=end, looks=looks)
    assert run_workers(target, 1, run_dir) == 1
    return steps_of(read_metrics(run_dir))


@pytest.mark.parametrize("looks", [0, 2], ids=["arrived", "on_its_way"])
@pytest.mark.parametrize(
    ("end", "reported"), [("spike", [1, 2]), ("nan", [1, 2]), ("nan_then_data", [1, 2]), ("data", [1, 2, 3])]
)
def test_a_run_that_ends_badly_reports_its_last_healthy_step_and_no_broken_one(end, reported, looks, tmp_path):
    """Whether the numbers of a step were there when it was over changes nothing."""
    records = reports_of_a_bad_end(tmp_path, end, looks)
    assert [record["step"] for record in records] == reported
    assert all(math.isfinite(record["loss"]) for record in records)


def test_an_error_is_raised_although_the_numbers_of_the_last_step_never_come(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(reports, "RESCUE_SECONDS", 0.05)
    assert [record["step"] for record in reports_of_a_bad_end(tmp_path, "data", looks=1_000_000)] == [1, 2]
    assert "DataError: the disk is gone." in capfd.readouterr().err


def pass_time(config, run_dir, started, placement, is_gpu):
    """``GAP`` passes between steps, ``VALIDATION`` in a validation."""
    if is_gpu:
        be_a_gpu(looks=2)
    passed, step_of, evaluate = [0.0], Loop._step, loop.evaluate

    def step(own):
        step_of(own)
        passed[0] += GAP

    def validate(*args):
        passed[0] += VALIDATION
        return evaluate(*args)

    reports.time = loop.time = types.SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    Loop._step, loop.evaluate = step, validate
    run_job(config, run_dir, started, placement)


@pytest.mark.parametrize(
    ("is_gpu", "interval", "gaps"),
    [
        (False, 1, [0, 0, 0, 0, 0]),
        # a gap belongs to the step that the device computes in it; after the last step it does nothing
        (True, 1, [1, 1, 1, 1, 0]),
        (True, 5, [1, 3 / 4]),
    ],
    ids=["at_once", "late", "late_and_rarely"],
)
def test_the_time_of_a_step_has_what_the_host_does_while_the_device_computes(is_gpu, interval, gaps, tmp_path):
    flags = [*TINY, "--training.steps", "5", "--metrics.log_interval", str(interval), "--validation.interval", "2"]
    run(functools.partial(pass_time, is_gpu=is_gpu), flags, tmp_path)
    seconds = [record["step_seconds"] / GAP for record in steps_of(read_metrics(tmp_path))]
    assert seconds == pytest.approx(gaps, abs=0.1)  # 100 s for the steps themselves


def keep_weights(config, run_dir, started, placement, wrapped):
    """Train, with FSDP whatever the layout if ``wrapped``; a hash of the weights goes to ``weights``."""
    step_of, needs = Loop._step, apply.needs_fsdp
    asked = []

    def step(loop):
        step_of(loop)
        digest = hashlib.sha256()
        for _, parameter in named_parameters(loop.state.parts):
            digest.update(local_tensor(parameter).contiguous().view(torch.uint8).numpy().tobytes())
        (run_dir / "weights").write_text(digest.hexdigest())

    def needs_fsdp(layout, config):
        asked.append(needs(layout, config))
        return wrapped or asked[-1]

    Loop._step, apply.needs_fsdp = step, needs_fsdp
    run_job(config, run_dir, started, placement)
    assert asked == [False]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        # gradients in bfloat16, accumulated in it
        [
            *("--training.mixed_precision_param", "bfloat16", "--training.dtype", "bfloat16"),
            *("--training.local_batch_size", "8"),
        ],
    ],
    ids=["float32", "bfloat16_accumulated"],
)
@pytest.mark.long
def test_one_rank_without_fsdp_trains_to_the_bits_of_one_with_it(flags, tmp_path):
    found = {}
    for name, wrapped in (("plain", False), ("wrapped", True)):
        target = functools.partial(keep_weights, wrapped=wrapped)
        run(target, [*TINY, "--training.steps", "3", *flags], tmp_path / name)
        records = steps_of(read_metrics(tmp_path / name))
        found[name] = ((tmp_path / name / "weights").read_text(), [(r["loss"], r["grad_norm"]) for r in records])
    assert found["plain"] == found["wrapped"]


def test_memory_for_a_model_keeps_its_weights_tied():
    sizes = {"dim": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 32, "vocab_size": 16, "num_layers": 1}
    facts = llama("1b", **sizes)
    with torch.device("meta"):
        model = registry.build(facts)
    allocate(model, "cpu")
    assert model.output.weight is model.tok_embeddings.weight and not model.output.weight.is_meta
    assert sum(parameter.numel() for parameter in model.parameters()) == facts.num_parameters


@pytest.mark.parametrize(
    "flags",
    [
        ["--training.mixed_precision_param", "bfloat16"],
        ["--parallelism.data_parallel_shard_degree", "2"],
        ["--training.reproducible"],
        ["--training.enable_cpu_offload"],
        ["--sdc.recompute_interval", "1"],
        ["--training.mixed_precision_reduce", "bfloat16"],
        [
            *("--training.gradient_sync", "deferred", "--training.dtype", "bfloat16"),
            *("--training.mixed_precision_param", "bfloat16"),
        ],
    ],
    ids=lambda flags: flags[0].rpartition(".")[2],
)
def test_what_casts_splits_sums_or_shows_needs_fsdp(flags):
    config = parse([*TINY, *flags])
    ranks = config.parallelism.total_ranks(1)
    assert apply.needs_fsdp(job.Layout.of(config.parallelism, ranks), config)


@pytest.mark.parametrize(("asked", "told"), [("same", False), ("other", True)])
def test_threads_are_set_only_where_torch_has_another_number(asked, told, monkeypatch, tmp_path):
    """Setting them, to the same number too, slows small matmuls down (docs/LOG.md)."""
    threads = torch.get_num_threads() + (asked == "other")
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    with applied(current()):
        job.set_up_torch(parse(TINY), single_placement())
    assert found == [threads] * told
