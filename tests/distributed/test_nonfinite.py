"""A NaN stops the run before it reaches the weights, and the report says where it came from."""

import functools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from harness import ROOT, SMALL, layout_flags, num_ranks, parse, read_metrics, run_job, steps_of

from crius.errors import NonFiniteError
from crius.launch.environment import single_placement
from crius.launch.local import run_single, run_workers
from crius.launch.status import status
from crius.models.layers import loss_of
from crius.shards import local_tensor
from crius.train import job
from crius.train.guard import UpdateGuard

STEPS, BAD_STEP, BAD_RANK, BATCH = 5, 3, 1, 16
FLAGS = [*SMALL, "--model.num_layers", "2", "--training.steps", str(STEPS), "--metrics.log_interval", "1"]
FLAGS += ["--validation.interval", "0"]
WEIGHT = "layers.1.feed_forward.w1.weight"


def run_with_nan(kind, config, run_dir, started, bad_rank, check_late, placement):
    """Train; in step 3 a NaN appears on ``bad_rank``. What the weights then are goes to ``after-RANK.json``."""
    seen = {}
    build, update = job.build_model, UpdateGuard.update

    def build_and_poison(*args):
        built = build(*args)
        [seen["model"]] = built.parts
        if placement.rank == bad_rank:
            POISONS[kind](seen["model"])
        return built

    def update_and_remember(guard, result):
        if check_late:  # the path of a GPU: the fused optimizer skips, the host looks one step later
            guard._looks_late = True
        update(guard, result)
        if result.step == BAD_STEP - 1:
            seen["weights"] = weights(seen["model"])

    job.build_model, UpdateGuard.update = build_and_poison, update_and_remember
    try:
        run_job(config, run_dir, started, placement)
    except NonFiniteError:
        changed = [name for name, now in weights(seen["model"]).items() if not torch.equal(now, seen["weights"][name])]
        found = {"step": status.step, "changed": changed}
        (run_dir / f"after-{placement.rank}.json").write_text(json.dumps(found))
        raise


def weights(model):
    return {name: local_tensor(parameter).clone() for name, parameter in model.named_parameters()}


def bad_now():
    return status.step == BAD_STEP


def poison_loss(model):
    """The loss of the second microbatch."""
    calls = []

    def hook(module, args, loss):
        calls.append(bad_now())
        return loss * (torch.nan if sum(calls) == 2 and bad_now() else 1.0)

    loss_of(model).register_forward_hook(hook)


def poison_gradient(model):
    """The gradient that flows into the first layer's query projection, and on from there."""

    def hook(module, args, output):
        if bad_now():
            output.register_hook(lambda gradient: gradient * torch.nan)

    model.get_submodule("layers.0.attention.wq").register_forward_hook(hook)


def poison_weight(model):
    """One number of a weight."""

    def hook(module, args, output):
        if bad_now():
            local_tensor(model.get_parameter(WEIGHT))[0, 0] = torch.nan

    model.get_submodule("tok_embeddings").register_forward_hook(hook)  # before FSDP gathers the weight's layer


POISONS = {"loss": poison_loss, "gradient": poison_gradient, "weight": poison_weight}


def train_with_nan(kind, layout, run_dir, check_late=False):
    rarely = ["--metrics.log_interval", "100"] if check_late else []  # a report waits for the device and checks
    config = parse([*FLAGS, *layout_flags(layout), *rarely])
    ranks = num_ranks(config)
    arguments = (kind, config, run_dir, time.monotonic(), min(BAD_RANK, ranks - 1), check_late)
    code = run_workers(functools.partial(run_with_nan, *arguments), ranks, run_dir)
    after = [json.loads((run_dir / f"after-{rank}.json").read_text()) for rank in range(ranks)]
    report = json.loads((run_dir / "incidents" / f"step-{BAD_STEP}.json").read_text())
    assert [path.name for path in (run_dir / "incidents").iterdir()] == [f"step-{BAD_STEP}.json"]
    return code, after, report


