"""What ``[kernels]`` refuses before anything starts."""

from types import SimpleNamespace

import pytest
from test_rules import facts_of

from crius.config.resolve import varlen_obstacle
from crius.config.rules_training import KERNEL_RULES
from crius.config.run import RunConfig, replace_fields

LINEAR, POINTWISE, ATTENTION = "--kernels.linear", "--kernels.pointwise", "--kernels.attention"
MASK = ["--model.attention_mask", "document"]
BF16 = ["--training.mixed_precision_param", "bfloat16"]
FP32 = ["--training.mixed_precision_param", "float32"]
SPLIT = ["--parallelism.context_parallel_degree", "2"]
GPU = {"num_gpus": 1}


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
