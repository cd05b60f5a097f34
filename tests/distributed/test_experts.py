"""Experts that are split over ranks: start, gradients, norms and updates of one process, checkpoints of any layout."""

import json
import re
import shutil
from functools import partial

import pytest
import sigmoid_moe as sigmoid
import torch
from checkpoint_runs import contents, flags
from harness import TEXT, layout_flags, parse, steps_of, train
from test_reproducible import bits
from test_sdc import error_of, flip_gradient
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from crius.cli.app import facts_of
from crius.config.layout import parse_layout
from crius.kernels.grouped_mm import grouped_linear
from crius.models import registry
from crius.models.moe import Dispatch
from crius.parallel import fsdp
from crius.parallel.expert import AllToAllDispatch
from crius.parallel.runtime import world
from crius.shards import named_state
from crius.tools.verify import matrix, worker
from crius.tools.verify.parameters import Shards, checksums
from crius.tools.verify.worker import WorkerTask
from crius.train import checkpoints

ROUTED = ("--model.name", "qwen3_moe")
MODELS = {
    "qwen3_moe": ROUTED,
    "two_experts": (*ROUTED, "--model.num_experts", "2", "--model.top_k", "1"),  # fewer than FSDP has ranks
    "sigmoid_moe": ("--model.name", "sigmoid_moe", "--model.flavor", "small"),
    "traced": (*ROUTED, "--compile.backend", "eager"),
    "adapted": (*ROUTED, "--lora.rank", "4", "--lora.targets", "layers.1.*"),
}
TINY = [
    *("--recipe", "verify", "--model.num_layers", "2", "--training.seq_len", "16", "--training.global_batch_size", "8"),
    *("--data.source", "text", "--data.path", str(TEXT)),
]
LAYOUTS = [
    *(("qwen3_moe", layout) for layout in ("fsdp2_ep2", "fsdp4_ep2", "fsdp4_ep4", "hsdp2x2_ep2", "tp2", "tp2_ep2")),
    *(("qwen3_moe", layout) for layout in ("fsdp2_tp2_ep4", "cp2_ep2", "fsdp2_ep2_accum2+deferred")),
    *(("two_experts", layout) for layout in ("fsdp4", "fsdp4_ep2", "fsdp2_tp2")),
    *(("sigmoid_moe", layout) for layout in ("tp2_ep2", "cp2_ep2", "fsdp2_ep2+full")),
]


@pytest.fixture(scope="module", autouse=True)
def sigmoid_moe():
    """The model is known before the workers are forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.SPECS, sigmoid.SPEC.name, sigmoid.SPEC)
        yield


def trained(task, placement):
    """Train as one rank of ``task``: checksums of the start, and the squared norm of each gradient by step and name."""
    found = {"squares": []}
    make = worker._loop

    def watched(task, job, *args):
        loop, ranks = make(task, job, *args), job.ranks
        state, squared = named_state(loop.state.parts), loop.gradients.squared_norms
        modules = (module for part in loop.state.parts for module in part.named_modules())
        found["units"] = [name for name, module in modules if isinstance(module, FSDPModule)]
        groups = (group for part in loop.state.parts for group in fsdp.param_groups(part))
        found["unneeded"] = sum(not group.unshard_in_backward for group in groups)
        found["start"] = checksums(state, job.facts.state_names, ranks)

        def keep():
            own = squared()
            whole = ranks.sum(own.clone()).tolist()
            found["squares"].append(dict(zip((name for name, _ in state), whole, strict=False)))
            return own

        loop.gradients.squared_norms = keep
        return loop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "_loop", watched)
        counters.clear()
        worker.train(task, placement)
    found["graphs"] = counters["stats"]["unique_graphs"]
    return found


def trained_apart(task, placement):
    """``trained``, with the experts of each layer as a unit of FSDP, as on torch 2.11."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "MESH_PER_PARAMETER", False)
        return trained(task, placement)


