"""``crius bench quantize``: forward and backward of each linear shape of a model, in bfloat16 and in each format."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from crius.config.low_precision import LinearChoice, block, linear_choices, numberless
from crius.config.run import RunConfig, replace_fields
from crius.config.training import FORMATS, DenseQuantizeConfig
from crius.errors import ConfigError
from crius.models.description import ModelDescription
from crius.parallel.compile import prepare_compile
from crius.parallel.runtime import pick_device
from crius.quantize.convert import convert, missing_matmuls
from crius.tools.bench.machine import BenchMachine, seconds_of
from crius.tools.bench.options import Timed
from crius.tools.bench.result import Samples
from crius.tools.bench.speedups import HIGH, MODES, Shape, report

SAMPLE_SECONDS = 5e-3
"""Seconds that a sample repeats its work for, so that the clock and the wait for the device hardly count."""

MOST_REPEATS = 50


def quantize(
    config: RunConfig,
    facts: ModelDescription,
    options: Timed,
    *,
    as_json: bool = False,
) -> int:
    """Time each distinct linear shape of the model in turns in bfloat16 and in each format, eager and compiled.

    Shapes are the ones of one rank under ``parallelism.tensor_parallel_degree``. Weights and inputs are bfloat16, as
    FSDP passes them; casts and scales are part of the time.

    Args:
        config: the model and its tensor-parallel degree.
        facts: sizes of the model.
        options: what is timed; tokens are rows that a layer multiplies.
        as_json: print JSON instead of a table.

    Returns:
        0.

    Raises:
        ConfigError: the GPU is not this machine's, the device lacks such matmuls, the tokens do not make whole blocks,
            or a name is unknown.
    """
    device = pick_device(config.training.device, 0)
    tokens = options.tokens
    emulated = options.emulated
    names = _formats(options.formats, device, options.gpu, emulated)
    chosen = _named("--modes", options.modes, MODES)
    _check_tokens(config, names, tokens)
    if "compiled" in chosen:
        prepare_compile(config.compile)
    shapes = shapes_of(config, facts)
    for shape in shapes:
        works = _works(config, shape, names, chosen, tokens, device, emulated)
        _time(shape, works, options.repeat, device)
        del works
        if device.type == "cuda":
            torch.cuda.empty_cache()
    report(config, shapes, names, chosen, tokens, BenchMachine.of(device), emulated=emulated, as_json=as_json)
    return 0


def _check_tokens(config: RunConfig, formats: Sequence[str], tokens: int) -> None:
    """Raise ConfigError if the tokens do not make whole blocks, because the gradient of a weight sums over them."""
    units = {name: block(replace_fields(config, FORMATS[name]).quantize.dense) for name in formats}
    wrong = [name for name, unit in units.items() if tokens % unit]
    if wrong and not config.quantize.dense.pad_inner_dim:
        unit = max(units[name] for name in wrong)
        raise ConfigError(
            f"--tokens {tokens} is not a multiple of {unit}.",
            where="command line",
            why=f"the gradient of a {wrong[-1]} layer's weight is a matmul over them, in blocks",
            fix=f"--tokens {-(-tokens // unit) * unit}",
        )


def _formats(formats: str, device: torch.device, gpu: str, emulated: bool) -> list[str]:
    """The formats to time.

    Raises:
        ConfigError: a format is unknown, or the device has no matmuls for it.
    """
    if gpu != "here":
        raise ConfigError(
            f"--gpu {gpu}: only the GPU of this machine can be timed.", where="command line", fix="--gpu here"
        )
    names = _named("--formats", formats, tuple(FORMATS))
    if emulated:
        return names
    missing = {name: missing_matmuls("mxfp8" if name == "mxfp8" else "float8", device.type) for name in names}
    runs = [name for name in names if not missing[name]]
    if not runs or (formats and runs != names):
        raise ConfigError(
            f"there is nothing to time: {next(reason for reason in missing.values() if reason)}.",
            where=f"--gpu {gpu}",
            why="emulated matmuls round to the format and multiply in high precision: right numbers without the speed",
            fix="run it on such a GPU; --emulated times the emulation, which does not show the format's speed",
        )
    return runs


def _named(flag: str, given: str, known: Sequence[str]) -> list[str]:
    names = given.split(",") if given else list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"{flag} {given}: there is no {unknown[0]}.", where="command line", fix=", ".join(known))
    return list(dict.fromkeys(names))


def shapes_of(config: RunConfig, facts: ModelDescription) -> list[Shape]:
    """The distinct shapes that a rank multiplies, each with its layers, in the order of the model."""
    plan = facts.plan
    # layers that the section keeps by size are measured here; layers that it keeps by name stay kept
    wanted = replace_fields(config, FORMATS["float8_tensorwise"] | {"quantize.dense.auto_filter": "off"})
    shapes: dict[tuple[int, int], Shape] = {}
    for choice in linear_choices(wanted, facts, plan, accelerated=True):
        shape = shapes.setdefault(choice.local, Shape(*choice.local))
        name = numberless(choice.name).removeprefix(f"{plan.block}.")
        shape.layers[name] = shape.layers.get(name, 0) + 1
        if not choice.is_converted and " mod " not in choice.reason:
            shape.kept[name] = choice.reason
    return list(shapes.values())


def _works(
    config: RunConfig,
    shape: Shape,
    formats: Sequence[str],
    modes: Sequence[str],
    tokens: int,
    device: torch.device,
    emulated: bool,
) -> dict[tuple[str, str], Callable[[], None]]:
    """A forward and backward for each format and mode; a format whose blocks do not fit the shape is left out."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.empty(tokens, shape.in_features, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    gradient = torch.empty(tokens, shape.out_features, dtype=torch.bfloat16, device=device)
    gradient.normal_(0, 1e-3, generator=generator)
    works: dict[tuple[str, str], Callable[[], None]] = {}
    for name in (HIGH, *formats):
        dense = replace_fields(config, FORMATS[name]).quantize.dense if name != HIGH else None
        linear = make_linear(shape, dense, device, emulated)
        if linear is None:
            continue
        for mode in modes:
            forward = torch.compile(linear, fullgraph=True, dynamic=False) if mode == "compiled" else linear
            works[name, mode] = functools.partial(_both_ways, forward, x, gradient)
    return works


