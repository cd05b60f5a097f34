"""``crius bench calibrate``: measures the speed of this machine in less than a minute, as a hardware file for the
planner.

Matmuls, attention, copies and an all-gather are timed by themselves. The costs between them in a step come from short
runs of ``crius train`` itself. A run with next to nothing to compute gives the fixed cost of an operation and the
memory of a process. Two larger runs, one before and one after all other measurements, give the speed of elementwise
operations.
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
from crius.untrusted import parse_json, text_below

LIMIT_SECONDS = 58
"""Seconds after which the short runs, taken together, are given up."""

SLOW_SECONDS = 8
"""Seconds of the smallest run above which the others have half their steps."""

MOST_OFF = 0.35
"""Largest relative difference between a short run and its plan; beyond it the measurements contradict each other."""

AGAIN_BEFORE_SECONDS = 30
"""Seconds until which the larger runs may be repeated: a machine with other users is not equally fast at all times."""

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
_OP = (1e-7, 1e-3)  # seconds per operation, least and most
_REACH = (0.02, 1.5)  # share of the speed of copies; beyond 1, caches help
_TOO_FAR = 1.3  # more than caches can explain
_SPEED = (0.2, 20.0)  # factor on the single timings
_BASE = {"model.flavor": "debug", "validation.interval": 0, "metrics.log_interval": 1, "data.source": "text"}
_PRECISION = {"cpu": {"training.mixed_precision_param": "float32"}, "cuda": {}}  # as in the recipes for that device


@dataclass(frozen=True)
class Probe:
    """A short run and its measurements.

    Attributes:
        name: name of its model.
        workload: the computed work.
        seconds: time of a step, the median without the first steps.
        nbytes: its peak memory, as the run reports it.
        num_tokens: tokens of a step.
    """

    name: str
    workload: Workload
    seconds: float
    nbytes: float
    num_tokens: int


def calibrate(out: Path | None, *, as_json: bool = False) -> int:
    """Measure this machine, write the hardware file, and print the results.

    Args:
        out: file to write; None: the file that runs on this machine look for.
        as_json: print the hardware as JSON instead of the measurements.

    Returns:
        0.

    Raises:
        EnvironmentError: a short run failed here or took too long, the measurements contradict each other, or the file
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
        sys.stdout.write(json.dumps({"verb": "bench calibrate", "file": str(file), **asdict(found)}, indent=2) + "\n")
    say(f"wrote {file}; plan with it: crius plan --gpu {shlex.quote(str(file))}")
    return 0


def measure(say: Callable[[str], None]) -> Hardware:
    """Measure the GPU or the CPU of this machine.

    Args:
        say: receives lines about the measurements.

    Raises:
        EnvironmentError: a short run failed here or took too long, or the measurements contradict each other.
    """
    begin = time.monotonic()
    until = begin + LIMIT_SECONDS
    num_gpus = visible_gpus(os.environ)
    kind = "cuda" if num_gpus else "cpu"
    ranks = num_gpus if kind == "cuda" else 2
    with tempfile.TemporaryDirectory(prefix="crius-calibrate-") as folder:
        # first: the peak memory of a process begins at its parent's
        text = Path(folder) / "text.txt"
        text.write_text(_words(), encoding="utf-8")
        base = {**_BASE, **_PRECISION[kind], "data.path": str(text)}
        probes = [_probe({**base, **_EMPTY}, kind, folder, until)]
        sizes = _SIZES[kind]
        if time.monotonic() - begin > SLOW_SECONDS:
            sizes = tuple({**size, "training.steps": int(size["training.steps"]) // 2} for size in sizes)
        probes += [_probe({**base, **size}, kind, folder, until) for size in sizes]
        speed, empty = gather_speed(kind, ranks) if ranks > 1 else (0.0, 0.0)  # next, because it forks
        found = _of_kernels(kind, speed, empty, num_gpus)
        torch.cuda.empty_cache()  # for the next runs, which share the GPU with this process; no effect on a CPU
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
        f"and {found.resident_share:.0%} on top of tensors"
    )
    say(f"elementwise operations reach {found.memory_efficiency or 0:.0%} of the speed of copies")
    checks = [_check(found, probe) for probe in probes[1:]]
    for line, _ in checks:
        say(line)
    say(f"took {time.monotonic() - begin:.0f} s")
    if any(off > MOST_OFF for _, off in checks):
        raise _unsure(
            "the measurements contradict each other, and nothing was written.",
            why=f"plans of short runs may be off by {MOST_OFF:.0%}: {'; '.join(line for line, _ in checks)}",
        )
    return found


def _check(found: Hardware, probe: Probe) -> tuple[str, float]:
    """The plan of ``probe`` and the run, as a line, and how far the slower of the two is from the other."""
    planned = probe.num_tokens / step_time(probe.workload, found).total
    measured = probe.num_tokens / probe.seconds
    off = f"{planned / measured - 1:+.0%}"
    line = f"check {probe.name}: planned {planned:,.0f} tokens/s, measured {measured:,.0f} ({off})"
    return line, max(planned / measured, measured / planned) - 1


def _unsure(what: str, why: str) -> EnvironmentError:
    load = f" The load of the last minute is {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs, this included."
    return EnvironmentError(
        what,
        where="crius bench calibrate",
        why=why + load,
        fix="stop other programs and run it again; or write a hardware file by hand (docs/planner.md)",
    )


def _of_kernels(kind: str, speed: float, empty: float, num_gpus: int) -> Hardware:
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    prepare(device)
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = properties.name
        nbytes = float(properties.total_memory)
        base = known_gpu(name) or replace(KNOWN["a100-80g"], generation="other", float8_flops=0.0)
        slug = (known_gpu(name) or replace(base, name=name)).name
        base = replace(base, name=f"{slug} (measured)", gpus_per_node=num_gpus, device=name)
    else:
        name = cpu_with_cores()
        nbytes = float(free_host_bytes())
        base = replace(KNOWN["cpu"], name=f"{cpu_name()} (measured)", device=name, threads=torch.get_num_threads())
    has_bfloat16 = kind == "cuda" or bool(bfloat16_instructions())
    flops = {
        torch.float32: matmul_flops(device, torch.float32),
        torch.bfloat16: matmul_flops(device, torch.bfloat16, is_slow=not has_bfloat16),
    }
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32  # the dtype of the recipes
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
    """A corpus for runs whose loss does not matter."""
    return "\n\n".join(f"{number} times {number + 1} is {number * (number + 1)}." * 20 for number in range(400))


def _probe(settings: dict[str, object], kind: str, folder: str, until: float, *, is_needed: bool = True) -> Probe:
    """Run ``crius train`` with ``settings`` as a user would, at most ``until`` a time."""
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
            why=f"a short run of {settings['model.flavor']} had not ended by then.",
        ) from error
    if done.returncode:
        raise EnvironmentError(
            f"a short run of {settings['model.flavor']} ended with {done.returncode}.",
            where=" ".join(command[1:]),
            why=done.stderr.strip()[-500:],
            fix="crius doctor shows what is missing",
        )
    return _read(settings, run_dir, kind)