@pytest.fixture(scope="module")
def run_layout(workers, tmp_path_factory):
    """What ``crius verify parity`` measures of a layout, and what ``trained`` adds."""
    folders = {}

    def run(model, text, work=trained):
        layout, is_reference = parse_layout(text), text == "1"
        facts = facts_of(parse([*TINY, *MODELS[model]]), 0, None)
        case = matrix.case(facts, matrix.fixed(facts.config, [layout], 2), layout)
        case.check()
        folder = tmp_path_factory.mktemp("run")
        if is_reference:
            folders[model] = folder
        task = WorkerTask(case.config, folder, 60, Shards(folders[model], is_whole=True), is_reference)
        found = workers(layout.num_ranks).run(partial(work, task), folder)[0]
        return {**json.loads((folder / worker.RESULT).read_text()), **found}

    references = {}

    def both(model, text, work=trained):
        references[model] = references.get(model) or run(model, "1")
        return run(model, text, work), references[model]

    return both


@pytest.mark.matrix
@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_split_experts_train_as_in_one_process(model, layout, run_layout):
    got, want = run_layout(model, layout)
    assert got["start"] == want["start"] and all(want["start"].values())  # the same bits
    for one, other in zip(got["squares"], want["squares"], strict=True):
        assert other["layers.1.feed_forward.experts.w2"] > 0
        assert one == pytest.approx(other, rel=1e-4, abs=1e-12)  # sums in another order, squared; 3.3e-5 on a Xeon
    assert got["counts"] == want["counts"]  # no choice is so close that a rounding turns it
    assert got["buffers"] == want["buffers"]
    for key in ("loss", "grad_norm"):
        assert got[key] == pytest.approx(want[key], rel=1e-6)
    assert got["missing"] == [] and got["whole"] < 1e-6


# with replicas and recomputed; split over the ranks of tensor parallelism too, by the rows of each expert
@pytest.mark.matrix
@pytest.mark.parametrize(("model", "layout"), [("qwen3_moe", "hsdp2x2_ep2+full"), ("two_experts", "fsdp2_tp2")])
def test_experts_in_a_unit_of_their_own_train_to_the_same_bits(model, layout, run_layout):
    [apart, _], [together, _] = (run_layout(model, layout, work) for work in (trained_apart, trained))
    assert "layers.1.feed_forward.experts" in apart["units"]
    for key in ("start", "squares", "counts", "buffers", "loss", "grad_norm", "whole", "missing"):
        assert apart[key] == together[key], key


def test_a_frozen_layer_is_not_gathered_for_a_backward_with_its_experts_in_a_unit_of_their_own(run_layout):
    [apart, _], [together, _] = (run_layout("adapted", "fsdp2_ep2", work) for work in (trained_apart, trained))
    assert apart["unneeded"] == together["unneeded"] == 3  # of the embedding, of the first layer and of its experts
    assert apart["loss"] == together["loss"] and apart["grad_norm"] == together["grad_norm"]


@pytest.mark.long
def test_a_block_with_experts_in_a_unit_of_their_own_is_one_graph(run_layout):
    """Each block is compiled with ``fullgraph``, which refuses the hooks of a unit inside of it."""
    apart, alone = run_layout("traced", "fsdp2_ep2+compile+full", trained_apart)
    assert apart["units"] != alone["units"] and apart["graphs"] == 1  # of both layers
    assert apart["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert apart["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-6)
    assert apart["counts"] == alone["counts"] and apart["whole"] < 1e-6


N, K, E, D = 6, 2, 4, 8


def dispatched(chosen, placement):
    """Rows of both ranks through the experts of both and back, beside those of one process that has all of each."""
    with world(placement.rank, placement.world_size, torch.device("cpu"), placement.rendezvous, 60):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        draw = torch.Generator().manual_seed(1)
        x_SND = torch.randn(2, N, D, generator=draw)
        weight = torch.randn(E, D, D, generator=draw)
        ids_SNK = torch.tensor(chosen)[:, None].expand(2, N, K).contiguous()
        rank, each = placement.rank, E // 2

        whole, x = weight.clone().requires_grad_(), x_SND.clone().requires_grad_()
        ids_NK = ids_SNK.flatten(0, 1)
        counts_E = torch.bincount(ids_NK.flatten(), minlength=E)
        want = Dispatch()(x.flatten(0, 1), ids_NK, counts_E, lambda rows, ends: grouped_linear(rows, whole, ends))
        want.square().sum().backward()

        own = weight[rank * each : (rank + 1) * each].clone().requires_grad_()
        mine = x_SND[rank].clone().requires_grad_()
        own_E = torch.bincount(ids_SNK[rank].flatten(), minlength=E)
        got = AllToAllDispatch(mesh)(mine, ids_SNK[rank], own_E, lambda rows, ends: grouped_linear(rows, own, ends))
        got.square().sum().backward()
        torch.testing.assert_close(got, want.view(2, N, K, D)[rank])
        torch.testing.assert_close(mine.grad, x.grad[rank])
        torch.testing.assert_close(own.grad, whole.grad[rank * each : (rank + 1) * each])
        return own.grad.abs().sum().item()


