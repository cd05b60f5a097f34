"""What ranks learn from each other, with the ranks as threads of this process."""

import json
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from crius.config.layout import Layout
from crius.config.training import DenseQuantizeConfig, Float8Config
from crius.errors import CorruptionError
from crius.models.layers import CausalAttention, Linear
from crius.optim import muon
from crius.parallel import context, runtime, tensor
from crius.parallel.gradients import Gradients
from crius.parallel.reproducible import ReproducibleGradients
from crius.parallel.runtime import World
from crius.shards import Place
from crius.train import sdc
from crius.train.stability import IncidentReporter
from crius.train.step import evaluate, largest_loss, train_step

CPU = torch.device("cpu")
NAN = math.nan


def on_ranks(size, work):
    """What ``work`` gives on each rank, from the world of the rank."""
    everyone = Barrier(size, timeout=30)
    said = {}

    class Thread(World):
        def gather_json(self, value):
            said[self.rank] = value
            everyone.wait()
            found = [said[rank] for rank in range(size)]
            everyone.wait()
            return found

        def gather(self, values):
            return torch.stack(self.gather_json(values.clone()))

        def sum(self, values):
            return self.gather(values).sum(0)

    with ThreadPoolExecutor(size) as threads:
        return [*threads.map(lambda rank: work(Thread(rank, size, CPU)), range(size))]


