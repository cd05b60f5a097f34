"""``[kernels]`` of a run, resolved for a device."""

import torch

from crius.config.attention import keeps_probabilities
from crius.config.run import RunConfig
from crius.kernels import choice


def run_kernels(config: RunConfig, device: torch.device) -> choice.Choice:
    """The kernels that ``config`` takes on ``device``.

    Args:
        config: the run.
        device: of this process; of a GPU that is stood in for, one without an index.

    Raises:
        ConfigError: what is asked for by name does not run there.
    """
    asked = config.kernels
    is_at_hand = device.type == "cuda" and device.index is not None
    return choice.resolve(
        asked.linear,
        asked.pointwise,
        asked.attention,
        device_type=device.type,
        capability=torch.cuda.get_device_capability(device) if is_at_hand else None,
        has_mask=config.model.attention_mask == "document",
        keeps_probabilities=keeps_probabilities(config),
    )
