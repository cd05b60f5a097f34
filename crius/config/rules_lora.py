"""Rules about LoRA: its layers, and the settings that exclude it."""

import importlib.util
import math

from crius.config.facts import Facts, Violations
from crius.config.lora import LoraConfig, block_linears, indivisible, is_quantized, target_names, unmatched
from crius.config.low_precision import is_enabled, kind, numberless
from crius.config.param_groups import fits, nearest
from crius.config.pipeline import num_stages, split_stages
from crius.config.rules_pipeline import modules_split
from crius.plugins import REQUIREMENTS, install_line, installed_torch

_WHOLE_NUMBERS_TORCH = (2, 12)


def lora_flags_have_effect(facts: Facts) -> Violations:
    """Settings of LoRA are given on the command line only if LoRA is on."""
    if not facts.config.lora.is_on:
        names = [f"--lora.{name}" for name in vars(LoraConfig()) if name != "rank"]
        yield from facts.no_effect(names, " without --lora.rank", "--lora.rank 16")


def adapters_have_a_size(facts: Facts) -> Violations:
    """A rank is 0 or more and below the layers' dims, and alpha is a number above 0."""
    lora = facts.config.lora
    if lora.rank < 0:
        yield facts.error(f"lora.rank {lora.rank} is below 0.", "lora.rank", fix="--lora.rank 16")
    if not 0 < lora.alpha < math.inf:
        yield facts.error(f"lora.alpha {lora.alpha} must be a number above 0.", "lora.alpha", fix="--lora.alpha 16")
    if facts.model is None or not lora.is_on:
        return
    linears = block_linears(facts.model)
    least = min((min(linears[name]) for name in target_names(lora, facts.model)), default=0)
    if least and lora.rank > least:
        yield facts.error(
            f"lora.rank {lora.rank} is more than {least}, the smaller dim of a linear layer of {facts.model_name}.",
            "lora.rank",
            why="an adapter of the rank of its layer is as large as the layer",
            fix=f"--lora.rank {max(1, least // 4)}, or leave it out to train all weights",
        )


def targets_fit_layers(facts: Facts) -> Violations:
    """Every pattern fits a linear layer of the blocks."""
    if facts.model is None:
        return
    linears = block_linears(facts.model)
    names = ", ".join(dict.fromkeys(map(numberless, linears)))
    others = [weight.name.removesuffix(".weight") for weight in facts.model.weights] + ["output"]
    for pattern in unmatched(facts.config.lora, facts.model):
        near = nearest(pattern, list(linears))
        why = "only linear layers of the blocks get adapters"
        if any(fits(pattern, name) for name in others):
            why += ", not the embedding, the output layer, norms or experts"
        yield facts.error(
            f"--lora.targets {pattern} matches no linear layer of the blocks of {facts.model_name}"
            + (f", did you mean {near}?" if near else "."),
            "lora.targets",
            why=why,
            fix=f"--lora.targets {near}; they are {names}" if near else f"they are {names}",
        )


def lora_goes_with(facts: Facts) -> Violations:
    """Settings that would change the frozen weights, or that were never tested with adapters, are refused."""
    config = facts.config
    lora = config.lora
    if not lora.is_on:
        return
    dense = config.quantize.dense
    low_precision = f"quantize.dense.{kind(dense)}.enable"
    rows = (
        (
            is_enabled(dense),
            low_precision,
            "adapters are added to layers in high precision",
            f"leave out --{low_precision}",
        ),
        (
            config.optimizer.name == "muon",
            "optimizer.name",
            "Muon makes the momentum of a whole weight orthogonal, and an adapter is only a factor of a weight",
            "--optimizer.name adamw",
        ),
        (
            config.training.reproducible,
            "training.reproducible",
            "its trees sum the gradients of whole units, and most units have none",
            "--training.no_reproducible",
        ),
        (
            config.sdc.recompute_interval > 0,
            "sdc.recompute_interval",
            "it compares the gradients of whole units, and most units have none",
            "--sdc.recompute_interval 0",
        ),
    )
    for is_asked, name, why, fix in rows:
        if is_asked:
            what = f"--{facts.shown(name)} does not go with --lora.rank {lora.rank}."
            yield facts.error(what, "lora.rank", name, why=why, fix=fix)


