"""Planted faults in the real job, under every kind of layout: what each policy leaves of weights and state."""

import functools
import hashlib
import json
import math
import time

import pytest
from harness import SMALL, layout_flags, num_ranks, parse, read_metrics, run_job, steps_of

from crius.launch.local import run_workers
from crius.train.guard import UpdateGuard
from crius.train.state import leaves

STEPS = 10
FLAGS = [*SMALL, "--model.num_layers", "2", "--training.steps", str(STEPS), "--metrics.log_interval", "1"]
FLAGS += ["--validation.interval", str(STEPS), "--lr_scheduler.warmup_steps", "8"]


def digest(tensors):
    sha = hashlib.sha256()
    for tensor in tensors:
        for leaf in leaves(tensor).values():
            sha.update(leaf.contiguous().float().numpy().tobytes())
    return sha.hexdigest()


def watched(config, run_dir, started, placement):
    """Train; what each step leaves on this rank goes to ``seen-RANK.json``."""
    seen, update = {}, UpdateGuard.update

    def update_and_note(guard, result):
        optimizer = guard._optimizer
        noted = seen[result.step] = {
            "loss": result.loss.item().hex(),
            "grad_norm": result.grad_norm.item().hex(),
            "lr": [group["lr"] for group in optimizer.param_groups],
        }
        try:
            update(guard, result)
        finally:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            states = [value for parameter in parameters for value in optimizer.state.get(parameter, {}).values()]
            noted["weights"], noted["state"] = digest(parameters), digest(states)
            noted["updates"] = guard._state.updates
            (run_dir / f"seen-{placement.rank}.json").write_text(json.dumps(seen))

    UpdateGuard.update = update_and_note
    run_job(config, run_dir, started, placement)


def train_with_fault(fault, layout, run_dir, flags, monkeypatch):
    """Exit code, and by rank and step what the step left."""
    monkeypatch.setenv("CRIUS_FAULT", fault)
    run_dir.mkdir(exist_ok=True)
    config = parse([*FLAGS, *layout_flags(layout), *flags])
    ranks = num_ranks(config)
    code = run_workers(functools.partial(watched, config, run_dir, time.monotonic()), ranks, run_dir)
    seen = [json.loads((run_dir / f"seen-{rank}.json").read_text()) for rank in range(ranks)]
    for rank in seen[1:]:  # all decide alike because all see the same, to the last bit
        assert all(rank[step][name] == seen[0][step][name] for step in seen[0] for name in ("loss", "grad_norm"))
    return code, [{int(step): noted for step, noted in rank.items()} for rank in seen]


def incident(run_dir, step):
    assert [path.name for path in (run_dir / "incidents").iterdir()] == [f"step-{step}.json"]
    return json.loads((run_dir / "incidents" / f"step-{step}.json").read_text())


LEFT_BY_A_STEP = ("weights", "state", "updates")


def left(rank, step):
    return [rank[step][name] for name in LEFT_BY_A_STEP]


@functools.cache
def reference(folder, fault, *flags):
    """Losses, records and incident of one device."""
    with pytest.MonkeyPatch.context() as patch:
        code, _ = train_with_fault(fault, "1", folder, flags, patch)
    assert code == 0
    return read_metrics(folder)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    folders = {}

    def run(fault, *flags):
        folder = folders.setdefault((fault, flags), tmp_path_factory.mktemp("one"))
        return reference(folder, fault, *flags), folder

    return run


SKIP = ("--stability.nonfinite", "skip")
NAN = "nan:step=5"


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["fsdp2", "tp2", "pp2_accum4"])
def test_a_skipped_nan_leaves_no_trace_and_training_goes_on_as_on_one_device(
    layout, one_device, tmp_path, monkeypatch, capfd
):
    want, _ = one_device(NAN, *SKIP)
    capfd.readouterr()
    code, seen = train_with_fault(NAN, layout, tmp_path, SKIP, monkeypatch)
    assert code == 0
    for rank in seen:
        assert left(rank, 5) == left(rank, 4)
        assert rank[6]["lr"] == rank[5]["lr"] != rank[4]["lr"]  # the schedule did not go on either
        assert left(rank, 6) != left(rank, 5)
        assert rank[STEPS]["updates"] == STEPS - 1
    got = read_metrics(tmp_path)
    assert [record["skipped_steps"] for record in steps_of(got)] == [0] * 4 + [1] * 6
    assert steps_of(got)[4]["loss"] is None  # JSON has no NaN
    curve = [[record["loss"] for record in steps_of(records) if record["step"] != 5] for records in (got, want)]
    assert curve[0] == pytest.approx(curve[1], rel=2e-6)  # float32: only the order of sums differs
    assert got[-1]["val_loss"] == pytest.approx(want[-1]["val_loss"], rel=2e-6) and math.isfinite(got[-1]["val_loss"])
    report = incident(tmp_path, 5)
    assert (report["action"], report["found_in"], report["first_bad_parameter"]) == ("skipped", "loss", "output.weight")
    assert json.loads((tmp_path / "summary.json").read_text())["skipped_steps"] == 1
    out = capfd.readouterr().out
    assert out.count("step 5 skipped (non-finite): loss nan, ") == 1 and "; 1 skipped so far, see " in out
    assert "  skipped 1\n" in out


