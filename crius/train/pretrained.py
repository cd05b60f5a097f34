"""``checkpoint.init_from``: the weights that a run starts from, and nothing else of where they come from."""

import logging
from collections import Counter
from dataclasses import replace

from crius.checkpoint.load import load_tensors
from crius.checkpoint.manifest import MAX_TEXT
from crius.checkpoint.plain import NAMES
from crius.config.run import RunConfig
from crius.interop.weights import Weights
from crius.optim import state as optimizer_state
from crius.parallel.runtime import World
from crius.shards import named_parameters, named_state, plain
from crius.train.inputs import open_initial
from crius.train.state import TrainState

log = logging.getLogger("crius.train")


def load_initial(config: RunConfig, ranks: World, state: TrainState) -> dict[str, str]:
    """Fill the weights with those of ``checkpoint.init_from``, each rank its shards; all else stays as it starts.

    Returns:
        Origin and hash; nothing where the run starts from drawn weights.

    Raises:
        CriusError: see ``open_initial``.
    """
    if not config.checkpoint.init_from:
        return {}
    weights = open_initial(config)
    names = {parameter: name for name, parameter in named_parameters(state.parts)}
    targets = {name: plain(tensor) for name, tensor in named_state(state.parts)}
    grown = {}
    for name, target in targets.items():
        source = weights.tensors[name]
        if target.shape != source.shape:  # more rows than there: those keep what was drawn
            grown[name] = replace(source, shape=tuple(target.shape))
    load_tensors({**weights.tensors, **grown}, targets)
    optimizer_state.fill_copies(state.optimizer, names)
    initial: dict[str, str] = ranks.gather_json(_record(weights) if ranks.rank == 0 else None)[0]
    log.info("init: weights of %s, %s; step 0, fresh optimizer state", weights.origin, initial["digest"])
    dtypes = Counter(f"{weights.tensors[name].dtype} -> {NAMES[target.dtype]}" for name, target in targets.items())
    for change, count in dtypes.items():
        if len({*change.split(" -> ")}) > 1:
            log.info("init: %d tensors change dtype: %s", count, change)
    if (rows := config.model.vocab_size - weights.model["vocab_size"]) > 0:
        log.info("init: %d rows more for the vocabulary than there: drawn from seed %d", rows, config.debug.seed)
    if not weights.tokenizer:
        log.warning("init: the weights come without a tokenizer: %s is taken", config.tokenizer.path)
    elif weights.tokenizer != config.tokenizer.path:
        log.warning("init: tokenizer %s, the weights came with %s", config.tokenizer.path, weights.tokenizer)
    return initial


def _record(weights: Weights) -> dict[str, str]:
    return {"origin": ascii(weights.origin)[1:-1][:MAX_TEXT], "kind": weights.kind, "digest": weights.digest}
