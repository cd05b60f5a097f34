"""Layout-independent start of the weights.

A DTensor on a CPU mesh has no random state of its own: every rank would draw the same shard. So each parameter is
drawn in blocks of rows, every block from a generator seeded by (seed, parameter name, block number), and a rank draws
only the blocks that its shard touches. Any layout then starts from the same bits.
"""

import hashlib
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crius.errors import PlanError
from crius.models.init import Constant, Init
from crius.models.plan import match
from crius.shards import local_shard, named_parameters

BLOCK_NUMEL = 1 << 16  # elements drawn with one seed; seeding costs 10 us, a shard draws at most one block too many


def init_parameters(model: nn.Module, rules: list[tuple[str, Init]], seed: int) -> None:
    """Fill every parameter and buffer of ``model`` by the first rule whose pattern fits its name.

    Raises:
        PlanError: no rule fits a parameter.
    """
    for name, parameter in itertools.chain(named_parameters([model]), model.named_buffers()):
        rule = next((rule for pattern, rule in rules if match(pattern, name)), None)
        if rule is None:
            raise PlanError(f"no init rule fits parameter {name}.", fix="describe it: a weight of the config's layer()")
        local, offset = local_shard(parameter)
        if isinstance(rule, Constant):
            local.fill_(rule.value)
        elif local.numel():
            first, *columns = (slice(start, start + size) for start, size in zip(offset, local.shape, strict=True))
            drawn = draw_rows(name, parameter.shape, first.start, first.stop, seed, rule.limit, tuple(columns))
            local.copy_(drawn.mul_(rule.std))


def draw_rows(
    name: str, shape: torch.Size, first: int, last: int, seed: int, limit: float, columns: tuple[slice, ...] = ()
) -> Tensor:
    """Rows ``[first, last)`` of a standard normal parameter, clamped to ``[-limit, limit]``; float32 on the CPU.

    Blocks are drawn by as many threads as torch has. A block is drawn whole, also where only some of its columns are
    wanted: one generator makes its numbers in turn.

    Args:
        name: full name of the parameter.
        shape: shape of the whole parameter.
        first: first row.
        last: row after the last.
        seed: seed of the run.
        limit: largest magnitude, in standard deviations.
        columns: what is wanted of the other dims; empty: all.
    """
    block_rows = max(1, BLOCK_NUMEL // math.prod(shape[1:]))
    widths = [dim.stop - dim.start for dim in columns] or shape[1:]
    out = torch.empty((last - first, *widths))
    blocks = range(first // block_rows, -(-last // block_rows))

    def fill(block: int) -> None:
        start, stop = block * block_rows, min((block + 1) * block_rows, shape[0])
        low, high = max(start, first), min(stop, last)
        drawn = _draw_block(f"{seed}/{name}/{block}", (stop - start, *shape[1:]), limit)
        # numpy's copy stays in this thread; torch's would call threads of its own
        out[low - first : high - first].numpy()[...] = drawn[(slice(low - start, high - start), *columns)]

    num_threads = min(len(blocks), torch.get_num_threads())
    if num_threads <= 1:
        for block in blocks:
            fill(block)
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(fill, blocks))
    return out


def _draw_block(key: str, shape: tuple[int, ...], limit: float) -> "np.ndarray[Any, Any]":
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    drawn: np.ndarray[Any, Any] = torch.randn(shape, generator=generator).numpy()
    return np.clip(drawn, -limit, limit, out=drawn)
