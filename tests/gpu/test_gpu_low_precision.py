"""Low precision and small optimizer states, on a GPU."""

import re
import sys

import pytest
import torch
from gpu_runs import DEVICE, GOLDEN_RUN, run_program, train_all
from harness import parse
from torch import nn

from crius.optim.build import build_optimizer
from crius.train.inputs import describe_model

pytestmark = pytest.mark.gpu

BFLOAT16 = ["--training.mixed_precision_param", "bfloat16"]
# the debug model's layers are too small to gain, so that the filter would keep all of them
FLOAT8 = [*BFLOAT16, "--quantize.dense.auto_filter", "off", "--quantize.dense.float8.enable"]
RECIPE = "--quantize.dense.float8.recipe"
GATHER = ["--quantize.dense.float8.enable_fsdp_float8_all_gather", "--quantize.dense.float8.precompute_scale"]


@pytest.fixture(scope="module", autouse=True)
def _float8_matmuls():
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8 matmuls")


def assert_converted(run):
    line = next(line for line in run.output.splitlines() if re.match(r"float8: \d+ converted", line))
    assert line.startswith("float8: 56 converted, 1 kept: output (sensitive)"), line
    assert "emulated" not in line


def test_float8_runs_on_the_gpu_and_follows_bfloat16(tmp_path):
    recipes = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    flags = {name: [*GOLDEN_RUN, *FLOAT8, RECIPE, name] for name in recipes}
    flags["gathered"] = [*flags["tensorwise"], *GATHER]
    flags["emulated"] = [*flags["tensorwise"], "--quantize.dense.float8.emulate"]
    runs = train_all(tmp_path, {"bfloat16": [*GOLDEN_RUN, *BFLOAT16], **flags})
    for name in (*recipes, "gathered"):
        assert_converted(runs[name])
        assert runs[name].losses != runs["bfloat16"].losses, name
        # 20 steps of float8 roundings of up to 2**-4, averaged over 512 tokens; 200 steps stay within 2 %
        assert runs[name].losses == pytest.approx(runs["bfloat16"].losses, rel=2e-2, abs=0), name
    # the same roundings, sums in another order and in bfloat16's or float32's accumulator
    assert runs["emulated"].losses[0] == pytest.approx(runs["tensorwise"].losses[0], rel=2e-3, abs=0)


def test_compiled_float8_trains_as_eager_float8_does(tmp_path):
    eager = [*GOLDEN_RUN, *FLOAT8, RECIPE, "tensorwise"]
    runs = train_all(tmp_path, {"eager": eager, "compiled": [*eager, "--compile.enable"]})
    for run in runs.values():
        assert_converted(run)
    assert runs["compiled"].num_graphs > 0
    # fused kernels round to bfloat16 less often, and so another number is rounded to float8
    assert runs["compiled"].losses == pytest.approx(runs["eager"].losses, rel=2e-2, abs=0)


def test_small_optimizer_states_train_on_the_gpu(tmp_path):
    names = ("float32", "bfloat16", "8bit")
    flags = {name: [*GOLDEN_RUN, "--optimizer.state_dtype", name] for name in names}
    runs = train_all(tmp_path, {**flags, "muon": [*GOLDEN_RUN, "--optimizer.name", "muon"]})
    sizes = {}
    for name in names:
        sizes[name] = float(re.search(r"^optimizer: states ([\d.]+) GiB", runs[name].output, re.MULTILINE)[1])
        # moments to 2**-9 or to codes of 8 bits; after 20 steps at lr 3e-4
        assert runs[name].losses == pytest.approx(runs["float32"].losses, rel=1e-2, abs=0), name
    assert sizes["8bit"] < sizes["bfloat16"] < sizes["float32"]
    assert runs["muon"].losses[-1] < runs["muon"].losses[0] - 0.3


OPTIMIZERS = {
    "fused": [],
    "bfloat16": ["--optimizer.state_dtype", "bfloat16"],
    "8bit": ["--optimizer.state_dtype", "8bit"],
    "muon": ["--optimizer.name", "muon"],
}


def found_inf_leaves_everything_as_it_is(name: str, device: str) -> None:
    """A step, a step with ``found_inf``, and another step that is as if the second had not been."""
    config = parse(OPTIMIZERS[name])
    facts = describe_model(config)
    generator = torch.Generator(device).manual_seed(0)
    parameters = [
        (f"layers.0.attention.{key}.weight", nn.Parameter(torch.randn(128, 128, device=device, generator=generator)))
        for key in ("wq", "wo")
    ]
    optimizer = build_optimizer(parameters, facts.plan, config.optimizer, seed=1)
    assert optimizer.takes_found_inf or device == "cpu"

    def step(value: float, found_inf: float) -> list[torch.Tensor]:
        for _, parameter in parameters:
            parameter.grad = torch.full_like(parameter, value)
        optimizer.found_inf = torch.full((), found_inf, device=device)
        optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [tensor.detach().clone() for tensor in [parameter for _, parameter in parameters] + states]

    before = step(1.0, 0.0)
    after = step(torch.nan, 1.0)
    assert len(before) == len(after) > 2
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert not all(torch.equal(old, new) for old, new in zip(after, step(1.0, 0.0), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_found_inf_changes_neither_weights_nor_moments(name):
    run_program(__file__, name, DEVICE)


if __name__ == "__main__":
    found_inf_leaves_everything_as_it_is(*sys.argv[1:])
