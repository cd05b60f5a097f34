"""Layout-independent start of the weights.

A DTensor on a CPU mesh has no random state of its own: every rank would draw the same shard. So each parameter is
drawn in blocks of rows, every block from a generator seeded by (seed, parameter name, block number), and a rank draws
only the blocks that its shard touches. Any layout then starts from the same bits.
"""

import hashlib
import itertools
import math

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
            rows = draw_rows(name, parameter.shape, offset[0], offset[0] + local.shape[0], seed, rule.limit)
            for dim in range(1, local.dim()):
                rows = rows.narrow(dim, offset[dim], local.shape[dim])
            local.copy_(rows.mul_(rule.std))


def draw_rows(name: str, shape: torch.Size, first: int, last: int, seed: int, limit: float) -> Tensor:
    """Rows ``[first, last)`` of a standard normal parameter, clamped to ``[-limit, limit]``; float32 on the CPU.

    Args:
        name: full name of the parameter.
        shape: shape of the whole parameter.
        first: first row.
        last: row after the last.
        seed: seed of the run.
        limit: largest magnitude, in standard deviations.
    """
    row_shape = shape[1:]
    block_rows = max(1, BLOCK_NUMEL // math.prod(row_shape))
    generator = torch.Generator()
    out = torch.empty((last - first, *row_shape))
    for block in range(first // block_rows, -(-last // block_rows)):
        start, stop = block * block_rows, min((block + 1) * block_rows, shape[0])
        key = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(key, "little") >> 1)
        rows = torch.randn((stop - start, *row_shape), generator=generator).clamp_(-limit, limit)
        low, high = max(start, first), min(stop, last)
        out[low - first : high - first] = rows[low - start : high - start]
    return out
