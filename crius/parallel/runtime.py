"""The process group, for any number of processes: one process is a world of one, without a port."""

import datetime
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from crius.errors import EnvironmentError


@dataclass(frozen=True)
class World:
    """This process among all processes of the run."""

    rank: int
    size: int
    device: torch.device

    def sum(self, values: Tensor) -> Tensor:
        """``values`` summed over all ranks, in place; any shape, the same on every rank."""
        dist.all_reduce(values)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """``values`` of all ranks, stacked: ``(world size, *values.shape)``."""
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values)
        return torch.stack(parts)


def pick_device(wanted: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    """The device of this process.

    Raises:
        EnvironmentError: cuda is asked for and torch cannot use a GPU, or has fewer than local ranks.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise EnvironmentError(
            f"local rank {local_rank} needs a GPU of its own, but torch {torch.__version__} can use "
            f"{torch.cuda.device_count()}.",
            where="training.device",
            fix="start fewer ranks here, or --training.device cpu; crius doctor says what is missing",
        )
    return torch.device("cuda", local_rank)


def _store(rendezvous: str, rank: int, size: int, timeout: datetime.timedelta) -> dist.Store | None:
    """The key-value store that ranks meet in; None leaves it to ``env://``."""
    kind, _, place = rendezvous.partition(":")
    if size == 1:
        return dist.HashStore()
    if kind == "file":
        return dist.FileStore(place, size)
    if kind == "tcp":
        host, _, port = place.rpartition(":")
        return dist.TCPStore(host, int(port), size, is_master=rank == 0, timeout=timeout)
    return None


@contextmanager
def world(rank: int, size: int, device: torch.device, rendezvous: str, timeout_seconds: int) -> Iterator[World]:
    """The default process group while the context is open.

    Args:
        rank: this process, of ``size``.
        size: number of processes.
        device: where tensors live; cuda communicates by NCCL and, for host tensors, Gloo.
        rendezvous: ``""`` for one process, ``file:PATH``, ``tcp:HOST:PORT``, or ``env``.
        timeout_seconds: after which a collective or the rendezvous fails.

    Raises:
        EnvironmentError: there is no network interface to meet on, not even the loopback.
    """
    timeout = datetime.timedelta(seconds=timeout_seconds)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    if size == 1:  # needs no other host, so the name of this one need not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=_store(rendezvous, rank, size, timeout),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
    except RuntimeError as error:
        if "Unable to find" not in str(error):
            raise
        raise EnvironmentError(
            f"Gloo cannot use the network interface {os.environ.get('GLOO_SOCKET_IFNAME', 'of this host name')}.",
            why=str(error).strip().splitlines()[0],
            fix="bring it up (ip link set lo up), or export GLOO_SOCKET_IFNAME=<an interface that is up>",
        ) from error
    try:
        yield World(rank, size, device)
    except BaseException:
        if size == 1:
            dist.destroy_process_group()
        raise  # with peers, destroying could wait for their collectives: the failed process ends without
    dist.destroy_process_group()


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[World]:
    """A process group of ``size`` ranks of which only this one, ``rank``, exists; collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield World(rank, size, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
