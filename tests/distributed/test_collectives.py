"""What a gradient sync mode and a reshard mode cost: collectives of a step, and bytes between its microbatches."""

import functools
import gc
import json
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from harness import parse
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from crius.config.layout import Layout
from crius.data.loader import Batch
from crius.launch.local import run_workers
from crius.optim.build import WarmupStableDecay, build_optimizer
from crius.parallel.fsdp import GradientSync
from crius.parallel.gradients import Gradients
from crius.parallel.mesh import build_mesh
from crius.parallel.runtime import world
from crius.shards import named_parameters
from crius.train.build import Job, build_model
from crius.train.guard import UpdateGuard
from crius.train.inputs import describe_model
from crius.train.state import TrainState
from crius.train.step import Accumulation, train_step

UNITS = 4  # embedding, two layers, norm with output
ACCUMULATION = 4
SCALAR_ALL_REDUCES = 2  # of a step: the count of valid tokens; loss and squared norm
LAYOUTS = {"hsdp2x2": (2, 2), "fsdp4": (1, 4), "ddp4": (4, 1)}
SYNC_MODES = [(sync, "default") for sync in ("immediate", "auto", "deferred")]
RESHARD_MODES = [("auto", "always"), ("auto", "never")]

KINDS = {  # collectives of c10d by how their operator's name starts, with and without underscores around it
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
}


