"""The weights that a run starts from, or that its adapters are trained beside: opened, and held against its model."""

from collections.abc import Mapping

from crius.config.run import RunConfig
from crius.errors import ConfigError
from crius.interop.weights import Weights, open_weights, settled

INIT_FROM = "--checkpoint.init_from"


def open_initial(config: RunConfig) -> Weights:
    """The weights of ``checkpoint.init_from``, which fit the model; it may have more rows for its vocabulary.

    Raises:
        CriusError: see ``open_weights``.
        ConfigError: the model has other sizes; names all of them.
    """
    return _fitting(open_weights(config.checkpoint.init_from, INIT_FROM), config)


def open_base(config: RunConfig, recorded: Mapping[str, str]) -> tuple[str, Weights]:
    """Path and weights of the frozen base of a LoRA run: of ``checkpoint.init_from``, or where it was at the start.

    Args:
        config: of the run.
        recorded: ``path``, ``origin`` and ``digest`` of the base in a checkpoint of the run; empty at its start.

    Raises:
        CriusError: see ``open_weights``.
        ConfigError: it is not there, or of other sizes.
    """
    path = config.checkpoint.init_from or recorded.get("path", "")
    if not path:
        raise ConfigError(
            "nothing says which weights the adapters are for.",
            where="--lora.rank",
            why="the checkpoint that the run goes on from is of a run without adapters",
            fix=f"{INIT_FROM} with a run, a checkpoint or a folder of Hugging Face, in a run folder of its own",
        )
    try:
        return path, _fitting(open_weights(path, INIT_FROM), config)
    except (ConfigError, OSError) as error:
        if not recorded:
            raise
        what = error.what if isinstance(error, ConfigError) else f"{path} cannot be read: {error}."
        raise ConfigError(
            f"the frozen base that the adapters were trained on is not at {path}: {what}",
            where=INIT_FROM,
            why=f"a checkpoint of LoRA has the adapters alone; the base was {recorded['origin']}, {recorded['digest']}",
            fix=f"{INIT_FROM} with the place where it is now",
        ) from None


def _fitting(weights: Weights, config: RunConfig) -> Weights:
    """``weights``, whose sizes are those of the model.

    Raises:
        ConfigError: they are not; names all of them.
    """
    ours = settled({"name": config.model.name, "flavor": config.model.flavor, **config.model.sizes})
    grows = not config.lora.is_on  # nothing would train the new rows
    differing = [
        field
        for field, value in weights.model.items()
        if ours[field] != value and field != "flavor" and not (field == "vocab_size" and ours[field] > value and grows)
    ]
    if differing:
        raise ConfigError(
            f"the model is not that of {weights.origin}:"
            + "".join(f"\n  model.{field} {ours[field]}, there {weights.model[field]}" for field in differing),
            where=INIT_FROM,
            why="weights fit the sizes that they were trained with",
            fix=f"leave out {', '.join(f'model.{field}' for field in differing)} and model.flavor",
        )
    return weights
