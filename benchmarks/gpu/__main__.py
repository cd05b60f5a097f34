"""``python -m benchmarks.gpu check | bench | ranks``: see benchmarks/README.md.

Exit code 0: all is right. 1: something failed, or could not run. 2: it cannot run here.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from benchmarks.gpu import bench, check, host, ranks
from benchmarks.gpu.record import Record
from benchmarks.gpu.round import Round, Step, run_steps

COMMANDS: dict[str, tuple[dict[str, Step], float]] = {
    "check": (check.STEPS, 400.0),
    "bench": (bench.STEPS, 540.0),
    "ranks": (ranks.STEPS, 540.0),
}
"""Steps of each command, and its seconds on a GPU."""
DRY_SECONDS = 3600.0
MOST_PRINTED = 11_000
"""Characters of the table that is printed last: some machines show no more than the end of an output."""
NO_DEVICE = 2


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    options = _options(argv)
    steps, seconds = COMMANDS[options.command]
    if options.list:
        for name, step in steps.items():
            print(f"{name:<12} {step.seconds:4.0f} s  {step.purpose}")
        return 0
    work = Path(tempfile.mkdtemp(prefix=f"crius-gpu-{options.command}-"))
    try:
        return _run(options, steps, options.seconds or (DRY_SECONDS if options.dry else seconds), work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="What only a GPU can show.")
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU: tests the command itself")
    parser.add_argument("--only", default="", help="steps, joined by commas; default: all")
    parser.add_argument("--seconds", type=float, default=0.0, help="time of the call; default: 400, 540, 540")
    parser.add_argument("--list", action="store_true", help="list the steps")
    options = parser.parse_args(argv)
    steps, _ = COMMANDS[options.command]
    options.only = [name for name in options.only.split(",") if name] or list(steps)
    unknown = [name for name in options.only if name not in steps]
    if unknown:
        parser.error(f"no such step: {', '.join(unknown)}; there are {', '.join(steps)}")
    return options


def _run(options: argparse.Namespace, steps: dict[str, Step], seconds: float, work: Path) -> int:
    begin = time.monotonic()
    site = work / "site"
    wheels = os.environ.get("CRIUS_WHEELS") or str(host.ROOT / host.CARRIED / "wheels")
    taken = host.unpack_wheels(Path(wheels), site)
    if taken:
        print(f"taken from {wheels}: {', '.join(taken)}", flush=True)
    environ = host.environment_of(work, site, is_dry=options.dry)
    try:
        found = host.ask(sys.executable, environ)
    except (RuntimeError, OSError, ValueError, subprocess.TimeoutExpired) as error:
        return _refuse(str(error))
    if found["device"] is None and not options.dry:
        return _refuse(
            f"torch {found['torch']} can use no GPU; crius doctor says why, DRY=1 tests the command on a CPU"
        )
    device = "cpu" if options.dry else "cuda"
    command = f"{options.command} {'--dry ' if options.dry else ''}--only {','.join(options.only)}"
    folder = host.results_folder(found["device"], is_dry=options.dry)
    record = Record(options.command, folder, host.describe(found, command, is_dry=options.dry))
    parallel = max(1, min(7, (os.cpu_count() or 1) * 2 // 5))
    this = Round(record, sys.executable, device, work, environ, begin + seconds, parallel)
    _end_with(this)
    try:
        _finish(this, run_steps(this, steps, options.only))
    finally:
        this.stop()
        print(f"\n{record.table(MOST_PRINTED)}\nresults in {folder}", flush=True)
    return 1 if any(row["ok"] is False for row in record.rows) else 0


def _finish(this: Round, dropped: Sequence[str]) -> None:
    this.step = "end"
    if smi := host.nvidia_smi():
        this.row("nvidia-smi", True, ", ".join(smi.values()), **smi)
    if dropped:
        command = str(this.record.environment["command"]).partition(" ")[0]
        this.cannot("not begun", f"for another call: python -m benchmarks.gpu {command} --only {','.join(dropped)}")


def _end_with(this: Round) -> None:
    """Let SIGTERM and SIGINT end the programs of the round, and then the round, with its table."""

    def leave(number: int, frame: FrameType | None) -> None:
        this.stop()
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)


def _refuse(why: str) -> int:
    print(f"benchmarks.gpu: {why}", file=sys.stderr)
    return NO_DEVICE


if __name__ == "__main__":
    sys.exit(main())
