"""Rules about the optimizer: its groups, and what goes with what."""

import shlex
from dataclasses import fields

from crius.config.facts import Facts, Rule, Violations
from crius.config.optimizer import OptimizerConfig
from crius.config.param_groups import EXAMPLE, KEYS, GroupSpec, group_of, parse_group
from crius.config.patterns import fits, nearest
from crius.errors import ConfigError

_GROUPS = "optimizer.param_groups"


def _parsed(facts: Facts) -> list[GroupSpec]:
    """The entries that are of their form."""
    found = []
    for text in facts.config.optimizer.param_groups:
        try:
            found.append(parse_group(text))
        except ValueError:
            continue
    return found


def _flag(text: str) -> str:
    return f"--{_GROUPS} {shlex.quote(text)}"


def param_groups_are_well_formed(facts: Facts) -> Violations:
    """Every entry is PATTERN: key=value ..., with keys and values that there are."""
    for text in facts.config.optimizer.param_groups:
        try:
            parse_group(text)
        except ValueError as error:
            yield ConfigError(
                f"{_GROUPS} {text!r} {error}.",
                where=facts.flag(_GROUPS),
                why=f"an entry is a pattern, a colon, and some of {', '.join(KEYS)} (adamw or muon), each with a value",
                fix=f"e.g. {_flag(EXAMPLE)}",
            )


def param_groups_fit_parameters(facts: Facts) -> Violations:
    """Every pattern fits a parameter, and Muon gets matrices only."""
    if facts.model is None:
        return
    shapes, specs = facts.model.parameter_shapes, _parsed(facts)
    for spec in specs:
        if not any(fits(spec.pattern, name) for name in shapes):
            meant = nearest(spec.pattern, list(shapes))
            guess = f", did you mean {meant}?" if meant else "."
            yield ConfigError(
                f"{_GROUPS}: {spec.pattern} fits no parameter of {facts.model_name}{guess}",
                where=facts.flag(_GROUPS),
                why=f"its parameters are {_examples(list(shapes))}",
                fix=f"{_flag(_text(spec, meant))}" if meant else f"leave out {_flag(_text(spec, spec.pattern))}",
            )
        wrong = [
            name
            for name, shape in shapes.items()
            if spec.optimizer == "muon" and len(shape) != 2 and group_of(specs, name) is spec
        ]
        if wrong:
            settings = [f"{_flag(_text(other, other.pattern))}" for other in specs]
            kept = [_flag(f"{name}: optimizer=adamw") for name in dict.fromkeys(map(_in_all_layers, wrong))]
            yield ConfigError(
                f"{_GROUPS}: {spec.pattern} gives {_examples(wrong)} to Muon, which takes matrices only.",
                where=facts.flag(_GROUPS),
                why="it makes the momentum of a matrix orthogonal",
                fix=" ".join([*kept, *settings]),
            )


def _text(spec: GroupSpec, pattern: str) -> str:
    """A spec as it is typed, with another pattern."""
    parts = [f"lr_factor={spec.lr_factor:g}"] if spec.lr_factor != 1 else []
    parts += [f"weight_decay={spec.weight_decay:g}"] if spec.weight_decay is not None else []
    parts += [f"optimizer={spec.optimizer}"] if spec.optimizer else []
    return f"{pattern}: {' '.join(parts) or 'lr_factor=1'}"


def _in_all_layers(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _examples(names: list[str]) -> str:
    found = list(dict.fromkeys(map(_in_all_layers, names)))
    return ", ".join(found if len(found) <= 4 else [*found[:3], "...", found[-1]])


def optimizer_flags_have_effect(facts: Facts) -> Violations:
    """What was given on the command line for Muon or for bfloat16 is not given to a run without."""
    optimizer, dtype = facts.config.optimizer, facts.config.training.dtype
    has_muon = optimizer.name == "muon" or any(spec.optimizer == "muon" for spec in _parsed(facts))
    given = [
        field.name for field in fields(OptimizerConfig) if facts.origin(f"optimizer.{field.name}") == "command line"
    ]
    for name in given:
        if name.startswith("muon_") and not has_muon:
            yield ConfigError(
                f"optimizer.{name} has no effect with optimizer.name {optimizer.name}.",
                where=facts.flag(f"optimizer.{name}"),
                fix=f"leave out --optimizer.{name}, or --optimizer.name muon",
            )
    if "stochastic_rounding" in given and "bfloat16" not in (dtype, optimizer.state_dtype):
        yield ConfigError(
            f"optimizer.stochastic_rounding has no effect with training.dtype {dtype} and optimizer.state_dtype "
            f"{optimizer.state_dtype}.",
            where=facts.flag("optimizer.stochastic_rounding"),
            why="it is about values that are stored in bfloat16",
            fix="leave out --optimizer.stochastic_rounding, or --optimizer.state_dtype bfloat16",
        )


OPTIMIZER_RULES: tuple[Rule, ...] = (
    param_groups_are_well_formed,
    param_groups_fit_parameters,
    optimizer_flags_have_effect,
)
