"""Checks whether parts of a tensor cover it exactly. No torch."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

MAX_SPLIT_DIMS = 6
"""Most dims that a tensor may be split along; FSDP, tensor and expert parallelism together split three."""

Box = tuple[Sequence[int], Sequence[int]]
"""Offset of a part, and its shape."""


def fits(shape: Sequence[int], box: Box) -> bool:
    """Whether a part is inside a tensor of ``shape``."""
    offset, size = box
    if not len(offset) == len(size) == len(shape):
        return False
    # a list, not a generator: large checkpoints have millions of parts
    return all([start + length <= dim for start, length, dim in zip(offset, size, shape, strict=True)])


def split_dims(shape: Sequence[int], boxes: Iterable[Box]) -> list[int]:
    """The dims along which some part is smaller than the whole."""
    sizes = [size for _, size in boxes]
    return [dim for dim, length in enumerate(shape) if any([size[dim] != length for size in sizes])]


def cover(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether every element is in exactly one part. Parts must fit, and split few dims.

    The corners of a box, each with a sign, determine the box: they are the mixed derivative of "inside or not". So
    boxes tile the whole exactly if their signed corners sum to those of the whole. This takes linear time.
    """
    split = split_dims(shape, boxes)
    if len(split) == 1 and math.prod(shape) > 0:
        [dim] = split
        edges = sorted((offset[dim], offset[dim] + size[dim]) for offset, size in boxes if size[dim])
        ends = [0, *(end for _, end in edges)]
        return [begin for begin, _ in edges] == ends[:-1] and ends[-1] == shape[dim]
    corners: Counter[tuple[int, ...]] = Counter()
    signed = [(offset, size, 1) for offset, size in boxes if math.prod(size)]
    whole = [((0,) * len(shape), shape, -1)] if math.prod(shape) else []
    signs = [(-1) ** sum(upper) for upper in itertools.product((0, 1), repeat=len(split))]
    for offset, size, sign in [*signed, *whole]:
        edges = [(offset[dim], offset[dim] + size[dim]) for dim in split]
        for corner, of_corner in zip(itertools.product(*edges), signs, strict=True):
            corners[corner] += sign * of_corner
    return not any(corners.values())