ROLLBACK = ("--stability.nonfinite", "rollback", "--stability.snapshot_interval", "3")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("1", ("--optimizer.implementation", "for-loop")),
        ("fsdp2", ("--optimizer.state_dtype", "bfloat16")),
        ("tp2", ("--optimizer.name", "muon")),
        ("pp2_accum4", ()),
    ],
)
def test_rollback_restores_weights_state_and_schedule_to_the_bit(layout, flags, tmp_path, monkeypatch, capfd):
    fault = "nan:step=8,where=grad" + ("" if layout == "1" else ",rank=1")  # rank 1 of a pipeline has the loss
    code, seen = train_with_fault(fault, layout, tmp_path, (*ROLLBACK, *flags), monkeypatch)
    assert code == 0
    for rank in seen:
        assert left(rank, 7) != left(rank, 6)
        assert left(rank, 8) == left(rank, 6)
        assert rank[9]["lr"] == rank[7]["lr"] != rank[8]["lr"]
        assert rank[STEPS]["updates"] == 8
    records = steps_of(read_metrics(tmp_path))
    assert [record["rolled_back_steps"] for record in records] == [0] * 7 + [2] * 3
    assert all(math.isfinite(record["loss"]) for record in records)
    report = incident(tmp_path, 8)
    assert (report["action"], report["found_in"]) == ("rolled back to the weights of step 6", "gradient")
    out = capfd.readouterr().out
    assert out.count("step 8 rolled back to the weights of step 6 (2 steps lost): ") == 1
    assert "rollback: weights and optimizer state are kept every 3 updates, " in out


def test_stop_ends_the_run_before_the_update(tmp_path, monkeypatch, capfd):
    code, seen = train_with_fault("nan:step=3", "pp2_accum4", tmp_path, (), monkeypatch)
    assert code == 1
    for rank in seen:
        assert left(rank, 3) == left(rank, 2) and max(rank) == 3
    assert incident(tmp_path, 3)["action"] == "stopped"
    assert "NonFiniteError: step 3: loss nan" in capfd.readouterr().err


SPIKE = ("--stability.window", "10", "--stability.spike", "skip")
JUMP = "spike:step=8,factor=1000"


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["ddp2", "tp2", "pp2_accum4"])
def test_a_spike_is_seen_alike_on_every_layout_and_its_norms_are_global(layout, one_device, tmp_path, monkeypatch):
    _, folder = one_device(JUMP, *SPIKE)
    code, seen = train_with_fault(JUMP, layout, tmp_path, SPIKE, monkeypatch)
    assert code == 0
    assert all(left(rank, 8) == left(rank, 7) for rank in seen)
    got, want = incident(tmp_path, 8), incident(folder, 8)
    for name in ("step", "kind", "action", "sample_ids"):
        assert got[name] == want[name], name
    assert (got["kind"], got["action"], got["sample_ids"]) == ("spike", "skipped", list(range(7 * 16, 8 * 16)))
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=2e-5)
    for table in ("layers", "parameters"):
        rows = {row["name"]: row for row in got[table]}
        # float32: a sum of terms of both signs, in another order
        assert rows.keys() == {row["name"] for row in want[table]}
        for row in want[table]:
            for norm in ("grad_norm", "weight_norm"):
                assert rows[row["name"]][norm] == pytest.approx(row[norm], rel=1e-4), row["name"]
        assert math.hypot(*(row["grad_norm"] for row in got[table])) == pytest.approx(got["grad_norm"], rel=1e-9)
        assert [row["grad_norm"] for row in got[table]] == sorted(
            (row["grad_norm"] for row in got[table]), reverse=True
        )
