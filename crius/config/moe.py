"""``[moe]``: what keeps the load of experts even. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Balance of the experts of a mixture-of-experts model. Counts and losses are taken over the whole global batch or
    over one sequence, so the curve does not depend on the layout. Balance losses over a microbatch are refused for this
    reason."""

    aux_loss: str = "sequence"
    """Loss that grows when the tokens of a sequence choose some experts more often than others (DeepSeek-V3,
    arXiv:2412.19437, equations 17 to 20). It is averaged over the sequences of the global batch. none: no such loss. A
    loss over each microbatch, as other trainers have it, is refused."""

    aux_loss_coefficient: float = 1e-3
    """Weight of that loss in each layer. When the load is even, the weighted loss equals this weight."""

    z_loss_coefficient: float = 0.0
    """Weight of the mean squared log-sum-exp of the router's logits (ST-MoE, arXiv:2202.08906), which keeps the logits
    small. 0: no such loss."""

    bias_update_rate: float = 1e-3
    """Step by which each update moves the bias that experts are chosen with: up for experts with fewer tokens than the
    mean, down for the others (arXiv:2408.15664). Only for models with such a bias. 0: the bias stays as it is."""

    def advice(self, has_bias: bool) -> str:
        """Advice for experts that get no tokens.

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
