"""Rules about the length of a run in epochs, and about conversations as sequences."""

from crius.config.facts import Facts, Rule, Violations, without_effect
from crius.errors import ConfigError


def length_is_said_once(facts: Facts) -> Violations:
    """A run ends after its steps or after whole epochs."""
    epochs, steps = facts.config.training.epochs, facts.config.training.steps
    if epochs != -1 and epochs < 1:
        return  # out of its range
    if epochs > 0 and facts.origin("training.steps") != "default":
        yield ConfigError(
            f"training.epochs {epochs} and training.steps {steps} both say how long the run is.",
            where=f"{facts.flag('training.epochs')}, {facts.flag('training.steps')}",
            fix="leave out one of them",
        )
    if epochs > 0 and facts.config.data.source == "huggingface":
        yield ConfigError(
            f"training.epochs {epochs} does not go with a stream.",
            where=facts.flag("training.epochs"),
            why="nobody knows how many sequences a stream has before it was read",
            fix="--training.steps N, or a local copy of the data with --data.source jsonl",
        )


def packed_samples_keep_apart(facts: Facts) -> Violations:
    """Conversations in one sequence do not see each other."""
    data, mask = facts.config.data, facts.config.model.attention_mask
    if data.format == "chat" and data.packing and mask != "document":
        yield ConfigError(
            f"conversations are packed into sequences, and model.attention_mask {mask} lets each see those before it.",
            where=f"{facts.flag('data.packing')}, {facts.flag('model.attention_mask')}",
            why="the mask belongs to the model, so the data does not change it by itself",
            fix="--model.attention_mask document, or --data.no_packing",
        )


def sample_flags_have_effect(facts: Facts) -> Violations:
    """Packing and the fate of what is too long are for conversations."""
    if facts.config.data.format == "chat":
        return
    names = ("data.packing", "data.too_long")
    reason = f" with data.format {facts.config.data.format}"
    why = "documents follow one another without padding, and a long one goes on in the next sequence"
    rows = [(f"--{name}", reason, "leave it out, or --data.format chat") for name in names]
    yield from without_effect(facts, rows, why)


SAMPLE_RULES: tuple[Rule, ...] = (length_is_said_once, packed_samples_keep_apart, sample_flags_have_effect)
