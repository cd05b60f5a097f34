"""What the closed form of memory does not derive: how implementations differ, and what an allocator adds. Torch-free.

``benchmarks/fit_planner_memory.py`` fits the constants; traits are read off the implementations.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from crius.tools.plan.workload import Framework, Pointwise
from crius.units import GIB


@dataclass(frozen=True, kw_only=True)
class Traits:
    """How an implementation differs in what it keeps.

    Attributes:
        gathers_keys: context parallelism keeps the keys and values of the whole sequence.
        keeps_gathered: tensor parallelism keeps the gathered input of a matmul, not the rank's part of the sequence.
        pointwise: what norms and gates keep, unless they are compiled.
        selects_ops: selective checkpointing keeps the results of some ops; if not, it recomputes the core of attention,
            of which fused attention keeps nothing anyway.
        receives_all: a pipeline allocates what it receives once for all microbatches.
        ends_stay: embedding and output layer are one unit of FSDP, gathered and with whole gradients until the end of a
            microbatch.
        gathers_logits: tensor parallelism gathers the logits of the whole vocabulary before the loss.
        balances_stages: pipeline stages are balanced by cost; if not, by the number of layers.
        eager_logit_bytes: of one logit, all that exists of it in the backward of an eager loss; or the name of the
            fitted constant that says so.
        split_logit_bytes: how many more where the vocabulary is split, or the logits of its parts are gathered.
        activations: name of the fitted constant that says by which factor more is kept than is counted.
    """

    gathers_keys: bool = False
    keeps_gathered: bool = True
    pointwise: Pointwise = "silu"
    selects_ops: bool = True
    receives_all: bool = False
    ends_stay: bool = False
    gathers_logits: bool = False
    balances_stages: bool = True
    eager_logit_bytes: float | str = 12.0  # log-probabilities in float32, their gradient, its gradient
    split_logit_bytes: float = 4.0
    activations: str = ""


_TORCHTITAN = Traits(receives_all=True, ends_stay=True, eager_logit_bytes="torchtitan_logit_bytes")
_MEGATRON = Traits(
    keeps_gathered=False,
    pointwise="fused",
    selects_ops=False,
    balances_stages=False,
    eager_logit_bytes="in_place_logit_bytes",
    split_logit_bytes=0.0,
)

TRAITS: Mapping[Framework, Traits] = {
    "crius": Traits(gathers_keys=True, receives_all=True),
    "torchtitan": _TORCHTITAN,
    "torchtitan_graph": replace(
        _TORCHTITAN, pointwise="operators", eager_logit_bytes="graph_logit_bytes", split_logit_bytes=0.0
    ),
    "kempnerforge": replace(_TORCHTITAN, gathers_logits=True, eager_logit_bytes="kempnerforge_logit_bytes"),
    "megatron": _MEGATRON,
    "fsdp1": replace(_TORCHTITAN, receives_all=False),
    "nanotron": replace(_MEGATRON, pointwise="silu", activations="nanotron_activations"),
    "other": _TORCHTITAN,
}


@dataclass(frozen=True, kw_only=True)
class MemoryConstants:
    """Fitted; of all implementations.

    Attributes:
        torchtitan_logit_bytes: of one logit, all that exists of it in the backward of torchtitan's eager loss, which
            also keeps the logits in bfloat16.
        graph_logit_bytes: the same where forward, loss and backward are one graph, though not compiled.
        kempnerforge_logit_bytes: the same of KempnerForge's loss.
        in_place_logit_bytes: the same of Megatron's and nanotron's, which work in place on float32.
        compiled_logit_bytes: of one logit, all that exists of it in a compiled loss.
        chunked_logit_bytes: the same, of all logits, in a loss that other implementations cut by themselves.
        fused_logit_bytes: the same in a fused kernel over a split vocabulary.
        reserved_share: what an allocator reserves beyond what is allocated, as a share of it.
        reserved_eager_share: the same where blocks are not compiled, and more tensors come and go.
        reserved_bytes: what it reserves beside that.
        allocated_bytes: what libraries allocate that is no tensor of the model: workspaces.
        cdna3_bytes: what AMD's libraries reserve more.
        nanotron_activations: what its layers keep, as a factor on what is counted.
        nvfp4_kept: share of the activations that a layer with 4-bit matmuls keeps.
    """

    torchtitan_logit_bytes: float = 14.3
    graph_logit_bytes: float = 10.1
    kempnerforge_logit_bytes: float = 3.42
    in_place_logit_bytes: float = 10.5
    compiled_logit_bytes: float = 3.74
    chunked_logit_bytes: float = 2.19
    fused_logit_bytes: float = 4.2
    reserved_share: float = 0.0677
    reserved_eager_share: float = 0.0847
    reserved_bytes: float = 1.11 * GIB
    allocated_bytes: float = 0.569 * GIB
    cdna3_bytes: float = 3.21 * GIB
    nanotron_activations: float = 1.59
    nvfp4_kept: float = 0.506


MEMORY = MemoryConstants()
