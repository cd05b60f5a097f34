"""Steps of the real train job on this machine, in variants that take turns.

    python -m benchmarks.train [--vs "FLAGS"]... [--overhead] [--rounds N] [--out FILE] [flags of crius train]

Every variant is the job of ``crius train`` in processes of its own, with as many ranks as its degrees need. It pauses
after a step while others have their turn; nothing else is changed. Validation, checkpoints, profiler and watchdog are
off, and no run folder stays. CPU seconds are those of all threads of all ranks, with their work between turns.
"""

import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import end_with, facts_from, parse, parser_of, positive, publish, receipt
from benchmarks.train_job import check_bare
from benchmarks.turns import Contestant, Outcome, ratios, row, table, take_turns
from crius.cli.app import refuse_given
from crius.config.toml_file import differences, shown
from crius.errors import ConfigError
from crius.train.inputs import open_run_corpus

BARE = "bare loop"
QUIET = (
    *("--training.epochs=-1", "--validation.interval=0", "--checkpoint.no_enable", "--watchdog.no_enable"),
    *("--profiler.no_enable", "--metrics.no_enable_tensorboard", "--metrics.no_enable_wandb"),
    *("--metrics.no_enable_progress_bar", "--comm.timeout_seconds=86400"),  # of the longest pause between two turns
)


def overhead(train: Outcome, bare: Outcome) -> dict[str, Any]:
    """Share of a step that is not forward, backward, clipping and optimizer, round by round."""
    shares = {}
    for key in ("cpu_seconds", "wall_seconds"):
        values = [1 - ratio for ratio in ratios(bare, train, key).seconds]
        low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        fastest = 1 - min(bare.samples(key).seconds) / min(train.samples(key).seconds)
        shares[key] = {"median": statistics.median(values), "quartiles": [low, high], "of_the_fastest_rounds": fastest}
    return shares


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; exit code 1 if a variant failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--vs", action="append", default=[], help="flags of a variant, on top of the others")
    parser.add_argument("--warmup", type=positive, default=5, help="steps before the first round")
    parser.add_argument("--rounds", type=positive, default=10, help="turns of each variant")
    parser.add_argument("--steps_per_round", type=positive, default=5, help="steps of a turn")
    parser.add_argument("--overhead", action="store_true", help="also run a plain PyTorch loop beside the first")
    options, flags = parse(parser, argv)
    steps = options.warmup + options.rounds * options.steps_per_round
    variants = {}
    argvs = {}
    fix = 'flags of train, as --vs "--compile.enable"'
    if "" in options.vs:
        raise ConfigError("--vs has no flag of a run.", where="--vs", fix=fix)
    for name in ("", *options.vs):
        try:
            given = [*flags, *shlex.split(name)]
        except ValueError as error:
            raise ConfigError(f"--vs {name!r} cannot be read: {error}.", where="--vs", fix=fix) from None
        facts_from(given, is_dry=True)
        refuse_given(("job.run_dir", "job.name"), "a timed run leaves no folder")
        refuse_given(("training.steps",), "the timed steps are the only ones", "--rounds and --steps_per_round")
        given += [*QUIET, f"--training.steps={steps}"]
        facts = facts_from(given)
        if facts.config.data.source != "huggingface":
            open_run_corpus(facts.config, facts.data_parallel_ranks)  # else all of them would tokenise it at once
        variants[name or "base"] = facts
        argvs[name or "base"] = given
    if options.overhead:
        check_bare(variants["base"])
        argvs[BARE] = [*argvs["base"], "--bare"]
    with tempfile.TemporaryDirectory(prefix="crius-bench-") as folder:
        program = [sys.executable, "-m", "benchmarks.train_job", "--warmup", str(options.warmup)]
        contestants = [
            Contestant(name, [*program, *given, "--job.run_dir", str(Path(folder) / str(number))])
            for number, (name, given) in enumerate(argvs.items())
        ]
        outcomes = take_turns(
            contestants,
            rounds=options.rounds,
            steps=options.steps_per_round,
            say=lambda line: print(line, file=sys.stderr),
        )
    base, *_ = outcomes
    config = variants["base"].config
    record = {
        **receipt("train"),
        "machine": base.facts.get("machine"),
        **{key: getattr(options, key) for key in ("warmup", "rounds", "steps_per_round")},
        "config": shown(config),
        "changes": {name: differences(config, facts.config) for name, facts in variants.items()},
        "rows": [row(outcome, base) for outcome in outcomes],
    }
    lines = [
        f"{config.model.name}/{config.model.flavor} on {', '.join(map(str, (record['machine'] or {}).values()))}",
        f"{options.rounds} rounds of {options.steps_per_round} steps in turns, after {options.warmup}",
        *table(outcomes),
    ]
    if options.overhead and base.turns and outcomes[-1].turns:
        record["overhead"] = overhead(base, outcomes[-1])
        for key, share in record["overhead"].items():
            low, high = share["quartiles"]
            fastest = share["of_the_fastest_rounds"]
            lines.append(
                f"overhead of the framework: {share['median']:.2%} of the {key} of a step "
                f"({low:.2%} to {high:.2%}; of the fastest rounds {fastest:.2%})"
            )
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    publish(options, record, [*lines, *failures])
    return 1 if failures else 0


if __name__ == "__main__":
    end_with(main)
