"""``crius plan --calibrate``: what this machine reaches, as a hardware file for the planner, in less than a minute.

Matmuls, attention, copies and an all-gather are timed by themselves. What lies between them in a step is found from
short runs of ``crius train`` itself: of a model with next to nothing to compute, the fixed cost of an operation and the
memory of a process; of two larger ones, before all else and after it, what elementwise operations reach.
"""

import contextlib
import functools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import crius
from crius.config.resolve import with_dtype
from crius.config.run import RunConfig, replace_fields
from crius.errors import EnvironmentError
from crius.host import bfloat16_instructions, cpu_name, cpu_with_cores, free_host_bytes
from crius.launch.environment import visible_gpus
from crius.tools.bench.calibrate_kernels import attention_flops, copy_bandwidth, gather_speed, matmul_flops, prepare
from crius.tools.plan.hardware import KNOWN, Hardware, known_gpu, user_file, write_hardware
from crius.tools.plan.memory import memory
from crius.tools.plan.time import step_time
from crius.tools.plan.workload import Estimate, Workload, from_config
from crius.train.inputs import describe_model
from crius.units import GIB

LIMIT_SECONDS = 58
"""After which a short run is given up: of all together."""

SLOW_SECONDS = 8
"""Where the smallest run takes longer, the others have half their steps."""

MOST_OFF = 0.35
"""Share by which the plan of a short run may differ from the run: beyond, what was measured is not of one machine."""

AGAIN_BEFORE_SECONDS = 30
"""Until when the larger runs are made a second time: a machine that others use too is not as fast at every moment."""

_EMPTY = {"model.num_layers": 2, "training.seq_len": 16, "training.global_batch_size": 1, "training.steps": 30}


def _sizes(flavor: str, seq_len: int, batch: int, steps: int, **model: int) -> dict[str, str | int]:
    sizes = {"training.seq_len": seq_len, "training.global_batch_size": batch, "training.steps": steps}
    return {"model.flavor": flavor, **{f"model.{name}": size for name, size in model.items()}, **sizes}


_SIZES: dict[str, tuple[dict[str, str | int], ...]] = {
    "cpu": (_sizes("debug", 256, 4, 40), _sizes("6m", 256, 4, 24, num_layers=3)),
    "cuda": (
        _sizes("1b", 2048, 4, 14, num_layers=4),
        _sizes("8b", 4096, 2, 14, num_layers=2, vocab_size=32_768),
    ),
}
_WARM_STEPS = 3
_Span = tuple[float, float]
_Change = Callable[[Hardware, float], Hardware]
_OP = (1e-7, 1e-3)  # seconds of an operation, from the least to the most
_REACH = (0.02, 1.5)  # share of the speed of copies; beyond 1, caches help
_TOO_FAR = 1.3  # of it: caches alone do not explain that
_SPEED = (0.2, 20.0)  # factor on what was timed by itself
_BASE = {"model.flavor": "debug", "validation.interval": 0, "metrics.log_interval": 1, "data.source": "text"}
_PRECISION = {"cpu": {"training.mixed_precision_param": "float32"}, "cuda": {}}  # as recipes for that device have it


@dataclass(frozen=True)
class Probe:
    """A short run, and what it showed.

    Attributes:
        name: of its model.
        workload: what it computed.
        seconds: of a step, the median of those after the first ones.
        nbytes: its peak, as the run reports it.
        num_tokens: of a step.
    """

    name: str
    workload: Workload
    seconds: float
    nbytes: float
    num_tokens: int


def calibrate(out: Path | None, *, as_json: bool = False) -> int:
    """Measure this machine, write what was found, and print it.

    Args:
        out: file to write; None: the one that runs on this machine look for.
        as_json: print the hardware as JSON instead of what was measured.

    Returns:
        0.

    Raises:
        EnvironmentError: a short run failed here or took too long, what was measured contradicts itself, or the file
            cannot be written.
    """
    file = out or user_file()

    def say(line: str) -> None:
        if not as_json:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    found = measure(say)
    write_hardware(found, file)
    if as_json:
        sys.stdout.write(json.dumps({"verb": "plan --calibrate", "file": str(file), **asdict(found)}, indent=2) + "\n")
    say(f"wrote {file}; plan with it: crius plan --gpu {shlex.quote(str(file))}")
    return 0