def _read(settings: dict[str, object], run_dir: Path, kind: str) -> Probe:
    lines = text_below(run_dir, "metrics.jsonl").splitlines()
    records = [record for record in map(parse_json, lines) if "loss" in record]
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
    """Two runs of one model as one. The memory is the first run's, because nothing ran before it."""
    return replace(first, seconds=(first.seconds + second.seconds) / 2)


def solved(found: Hardware, probes: Sequence[Probe]) -> Hardware:
    """``found`` with the fixed cost of an operation, the speed of memory and the memory at rest from ``probes``.

    If the larger runs were faster than the single timings allow, other programs slowed those timings: then the rate of
    the matmuls follows from the runs.

    Args:
        found: speeds of single operations.
        probes: a run with next to nothing to compute, and larger runs.
    """
    empty, *larger = probes
    found = replace(_with_rest(found, empty, larger), memory_efficiency=found.memory_efficiency or 1.0)
    for _ in range(3):  # the two hardly depend on each other
        found = _with_op(found, _fitted(found, _with_op, [empty], _OP, sign=1))
        found = _with_reach(found, _fitted(found, _with_reach, larger, _REACH))
    if found.memory_efficiency and found.memory_efficiency >= _TOO_FAR:
        found = replace(found, memory_efficiency=1.0)
        found = _faster(found, _fitted(found, _faster, larger, _SPEED))
    return found


def _faster(found: Hardware, factor: float) -> Hardware:
    """``found`` with ``factor`` times as fast matmuls and attention."""
    return replace(found, float32_flops=found.float32_flops * factor, bfloat16_flops=found.bfloat16_flops * factor)


def _with_op(found: Hardware, seconds: float) -> Hardware:
    return replace(found, op_seconds=seconds)


def _with_reach(found: Hardware, share: float) -> Hardware:
    return replace(found, memory_efficiency=share)


def _fitted(found: Hardware, change: _Change, probes: Sequence[Probe], span: _Span, sign: int = -1) -> float:
    """The value in ``span`` for which plans of ``probes`` take as long as the runs did; geometric mean over them.

    Args:
        found: the hardware, except for this value.
        change: sets the value.
        probes: the runs.
        span: least and greatest value.
        sign: 1 if plans take longer as the value grows, else -1.
    """

    def off(probe: Probe, value: float) -> float:
        return sign * (step_time(probe.workload, change(found, value)).total - probe.seconds)

    return statistics.geometric_mean(_root(functools.partial(off, probe), span) for probe in probes)


def _with_rest(found: Hardware, empty: Probe, larger: Sequence[Probe]) -> Hardware:
    """``found`` with the memory that a process takes on top of its tensors: a fixed part, and a part per byte."""
    bare = replace(found, resident_bytes=0.0, resident_share=0.0)

    def held(probe: Probe) -> float:
        estimate: Estimate = memory(probe.workload, bare, counting="allocated")
        return estimate.total

    shares = []
    if found.generation == "cpu":  # a GPU's allocator reports its own memory
        grown = [(probe.nbytes - empty.nbytes, held(probe) - held(empty)) for probe in larger]
        shares = [measured / planned - 1 for measured, planned in grown if planned > 0]
    share = min(1.0, max(0.0, statistics.fmean(shares))) if shares else 0.0
    rest = max(0.0, empty.nbytes - held(empty) * (1 + share))
    return replace(found, resident_bytes=rest, resident_share=share)


def _root(rising: Callable[[float], float], span: _Span) -> float:
    """The point in ``span`` where ``rising`` crosses 0; the nearer end if it does not."""
    low, high = span
    if rising(low) >= 0 or rising(high) <= 0:
        return low if rising(low) >= 0 else high
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
