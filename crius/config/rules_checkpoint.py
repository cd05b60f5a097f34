"""Rules about checkpoints: what is given belongs to a run that saves."""

import dataclasses

from crius.config.checkpoint import CheckpointConfig
from crius.config.facts import Facts, Rule, Violations
from crius.errors import ConfigError


def checkpoint_flags_have_effect(facts: Facts) -> Violations:
    """Settings of checkpoints that were given on the command line are those of a run that has checkpoints."""
    if facts.config.checkpoint.is_enabled:
        return
    fields = [field.name for field in dataclasses.fields(CheckpointConfig) if field.name != "enable"]
    given = [f"checkpoint.{name}" for name in fields if facts.origin(f"checkpoint.{name}") == "command line"]
    for name in given:
        yield ConfigError(
            f"{name} has no effect: this run neither saves checkpoints nor resumes.",
            where=facts.flag(name),
            why=f"checkpoint.enable is off ({facts.origin('checkpoint.enable')})",
            fix=f"--checkpoint.enable, or leave out --{name}",
        )


def checkpoints_have_a_folder(facts: Facts) -> Violations:
    """An empty name would put the checkpoints among the files of the run folder."""
    folder = facts.config.checkpoint.folder
    if not folder.strip():
        yield ConfigError(
            f"checkpoint.folder {folder!r} names no folder.",
            where=facts.flag("checkpoint.folder"),
            why="checkpoints have a folder of their own inside the run folder, or elsewhere",
            fix=f"--checkpoint.folder {CheckpointConfig.folder}, which is the default",
        )


def checkpoints_outlive_the_process(facts: Facts) -> Violations:
    """Checkpoints do not lie in the memory of a process, where fsspec would put them."""
    for name in ("folder", "load_path"):
        value = getattr(facts.config.checkpoint, name)
        if value.startswith("memory://"):
            yield ConfigError(
                f"checkpoint.{name} {value} would be gone with the process.",
                where=facts.flag(f"checkpoint.{name}"),
                fix=f"name a folder, or a URL of a store that stays, e.g. --checkpoint.{name} checkpoints",
            )


CHECKPOINT_RULES: tuple[Rule, ...] = (
    checkpoint_flags_have_effect,
    checkpoints_have_a_folder,
    checkpoints_outlive_the_process,
)
