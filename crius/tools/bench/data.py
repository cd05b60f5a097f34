"""``crius bench data``: tokens per second and core, from a corpus to batches and from text to tokens."""

import dataclasses
import logging
import sys
import tempfile
import time
from collections.abc import Callable

import torch

from crius.config.run import RunConfig
from crius.data.cache import open_cached
from crius.data.loader import BatchLoader
from crius.data.source import TokenSource
from crius.data.tokenizer import build_tokenizer
from crius.errors import ConfigError
from crius.table import aligned
from crius.tools.bench.machine import Machine
from crius.tools.bench.result import Samples, show
from crius.train.inputs import open_run_corpus, run_batch_sizes

MEASURED_TOKENS = 4 << 20
"""Tokens per sample if the number of batches is left open: tens of milliseconds at the rate of a fast loader."""


@dataclasses.dataclass
class DataRow:
    """One way to get tokens.

    Attributes:
        name: its name.
        work: does it once; returns the number of tokens.
        cpu: CPU seconds of all threads of this process.
        wall: seconds of the clock.
        tokens: tokens of one round.
    """

    name: str
    work: Callable[[], int]
    cpu: Samples = dataclasses.field(default_factory=Samples)
    wall: Samples = dataclasses.field(default_factory=Samples)
    tokens: int = 0

    def measure(self) -> None:
        """Do the work once more."""
        wall = time.perf_counter()
        cpu = time.process_time()
        self.tokens = self.work()
        self.cpu.seconds.append(time.process_time() - cpu)
        self.wall.seconds.append(time.perf_counter() - wall)

    def as_dict(self) -> dict[str, object]:
        """Values for the JSON: the rate per core, and the samples."""
        return {
            "name": self.name,
            "tokens": self.tokens,
            "tokens_per_second_per_core": self.tokens / self.cpu.median,
            "cpu": self.cpu.as_dict(),
            "wall": self.wall.as_dict(),
        }


def data(config: RunConfig, *, batches: int = 0, repeat: int = 7, as_json: bool = False) -> int:
    """Read batches of a corpus, with and without a background thread, and tokenise it again: in turns.

    A core-second is a second of CPU time of all threads together. Each sample creates a loader, reads batches that no
    sample before it read, and closes the loader. Batches that the thread prepared beyond them count as time but not as
    tokens. Files are read through the page cache.

    Args:
        config: the run; ``data``, ``tokenizer`` and the sizes of its batches count.
        batches: batches per sample; 0 for as many as ``MEASURED_TOKENS`` take.
        repeat: rounds through all rows.
        as_json: print JSON instead of a table.

    Returns:
        0.

    Raises:
        ConfigError: ``batches`` is negative, or there is no round.
        DataError: the corpus cannot be used.
    """
    if batches < 0 or repeat < 1:
        raise ConfigError(
            f"--batches {batches} --repeat {repeat}: batches are at least 0, rounds at least 1.",
            where="command line",
            fix="--batches 0 --repeat 7",
        )
    corpus = open_run_corpus(config, 1)
    sizes = run_batch_sizes(config, 1)
    step_tokens = sizes.total * config.training.seq_len
    rows = _rows(config, corpus.train, sizes.total, batches or max(1, MEASURED_TOKENS // step_tokens))
    level = logging.getLogger("crius").level
    logging.getLogger("crius").setLevel(logging.WARNING)  # each round would log that it tokenises
    try:
        for _ in range(repeat):
            for row in rows:
                row.measure()
    finally:
        logging.getLogger("crius").setLevel(level)
    _print(rows, corpus.description, f"{sizes.total} x {config.training.seq_len:,}", as_json)
    return 0


def _rows(config: RunConfig, source: TokenSource, batch_size: int, batches: int) -> list[DataRow]:
    begin = source.cursors(range(source.num_shards))
    done = 0

    def read(prefetch: int) -> int:
        nonlocal done
        source.restore(begin)  # a stream can only start again; an indexed corpus continues with other samples
        loader = BatchLoader(
            source,
            global_batch_size=batch_size,
            rank=0,
            num_ranks=1,
            prefetch=prefetch,
            start_step=0 if source.num_shards else done,
        )
        done += batches
        tokens = sum(next(loader).tokens_BT.numel() for _ in range(batches))
        loader.close()
        return tokens

    ahead = config.data.prefetch or 2
    rows = [DataRow("batches, prepared when asked for", lambda: read(0))]
    rows.append(DataRow(f"batches, {ahead} prepared ahead by a thread", lambda: read(ahead)))
    if config.data.source in ("stdlib", "text", "jsonl", "parquet") and config.data.format == "documents":
        tokenizer = build_tokenizer(config.tokenizer)

        def tokenise() -> int:
            with tempfile.TemporaryDirectory() as folder:
                anew = dataclasses.replace(config.data, cache_dir=folder)
                return open_cached(anew, config.tokenizer, tokenizer).meta.num_tokens

        rows.append(DataRow("tokenised, first time on a machine", tokenise))
    return rows


def _print(rows: list[DataRow], description: tuple[str, ...], batch: str, as_json: bool) -> None:
    machine = Machine.of(torch.device("cpu"))
    record = {
        "machine": machine.as_dict(),
        "argv": sys.argv[1:],
        "corpus": list(description),
        "batch": batch,
        "rows": [row.as_dict() for row in rows],
    }
    table = [("", "tokens", "CPU ms", "spread", "wall ms", "tokens/s/core")]
    for row in rows:
        rate = row.tokens / row.cpu.median
        times = f"{1e3 * row.cpu.median:,.1f}", f"{row.cpu.spread:.0%}", f"{1e3 * row.wall.median:,.1f}"
        table.append((row.name, f"{row.tokens:,}", *times, f"{rate:,.0f}"))
    head = f"{machine}; medians of {len(rows[0].cpu.seconds)}, batches of {batch} tokens"
    show(as_json, record, [head, *description, *aligned(table, left=(0,))])
