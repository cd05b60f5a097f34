"""A mixture of three small sources, one of conversations, one that ends, and a stage from step 20."""

import random
from pathlib import Path

from sft_samples import tokenizer_folder, write_conversations

BATCH = 6
STEPS = 50

TOML = """
[[data.mix]]
name = "words"
path = "{folder}/words"
weight = 0.5

[[data.mix]]
name = "sums"
path = "{folder}/sums.jsonl"
field = "body"
weight = 0.3
on_end = "share"

[[data.mix]]
name = "chat"
path = "{folder}/chat.jsonl"
weight = 0.2

[[data.stage]]
from = 20
weights = {{ words = 1, sums = 1, chat = 2 }}
"""


def mixture_flags(folder: Path) -> list[str]:
    """Flags of a run on a mixture that is written to ``folder``."""
    rng = random.Random(49)
    (folder / "words").mkdir(parents=True)
    for number in range(12):
        words = [rng.choice(("and", "the", "sea", "ship", "wind", "of", "storm")) for _ in range(600)]
        (folder / "words" / f"{number}.txt").write_text(" ".join(words))
    rows = [f"{a} + {b} = {a + b};" * 12 for a, b in ((rng.randrange(99), rng.randrange(99)) for _ in range(24))]
    (folder / "sums.jsonl").write_text("".join(f'{{"body": "{row}"}}\n' for row in rows))
    write_conversations(folder / "chat.jsonl", 60)
    tokenizer_folder(folder / "tok")
    (folder / "mix.toml").write_text(TOML.format(folder=folder))
    return [
        *("--recipe", "llama3_debug", "--config", str(folder / "mix.toml"), "--tokenizer.path", str(folder / "tok")),
        *("--data.cache_dir", str(folder / "cache"), "--training.seq_len", "64", "--model.vocab_size", "320"),
        *("--training.global_batch_size", str(BATCH), "--training.steps", str(STEPS), "--model.num_layers", "2"),
        *("--validation.interval", "100", "--validation.num_samples", "6", "--validation.fraction", "0.1"),
        *("--optimizer.lr", "3e-4", "--launch.max_failures_at_step", "2"),
    ]
