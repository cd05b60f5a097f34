"""Silent data corruption: repeats work and compares replicas, bit by bit.

Two checks, each with its interval of steps. One computes the first microbatch of a step twice before the step, with the
same random numbers, and compares the loss and each FSDP unit's gradient on this rank, before gradients are summed over
ranks. The other compares the weights and buffers of ranks with the same shard.
"""

import contextlib
import itertools
import logging
import math
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from crius.config.operation import SdcConfig
from crius.data.loader import Batch
from crius.errors import CorruptionError
from crius.parallel.fsdp import plan_units, show_gradients
from crius.parallel.reproducible import HashedReduceScatter, hash_bits
from crius.parallel.runtime import World
from crius.shards import local_shard, named_parameters, named_state
from crius.train.build import Built, Job
from crius.train.state import restore_streams, streams
from crius.train.step import Accumulation, Runner

log = logging.getLogger("crius.train")

FIX = "leave out that host and restart: a run with --checkpoint.enable continues from its last good step"

Named = Sequence[tuple[str, Tensor]]


class Recompute:
    """Computes a microbatch twice and compares the results.

    Args:
        runner: runner of the whole model.
        units: sums the gradients of each FSDP unit, by its name, in the order of the forward pass.
        parameters: parameters of this rank.
        world: all ranks.
    """

    def __init__(
        self,
        runner: Accumulation,
        units: dict[str, HashedReduceScatter],
        parameters: Sequence[tuple[str, nn.Parameter]],
        world: World,
    ) -> None:
        self._runner = runner
        self._units = units
        self._world = world
        self._parameters = [parameter for _, parameter in parameters]  # while they are sharded

    def check(self, step: int, batch: Batch) -> None:
        """Compare. Weights, gradients and random numbers stay as before.

        Raises:
            CorruptionError: a rank computed something else the second time; raised on every rank.
        """
        before = streams(self._world.device)
        first = self._once(batch)
        restore_streams(before, self._world.device)
        second = self._once(batch)
        restore_streams(before, self._world.device)
        differs = self._world.gather((first != second).any(dim=1).to(torch.uint8)).cpu()  # (ranks, 1 + units)
        if differs.any():
            self._report(step, differs.bool())

    def _once(self, batch: Batch) -> Tensor:
        """Bits of the loss, then a hash of each unit's gradient, int64 ``(1 + units, 2)``."""
        for unit in self._units.values():
            unit.is_on = True
            unit.hashes = []
        loss = self._runner.rehearse(batch)
        for parameter in self._parameters:
            parameter.grad = None
        for name, unit in self._units.items():
            assert len(unit.hashes) == 1, f"{name}: {len(unit.hashes)} gradients of one backward pass"
            unit.is_on = False
        bits = loss.reshape(1).view(torch.int64)
        return torch.stack([bits.repeat(2), *(unit.hashes[0] for unit in self._units.values())])

    def _report(self, step: int, differs: Tensor) -> None:
        hosts = self._world.gather_json(platform.node())
        names = list(self._units)
        found = []
        for rank in differs.any(dim=1).nonzero().flatten().tolist():
            wrong = [name for name, is_wrong in zip(names, differs[rank, 1:].tolist(), strict=True) if is_wrong]
            parts = ["loss"] if differs[rank, 0] else []
            # the backward pass runs from the last unit to the first, and a wrong gradient spreads with it
            parts += [f"gradients of {len(wrong)} of {len(names)} units, first {wrong[-1]}"] if wrong else []
            found.append(f"rank {rank} on host {hosts[rank]}: {' and '.join(parts)}")
        raise CorruptionError(
            f"step {step}, computed twice, gave different results: {'; '.join(found)}.",
            where="--sdc.recompute_interval",
            why="same weights, samples and random numbers: a device, its memory or a kernel is at fault",
            fix=FIX,
        )


