"""The place of this process in a launched run and the GPUs it may use, from the environment."""

import importlib.util
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from crius.errors import EnvironmentError
from crius.untrusted import text_named

FAULTS = "CRIUS_FAULT"
"""Variable that plants faults in a run: ``crius/tools/faults``."""

_COUNTS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_TORCHRUN = (*_COUNTS, "MASTER_ADDR", "MASTER_PORT")
_SRUN_ONLY = ("SLURM_STEPID", "SLURM_STEP_", "SLURM_SRUN_COMM_", "SLURM_LAUNCH_NODE_IPADDR")  # names or prefixes
# above Linux's ephemeral ports (32768 to 60999), which clients use at random
_FIRST_PORT = 61000
_NUM_PORTS = 4500


@dataclass(frozen=True)
class Placement:
    """The place of one process in a run."""

    rank: int
    local_rank: int
    """Number of the process on this host, from 0, and index of its GPU."""
    world_size: int
    local_world_size: int
    launcher: Literal["single", "local", "torchrun", "slurm"]
    rendezvous: str = ""
    """How ranks meet: "" alone, ``file:<path>`` by FileStore, ``tcp:<host>:<port>`` by TCPStore."""
    log_dir: Path | None = None
    """Folder of ``rank-N.log`` and ``rank-N.error.json``; None until ``run_single`` or ``run_workers`` sets it."""
    attempt: int = 0
    """Restarts of this run so far by its launcher; 0 is the first start."""
    scratch: Path | None = None
    """Private folder that exists for all attempts of one command; ``attempts.json`` in it lists the failed ones. None
    without Crius's launcher."""


def sees_own_gpu(placement: Placement, environ: Mapping[str, str]) -> bool:
    """Whether each process of this host sees only its own GPU, as with ``srun --gpus-per-task=1``."""
    shown = environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    is_launched = placement.launcher in ("torchrun", "slurm") and placement.local_world_size > 1
    return is_launched and bool(shown) and "," not in shown


def single_placement() -> Placement:
    """The placement of a run that is one process."""
    return Placement(rank=0, local_rank=0, world_size=1, local_world_size=1, launcher="single")


