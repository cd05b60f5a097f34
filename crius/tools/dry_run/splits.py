"""Number of rows per expert. Fake tensors have no values, so an oracle computes it from a given load."""

from torch import Tensor, nn

from crius.parallel.expert import AllToAllDispatch


def rows_of_rank(rows: int, ranks: int, imbalance: float) -> int:
    """Number of one rank's rows that go to the fullest rank: ``imbalance`` times its even share.

    Args:
        rows: rows that a rank sends.
        ranks: ranks that share the experts.
        imbalance: load of the fullest rank, divided by the mean.
    """
    return min(rows, -(-round(rows * imbalance) // ranks))


class Oracle:
    """An answer in which every rank sends this rank the same number of rows, and divides the rest evenly.

    Args:
        rank: index of this rank among the ranks that share the experts.
        ranks: number of ranks that share the experts.
        imbalance: load of this rank, divided by the mean load of all.
    """

    def __init__(self, rank: int, ranks: int, imbalance: float) -> None:
        self._rank = rank
        self._ranks = ranks
        self._imbalance = imbalance

    def __call__(self, splits: Tensor, rows: int) -> list[list[int]]:
        """See ``crius.parallel.expert.read_splits``."""
        own = rows_of_rank(rows, self._ranks, self._imbalance)
        each, over = divmod(rows - own, max(1, self._ranks - 1))
        others = [each + (number < over) for number in range(self._ranks - 1)]
        return [[*others[: self._rank], own, *others[self._rank :]], [own] * self._ranks]


def foretell(model: nn.Module, imbalance: float) -> None:
    """Make an ``Oracle`` answer where ``model`` would read how many rows go to which rank."""
    for module in model.modules():
        if isinstance(module, AllToAllDispatch):
            module.read_splits = Oracle(module.mesh.get_local_rank(), module.ranks, imbalance)