def measure(say: Callable[[str], None]) -> Hardware:
    """Measure the GPU or the CPU of this machine.

    Args:
        say: is told what was measured.

    Raises:
        EnvironmentError: a short run failed here or took too long, or what was measured contradicts itself.
    """
    begin = time.monotonic()
    until = begin + LIMIT_SECONDS
    num_gpus = visible_gpus(os.environ)
    kind = "cuda" if num_gpus else "cpu"
    ranks = num_gpus if kind == "cuda" else 2
    with tempfile.TemporaryDirectory(prefix="crius-calibrate-") as folder:
        # first: the peak memory of a process begins at that of the one which started it
        text = Path(folder) / "text.txt"
        text.write_text(_words(), encoding="utf-8")
        base = {**_BASE, **_PRECISION[kind], "data.path": str(text)}
        probes = [_probe({**base, **_EMPTY}, kind, folder, until)]
        sizes = _SIZES[kind]
        if time.monotonic() - begin > SLOW_SECONDS:
            sizes = tuple({**size, "training.steps": int(size["training.steps"]) // 2} for size in sizes)
        probes += [_probe({**base, **size}, kind, folder, until) for size in sizes]
        speed, empty = gather_speed(kind, ranks) if ranks > 1 else (0.0, 0.0)  # then: it forks
        found = _of_kernels(kind, speed, empty, num_gpus)
        torch.cuda.empty_cache()  # for the runs to come, which share the GPU with this process; nothing on a CPU
        if time.monotonic() - begin < AGAIN_BEFORE_SECONDS:
            with contextlib.suppress(subprocess.TimeoutExpired):
                again = [_probe({**base, **size}, kind, f"{folder}/again", until, is_needed=False) for size in sizes]
                probes[1:] = map(_mean, probes[1:], again)
    say(f"matmul {found.float32_flops / 1e9:,.0f} GFLOP/s in float32, {found.bfloat16_flops / 1e9:,.0f} in bfloat16")
    say(f"attention {(found.attention_efficiency or 0):.0%} of that; copies {found.memory_bandwidth / 1e9:,.1f} GB/s")
    if speed:
        say(f"all-gather of {ranks} ranks {speed / 1e9:.2f} GB/s each, {1e6 * empty:,.0f} us when empty")
    found = solved(found, probes)
    say(
        f"operation {1e6 * (found.op_seconds or 0):.1f} us; memory at rest {found.resident_bytes / GIB:.2f} GiB "
        f"and {found.resident_share:.0%} beside tensors"
    )
    say(f"elementwise operations reach {found.memory_efficiency or 0:.0%} of the speed of copies")
    checks = [_check(found, probe) for probe in probes[1:]]
    for line, _ in checks:
        say(line)
    say(f"took {time.monotonic() - begin:.0f} s")
    if any(off > MOST_OFF for _, off in checks):
        raise _unsure(
            "what was measured contradicts itself, and nothing was written.",
            why=f"plans of the short runs may be {MOST_OFF:.0%} off them: {'; '.join(line for line, _ in checks)}",
        )
    return found


def _check(found: Hardware, probe: Probe) -> tuple[str, float]:
    """The plan of ``probe`` beside the run, as a line, and how far the slower of them is from the other."""
    planned, measured = probe.num_tokens / step_time(probe.workload, found).total, probe.num_tokens / probe.seconds
    off = f"{planned / measured - 1:+.0%}"
    line = f"check {probe.name}: planned {planned:,.0f} tokens/s, measured {measured:,.0f} ({off})"
    return line, max(planned / measured, measured / planned) - 1


def _unsure(what: str, why: str) -> EnvironmentError:
    load = f" The load of the last minute is {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs, this included."
    return EnvironmentError(
        what,
        where="crius plan --calibrate",
        why=why + load,
        fix="stop other programs and run it again; or write a hardware file by hand (docs/planner.md)",
    )


def _of_kernels(kind: str, speed: float, empty: float, num_gpus: int) -> Hardware:
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    prepare(device)
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, nbytes = properties.name, float(properties.total_memory)
        base = known_gpu(name) or replace(KNOWN["a100-80g"], generation="other", float8_flops=0.0)
        slug = (known_gpu(name) or replace(base, name=name)).name
        base = replace(base, name=f"{slug} (measured)", gpus_per_node=num_gpus, device=name)
    else:
        name, nbytes = cpu_with_cores(), float(free_host_bytes())
        base = replace(KNOWN["cpu"], name=f"{cpu_name()} (measured)", device=name, threads=torch.get_num_threads())
    has_bfloat16 = kind == "cuda" or bool(bfloat16_instructions())
    flops = {
        torch.float32: matmul_flops(device, torch.float32),
        torch.bfloat16: matmul_flops(device, torch.bfloat16, is_slow=not has_bfloat16),
    }
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32  # that of the recipes
    where = f"torch {torch.__version__}, crius {crius.__version__}"
    return replace(
        base,
        bfloat16_flops=flops[torch.bfloat16],
        float32_flops=flops[torch.float32],
        float8_flops=base.float8_flops * flops[torch.bfloat16] / base.bfloat16_flops,
        memory_bytes=nbytes,
        memory_bandwidth=copy_bandwidth(device),
        matmul_efficiency=1.0,
        attention_efficiency=min(2.0, attention_flops(device, dtype) / flops[dtype]),
        watts=0,
        full_watts=0,
        measured=f"{time.strftime('%Y-%m-%d %H:%M')}, {name}, {base.threads or 0} threads, {where}",
        link_bandwidth=speed or base.link_bandwidth,
        hop_seconds=empty or None,
    )


def _words() -> str:
    """A corpus for runs whose loss nobody looks at."""
    return "\n\n".join(f"{number} times {number + 1} is {number * (number + 1)}." * 20 for number in range(400))


def _probe(settings: dict[str, object], kind: str, folder: str, until: float, *, is_needed: bool = True) -> Probe:
    """Run ``crius train`` with ``settings`` as a user would, ``until`` a time at most."""
    run_dir = Path(folder) / f"run-{settings['model.flavor']}-{settings['training.seq_len']}"
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "crius", "train", "--nproc", "1", *flags, "--job.run_dir", str(run_dir)]
    command.append("--checkpoint.no_enable")
    path = os.pathsep.join([str(Path(crius.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "CRIUS_FAULT")}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=max(1.0, until - time.monotonic()),
            check=False,
            env={**environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired as error:
        if not is_needed:
            raise
        raise _unsure(
            f"this machine could not be measured within {LIMIT_SECONDS} s, and nothing was written.",
            why=f"a short run of {settings['model.flavor']} was not done by then.",
        ) from error
    if done.returncode:
        raise EnvironmentError(
            f"a short run of {settings['model.flavor']} ended with {done.returncode}.",
            where=" ".join(command[1:]),
            why=done.stderr.strip()[-500:],
            fix="crius doctor says what is missing",
        )
    return _read(settings, run_dir, kind)


def _read(settings: dict[str, object], run_dir: Path, kind: str) -> Probe:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if "loss" in record]
    steady = records[_WARM_STEPS:]
    known = {name: (value,) if name == "data.path" else value for name, value in settings.items()}
    config = with_dtype(replace_fields(RunConfig(), known), on_gpu=kind == "cuda")
    facts = describe_model(config)
    workload = from_config(config, facts, 1, device="cuda" if kind == "cuda" else "cpu")
    return Probe(
        name=f"{config.model.flavor}, {facts.num_layers} layers",
        workload=workload,
        seconds=statistics.median(record["step_seconds"] - record["data_seconds"] for record in steady),
        nbytes=max(record["memory_gib"] for record in records) * GIB,
        num_tokens=config.training.seq_len * workload.microbatch * workload.num_microbatches,
    )


def _mean(first: Probe, second: Probe) -> Probe:
    """Two runs of one model as one; the memory is the first's, which nothing came before."""
    return replace(first, seconds=(first.seconds + second.seconds) / 2)


def solved(found: Hardware, probes: Sequence[Probe]) -> Hardware:
    """``found`` with the fixed cost of an operation, the reach of memory and the memory at rest that ``probes`` showed.

    Where the larger ones were faster than what was timed by itself allows, other programs were in its way: then it is
    the matmuls' rate that follows from them.

    Args:
        found: what single operations reach.
        probes: of a model with next to nothing to compute, and of larger ones.
    """
    empty, *larger = probes
    found = replace(_with_rest(found, empty, larger), memory_efficiency=found.memory_efficiency or 1.0)
    for _ in range(3):  # each hardly depends on the other
        found = _with_op(found, _fitted(found, _with_op, [empty], _OP, sign=1))
        found = _with_reach(found, _fitted(found, _with_reach, larger, _REACH))
    if found.memory_efficiency and found.memory_efficiency >= _TOO_FAR:
        found = replace(found, memory_efficiency=1.0)
        found = _faster(found, _fitted(found, _faster, larger, _SPEED))
    return found


def _faster(found: Hardware, factor: float) -> Hardware:
    """``found`` with matmuls, and attention with them, ``factor`` times as fast."""
    return replace(found, float32_flops=found.float32_flops * factor, bfloat16_flops=found.bfloat16_flops * factor)


def _with_op(found: Hardware, seconds: float) -> Hardware:
    return replace(found, op_seconds=seconds)


def _with_reach(found: Hardware, share: float) -> Hardware:
    return replace(found, memory_efficiency=share)


def _fitted(found: Hardware, change: _Change, probes: Sequence[Probe], span: _Span, sign: int = -1) -> float:
    """The value in ``span`` with which plans of ``probes`` take as long as the runs did; geometric mean over them.

    Args:
        found: the hardware otherwise.
        change: gives it the value.
        probes: what was run.
        span: least and greatest value.
        sign: 1 where plans take longer as the value grows, else -1.
    """

    def off(probe: Probe, value: float) -> float:
        return sign * (step_time(probe.workload, change(found, value)).total - probe.seconds)

    return statistics.geometric_mean(_root(functools.partial(off, probe), span) for probe in probes)


def _with_rest(found: Hardware, empty: Probe, larger: Sequence[Probe]) -> Hardware:
    """``found`` with the memory that a process takes beside its tensors: always, and for each byte of them."""
    bare = replace(found, resident_bytes=0.0, resident_share=0.0)

    def held(probe: Probe) -> float:
        estimate: Estimate = memory(probe.workload, bare, counting="allocated")
        return estimate.total

    shares = []
    if found.generation == "cpu":  # a GPU's allocator says of its own what it holds
        grown = [(probe.nbytes - empty.nbytes, held(probe) - held(empty)) for probe in larger]
        shares = [measured / planned - 1 for measured, planned in grown if planned > 0]
    share = min(1.0, max(0.0, statistics.fmean(shares))) if shares else 0.0
    rest = max(0.0, empty.nbytes - held(empty) * (1 + share))
    return replace(found, resident_bytes=rest, resident_share=share)


def _root(rising: Callable[[float], float], span: _Span) -> float:
    """Where ``rising`` crosses 0 in ``span``; the nearer end where it does not."""
    low, high = span
    if rising(low) >= 0 or rising(high) <= 0:
        return low if rising(low) >= 0 else high
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