NAMES = ["tok.weight", "layers.0.wq.weight", "layers.0.wo.weight", "norm.weight"]
INCIDENTS = {
    # losses of two microbatches, squared norms of the gradients of each rank's three parameters, peaks; ranks, ids
    "loss": ([[1, 1], [1, NAN], [1, 1]], [[1, 4, 4], [1, 4, NAN], [1, 4, 4]], None, [1], [12, 13]),
    "gradient": ([[1, 1]] * 3, [[1, 4, 4], [1, 4, 4], [1, math.inf, NAN]], None, [2], [20, 21, 22]),
    "sum": ([[1, 1]] * 3, [[1, NAN, 4], [1, NAN, 4], [1, 4, 4]], None, [], [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22]),
    "peak": ([[1, 1]] * 3, [[1, NAN, 4], [1, NAN, 4], [1, 4, 4]], [NAN, 1, 1], [0], [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", INCIDENTS)
def test_an_incident_names_the_ranks_and_samples_that_may_have_caused_it(name, tmp_path):
    """Rank 2 holds the last parameter alone, and its fourth row is padding; only rank 0 writes the file."""
    losses, squares, peaks, ranks, ids = INCIDENTS[name]
    own = [NAMES[:3], NAMES[:3], [NAMES[0], NAMES[1], NAMES[3]]]

    def work(world):
        rank = world.rank
        weights = torch.tensor([1.0, 9.0, 16.0], dtype=torch.float64)
        reporter = IncidentReporter(NAMES, own[rank], lambda: weights, world, tmp_path / str(rank))
        result = SimpleNamespace(
            step=7,
            local_losses=torch.tensor(losses[rank], dtype=torch.float64),
            squared_norms=torch.tensor(squares[rank], dtype=torch.float64),
            sample_ids=tuple(10 * rank + i if (rank, i) != (2, 3) else -1 for i in range(4)),
            local_peak=torch.tensor(float(peaks[rank])) if peaks else None,
        )
        return reporter.nonfinite(result, {"step": 7})

    culprits = on_ranks(3, work)
    bad = {"loss": NAMES[2:3], "gradient": [NAMES[3], NAMES[1]]}.get(name, NAMES[1:2])
    assert {(tuple(one.ranks), one.gradient, tuple(one.samples)) for one in culprits} == {
        (tuple(ranks), bad[0], tuple(ids))
    }
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    report = json.loads((tmp_path / "0" / "step-7.json").read_text())
    assert report["bad_parameters"] == bad and report["bad_weights"] == []
    found = ["ranks_with_bad_loss", "ranks_with_bad_gradient"]
    assert [report[key] for key in found] == ([ranks, []] if name == "loss" else [[], ranks])
    norms = {row["name"]: (row["grad_norm"], row["weight_norm"]) for row in report["parameters"] + report["layers"]}
    assert norms["tok.weight"] == (3**0.5, 3**0.5) and norms["norm.weight"][1] == 4
    assert norms["layers.0.wo.weight"][1] == 32**0.5 and norms["layers.0"][1] == (27 + 32) ** 0.5


def test_what_a_rank_computes_otherwise_the_second_time_is_named():
    """Rank 1 has another gradient of the first unit, rank 2 another loss and other gradients of both."""

    def work(world):
        units = {name: SimpleNamespace(is_on=False, hashes=[]) for name in ("layers.0", "norm")}
        slips = iter([torch.zeros(3), torch.tensor([[0, 0, 0], [0, 1, 0], [1, 1, 1]])[world.rank].float()])

        def rehearse(batch):
            loss, *hashes = next(slips)
            for unit, value in zip(units.values(), hashes, strict=True):
                assert unit.is_on
                unit.hashes.append(torch.stack((torch.zeros(()), value)).long())
            return loss.double()

        with pytest.raises(CorruptionError) as caught:
            sdc.Recompute(SimpleNamespace(rehearse=rehearse), units, [], world).check(3, None)
        return caught.value.what

    [said] = set(on_ranks(3, work))
    found = re.findall(r"rank (\d) on host \S+: (.*?)[;.](?: |$)", said)
    assert found == [
        ("1", "gradients of 1 of 2 units, first layers.0"),
        ("2", "loss and gradients of 2 of 2 units, first norm"),
    ]


def test_the_ranks_whose_bits_most_others_have_not_are_odd():
    found = {bits: sdc.odd_ones([*enumerate(bits)]) for bits in ("aaa", "aba", "baab")}
    assert found == {"aaa": [], "aba": [1], "baab": [0, 1, 2, 3]}


AXES = [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}]


@pytest.mark.parametrize("axes", AXES)
def test_a_step_divides_by_the_labels_of_all_its_sequences(axes):
    """Two data-parallel ranks with 2 and 4 labels, and a last pipeline rank that has their losses."""
    layout = Layout(dp_shard=2, **axes)
    each = layout.num_ranks // 2

    def work(world):
        place, rank = divmod(world.rank, each)
        labels = [[[1, 2, -100], [-100, -100, -100]], [[3, -100, -100], [2, 2, 2]]][place]
        batch = SimpleNamespace(labels_BT=torch.tensor(labels), sample_ids=())
        losses = torch.tensor([1.0, 2.0]).double() * (1 + place) * (rank >= each - layout.tp)
        runner = SimpleNamespace(forward_backward=lambda batch, valid_tokens: losses / valid_tokens)
        gradients = SimpleNamespace(
            squared_norms=lambda: None,
            totals=lambda *_: torch.ones(2),
            clip=lambda *_: None,
            take_local_peak=lambda: None,
        )
        result = train_step(3, batch, runner, gradients, world, layout, 1.0)
        largest = largest_loss(result, batch, world, layout)
        return result.local_losses.tolist(), largest.item()

    for rank, (losses, largest) in enumerate(on_ranks(layout.num_ranks, work)):
        share = (1 + rank // each) * (rank % each >= each - layout.tp)
        assert losses == pytest.approx([share / 6, 2 * share / 6])
        assert largest == pytest.approx(max(3 / 2, 6 / 4))


@pytest.mark.parametrize("axes", AXES)
def test_tokens_that_several_ranks_score_count_once(axes):
    """Two data-parallel ranks with 2 and 4 labels; token ``i`` stands for ``i`` bytes, and a row is padding."""
    layout = Layout(dp_shard=2, **axes)
    rows = [[[1, 2, -100], [-100, -100, -100]], [[3, -100, -100], [2, 2, 2]]]
    each = layout.num_ranks // 2

    def work(world):
        batch = SimpleNamespace(labels_BT=torch.tensor(rows[world.rank // each]))
        has_loss = world.rank % each >= each - layout.tp
        nats = torch.tensor((1.5, 4.5)[world.rank // each] * has_loss, dtype=torch.float64)
        part = nn.Dropout()
        runner = SimpleNamespace(score=lambda batch: nats * (not part.training))
        arguments = ([part], runner, [batch], lambda batch: batch, torch.arange(4), world, layout, 9)
        return evaluate(*arguments, lambda: True), evaluate(*arguments, lambda: False)

    for stopped, found in on_ranks(layout.num_ranks, work):
        assert stopped is None
        assert (found.step, found.val_samples, found.val_loss) == (9, 3, 1.0)
        assert found.val_perplexity == math.e
        assert found.val_bits_per_byte == pytest.approx(6 / math.log(2) / 12)


@pytest.mark.parametrize("kind", [Gradients, ReproducibleGradients])
@pytest.mark.parametrize("axes", [{"dp_shard": 4}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}])
def test_totals_of_a_step_have_each_microbatch_of_each_sequence_once(axes, kind):
    layout = Layout(**axes)

    def work(world):
        losses = torch.tensor([1.0, 2.0], dtype=torch.float64) * (1 + world.rank // layout.tp)
        return kind.totals(None, losses, torch.tensor([world.rank, 1.0], dtype=torch.float64), world, layout)

    loss = 3 * (1 + 2) if layout.tp > 1 else 3 * (1 + 2 + 3 + 4)
    assert [found.tolist() for found in on_ranks(4, work)] == [[loss, 6 + 4]] * 4


def test_a_tied_weight_counts_half_on_each_of_its_stages_and_clipping_keeps_what_is_small():
    unused, first, tied = (nn.Parameter(torch.tensor([6.0, 8.0])) for _ in range(3))
    first.grad = torch.tensor([3.0, 4.0])
    tied.grad = torch.tensor([0.0, 2.0])
    gradients = Gradients([unused, first, tied], 2, CPU, [tied])
    assert gradients.squared_norms().tolist() == [0.0, 12.5, 1.0]
    assert gradients.squared_weight_norms().tolist() == [50.0, 50.0, 25.0]
    for norm, most, left in ((5.0, 0.0, 3.0), (5.0, 6.0, 3.0), (5.0, 2.5, 1.5), (1e-6, 1e-6, 0.75)):
        gradients.clip(torch.tensor(norm, dtype=torch.float64), most)
        assert first.grad[0].item() == pytest.approx(left, rel=1e-6)
    table = nn.Embedding(3, 2)
    gradients.watch(table)
    for factor in (1, -7, 2):
        (factor * table(torch.tensor([0]))).sum().backward()
    assert gradients.take_local_peak() == 7
    assert gradients.take_local_peak() is None


def test_values_of_any_length_are_gathered_in_the_order_of_the_ranks(monkeypatch):
    here = threading.local()

    def fill(parts, own):
        for part, found in zip(parts, here.world.gather(own), strict=True):
            part.copy_(found)

    def work(world):
        here.world = world
        return World.gather_json(world, values[world.rank])

    values = ["a", {"b": [1, 2.5]}, None]
    monkeypatch.setattr(runtime.dist, "all_gather", fill)
    assert on_ranks(3, work) == [values] * 3


SPLITS = {  # shapes and offsets of the parts of a matrix of 5 rows of 4 on three ranks
    "rows": [((2, 4), (0, 0)), ((2, 4), (2, 0)), ((1, 4), (4, 0))],
    "columns": [((5, 2), (0, 0)), ((5, 2), (0, 2)), ((5, 0), (0, 4))],
    "copies": [((5, 4), (0, 0))] * 3,
    "one": [((0, 4), (0, 0)), ((5, 4), (0, 0)), ((0, 4), (5, 0))],
}


@pytest.mark.parametrize("names", [("rows",), ("copies", "columns"), ("one", "rows", "copies"), ("columns",) * 3])
def test_matrices_are_gathered_one_on_each_rank_and_spread_again(names, monkeypatch):
    matrices = [torch.randn(5, 4, generator=torch.Generator().manual_seed(place)) for place in range(len(names))]
    parts = [[Place(*place) for place in SPLITS[name]] for name in names]

    def exchange(received, given, sizes, given_sizes, group):
        sent = group.gather_json(given.split(given_sizes))
        mine = [pieces[group.rank] for pieces in sent]
        assert [piece.numel() for piece in mine] == sizes and len(sizes) == len(given_sizes) == 3
        received.copy_(torch.cat(mine))

    monkeypatch.setattr(muon.dist, "all_to_all_single", exchange)

    def work(world):
        holders = muon.Holders(None)
        holders.size = 3
        holders._me = world.rank
        holders._group = world
        holders._known = {id(matrix): places for matrix, places in zip(matrices, parts, strict=True)}
        own = [places[world.rank].of(matrix) for matrix, places in zip(matrices, parts, strict=True)]
        whole = holders.collect(matrices, own)
        spread = holders.spread(matrices, None if whole is None else 2 * whole, own[0])
        assert all(torch.equal(part, 2 * old) for part, old in zip(spread, own, strict=True))
        return whole

    found = on_ranks(3, work)
    assert [whole is None for whole in found] == [rank >= len(names) for rank in range(3)]
    assert all(torch.equal(whole, matrix) for whole, matrix in zip(found, matrices, strict=False))


@pytest.mark.parametrize(("sizes", "group"), [((1, 4), "axis 1"), ((1, 1), "axis 0"), ((2, 2), [0, 1, 2, 3])])
def test_holders_on_one_long_axis_use_its_group(sizes, group, monkeypatch):
    monkeypatch.setattr(
        muon.dist, "new_group", lambda ranks, use_local_synchronization: ranks * use_local_synchronization
    )
    mesh = SimpleNamespace(ndim=2, size=sizes.__getitem__, get_group="axis {}".format)
    assert muon._group(mesh, [0, 1, 2, 3]) == group


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_ranks_that_share_out_the_heads_compute_all_of_them(num_kv_heads, monkeypatch):
    """With fewer key/value heads than ranks, some ranks have the same one."""

    def exchange(x, world):
        return torch.stack([sent[world.rank] for sent in world.gather_json(x)])

    monkeypatch.setattr(context, "all_to_all", exchange)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 12, 8, 4, generator=generator)
    k, v = (torch.randn(2, 12, num_kv_heads, 4, generator=generator) for _ in range(2))

    def work(world):
        parts = (x.chunk(4, dim=1)[world.rank] for x in (q, k, v))
        return context.HeadsAttention(SimpleNamespace(degree=4, mesh=world), CausalAttention())(*parts, None)

    got = torch.cat(on_ranks(4, work), dim=1)
    torch.testing.assert_close(got, CausalAttention()(q, k, v, None), rtol=0, atol=1e-6)


def test_the_ranks_that_share_out_a_table_find_each_of_its_rows_once(monkeypatch):
    """The last rank has fewer rows."""
    table = torch.arange(1.0, 6.0)[:, None]
    monkeypatch.setattr(tensor, "_weight", lambda embedding: embedding)
    monkeypatch.setattr(tensor, "_scatter_sequence", lambda found_BTD, mesh: found_BTD)
    found = []
    for rank, rows in enumerate(table.split(3)):
        mesh = SimpleNamespace(size=lambda: 2, get_local_rank=lambda rank=rank: rank)
        embedding = SimpleNamespace(to_local=lambda rows=rows: rows, shape=table.shape, device_mesh=mesh)
        found.append(tensor._lookup(embedding, torch.arange(5)[None]))
    assert torch.equal(sum(found)[0], table)


@pytest.mark.parametrize("bias", [False, True])
def test_a_rank_computes_the_one_head_that_it_needs(bias, monkeypatch):
    linear = nn.Linear(3, 8, bias=bias)
    monkeypatch.setattr(tensor, "_weight", lambda module: linear.weight)
    monkeypatch.setattr(tensor, "_bias", lambda module: linear.bias)
    monkeypatch.setattr(tensor, "_replica", lambda weight: weight)
    x = torch.randn(2, 5, 3)
    for head in (0, 1):
        here = SimpleNamespace(_head=(head, 2), multiply=nn.functional.linear)
        torch.testing.assert_close(tensor._one_head(here, x), linear(x).chunk(2, -1)[head])


def test_a_sequence_is_gathered_rounded_only_if_all_its_readers_round_it_alike():
    module = nn.ModuleDict({name: Linear(2, 2) for name in "ab"})
    plan = SimpleNamespace(style_of=lambda path: "colwise")
    module["a"].rounds_whole_input = True
    assert tensor._rounding("m", module, plan) is None
    module["b"].rounds_whole_input = True
    assert tensor._rounding("m", module, plan) is module["a"]


@pytest.mark.usefixtures("imported_torchao")
def test_a_sequence_that_is_rounded_before_its_gather_multiplies_as_the_whole(monkeypatch):
    from crius.quantize.backend import maker

    ops = SimpleNamespace(
        wait_tensor=lambda x: x,
        all_reduce=lambda x, how, world: world.gather(x).amax(0),
        all_gather_into_tensor=lambda x, ranks, world: world.gather(x).flatten(0, 1),
        reduce_scatter_tensor=lambda x, how, ranks, world: world.sum(x).chunk(ranks)[world.rank],
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 8, 32, generator=generator)
    grad = torch.randn(2, 8, 16, generator=generator)
    linear = nn.Linear(32, 16, bias=False).requires_grad_(False)
    layer = maker(DenseQuantizeConfig(float8=Float8Config(enable=True)), emulate=True)(linear)

    whole = x.clone().requires_grad_()
    want = layer(whole)
    want.backward(grad)
    monkeypatch.setattr(torch.ops, "_c10d_functional", ops)

    def work(world):
        own = x.chunk(2, dim=1)[world.rank].clone().requires_grad_()
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            rounded = layer.gather_rounded(own, world, 2)
        assert kept == []  # a scale has no gradient
        y = layer(rounded)
        y.backward(grad)
        return y.detach(), own.grad

    (first, early), (second, late) = on_ranks(2, work)
    assert torch.equal(first, want) and torch.equal(second, want)
    torch.testing.assert_close(torch.cat((early, late), dim=1), 2 * whole.grad)  # the sum over both ranks
