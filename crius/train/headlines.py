"""The start of a run as a terminal shows it: five lines."""

from collections.abc import Iterator
from pathlib import Path

import torch

from crius.data.corpus import Corpus
from crius.models.description import ModelDescription
from crius.train.loop import Loop


def headlines(loop: Loop, facts: ModelDescription, corpus: Corpus, run_dir: Path) -> Iterator[str]:
    """What a run is, in five lines, each with its name in front."""
    config = loop.config
    training = config.training
    model = config.model
    origin = f" from {config.checkpoint.init_from}" if config.checkpoint.init_from else ""
    trained = f", LoRA of rank {config.lora.rank}" if config.lora.is_on else ""
    yield f"model {model.name}/{model.flavor}{origin}, {facts.num_parameters / 1e6:,.1f} M parameters{trained}"
    yield f"data {corpus.description[0].removeprefix('corpus: ').rpartition(' (')[0] or corpus.description[0]}"
    device = loop.world.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    shards = f", {loop.layout}" if loop.layout.num_ranks > 1 else ""
    compiled = "compiled" if config.compile.enable else "eager"
    recompute = config.activation_checkpoint.mode
    yield (
        f"layout {loop.layout.num_ranks} x {name}{shards}, {compiled}, "
        f"{training.mixed_precision_param}, recompute {recompute}"
    )
    sequences = loop.loader.global_batch_size
    tokens = f"{sequences:,} x {training.seq_len:,} tokens = {sequences * training.seq_len:,} a step"
    yield f"batch {tokens}, {training.steps:,} steps"
    yield f"where {run_dir}: report.html, logs/rank-0.log, checkpoints"
