"""A pipeline of any schedule computes what one process computes: losses, gradients, validation."""

import contextlib
import functools

import pytest
import torch
from harness import num_ranks, parse
from test_collectives import CountCollectives
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint
from varlen_cpu import register

from crius.config.layout import Layout
from crius.config.pipeline import microbatch_unit, num_stages, split_stages
from crius.data.loader import Batch
from crius.models import registry
from crius.parallel.apply import materialize, parallelize
from crius.parallel.init import init_parameters, init_rules
from crius.parallel.mesh import build_mesh
from crius.parallel.pipeline import Pipeline
from crius.parallel.runtime import world
from crius.parallel.stages import order_of, prune, stage_indices
from crius.shards import local_tensor, named_parameters
from crius.train.inputs import describe_model
from crius.train.step import count_valid

SCHEDULES = ["gpipe", "1f1b", "interleave_1f1b", "interleave_zero_bubble", "zbv_zero_bubble", "dualpipev"]
SEED, TOKENS = 3, 16


def config_of(folder, layout, schedule, *flags):
    degrees = {"pp": 1, "dp_shard": 1, "dp_replicate": 1, "tp": 1, **layout}
    names = {
        "pp": "pipeline_parallel",
        "dp_shard": "data_parallel_shard",
        "dp_replicate": "data_parallel_replicate",
        "tp": "tensor_parallel",
    }
    given = [part for key, name in names.items() for part in (f"--parallelism.{name}_degree", str(degrees[key]))]
    if schedule == "csv":  # a file of our own: the down half of the V is on the last rank
        base = parse([*given, "--parallelism.pipeline_parallel_schedule", "zbv_zero_bubble"]).parallelism
        order = order_of(base, microbatch_unit(base))
        path = folder / f"schedule{degrees['pp']}.csv"
        rows = [",".join(f"{a.stage}{a.kind}{a.microbatch}" for a in row) for row in order]
        path.write_text("\n".join(rows) + "\n")
        given += ["--parallelism.pipeline_parallel_schedule_csv", str(path)]
    else:
        given += ["--parallelism.pipeline_parallel_schedule", schedule]
    return parse(
        [
            *given,
            *("--model.num_layers", str(2 * degrees["pp"]), "--training.mixed_precision_param", "float32"),
            *("--debug.seed", str(SEED)),
            *flags,
        ]
    )


