"""A sequence split over ranks: attention and the whole model compute what one process does."""

import functools
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from crius.errors import LayoutError, PlanError
from crius.launch.local import run_workers
from crius.models import registry
from crius.models.layers import Attention, CausalAttention, rotary_cos_sin, rotary_frequencies
from crius.models.llama3 import Llama3Config
from crius.models.rope import Rope
from crius.parallel.context import ContextShard, apply_context_parallel
from crius.parallel.init import init_parameters, init_rules
from crius.parallel.runtime import world

METHODS = ("all_gather", "ulysses")
SEQ_LEN, HEADS, HEAD_DIM = 16, 4, 8
IGNORED = -100

# float32: the ranks' parts of a sum are added in another order, 1e-7 of the largest term each
TOLERANCE = 1e-5
CONFIG = Llama3Config(dim=32, num_layers=2, num_heads=HEADS, num_kv_heads=2, ffn_dim=48, vocab_size=61)


def attention_settings(num_kv_heads=2, batch=2, mask="causal", how="eager"):
    return {"num_kv_heads": num_kv_heads, "batch": batch, "mask": mask, "how": how}


ATTENTION_CASES = {
    "causal": attention_settings(),
    "one_sequence": attention_settings(batch=1),
    "one_kv_head": attention_settings(num_kv_heads=1),
    "kv_head_for_each": attention_settings(num_kv_heads=4),
    "documents": attention_settings(mask="document"),
    "padding": attention_settings(mask="padding"),
    "checkpointed": attention_settings(batch=1, how="checkpointed"),
    "checkpointed_documents": attention_settings(mask="document", how="checkpointed"),
    "compiled_checkpointed": attention_settings(num_kv_heads=1, how="compiled_checkpointed"),
    "compiled_documents": attention_settings(mask="document", batch=1, how="compiled"),
}
MODEL_CASES = {
    "causal": {"mask": "causal", "hide_first_rank": False, "batch": 2},
    "documents": {"mask": "document", "hide_first_rank": False, "batch": 2},
    "one_rank_without_labels": {"mask": "document", "hide_first_rank": True, "batch": 1},
}


def compare(cases, folder, placement):
    """Writes, of each case and method, the largest difference to one process relative to the largest value."""
    torch.set_num_threads(1)
    found = {}
    with world(placement.rank, placement.world_size, torch.device("cpu"), placement.rendezvous, 60):
        mesh = init_device_mesh("cpu", (placement.world_size,), mesh_dim_names=("cp",))
        for method in METHODS:
            for name, case in cases.items():
                found[f"{method}/{name}"] = case(mesh, method)
    (folder / f"{placement.rank}.json").write_text(json.dumps(found))


def differences(cases, num_ranks, folder):
    folder.mkdir(parents=True, exist_ok=True)
    assert run_workers(functools.partial(compare, cases, folder), num_ranks, folder) == 0
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def gap(got, want):
    """Largest difference over the largest value of ``want``; infinite where a value is not finite."""
    if not all(torch.isfinite(x).all() for x in got):
        return float("inf")
    scale = max(x.abs().max().item() for x in want)
    return max((a - b).abs().max().item() for a, b in zip(got, want, strict=True)) / scale


def positions_of(batch, mask):
    """``(batch, SEQ_LEN)``: one document a sequence, or documents of odd lengths."""
    positions = torch.arange(SEQ_LEN).repeat(batch, 1)
    starts = [0, 3, 4, 11] if mask == "document" else [0]
    for row in range(batch):
        for start in starts:
            first = min(start + row, SEQ_LEN - 1) if start else 0
            positions[row, first:] = torch.arange(SEQ_LEN - first)
    return positions


class Masked(nn.Module):
    """An attention module with the mask that a model would hand it."""

    def __init__(self, num_kv_heads, mask):
        super().__init__()
        config = replace(CONFIG, num_kv_heads=num_kv_heads, head_dim=HEAD_DIM)
        self.attention = Attention(config, config.attention_of(0))
        self.documents = registry.build(llama(CONFIG, attention_mask="document")).document_mask
        self.mask = mask

    def mask_of(self, positions, shard):
        if self.mask == "causal":
            return None
        if self.mask == "document":
            return self.documents(positions)
        # padding: the last 7 tokens of the first sequence see nothing and are not seen; not made by a document mask
        visible = torch.ones(len(positions), 1, SEQ_LEN, SEQ_LEN, dtype=torch.bool).tril()
        visible[0, :, -7:] = False
        rows_first = visible.transpose(1, 2)
        return (shard.slice(rows_first) if shard.chunks[1:] else rows_first).transpose(1, 2)

    def forward(self, x, positions, shard, how):
        mask = self.mask_of(positions, shard)
        rope = rotary_cos_sin(positions, rotary_frequencies(Rope(theta=1e4, dim=HEAD_DIM), x.device))
        run = self.attention
        if how.endswith("checkpointed"):
            run = functools.partial(checkpoint, self.attention, use_reentrant=False)
        if how.startswith("compiled"):
            torch.compiler.reset()
            run = torch.compile(run, backend="aot_eager", fullgraph=True)
        return run(x, rope, mask)


