"""Activation checkpointing under FSDP, tensor and context parallelism: the bits of the same layout without it."""

import functools

import pytest
import torch
from harness import llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from crius.config.training import ActivationCheckpointConfig
from crius.models import registry
from crius.models.llama3 import Llama3Config
from crius.parallel.activation_checkpoint import apply_activation_checkpoint
from crius.parallel.context import ContextShard, apply_context_parallel
from crius.parallel.init import init_parameters, init_rules
from crius.parallel.runtime import world
from crius.parallel.tensor import apply_tensor_parallel

CONFIG = Llama3Config(
    dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=64, attention_mask="document"
)
MODEL = llama(CONFIG)
NONE = ActivationCheckpointConfig()
CASES = {
    "full": ActivationCheckpointConfig(mode="full"),
    "second_block": ActivationCheckpointConfig(mode="selective", selective_option=2),
    "matmul": ActivationCheckpointConfig(mode="selective", save_ops=("matmul",)),
    "ops": ActivationCheckpointConfig(mode="selective"),
}
LAYOUTS = {"fsdp": 1, "fsdp_compiled": 1, "tp": 2, "tp_compiled": 2, "cp_all_gather": 2, "cp_ulysses": 2}
ROWS = [pytest.param(row, marks=pytest.mark.slow if row.endswith("compiled") else ()) for row in LAYOUTS]


def run(layout, config, mesh):
    """Loss, gradients and matches of a forward and backward."""
    torch.compiler.reset()
    with torch.device("meta"):
        model = registry.build(MODEL)
    method = layout.removeprefix("cp_")
    shard = ContextShard(mesh if layout.startswith("cp") else None, method)
    if layout.startswith("tp"):
        apply_tensor_parallel(model, MODEL.plan, CONFIG.num_kv_heads, mesh)
    if layout.startswith("cp"):
        apply_context_parallel(model, mesh, method)
    compiled = layout.endswith("compiled")
    done = apply_activation_checkpoint(model, MODEL.plan, config, compile_enabled=compiled)
    blocks = list(model.layers.values())
    for block in blocks if compiled else ():
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    for unit in (*blocks, model) if layout.startswith("fsdp") else ():
        fully_shard(unit, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        init_parameters(model, init_rules(MODEL), seed=0)
    tokens, positions = torch.arange(32).view(2, 16), torch.arange(16).remainder(11).repeat(2, 1)
    loss = model(shard.slice(tokens), shard.slice(positions)).square().mean()
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients]
    return [loss.detach(), *local], done.matches()


def compare(layout, placement):
    found = {}
    with world(placement.rank, placement.world_size, torch.device("cpu"), placement.rendezvous, 60):
        mesh = init_device_mesh("cpu", (placement.world_size,), mesh_dim_names=("one",))
        want, _ = run(layout, NONE, mesh)
        for name, config in CASES.items():
            got, matches = run(layout, config, mesh)
            found[name] = [all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), matches]
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ROWS)
def test_no_bit_changes(layout, workers, tmp_path):
    for found in workers(LAYOUTS[layout]).run(functools.partial(compare, layout), tmp_path):
        assert {name: same for name, (same, _) in found.items()} == dict.fromkeys(CASES, True)
        kept = found["ops"][1]
        attentions = 2 if layout == "cp_all_gather" else 1  # one for each of a rank's chunks
        # after attention and after the feed-forward, each back to a part of the sequence
        assert kept["reduce_scatter"] == (2 if layout.startswith("tp") else 0)
        assert (kept["attention"], kept["matmul_every_other"]) == (attentions, 4)
