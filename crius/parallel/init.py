"""Initial weights that do not depend on the layout.

A DTensor on a CPU mesh has no random state: every rank would draw the same shard. So each parameter is drawn in blocks
of rows. Every block has a generator seeded by (seed, parameter name, block number), and a rank draws only the blocks
that its shard touches. Any layout then starts from the same bits. The stacked matrices of experts are drawn one by one,
each with its number in the name, since FSDP may split the rows of every matrix.
"""

import hashlib
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from crius.errors import PlanError
from crius.models.description import ModelDescription, Weight
from crius.models.plan import match
from crius.shards import all_parameters, local_shard

BLOCK_NUMEL = 1 << 16  # elements drawn with one seed; seeding takes 10 us, and a shard draws at most one block too many
SHARES = 2
"""Tasks per thread. Few, since starting a task costs time, but more than one, since a core may be busy."""


@dataclass(frozen=True)
class Constant:
    """Every element starts as ``value``."""

    value: float


@dataclass(frozen=True)
class Normal:
    """Elements drawn from N(0, std^2) and clamped to ``limit`` standard deviations (Llama 3 code: 3)."""

    std: float
    limit: float = 3.0


@dataclass(frozen=True)
class Uniform:
    """Elements drawn from U(-limit, limit)."""

    limit: float


Init = Constant | Normal | Uniform


def init_rules(model: ModelDescription) -> list[tuple[str, Init]]:
    """Name patterns of parameters and buffers, each with its initialisation. The first pattern that fits counts.

    Matrices start with std 0.02. Matrices that write to the residual stream start smaller, by ``sqrt(2 * num_layers)``
    (GPT-2, section 2.3). The output layer and a tied embedding start with std ``D ** -0.5``. In adapters, A is uniform
    within ``in ** -0.5``, as PEFT's ``kaiming_uniform_(a=sqrt(5))``, and B is 0, so that they add nothing at first.
    """
    ends = Normal(model.dim**-0.5)
    norm = Constant(0.0 if model.config.norm_plus_one else 1.0)
    residual = Normal(0.02 / (2 * model.num_layers) ** 0.5)

    def rule(weight: Weight) -> Init:
        if weight.kind == "norm":
            return norm
        if weight.kind == "bias":
            return Constant(0.0)
        return residual if weight.to_residual else Normal(0.02)

    layers = {f"layers.*.{weight.name}": rule(weight) for _, layer in model.layers for weight in layer.weights}
    buffers = {
        f"layers.*.{buffer.name}": Constant(buffer.value) for _, layer in model.layers for buffer in layer.buffers
    }
    adapters: dict[str, Init] = {
        weight.name.replace(weight.unit, "layers.*", 1): Uniform(weight.shape[1] ** -0.5)
        if weight.name.endswith("lora_A")
        else Constant(0.0)
        for weight in model.adapters
    }
    return [
        *adapters.items(),
        ("tok_embeddings.weight", ends if model.tied_embeddings else Normal(1.0)),
        ("output.weight", ends),
        *layers.items(),
        *buffers.items(),
        ("norm.weight", norm),
    ]


def init_parameters(model: nn.Module, rules: list[tuple[str, Init]], seed: int, *, draws: bool = True) -> None:
    """Fill every parameter and buffer of ``model`` by the first rule whose pattern fits its name.

    Args:
        model: the model, with allocated memory.
        rules: rules for all names of the whole model.
        seed: seed of the run.
        draws: whether to draw random numbers. Without, random weights are NaN until a checkpoint is loaded into them.

    Raises:
        PlanError: no rule fits a parameter.
    """
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # one pool for all: starting threads is slow
        for name, parameter in itertools.chain(all_parameters([model]), model.named_buffers()):
            rule = next((rule for pattern, rule in rules if match(pattern, name)), None)
            if rule is None and isinstance(parameter, nn.Parameter) and not parameter.requires_grad:
                continue  # a frozen layer in fewer bits, which is filled when its weight is known
            if rule is None:
                raise PlanError(
                    f"no init rule fits parameter {name}.", fix="describe it as a weight in the config's layer()"
                )
            local, offset = local_shard(parameter)
            if isinstance(rule, Constant):
                local.fill_(rule.value)
            elif not draws:
                local.fill_(math.nan)
            elif local.numel():
                place = tuple(slice(start, start + size) for start, size in zip(offset, local.shape, strict=True))
                _draw(name, parameter.shape, place, local, seed, rule, pool)


