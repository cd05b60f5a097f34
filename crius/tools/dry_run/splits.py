"""How many rows go to which experts: what fake tensors cannot tell. An oracle answers, by a chosen load."""

from torch import Tensor, nn

from crius.parallel.expert import AllToAllDispatch


def rows_of_rank(rows: int, ranks: int, imbalance: float) -> int:
    """Of the rows that one rank sends, how many go to the rank with most: ``imbalance`` times its even share.

    Args:
        rows: that a rank sends.
        ranks: that share the experts.
        imbalance: load of the fullest rank over the mean.
    """
    return min(rows, -(-round(rows * imbalance) // ranks))


class Oracle:
    """Every rank sends this one as many rows, and the others even parts of the rest.

    Args:
        rank: of this rank, among those that share the experts.
        ranks: how many share them.
        imbalance: load of this rank over the mean of all.
    """

    def __init__(self, rank: int, ranks: int, imbalance: float) -> None:
        self._rank, self._ranks, self._imbalance = rank, ranks, imbalance

    def __call__(self, splits: Tensor, rows: int) -> list[list[int]]:
        """See ``crius.parallel.expert.read_splits``."""
        own = rows_of_rank(rows, self._ranks, self._imbalance)
        each, over = divmod(rows - own, max(1, self._ranks - 1))
        others = [each + (number < over) for number in range(self._ranks - 1)]
        return [[*others[: self._rank], own, *others[self._rank :]], [own] * self._ranks]


def foretell(model: nn.Module, imbalance: float) -> None:
    """Have an ``Oracle`` answer wherever ``model`` would read how many rows go where."""
    for module in model.modules():
        if isinstance(module, AllToAllDispatch):
            module.read_splits = Oracle(module.mesh.get_local_rank(), module.ranks, imbalance)
