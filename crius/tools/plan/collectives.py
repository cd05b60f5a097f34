"""Seconds of collectives along the axes of the mesh: which links they cross, and how often. Torch-free."""

from dataclasses import dataclass

from crius.tools.plan.hardware import Hardware
from crius.tools.plan.time_constants import TimeConstants


@dataclass(frozen=True)
class RankGroup:
    """Ranks of a collective.

    Attributes:
        size: ranks.
        bandwidth: bytes a second that each rank sends.
        latency: seconds that a collective takes however little it sends.
    """

    size: int
    bandwidth: float
    latency: float

    def gather(self, full_bytes: float) -> float:
        """Seconds to all-gather, or to reduce-scatter, ``full_bytes``."""
        if self.size == 1:
            return 0.0
        return full_bytes * (self.size - 1) / self.size / self.bandwidth + self.latency

    def reduce(self, num_bytes: float) -> float:
        """Seconds to all-reduce ``num_bytes``."""
        return 2 * self.gather(num_bytes)


def group(size: int, stride: int, hardware: Hardware, constants: TimeConstants) -> RankGroup:
    """The group of ``size`` ranks that are ``stride`` apart.

    A ring over whole nodes has as many network cards as it has members in a node: FSDP over all GPUs of a node sees
    them all, but with tensor parallelism over the node it has one member there, and one card.
    """
    members = max(1, min(size, hardware.gpus_per_node // stride))
    link, hop = _link(hardware, constants), _hop_seconds(hardware, constants)
    if members >= size:
        return RankGroup(size, link, hop * (size > 1))
    nodes = -(-size // members)
    return RankGroup(size, min(link, members * hardware.nic_bandwidth * constants.nic), hop * nodes)


def _link(hardware: Hardware, constants: TimeConstants) -> float:
    """What collectives reach inside a node; what was measured has their efficiency in it."""
    return hardware.link_bandwidth * (1.0 if hardware.measured else constants.link)


def _hop_seconds(hardware: Hardware, constants: TimeConstants) -> float:
    return constants.hop_seconds if hardware.hop_seconds is None else hardware.hop_seconds


def all_to_all(size: int, stride: int, hardware: Hardware, constants: TimeConstants, sent_bytes: float) -> float:
    """Seconds until each rank has sent ``sent_bytes``, spread over the group; what leaves the node takes its card."""
    if size == 1:
        return 0.0
    members = max(1, min(size, hardware.gpus_per_node // stride))
    inside, outside = (members - 1) / size, (size - members) / size
    link, nic = _link(hardware, constants), hardware.nic_bandwidth * constants.nic
    return sent_bytes * max(inside / link, outside / nic) + _hop_seconds(hardware, constants) * (size > 1)


def exposed(communication: float, compute: float, cost: float) -> float:
    """What communication beside compute adds to it: what does not fit, and ``cost`` of what does."""
    return max(0.0, communication - compute) + cost * min(communication, compute)