def make_linear(
    shape: Shape, dense: DenseQuantizeConfig | None, device: torch.device, emulated: bool
) -> nn.Module | None:
    """A bfloat16 linear layer with random weights, converted as in a run with the section ``dense``.

    None if the blocks of the format do not fit the shape, and ``dense`` does not pad.
    """
    holder = nn.Module()
    holder.linear = nn.Linear(shape.in_features, shape.out_features, bias=False, device="meta", dtype=torch.bfloat16)
    if dense is not None:
        whole = (shape.out_features, shape.in_features)
        unit = block(dense)
        padded = (-(-whole[0] // unit) * unit, -(-whole[1] // unit) * unit)
        if padded != whole and not dense.pad_inner_dim:
            return None
        choice = LinearChoice(name="linear", shape=whole, local=whole, padded=padded, is_converted=True, reason="")
        convert(holder, [choice], dense, emulate=emulated)
    holder.to_empty(device=device)
    linear: nn.Module = holder.linear
    for parameter in linear.parameters():
        nn.init.normal_(parameter, 0.0, 0.02)
    return linear


def _both_ways(forward: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> None:
    forward(x.detach().requires_grad_()).backward(gradient)


def _time(shape: Shape, works: dict[tuple[str, str], Callable[[], None]], repeat: int, device: torch.device) -> None:
    """Add the samples of all works to ``shape``: a warm-up of each, then rounds through all of them."""
    repeats = {}
    for key, work in works.items():
        work()  # compiles
        once = seconds_of(work, device)
        repeats[key] = max(1, min(MOST_REPEATS, round(SAMPLE_SECONDS / once)))
        shape.times[key] = Samples()
    for _ in range(repeat):
        for key, work in works.items():
            shape.times[key].seconds.append(seconds_of(work, device, repeats[key]))
