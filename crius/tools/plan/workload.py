"""``Workload``: everything but the hardware that decides how much memory and time a step takes. Torch-free.

A workload comes from a ``RunConfig``, from a row of published measurements, or from the search.
"""

from dataclasses import dataclass
from typing import Literal

from crius.config.layout import Layout
from crius.models.description import ModelDescription
from crius.tools.plan.trainer import CRIUS, Pointwise, Trainer

Precision = Literal["float32", "bfloat16", "float8", "mxfp8", "nvfp4"]
Checkpointing = Literal["none", "selective", "full"]
Loss = Literal["eager", "compiled", "chunked", "fused"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One optimizer step of one model under one layout.

    Attributes:
        model: what is trained.
        layout: degrees.
        seq_len: tokens of a sequence, before context parallelism splits it.
        microbatch: sequences in one forward of one data-parallel rank.
        num_microbatches: of one step: gradient accumulation, or what the pipeline is fed.
        schedule: of the pipeline, by the flag's spelling.
        stages_per_rank: virtual stages of the interleaved schedules, 1 otherwise.
        activation_checkpoint: what is recomputed. ``selective`` is by op: every other matmul.
        selective_layers: of ``selective``: every so many layers recomputed in full; None: by op.
        compile: every block is compiled.
        precision: of the matmuls of the blocks; the output layer and attention stay in bfloat16 below float32.
        float8_recipe: of torchao or TransformerEngine: ``tensorwise``, ``rowwise``, ...; empty: the trainer's.
        float8_all_gather: FSDP gathers weights in float8.
        weight_bytes: of one stored weight: 4 for float32.
        param_bytes: of one weight while it computes: 2 for bfloat16.
        reduce_bytes: of one number of a gradient that is reduced.
        moment_bytes: of one running mean of the optimizer, of which there are two.
        zero_stage: 0 replicas, 1 optimizer state sharded, 2 gradients too, 3 weights too (FSDP2).
        reshard: ``reshard_after_forward_mode``.
        gradient_sync: ``immediate`` reduces in every microbatch, ``deferred`` in the last.
        async_tp: tensor parallelism's collectives are split and overlapped with the matmuls.
        loss: how logits and cross-entropy are computed.
        loss_tokens: of ``chunked``: tokens whose logits exist at a time.
        score_tokens: of those, tokens that are scored in float32 at a time.
        optimizer: ``fused``, ``foreach`` or ``for-loop``.
        cpu_offload: weights, gradients and optimizer state lie in the host's memory between their uses.
        trainer: whose implementation: what is fused, kept and overlapped.
        pointwise: what norms and gates keep for their backward. ``operators``: all, as PyTorch differentiates them on a
            CPU; ``norms``: so of norms alone, of gates only their inputs; ``silu``: the gate before and after its
            activation too, as eager PyTorch does on a GPU; ``fused``: only their inputs. None: ``fused`` where blocks
            are compiled, else what the trainer does.
        muon: matrices of the layers keep one running mean, not two.
        sequence_parallel: between the matmuls of tensor parallelism a rank has its part of the sequence.
        stage_layers: layers of each pipeline stage in order; empty: as even in cost as they go.
        keeps_mask: attention under context parallelism keeps an explicit mask, as a CPU's kernels do.
        keeps_probabilities: attention keeps its probabilities, as a CPU's kernel for short sequences does.
        snapshot: a copy of weights and optimizer state is kept beside them, to go back to.
    """

    model: ModelDescription
    layout: Layout
    seq_len: int
    microbatch: int = 1
    num_microbatches: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    activation_checkpoint: Checkpointing = "none"
    selective_layers: int | None = None
    compile: bool = False
    precision: Precision = "bfloat16"
    float8_recipe: str = ""
    float8_all_gather: bool = False
    weight_bytes: float = 4
    param_bytes: float = 2
    reduce_bytes: float = 4
    moment_bytes: float = 4
    zero_stage: int = 3
    reshard: str = "default"
    gradient_sync: Literal["immediate", "deferred"] = "immediate"
    async_tp: bool = False
    loss: Loss = "eager"
    loss_tokens: int | None = None
    score_tokens: int = 0
    optimizer: str = "fused"
    cpu_offload: bool = False
    trainer: Trainer = CRIUS
    pointwise: Pointwise | None = None
    muon: bool = False
    sequence_parallel: bool = True
    stage_layers: tuple[int, ...] = ()
    keeps_mask: bool = False
    keeps_probabilities: bool = False
    snapshot: bool = False

    @property
    def is_tied(self) -> bool:
        """The output layer shares the embedding's weight; the last stage of a pipeline has a copy of its own."""
        return self.model.tied_embeddings and self.layout.pp == 1

    @property
    def tokens_per_rank(self) -> float:
        """Tokens of one step for each GPU: what tokens/s/GPU counts."""
        layout = self.layout
        sequences = self.microbatch * self.num_microbatches * layout.batch
        return sequences * self.seq_len / layout.num_ranks
