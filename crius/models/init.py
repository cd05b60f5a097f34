"""How parameters and buffers start: a rule per name pattern, drawn by ``crius.parallel.init``. Torch-free."""

from dataclasses import dataclass

from crius.models.description import ModelDescription, Weight


@dataclass(frozen=True)
class Constant:
    """Every element is ``value``."""

    value: float


@dataclass(frozen=True)
class Normal:
    """Elements drawn from N(0, std^2) and clamped to ``limit`` standard deviations (Llama 3 code: 3)."""

    std: float
    limit: float = 3.0


Init = Constant | Normal


def init_rules(model: ModelDescription) -> list[tuple[str, Init]]:
    """Name patterns and how those parameters and buffers start; the first that fits counts.

    Matrices start at std 0.02, those that write to the residual stream smaller by ``sqrt(2 * num_layers)``
    (GPT-2, section 2.3), the output layer and an embedding that is tied to it by ``D ** -0.5``.
    """
    ends = Normal(model.dim**-0.5)
    residual = Normal(0.02 / (2 * model.num_layers) ** 0.5)

    def rule(weight: Weight) -> Init:
        if weight.kind in ("norm", "bias"):
            return Constant(1.0 if weight.kind == "norm" else 0.0)
        return residual if weight.to_residual else Normal(0.02)

    layers = {f"layers.*.{weight.name}": rule(weight) for _, layer in model.layers for weight in layer.weights}
    buffers = {f"layers.*.{one.name}": Constant(one.value) for _, layer in model.layers for one in layer.buffers}
    return [
        ("tok_embeddings.weight", ends if model.tied_embeddings else Normal(1.0)),
        ("output.weight", ends),
        *layers.items(),
        *buffers.items(),
        ("norm.weight", Constant(1.0)),
    ]
