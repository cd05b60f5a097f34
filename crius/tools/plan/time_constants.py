"""What the closed form of time does not derive. Written by ``benchmarks/fit_planner.py``."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TimeConstants:
    """Efficiencies, overlaps and overheads; shares of a peak unless a unit is named.

    Attributes:
        matmul_ampere: of the peak, what large matmuls of a training step reach on A100.
        matmul_hopper: the same on H100 and H200.
        matmul_blackwell: the same on B200 and GB200.
        matmul_blackwell_ultra: the same on B300 and GB300, against the same peaks.
        matmul_cdna3: the same on MI300X.
        power_exponent: efficiency falls with the power limit's share to this power.
        power_exponent_blackwell: the same on Blackwell, which its full power limits too.
        matmul_traffic: times that a matmul's operands cross the memory, as a cost beside its FLOPs.
        attention_ampere: of the peak, what causal attention reaches on A100.
        attention_hopper: the same on H100 and H200 with TransformerEngine's kernels.
        attention_blackwell: the same on Blackwell.
        flash2_flops: FLOPs a second of FlashAttention-2 on GPUs newer than it, whose matmul units it does not use.
        memory: of the bandwidth, what elementwise operations reach.
        elementwise_eager: times that a layer's activations cross the memory in eager PyTorch.
        elementwise_compiled: the same, compiled.
        float8_tensorwise: of float8's peak relative to bfloat16's efficiency, with one scale a tensor.
        float8_rowwise: the same with one scale a row.
        mxfp8: factor on these with a scale every 32 numbers.
        nvfp4: of the 4-bit peak.
        cast_traffic: times that a matmul's operands cross the memory to be quantized.
        link: of ``link_bandwidth``, what collectives reach.
        nic: of ``nic_bandwidth``.
        hop_seconds: latency of a collective for each node it visits, seconds.
        overlap_cost: share of hidden communication that slows the compute beside it.
        tp_exposed: share of tensor parallelism's communication that is not hidden.
        tp_async: factor on it with async tensor parallelism.
        cp_imbalance: attention slows by this share as context parallelism grows.
        cp_exposed: share of context parallelism's communication that is not hidden.
        ep_exposed: share of expert parallelism's all-to-alls that is not hidden.
        dp_exposed: share of the gradient reduction that overlaps in theory and yet is not hidden.
        expert_efficiency: factor on the efficiency of matmuls of experts.
        expert_traffic: times that routed tokens cross the memory to be permuted.
        expert_seconds: time a layer of experts waits for its routing to reach the host and back, both passes, seconds.
        expert_torch: factor on the permutation and the routing to experts outside Megatron.
        graph_launch: share of launch times that is left when graphs or compiled code are launched.
        op_seconds: time to launch one operation, seconds.
        step_seconds: fixed cost of a step, seconds.
        bias: logarithm of how much slower compute is than the rest says. torchtitan's, whose blocks are as Crius's.
    """

    matmul_ampere: float = 0.866
    matmul_hopper: float = 0.746
    matmul_blackwell: float = 0.516
    matmul_blackwell_ultra: float = 0.687
    matmul_cdna3: float = 0.342
    power_exponent: float = 0.466
    power_exponent_blackwell: float = 0.859
    matmul_traffic: float = 0.933
    attention_ampere: float = 0.532
    attention_hopper: float = 0.459
    attention_blackwell: float = 0.412
    flash2_flops: float = 279000000000000.0
    memory: float = 0.833
    elementwise_eager: float = 1.77
    elementwise_compiled: float = 0.468
    float8_tensorwise: float = 1.0
    float8_rowwise: float = 0.559
    mxfp8: float = 0.939
    nvfp4: float = 0.547
    cast_traffic: float = 0.445
    link: float = 0.719
    nic: float = 0.95
    hop_seconds: float = 4.14e-06
    overlap_cost: float = 0.128
    tp_exposed: float = 1.26
    tp_async: float = 0.642
    cp_imbalance: float = 0.199
    cp_exposed: float = 0.302
    ep_exposed: float = 0.788
    dp_exposed: float = 0.292
    expert_efficiency: float = 0.829
    expert_traffic: float = 5.98
    expert_seconds: float = 0.00727
    expert_torch: float = 4.0
    graph_launch: float = 0.262
    op_seconds: float = 5.99e-06
    step_seconds: float = 0.045
    bias: float = 0.12


TIME = TimeConstants()
