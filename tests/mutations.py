"""Ways in which trainers get a sum wrong, planted for a test: each is a function of pytest's ``monkeypatch``.

Workers that are forked later have what was patched in the test's process; ``planted`` patches in standing workers.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from harness import TIED
from torch.nn import functional as F

from crius.data.loader import IGNORE_INDEX, Batch, BatchLoader
from crius.data.source import Order
from crius.kernels import attention as attention_kernels
from crius.kernels.attention import softcapped
from crius.models import decoder
from crius.models.layers import DocumentMask, plus
from crius.models.moe import MixtureOfExperts, Router
from crius.models.rope import YarnScaling
from crius.optim import build as optimizers
from crius.parallel import context, expert, gradients, init, pipeline, tensor
from crius.parallel.fsdp import GradientSync
from crius.parallel.gradients import Gradients
from crius.tools.convert import peft_out
from crius.tools.verify import worker
from crius.tools.verify.worker import uneven_labels
from crius.train import build, job, loop, step
from crius.train.guard import UpdateGuard
from crius.train.step import Accumulation, count_valid


def unscaled(original, factor):
    """Losses as they are, gradients multiplied by ``factor(self, batch)``."""

    def forward_backward(self, batch, valid_tokens):
        by = factor(self, batch)
        return original(self, batch, valid_tokens / by) / by

    return forward_backward


def scale_gradients_by_microbatches(patch):
    count = lambda self, batch: len(batch) // self._size  # noqa: E731
    patch.setattr(Accumulation, "forward_backward", unscaled(Accumulation.forward_backward, count))


def let_the_pipeline_scale_gradients(patch):
    original = pipeline.get_schedule_class

    def scaling(name):
        class Scaling(original(name)):
            def __init__(self, *args, scale_grads, **kwargs):
                super().__init__(*args, scale_grads=True, **kwargs)

        return Scaling

    patch.setattr(pipeline, "get_schedule_class", scaling)


def divide_by_local_tokens(patch):
    original = Accumulation.forward_backward

    def forward_backward(self, batch, valid_tokens):
        local = count_valid(batch.labels_BT).clamp(min=1) * dist.get_world_size()
        return original(self, batch, local)

    patch.setattr(Accumulation, "forward_backward", forward_backward)


def average_microbatches(patch):
    """Each microbatch counts alike, however many labels it has."""

    def forward_backward(self, batch, valid_tokens):
        parts = list(batch.microbatches(self._size))
        losses = []
        for index, part in enumerate(parts, start=1):
            self._sync.start_microbatch(is_last=index == len(parts))
            loss = self._model(part.tokens_BT, part.positions_BT, part.labels_BT)
            loss = loss / count_valid(part.labels_BT).clamp(min=1) / len(parts)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    patch.setattr(Accumulation, "forward_backward", forward_backward)


def scatter_without_summing(patch):
    def keep_own(output, input, op=None, group=None, async_op=False):
        output.copy_(input.chunk(dist.get_world_size(group))[dist.get_rank(group)])

    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):  # torch below 2.13, and from there on
        if hasattr(dist, name):
            patch.setattr(dist, name, keep_own)


def skip_all_reduce_of_gradients(patch):
    original = dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        if tensor.dtype != torch.float32:  # the sums of the step are float64
            return original(tensor, *args, **kwargs)

    patch.setattr(dist, "all_reduce", all_reduce)


def synchronise_only_the_last_microbatch(patch):
    """And forget the gradients of the others."""
    original = GradientSync.start_microbatch

    def start_microbatch(self, is_last):
        if is_last and self._model is not None:
            self._model.zero_grad()
            for module in self._model.modules():
                for group in getattr(getattr(module, "_get_fsdp_state", lambda: None)(), "_fsdp_param_groups", []):
                    group._partial_reduce_output = None
        original(self, is_last)

    patch.setattr(GradientSync, "start_microbatch", start_microbatch)


def count_replicas_twice(patch):
    patch.setattr(gradients, "num_shards", lambda parameter: dist.get_world_size())


def leave_norms_unsummed(patch):
    def norm(module, x_BTD):
        return F.rms_norm(x_BTD, module.normalized_shape, module.weight.to_local(), module.eps)

    patch.setitem(tensor.STYLES, "sequence", (*tensor.STYLES["sequence"][:2], norm))


def leave_replicated_heads_unsummed(patch):
    def one_head(linear, x_BTD):
        head, num_heads = linear._head
        return F.linear(x_BTD, linear.weight.to_local().chunk(num_heads)[head])

    patch.setattr(tensor, "FEW_HEADS", (*tensor.FEW_HEADS[:2], one_head))


def keep_key_gradients_to_oneself(patch):
    original = context.all_gather

    def all_gather(x, mesh):
        parts = list(original(x.detach(), mesh).chunk(mesh.size()))
        parts[mesh.get_local_rank()] = x
        return torch.cat(parts)

    patch.setattr(context, "all_gather", all_gather)


def on_last_rank(change):
    """``change`` of the batch that the last of several ranks trains on."""

    def mutate(patch):
        original = job._place

        def place(*args):
            batch = original(*args)
            is_last = dist.get_rank() == dist.get_world_size() - 1 > 0
            return change(batch) if is_last else batch

        patch.setattr(job, "_place", place)

    return mutate


def shift_positions(batch):
    return Batch(batch.tokens_BT, batch.labels_BT, batch.positions_BT + 1, batch.sample_ids)


def shift_labels(batch):
    return Batch(batch.tokens_BT, batch.labels_BT.roll(1, dims=1), batch.positions_BT, batch.sample_ids)


def count_positions_on_each_rank(patch):
    original = job._place

    def place(*args):
        batch = original(*args)
        return replace(batch, positions_BT=torch.arange(batch.tokens_BT.shape[1]).expand_as(batch.tokens_BT))

    patch.setattr(job, "_place", place)


def start_one_sample_late(patch):
    original = BatchLoader._start

    def start(self):
        self.next_sample += 1
        return original(self)

    patch.setattr(BatchLoader, "_start", start)


def unmask_one_rank(patch):
    patch.setattr(worker, "uneven_labels", lambda batch, size: batch if dist.get_rank() else uneven_labels(batch, size))


def drop_a_layer(patch):
    original = build.prune

    def prune(part, modules):
        original(part, modules if "tok_embeddings" in modules else [name for name in modules if name != "layers.3"])

    patch.setattr(build, "prune", prune)


def bypass_a_stage(patch):
    original = job.build_runner

    def build_runner(task, built):
        for index, part in zip(built.stages, built.parts, strict=True):
            if index == 1:
                part.forward = lambda x, **batch: x * 1.0
        return original(task, built)

    patch.setattr(job, "build_runner", build_runner)


def forget_a_stage_in_the_norm(patch):
    original = Gradients.squared_norms

    def squared_norms(self):
        return original(self) * (dist.get_rank() == 0)

    patch.setattr(Gradients, "squared_norms", squared_norms)


def skip_the_update_of_one_rank(patch):
    original = UpdateGuard.update

    def update(self, result):
        if dist.get_rank():
            self._optimizer.zero_grad()
        original(self, result)

    patch.setattr(UpdateGuard, "update", update)


def clip_nowhere_but_on_rank_0(patch):
    original = Gradients.clip

    def clip(self, norm, max_norm):
        original(self, norm, 0.0 if dist.get_rank() else max_norm)

    patch.setattr(Gradients, "clip", clip)


def clip_by_the_norm_of_one_stage(patch):
    original = Gradients.clip

    def clip(self, norm, max_norm):
        original(self, self.squared_norms().sum().sqrt(), max_norm)

    patch.setattr(Gradients, "clip", clip)


def draw_other_bits_on_one_rank(patch):
    original = init.draw_rows

    def draw_rows(name, shape, first, *args):
        rows = original(name, shape, first, *args)
        if dist.get_rank() == dist.get_world_size() - 1 > 0 and name == "layers.1.attention.wq.weight":
            rows[0, 0] += 1e-3
        return rows

    patch.setattr(init, "draw_rows", draw_rows)


def average_the_copies_of_a_tied_weight(patch):
    original = pipeline.TiedStages.sum_gradients

    def sum_gradients(self):
        original(self)
        for parameter in sum(self._pairs, []):
            parameter.grad *= 0.5

    patch.setattr(pipeline.TiedStages, "sum_gradients", sum_gradients)


def count_both_copies_of_a_tied_weight(patch):
    patch.setattr(build.Job, "copied", [])


def scale_expert_gradients_by_the_degree(patch):
    """As where FSDP averages over the ranks of experts alone."""

    def compute(experts, x_MD, ends_E):
        own = [weight.to_local() for weight in (experts.w1, experts.w2, experts.w3)]
        for weight in own:
            if weight.requires_grad:
                weight.register_hook(lambda gradient: gradient * dist.get_world_size())
        return experts.compute(x_MD, ends_E, *own)

    patch.setattr(expert, "_own_experts", compute)


def count_tokens_where_they_are_recomputed(patch):
    """In the block, that is."""
    original = MixtureOfExperts.forward

    def forward(self, x_BTD):
        def count(router, args, found):
            self.load += found[2]

        hook = self.router.register_forward_hook(count)
        y_BTD, load = original(self, x_BTD)
        hook.remove()
        return y_BTD, torch.zeros_like(load)

    patch.setattr(MixtureOfExperts, "forward", forward)


def weigh_experts_by_the_bias_too(patch):
    original = Router.route

    def route(self, x_BTD, weight_ED):
        ids_NK, weights_NK, load = original(self, x_BTD, weight_ED)
        return ids_NK, weights_NK + self.bias[ids_NK], load

    patch.setattr(Router, "route", route)


def leave_experts_out_of_the_norm(patch):
    original = Gradients.squared_norms

    def squared_norms(self):
        is_dense = [parameter.dim() < 3 for parameter in self._parameters]
        return original(self) * torch.tensor(is_dense, device=self._device)

    patch.setattr(Gradients, "squared_norms", squared_norms)


def lose_a_token_at_its_expert(patch):
    """The first row that comes to a rank, where one comes."""
    original = expert.AllToAllDispatch.forward

    def forward(self, x_ND, ids_NK, counts_E, experts):
        def most(rows_MD, ends_E):
            return experts(rows_MD * (torch.arange(len(rows_MD)) > 0)[:, None], ends_E)

        return original(self, x_ND, ids_NK, counts_E, experts if dist.get_rank() else most)

    patch.setattr(expert.AllToAllDispatch, "forward", forward)


def halve_the_balance_loss(patch):
    original = build.set_up_balance

    def set_up_balance(part, config, sequences):
        original(part, config, sequences)
        for module in part.modules():
            if isinstance(module, Router):
                module.aux_scale /= 2

    patch.setattr(build, "set_up_balance", set_up_balance)


def repeat_the_second_epoch(patch):
    """Every epoch from the second on has one order."""
    original = Order.places

    def places(self, sample_ids):
        return original(self, [number % self.size + self.size * (number >= self.size) for number in sample_ids])

    patch.setattr(Order, "places", places)


def decay_head_norms(patch):
    decay(patch, ("q_norm.weight", "k_norm.weight"))


def decay_norms(patch):
    """Of a norm with 1 + weight, too, the weight moves towards 0."""
    decay(patch, "norm.weight")


def decay(patch, ends):
    original = optimizers.decay_class

    def decay_class(name, *args):
        return "decayed" if name.endswith(ends) else original(name, *args)

    patch.setattr(optimizers, "decay_class", decay_class)


def shrink_a_partial_batch(patch):
    """By its real rows over all its rows."""
    original = Accumulation.forward_backward

    def forward_backward(self, batch, valid_tokens):
        real = sum(number >= 0 for number in batch.sample_ids)
        return original(self, batch, valid_tokens * len(batch) / real)

    patch.setattr(Accumulation, "forward_backward", forward_backward)


def count_unlabelled_tokens_of_validation(patch):
    """Half of them."""
    original = loop.evaluate

    def evaluate(*args):
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(
                step, "count_valid", lambda labels: count_valid(labels) + (labels == IGNORE_INDEX).sum() / 2
            )
            return original(*args)

    patch.setattr(loop, "evaluate", evaluate)


def forget_rslora_in_an_export(patch):
    original = peft_out.adapter_config
    patch.setattr(peft_out, "adapter_config", lambda *args: original(*args) | {"use_rslora": False})


def add_the_bias_on_each_rank(patch):
    """Before the sum over ranks."""

    def rows(linear, x_BTD):
        y_BTD = plus(linear.multiply(x_BTD, linear.weight.to_local()), tensor._bias(linear))
        return tensor._scatter_sequence(y_BTD, linear.weight.device_mesh)

    patch.setitem(tensor.STYLES, "rowwise", (*tensor.STYLES["rowwise"][:2], rows))


def widen_windows_by_one(patch):
    original = DocumentMask.forward

    def forward(self, positions_BT, ends_BM, window):
        return original(self, positions_BT, ends_BM, window and window + 1)

    patch.setattr(DocumentMask, "forward", forward)


def take_one_base_of_positions(patch):
    original = decoder.rotary_frequencies
    patch.setattr(decoder, "rotary_frequencies", lambda rope, device: original(replace(rope, theta=1e6), device))


def leave_out_the_factor_of_yarn(patch):
    patch.setattr(YarnScaling, "magnitude", 1.0)


def bound_scores_after_the_mask(patch):
    """What the mask hides is then bounded like any score, and seen."""

    def attention(q, k, v, mask, scale, softcap):
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * scale
        probabilities = softcapped(scores.masked_fill(~mask, -torch.inf), softcap).softmax(-1)
        return probabilities @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    patch.setattr(attention_kernels, "_softcapped_attention", attention)


# what is broken on one device, and a family of tests/parity/test_families.py where it matters
OF_FAMILIES = [
    (widen_windows_by_one, "mistral_window"),
    (take_one_base_of_positions, "gemma3"),
    (leave_out_the_factor_of_yarn, "llama_yarn"),
    (bound_scores_after_the_mask, "gemma2"),
]
QWEN3_MOE = ("--model.name", "qwen3_moe")
SIGMOID_MOE = ("--model.flavor", "small", "--model.name", "sigmoid_moe")
O_BIAS = ("--model.words", '{"o_bias": true}')
BFLOAT16 = ("--training.mixed_precision_param", "bfloat16")
ONE_KEY_VALUE_HEAD = ("--model.num_kv_heads", "1")

# what is broken, a layout where it matters, further flags
MUTATIONS = [
    (scale_gradients_by_microbatches, "accum2", ()),
    (average_microbatches, "accum4", ()),
    (synchronise_only_the_last_microbatch, "fsdp2_accum2", ()),
    (divide_by_local_tokens, "fsdp2", ()),
    (scatter_without_summing, "fsdp2", ()),
    (skip_all_reduce_of_gradients, "ddp2", ()),
    (count_replicas_twice, "ddp2", ()),
    (unmask_one_rank, "fsdp2", ()),
    (start_one_sample_late, "fsdp2", ()),
    (on_last_rank(shift_labels), "fsdp2", ()),
    (skip_the_update_of_one_rank, "fsdp2", ()),
    (clip_nowhere_but_on_rank_0, "fsdp2", ()),
    (leave_norms_unsummed, "tp2", ()),
    (add_the_bias_on_each_rank, "tp2", O_BIAS),
    (leave_replicated_heads_unsummed, "tp2", ONE_KEY_VALUE_HEAD),
    (count_positions_on_each_rank, "cp2", ()),
    (count_positions_on_each_rank, "cp2", BFLOAT16),
    (on_last_rank(shift_positions), "cp2", ()),
    (on_last_rank(shift_labels), "cp2", ()),
    (keep_key_gradients_to_oneself, "cp2", ()),
    (let_the_pipeline_scale_gradients, "pp2", ()),
    (drop_a_layer, "pp2", ("--model.num_layers", "4")),
    (bypass_a_stage, "pp2+interleave_1f1b", ("--model.num_layers", "4")),
    (forget_a_stage_in_the_norm, "pp2", ()),
    (clip_by_the_norm_of_one_stage, "pp2", ()),
    (average_the_copies_of_a_tied_weight, "pp2", TIED),
    (count_both_copies_of_a_tied_weight, "pp2", TIED),
    (scale_expert_gradients_by_the_degree, "fsdp2_ep2", QWEN3_MOE),
    (weigh_experts_by_the_bias_too, "fsdp2", SIGMOID_MOE),
    (leave_experts_out_of_the_norm, "fsdp2_ep2", QWEN3_MOE),
    (lose_a_token_at_its_expert, "fsdp2_ep2", QWEN3_MOE),
]
# what is broken on one device, and a case of tests/oracle where it matters
ON_ONE_DEVICE = [
    (halve_the_balance_loss, "experts"),
    (repeat_the_second_epoch, "three_epochs"),
    (decay_head_norms, "head_norms"),
    (decay_norms, "documents"),
    (shrink_a_partial_batch, "last_partial_batch"),
    (count_unlabelled_tokens_of_validation, "validation"),
]
NAMES = ["-".join((mutate.__qualname__.split(".")[0], layout, *flags[-1:])) for mutate, layout, flags in MUTATIONS]


def planted(number, work, placement):
    """``work`` as one rank, with a mutation planted while it runs."""
    with_fault(MUTATIONS[number][0], work, placement)


def with_fault(mutate, work, placement):
    """As ``planted``, with a mutation that has a name of its own here; gives what ``work`` gives."""
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        return work(placement)