def the_model_has_no_state(facts: Facts) -> Violations:
    """The model has no state that training changes. A checkpoint of LoRA contains the adapters only, so such state
    would be neither in it nor in the base.
    """
    state = [buffer.name for buffer in facts.model.buffers if buffer.persistent] if facts.model else []
    if state and facts.config.lora.is_on:
        yield facts.error(
            f"--lora.rank {facts.config.lora.rank} does not go with {facts.model_name}: its layers have state that "
            f"training changes, such as {state[0]}.",
            "lora.rank",
            why="with a frozen base it would be neither in the base nor in the adapters",
            fix="--lora.rank 0 trains all weights",
        )


def quantized_base_fits(facts: Facts) -> Violations:
    """A base in fewer bits is not split by tensor parallelism, and torchao can round at least one layer."""
    config = facts.config
    lora = config.lora
    if not lora.is_on or lora.base == "keep":
        return
    degree = config.parallelism.tensor_parallel_degree
    if degree > 1:
        name = "parallelism.tensor_parallel_degree"
        yield facts.layout_error(
            f"--lora.base {lora.base} does not go with tensor_parallel_degree {degree}.",
            "lora.base",
            name,
            why="tensor parallelism would split a weight through the blocks that share a scale",
            fix=f"--{name} 1, or --lora.base keep",
        )
    shapes = block_linears(facts.model) if facts.model else {}
    if shapes and not any(is_quantized(lora, shape) for shape in shapes.values()):
        why = "; ".join(dict.fromkeys(f"{numberless(name)}: {indivisible(shape)}" for name, shape in shapes.items()))
        yield facts.error(
            f"--lora.base {lora.base} would round no layer of {facts.model_name}.",
            "lora.base",
            why=why,
            fix="--lora.base int8, or --lora.base keep",
        )
    if importlib.util.find_spec("torchao") is None:
        yield facts.error(
            f"--lora.base {lora.base} needs the package torchao, which is not installed.",
            "lora.base",
            fix=install_line(REQUIREMENTS["torchao"]),
        )


def split_base_needs_torch(facts: Facts) -> Violations:
    """FSDP can split integer weights from torch 2.12 on."""
    lora = facts.config.lora
    version = installed_torch()
    if lora.is_on and lora.base != "keep" and facts.num_ranks > 1 and version and version[0] < _WHOLE_NUMBERS_TORCH:
        yield facts.layout_error(
            f"--lora.base {lora.base} on {facts.num_ranks} ranks needs torch 2.12 or newer; torch {version[1]} is "
            "installed.",
            "lora.base",
            why="FSDP of older versions takes floating-point weights only",
            fix=f"--lora.base keep, one rank, or {install_line('--upgrade', 'torch>=2.12')}",
        )


def every_stage_has_adapters(facts: Facts) -> Violations:
    """Each stage of a pipeline has an adapter, because gradients flow back through all of them."""
    parallelism = facts.config.parallelism
    model = facts.model
    lora = facts.config.lora
    if model is None or not lora.is_on or parallelism.pipeline_parallel_degree < 2 or list(modules_split(facts)):
        return
    names = target_names(lora, model)
    stages = split_stages(model.modules(1), num_stages(parallelism), parallelism)
    empty = [
        number
        for number, modules in enumerate(stages)
        if not any(name.startswith(f"{module}.") for name in names for module in modules)
    ]
    if names and empty:
        yield facts.layout_error(
            f"stage {empty[0]} of {len(stages)} of the pipeline has no adapter.",
            "lora.targets",
            "parallelism.pipeline_parallel_degree",
            why="a stage needs something to train to send gradients back to the stage before",
            fix="--lora.targets with patterns that fit layers of each stage, or leave it out",
        )


LORA_RULES = (
    lora_flags_have_effect,
    adapters_have_a_size,
    targets_fit_layers,
    lora_goes_with,
    the_model_has_no_state,
    quantized_base_fits,
    split_base_needs_torch,
    every_stage_has_adapters,
)
