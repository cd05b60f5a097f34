"""``crius tune``."""

import contextlib
import dataclasses
import io
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from crius.cli.app import (
    SOURCES,
    app,
    emit,
    facts_of,
    fitted,
    imports,
    need_torch,
    parsed,
    place_of,
    run_dir,
    started,
    train_verb,
)
from crius.config import rules
from crius.config.command_line import last_of_each
from crius.config.facts import Facts
from crius.config.resolve import USABLE
from crius.config.rules import plain_name
from crius.config.run import RunConfig
from crius.errors import ConfigError
from crius.launch.stop import PREEMPTED, caught_signals
from crius.tools.report.runs import run_row
from crius.tools.report.sweep import train


@app.verb(train=train_verb)
def tune(
    model: Annotated[str, "Run folder, Hugging Face folder, name on the hub, or GGUF file."],
    data: Annotated[str, "Conversations: a file, or a folder of files."],
    *settings: Annotated[str, "Settings of crius train, which win."],
    dry: Annotated[bool, "Stop after the choices, the mask, the estimate and the command."] = False,
) -> int:
    """Tune a model on your conversations: choose the settings, show the mask, ask held-out questions before and after,
    and leave adapters and a merged model in the run folder.

    Every flag of crius train may be given, and wins. Ctrl-C saves, and the same command continues.
    """
    need_torch()
    from crius.tools.tune.record import another, check_data, check_is_new, read_record, write_record

    given = _given(settings)
    folder = Path(given.get("job.run_dir") or f"runs/{plain_name(Path(model).stem)}-{plain_name(Path(data).stem)}")
    asked = [model, data, *settings]
    known = read_record(folder)
    if known.get("asked") == asked:
        from crius.tools.tune.choose import corpus_of

        emit(f"{folder} goes on")
        check_data(folder, known, corpus_of(_facts(known["words"]))[0].identity)
        if dry:
            emit(started("train", *known["words"]))
    else:
        place = _checked(model, data, settings)
        from crius.tools.tune.model import opened

        if known and dry and "job.run_dir" not in given:
            folder = another(folder)
            known = read_record(folder)
        check_is_new(folder, known)
        known = {"asked": asked, **_begun(opened(place, folder, emit), data, settings, given, folder, dry=dry)}
        if not dry:
            write_record(folder, known)
    if dry:
        return 0
    if run_row(folder).state.word != "finished":
        with caught_signals() as stops:
            code = train([*known["words"], *imports()], stops)
        if code and not stops:
            return code
        if code:
            sys.stderr.write(f"the same command continues, then asks and exports: {started('tune', *asked)}\n")
            by = stops[0].signal
            return 128 + by if by.name == "SIGINT" else PREEMPTED
    _end(folder, known)
    return 0


def _given(settings: Sequence[str]) -> dict[str, str]:
    """Settings of the command line: dotted name to value; ``true`` for a flag without one."""
    given = {}
    words = last_of_each(settings, train_verb().arguments())
    for word, following in itertools.pairwise([*words, "--"]):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals:
                value = "true" if following.startswith("--") else following
            given[name] = value
    return given


def _checked(model: str, data: str, settings: Sequence[str]) -> str:
    """The path of the model, after wrong settings and places were refused, before it is read.

    Raises:
        CriusError: there is no such flag, data or model.
    """
    from crius.data.documents import KINDS, find_files
    from crius.tools.tune.model import path_of_model

    run = _parsed(["--recipe", "tune", "--data.path", data, *settings]).get("run", RunConfig())
    place = path_of_model(model, data)
    if run.data.source in KINDS and run.data.source != "stdlib":
        find_files(run.data, "DATA")
    if run.data.source == "text":
        raise ConfigError(
            f"{data} has no conversations.",
            where="command line",
            why="they are rows of .jsonl, .csv or .parquet files; crius train also takes text",
            fix=started("train", "--checkpoint.init_from", model, "--data.path", data),
        )
    return place


