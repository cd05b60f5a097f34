"""The process group for any number of processes. One process is a world of one rank and needs no port."""

import datetime
import json
import logging
import os
import socket
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.distributed_c10d as c10d
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from crius.errors import EnvironmentError
from crius.host import MOST_SHARING, NCCL_SHARES, SHARE_GPU, gpu_sharing
from crius.parallel.interface import GLOO, choose_interface
from crius.plugins import loaded_nccl, release
from crius.untrusted import parse_json

log = logging.getLogger("crius.parallel")

# torch 2.13 deprecates this name; the new name does not exist in 2.11
_all_gather = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd


def all_gather(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The parts of all ranks of ``mesh``, one axis, joined along dim 0 in the order of the ranks.

    The gradient of a part is summed over the ranks (reduce-scatter). Integers may be gathered too, without a gradient.
    """
    gathered: Tensor = _all_gather(x.contiguous(), 0, mesh)
    return gathered


def all_to_all(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Entry ``j`` of dim 0 goes to rank ``j`` of ``mesh``, one axis; entry ``i`` of the result came from rank ``i``.

    The gradient is sent back. Dim 0 is as long as the mesh.
    """
    exchanged: Tensor = functional.all_to_all_single_autograd(x.contiguous(), None, None, mesh)
    return exchanged


def all_to_all_rows(x: Tensor, to: list[int], of: list[int], mesh: DeviceMesh) -> Tensor:
    """The first ``to[0]`` rows go to rank 0 of ``mesh``, one axis, the next ones to rank 1, and so on.

    The gradient is sent back.

    Args:
        x: rows, as many as the sum of ``to``.
        to: number of rows for each rank.
        of: number of rows from each rank; the result has them in the order of the ranks.
        mesh: the ranks.
    """
    exchanged: Tensor = functional.all_to_all_single_autograd(x.contiguous(), of, to, mesh)
    return exchanged


def all_reduce(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of integers over the ranks of ``mesh``, one axis, without a gradient."""
    total: Tensor = functional.wait_tensor(functional.all_reduce(x, "sum", mesh))
    return total


_NO_PEERS = "fake"
"""Backend of a rank without peers, or with simulated peers. Importing its store registers it."""

_SHARING_NCCL = (2, 30)
"""First NCCL by which several ranks can have the same GPU."""

_SAY_SECONDS = 5.0
"""Wait for other ranks after which they are named; then again after 4 and 16 times as long."""

_POLL_SECONDS = 0.5

_LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class World:
    """This process among all processes of the run."""

    rank: int
    size: int
    device: torch.device
    store: dist.Store | None = None
    """Key-value store of all ranks, for messages outside of collectives; None on fake ranks."""

    def sum(self, values: Tensor) -> Tensor:
        """``values`` summed over all ranks, in place; any shape, the same on every rank."""
        dist.all_reduce(values)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """``values`` of all ranks, stacked: ``(world size, *values.shape)``."""
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values)
        return torch.stack(parts)

    def gather_json(self, value: Any) -> list[Any]:
        """``value`` of all ranks, in the order of the ranks. It may be anything that JSON can express; no pickle."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([data.numel()]))
        longest = max(int(size) for size in sizes)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, F.pad(data, (0, longest - data.numel())))
        return [parse_json(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]


def let_segments_grow(environ: MutableMapping[str, str]) -> None:
    """Make the GPU's allocator map memory piece by piece, so that tensors of many sizes leave no gaps.

    The allocator reads its environment at the first allocation. A user's setting is kept, under either name: torch 2.8
    to 2.11 call the older name deprecated.
    """
    if not any(name in environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def pick_device(
    wanted: Literal["auto", "cpu", "cuda"],
    local_rank: int,
    *,
    sees_own_gpu: bool = False,
    flag: str = "--training.device",
) -> torch.device:
    """The device of this process.

    Args:
        wanted: device that was asked for.
        local_rank: number of this process on its host; the index of the GPU.
        sees_own_gpu: each process of this host sees only its own GPU, whose index is then 0.
        flag: flag of ``wanted``, for the error.

    Raises:
        EnvironmentError: cuda is asked for, but torch cannot use a GPU or has fewer GPUs than local ranks, or more
            ranks than possible share a GPU.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if gpu_sharing(os.environ) and torch.cuda.device_count() > 0:
        if local_rank >= MOST_SHARING:
            raise EnvironmentError(
                f"local rank {local_rank} would share a GPU with {local_rank} others.",
                where=SHARE_GPU,
                why="it is for tests of layouts",
                fix=f"start at most {MOST_SHARING} ranks, or unset {SHARE_GPU}",
            )
        return torch.device("cuda", 0)
    if sees_own_gpu and torch.cuda.device_count() == 1:
        return torch.device("cuda", 0)
    if local_rank >= torch.cuda.device_count():
        raise EnvironmentError(
            f"local rank {local_rank} needs its own GPU, but torch {torch.__version__} can use "
            f"{torch.cuda.device_count()}.",
            where=flag,
            fix=f"start fewer ranks here, or {flag} cpu; crius doctor shows what is missing",
        )
    return torch.device("cuda", local_rank)


@dataclass(frozen=True)
class _Meeting:
    """The ranks find each other. The waits are polls, since Python handles no signal while torch's C++ code waits."""

    rank: int
    size: int
    timeout: datetime.timedelta
    hosts: Mapping[int, str]
    speaks: bool

    def wait(self, is_over: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        """Wait until ``is_over``, which takes at most a second, and name the ranks that ``missing`` lists.

        Raises:
            EnvironmentError: it took too long.
        """
        say_at = _SAY_SECONDS
        started = time.monotonic()
        while not is_over():
            waited = time.monotonic() - started
            if waited > self.timeout.total_seconds():
                raise EnvironmentError(
                    f"{self.named(missing())} did not come within {waited:.0f} s.",
                    fix="look at the logs of these ranks; if they only start slowly, raise --comm.timeout_seconds",
                )
            if waited > say_at and self.speaks:
                say_at *= 4
                ranks = missing()
                if self.rank == 0 or 0 in ranks:
                    log.warning("waiting for %s: %.0f s", self.named(ranks), waited)
            time.sleep(min(_POLL_SECONDS, waited / 20))

    def named(self, ranks: list[int]) -> str:
        """A text for missing ranks, such as ``ranks 1, 3 (n02) of 4``."""
        names = ", ".join(f"{rank} ({self.hosts[rank]})" if rank in self.hosts else str(rank) for rank in ranks)
        return f"{'ranks' if len(ranks) > 1 else 'rank'} {textwrap.shorten(names, 300)} of {self.size}"

    def meet(self, store: dist.Store) -> None:
        """Wait until all ranks have called this with ``store``, which serves one call.

        Raises:
            EnvironmentError: some did not.
            SystemExit: a signal to a rank raised it there before that; on all ranks.
        """
        try:
            store.set(str(self.rank), "")
            if store.add("come", 1) == self.size:
                store.compare_set("code", "", "0")
            self.wait(
                lambda: store.check(["code"]),
                lambda: [rank for rank in range(self.size) if not store.check([str(rank)])],
            )
            code = int(store.get("code"))
        except SystemExit as stop:
            code = int(store.compare_set("code", "", str(stop.code)))  # 0 if all have come: then all continue
        if code:
            time.sleep(2 * _POLL_SECONDS)  # this rank may serve the store, and the others read it
            raise SystemExit(code)

    def store(self, rendezvous: str) -> dist.Store:
        """The key-value store through which the ranks find each other: rank 0 or torchrun's agent serves it.

        A server would listen on all interfaces for any host, and it asks for no password. If all ranks are on one
        machine, it gets a socket that only this machine can reach.
        """
        kind, _, place = rendezvous.partition(":")
        if self.size == 1:
            return dist.HashStore()
        if kind == "file":
            return dist.FileStore(place, self.size)
        host, _, port_text = place.rpartition(":")
        port = int(port_text)
        serves = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

        def answers() -> bool:
            with suppress(OSError), socket.create_connection((host, port), 1):
                return True
            return False

        if not serves:
            self.wait(answers, lambda: [0])
        try:
            listener = socket.create_server((host, port)).detach() if serves and host in _LOOPBACK else None
            store = dist.TCPStore(
                host, port, None, serves, self.timeout, wait_for_workers=False, master_listen_fd=listener
            )
        except (OSError, dist.DistNetworkError) as error:
            raise EnvironmentError(
                f"the ranks cannot meet at port {port} of {host}: {error}.",
                where="MASTER_ADDR, MASTER_PORT",
                fix="give a free port of the host of rank 0",
            ) from error
        # torchrun's agent keeps its store across a restart, with the addresses of ranks that no longer exist
        return dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _master(rendezvous: str, size: int) -> str | None:
    """Host of rank 0; None if all ranks are on this host, as far as the rendezvous shows."""
    host = rendezvous.removeprefix("tcp:").rpartition(":")[0]
    return None if size == 1 or rendezvous.startswith("file:") or host in _LOOPBACK else host


@contextmanager
def _default_timeout(timeout: datetime.timedelta) -> Iterator[None]:
    """Give ``timeout`` to each process group that is created inside without a timeout: the axes of a mesh, and FSDP's.

    Otherwise torch gives them 10 or 30 minutes, whatever the timeout of the default group is.
    """
    before = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout
    c10d.default_pg_timeout = timeout
    c10d.default_pg_nccl_timeout = timeout if before[1] is not None else None
    try:
        yield
    finally:
        c10d.default_pg_timeout, c10d.default_pg_nccl_timeout = before


@contextmanager
def world(
    rank: int,
    size: int,
    device: torch.device,
    rendezvous: str,
    timeout_seconds: int,
    hosts: Mapping[int, str] = {},
    speaks: bool = True,
) -> Iterator[World]:
    """The default process group while the context is open.

    One process on a CPU uses PyTorch's ``fake`` backend, whose collectives copy their input to their output. Gloo's
    thread would poll a hundred times per second (docs/LOG.md). Before torch 2.13 some collectives copied nothing.

    Args:
        rank: number of this process, below ``size``.
        size: number of processes.
        device: device of the tensors; cuda communicates by NCCL and, for host tensors, by Gloo.
        rendezvous: ``""`` for one process, ``file:PATH``, or ``tcp:HOST:PORT``.
        timeout_seconds: seconds after which a collective or the rendezvous fails.
        hosts: host of each rank, as far as known, for a text that names missing ranks.
        speaks: whether this rank names them while it waits: one rank of each host.

    Raises:
        EnvironmentError: a rank did not come, the port is busy, no network interface works, or two ranks have one GPU.
        SystemExit: a signal to a rank raised it there before all had come; on all ranks.
    """
    timeout = datetime.timedelta(seconds=timeout_seconds)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    interface = choose_interface(os.environ, _master(rendezvous, size))
    meeting = _Meeting(rank, size, timeout, hosts, speaks)
    store = meeting.store(rendezvous)
    for name in ("come", "still there"):  # the first rank may have waited for hours
        meeting.meet(dist.PrefixStore(name, store))
    backend = _NO_PEERS if size == 1 and release(torch.__version__) >= (2, 13) else "gloo"
    if on_gpu:
        backend = f"cpu:gloo,cuda:{_claim(device, store, rank, size)}"
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if "nccl" in backend else None,
        )
    except RuntimeError as error:
        if (reason := _no_meeting(error, interface)) is None:
            raise
        raise reason from error
    try:
        with _default_timeout(timeout):
            yield World(rank, size, device, dist.PrefixStore("crius", store))
    except BaseException:
        if size == 1:
            dist.destroy_process_group()
        raise  # with peers, destroying could wait for their collectives: the failed process ends without it
    dist.destroy_process_group()


def _claim(device: torch.device, store: dist.Store, rank: int, size: int) -> str:
    """Backend of the tensors on ``device``, a GPU of this rank alone or, in a test, of all ranks.

    Raises:
        EnvironmentError: another rank has this GPU, or ranks should share it over an NCCL that cannot.
    """
    sharing = gpu_sharing(os.environ) if size > 1 else ""
    if not sharing:
        claim_gpu(store, str(torch.cuda.get_device_properties(device).uuid), rank)
        return "nccl"
    nccl = ".".join(map(str, loaded_nccl()))
    may_share = os.environ.get(NCCL_SHARES) == "1" and release(nccl) >= _SHARING_NCCL
    if sharing == "nccl" and not may_share:
        raise EnvironmentError(
            f"ranks cannot share a GPU over NCCL {nccl or 'of an unknown version'}.",
            where=f"{SHARE_GPU} (the environment)",
            why=f"NCCL can from 2.30 on, with {NCCL_SHARES}=1",
            fix=f"export {SHARE_GPU}=gloo; or put a newer libnccl.so.2 into LD_PRELOAD, and export {NCCL_SHARES}=1: "
            "docs/gpu.md",
        )
    over = f"NCCL {nccl}" if sharing == "nccl" else "Gloo"
    log.info("%s: %d ranks share one GPU, over %s; this is for tests, and slow", SHARE_GPU, size, over)
    return sharing


def claim_gpu(store: dist.Store, uuid: str, rank: int) -> None:
    """Record in ``store`` that ``rank`` has the GPU ``uuid``.

    Raises:
        EnvironmentError: another rank has this GPU, for example since every process sees only the same one.
    """
    holder = store.compare_set(f"crius/gpu/{uuid}", "", str(rank)).decode()
    if holder != str(rank):
        raise _same_gpu(f"rank {holder} and rank {rank} have {uuid}")


def _same_gpu(why: str) -> EnvironmentError:
    return EnvironmentError(
        "two ranks have the same GPU.",
        where="CUDA_VISIBLE_DEVICES",
        why=why,
        fix="give each process its own GPU (srun --gpus-per-task=1), or show all GPUs to every process",
    )


def _no_meeting(error: RuntimeError, interface: str) -> EnvironmentError | None:
    """Why the process group cannot be created; None if its error does not say."""
    text = next(iter(str(error).strip().splitlines()), "")
    if "Duplicate GPU" in str(error):
        return _same_gpu(text)
    if "Unable to find" in text:
        return EnvironmentError(
            f"Gloo cannot use the network interface {os.environ.get(GLOO, 'of this host name')}.",
            why=text,
            fix=f"bring it up (ip link set lo up), or export {GLOO}=<an interface that is up>",
        )
    if any(word in text for word in ("onnect", "timed out", "Timed out")):
        return EnvironmentError(
            f"the ranks cannot reach each other by the network interface {interface or 'of their host names'}.",
            where=GLOO,
            why=text,
            fix=f"export {GLOO}=<the interface between the hosts, as ip route get HOST shows it> on every host",
        )
    return None


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[World]:
    """A process group of ``size`` ranks. Only this one, ``rank``, exists; collectives do nothing."""
    dist.init_process_group(_NO_PEERS, rank=rank, world_size=size, store=FakeStore())
    try:
        yield World(rank, size, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
