"""Conversations of a token folder to what is trained on and what is held out, with the checks and lines of a corpus."""

from functools import partial

from crius.config.data import DataConfig, ValidationConfig
from crius.data.samples import SampleSource
from crius.data.tokens import TokenFile
from crius.errors import DataError


def open_samples(
    file: TokenFile,
    held_file: TokenFile | None,
    data: DataConfig,
    validation: ValidationConfig,
    *,
    seq_len: int,
    global_batch_size: int,
    vocab_size: int,
    seed: int,
) -> tuple[SampleSource, SampleSource | None, tuple[str, ...]]:
    """The sequences to train on, those that are held out, and lines for the log.

    Held out are whole conversations: the last ``validation.fraction`` of them, at least one, or all of ``held_file``.

    Args:
        file: the folder to train on.
        held_file: the folder with what is scored, which may be ``file``; None where nothing is scored.
        data: packing, and what becomes of samples that are too long.
        validation: the section.
        seq_len: tokens in a sequence.
        global_batch_size: sequences in an optimizer step; an epoch has at least that many.
        vocab_size: rows of the model's embedding.
        seed: chooses the order.

    Raises:
        DataError: too few conversations are left; the message says what would work.
    """
    number = len(file.documents)
    holds_out = validation.fraction > 0 and not validation.path
    cut = number - min(number - 1, max(1, round(number * validation.fraction))) if holds_out else number
    sequences = partial(
        SampleSource, seq_len=seq_len, vocab_size=vocab_size, packing=data.packing, too_long=data.too_long
    )
    train = sequences(file, 0, cut, seed=seed, shuffle=data.shuffle)
    held = None
    if held_file is not None:
        first = cut if held_file is file else 0
        held = sequences(held_file, first, len(held_file.documents), seed=0, shuffle=False)
    _check(train, "to train on", global_batch_size, "")
    if held is not None:
        where = "--validation.path" if validation.path else f"--validation.fraction {validation.fraction}"
        _check(held, "held out for validation", 1, where)
    return train, held, tuple(_describe(train, held, global_batch_size))


def _check(source: SampleSource, what: str, needed: int, where: str) -> None:
    if source.num_samples >= needed:
        return
    fixes = []
    if source.num_samples:
        fixes.append(f"--training.global_batch_size {1 << (source.num_samples.bit_length() - 1)}")
    elif source.num_long:
        fixes.append(f"--training.seq_len {1 << (source.longest - 1).bit_length()}")
    if where:
        fixes.append("--validation.interval 0 for no validation")
    lack = f"one step needs {needed:,} sequences" if needed > 1 else "one is needed"
    raise DataError(
        f"{source.num_used:,} of {source.last - source.first:,} conversations are left {what} = {source.num_samples:,} "
        f"sequences of {source.seq_len:,}; {lack}.",
        where=where or source.file.meta.source,
        why="; ".join(_left_out(source)),
        fix=", or ".join([*fixes, "more conversations"]),
    )


def _left_out(source: SampleSource) -> list[str]:
    fate = "are left out (data.too_long drop)" if source.too_long == "drop" else "are cut"
    long = f"{source.num_long:,} have more than {source.seq_len:,} tokens and {fate}"
    empty = f"{source.num_empty:,} have no token to predict and are left out"
    return [text for text, number in ((long, source.num_long), (empty, source.num_empty)) if number]


def _describe(train: SampleSource, held: SampleSource | None, global_batch_size: int) -> list[str]:
    lines = [f"train: {_counts(train)} = {train.num_samples / global_batch_size:,.1f} steps an epoch"]
    if left_out := _left_out(train):
        lines.append(f"train: of {train.last - train.first:,} conversations {', '.join(left_out)}")
    if held is None:
        return [*lines, "validation: off"]
    where = "" if held.file is train.file else f" of {held.file.meta.source}"
    return [*lines, f"validation: {_counts(held)} held out{where}", *(f"validation: {one}" for one in _left_out(held))]


def _counts(source: SampleSource) -> str:
    how = "packed" if source.packing else "one each"
    return (
        f"{source.num_used:,} conversations, {source.num_tokens:,} tokens, {source.num_targets:,} of them to predict = "
        f"{source.num_samples:,} sequences of {source.seq_len:,} ({how}, {source.padding:.1%} padding)"
    )
