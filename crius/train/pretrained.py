"""``checkpoint.init_from``: loads the weights that a run starts from, and no other state.

Under LoRA they are the frozen base, which no checkpoint of the run contains: each resume reads the base again.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from crius.checkpoint.load import load_tensors
from crius.checkpoint.plain import NAMES
from crius.config.run import RunConfig
from crius.errors import ConfigError
from crius.interop.context import handed_on
from crius.interop.initial import open_base, open_initial
from crius.interop.kept import Origin
from crius.interop.weights import Weights, record_of
from crius.optim import state as optimizer_state
from crius.parallel.runtime import World
from crius.quantize.frozen import fill, quantized_linears
from crius.shards import all_parameters, named_buffers, named_parameters, named_state, plain
from crius.train.state import TrainState

log = logging.getLogger("crius.train")


def load_initial(config: RunConfig, ranks: World, state: TrainState) -> tuple[dict[str, str], Origin]:
    """Fill the weights from ``checkpoint.init_from``, each rank its shards; all other state starts as usual.

    Returns:
        Origin and hash of the weights, their tokenizer, and what their source said; both empty if the run starts from
        random weights.

    Raises:
        CriusError: see ``open_initial``.
    """
    if not config.checkpoint.init_from:
        return {}, Origin()
    if config.lora.is_on:
        return load_base(config, ranks, state.parts, {})
    path = config.checkpoint.init_from
    weights = open_initial(config)
    names = {parameter: name for name, parameter in named_parameters(state.parts)}
    targets = {name: plain(tensor) for name, tensor in named_state(state.parts)}
    grown = {}
    for name, target in targets.items():
        source = weights.tensors[name]
        if target.shape != source.shape:  # further rows keep the random values
            grown[name] = replace(source, shape=tuple(target.shape))
    load_tensors({**weights.tensors, **grown}, targets)
    optimizer_state.fill_copies(state.optimizer, names)
    initial: dict[str, str] = ranks.gather_json(record_of(weights, path) if ranks.rank == 0 else None)[0]
    log.info("init: weights of %s, %s; step 0, fresh optimizer state", weights.origin, initial["digest"])
    _log_dtypes(weights, targets.items())
    if (rows := config.model.vocab_size - weights.model["vocab_size"]) > 0:
        log.info("init: %d rows of the vocabulary are missing there: drawn from seed %d", rows, config.debug.seed)
    _log_tokenizer(weights, config)
    return initial, handed_on(weights)


def load_base(
    config: RunConfig, ranks: World, parts: Sequence[nn.Module], recorded: Mapping[str, str]
) -> tuple[dict[str, str], Origin]:
    """Fill the frozen weights of a LoRA run, each rank its shards.

    Args:
        config: the run.
        ranks: all ranks.
        parts: the stages of this rank.
        recorded: origin, path and hash of the base in the checkpoint that the run resumes from; empty at its start.

    Returns:
        Origin, path and hash of the loaded base, its tokenizer, and what its source said.

    Raises:
        CriusError: the base cannot be read, see ``open_weights``.
        ConfigError: its hash is not the recorded one.
    """
    path, weights = open_base(config, recorded)
    found: dict[str, str] = ranks.gather_json(record_of(weights, path) if ranks.rank == 0 else None)[0]
    if recorded and found["digest"] != recorded["digest"]:
        raise ConfigError(
            f"{weights.origin} is not the base that the adapters were trained on.",
            where="--checkpoint.init_from",
            why=f"its hash is {found['digest']}, the hash of the base was {recorded['digest']}",
            fix=f"--checkpoint.init_from with the path of the base, which was {recorded['path']}",
        )
    rounded = 0
    for part in parts:
        targets = {name: plain(weight) for name, weight in all_parameters([part]) if not weight.requires_grad}
        targets |= {name: plain(buffer) for name, buffer in named_buffers([part], persistent=True)}
        targets = {name: target for name, target in targets.items() if name in weights.tensors}
        load_tensors(weights.tensors, targets)
        _log_dtypes(weights, targets.items())
        for name, linear in quantized_linears(part):
            source = weights.tensors[f"{name}.weight"]
            whole = torch.empty(source.shape)
            load_tensors({name: source}, {name: whole})
            fill(name, linear, whole)
            rounded += 1
    log.info("init: frozen base of %s, %s", weights.origin, found["digest"])
    if rounded:
        log.info("init: %d linears of this rank rounded to %s", rounded, config.lora.base)
    if not recorded:
        _log_tokenizer(weights, config)
    return found, handed_on(weights)


def _log_dtypes(weights: Weights, targets: Iterable[tuple[str, Tensor]]) -> None:
    dtypes = Counter(f"{weights.tensors[name].dtype} -> {NAMES[target.dtype]}" for name, target in targets)
    for change, count in dtypes.items():
        if len({*change.split(" -> ")}) > 1:
            log.info("init: %d tensors change dtype: %s", count, change)


def _log_tokenizer(weights: Weights, config: RunConfig) -> None:
    if not weights.tokenizer:
        log.warning("init: the weights come without a tokenizer: %s is used", config.tokenizer.path)
    elif weights.tokenizer != config.tokenizer.path:
        log.warning("init: tokenizer %s, but the weights came with %s", config.tokenizer.path, weights.tokenizer)