def joined_placement(environ: Mapping[str, str]) -> Placement | None:
    """The placement that torchrun or ``srun`` gave this process; None if neither started it.

    A Slurm allocation alone is not a launcher: in a batch script, an interactive shell or a step of one task the answer
    is None, so that Crius starts the local workers itself. So it is in the shell of ``srun --pty bash``, and with
    ``WORLD_SIZE=1`` alone.

    Raises:
        EnvironmentError: the variables are incomplete or contradict each other.
    """
    in_slurm_step = _in_slurm_step(environ)
    counts = [name for name in _COUNTS if name in environ]
    is_alone = counts == ["WORLD_SIZE"] and environ["WORLD_SIZE"] == "1"
    if "RANK" in counts or (counts and not is_alone and not in_slurm_step):
        return _torchrun_placement(environ)
    return _slurm_placement(environ) if in_slurm_step else None


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _torchrun_placement(environ: Mapping[str, str]) -> Placement:
    missing = [name for name in _TORCHRUN if not environ.get(name)]
    if missing:
        found = [name for name in _TORCHRUN if name not in missing]
        raise EnvironmentError(
            f"{', '.join(found)} {_are(found)} set but {', '.join(missing)} {_are(missing)} not.",
            where="the environment",
            why="a launcher such as torchrun sets all of " + ", ".join(_TORCHRUN),
            fix=f"unset {' '.join(found)} to start local workers, or start this with torchrun --nproc_per_node N",
        )
    meeting = f"tcp:{environ['MASTER_ADDR']}:{_integer(environ, 'MASTER_PORT')}"
    rank, world_size, local_rank, local_world_size = (_integer(environ, name) for name in _COUNTS)
    return _checked(Placement(rank, local_rank, world_size, local_world_size, "torchrun", meeting), "RANK, LOCAL_RANK")


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether ``srun`` started this process as one of several tasks."""
    if "SLURM_PROCID" not in environ or _slurm_num_tasks(environ) == 1:
        return False
    if "SLURM_PTY_PORT" in environ and _has_shell():
        return False
    # sbatch sets SLURM_PROCID=0 and the SLURM_NTASKS of the whole job in the batch script itself
    has_rendezvous = bool(environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"))
    return environ["SLURM_PROCID"] != "0" or has_rendezvous or any(name.startswith(_SRUN_ONLY) for name in environ)


def _has_shell() -> bool:
    """Whether an interactive shell started this process: it has a terminal, and a process group of its own.

    A task has the group of its session, and only task 0 of ``srun --pty`` has a terminal. A step that is started from
    such a shell inherits the variables of the shell, but not the terminal.
    """
    try:
        os.close(os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return os.getpgrp() != os.getsid(0)


def _slurm_num_tasks(environ: Mapping[str, str]) -> int:
    names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    return _first_integer(environ, names, default=1)  # without these: a batch script without --ntasks


def _slurm_placement(environ: Mapping[str, str]) -> Placement:
    rank = _integer(environ, "SLURM_PROCID")
    local_rank = _integer(environ, "SLURM_LOCALID")
    world_size = _slurm_num_tasks(environ)
    local_world_size = _slurm_tasks_here(environ)
    if local_world_size == world_size:
        host = "127.0.0.1"  # one node needs neither a name service nor a network
    else:
        host = environ.get("MASTER_ADDR") or _slurm_first_node(environ)
    if environ.get("MASTER_PORT"):
        port = _integer(environ, "MASTER_PORT")
    else:  # one port per step: two steps of a job may share a node
        job = _first_integer(environ, ("SLURM_JOB_ID", "SLURM_JOBID"), default=0)
        step = environ.get("SLURM_STEP_ID", "0")
        port = _FIRST_PORT + (job + 997 * int(step if step.isdigit() else 0)) % _NUM_PORTS
    place = Placement(rank, local_rank, world_size, local_world_size, "slurm", f"tcp:{host}:{port}")
    return _checked(place, "SLURM_PROCID, SLURM_LOCALID")


def _slurm_task_counts(environ: Mapping[str, str]) -> list[int]:
    """Tasks of each node, from a list over the nodes such as ``8(x2),4``; empty without one."""
    name = next((name for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") if name in environ), "")
    counts: list[int] = []
    for term in environ[name].split(",") if name else ():
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", term.strip())
        if match is None:
            raise EnvironmentError(f"{name}={environ[name]} is not a list of task counts such as 8(x2),4.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _slurm_tasks_here(environ: Mapping[str, str]) -> int:
    """Tasks on this node."""
    counts = _slurm_task_counts(environ)
    if counts:
        node = 0 if len(set(counts)) == 1 else _integer(environ, "SLURM_NODEID")
        if node < len(counts):
            return counts[node]
        raise EnvironmentError(f"SLURM_NODEID={node} is outside SLURM_TASKS_PER_NODE, a list of {len(counts)} nodes.")
    nodes = _slurm_nodes(environ)
    is_one_node = environ["SLURM_NNODES"] == "1" if "SLURM_NNODES" in environ else first_host(nodes) == nodes
    if "SLURM_NTASKS_PER_NODE" not in environ and is_one_node:
        return _slurm_num_tasks(environ)
    return _integer(environ, "SLURM_NTASKS_PER_NODE")


def _slurm_nodes(environ: Mapping[str, str]) -> str:
    return environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")


def _slurm_first_node(environ: Mapping[str, str]) -> str:
    """The host of rank 0.

    The node list has precedence over ``SLURM_LAUNCH_NODE_IPADDR``, which is the host where ``srun`` was typed: after
    ``salloc`` it can be a login node without any rank.
    """
    host = first_host(_slurm_nodes(environ)) or environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if host:
        return host
    raise EnvironmentError(
        "the host of rank 0 is unknown: SLURM_JOB_NODELIST is not set.", fix="export MASTER_ADDR=<host of rank 0>"
    )


def hosts(nodelist: str) -> Iterator[str]:
    """The hosts of a Slurm node list: ``gpu[003-004,9],cpu1`` gives ``gpu003``, ``gpu004``, ``gpu9`` and ``cpu1``."""
    for term in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        before, bracket, rest = term.partition("[")
        if not bracket:
            yield term
            continue
        numbers, _, after = rest.partition("]")
        for span in numbers.split(","):
            first, _, last = span.partition("-")
            for number in range(int(first), int(last or first) + 1):
                yield from hosts(f"{before}{number:0{len(first)}}{after}")


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list."""
    return next(hosts(nodelist), "")