def make_batch(rows, seed, facts):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(facts.vocab_size, (rows, TOKENS + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100  # uneven counts in the microbatches
    positions = torch.arange(TOKENS).repeat(rows, 1)
    if facts.config.attention_mask == "document":
        positions %= 5 + torch.arange(rows)[:, None] % 7
    return tokens[:, :-1], positions, labels


def ends_of(tokens, positions, labels):
    """Where the documents of a batch end; the plain model finds them by its positions."""
    return Batch(tokens, labels, positions, (0,) * len(tokens)).with_ends(TOKENS).ends_BM


class OneProcess:
    """The whole model, without any process group."""

    def __init__(self, facts):
        with torch.device("meta"):
            self.model = registry.build(facts)
        self.model.to_empty(device="cpu")
        init_parameters(self.model, init_rules(facts), SEED)

    @torch.no_grad()
    def losses(self, batch, num_microbatches, valid):
        return [
            self.model(tokens, positions, labels) / valid
            for tokens, positions, labels in zip(*(t.chunk(num_microbatches) for t in batch), strict=True)
        ]

    def gradients(self, batch, valid):
        self.model.zero_grad()
        (self.model(*batch) / valid).backward()
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}


@functools.cache
def one_process(facts):
    """Kept from row to row by the standing workers."""
    return OneProcess(facts)


@functools.cache
def wanted_gradients(facts, rows, seed):
    batch = make_batch(rows, seed, facts)
    return one_process(facts).gradients(batch, count_valid(batch[2]).double())


def build_parts(config, facts, mesh, ranks, change):
    parallelism = config.parallelism
    stages = split_stages(facts.modules(TOKENS / 2), num_stages(parallelism), parallelism)
    indices = stage_indices(parallelism, mesh.pp.get_local_rank())
    parts = []
    for index in indices:
        with torch.device("meta"):
            part = registry.build(facts)
        prune(part, stages[index])
        change(part)
        parallelize(part, facts, mesh, config)
        materialize(part, init_rules(facts), ranks, config, draws=True)
        parts.append(part)
    return parts, indices


def difference(parameter, want):
    """Of this rank's part of a gradient from the wanted one, relative to the norm of that part."""
    share = distribute_tensor(want, parameter.device_mesh, parameter.placements, src_data_rank=None)
    got, want = local_tensor(parameter.grad), local_tensor(share)
    return ((got - want).norm() / want.norm()).item() if want.numel() else 0.0


def unchanged(part):
    pass


def compare(config, ranks, change):
    """Two steps with a validation after each, of different sizes; what they differ by from one process."""
    facts = describe_model(config)
    mesh = build_mesh(Layout.of(config.parallelism, ranks.size), "cpu")
    parts, indices = build_parts(config, facts, mesh, ranks, change)
    count = microbatch_unit(config.parallelism) * 2
    dtype = getattr(torch, config.training.mixed_precision_param)
    pipeline = Pipeline(parts, indices, config.parallelism, count, mesh.pp, ranks.device, facts.dim, dtype)
    plain = one_process(facts)
    has_ends = facts.config.attention_mask == "document"
    found = {"loss": 0.0, "gradient": 0.0, "validation": 0.0, "units": num_units(parts)}
    for step, rows in ((1, 2 * count), (2, 2 * count), (3, count)):
        whole = make_batch(rows * mesh.layout.batch, step, facts)
        share = [tensor.chunk(mesh.layout.batch)[mesh.batch_rank] for tensor in whole]
        valid = count_valid(whole[2]).double()
        for part in parts:
            part.zero_grad()
        with loss_parallel(), CountCollectives() if step == 1 else contextlib.nullcontext() as counter:
            losses = pipeline.forward_backward(*share, valid, ends_of(*share) if has_ends else None)
        if counter:
            found["scatters"] = counter.counts["reduce_scatter"]
            found["gathers"] = counter.counts["all_gather"]
        assert losses.shape == (count,) and losses.dtype == torch.float64 and not losses.requires_grad
        if pipeline.has_last_stage:
            want = torch.stack(plain.losses(share, count, valid))
            found["loss"] = max(found["loss"], ((losses - want).abs() / want).max().item())
        else:
            assert not losses.any()
        want = wanted_gradients(facts, rows * mesh.layout.batch, step)
        for name, parameter in named_parameters(parts):
            found["gradient"] = max(found["gradient"], difference(parameter, want[name]))
        # more rows than in training, then fewer, then a number that its microbatches do not divide
        batch = make_batch((4 * count, 2, 3)[step - 1], 10 + step, facts)
        with loss_parallel():
            score = pipeline.evaluate(*batch, ends_of(*batch) if has_ends else None)
        with torch.no_grad():
            want = plain.model(*batch) if pipeline.has_last_stage else score
        found["validation"] = max(found["validation"], ((score - want).abs() / want.clamp(min=1)).item())
        if not pipeline.has_last_stage:
            assert score == 0
        assert all(isinstance(parameter, DTensor) for _, parameter in named_parameters(parts))  # nothing stays gathered
    return found


def num_units(parts):
    """FSDP units: the embedding, each layer, norm with output."""
    ends = [end for part in parts for end in (part.tok_embeddings, part.output)]
    return sum(len(part.layers) for part in parts) + sum(not isinstance(end, nn.Identity) for end in ends)


def checkpointed(part):
    """Recompute every layer in the backward."""
    for layer in part.layers.values():
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def with_kernel(part):
    """The kernel of attention that goes by the ends of documents."""
    register()


def found_by(config, change, placement):
    with world(placement.rank, placement.world_size, torch.device("cpu"), placement.rendezvous, 60) as ranks:
        return compare(config, ranks, change)


LAYOUTS = {
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "pp2_fsdp2": {"pp": 2, "dp_shard": 2},
    "pp2_ddp2": {"pp": 2, "dp_replicate": 2},
    "pp2_tp2": {"pp": 2, "tp": 2},
}


EVERY = [*SCHEDULES, "csv"]
FEW = ["1f1b", "zbv_zero_bubble"]  # one stage a rank, and two with a split backward
SLOW = [("pp2_tp2", "zbv_zero_bubble")]
CASES = [
    pytest.param(layout, schedule, marks=pytest.mark.slow if (layout, schedule) in SLOW else ())
    for layout in LAYOUTS
    for schedule in (FEW if layout in ("pp4", "pp2_ddp2", "pp2_tp2") else EVERY)  # tests/parity has all on 4 stages
]


@pytest.fixture(scope="module")
def run(workers, tmp_path_factory):
    """What each rank found under a schedule; each case runs once."""
    folder = tmp_path_factory.mktemp("pipelines")

    @functools.cache
    def run(layout, schedule, *flags, change=unchanged):
        config = config_of(folder, LAYOUTS[layout], schedule, *flags)
        return workers(num_ranks(config)).run(functools.partial(found_by, config, change), folder)

    return run


def assert_same(ranks):
    for found in ranks:
        assert found["loss"] <= 1e-6  # float32: tensor parallelism sums in another order, all else is the same
        assert found["validation"] <= 1e-6
        assert found["gradient"] <= 1e-5  # and so do microbatches and ranks in the gradients


@pytest.mark.matrix
@pytest.mark.parametrize(("layout", "schedule"), CASES)
def test_a_pipeline_equals_one_process(layout, schedule, run):
    """Three steps, the last with microbatches of another size, and validations of other sizes between them."""
    assert_same(run(layout, schedule))


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", FEW)
def test_every_stage_attends_by_the_ends_of_the_documents_of_its_microbatch(schedule, run):
    assert_same(run("pp2", schedule, "--model.attention_mask", "document", change=with_kernel))


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", EVERY)
def test_weights_are_gathered_and_gradients_scattered_once_a_step(schedule, run):
    """Of every part of a rank, however many microbatches there are."""
    for found in run("pp2_fsdp2", schedule):
        assert found["scatters"] == found["gathers"] == found["units"]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleave_1f1b"])
def test_a_pipeline_equals_one_process_when_weights_are_freed_after_the_forward(schedule, run):
    """The schedules with a split backward lose gradients so; the rules refuse that."""
    assert_same(run("pp2_fsdp2", schedule, "--parallelism.reshard_after_forward_mode", "always"))


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleave_1f1b"])
def test_a_pipeline_of_checkpointed_layers_equals_one_process(schedule, run):
    assert_same(run("pp2", schedule, change=checkpointed))
