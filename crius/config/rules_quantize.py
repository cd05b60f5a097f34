"""Rules about low precision: layers, dims, and settings without effect."""

import math
import re
import shlex
from collections.abc import Iterable

from crius.config.facts import Facts, Violations
from crius.config.low_precision import (
    LAYER_NUMBER,
    LinearChoice,
    block,
    converts_output,
    indivisible,
    is_enabled,
    kind,
    linear_choices,
    numberless,
    split,
    summary,
)
from crius.config.param_groups import fits, fits_any, nearest
from crius.config.pipeline import microbatch_unit
from crius.config.resolve import batch_sizes
from crius.config.rules_layout import sequence_divides, tensor_parallel_divides
from crius.errors import LayoutError

_GATHER = "quantize.dense.float8.enable_fsdp_float8_all_gather"


def _is_sound(facts: Facts) -> bool:
    """Whether some layers of a valid model and layout are to be converted; if not, another rule reports why."""
    if not is_enabled(facts.config.quantize.dense) or facts.model is None or facts.plan is None:
        return False
    sizes = (facts.model.vocab_size, facts.model.num_layers, facts.model.num_kv_heads)
    degrees = (facts.config.parallelism.tensor_parallel_degree, facts.config.parallelism.context_parallel_degree)
    return min(*sizes, *degrees) >= 1 and not list(tensor_parallel_divides(facts))


def _choices(facts: Facts) -> list[LinearChoice]:
    """Choices of a valid run, for a device without low-precision matmuls: the rules may run on a host without GPUs."""
    return linear_choices(facts.config, facts.model, facts.plan, accelerated=False)


def one_low_precision(facts: Facts) -> Violations:
    """A layer runs in one precision."""
    dense = facts.config.quantize.dense
    if dense.float8.enable and dense.mxfp8.enable:
        yield facts.error(
            "float8 and mxfp8 are both enabled.",
            "quantize.dense.float8.enable",
            "quantize.dense.mxfp8.enable",
            why="a linear layer runs in one precision",
            fix="leave out --quantize.dense.mxfp8.enable, or --quantize.dense.float8.no_enable",
        )


def _given(name: str, patterns: tuple[str, ...]) -> str:
    """Flags that give ``patterns``."""
    single = [part for pattern in patterns for part in pattern.split(",") if part]
    return " ".join(f"--{name} {shlex.quote(pattern)}" for pattern in single)


def patterns_fit_layers(facts: Facts) -> Violations:
    """Every pattern fits a linear layer, and no layer is to be both kept and converted."""
    if facts.model is None:
        return
    dense = facts.config.quantize.dense
    linears = list(facts.model.linears)
    for field, patterns in (("exclude", dense.exclude), ("include", dense.include)):
        name = f"quantize.dense.{field}"
        for pattern in patterns:
            if any(fits(pattern, linear) for linear in linears):
                continue
            if any(fits(numberless(pattern), linear) for linear in linears):
                near = re.sub(LAYER_NUMBER, str(facts.model.num_layers - 1), pattern)
                hint = f", whose layers are 0 to {facts.model.num_layers - 1}."
            else:
                near = nearest(pattern, linears)
                hint = f", did you mean {near}?" if near else "."
            names = ", ".join(dict.fromkeys(map(numberless, linears)))
            if "," in pattern:  # such a pattern fits no layer
                near = pattern
                hint = ": repeat the flag for each pattern."
            mended = tuple(near if other == pattern else other for other in patterns)
            yield facts.error(
                f"--{name} {pattern} matches no linear layer of {facts.model_name}{hint}",
                name,
                fix=_given(name, mended) if near else f"the linear layers are {names}",
            )
    both = [linear for linear in linears if fits_any(dense.exclude, linear) and fits_any(dense.include, linear)]
    if both:
        excluded = fits_any(dense.exclude, both[0])
        included = fits_any(dense.include, both[0])
        yield facts.error(
            f"--quantize.dense.exclude {excluded} and --quantize.dense.include {included} both fit {both[0]}.",
            "quantize.dense.exclude",
            "quantize.dense.include",
            why="a layer is either kept or converted",
            fix=_include_without(facts, both),
        )


