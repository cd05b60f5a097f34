"""A seeded random order of 0 ... size - 1 that needs no table: O(1) memory at any size of corpus.

A Feistel network over the next even number of bits is a bijection whatever its round function is; values at or above
``size`` are sent through again until they fall below ("cycle walking": Black and Rogaway 2002, "Ciphers with arbitrary
finite domains", section 4). The domain is less than 4 times ``size``, so that is under 4 passes on average.
"""

import numpy as np
import numpy.typing as npt

ROUNDS = 8  # 3 make a pseudo-random permutation with ideal rounds (Luby and Rackoff 1988); small halves need more

_MASK64 = (1 << 64) - 1


def mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): 64 bits in, 64 well-mixed bits out."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def permute(index: npt.NDArray[np.uint64], size: int, key: int) -> npt.NDArray[np.uint64]:
    """Image of each index under the permutation of ``range(size)`` that ``key`` selects.

    Args:
        index: ``(n,)``, each below ``size``.
        size: at least 1 and at most 2**62.
        key: 64 bits; ``mix`` a seed and an epoch into it.

    Returns:
        ``(n,)``, each below ``size``.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [mix(key + number) for number in range(ROUNDS)]
    out = _network(index, half, keys)
    outside = np.flatnonzero(out >= size)
    while outside.size:
        out[outside] = _network(out[outside], half, keys)
        outside = outside[out[outside] >= size]
    return out


def _network(value: npt.NDArray[np.uint64], half: int, keys: list[int]) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> shift, value & mask
    for key in keys:
        left, right = right, left ^ (_mix_array(right ^ np.uint64(key)) & mask)
    return (left << shift) | right


def _mix_array(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
