"""How far two runs may be apart that are the same but for the order of their sums, and why that far."""

from dataclasses import dataclass

from crius.config.run import RunConfig

COMPARED_STEPS = 3
"""Of which loss and gradient norm are compared; later the differences of the parameters feed on themselves."""


@dataclass(frozen=True)
class Tolerance:
    """The greatest relative difference that a column may show, and why it is not zero."""

    bound: float
    reason: str


_FLOAT32 = {
    "loss": Tolerance(1e-5, "float32 sums in another order, up to 2**-24 = 6e-8 each"),
    "grad_norm": Tolerance(1e-5, "as the loss, through all layers and back"),
    "parameters": Tolerance(1e-5, "the last bits of the gradients"),
    "update": Tolerance(1e-3, "AdamW makes a whole step of a gradient near 0, whose sign is in its last bits"),
}
_BFLOAT16 = {
    "loss": Tolerance(1e-3, "bfloat16 rounds by up to 2**-9 = 2e-3, the mean over tokens by less"),
    "grad_norm": Tolerance(1e-2, "bfloat16 roundings through all layers and back"),
    "parameters": Tolerance(1e-3, "bfloat16 roundings of the gradients"),
    "update": Tolerance(0.5, "AdamW makes a whole step of a gradient whose sign is lost in bfloat16"),
}
# measured over layouts of the debug model: at most 8e-5, 1e-3, 5e-4 and 0.2
_TENSORWISE = {
    "loss": Tolerance(5e-4, "one scale for what a rank multiplies: other ranks and microbatches, other roundings"),
    "grad_norm": Tolerance(1e-2, "those roundings, of up to 2**-4 of a number, through all layers and back"),
    "parameters": Tolerance(3e-3, "those roundings, in the gradients"),
    "update": Tolerance(0.5, "AdamW makes a whole step of a gradient whose sign is lost in float8"),
}
# measured over layouts of the debug model: at most 9e-7, 6e-6, 1e-5 and 4e-2
_ROWWISE = {
    "loss": Tolerance(1e-5, "rows keep their scales; a few numbers round to the neighbour"),
    "grad_norm": Tolerance(1e-4, "numbers that round to the neighbour, through all layers and back"),
    "parameters": Tolerance(1e-4, "numbers that round to the neighbour, in the gradients"),
    "update": Tolerance(0.2, "AdamW makes a whole step of a gradient near 0, whose sign is in its last bits"),
}
# measured: at most 2e-5, 2e-4, 1e-5 and 4e-2
_BLOCKS = {
    "loss": Tolerance(1e-4, "a layer that is no whole blocks on each rank stays in high precision on that layout"),
    "grad_norm": Tolerance(2e-3, "as the loss, through all layers and back"),
    "parameters": Tolerance(3e-4, "as the loss, in the gradients"),
    "update": Tolerance(0.3, "AdamW makes a whole step of a gradient near 0, whose sign is in its last bits"),
}
_ALL = {"float32": _FLOAT32, "bfloat16": _BFLOAT16, "float8 tensorwise": _TENSORWISE, "mxfp8": _BLOCKS}


def precision(config: RunConfig) -> str:
    """What the matmuls of ``config`` are computed in, such as ``bfloat16`` or ``float32 and float8 rowwise``."""
    dense, training = config.quantize.dense, config.training
    dtypes = (training.mixed_precision_param, training.mixed_precision_reduce, training.dtype)
    low = f"float8 {dense.float8.recipe}" if dense.float8.enable else "mxfp8" if dense.mxfp8.enable else ""
    return ("bfloat16" if "bfloat16" in dtypes else "float32") + (f" and {low}" if low else "")


def tolerances(config: RunConfig) -> dict[str, Tolerance]:
    """By column, for the precision of ``config``: of all that is rounded the coarsest."""
    parts = [_ALL.get(part, _ROWWISE) for part in precision(config).split(" and ")]
    return {column: max((part[column] for part in parts), key=lambda one: one.bound) for column in _FLOAT32}