def _begun(
    model: str, data: str, settings: Sequence[str], given: Mapping[str, str], folder: Path, *, dry: bool
) -> dict[str, Any]:
    """Choose the command, print it with its reasons, and ask the model before it is tuned, unless ``dry``."""
    from crius.data.show import coloured, preview, takes_colour
    from crius.tools.tune.chatml import choose_template
    from crius.tools.tune.choices import Choices
    from crius.tools.tune.choose import choose, corpus_of

    named = ["--recipe", "tune", "--checkpoint.init_from", model, "--data.path", data, *settings]
    if "job.run_dir" not in given:
        named += ["--job.run_dir", str(folder)]
    chosen = Choices(given)
    new_ids = choose_template(model, folder / "tokenizer", chosen)
    facts, words = choose(named, chosen, _facts, _memory, new_ids)
    from crius.tools.tune.held_out import conversations_of, give_back_memory, seconds_per_token, tell  # loads torch

    train_set, held_set, tokenizer = corpus_of(facts)
    emit(f"{model}: {facts.config.model.name}, {facts.model.num_parameters / 1e6:,.1f} M weights")
    emit("\n".join([f"{data}: {train_set.last:,} conversations to train on", *chosen.lines()]))
    for text in preview(train_set, tokenizer):
        emit(coloured(text) if takes_colour(sys.stdout) else text)
    source = _source(model)
    asked = conversations_of(held_set)
    training = facts.config.training
    sequences = training.steps * training.global_batch_size
    if training.epochs > 0:
        sequences = training.epochs * train_set.num_samples
    cost = seconds_per_token(source, training.seq_len, is_whole=not facts.config.lora.is_on)
    seconds = sequences * training.seq_len * cost
    length = f"{seconds / 60:,.0f} minutes" if seconds > 120 else f"{seconds:,.0f} s"
    emit(f"about {length} of training on this machine, by a measured forward pass\n")
    emit(f"{started('train', *words)}\n")
    if not dry:
        run_dir(facts.config, None)
    before = {} if dry or new_ids else dataclasses.asdict(tell(source, asked))
    del source
    give_back_memory()
    return {"words": words, "data": train_set.identity, "before": before}


def _source(path: str) -> Any:
    from crius.interop.weights import open_weights
    from crius.tools.generate.source import read_source
    from crius.tools.tune.held_out import ANSWER

    return read_source(open_weights(path), ANSWER)


def _facts(words: Sequence[str]) -> Facts:
    """Facts about the run of a ``crius train`` command.

    Raises:
        CriusError: there is no such run.
    """
    values = _parsed(words)
    with contextlib.redirect_stderr(io.StringIO()):  # the run itself prints its decisions
        facts = facts_of(values.get("run", RunConfig()), values.get("nproc", 0), None)
    rules.check(facts)
    return facts


def _parsed(words: Sequence[str]) -> dict[str, Any]:
    """Arguments of a ``crius train`` command.

    Raises:
        ConfigError: there is no such command.
    """
    values = parsed(["train", *words]).values
    if {"dry_run", "as_json", "config"} & values.keys():
        raise ConfigError("crius tune takes settings of crius train.", where="command line", fix="--dry, or nothing")
    if SOURCES.counted:
        raise ConfigError("auto is what crius tune chooses.", where="command line", fix="leave it out")
    return values


def _memory(words: Sequence[str]) -> tuple[float, float]:
    """Bytes that a run needs, and bytes that a rank may use."""
    from crius.tools.plan.compare import plan_run

    facts = _facts(words)
    machine, hardware = place_of(facts)
    run, _ = fitted(facts, machine, hardware)
    return plan_run(run, facts.model, machine, hardware).memory.total, USABLE * hardware.memory_bytes


def _end(folder: Path, known: dict[str, Any]) -> None:
    """Ask the tuned model, compare, and export; what an earlier start did is not done again."""
    from crius.tools.tune.choose import corpus_of
    from crius.tools.tune.held_out import compared, conversations_of, tell
    from crius.tools.tune.record import write_record
    from crius.tools.tune.results import leave

    if "shown" not in known:
        source = _source(str(folder))
        asked = conversations_of(corpus_of(_facts(known["words"]))[1])
        known["shown"] = compared(source.tokenizer, asked, known["before"], tell(source, asked))
    emit("\n".join(known["shown"]))
    if "left" not in known:
        known["left"] = leave(folder)
        write_record(folder, known)
    emit("\n".join(known["left"]))
    emit(f"talk to it: {started('chat', str(folder))}")
