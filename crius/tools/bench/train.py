"""``crius bench train``: the real train job on this machine, in variants that take turns."""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crius.config.operation import CheckpointConfig, ProfilerConfig
from crius.config.run import RunConfig, replace_fields
from crius.config.toml_file import command_line_flags, differences, shown, to_toml
from crius.errors import ConfigError
from crius.table import aligned
from crius.tools.bench.result import check_result_file, receipt, show, write_result
from crius.tools.bench.turns import Contestant, Outcome, largest_difference, median_ratio, ratios, take_turns

BARE = "bare loop"

_WAIT_SECONDS = 86_400
"""Seconds of the longest pause between two turns; a collective that waits longer fails."""


@dataclass(frozen=True)
class Variant:
    """One run that takes part.

    Attributes:
        name: its flags, or a name for them.
        config: the run; its rules have been checked.
        num_ranks: its number of ranks.
    """

    name: str
    config: RunConfig
    num_ranks: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Length of a measurement.

    Attributes:
        warmup: steps before the first round.
        rounds: turns of each variant.
        steps: steps of a turn.
    """

    warmup: int
    rounds: int
    steps: int

    def __post_init__(self) -> None:
        for name, value in (("warmup", self.warmup), ("rounds", self.rounds), ("steps_per_round", self.steps)):
            if value < 1:
                raise ConfigError(f"--{name} {value} is not positive.", where="command line", fix=f"--{name} 5")

    @property
    def total(self) -> int:
        """All steps of a variant."""
        return self.warmup + self.rounds * self.steps


def train(
    variants: Sequence[Variant],
    schedule: Schedule,
    *,
    overhead: bool = False,
    as_json: bool = False,
    out: Path | None = None,
) -> int:
    """Train all variants in turns and print rates, times, memory and ratios to the first.

    Each variant is the job of ``crius train`` in processes of its own, without validation, checkpoints, profiler and
    watchdog.

    Args:
        variants: the others are compared with the first.
        schedule: length of the measurement.
        overhead: also run the first variant in a plain PyTorch loop, and print the share of CPU time that the framework
            takes.
        as_json: print JSON instead of a table.
        out: file to write the JSON to.

    Returns:
        0; 1 if a variant failed.

    Raises:
        ConfigError: ``out`` cannot be written; raised before anything is trained.
        EnvironmentError: ``out`` could be written before, but not at the end.
    """
    if out:
        check_result_file(out)
    with tempfile.TemporaryDirectory(prefix="crius-bench-") as folder:
        contestants = [_contestant(variant, schedule, Path(folder), index) for index, variant in enumerate(variants)]
        if overhead:
            first = contestants[0]
            contestants.append(Contestant(BARE, [*first.argv, "--bare"]))
        outcomes = take_turns(contestants, rounds=schedule.rounds, steps=schedule.steps, say=_say)
    result = _result(variants, schedule, outcomes, overhead)
    show(as_json, result, _lines(result, outcomes))
    if out:
        write_result(out, result)
    return 1 if any(outcome.failure for outcome in outcomes) else 0


def prepared(config: RunConfig, schedule: Schedule) -> RunConfig:
    """``config`` with training steps only, and with the length of ``schedule``."""
    return replace_fields(
        config,
        {
            "training.steps": schedule.total,
            "training.epochs": -1,
            "validation.interval": 0,
            "checkpoint": CheckpointConfig(),
            "profiler": ProfilerConfig(),
            "watchdog.enable": False,
            "comm.timeout_seconds": _WAIT_SECONDS,
            "metrics.enable_tensorboard": False,
            "metrics.enable_wandb": False,
            "metrics.enable_progress_bar": False,
        },
    )


def _contestant(variant: Variant, schedule: Schedule, folder: Path, index: int) -> Contestant:
    file = folder / f"{index}.toml"
    file.write_text(to_toml(prepared(variant.config, schedule)), encoding="utf-8")
    ranks = ["--nproc", str(variant.num_ranks)]
    argv = [sys.executable, "-m", "crius", "bench", "contestant", "--config", str(file), *ranks]
    argv += command_line_flags(variant.config)
    return Contestant(
        variant.name, [*argv, "--warmup", str(schedule.warmup), "--job.run_dir", str(folder / str(index))]
    )


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _result(
    variants: Sequence[Variant], schedule: Schedule, outcomes: Sequence[Outcome], overhead: bool
) -> dict[str, Any]:
    base = outcomes[0]
    rows = []
    for index, outcome in enumerate(outcomes):
        variant = variants[index] if index < len(variants) else variants[0]
        row = {"name": outcome.name, "num_ranks": variant.num_ranks, "failure": outcome.failure}
        row["changes"] = {
            name: list(values) for name, values in differences(variants[0].config, variant.config).items()
        }
        rows.append(row | (_numbers(outcome, base) if outcome.turns else {}))
    result = {
        **receipt("bench train"),
        "machine": base.facts.get("machine"),
        "warmup": schedule.warmup,
        "rounds": schedule.rounds,
        "steps_per_round": schedule.steps,
        "config": shown(variants[0].config),
        "rows": rows,
    }
    if overhead and base.turns and outcomes[-1].turns:
        result["overhead"] = _overhead(base, outcomes[-1])
    return result


def _numbers(outcome: Outcome, base: Outcome) -> dict[str, Any]:
    facts = outcome.facts
    wall = outcome.samples()
    cpu = outcome.samples("cpu_seconds")
    rate = facts["tokens_per_step"] / wall.median
    per_rank = rate / facts["num_ranks"]
    peak = facts["peak_tflops"]
    waits = [turn["data_seconds"] / turn["wall_seconds"] for turn in outcome.turns if "data_seconds" in turn]
    return {
        "tokens_per_second": rate,
        "tokens_per_second_per_rank": per_rank,
        "mfu": per_rank * facts["flops_per_token"] / 1e12 / peak if peak else None,
        "wall": wall.as_dict(),
        "cpu": cpu.as_dict(),
        "peak_gib": outcome.turns[-1].get("peak_gib"),
        "peak_rss_mib": outcome.peak_rss_mib,
        "data_share": statistics.median(waits) if waits else None,
        "speed_ratio": 1 / median_ratio(outcome, base, "wall_seconds") if base.turns else None,
        "cpu_ratio": 1 / median_ratio(outcome, base, "cpu_seconds") if base.turns else None,
        "losses": sorted(outcome.losses.items()),
        "loss_difference": largest_difference(outcome.losses, base.losses),
        "facts": facts,
    }


def _overhead(train: Outcome, bare: Outcome) -> dict[str, Any]:
    """Share of a step that is not forward, backward, clipping and optimizer, round by round."""
    shares = {}
    for key in ("cpu_seconds", "wall_seconds"):
        values = [1 - ratio for ratio in ratios(bare, train, key).seconds]
        low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        shares[key] = {"median": statistics.median(values), "quartiles": [low, high]}
        fastest = min(bare.samples(key).seconds) / min(train.samples(key).seconds)
        shares[key]["of_the_fastest_rounds"] = 1 - fastest
    return shares


def _lines(result: dict[str, Any], outcomes: Sequence[Outcome]) -> list[str]:
    times = ("tokens/s", "/rank", "ms/step", "spread", "CPU-s/step", "spread")
    header = ("", *times, "MFU", "peak", "data", "speed", "CPU")
    cells = [_cells(row) for row in result["rows"]]
    machine = result["machine"] or {}
    lines = [
        f"{machine.get('device')} ({machine.get('name')}), {machine.get('threads')} threads on {machine.get('cores')} "
        f"cores, torch {machine.get('torch_version')}, crius {result['versions']['crius']}",
        f"{result['config']['model.name']}/{result['config']['model.flavor']}: {result['rounds']} rounds of "
        f"{result['steps_per_round']} steps in turns, after {result['warmup']}",
        *aligned([header, *cells], left=(0,)),
    ]
    lines += ["", "medians of the rounds; spread: from the lower to the upper quartile. speed, CPU: of the first over"]
    lines += ["this one, round by round, so that more is better. CPU-s: of all threads of all ranks"]
    for row in result["rows"][1:]:
        if (apart := row.get("loss_difference")) is not None:
            lines.append(f"losses of {row['name']}: at most {apart:.1e} apart from the first, relative")
    if found := result.get("overhead"):
        for key, name in (("cpu_seconds", "CPU time"), ("wall_seconds", "wall time")):
            low, high = found[key]["quartiles"]
            lines.append(
                f"overhead of the framework: {found[key]['median']:.2%} of the {name} of a step "
                f"({low:.2%} to {high:.2%}; of the fastest rounds {found[key]['of_the_fastest_rounds']:.2%})"
            )
    return lines + [outcome.failure for outcome in outcomes if outcome.failure]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "wall" not in row:
        return (row["name"], "failed", *[""] * 10)
    is_gpu = row["facts"]["machine"]["device"] == "cuda"
    peak = f"{row['peak_gib']:.2f} GiB" if is_gpu and row["peak_gib"] else f"{row['peak_rss_mib']:.0f} MiB"
    return (
        row["name"],
        f"{row['tokens_per_second']:,.0f}",
        f"{row['tokens_per_second_per_rank']:,.0f}",
        f"{row['wall']['milliseconds']:.1f}",
        f"{row['wall']['spread']:.1%}",
        f"{row['cpu']['milliseconds'] / 1e3:.4f}",
        f"{row['cpu']['spread']:.1%}",
        "n/a" if row["mfu"] is None else f"{row['mfu']:.1%}",
        peak,
        "n/a" if row["data_share"] is None else f"{row['data_share']:.2%}",
        "" if row["speed_ratio"] is None else f"{row['speed_ratio']:.3f}",
        "" if row["cpu_ratio"] is None else f"{row['cpu_ratio']:.3f}",
    )
