"""Rules about ``[kernels]``: what is asked for by name runs on the device, in the dtype and with the mask."""

from crius.config.attention import obstacle
from crius.config.facts import Facts, Rule, Violations
from crius.errors import ConfigError

_LINEAR, _POINTWISE, _ATTENTION = "kernels.linear", "kernels.pointwise", "kernels.attention"
_HALF_ONLY = ("cudnn", "flash")  # on a GPU: bfloat16 and float16


def _is_on_gpu(facts: Facts) -> bool:
    """Of the run, or of the one that a dry run stands for."""
    device = facts.config.training.device
    return device == "cuda" or (device == "auto" and (facts.num_gpus > 0 or facts.is_dry))


def cpu_kernels_run_on_cpus(facts: Facts) -> Violations:
    """oneDNN and the fused pointwise kernels are for CPUs."""
    kernels, on_gpu = facts.config.kernels, _is_on_gpu(facts)
    for name, asked in ((_LINEAR, kernels.linear == "onednn"), (_POINTWISE, kernels.pointwise == "fused")):
        if asked and on_gpu:
            value = "onednn" if name == _LINEAR else "fused"
            yield ConfigError(
                f"{name} {value} is for CPUs, and the run is on GPUs.",
                where=facts.flag(name),
                fix=f"--{name} torch, or --training.device cpu",
            )


def attention_backend_runs(facts: Facts) -> Violations:
    """The backend of attention takes the device, the dtype and the mask."""
    config, asked = facts.config, facts.config.kernels.attention
    on_gpu, has_mask = _is_on_gpu(facts), config.model.attention_mask == "document"
    why, fix = "", f"--{_ATTENTION} auto"
    if not on_gpu:
        if asked == "blocked":
            why, fix = obstacle(config)
        elif asked not in ("auto", "flash", "math"):
            why = "a CPU has flash, math and blocked"
    elif asked == "blocked":
        why, fix = "it is for CPUs", f"{fix}, or --training.device cpu"
    elif asked in _HALF_ONLY and config.training.mixed_precision_param == "float32":
        why, fix = "on a GPU it takes 16-bit numbers only", f"--training.mixed_precision_param bfloat16, or {fix}"
    elif asked in _HALF_ONLY and has_mask:
        # pytorch/pytorch#196678
        why = "it takes no mask" if asked == "flash" else "its gradient of masked attention is NaN at some lengths"
        fix = f"--{_ATTENTION} flex or efficient"
    elif asked == "flex" and not has_mask:
        why, fix = "it is for the document mask", f"{fix}, or --model.attention_mask document"
    elif asked != "auto" and config.parallelism.context_parallel_degree > 1:
        why = "context parallelism makes masks of its own, and takes the backends that have them"
    if why:
        yield ConfigError(f"{_ATTENTION} {asked} does not run here.", where=facts.flag(_ATTENTION), why=why, fix=fix)


KERNEL_RULES: tuple[Rule, ...] = (cpu_kernels_run_on_cpus, attention_backend_runs)