def _include_without(facts: Facts, linears: Iterable[str]) -> str:
    """Flags that include none of ``linears``."""
    name = "quantize.dense.include"
    names = list(linears)
    patterns = facts.config.quantize.dense.include
    left = tuple(pattern for pattern in patterns if not any(fits(pattern, linear) for linear in names))
    return _given(name, left) if left else f"leave out --{name}"


def included_layers_divide(facts: Facts) -> Violations:
    """Layers that are asked to be converted have dims that low-precision matmuls accept."""
    dense = facts.config.quantize.dense
    if not _is_sound(facts) or dense.pad_inner_dim:
        return
    degree = facts.config.parallelism.tensor_parallel_degree
    vocabulary = -(-facts.model.vocab_size // (block(dense) * degree)) * block(dense) * degree
    wrong: dict[str, str] = {}
    vocabulary_helps = True
    for linear, shape in facts.model.linears.items():
        if not fits_any(dense.include, linear) or fits_any(dense.exclude, linear):
            continue
        parts = split(linear, facts.plan, facts.model.num_kv_heads, degree)
        if problem := indivisible(shape, parts, block(dense)):
            wrong[linear] = problem
            mended = (vocabulary if shape[0] == facts.model.vocab_size else shape[0], shape[1])
            vocabulary_helps &= not indivisible(mended, parts, block(dense))
    if wrong:
        problems = {numberless(linear): problem for linear, problem in wrong.items()}
        fixes = [f"--model.vocab_size {vocabulary}"] * vocabulary_helps
        fixes += ["--quantize.dense.pad_inner_dim", _include_without(facts, wrong)]
        yield facts.layout_error(
            "; ".join(f"{linear}: {problem}" for linear, problem in problems.items()) + ".",
            "quantize.dense.include",
            why=f"{kind(dense)} matmuls need both dims divisible by {block(dense)}, after tensor-parallel sharding: on "
            "a GPU the kernel refuses other dims",
            fix=", or ".join(fixes),
        )


def tokens_divide(facts: Facts) -> Violations:
    """The tokens of a microbatch make whole blocks, because the gradient of a weight contracts over them."""
    config = facts.config
    dense = config.quantize.dense
    needs_none = kind(dense) == "float8" and dense.float8.recipe == "rowwise_with_gw_hp"  # its weight gradient is not
    if not _is_sound(facts) or dense.pad_inner_dim or needs_none or facts.data_parallel_ranks < 1:
        return
    if config.training.seq_len < 1 or list(sequence_divides(facts)):
        return
    try:
        batch = batch_sizes(config.training, facts.data_parallel_ranks, microbatch_unit(config.parallelism))
    except (ValueError, ZeroDivisionError, LayoutError):
        return  # ranges, batch_divides and schedule_file_runs report it
    # tensor-parallel ranks gather the sequence before each matmul, context-parallel ranks do not
    cp = config.parallelism.context_parallel_degree
    unit = block(dense)
    length = config.training.seq_len
    tokens = batch.local * length // cp
    if tokens % unit == 0:
        return
    step = math.lcm(cp * unit // math.gcd(unit, batch.local), 2 * cp * config.parallelism.tensor_parallel_degree)
    share = f"{batch.local} sequences x {length} tokens" + f" / {cp} context-parallel ranks" * (cp > 1)
    yield facts.layout_error(
        f"a rank's microbatch has {share} = {tokens} tokens, {tokens} mod {unit} = {tokens % unit}.",
        "training.seq_len",
        "training.local_batch_size",
        why=f"the gradient of a {kind(dense)} layer's weight is a matmul over the tokens, in multiples of {unit}",
        fix=f"--training.seq_len {max(1, length // step) * step}, or --quantize.dense.pad_inner_dim",
    )


def quantize_flags_have_effect(facts: Facts) -> Violations:
    """A setting of one precision is not given on the command line without that precision."""
    dense = facts.config.quantize.dense
    float8 = "--quantize.dense.float8.enable"
    fields = ("recipe", "enable_fsdp_float8_all_gather", "precompute_scale", "emulate")
    rows = (
        (dense.float8.enable, float8, [f"float8.{field}" for field in fields]),
        (dense.mxfp8.enable, "--quantize.dense.mxfp8.enable", ["mxfp8.emulate"]),
        (is_enabled(dense), float8, ["exclude", "include", "auto_filter", "pad_inner_dim"]),
    )
    for is_on, owner, names in rows:
        if not is_on:
            vain = facts.changed(f"--quantize.dense.{name}" for name in names)
            yield from facts.no_effect(vain, f" without {owner}", f"{owner}, or leave out --NAME")


def float8_gather_suits(facts: Facts) -> Violations:
    """Weights that are gathered in float8 have one scale per tensor and are not padded."""
    float8 = facts.config.quantize.dense.float8
    if not float8.enable:
        return
    if float8.precompute_scale and not float8.enable_fsdp_float8_all_gather:
        name = "quantize.dense.float8.precompute_scale"
        yield facts.error(
            f"--{name} has no effect without --{_GATHER}.",
            name,
            why="the scales are for gathered weights",
            fix=f"--{_GATHER}, or leave out --{name}",
        )
    if not float8.enable_fsdp_float8_all_gather:
        return
    if float8.precompute_scale and facts.config.training.enable_cpu_offload:
        yield facts.error(
            "--quantize.dense.float8.precompute_scale has no effect with --training.enable_cpu_offload.",
            "quantize.dense.float8.precompute_scale",
            "training.enable_cpu_offload",
            why="torchao loses a scale when FSDP copies its weight to the device",
            fix="leave out --quantize.dense.float8.precompute_scale",
        )
    if float8.recipe != "tensorwise":
        yield facts.error(
            f"--{_GATHER} does not go with recipe {float8.recipe}.",
            _GATHER,
            "quantize.dense.float8.recipe",
            why="the forward scales weights by row and the backward by column, but a shard has no whole column",
            fix=f"--quantize.dense.float8.recipe tensorwise, or leave out --{_GATHER}",
        )
    padded = [c for c in _choices(facts) if c.is_converted and c.padded != c.local] if _is_sound(facts) else []
    if padded:
        local, rounded = (" x ".join(map(str, shape)) for shape in (padded[0].local, padded[0].padded))
        yield facts.error(
            f"--{_GATHER} does not go with --quantize.dense.pad_inner_dim, which pads {numberless(padded[0].name)} "
            f"from {local} to {rounded}.",
            _GATHER,
            "quantize.dense.pad_inner_dim",
            why="weights are padded before they are rounded to float8, but gathered weights are already rounded",
            fix=f"leave out --{_GATHER}",
        )


def something_is_converted(facts: Facts) -> Violations:
    """A run in low precision converts at least one layer."""
    dense = facts.config.quantize.dense
    if not _is_sound(facts) or list(included_layers_divide(facts)):
        return
    choices = _choices(facts)
    if any(choice.is_converted for choice in choices):
        return
    name = f"quantize.dense.{kind(dense)}.enable"
    remedies = [
        ("--quantize.dense.pad_inner_dim", any(" mod " in choice.reason for choice in choices)),
        ("--quantize.dense.auto_filter off", dense.auto_filter == "on"),
        ("leave out --quantize.dense.exclude", bool(dense.exclude)),
    ]
    yield facts.error(
        f"--{name} would convert nothing: {summary(choices)}.",
        name,
        fix=", or ".join([*(fix for fix, helps in remedies if helps), f"leave out --{name}"]),
    )


def chunked_loss_has_its_layer(facts: Facts) -> Violations:
    """The chunked loss multiplies with the weight of the output layer itself, so that layer stays in high precision."""
    if facts.config.kernels.linear_cross_entropy != "chunked" or not _is_sound(facts):
        return
    if list(included_layers_divide(facts)) or not converts_output(_choices(facts), facts.plan):
        return
    yield facts.error(
        "kernels.linear_cross_entropy chunked does not go with an output layer in low precision.",
        "kernels.linear_cross_entropy",
        f"quantize.dense.{kind(facts.config.quantize.dense)}.enable",
        why="it multiplies with the weight of that layer itself, in high precision",
        fix="--kernels.linear_cross_entropy off",
    )


QUANTIZE_RULES = (
    one_low_precision,
    patterns_fit_layers,
    included_layers_divide,
    tokens_divide,
    quantize_flags_have_effect,
    float8_gather_suits,
    something_is_converted,
    chunked_loss_has_its_layer,
)
