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


def tolerances(config: RunConfig, steps: int) -> dict[str, Tolerance]:
    """By column, for the precision of ``config`` and ``steps`` of training."""
    first = f"steps 1 to {min(COMPARED_STEPS, steps)}"
    if config.training.mixed_precision_param == "float32" == config.training.mixed_precision_reduce:
        return {
            "loss": Tolerance(1e-5, f"{first}; float32 sums in another order, up to 2**-24 = 6e-8 each"),
            "grad_norm": Tolerance(1e-5, f"{first}, before clipping; as the loss, through all layers and back"),
            "parameters": Tolerance(1e-5, f"after step {steps}, all together; the last bits of the gradients"),
            "update": Tolerance(
                1e-3,
                f"after step {steps}; AdamW makes a whole step of a gradient near 0, whose sign is in its last bits",
            ),
        }
    return {
        "loss": Tolerance(1e-3, f"{first}; bfloat16 rounds by up to 2**-9 = 2e-3, the mean over tokens by less"),
        "grad_norm": Tolerance(1e-2, f"{first}, before clipping; bfloat16 roundings through all layers and back"),
        "parameters": Tolerance(1e-3, f"after step {steps}, all together; bfloat16 roundings of the gradients"),
        "update": Tolerance(
            0.5, f"after step {steps}; AdamW makes a whole step of a gradient whose sign is lost in bfloat16"
        ),
    }
