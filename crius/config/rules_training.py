"""Rules about the optimizer, checkpoints, kernels and steps that spike: what goes with what."""

import dataclasses
import shlex
from dataclasses import fields

from crius.config.facts import Facts, Rule, Violations
from crius.config.operation import CheckpointConfig
from crius.config.param_groups import EXAMPLE, KEYS, GroupSpec, fits, group_of, nearest, parse_group
from crius.config.resolve import obstacle
from crius.config.training import OptimizerConfig
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


def stability_flags_have_effect(facts: Facts) -> Violations:
    """Settings that were given on the command line belong to a policy of this run."""
    stability = facts.config.stability
    no_spikes = stability.spike == "off"
    counts = stability.nonfinite != "stop" or stability.spike in ("skip", "warn")
    rows = (
        ("spike_zscore", no_spikes, "stability.spike off", "--stability.spike warn"),
        ("window", no_spikes, "stability.spike off", "--stability.spike warn"),
        (
            "snapshot_interval",
            stability.nonfinite != "rollback",
            f"stability.nonfinite {stability.nonfinite}, which takes no snapshots",
            "--stability.nonfinite rollback",
        ),
        (
            "max_consecutive",
            not counts,
            f"stability.nonfinite stop and spike {stability.spike}: the run goes on after neither",
            "--stability.nonfinite skip",
        ),
    )
    for field, is_vain, reason, fix in rows:
        name = f"stability.{field}"
        if is_vain and facts.origin(name) == "command line":
            yield ConfigError(f"{name} has no effect with {reason}.", where=facts.flag(name), fix=f"e.g. {fix}")


STABILITY_RULES: tuple[Rule, ...] = (stability_flags_have_effect,)


_LINEAR, _POINTWISE, _ATTENTION = "kernels.linear", "kernels.pointwise", "kernels.attention"
_HALF_ONLY = ("cudnn", "flash")  # on a GPU: bfloat16 and float16


def _is_on_gpu(facts: Facts) -> bool:
    """Of the run, or of the one that a dry run stands for."""
    device = facts.config.training.device
    return device == "cuda" or (device == "auto" and (facts.num_gpus > 0 or facts.is_dry))


def cpu_kernels_run_on_cpus(facts: Facts) -> Violations:
    """oneDNN and the fused pointwise kernels are for CPUs."""
    kernels, on_gpu = facts.config.kernels, _is_on_gpu(facts)
    for name, asked in ((_LINEAR, kernels.linear == "onednn"), (_POINTWISE, kernels.pointwise == "fused")):
        if asked and on_gpu:
            value = "onednn" if name == _LINEAR else "fused"
            yield ConfigError(
                f"{name} {value} is for CPUs, and the run is on GPUs.",
                where=facts.flag(name),
                fix=f"--{name} torch, or --training.device cpu",
            )


def attention_backend_runs(facts: Facts) -> Violations:
    """The backend of attention takes the device, the dtype and the mask."""
    config, asked = facts.config, facts.config.kernels.attention
    on_gpu, has_mask = _is_on_gpu(facts), config.model.attention_mask == "document"
    why, fix = "", f"--{_ATTENTION} auto"
    if not on_gpu:
        if asked == "blocked":
            why, fix = obstacle(config)
        elif asked not in ("auto", "flash", "math"):
            why = "a CPU has flash, math and blocked"
    elif asked == "blocked":
        why, fix = "it is for CPUs", f"{fix}, or --training.device cpu"
    elif asked in _HALF_ONLY and config.training.mixed_precision_param == "float32":
        why, fix = "on a GPU it takes 16-bit numbers only", f"--training.mixed_precision_param bfloat16, or {fix}"
    elif asked in _HALF_ONLY and has_mask:
        # pytorch/pytorch#196678
        why = "it takes no mask" if asked == "flash" else "its gradient of masked attention is NaN at some lengths"
        fix = f"--{_ATTENTION} flex or efficient"
    elif asked == "flex" and not has_mask:
        why, fix = "it is for the document mask", f"{fix}, or --model.attention_mask document"
    elif asked != "auto" and config.parallelism.context_parallel_degree > 1:
        why = "context parallelism makes masks of its own, and takes the backends that have them"
    if why:
        yield ConfigError(f"{_ATTENTION} {asked} does not run here.", where=facts.flag(_ATTENTION), why=why, fix=fix)


KERNEL_RULES: tuple[Rule, ...] = (cpu_kernels_run_on_cpus, attention_backend_runs)


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
