"""The real training loop on fake tensors of device cuda: devices, waits of the host, kernels, collectives, memory."""

import re
import threading
from collections import Counter

import pytest
import torch

from cuda_fake.cases import CASES, CONTEXT, DOCUMENT, FSDP, Case
from cuda_fake.library import shim_library

STEADY = 2
_ATTENTION = re.compile(
    r"aten::_scaled_dot_product_(\w+?)_attention|aten::_(flash)_attention_forward|torch_attn::_(varlen)_attn"
)


@pytest.mark.long
def test_the_shim_is_compiled_once_whoever_asks(shim, tmp_path):
    found = []
    threads = [threading.Thread(target=lambda: found.append(shim_library(tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] and found[0].name == shim.name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", shim.name]


def attention(ops: dict[str, int]) -> dict[str, int]:
    """How often each kernel of attention ran forward."""
    found = Counter({"math": ops["aten::_safe_softmax"]}) if "aten::_safe_softmax" in ops else Counter()
    for name, count in ops.items():
        match = _ATTENTION.fullmatch(name)
        if match:
            found[match[match.lastindex]] += count
    return dict(found)


QUICK = ("fsdp8",)
"""Cases of make test: the smoke."""


def cases():
    """All of them as parameters."""
    for name, case in CASES.items():
        oldest, reason = case.needs_torch
        is_too_old = bool(oldest) and torch.__version__ < oldest
        mark = pytest.mark.slow if case.is_slow else pytest.mark.matrix
        if name in QUICK:
            mark = pytest.mark.quick
        skip = pytest.mark.skipif(is_too_old, reason=f"torch {oldest} or newer: {reason}")
        yield pytest.param(case, id=name, marks=[mark, skip])


@pytest.mark.parametrize("case", list(cases()))
def test_a_step_reads_nothing_and_moves_only_the_batch_and_the_loss(case: Case, fake_gpu):
    """What mixes devices fails. The host waits for numbers of the step before, never for those of the present one."""
    seen = fake_gpu.step(case.argv)
    assert seen["reads"] == [] and seen["of_host"] == []
    to_gpu, to_host = [], []
    for what, where in seen["copies"]:
        (to_gpu if what.startswith("cpu->cuda int") else to_host).append((re.sub(r"\[.*\]", "[]", what), where))
    kernels = attention(seen["ops"])
    ends = ["cpu->cuda int32 []"] * ("varlen" in kernels and DOCUMENT in case.flags)
    assert [what for what, _ in to_gpu] == [*ends, *["cpu->cuda int64 []"] * 3], "tokens, labels, positions"
    assert [what for what, _ in to_host] == ["cuda->cpu float64 []"] * 2, f"for the guard and for the report: {to_host}"
    assert set(seen["waits"]) <= ({STEADY - 1, STEADY} if case.may_wait else {STEADY - 1})
    if case.attention is not None:
        assert kernels == case.attention
    else:
        assert kernels and "math" not in kernels
    assert {name: seen["ops"].get(f"aten::{name}", 0) for name in case.ops} == case.ops
    assert seen["splits"] == case.splits


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["one_rank", "fsdp8"])
def test_a_checkpoint_is_copied_beside_the_step_and_the_update_waits_for_it_on_the_gpu(name, fake_gpu):
    """Weights, moments and counts, on a stream that begins after the last update. The host does not wait."""
    seen = fake_gpu.step(CASES[name].argv, stages=True)
    assert seen["reads"] == [] and set(seen["waits"]) <= {STEADY - 1}
    copied = [what for what, _ in seen["copies"] if what.startswith("cuda->cpu float32")]
    assert len(copied) == 4 * 21 and not [what for what in copied if what.endswith("waits")]
    order = seen["order"]
    update = order.index(next(what for what in order if what[0] == "update"))
    main = order[update][1]
    copies = [at for at, (kind, stream, *_) in enumerate(order) if kind == "copy" and stream != main]
    side = order[copies[0]][1]
    assert len(copies) == len(copied) and {order[at][1] for at in copies} == {side}
    assert order[: copies[0]] == [["wait", side, main]]
    assert ["wait", main, side] in order[copies[-1] : update]


def test_offloaded_weights_come_from_pinned_memory_and_gradients_go_there(fake_gpu):
    """The update is on the host, which waits for the gradients of the step; the weights do not wait."""
    seen = fake_gpu.step(Case(f"{FSDP} --training.enable_cpu_offload").argv)
    assert seen["reads"] == []
    floats = [what for what, _ in seen["copies"] if "float32" in what]
    assert {what.split()[0] for what in floats} == {"cpu->cuda", "cuda->cpu"}
    assert not [what for what in floats if what.endswith("waits")]
    assert STEADY in seen["waits"]


@pytest.mark.long
def test_ranks_of_a_layout_take_their_collectives_in_the_same_order(fake_gpu):
    """A group whose ranks differ in it hangs on NCCL. Kind, axis and bytes of each collective, in order."""
    argv = Case(f"{CONTEXT} --p.data_parallel_replicate_degree 2").argv
    first, *others = (fake_gpu.step(argv, rank)["collectives"] for rank in (0, 3, 6))
    assert {axis for _, axis, _ in first} >= {"cp", "fsdp", "dp_replicate"}
    assert all(other == first for other in others)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hsdp2x4_accumulating", "tp4_fsdp2", "cp2_ulysses"])
def test_all_ranks_take_their_collectives_in_the_same_order(name, fake_gpu):
    argv = CASES[name].argv
    orders = [fake_gpu.step(argv, rank)["collectives"] for rank in range(4 if "cp2" in name else 8)]
    assert all(order == orders[0] for order in orders)


@pytest.mark.long
def test_a_pipeline_stage_sends_as_often_as_its_neighbour_receives(fake_gpu):
    argv = CASES["pipeline_1f1b"].argv
    first, last = (fake_gpu.step(argv, rank)["collectives"] for rank in (0, 2))
    assert pairs(first, "send") == pairs(last, "recv") != []
    assert pairs(first, "recv") == pairs(last, "send") != []


def pairs(collectives: list, kind: str) -> list:
    """Bytes of the messages of a ``kind``, in order."""
    return [nbytes for name, axis, nbytes in collectives if name == kind and axis == "pp"]


@pytest.mark.long
def test_recomputation_and_chunks_of_the_loss_lower_the_peak(fake_gpu):
    long = "--training.seq_len 512 --training.global_batch_size 2 --model.num_layers 3"
    modes = {
        "none": "",
        "op": "--activation_checkpoint.mode selective",
        "full": "--activation_checkpoint.mode full",
        "all logits": "--kernels.linear_cross_entropy off",
    }
    peaks = {name: fake_gpu.step(Case(f"{long} {flags}").argv)["peak"] for name, flags in modes.items()}
    assert peaks["full"] < peaks["op"] < peaks["none"] < peaks["all logits"], peaks


@pytest.mark.long
@pytest.mark.parametrize("layout", [FSDP, pytest.param(CASES["tp4_fsdp2"].flags, marks=pytest.mark.slow)])
def test_a_layer_keeps_no_more_for_the_document_mask(layout, fake_gpu):
    """Two layers more cost the same, within 5 %: no matrix of all pairs, no keys and values of each query head."""
    costs = {}
    for mask in ("causal", "document"):
        flags = f"{layout} --training.seq_len 2048 --model.attention_mask {mask}"
        few, many = (fake_gpu.step(Case(f"{flags} --model.num_layers {n}").argv)["peak"] for n in (2, 4))
        costs[mask] = many - few
    assert costs["document"] == pytest.approx(costs["causal"], rel=0.05)


@pytest.mark.matrix
@pytest.mark.skipif(
    torch.version.cuda is not None, reason="a build for CUDA has kernels for norms and SiLU, which keep less"
)
@pytest.mark.parametrize(
    "layout",
    [FSDP, CASES["tp4_fsdp2"].flags, "", CASES["document_mask"].flags, "--activation_checkpoint.mode full"],
    ids=["fsdp8", "tp4_fsdp2", "one_rank", "document_mask", "one_rank_full"],
)
def test_a_dry_run_counts_the_bytes_of_a_gpu(layout, fake_gpu):
    """It runs on fake tensors of the host. What differs is what the loop keeps of the step before: less than 1 %."""
    long = "--training.seq_len 1024 --model.num_layers 3"
    seen = fake_gpu.step(Case(f"{layout} {long}").argv, dry_run=True)
    assert seen["dry_run_peak"] == pytest.approx(seen["peak"], rel=0.01)
