"""Crius, plain PyTorch and Hugging Face's Trainer on a CPU: the same model, weights and tokens, in turns.

    python -m benchmarks.bench_cpu [--cases eager_1t,compiled_1t,eager_2t,compiled_2t] [--rounds N] [--out FILE]

Prints a table for each case and ends with one line of JSON. Exit code 1 where losses disagree or a trainer failed.
"""

import dataclasses
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command import parser_of, positive, receipt, write_result
from benchmarks.parts import batches, first_model
from benchmarks.peers.task import Task
from benchmarks.turns import Contestant, Outcome, median_ratio, row, table, take_turns
from crius.cli.settings import run_of
from crius.config.run import RunConfig
from crius.data.meta import FORMAT_VERSION, META, TokenMeta
from crius.data.tokens import DOCUMENTS, TOKEN_BYTES, TOKENS
from crius.models import registry
from crius.models.huggingface import rows_of
from crius.tokens.tokenizer import build_tokenizer
from crius.tools.bench.machine import BenchMachine
from crius.train.inputs import describe_model

PEERS = Path(__file__).parent / "peers"
CRIUS = "crius"
CASES = {f"{mode}_{threads}t": (mode == "compiled", threads) for threads in (1, 2) for mode in ("eager", "compiled")}
TOLERANCES = {1: 1e-4, 20: 1e-3}
"""How far the losses of two trainers may be apart at some steps, in nats: rounding grows with the steps."""

WARMUP = 5
"""Steps before the first round: kernels are chosen and compiled, optimizer states are made."""

NUM_TOKENS = 400_000

COMPILED = ["--compile.enable"]
"""Flags of Crius in the compiled cases."""


def markov_tokens(vocab_size: int, count: int = NUM_TOKENS) -> np.ndarray:
    """A stream that can be learnt: each token has 16 successors, of which the r-th comes with a weight of 1 / r."""
    rng = np.random.default_rng(0)
    successors = rng.integers(0, vocab_size, size=(vocab_size, 16))
    weights = 1 / np.arange(1, 17)
    ranks = rng.choice(16, size=count, p=weights / weights.sum())
    tokens = np.empty(count, dtype=np.uint16)
    token = 0
    for index, rank in enumerate(ranks):
        token = tokens[index] = successors[token, rank]
    return tokens


def write_tokens(folder: Path, tokens: np.ndarray) -> None:
    """A token folder of one document, as ``crius data prepare`` writes it. Its ids stand for no text."""
    config = RunConfig().tokenizer
    tokenizer = build_tokenizer(config)
    folder.mkdir()
    tokens.astype("<u2").tofile(folder / TOKENS)
    np.zeros(1, dtype="<i8").tofile(folder / DOCUMENTS)
    np.zeros(tokenizer.vocab_size, dtype="<i4").tofile(folder / TOKEN_BYTES)
    meta = TokenMeta(
        version=FORMAT_VERSION,
        dtype="uint16",
        num_tokens=len(tokens),
        num_documents=1,
        max_token_id=int(tokens.max()),
        tokenizer_name=tokenizer.name,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        source="order-1 Markov chain",
        sha256={
            name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in (TOKENS, DOCUMENTS, TOKEN_BYTES)
        },
    )
    (folder / META).write_text(meta.to_json(), encoding="utf-8")


def first_weights(config: RunConfig) -> dict[str, torch.Tensor]:
    """The weights that Crius starts with, by Hugging Face's names."""
    family = registry.families()[config.model.name]
    weights = {}
    for name, parameter in first_model(config, torch.device("cpu")).named_parameters():
        names = list(rows_of(family.translated(name), tuple(parameter.shape)))
        parts = [parameter] if len(names) == 1 else parameter.unbind()
        weights |= {theirs: part.detach() for theirs, part in zip(names, parts, strict=True)}
    return weights


def write_weights(config: RunConfig, file: Path) -> None:
    """``first_weights`` as a file of torch."""
    torch.save(first_weights(config), file)


def write_batches(config: RunConfig, steps: int, file: Path) -> None:
    """The windows that Crius trains on, in its own order, one batch after the other."""
    with file.open("wb") as out:
        for batch in batches(config, steps):
            window = torch.cat((batch.tokens_BT, batch.labels_BT[:, -1:]), dim=1)
            out.write(window.numpy().astype("<u2").tobytes())


def write_task(
    folder: Path,
    flags: list[str],
    steps: int,
    warmup: int,
    write: Callable[[RunConfig, Path], None] = write_weights,
) -> list[str]:
    """Write what the trainers share, the weights as ``write`` does it; returns the flags of Crius."""
    sizes = describe_model(run_of(*flags))
    write_tokens(folder / "tokens", markov_tokens(sizes.vocab_size))
    flags = [*flags, "--data.path", str(folder / "tokens"), "--training.steps", str(steps)]
    config = run_of(*flags)
    write(config, folder / "weights")
    write_batches(config, steps, folder / "windows.bin")
    own = dataclasses.asdict(sizes.config)
    task = Task(
        **{field.name: own[field.name] for field in dataclasses.fields(Task) if field.name in own},
        seq_len=config.training.seq_len,
        batch=config.training.global_batch_size,
        steps=steps,
        weights=str(folder / "weights"),
        tokens=str(folder / "windows.bin"),
        warmup=warmup,
    )
    (folder / "task.json").write_text(json.dumps(dataclasses.asdict(task)), encoding="utf-8")
    return flags


