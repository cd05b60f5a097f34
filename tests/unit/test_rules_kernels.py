"""What ``[kernels]`` refuses before anything starts."""

from types import SimpleNamespace

import pytest
from test_rules import facts_of

from crius.config.resolve import varlen_obstacle
from crius.config.rules_training import KERNEL_RULES, attention_backend_runs, cpu_kernels_run_on_cpus
from crius.config.run import RunConfig, replace_fields

LINEAR, POINTWISE, ATTENTION = "--kernels.linear", "--kernels.pointwise", "--kernels.attention"
MASK = ["--model.attention_mask", "document"]
BF16 = ["--training.mixed_precision_param", "bfloat16"]
FP32 = ["--training.mixed_precision_param", "float32"]
HALF_MASK = [*BF16, *MASK]
SPLIT = ["--parallelism.context_parallel_degree", "2"]
GPU = {"num_gpus": 1}
SOFTCAP = ["--model.words", '{"attention_softcap": 50.0}']

# rule, flags, what else is known if anything is, in the sentence, in "why", in "fix"
CASES = [
    (cpu_kernels_run_on_cpus, [LINEAR, "onednn"], GPU, "linear onednn is for CPUs", "", "linear torch"),
    (cpu_kernels_run_on_cpus, [POINTWISE, "fused"], GPU, "pointwise fused is for CPUs", "", "pointwise torch"),
    (cpu_kernels_run_on_cpus, [POINTWISE, "fused"], {"is_dry": True}, "is for CPUs", "", "training.device cpu"),
    (attention_backend_runs, [ATTENTION, "blocked"], GPU, "attention blocked", "it is for CPUs", "training.device cpu"),
    (
        attention_backend_runs,
        [ATTENTION, "blocked", *BF16],
        "blocked",
        "needs float32",
        "mixed_precision_param float32",
    ),
    (attention_backend_runs, [ATTENTION, "blocked", *FP32, *MASK], "blocked", "no mask", "attention_mask causal"),
    (
        attention_backend_runs,
        [ATTENTION, "blocked", *FP32, "--training.seq_len", "250"],
        "blocked",
        "training.seq_len 250 is not a multiple of 32",
        "--training.seq_len 256",
    ),
    (
        attention_backend_runs,
        [ATTENTION, "blocked", *FP32, "--parallelism.context_parallel_degree", "2"],
        "blocked",
        "context parallelism splits sequences",
        "attention auto",
    ),
    (
        attention_backend_runs,
        [ATTENTION, "cudnn"],
        "attention cudnn",
        "on a CPU the backends are flash",
        "attention auto",
    ),
    (
        attention_backend_runs,
        [ATTENTION, "flex", *MASK],
        "attention flex",
        "on a CPU the backends are flash",
        "attention auto",
    ),
    (attention_backend_runs, [ATTENTION, "flash", *FP32], GPU, "attention flash", "16-bit", "bfloat16"),
    (attention_backend_runs, [ATTENTION, "flash", *BF16, *MASK], GPU, "flash", "no mask", "varlen, flex or efficient"),
    (attention_backend_runs, [ATTENTION, "cudnn", *BF16, *MASK], GPU, "cudnn", "NaN", "varlen, flex or efficient"),
    (
        attention_backend_runs,
        [ATTENTION, "cudnn", *BF16, "--debug.deterministic"],
        GPU,
        "cudnn",
        "backward",
        "attention flash",
    ),
    (attention_backend_runs, [ATTENTION, "flex", *BF16], GPU, "flex", "masks of documents", "attention_mask document"),
    (
        attention_backend_runs,
        [ATTENTION, "varlen", *BF16],
        GPU,
        "varlen",
        "masks of documents",
        "attention_mask document",
    ),
    (attention_backend_runs, [ATTENTION, "varlen", *FP32, *MASK], GPU, "varlen", "16-bit", "bfloat16"),
    (
        attention_backend_runs,
        [ATTENTION, "varlen", *HALF_MASK, *SPLIT],
        GPU,
        "varlen",
        "masks of its own",
        "attention auto",
    ),
    (
        attention_backend_runs,
        [ATTENTION, "flash3", *HALF_MASK, *SPLIT],
        GPU,
        "flash3",
        "masks of its own",
        "attention auto",
    ),
    (
        attention_backend_runs,
        [ATTENTION, "varlen", *HALF_MASK, "--model.dim", "48", "--model.num_heads", "4", "--model.num_kv_heads", "2"],
        GPU,
        "varlen",
        "multiples of 8 up to 256, the model's are 12 and 12",
        "attention auto",
    ),
    (attention_backend_runs, [ATTENTION, "flash4", *FP32], GPU, "flash4", "16-bit", "bfloat16"),
    (
        attention_backend_runs,
        [ATTENTION, "varlen", *MASK],
        "varlen",
        "on a CPU the backends are flash",
        "attention auto",
    ),
    (attention_backend_runs, [ATTENTION, "varlen", *BF16, *SOFTCAP], GPU, "varlen", "bound the scores", "auto"),
    (attention_backend_runs, [ATTENTION, "flash", *SOFTCAP], "flash", "bound the scores", "auto"),
    (attention_backend_runs, [ATTENTION, "blocked", *FP32, *SOFTCAP], "blocked", "no softcap", "auto"),
    (
        attention_backend_runs,
        [ATTENTION, "auto", *BF16, *SOFTCAP, *SPLIT],
        GPU,
        "auto",
        "only flex",
        "context_parallel_degree 1",
    ),
    (
        attention_backend_runs,
        [ATTENTION, "flex", *BF16, *MASK, "--parallelism.context_parallel_degree", "2"],
        GPU,
        "flex",
        "context parallelism",
        "attention auto",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[1]))
def test_a_kernel_that_cannot_run_is_refused(case):
    rule, flags, *known, sentence, why, fix = case
    (error,) = rule(facts_of(flags, **dict(*known)))
    assert sentence in str(error) and why in str(error) and fix in str(error.fix)
    assert flags[0] in str(error)


@pytest.mark.parametrize(
    ("flags", "known"),
    [
        ([], {}),
        ([LINEAR, "onednn", POINTWISE, "fused", ATTENTION, "math"], {}),
        ([LINEAR, "onednn", "--training.device", "cpu"], GPU),
        ([POINTWISE, "torch", "--compile.enable"], {}),
        ([ATTENTION, "flash", *MASK], {}),
        ([ATTENTION, "blocked", *FP32, "--training.seq_len", "1024"], {}),
        ([ATTENTION, "cudnn", *BF16], GPU),
        ([ATTENTION, "flex", *BF16, *MASK], GPU),
        ([ATTENTION, "varlen", *BF16, *MASK], GPU),
        ([ATTENTION, "flash3", *BF16, *MASK], GPU),
        ([ATTENTION, "flash4", *BF16, *SPLIT], GPU),
        ([ATTENTION, "efficient", *MASK, *FP32], GPU),
    ],
)
def test_a_kernel_that_can_run_is_not_refused(flags, known):
    assert [error for rule in KERNEL_RULES for error in rule(facts_of(flags, **known))] == []


@pytest.mark.parametrize(("dims", "is_taken"), [((256, 256), True), ((264, 264), False), ((64, 128), False)])
def test_varlen_takes_equal_head_dims_up_to_256(dims, is_taken):
    attention = SimpleNamespace(head_dim=dims[0], value_dim=dims[1])
    model = SimpleNamespace(layers=[("layers.0", SimpleNamespace(attention=attention))])
    config = replace_fields(RunConfig(), {"training.mixed_precision_param": "bfloat16"})
    assert bool(varlen_obstacle(config, model)) != is_taken
