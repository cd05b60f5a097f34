"""``[moe]``: what keeps the load of experts even. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Balance of the experts of a mixture-of-experts model. Counts and losses are of the whole global batch or of one
    sequence, so that the curve does not depend on the layout; balance losses of a microbatch are refused for it."""

    aux_loss: str = "sequence"
    """Loss that is added where a sequence's tokens choose some experts more often than others (DeepSeek-V3,
    arXiv:2412.19437, equations 17 to 20), as the mean over the sequences of the global batch. none: there is none. A
    loss of each microbatch, as other trainers have it, is refused."""

    aux_loss_coefficient: float = 1e-3
    """Weight of that loss, for each layer. It is 1 times this where the load is even."""

    z_loss_coefficient: float = 0.0
    """Weight of the mean squared log-sum-exp of the router's logits (ST-MoE, arXiv:2202.08906), which keeps them
    small. 0: there is none."""

    bias_update_rate: float = 1e-3
    """What an update moves the bias by that experts are chosen with: up for those with fewer tokens than the mean,
    down for the others (arXiv:2408.15664). For models that have such a bias. 0: it stays."""

    def advice(self, has_bias: bool) -> str:
        """What a user can do about experts that get no tokens.

        Args:
            has_bias: the model's router has a bias that experts are chosen with.
        """
        if has_bias and (self.aux_loss == "none" or not self.aux_loss_coefficient):
            how = "raise --moe.bias_update_rate"
        elif self.aux_loss == "none":
            how = "give --moe.aux_loss sequence"
        else:
            how = "raise --moe.aux_loss_coefficient"
        return f"{how}, or lower --optimizer.lr"