def hosts_of_ranks(place: Placement, environ: Mapping[str, str]) -> dict[int, str]:
    """The host of each rank, as far as this process knows it."""
    if place.launcher == "slurm":
        by_node = zip(hosts(_slurm_nodes(environ)), _slurm_task_counts(environ), strict=False)
        is_by_node = environ.get("SLURM_DISTRIBUTION", "block").startswith("block")
        return dict(enumerate(node for node, count in by_node for _ in range(count))) if is_by_node else {}
    first = place.rank - place.local_rank
    here = dict.fromkeys(range(first, first + place.local_world_size), platform.node())
    return {0: environ.get("MASTER_ADDR", "")} | here


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if text is None:
        raise EnvironmentError(f"{name} is not set, but other variables of its launcher are.", where="the environment")
    if not text.strip().isdecimal():
        raise EnvironmentError(f"{name}={text} is not a count.", where="the environment")
    return int(text)


def _first_integer(environ: Mapping[str, str], names: Sequence[str], default: int) -> int:
    return next((_integer(environ, name) for name in names if name in environ), default)


def _checked(place: Placement, names: str) -> Placement:
    if place.rank < place.world_size and place.local_rank < place.local_world_size <= place.world_size:
        return place
    raise EnvironmentError(
        f"rank {place.rank} of {place.world_size} with local rank {place.local_rank} of {place.local_world_size} "
        "is impossible.",
        where=f"{names} and the sizes in the environment",
        why="ranks count from 0 and stay below their size; a host has no more ranks than the run",
    )


def visible_gpus(environ: Mapping[str, str], *, root: Path = Path("/"), torch_version: str | None = None) -> int:
    """Count the NVIDIA GPUs that CUDA would show this process, without importing torch.

    AMD GPUs are not counted. One MIG slice counts as one GPU, up to the number of whole GPUs.

    Args:
        environ: variables; ``CUDA_VISIBLE_DEVICES`` is read as CUDA reads it: the list ends at the first entry that is
            not a device.
        root: folder of ``dev`` and ``proc``; tests give a fake one.
        torch_version: text of torch's ``version.py``; None reads it from the installed torch.

    Returns:
        Number of GPUs; 0 if the installed torch was built without CUDA, or is missing.
    """
    text = _installed_torch_version() if torch_version is None else torch_version
    if not re.search(r"^cuda\b[^=\n]*=\s*['\"]", text, re.MULTILINE):
        return 0
    # a container may show all GPUs of the host in one of these places and only its own in the other
    nodes = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in root.glob("dev/nvidia*"))
    cards = sum(1 for _ in root.glob("proc/driver/nvidia/gpus/*"))
    present = min(nodes, cards) or nodes or cards
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return present
    count = 0
    for entry in (part.strip() for part in wanted.split(",")):
        if not (entry.startswith(("GPU-", "MIG-")) or (entry.isdecimal() and int(entry) < present)):
            break
        count += 1
    return min(count, present)


def lacks_gpu(environ: Mapping[str, str]) -> bool:
    """Whether torch surely has no GPU here, without importing it. One for AMD GPUs, which are not counted, may have."""
    text = _installed_torch_version()
    is_for_amd = re.search(r"^hip\b[^=\n]*=\s*['\"]", text, re.MULTILINE)
    return not is_for_amd and visible_gpus(environ, torch_version=text) == 0


def _installed_torch_version() -> str:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        return text_named(Path(spec.origin).with_name("version.py"))
    except OSError:
        return ""
