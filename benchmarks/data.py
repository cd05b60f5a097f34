"""Tokens per second and core, from a corpus to batches and from text to tokens; nothing is trained.

    python -m benchmarks.data [--batches N] [--repeat N] [flags of crius train]

Each sample creates a loader, reads batches that no sample before it read, and closes the loader. Batches that the
thread prepared beyond them count as time but not as tokens. Files are read through the page cache. The last row
tokenises the corpus into a folder that is removed; tokens and streams lack it.
"""

import dataclasses
import logging
import tempfile
from collections.abc import Sequence

import torch

from benchmarks.command import end_with, facts_from, parse, parser_of, positive
from benchmarks.rows import Row, measure, report
from crius.cli.app import refuse_given
from crius.config.run import RunConfig
from crius.config.toml_file import flatten
from crius.data.cache import open_cached
from crius.data.loader import BatchLoader
from crius.data.source import TokenSource
from crius.tokens.tokenizer import build_tokenizer
from crius.tools.bench.machine import BenchMachine
from crius.train.inputs import open_run_corpus, run_batch_sizes

MEASURED_TOKENS = 4 << 20
"""Tokens per sample if the number of batches is left open: tens of milliseconds at the rate of a fast loader."""


def rows_of(config: RunConfig, source: TokenSource, batches: int) -> list[Row]:
    """The loader without and with a thread, and the tokenizer."""
    begin = source.cursors(range(source.num_shards))
    size = run_batch_sizes(config, 1).total
    batches = batches or max(1, MEASURED_TOKENS // (size * config.training.seq_len))
    done = 0

    def read(prefetch: int) -> int:
        nonlocal done
        source.restore(begin)  # a stream can only start again; an indexed corpus continues with other samples
        loader = BatchLoader(
            source,
            global_batch_size=size,
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
    rows = [
        Row("batches, prepared when asked for", lambda: read(0)),
        Row(f"batches, {ahead} prepared ahead by a thread", lambda: read(ahead)),
    ]
    if config.data.source in ("stdlib", "text", "jsonl", "parquet") and config.data.format == "documents":
        tokenizer = build_tokenizer(config.tokenizer)

        def tokenise() -> int:
            with tempfile.TemporaryDirectory() as folder:
                anew = dataclasses.replace(config.data, cache_dir=folder)
                return open_cached(anew, config.tokenizer, tokenizer).meta.num_tokens

        rows.append(Row("tokenised, first time on a machine", tokenise))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--batches", type=positive, default=0, help="per sample; 0: as many as have 4 million tokens")
    parser.add_argument("--repeat", type=positive, default=7, help="rounds")
    options, flags = parse(parser, argv)
    config = facts_from(flags, is_dry=True).config
    degrees = [name for name in flatten(config) if name.endswith("_degree")]
    refuse_given(degrees, "one rank reads the whole batch here")
    corpus = open_run_corpus(config, 1)
    rows = rows_of(config, corpus.train, options.batches)
    logging.getLogger("crius").setLevel(logging.WARNING)  # each round would log that it tokenises
    measure(rows, options.repeat)
    batch = f"batches of {run_batch_sizes(config, 1).total} x {config.training.seq_len:,} tokens"
    report(options, "data", rows, BenchMachine.of(torch.device("cpu")), "tokens", batch, *corpus.description)
    return 0


if __name__ == "__main__":
    end_with(main)
