"""A contestant beside Crius in the GPU suite: torchtitan's mathematics, or Hugging Face's Llama, on one device.

    python benchmarks/gpu_contestant.py titan [--attention flex] -- FLAGS OF CRIUS TRAIN

They have the sizes, the initial weights, the tokens and the learning rate of the flags, and answer to
``crius.tools.bench.turns``.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peers import titan_math
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from crius.cli.settings import run_of
from crius.config.run import RunConfig
from crius.data.loader import BatchLoader
from crius.models import registry
from crius.parallel.init import init_parameters, init_rules
from crius.parallel.runtime import pick_device, world
from crius.tools.bench.contestant import Channel, Turns
from crius.tools.bench.machine import wait_for
from crius.tools.bench.train_job import run_facts
from crius.train.inputs import describe_model, open_run_corpus, run_batch_sizes
from crius.units import GIB


def start_weights(config: RunConfig, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """The weights that Crius starts ``config`` with, by name, and its rotary frequencies."""
    facts = describe_model(config)
    with torch.device("meta"):
        model = registry.build(facts)
    model.to_empty(device=device)
    if facts.tied_embeddings:  # to_empty makes two of a tied weight
        model.output.weight = model.tok_embeddings.weight
    with torch.no_grad():
        init_parameters(model, init_rules(facts), config.debug.seed)
    return dict(model.named_parameters()), model.frequencies(device)


def batches(config: RunConfig, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels of each step, prepared by Crius's loader while the device works."""
    loader = BatchLoader(
        open_run_corpus(config, 1).train,
        global_batch_size=run_batch_sizes(config, 1).total,
        rank=0,
        num_ranks=1,
        prefetch=config.data.prefetch,
        pin_memory=device.type == "cuda",
    )
    for batch in loader:
        placed = batch.to(device)
        yield placed.tokens_BT, placed.labels_BT