FIRST = (BAD_STEP - 1) * BATCH  # sample of the bad step
PARAMETERS_BEFORE_WQ = ["layers.0.attention.wq.weight", "layers.0.attention_norm.weight", "tok_embeddings.weight"]


@pytest.mark.parametrize("check_late", [False, True], ids=["at_once", "one_step_late"])
@pytest.mark.parametrize("kind", POISONS)
def test_nan_stops_the_run_before_the_weights(kind, check_late, tmp_path, capfd):
    code, after, report = train_with_nan(kind, "fsdp2_accum2", tmp_path, check_late)
    assert code == 1
    for rank, found in enumerate(after):
        assert found["step"] == BAD_STEP + check_late
        # a poisoned weight itself, on the rank that holds it, is all that changed since step 2
        assert found["changed"] == ([WEIGHT] if kind == "weight" and rank == BAD_RANK else [])
    assert report["step"] == BAD_STEP
    step_ids = set(range(FIRST, FIRST + BATCH))
    if kind == "loss":
        assert (report["rank"], report["found_in"], report["ranks_with_bad_loss"]) == (1, "loss", [1])
        # rank 1 of 2 reads the odd ids; its second microbatch is the last 4 of its 8
        assert report["sample_ids"] == sorted(id for id in step_ids if id % 2 == 1)[4:]
        assert (report["first_bad_parameter"], report["bad_weights"]) == ("output.weight", [])
    elif kind == "gradient":
        assert (report["found_in"], report["ranks_with_bad_loss"]) == ("gradient", [])
        assert report["bad_parameters"] == PARAMETERS_BEFORE_WQ
        assert report["first_bad_parameter"] == PARAMETERS_BEFORE_WQ[0]
        # the sum over ranks hides which of them it came from; what reached the embeddings does not
        assert (report["rank"], report["ranks_with_bad_gradient"]) == (BAD_RANK, [BAD_RANK])
        assert report["sample_ids"] == sorted(id for id in step_ids if id % 2 == 1)
        assert isinstance(report["loss"], float) and report["grad_norm"] == "nan"
    else:
        assert (report["found_in"], report["ranks_with_bad_loss"]) == ("loss", [0, 1])
        assert report["bad_weights"] == [WEIGHT]
    # the failed step is not among the records
    assert [record["step"] for record in steps_of(read_metrics(tmp_path))] == ([1] if check_late else [1, 2])
    block = capfd.readouterr().err.strip("\n").split("\n\n")[-1].splitlines()
    assert block[0].startswith(f"NonFiniteError: step {BAD_STEP}: ")
    assert block[1].startswith("  from   samples [") and str(tmp_path / "incidents") in block[1]
    assert block[-2] == f"  rank   0, 1, step {BAD_STEP + check_late}"
    assert block[-1].startswith("  log ")


def test_nan_in_the_last_step_is_found_although_no_step_follows(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "BAD_STEP", STEPS)
    code, after, report = train_with_nan("loss", "1_accum2", tmp_path, check_late=True)
    assert (code, report["step"]) == (1, STEPS)
    assert after == [{"step": STEPS, "changed": []}]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", POISONS)
def test_nan_on_a_gpu_is_caught_before_the_next_update(kind, tmp_path):
    done = subprocess.run(
        [sys.executable, __file__, kind, str(tmp_path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "incidents" / f"step-{BAD_STEP}.json").read_text())
    after = json.loads((tmp_path / "after-0.json").read_text())
    assert report["step"] == BAD_STEP
    assert after == {"step": BAD_STEP + 1, "changed": [WEIGHT] if kind == "weight" else []}


def main(kind, run_dir):
    """The program of the GPU test: CUDA does not survive a fork."""
    config = parse([*FLAGS, *layout_flags("1_accum2"), "--training.device", "cuda"])
    target = functools.partial(run_with_nan, kind, config, Path(run_dir), time.monotonic(), 0, False)
    return run_single(target, single_placement(), Path(run_dir))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(*sys.argv[1:]))
