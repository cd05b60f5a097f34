"""Kinds of files that a stranger may make: a small sample of each, and the commands that read it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from harness import crius
from pretrained_samples import save
from sft_samples import tokenizer_folder, write_conversations

from hostile.damage import DAMAGES, number, script, steps, value

_SMALL = "--model.num_layers 1 --model.dim 32 --training.seq_len 32 --training.device cpu"


class Kind(NamedTuple):
    """A kind of file.

    Attributes:
        make: writes the sample into an empty folder.
        folder: files below it are damaged.
        commands: what reads them, in that folder.
        damages: ways to damage them beside those of all files.
        pattern: which of the files are damaged.
    """

    make: Callable[[Path], object]
    folder: str
    commands: tuple[str, ...]
    damages: tuple[Callable, ...] = ()
    pattern: str = "*"


def run(place):
    words = f"train {_SMALL} --training.steps 2 --validation.interval 1 --metrics.log_interval 1 --job.run_dir run"
    done = crius(*words.split(), cwd=place)
    assert done.returncode == 0, done.stderr
    shutil.copytree(place / "run", place / "other")


def model(place):
    save("llama", place / "model")
    tokenizer_folder(place / "model")
    write_conversations(place / "own.jsonl", 4)


def gguf(place):
    from gguf import GGUFWriter

    writer = GGUFWriter(place / "gguf/own.gguf", "llama")
    writer.add_context_length(64)
    for add, size in (
        (writer.add_embedding_length, 16),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 32),
        (writer.add_head_count, 2),
        (writer.add_head_count_kv, 2),
        (writer.add_rope_freq_base, 10_000.0),
        (writer.add_vocab_size, 32),
        (writer.add_layer_norm_rms_eps, 1e-5),
    ):
        add(size)
    shapes = {"token_embd": (32, 16), "output_norm": (16,), "output": (32, 16), "blk.0.attn_norm": (16,)}
    shapes |= {f"blk.0.attn_{name}": (16, 16) for name in ("q", "k", "v", "output")}
    shapes |= {
        "blk.0.ffn_norm": (16,),
        "blk.0.ffn_gate": (32, 16),
        "blk.0.ffn_up": (32, 16),
        "blk.0.ffn_down": (16, 32),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape).numpy())
    writer.add_token_list(["t", "o", "to", "</s>", *(f"token {place}" for place in range(28))])
    writer.add_token_types([1, 1, 1, 3] + [1] * 28)
    writer.add_eos_token_id(3)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_merges(["t o"])
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()


def torch_dcp(place):
    weights = {"layers.0.attention.wo.weight": torch.ones(3, 3), "norm.weight": torch.ones(3).bfloat16()}
    dcp.save(weights | {"train_state": {"step": 7}}, checkpoint_id=place / "dcp", no_dist=True)


def tokenizer(place):
    tokenizer_folder(place / "tokenizer")
    (place / "own.txt").write_text("Words, and \u00fcmlauts.\n" * 20)
    write_conversations(place / "own.jsonl", 4)


def rows(place):
    write_conversations(place / "rows/chat.jsonl", 20)
    texts = [json.dumps({"text": f"A text, number {number}."}) for number in range(50)]
    (place / "rows/text.jsonl").write_text("\n".join(texts))


def parquet(place):
    from pyarrow import Table
    from pyarrow.parquet import write_table

    write_table(
        Table.from_pydict({"text": [f"A text, number {number}." for number in range(50)]}), place / "parquet/a.parquet"
    )


def toml(place):
    (place / "toml/gpu.toml").write_text('like = "h100-80g"\nmemory_bytes = 4e10\n')
    (place / "toml/own.toml").write_text(
        '[training]\nsteps = 3\n[model]\nname = "llama3"\nflavor = "debug"\ndim = 32\n[optimizer]\nlr = 1e-3\n'
    )


def checkpoints(place):
    run(place)
    shutil.rmtree(place / "other")
    (place / "run/checkpoints").rename(place / "checkpoints")


_TOKENS = "data prepare out --data.path own.txt --tokenizer.path tokenizer --num_workers 1"
_SHOW = "data show --training.seq_len 16 --training.global_batch_size 1 --data.path"
_CHATS = f"{_SHOW.replace('16', '256')} own.jsonl --data.format chat --tokenizer.path"
_OF_CHECKPOINTS = (
    "checkpoint ls checkpoints",
    "checkpoint verify checkpoints",
    "generate checkpoints --prompt a --max_new_tokens 1",
)
KINDS = {
    "run": Kind(
        run,
        "run",
        (
            "report run",
            "report run other",
            "runs .",
            "runs . --json",
            "plan compare run",
            "data audit run",
            "data show run",
            "generate run --prompt a --max_new_tokens 1",
            "checkpoint ls run",
            "checkpoint verify run",
            "config show --config run/run.toml",
            "config diff run/run.toml other/run.toml",
            "train --job.run_dir run --config run/run.toml --training.steps 3 --training.device cpu",
        ),
    ),
    "model": Kind(
        model,
        "model",
        (
            "import model out",
            "import model --explain",
            "generate model --prompt a --max_new_tokens 1",
            "config show --model.from_hf model",
            "tune model own.jsonl --dry --training.device cpu",
        ),
        (number, steps),
    ),
    "gguf": Kind(gguf, "gguf", ("import gguf/own.gguf out", "import gguf/own.gguf --explain"), (number, number)),
    "dcp": Kind(torch_dcp, "dcp", ("checkpoint convert dcp out",), (number, number)),
    "tokenizer": Kind(
        tokenizer,
        "tokenizer",
        (_TOKENS, f"{_CHATS} tokenizer", f"train {_SMALL} --training.steps 1 --tokenizer.path tokenizer"),
        (steps, steps),
        "*.json",
    ),
    "template": Kind(tokenizer, "tokenizer", (f"{_CHATS} tokenizer",), (script,) * len(DAMAGES), "*.jinja"),
    "rows": Kind(
        rows,
        "rows",
        (
            "data doctor rows/chat.jsonl",
            "data doctor rows/text.jsonl",
            f"{_SHOW} rows/text.jsonl",
            "data prepare out --data.path rows/text.jsonl --tokenizer.path byte --num_workers 1",
        ),
    ),
    "parquet": Kind(
        parquet,
        "parquet",
        (
            "data doctor parquet/a.parquet",
            f"{_SHOW} parquet/a.parquet",
            "data prepare out --data.path parquet/a.parquet --tokenizer.path byte --num_workers 1",
        ),
        (number, number),
    ),
    "toml": Kind(
        toml,
        "toml",
        (
            "config show --config toml/own.toml",
            "plan --config toml/own.toml --gpu h100-80g",
            "plan --flavor 1b --gpu toml/gpu.toml",
        ),
    ),
    "checkpoint": Kind(checkpoints, "checkpoints", _OF_CHECKPOINTS, (number,)),
    "manifest": Kind(checkpoints, "checkpoints", _OF_CHECKPOINTS, (value,) * 4, "manifest.json"),
}