def titan(
    config: RunConfig, device: torch.device, options: titan_math.Options
) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """The model of ``titan_math``, and what computes loss and gradients of a batch."""
    facts = describe_model(config).config
    weights, frequencies = start_weights(config, device)
    with torch.device("meta"):
        model = titan_math.Llama(facts, frequencies, config.training.seq_len, options)
    # strict False: a tied weight comes once
    model.load_state_dict(titan_math.from_halves(weights, facts), strict=False, assign=True)
    if facts.tied_embeddings:
        model.output.weight = model.tok_embeddings.weight
    check_weights(model)
    param_dtype = getattr(torch, config.training.mixed_precision_param)
    titan_math.prepare(model, options, param_dtype, init_device_mesh(device.type, (1,)))
    loss_of = titan_math.loss_function(options)

    def forward_backward(tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        with titan_math.kernels(device):
            return titan_math.forward_backward(model, tokens_BT, labels_BT, loss_of, options)

    return model, forward_backward


def check_weights(model: nn.Module) -> None:
    """See that every parameter has got its weights."""
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise RuntimeError(f"no weights for {', '.join(missing)}")


def hugging_face(
    config: RunConfig, device: torch.device, recompute: bool
) -> tuple[nn.Module, Callable[[Tensor, Tensor], Tensor]]:
    """``LlamaForCausalLM`` with SDPA under autocast, its weights in float32, as the Trainer's ``bf16=True`` has it."""
    import transformers  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    facts = describe_model(config).config
    weights, _ = start_weights(config, device)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(hf_config(transformers, facts, config.training.seq_len))
    model.to_empty(device=device)
    model.tie_weights()
    with torch.device(device):  # its frequencies are buffers, which to_empty leaves undefined
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    names = registry.SPECS[config.model.name].hf.names
    with torch.no_grad():
        theirs = dict(model.named_parameters())
        for name, weight in weights.items():
            theirs.pop(hf_name(names, name)).copy_(weight)
    if theirs:
        raise RuntimeError(f"no weights for {', '.join(theirs)}")
    model.train()
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    param_dtype = getattr(torch, config.training.mixed_precision_param)

    def forward_backward(tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        with torch.autocast(device.type, param_dtype, enabled=param_dtype != torch.float32):
            # labels that are shifted already: the model's own shift would lose a token
            loss = model(input_ids=tokens_BT, labels=labels_BT, shift_labels=labels_BT, use_cache=False).loss
        loss.backward()
        return loss.detach()

    return model, forward_backward


def hf_config(transformers: Any, facts: Any, num_tokens: int) -> Any:
    """``LlamaConfig`` of the sizes ``facts``."""
    rope = {"rope_theta": facts.rope_theta, "rope_type": "default"}
    if scaling := facts.rope_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    return transformers.LlamaConfig(
        vocab_size=facts.vocab_size,
        hidden_size=facts.dim,
        intermediate_size=facts.ffn_dim,
        num_hidden_layers=facts.num_layers,
        num_attention_heads=facts.num_heads,
        num_key_value_heads=facts.num_kv_heads,
        max_position_embeddings=max(num_tokens, 131_072),
        rms_norm_eps=facts.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=facts.tied_embeddings,
        attn_implementation="sdpa",
    )


def hf_name(names: Any, name: str) -> str:
    """Hugging Face's name of a parameter: a row's ``*`` is the layer's number."""
    number = next((part for part in name.split(".") if part.isdigit()), "")
    return names[name.replace(f".{number}.", ".*.")].replace("*", number)


def train(config: RunConfig, device: torch.device, model: nn.Module, step: Callable, warmup: int) -> None:
    """Steps in turns until the driver has enough."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings, sizes = config.optimizer, run_batch_sizes(config, 1)
    optimizer = torch.optim.AdamW(
        parameters,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    facts = run_facts(config, device, 1, sizes.total * config.training.seq_len)
    turns = Turns(PeakChannel(Channel(), device), warmup, facts, lambda: wait_for(device))
    losses: list[tuple[int, Tensor]] = []
    for number, (tokens_BT, labels_BT) in enumerate(batches(config, device), start=1):
        losses.append((number, step(tokens_BT, labels_BT)))
        torch.nn.utils.clip_grad_norm_(parameters, config.training.max_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not turns.after_step(lambda: [(step, loss.item()) for step, loss in drained(losses)]):
            return


def drained(items: list) -> list:
    """What is in ``items``, which is empty afterwards."""
    taken, items[:] = list(items), []
    return taken


class PeakChannel:
    """A ``Channel`` that adds the peak memory of a GPU to its answers."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self._channel, self._device = channel, device

    def answer(self, words: dict[str, Any]) -> None:
        """See ``Channel``."""
        peak = torch.cuda.max_memory_allocated(self._device) / GIB if self._device.type == "cuda" else 0.0
        self._channel.answer({**words, "peak_gib": peak})

    def order(self) -> int:
        """See ``Channel``."""
        return self._channel.order()


def options_of(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The contestant's own options, and the flags of Crius behind ``--``."""
    own = list(itertools.takewhile(lambda part: part != "--", argv))
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("titan", "hf"))
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--attention", choices=("sdpa", "flex"), default="sdpa")
    parser.add_argument("--loss", choices=("chunks", "whole"), default="chunks")
    parser.add_argument("--backend", default="inductor", help="of torch.compile; empty: eager")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--float8", default="", help="recipe of torchao's float8 training")
    return parser.parse_args(own), argv[len(own) + 1 :]


def main(argv: list[str]) -> int:
    """Take part."""
    options, flags = options_of(argv)
    config = run_of(*flags)
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    device = pick_device(config.training.device, 0)
    with world(0, 1, device, "", config.comm.timeout_seconds):
        if options.kind == "hf":
            model, step = hugging_face(config, device, options.recompute)
        else:
            names = ("attention", "loss", "backend", "recompute", "float8")
            chosen = titan_math.Options(**{name: getattr(options, name) for name in names})
            model, step = titan(config, device, chosen)
        train(config, device, model, step, options.warmup)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
