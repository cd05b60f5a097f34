"""Turns ``[data]``, ``[tokenizer]`` and ``[validation]`` into the training data and the held-out data. No torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from crius.config.data import DataConfig, TokenizerConfig, ValidationConfig, as_keys, read_entry
from crius.data.cache import open_cached
from crius.data.infer import infer
from crius.data.mixture import MixedSource, mixed_source
from crius.data.rows import left_out
from crius.data.samples import SampleSource, open_samples
from crius.data.source import NO_LABEL, Boundary, HeldOut, TokenSource
from crius.data.tokens import IndexedSource, TokenFile
from crius.errors import ConfigError, CriusError, DataError, EnvironmentError
from crius.plugins import install_line
from crius.tokens.tokenizer import Tokenizer, build_tokenizer

_MOST_DESCRIBED = 20  # sources of a mixture


@dataclass(frozen=True)
class Corpus:
    """The data of a run.

    Attributes:
        train: endless sequences for training.
        held_out: sequences that are never trained on, by the name of their set; a single set without a name has the
            name "". Empty if ``validation.interval`` is 0.
        tokenizer: the tokenizer.
        token_bytes: ``(vocab_size of the model,)`` int32, number of UTF-8 bytes of text that each id stands for.
        description: lines for the log.
    """

    train: TokenSource
    held_out: Mapping[str, HeldOut]
    tokenizer: Tokenizer
    token_bytes: npt.NDArray[np.int32]
    description: tuple[str, ...]

    @property
    def bad_rows(self) -> str:
        """List of the rows that were left out (``crius.data.rows.left_out``); empty if there are none."""
        own = self.train.sources.values() if isinstance(self.train, MixedSource) else [self.train]
        sources = (*own, *self.held_out.values())
        folders = [source.file.folder for source in sources if isinstance(source, IndexedSource | SampleSource)]
        return "".join(map(left_out, dict.fromkeys(folders)))


def open_corpus(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    validation: ValidationConfig,
    *,
    seq_len: int,
    global_batch_size: int,
    vocab_size: int,
    seed: int,
) -> Corpus:
    """Open the corpus. The first time on a machine it is tokenised; after that it takes milliseconds.

    The end of the token stream is held out, as whole documents unless the last one is too long. With
    ``validation.path``, that data is used instead. For streams see ``open_huggingface``.

    Args:
        data: section with the source of documents.
        tokenizer: section with the tokenizer.
        validation: section with the held-out part.
        seq_len: tokens per sequence.
        global_batch_size: sequences per optimizer step; an epoch must have at least that many.
        vocab_size: rows of the model's embedding.
        seed: seed of the order of the sequences.

    Raises:
        DataError: the corpus cannot be used; the message has a remedy.
        EnvironmentError: a package is missing.
    """
    tok = build_tokenizer(tokenizer)
    token_bytes = _token_bytes(tok, vocab_size)
    boundary = boundary_of(data, tok)
    _check_fraction(validation)
    if data.source == "huggingface":
        source, held_out, lines = _opener_of_streams()(data, tok, boundary, validation, seq_len=seq_len)
        return Corpus(source, held_out, tok, token_bytes, (f"{lines[0]}; {boundary.describe()}", *lines[1:]))

    def open_one(own: DataConfig, scored: ValidationConfig) -> Opened:
        return _open_one(
            own,
            scored,
            tokenizer=tokenizer,
            tok=tok,
            boundary=boundary,
            global_batch_size=1 if data.mix else global_batch_size,
            num_folders=max(1, len(data.mix)),
            seq_len=seq_len,
            vocab_size=vocab_size,
            seed=seed,
        )

    if data.mix:
        train, held_out, lines = _open_mixture(data, validation, open_one, seq_len, global_batch_size)
    else:
        train, held_out, lines = open_one(data, validation)
    return Corpus(train, held_out, tok, token_bytes, lines)


Opened = tuple[TokenSource, Mapping[str, HeldOut], tuple[str, ...]]
"""The training data, the held-out data by set, and lines for the log."""


def _open_one(
    data: DataConfig,
    validation: ValidationConfig,
    *,
    tokenizer: TokenizerConfig,
    tok: Tokenizer,
    boundary: Boundary,
    num_folders: int,
    global_batch_size: int,
    seq_len: int,
    vocab_size: int,
    seed: int,
) -> Opened:
    """The data of one local corpus; see ``open_corpus``."""
    file = _token_file(data, tokenizer, tok, vocab_size, "--data.path", num_folders)
    sets = validation.sets if validation.interval > 0 else {}
    held_files = {
        name: _token_file(replace(data, path=paths), tokenizer, tok, vocab_size, "--validation.path", num_folders)
        if paths
        else file
        for name, paths in sets.items()
    }
    if data.format == "chat":
        sizes = {"global_batch_size": global_batch_size, "seq_len": seq_len, "vocab_size": vocab_size, "seed": seed}
        samples, scored, lines = open_samples(file, held_files, data, validation, **sizes)
        return samples, scored, (_corpus_line(file, tok), *lines)
    # held out even if nothing is scored, so that switching validation on or off does not change the training data
    holds_out = validation.fraction > 0 and not validation.path
    cut = _cut(file, validation.fraction, seq_len) if holds_out else file.meta.num_tokens
    windows = partial(IndexedSource, boundary=boundary, seq_len=seq_len, vocab_size=vocab_size, seed=seed)
    train = windows(file, 0, cut, shuffle=data.shuffle)
    held = {
        name: windows(held_file, cut if held_file is file else 0, held_file.meta.num_tokens, shuffle=False)
        for name, held_file in held_files.items()
    }
    _check_train(train, list(held.values()), global_batch_size)
    for name, part in held.items():
        _check_held_out(train, part, validation, global_batch_size, name)
    lines = _describe(train, held, tok, global_batch_size)
    return train, held, (f"{lines[0]}; {boundary.describe()}", *lines[1:])


def _open_mixture(
    data: DataConfig,
    validation: ValidationConfig,
    open_one: Callable[[DataConfig, ValidationConfig], Opened],
    seq_len: int,
    global_batch_size: int,
) -> Opened:
    """The sources of ``data.mix`` as one. What is held out of each is scored under its name."""
    sources: dict[str, TokenSource] = {}
    held_out: dict[str, HeldOut] = {}
    lines: list[str] = []
    problems: list[CriusError] = []
    entries = [read_entry(text) for text in data.mix]
    for entry in entries:
        paths = validation.sets.get(entry.name, ())
        own = replace(validation, path=paths)
        if validation.path and not paths:
            own = replace(own, interval=0, fraction=0.0)
        try:
            if not entry.source:
                infer({"data.path": entry.path})  # says why it is not clear
            source, held, said = open_one(entry.corpus(data), own)
        except (DataError, ConfigError) as error:
            error.where = as_keys(f"[[data.mix]] {entry.name}" + (f", {error.where}" if error.where else ""))
            error.fix = as_keys(error.fix)
            problems.append(error)
            continue
        sources[entry.name] = source
        for part in held.values():
            held_out[entry.name] = part
        is_told = len(entries) <= _MOST_DESCRIBED
        lines += [f"{entry.name}: {line}" for line in said if is_told and not line.startswith(("train", "validation"))]
    if problems:
        raise ConfigError.together(problems)
    mixed = mixed_source(data, entries, sources, seq_len=seq_len, batch=global_batch_size)
    return mixed, held_out, tuple(lines)


def _token_bytes(tok: Tokenizer, vocab_size: int) -> npt.NDArray[np.int32]:
    if tok.vocab_size > vocab_size:
        raise DataError(
            f"tokenizer {tok.name} has {tok.vocab_size:,} ids, but the model has rows for {vocab_size:,}.",
            where="--tokenizer.path",
            fix=f"--model.vocab_size {tok.vocab_size}",
        )
    token_bytes = np.zeros(vocab_size, dtype=np.int32)
    token_bytes[: tok.vocab_size] = tok.token_bytes()
    return token_bytes


def boundary_of(data: DataConfig, tokenizer: Tokenizer) -> Boundary:
    """The boundary of documents, from ``data.add_bos`` and ``data.add_eos``.

    Raises:
        DataError: ``data.add_bos`` is on, but the tokenizer has no BOS.
    """
    start = tokenizer.eos_id
    if tokenizer.adds_bos if data.add_bos is None else data.add_bos:
        if tokenizer.bos_id is None:
            raise DataError(
                f"tokenizer {tokenizer.name} has no token that begins a document.",
                where="--data.add_bos",
                why="neither its post-processor nor bos_token in tokenizer_config.json names an existing token",
                fix="--data.no_add_bos: a document then starts with the end-of-document token",
            )
        start = tokenizer.bos_id
    return Boundary(eos_id=tokenizer.eos_id, start_id=start, end_label=tokenizer.eos_id if data.add_eos else NO_LABEL)


def _opener_of_streams() -> Callable[..., tuple[TokenSource, Mapping[str, HeldOut], tuple[str, ...]]]:
    """``open_huggingface``, if its package is installed."""
    try:
        from crius.data.huggingface import open_huggingface  # noqa: PLC0415  optional package
    except ImportError as error:
        raise EnvironmentError(
            f"source huggingface needs the datasets package, which is not installed ({error}).",
            where="--data.source",
            fix=install_line("datasets>=3.1"),
        ) from error
    return open_huggingface


def _check_fraction(validation: ValidationConfig) -> None:
    if validation.interval > 0 and not validation.path and not 0 < validation.fraction < 1:
        raise DataError(
            f"validation.fraction {validation.fraction} is not between 0 and 1.",
            where="--validation.fraction",
            fix="--validation.fraction 0.02, or --validation.interval 0 --validation.fraction 0 to train on everything",
        )


def _token_file(
    data: DataConfig, config: TokenizerConfig, tok: Tokenizer, vocab_size: int, flag: str, num_folders: int
) -> TokenFile:
    if data.source != "tokens":
        file = open_cached(data, config, tok, flag=flag)
    else:
        if len(data.path) != 1:
            raise DataError(
                f"source tokens takes one folder, but got {len(data.path)}.",
                where=flag,
                fix=f"{flag} FOLDER, written by crius data prepare",
            )
        file = TokenFile(Path(data.path[0]).expanduser(), num_folders=num_folders)
        if file.meta.is_chat != (data.format == "chat"):
            there, other = ("conversations", "chat") if file.meta.is_chat else ("documents", "documents")
            raise DataError(
                f"{file.folder} has {there}, but data.format is {data.format}.",
                where=flag,
                fix=f"--data.format {other}",
            )
        if file.meta.tokenizer_fingerprint != tok.fingerprint:
            raise DataError(
                f"{file.folder} was written with tokenizer {file.meta.tokenizer_name}, but the run has {tok.name}"
                + (" with other content." if file.meta.tokenizer_name == tok.name else "."),
                where="--tokenizer.path",
                why="the folder has the ids of that tokenizer, and the same text has other ids with this one",
                fix=f"--tokenizer.path {file.meta.tokenizer_name} as it was then, or prepare the folder again",
            )
    file.check_vocab(vocab_size)
    return file


def _cut(file: TokenFile, fraction: float, seq_len: int) -> int:
    """First held-out token: the start of a document, unless less than half of the wanted tokens would be held out."""
    total = file.meta.num_tokens
    wanted = round(total * fraction)
    (index,), _ = file.documents_between(*np.array([[total - wanted], [total]]))
    if index < len(file.documents):
        start = int(file.documents[index])
        if total - start >= max(wanted / 2, min(wanted, seq_len + 1)):
            return start
    return total - wanted


def _num_tokens(source: IndexedSource) -> int:
    return source.last_token - source.first_token


def _check_train(train: IndexedSource, held: Sequence[IndexedSource], global_batch_size: int) -> None:
    if train.num_samples >= global_batch_size:
        return
    fixes = []
    # both must have enough tokens at the proposed length
    limits = [(_num_tokens(train) - 1) // global_batch_size, *(_num_tokens(part) - 1 for part in held)]
    if (shorter := min(limits)) >= 1:
        fixes.append(f"--training.seq_len {_power_of_two(shorter)}")
    if train.num_samples and all(part.num_samples for part in held):
        fixes.append(f"--training.global_batch_size {_power_of_two(train.num_samples)}")
    raise DataError(
        f"the corpus has {_num_tokens(train):,} tokens to train on = {train.num_samples:,} sequences of "
        f"{train.seq_len:,}; one step needs {global_batch_size:,} sequences.",
        where=train.file.meta.source,
        fix=", or ".join([*fixes, "more text"]),
    )


def _check_held_out(
    train: IndexedSource, held: IndexedSource, validation: ValidationConfig, global_batch_size: int, name: str
) -> None:
    if held.num_samples:
        return
    tokens = _num_tokens(held)
    needed = held.seq_len + 1
    total = held.file.meta.num_tokens
    fixes = []
    fraction = -(-needed * 1000 // total) / 1000
    if not validation.path and (total - round(total * fraction) - 1) // held.seq_len >= global_batch_size:
        fixes.append(f"--validation.fraction {fraction:g}")
    if tokens >= 2:
        fixes.append(f"--training.seq_len {_power_of_two(tokens - 1)}")
    label = f"validation {name}" if name else "validation"
    raise DataError(
        f"{tokens:,} tokens are held out for {label}, but one sequence needs {needed:,}.",
        where="--validation.path" if validation.path else f"--validation.fraction {validation.fraction}",
        fix=", or ".join([*fixes, "--validation.interval 0 for no validation"]),
    )


def _power_of_two(limit: int) -> int:
    """The largest power of two that is at most ``limit``; ``limit`` is at least 1."""
    return 1 << (limit.bit_length() - 1)


def _corpus_line(file: TokenFile, tok: Tokenizer) -> str:
    meta = file.meta
    what = "conversations" if file.meta.is_chat else "documents"
    counts = f"{meta.num_documents:,} {what}, {meta.num_tokens:,} tokens"
    return f"corpus: {meta.source}: {counts}, tokenizer {tok.name} ({file.folder})"


def _describe(
    train: IndexedSource, held: Mapping[str, IndexedSource], tok: Tokenizer, global_batch_size: int
) -> tuple[str, ...]:
    lines = [
        _corpus_line(train.file, tok),
        f"train: {_num_tokens(train):,} tokens = {train.num_samples:,} sequences of {train.seq_len:,} = "
        f"{train.num_samples / global_batch_size:,.1f} steps per epoch",
    ]
    for name, part in held.items():
        where = "" if part.file is train.file else f" of {part.file.meta.source}"
        counts = f"{_num_tokens(part):,} tokens = {part.num_samples:,} sequences held out{where}"
        label = f"validation {name}" if name else "validation"
        lines.append(f"{label}: {counts}")
    return (*lines, *([] if held else ["validation: off"]))
