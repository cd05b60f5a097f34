"""Whether attention of a run on a CPU keeps its probabilities: ``kernels.attention blocked``. Torch-free."""

from crius.config.dtype import auto_dtype
from crius.config.run import RunConfig
from crius.host_cpu import ATTENTION_BLOCK, is_wide_amd_cpu

MOST_TOKENS = 512
"""The longest sequences for which ``auto`` keeps them: half of ``seq_len`` numbers for each token and head."""


def obstacle(config: RunConfig) -> tuple[str, str]:
    """Why a run on a CPU cannot take the kernel, and what to change; both empty where it can."""
    training = config.training
    if config.model.attention_mask == "document":
        return "it takes no mask", "--kernels.attention auto, or --model.attention_mask causal"
    if config.parallelism.context_parallel_degree > 1:
        return "context parallelism splits sequences among ranks", "--kernels.attention auto"
    dtype = training.mixed_precision_param
    if (auto_dtype(on_gpu=False)[0] if dtype == "auto" else dtype) != "float32":
        return "it takes float32 only", "--training.mixed_precision_param float32, or --kernels.attention auto"
    if training.seq_len % ATTENTION_BLOCK:
        longer = training.seq_len + -training.seq_len % ATTENTION_BLOCK
        why = f"training.seq_len {training.seq_len} is no multiple of {ATTENTION_BLOCK}"
        return why, f"--training.seq_len {longer}, or --kernels.attention auto"
    return "", ""


def keeps_probabilities(config: RunConfig) -> bool:
    """Whether a run on a CPU takes the kernel: asked for, or left to ``auto`` where it was measured to be faster and
    takes little memory. What is recomputed has no say: that is not to change a bit of a run.
    """
    if config.kernels.attention != "auto":
        return config.kernels.attention == "blocked"
    is_short = config.training.seq_len <= MOST_TOKENS
    return is_short and is_wide_amd_cpu() and obstacle(config) == ("", "")