def attention_case(mesh, method, *, num_kv_heads, batch, mask, how):
    torch.manual_seed(0)
    module = Masked(num_kv_heads, mask)
    x, weight = (torch.randn(batch, SEQ_LEN, 32, requires_grad=True) for _ in range(2))
    positions, whole = positions_of(batch, mask), ContextShard(None, method)
    want_y = module(x, positions, whole, "eager")
    (want_y * weight).sum().backward()
    want = [x.grad, *(parameter.grad for parameter in module.parameters())]

    shard = ContextShard(mesh, method)
    module.zero_grad(set_to_none=True)
    apply_context_parallel(module, mesh, method)
    own_x = shard.slice(x.detach()).requires_grad_()
    y = module(own_x, shard.slice(positions), shard, how)
    (y * shard.slice(weight)).sum().backward()
    got = [parameter.grad for parameter in module.parameters()]
    for gradient in got:
        dist.all_reduce(gradient, group=mesh.get_group())
    return max(gap([y], [shard.slice(want_y)]), gap([own_x.grad], [shard.slice(want[0])]), gap(got, want[1:]))


def model_case(mesh, method, *, mask, hide_first_rank, batch):
    config = replace(CONFIG, attention_mask=mask)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab_size, (batch, SEQ_LEN), generator=generator)
    labels = torch.randint(config.vocab_size, (batch, SEQ_LEN), generator=generator)
    labels[:, 5:7] = IGNORED
    shard = ContextShard(mesh, method)
    if hide_first_rank:
        hidden = ContextShard(mesh, method).slice(torch.arange(SEQ_LEN)[None])[0]
        dist.broadcast(hidden, src=0)
        labels[:, hidden] = IGNORED
    positions, whole = positions_of(batch, mask), ContextShard(None, method)
    losses, gradients = [], []
    for part, cp_mesh in ((whole, None), (shard, mesh)):
        model = registry.build(llama(config))
        with torch.no_grad():
            init_parameters(model, init_rules(llama(config)), seed=3)
        if cp_mesh is not None:
            apply_context_parallel(model, cp_mesh, method)
        logits = model(part.slice(tokens), part.slice(positions))
        loss = F.cross_entropy(
            logits.flatten(0, 1), part.slice(labels).flatten(), ignore_index=IGNORED, reduction="sum"
        )
        loss.backward()
        losses.append(loss.detach())
        gradients.append([parameter.grad for parameter in model.parameters()])
    for total in (losses[1], *gradients[1]):
        dist.all_reduce(total, group=mesh.get_group())
    return max(gap([losses[1]], [losses[0]]), gap(gradients[1], gradients[0]))


def refusal_case(mesh, method):
    """Names of the errors of: a model without attention, a stage without blocks, heads that do not split."""

    def error(action):
        try:
            action()
        except (PlanError, LayoutError) as problem:
            return type(problem).__name__
        return ""

    with torch.device("meta"):
        stage = registry.build(llama(CONFIG))
    del stage.layers["0"], stage.layers["1"]
    odd = nn.Sequential(CausalAttention())
    apply_context_parallel(odd, mesh, method)
    q, k = torch.ones(1, 4, 3, 8), torch.ones(1, 4, 1, 8)
    return [
        error(lambda: apply_context_parallel(nn.Linear(2, 2), mesh, method)),
        error(lambda: apply_context_parallel(stage, mesh, method)),
        error(lambda: apply_context_parallel(odd, mesh, method)),  # a second time: nothing left to replace
        error(lambda: odd[0](q, k, k, None)),
    ]


ATTENTION_RUNS = [(2, name) for name in ATTENTION_CASES]
# the graphs of two ranks and of four are alike
ATTENTION_RUNS += [(4, name) for name in ATTENTION_CASES if not name.startswith("compiled")]


@functools.cache
def attention_gaps(num_ranks):
    cases = {
        name: functools.partial(attention_case, **ATTENTION_CASES[name]) for n, name in ATTENTION_RUNS if n == num_ranks
    }
    with tempfile.TemporaryDirectory() as folder:
        return differences(cases, num_ranks, Path(folder))


@functools.cache
def model_gaps(num_ranks):
    cases = {name: functools.partial(model_case, **case) for name, case in MODEL_CASES.items()}
    with tempfile.TemporaryDirectory() as folder:
        return differences(cases, num_ranks, Path(folder))


@pytest.mark.matrix
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_ranks, name", ATTENTION_RUNS)
def test_attention_equals_one_process(num_ranks, name, method):
    """Its output, and the gradients of its input and, summed over the ranks, of its weights."""
    assert max(attention_gaps(num_ranks)[f"{method}/{name}"]) < TOLERANCE


@pytest.mark.matrix
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", MODEL_CASES)
def test_the_model_equals_one_process(num_ranks, name, method):
    """Loss and gradients, summed over the ranks."""
    assert max(model_gaps(num_ranks)[f"{method}/{name}"]) < TOLERANCE


def test_what_cannot_be_split_is_refused(tmp_path):
    found = differences({"refusals": refusal_case}, 2, tmp_path)
    assert found["all_gather/refusals"] == [["PlanError", "", "PlanError", ""]] * 2
    assert found["ulysses/refusals"] == [["PlanError", "", "PlanError", "LayoutError"]] * 2
