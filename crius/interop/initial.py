"""Opens the weights that a run starts from, or the frozen base of its adapters, and checks them against its model."""

from collections.abc import Mapping
from typing import Any

from crius.config.run import RunConfig
from crius.errors import ConfigError
from crius.interop.weights import Weights, is_other_size, open_weights, settled

INIT_FROM = "--checkpoint.init_from"


def open_initial(config: RunConfig) -> Weights:
    """The weights of ``checkpoint.init_from``, which must fit the model; the model may have a larger vocabulary.

    Raises:
        CriusError: see ``open_weights``.
        ConfigError: the model has other sizes; names all of them.
    """
    return _fitting(open_weights(config.checkpoint.init_from, INIT_FROM), config)


def open_base(config: RunConfig, recorded: Mapping[str, str]) -> tuple[str, Weights]:
    """Path and weights of the frozen base of a LoRA run: ``checkpoint.init_from``, else its place at the start.

    Args:
        config: config of the run.
        recorded: ``path``, ``origin`` and ``digest`` of the base in a checkpoint of the run; empty at its start.

    Raises:
        CriusError: see ``open_weights``.
        ConfigError: the base is missing, or has other sizes.
    """
    path = config.checkpoint.init_from or recorded.get("path", "")
    if not path:
        raise ConfigError(
            "the base weights of the adapters are not known.",
            where="--lora.rank",
            why="the checkpoint that the run resumes from has no adapters",
            fix=f"{INIT_FROM} with a run, a checkpoint or a Hugging Face folder, in a new run folder",
        )
    try:
        return path, _fitting(open_weights(path, INIT_FROM, adapter="leave_out"), config)
    except (ConfigError, OSError) as error:
        if not recorded:
            raise
        what = error.what if isinstance(error, ConfigError) else f"{path} cannot be read: {error}."
        raise ConfigError(
            f"the frozen base that the adapters were trained on is not at {path}: {what}",
            where=INIT_FROM,
            why=f"a LoRA checkpoint has only the adapters; the base was {recorded['origin']}, {recorded['digest']}",
            fix=f"{INIT_FROM} with its new path",
        ) from None


def model_of(config: RunConfig) -> dict[str, Any]:
    """Settings of ``[model]`` of a run, with every size: see ``settled``."""
    return settled({"name": config.model.name, "flavor": config.model.flavor, **config.model.sizes})


def _fitting(weights: Weights, config: RunConfig) -> Weights:
    """Return ``weights`` if their sizes match the model.

    Raises:
        ConfigError: they do not match; names all differences.
    """
    ours = model_of(config)
    grows = not config.lora.is_on  # LoRA would not train the new rows
    differing = [
        field
        for field, value in weights.model.items()
        if field != "flavor"
        and is_other_size(field, ours, weights.model)
        and not (field == "vocab_size" and ours[field] > value and grows)
    ]
    if differing:
        raise ConfigError(
            f"the model differs from {weights.origin}:"
            + "".join(f"\n  model.{field} {ours[field]}, there {weights.model[field]}" for field in differing),
            where=INIT_FROM,
            why="weights only fit the sizes that they were trained with",
            fix=f"leave out {', '.join(f'model.{field}' for field in differing)} and model.flavor",
        )
    return weights
