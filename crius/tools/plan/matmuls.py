"""Matmuls of a decoder layer on a rank, from a model's description. Torch-free."""

from functools import lru_cache

from crius.models.description import Layer


@lru_cache(maxsize=1024)
def linears(layer: Layer, tp: int) -> tuple[tuple[float, float], ...]:
    """Features in and out of each linear layer that computes every token, as one of ``tp`` ranks has it.

    One that writes to the residual stream splits its input, the others their output.
    """
    return tuple(_split(weight.shape, tp, weight.to_residual) for weight in layer.weights if weight.kind == "linear")


@lru_cache(maxsize=1024)
def expert_matmuls(layer: Layer, tp: int) -> tuple[tuple[float, float], ...]:
    """The same of one routed expert; empty where there is none."""
    experts = (weight for weight in layer.weights if weight.kind == "expert")
    return tuple(_split(weight.shape[1:], tp, weight.to_residual) for weight in experts)


def _split(shape: tuple[int, ...], tp: int, by_input: bool) -> tuple[float, float]:
    features_out, features_in = shape
    if tp == 1:
        return features_in, features_out
    return (features_in / tp, features_out) if by_input else (features_in, features_out / tp)


@lru_cache(maxsize=1024)
def numbers(layer: Layer, *kinds: str) -> int:
    """Numbers of the weights of ``kinds``."""
    return sum(weight.numel for weight in layer.weights if weight.kind in kinds)