def _draw(
    name: str,
    shape: tuple[int, ...],
    place: tuple[slice, ...],
    out: Tensor,
    seed: int,
    rule: Normal | Uniform,
    pool: ThreadPoolExecutor | None = None,
) -> None:
    """Draw into ``out`` the part ``place`` of a parameter of ``shape``."""
    first, *columns = place
    if len(shape) == 3:
        for number, matrix in zip(range(first.start, first.stop), out, strict=True):
            _draw(f"{name}/{number}", shape[1:], place[1:], matrix, seed, rule, pool)
        return
    # no second buffer where the numbers can be drawn in place
    target = out if out.device.type == "cpu" and out.dtype == torch.float32 else None
    drawn = draw_rows(name, torch.Size(shape), first.start, first.stop, seed, rule, tuple(columns), target, pool)
    if target is None:
        out.copy_(drawn)


def draw_weight(name: str, shape: tuple[int, ...], rules: list[tuple[str, Init]], seed: int) -> Tensor:
    """The whole initial value by ``rules`` of a weight that no layer stores unquantised; float32 on the CPU."""
    rule = next(rule for pattern, rule in rules if match(pattern, name))
    if isinstance(rule, Constant):
        return torch.full(shape, rule.value)
    drawn = torch.empty(shape)
    _draw(name, drawn.shape, tuple(slice(0, size) for size in shape), drawn, seed, rule)
    return drawn


def draw_rows(
    name: str,
    shape: torch.Size,
    first: int,
    last: int,
    seed: int,
    rule: Normal | Uniform,
    columns: tuple[slice, ...] = (),
    out: Tensor | None = None,
    pool: ThreadPoolExecutor | None = None,
) -> Tensor:
    """Rows ``[first, last)`` of a parameter that is initialised by ``rule``; float32 on the CPU.

    A block is always drawn whole, even if only some of its columns are needed: one generator makes its numbers in
    sequence (docs/LOG.md).

    Args:
        name: full name of the parameter.
        shape: shape of the whole parameter.
        first: first row.
        last: row after the last.
        seed: seed of the run.
        rule: standard deviation and limit.
        columns: slices of the other dims; empty: all.
        out: memory for the result; None: new memory.
        pool: threads that draw blocks, as many as torch has; None: the caller's thread draws.
    """
    width = math.prod(shape[1:])
    block_rows = max(1, BLOCK_NUMEL // width)
    if out is None:
        out = torch.empty((last - first, *([dim.stop - dim.start for dim in columns] or shape[1:])))
    target = out.numpy()

    def fill(blocks: range) -> None:
        scratch = torch.empty((block_rows, *shape[1:]))  # small enough for the cache of the thread's core
        for block in blocks:
            start = block * block_rows
            stop = min((block + 1) * block_rows, shape[0])
            low = max(start, first)
            high = min(stop, last)
            drawn = scratch[: stop - start]
            generator = _generator(f"{seed}/{name}/{block}")
            # numpy runs in this thread; torch's operators would start threads of their own
            wanted = scratch.numpy()[(slice(low - start, high - start), *columns)]
            if isinstance(rule, Uniform):
                drawn.uniform_(-rule.limit, rule.limit, generator=generator)
                np.copyto(target[low - first : high - first], wanted)
                continue
            drawn.normal_(generator=generator)
            np.clip(wanted, -rule.limit, rule.limit, out=wanted)
            np.multiply(wanted, np.float32(rule.std), out=target[low - first : high - first])

    blocks = range(first // block_rows, -(-last // block_rows))
    if pool is None:
        fill(blocks)
    else:
        span = -(-len(blocks) // (SHARES * torch.get_num_threads()))
        list(pool.map(fill, (blocks[at : at + span] for at in range(0, len(blocks), span))))
    return out


def _generator(key: str) -> torch.Generator:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
