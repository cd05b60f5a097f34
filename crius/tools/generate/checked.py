"""Opens the model that is to answer, and refuses what it cannot do. No torch."""

import os

from crius.errors import ConfigError, EnvironmentError
from crius.interop.weights import Weights, open_weights
from crius.launch.environment import lacks_gpu
from crius.tools.generate.settings import Settings


def open_answering(path: str, settings: Settings) -> Weights:
    """The weights of a run folder, a checkpoint or a Hugging Face folder.

    Args:
        path: path of the source.
        settings: settings whose ranges were checked.

    Raises:
        CriusError: there is no such source, or its model cannot answer with these settings.
    """
    if settings.device == "cuda" and lacks_gpu(os.environ):
        raise EnvironmentError(
            "there is no GPU that torch can use.",
            where="--device",
            fix="--device cpu, or leave it out; crius doctor shows what is missing",
        )
    weights = open_weights(path)
    facts = weights.facts
    ids = weights.text_tokenizer.vocab_size
    problems = []
    what = ""
    if not weights.tokenizer:
        what = f"{weights.origin} has no tokenizer."
    elif facts.vocab_size < ids:
        what = f"the tokenizer of {weights.origin} has {ids:,} ids, the model {facts.vocab_size:,}."
    if what:
        fix = "put the tokenizer.json of this model into the folder"
        problems.append(ConfigError(what, where="command line", fix=fix))
    if settings.chat and not weights.chat_template:
        problems.append(
            ConfigError(
                f"{weights.origin} has no chat template.",
                where="command line",
                why="its tokenizer has none, like that of any model that was not trained on chats",
                fix="crius generate --prompt TEXT without --chat, or a chat_template.jinja next to its tokenizer.json",
            )
        )
    ranks = settings.ranks
    config = facts.config
    for name in ("num_heads", "ffn_dim") if facts.dense[0] else ("num_heads",):  # experts are not split
        if getattr(config, name) % ranks:
            problems.append(_indivisible(f"{name} {getattr(config, name)}", ranks))
    if config.num_kv_heads % ranks and ranks % config.num_kv_heads:
        problems.append(_indivisible(f"num_kv_heads {config.num_kv_heads}", ranks))
    if problems:
        raise ConfigError.together(problems)
    return weights


def _indivisible(what: str, ranks: int) -> ConfigError:
    return ConfigError(
        f"{what} cannot be split over {ranks} ranks.",
        where="--parallelism.tensor_parallel_degree",
        fix="give a divisor of it",
    )
