"""The start of the weights belongs to the seed, not to the layout."""

import functools
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from harness import TEXT, parse

from crius.cli.app import facts_of
from crius.config.layout import parse_layout
from crius.parallel.init import BLOCK_NUMEL, Normal, draw_rows
from crius.tools.verify import matrix, worker
from crius.tools.verify.parameters import Shards
from crius.tools.verify.worker import WorkerTask

UNIT = Normal(1.0)
FLAGS = ["--recipe", "verify", "--data.source", "text", "--data.path", str(TEXT)]


@pytest.fixture(scope="module")
def checksums(workers, tmp_path_factory):
    """What ``crius verify init`` compares: a checksum of the bits of each whole parameter, by its name."""

    def run(text, seed=42):
        layout = parse_layout(text)
        facts = facts_of(parse([*FLAGS, "--debug.seed", str(seed)]), 0, None)
        case = matrix.case(facts, matrix.fixed(facts.config, [layout], 1), layout)
        folder = tmp_path_factory.mktemp(text)
        task = WorkerTask(case.config, folder, 60, Shards(folder, is_whole=True))
        workers(layout.num_ranks).run(functools.partial(worker.start, task), folder)
        return json.loads((folder / worker.RESULT).read_text())["checksums"]

    return run


@pytest.fixture(scope="module")
def one_device(checksums):
    return checksums("1")


MANY_RANKS = ("fsdp8", "hsdp2x4", "tp8", "hsdp2x2_tp2")  # pp2_fsdp2_tp2 has as many
ROWS = [pytest.param(row, marks=pytest.mark.slow if row in MANY_RANKS else ()) for row in matrix.INIT[1:]]


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ROWS)
def test_every_layout_starts_from_the_bits_of_one_device(layout, one_device, checksums):
    assert all(one_device.values())  # empty where ranks differ that hold the same part
    assert checksums(layout) == one_device


def test_another_seed_starts_every_matrix_from_other_bits(one_device, checksums):
    second = checksums("1", seed=43)
    same = {name for name in one_device if one_device[name] == second[name]}
    assert same == {name for name in one_device if name.endswith("norm.weight")}  # all ones, whatever the seed


def test_no_two_matrices_start_alike(one_device):
    matrices = [found for name, found in one_device.items() if not name.endswith("norm.weight")]
    assert len(set(matrices)) == len(matrices) == 2 + 8 * 7


@pytest.mark.parametrize("shape", [(700, 300), (5, BLOCK_NUMEL + 3), (3 * BLOCK_NUMEL + 1,), (64, 16, 200)])
def test_any_range_of_rows_is_that_slice_of_the_whole(shape):
    size = torch.Size(shape)
    draw = functools.partial(draw_rows, "layers.0.w", size, seed=1, rule=UNIT)
    whole = draw(0, size[0])
    assert whole.shape == size
    block_rows = max(1, BLOCK_NUMEL // whole[0].numel())
    edges = sorted({0, 1, size[0] // 3, size[0] - 1, size[0], *(min(size[0], block_rows + d) for d in (-1, 0, 1))})
    for first in edges:
        for last in (edge for edge in edges if edge >= first):
            assert torch.equal(draw(first, last), whole[first:last]), (first, last)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_columns_and_threads_change_no_bit(num_threads):
    size, before = torch.Size((900, 8, 200)), torch.get_num_threads()
    whole = draw_rows("layers.0.w", size, 0, 900, 1, UNIT)
    torch.set_num_threads(num_threads)
    try:
        with ThreadPoolExecutor(num_threads) as pool:
            part = draw_rows("layers.0.w", size, 30, 870, 1, UNIT, (slice(2, 7), slice(50, 150)), pool=pool)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(part, whole[30:870, 2:7, 50:150])


def test_name_seed_and_block_each_give_other_numbers():
    size = torch.Size((2 * BLOCK_NUMEL, 1))
    base = draw_rows("a", size, 0, size[0], 1, UNIT)
    assert base[[0, 1, -1], 0].tolist() == pytest.approx([-1.3045, -0.1324, -0.9501], abs=1e-4)
    for other in (draw_rows("b", size, 0, size[0], 1, UNIT), draw_rows("a", size, 0, size[0], 2, UNIT)):
        assert (base == other).float().mean() < 0.01  # 0.27 % are clamped, to one of two values
    assert (base[:BLOCK_NUMEL] == base[BLOCK_NUMEL:]).float().mean() < 0.01


def test_draws_are_a_clamped_standard_normal():
    drawn = draw_rows("a", torch.Size((1_000_000,)), 0, 1_000_000, 1, Normal(1.0, limit=2.0))
    assert drawn.abs().max() == 2.0
    # 1,000,000 draws: standard error 1e-3 of the mean, 7e-4 of the std; clamping at 2 makes the std 0.9594
    assert drawn.mean().item() == pytest.approx(0, abs=5e-3)
    assert drawn.std().item() == pytest.approx(0.9594, abs=5e-3)


def test_one_thread_draws_more_than_20_million_numbers_a_second():
    """405B parameters on 512 ranks are then drawn in less than a minute."""
    size = torch.Size((4096, 4096))
    best = 0.0
    for _ in range(3):  # the best of 3: other processes may be busy
        begin = time.perf_counter()
        draw_rows("a", size, 0, size[0], 1, UNIT)
        best = max(best, size.numel() / (time.perf_counter() - begin))
    print(f"{best / 1e6:.0f} million numbers a second")
    assert best > 20e6