def contestants(folder: Path, flags: list[str], warmup: int, compiled: bool, threads: int) -> list[Contestant]:
    """Crius and its peers, each one process."""
    environ = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environ |= {"TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "inductor")}
    ours = [sys.executable, "-m", "benchmarks.train_job", *flags, "--warmup", str(warmup)]
    ours += ["--job.run_dir", str(folder / f"run-{compiled}-{threads}")]
    ours += COMPILED if compiled else []
    theirs = [str(folder / "task.json"), *(["--compile"] if compiled else [])]
    return [
        Contestant(CRIUS, ours, environ),
        *(
            Contestant(name, [sys.executable, "-m", f"benchmarks.peers.{name}", *theirs], environ)
            for name in ("plain_torch", "hf_trainer")
        ),
    ]


def disagreements(outcomes: list[Outcome]) -> list[str]:
    """Where the losses of a trainer and those of Crius are further apart than ``TOLERANCES``."""
    ours, found = outcomes[0].losses, []
    for outcome in outcomes[1:]:
        missing = sorted(TOLERANCES.keys() - (ours.keys() & outcome.losses.keys()))
        found += [f"{outcome.name} and {outcomes[0].name}: no loss of step {step} of both" for step in missing]
        for step in TOLERANCES.keys() & ours.keys() & outcome.losses.keys():
            apart, tolerance = abs(outcome.losses[step] - ours[step]), TOLERANCES[step]
            if not apart <= tolerance:
                found.append(f"{outcome.name}: the loss of step {step} is {apart:.1e} from Crius's, over {tolerance:g}")
    return found


def summary(cases: dict[str, list[Outcome]]) -> dict[str, Any]:
    """CPU seconds a step of the best peer over ours in each case, and the smallest peak memory of theirs over ours."""
    ratios, memory = {}, []
    for name, (ours, *others) in cases.items():
        ratios[name] = round(min(median_ratio(other, ours, "cpu_seconds") for other in others), 4)
        memory.append(min(other.peak_rss_mib for other in others) / ours.peak_rss_mib)
    return {"ratio_vs_best_peer": ratios, "rss_ratio": round(min(memory), 4)}


def compare(names: list[str], rounds: int, steps: int, warmup: int, flags: list[str], out: Path | None) -> int:
    """Run the cases one after the other; returns the exit code."""
    begin, finished, problems = time.monotonic(), {}, []
    with tempfile.TemporaryDirectory(prefix="crius-peers-") as scratch:
        folder = Path(scratch) / "task"
        folder.mkdir()
        flags = write_task(folder, flags, warmup + rounds * steps, warmup)
        for name in names:
            compiled, threads = CASES[name]
            outcomes = take_turns(
                contestants(folder, flags, warmup, compiled, threads), rounds=rounds, steps=steps, say=lambda line: None
            )
            problems += [f"{name}: {outcome.failure}" for outcome in outcomes if outcome.failure]
            if any(outcome.failure for outcome in outcomes):
                continue
            finished[name] = outcomes
            problems += [f"{name}: {line}" for line in disagreements(outcomes)]
            print("\n".join([f"{name}, {rounds} rounds of {steps} steps:", *table(outcomes), ""]), flush=True)
    print("\n".join([*problems, f"{BenchMachine.of(torch.device('cpu'))}; {time.monotonic() - begin:.0f} s in all"]))
    found = summary(finished) if finished else {"ratio_vs_best_peer": {}, "rss_ratio": None}
    if out:
        cases = {name: [row(outcome, outcomes[0]) for outcome in outcomes] for name, outcomes in finished.items()}
        machine = BenchMachine.of(torch.device("cpu")).as_dict()
        result = {**receipt("bench_cpu"), "machine": machine, "rounds": rounds, "steps_per_round": steps}
        write_result(out, {**result, "warmup": warmup, "problems": problems, **found, "cases": cases})
    print(json.dumps(found))
    return 1 if problems else 0


def main(argv: list[str] | None = None) -> int:
    """Read the command line and compare."""
    parser = parser_of(__doc__, prints_json=False)
    parser.add_argument("--cases", default=",".join(CASES), help="joined by commas")
    parser.add_argument("--rounds", type=positive, default=10, help="turns of each trainer in each case")
    parser.add_argument("--steps", type=positive, default=2, help="of a turn")
    arguments, flags = parser.parse_known_args(argv)
    names = arguments.cases.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    base = ["--config", str(PEERS / "crius.toml"), *flags]
    return compare(names, arguments.rounds, arguments.steps, WARMUP, base, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