class CountCollectives(TorchDispatchMode):
    """Counts collectives of c10d by kind."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1].strip("_")
            kind = next((kind for start, kind in KINDS.items() if name.startswith(start)), name)
            self.counts[kind] += kind != "wait_tensor"
        return func(*args, **(kwargs or {}))


class WatchMemory(GradientSync):
    """The real gradient sync, which notes the live bytes before the third of the microbatches."""

    def __init__(self, *args):
        super().__init__(*args)
        self.started = 0
        self.bytes_between = 0

    def start_microbatch(self, is_last):
        self.started += 1
        if self.started % ACCUMULATION == 3:
            self.bytes_between = live_bytes()
        super().start_microbatch(is_last)


def live_bytes():
    """Bytes of all tensors of this process, each storage once.

    Gloo's threads hold what they communicated for a moment longer than the call that waits for them.
    """
    time.sleep(0.1)
    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    # a DTensor's own storage is a fiction; its local tensor is found by itself
    storages = [tensor.untyped_storage() for tensor in tensors if not isinstance(tensor, DTensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages if storage.device.type == "cpu"}.values())


def write_costs(configs, folder, placement):
    """Counts of two steps and live bytes for each config, all in one process group."""
    torch.set_num_threads(1)
    gc.freeze()  # what came with the fork is neither walked nor counted
    cpu = torch.device("cpu")
    found = {}
    with world(placement.rank, placement.world_size, cpu, placement.rendezvous, 60) as ranks:
        for name, config in configs.items():
            found[name] = costs(config, ranks, folder)
            gc.collect()
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))


def costs(config, ranks, folder):
    facts = describe_model(config)
    mesh = build_mesh(Layout.of(config.parallelism, ranks.size), "cpu")
    built = build_model(Job(config, facts, mesh, ranks))
    [model], parameters = built.parts, named_parameters(built.parts)
    optimizer = build_optimizer(parameters, facts.plan, config.optimizer, seed=0)
    gradients = Gradients(list(model.parameters()), ranks.size, ranks.device)
    state = TrainState(built.parts, optimizer, WarmupStableDecay(config.lr_scheduler, 2))
    guard = UpdateGuard(config.stability, state, parameters, gradients, built.names, ranks, folder)
    sync = WatchMemory(model, config.parallelism, config.training)
    runner = Accumulation(model, sync, 1)
    tokens = torch.randint(facts.vocab_size, (ACCUMULATION, 17), generator=torch.Generator().manual_seed(ranks.rank))
    positions = torch.arange(16).expand(ACCUMULATION, -1)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], positions, tuple(range(ACCUMULATION)))
    counts = []
    for step in (1, 2):
        with CountCollectives() as counter:
            guard.update(train_step(step, batch, runner, gradients, ranks, mesh.layout, max_norm=1.0))
        counts.append(dict(counter.counts))
    shards = sum(parameter.to_local().numel() for parameter in model.parameters())
    return {
        "counts": counts,
        "bytes": sync.bytes_between,
        "whole": 4 * facts.num_parameters,
        "shards": 4 * shards,
        "state": live_bytes(),
    }


@pytest.fixture(scope="module")
def costs_of(tmp_path_factory):
    """``layout`` to, by modes, what rank 0 found; every rank must have found the same counts."""
    made = {}

    def get(layout):
        if layout not in made:
            made[layout] = run_layout(layout, tmp_path_factory.mktemp(layout))
        return made[layout]

    return get


def run_layout(layout, folder):
    replicate, shard = LAYOUTS[layout]
    base = parse(
        [
            *("--model.num_layers", "2", "--training.mixed_precision_param", "float32"),
            *("--parallelism.data_parallel_replicate_degree", str(replicate)),
            *("--parallelism.data_parallel_shard_degree", str(shard)),
        ]
    )
    configs = {}
    for sync, reshard in SYNC_MODES + (RESHARD_MODES if shard > 1 else []):
        configs[f"{sync} {reshard}"] = replace(
            base,
            training=replace(base.training, gradient_sync=sync),
            parallelism=replace(base.parallelism, reshard_after_forward_mode=reshard),
        )
    assert run_workers(functools.partial(write_costs, configs, folder), replicate * shard, folder) == 0
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(replicate * shard)]
    for found in ranks[1:]:
        assert {name: cost["counts"] for name, cost in found.items()} == {
            name: cost["counts"] for name, cost in ranks[0].items()
        }
    return ranks[0]


# reduce-scatters and all-reduces of each unit in a step of 4 microbatches
GRADIENT_COLLECTIVES = [
    ("hsdp2x2", "immediate", 4, 4),
    ("hsdp2x2", "auto", 4, 1),
    ("hsdp2x2", "deferred", 1, 1),
    ("fsdp4", "immediate", 4, 0),
    ("fsdp4", "auto", 4, 0),
    ("fsdp4", "deferred", 1, 0),
    ("ddp4", "immediate", 0, 4),  # a group of one shard has nothing to scatter
    ("ddp4", "auto", 0, 1),
    ("ddp4", "deferred", 0, 1),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("layout", "sync", "reduce_scatters", "all_reduces"), GRADIENT_COLLECTIVES)
def test_gradient_sync_sets_the_collectives_of_a_step(layout, sync, reduce_scatters, all_reduces, costs_of):
    for counts in costs_of(layout)[f"{sync} default"]["counts"]:
        assert counts.get("reduce_scatter", 0) == reduce_scatters * UNITS
        assert counts["all_reduce"] - SCALAR_ALL_REDUCES == all_reduces * UNITS
        assert set(counts) <= {"all_gather", "reduce_scatter", "all_reduce"}


ALL_GATHERS = {
    "always": 2 * UNITS * ACCUMULATION,  # before the forward and before the backward
    "default": (2 * UNITS - 1) * ACCUMULATION,  # the last unit's backward follows its forward
    "never": UNITS,  # once a step: kept over the microbatches
}


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["hsdp2x2", "fsdp4"])
@pytest.mark.parametrize("reshard", ALL_GATHERS)
def test_reshard_mode_sets_the_all_gathers_of_a_step(layout, reshard, costs_of):
    for counts in costs_of(layout)[f"auto {reshard}"]["counts"]:
        assert counts["all_gather"] == ALL_GATHERS[reshard]


@pytest.mark.long
def test_one_shard_gathers_nothing(costs_of):
    for cost in costs_of("ddp4").values():
        assert all("all_gather" not in counts for counts in cost["counts"])


# the batch, positions and scalars of the step, which are the same in every mode up to some 300 bytes of 2 MB
TOLERANCE = 1e-3


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["hsdp2x2", "fsdp4"])
def test_deferred_sync_keeps_unsharded_gradients_between_microbatches(layout, costs_of):
    """Instead of a shard of them, which under HSDP is not summed over replicas yet."""
    found = costs_of(layout)
    whole, shards = found["auto default"]["whole"], found["auto default"]["shards"]
    assert shards == whole / LAYOUTS[layout][1]
    more = found["deferred default"]["bytes"] - found["auto default"]["bytes"]
    assert more == pytest.approx(whole - shards, rel=TOLERANCE)
    assert found["immediate default"]["bytes"] == pytest.approx(found["auto default"]["bytes"], rel=TOLERANCE)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["hsdp2x2", "fsdp4"])
def test_never_resharding_keeps_unsharded_weights_between_microbatches(layout, costs_of):
    """Beside the shards, which the optimizer updates."""
    found = costs_of(layout)
    more = found["auto never"]["bytes"] - found["auto always"]["bytes"]
    assert more == pytest.approx(found["auto never"]["whole"], rel=TOLERANCE)
    assert found["auto default"]["bytes"] == pytest.approx(found["auto always"]["bytes"], rel=TOLERANCE)


def test_what_the_modes_cost(costs_of):
    """The table for the documentation; ``-s`` shows it. Every step leaves only shards behind, whatever the mode."""
    print(f"\n{'layout':8} {'gradient_sync':13} {'reshard':8} gather scatter reduce  MiB between microbatches")
    for layout in LAYOUTS:
        found = costs_of(layout)
        for name, cost in found.items():
            sync, reshard = name.split()
            first, counts = cost["counts"]
            assert first == counts
            numbers = [counts.get(kind, 0) for kind in ("all_gather", "reduce_scatter", "all_reduce")]
            print(
                f"{layout:8} {sync:13} {reshard:8} {numbers[0]:6} {numbers[1]:7} {numbers[2] - SCALAR_ALL_REDUCES:6}"
                f"  {cost['bytes'] / 2**20:.2f} (all weights {cost['whole'] / 2**20:.2f})"
            )
        after = [cost["state"] for cost in found.values()]
        assert max(after) == pytest.approx(min(after), rel=TOLERANCE)