@pytest.mark.matrix
@pytest.mark.parametrize("chosen", [[(0, 1), (0, 1)], [(2, 3), (2, 3)], [(0, 1), (2, 3)], [(3, 0), (1, 2)]])
def test_a_rank_whose_experts_nobody_chooses_has_gradients_of_zeros(chosen, workers, tmp_path):
    sizes = workers(2).run(partial(dispatched, chosen), tmp_path)
    ranks = {expert // 2 for of_rank in chosen for expert in of_rank}
    assert [size > 0 for size in sizes] == [rank in ranks for rank in range(2)]


OWN = (*ROUTED, "--checkpoint.enable", "--model.vocab_size", "257")


@pytest.mark.long
def test_any_split_of_experts_loads_what_any_other_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "check_steps_left", lambda step, config: None)
    train(flags("fsdp2_ep2", *OWN), tmp_path / "0")
    expected = contents(tmp_path / "0", 3)
    chain = ("1", "tp2_ep2", "fsdp2_tp2_ep4", "hsdp2x2_ep2", "pp2_fsdp2_ep2", "fsdp3", "fsdp2_ep2")
    for number, layout in enumerate(chain, start=1):
        # with nothing left to train it saves what it loaded
        load = ("--checkpoint.load_path", str(tmp_path / str(number - 1) / "checkpoints"))
        train(flags(layout, *OWN, *load), tmp_path / str(number))
        assert contents(tmp_path / str(number), 3) == expected, layout
        shutil.rmtree(tmp_path / str(number - 1))


@pytest.mark.long
def test_experts_in_a_unit_of_their_own_load_and_save_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "check_steps_left", lambda step, config: None)
    train(flags("fsdp4_ep2", *OWN), tmp_path / "together")
    monkeypatch.setattr(fsdp, "MESH_PER_PARAMETER", False)
    load = ("--checkpoint.load_path", str(tmp_path / "together/checkpoints"))
    train(flags("fsdp4_ep2", *OWN, *load), tmp_path / "apart")  # with nothing left to train it saves what it loaded
    together, apart = (sorted((tmp_path / name).glob("checkpoints/*/rank-*")) for name in ("together", "apart"))
    assert [file.read_bytes() for file in apart] == [file.read_bytes() for file in together] != []


@pytest.mark.parametrize("has_own_unit", [False, True])
def test_a_gradient_that_differs_the_second_time_is_seen_in_experts_too(has_own_unit, tmp_path, capfd, monkeypatch):
    """On its way through a layer it comes to experts of both ranks; each layer shows two gradients."""
    if has_own_unit:
        monkeypatch.setattr(fsdp, "MESH_PER_PARAMETER", False)
    layout = [*ROUTED, *layout_flags("fsdp2_ep2", 12), "--sdc.recompute_interval", "2"]
    error = error_of([*layout, "--training.local_batch_size", "6"], partial(flip_gradient, 3), 1, tmp_path, capfd)
    assert "CorruptionError: step 2, computed twice" in error
    said = r"rank 0 on \S+ \S+ gradients of \d of 6 units, first layers.1/experts; rank 1 on .* first norm\+output"
    assert re.search(said, error)


@pytest.mark.long
def test_experts_computed_twice_raise_no_alarm(tmp_path):
    checked = train(flags("fsdp2_ep2", *ROUTED, "--sdc.recompute_interval", "1"), tmp_path / "checked")
    plain = train(flags("fsdp2_ep2", *ROUTED), tmp_path / "plain")
    assert [record["loss"] for record in steps_of(checked)] == [record["loss"] for record in steps_of(plain)]


@pytest.mark.long
def test_reproducible_experts_have_the_bits_of_one_device(tmp_path):
    own = [*ROUTED, "--training.steps", "2", "--training.virtual_shards", "4"]
    one = bits(own, tmp_path / "1")
    for layout in ("fsdp2", "ddp2"):
        assert bits([*own, *layout_flags(layout)[:4]], tmp_path / layout) == one