class Replicas:
    """Compares the weights and buffers of ranks with the same shard.

    Args:
        state: weights and buffers of this rank, by their names in the whole model.
        names: names to compare, the same on each rank, which has some of them; a name occurs twice if a rank may have
            two copies.
        world: all ranks.
        where: setting that asks for it.
    """

    def __init__(self, state: Named, names: Sequence[str], world: World, where: str) -> None:
        self._world = world
        self._where = where
        self._places: dict[str, list[int]] = {}
        for place, name in enumerate(names):
            self._places.setdefault(name, []).append(place)
        self._num_places = len(names)
        free = {name: list(places) for name, places in self._places.items()}
        self._held: list[tuple[int, int, Tensor]] = []
        for name, tensor in state:
            local, offset = local_shard(tensor)
            if name in free and local.numel():
                start = sum(at * math.prod(tensor.shape[dim + 1 :]) for dim, at in enumerate(offset))
                self._held.append((free[name].pop(0), start + 1, tensor))

    @property
    def nbytes(self) -> int:
        """Bytes that this rank hashes."""
        return sum(local.numel() * local.element_size() for local in (local_shard(held)[0] for *_, held in self._held))

    def check(self, step: int) -> None:
        """Compare.

        Raises:
            CorruptionError: replicas of a weight differ; raised on every rank.
        """
        device = self._world.device
        rows = torch.zeros((self._num_places, 3), dtype=torch.int64, device=device)  # start + 1 of the shard, its hash
        for place, start, tensor in self._held:
            rows[place, 0] = start
            rows[place, 1:] = hash_bits(local_shard(tensor)[0]).to(device)
        gathered = self._world.gather(rows).cpu().tolist()
        found: dict[str, list[int]] = {}
        for name, places in self._places.items():
            holders: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
            for rank, place in itertools.product(range(len(gathered)), places):
                start, *bits = gathered[rank][place]
                if start:
                    holders[start].append((rank, tuple(bits)))
            wrong = {rank for held in holders.values() for rank in odd_ones(held)}
            if wrong:
                found[name] = sorted(wrong)
        if found:
            self._report(step, found)

    def _report(self, step: int, found: dict[str, list[int]]) -> None:
        hosts = self._world.gather_json(platform.node())
        ranks = sorted({rank for wrong in found.values() for rank in wrong})
        name, wrong = next(iter(found.items()))
        more = f" and of {len(found) - 1} more weights" if len(found) > 1 else ""
        held_by = ", ".join(f"rank {rank} on host {hosts[rank]}" for rank in ranks)
        others = "the other replicas" if len(wrong) == 1 else "each other"
        raise CorruptionError(
            f"after step {step} replicas of {name}{more} differ: {held_by}: other bits than {others}.",
            where=self._where,
            why="replicas make the same updates: a device, its memory or the network changed a number. If two "
            "differ, either may be wrong",
            fix=FIX,
        )


def build_copies(job: Job, parameters: Named) -> Replicas | None:
    """Comparison of the two copies of each weight that the first and the last stage share; None if there are none."""
    names = job.copied
    where = "a tied weight: the first and the last pipeline stage have a copy each"
    return Replicas(parameters, [*names, *names], job.ranks, where) if names else None


def odd_ones(held: Sequence[tuple[int, tuple[int, ...]]]) -> list[int]:
    """The ranks whose hash differs from the majority's; all ranks if there is no majority, none if all agree."""
    counts = Counter(bits for _, bits in held).most_common()
    if len(counts) == 1:
        return []
    majority = counts[0][0] if counts[0][1] > counts[1][1] else None
    return [rank for rank, bits in held if bits != majority]


class SdcCheck:
    """The checks that are on, run at their steps. The first run of each logs its time.

    Args:
        config: has the steps from one check to the next.
        recompute: None if it is off.
        replicas: None if it is off.
    """

    def __init__(self, config: SdcConfig, recompute: Recompute | None, replicas: Replicas | None) -> None:
        self._config = config
        self._recompute = recompute
        self._replicas = replicas
        self._said: set[str] = set()

    def before_step(self, step: int, batch: Batch) -> None:
        """Call with this rank's batch, on the device, before the step is computed.

        Raises:
            CorruptionError: a rank computed something else the second time.
        """
        if self._recompute and step % self._config.recompute_interval == 0:
            with self._timed("recompute: bits identical", self._config.recompute_interval):
                self._recompute.check(step, batch)

    def after_step(self, step: int) -> None:
        """Call when the update of ``step`` is in the weights.

        Raises:
            CorruptionError: replicas of a weight differ.
        """
        if self._replicas and step % self._config.replica_interval == 0:
            with self._timed("replicas: weights identical", self._config.replica_interval):
                self._replicas.check(step)

    @contextlib.contextmanager
    def _timed(self, result: str, interval: int) -> Iterator[None]:
        begin = time.monotonic()
        yield
        if result not in self._said:  # the check waited for the device, so the time is complete
            self._said.add(result)
            log.info("sdc: %s, took %.3f s, every %d steps", result, time.monotonic() - begin, interval)


def build_sdc(job: Job, built: Built, runner: Runner) -> SdcCheck:
    """The checks of ``[sdc]``; logs their cost.

    Args:
        job: the run.
        built: the model.
        runner: runner of ``built``; an ``Accumulation`` if a microbatch is to be computed twice.
    """
    sdc = job.config.sdc
    recompute = None
    replicas = None
    if sdc.recompute_interval:
        assert isinstance(runner, Accumulation)
        [model] = built.parts
        units = plan_units(job.facts.plan, model, job.config.parallelism)
        shown = show_gradients(model, units, job.mesh, job.config.training)
        recompute = Recompute(runner, shown, named_parameters(built.parts), job.ranks)
        share = 2 / (sdc.recompute_interval * job.sizes.accumulation)
        cost = f"2 more microbatches, about {100 * share:.2g} % of the time"
        log.info("sdc: recompute every %d steps: %s", sdc.recompute_interval, cost)
    if sdc.replica_interval:
        names = [*job.facts.state_names, *job.copied]
        replicas = Replicas(named_state(built.parts), names, job.ranks, "--sdc.replica_interval")
        log.info(
            "sdc: replicas compared every %d steps: hashes of %.1f MiB per rank, no weights are sent",
            sdc.replica_interval,
            replicas.nbytes / 2**20,
        )
    return SdcCheck(sdc, recompute, replicas)
