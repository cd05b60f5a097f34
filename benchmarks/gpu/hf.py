"""Hugging Face's Llama, with Liger's kernels if asked, as a contestant beside Crius on one device.

    python -m benchmarks.gpu.hf [--liger] -- FLAGS OF CRIUS TRAIN

As the Trainer's ``bf16=True`` has it: autocast over float32 weights, SDPA, fused AdamW, eager.
"""

import argparse
import sys
from typing import Any

import torch

from benchmarks.gpu import contestants
from benchmarks.parts import batches
from crius.config.run import RunConfig
from crius.models import registry
from crius.parallel.runtime import pick_device
from crius.train.inputs import describe_model


def build(config: RunConfig, device: torch.device) -> Any:
    """``LlamaForCausalLM`` of the sizes of ``config``, with Crius's weights in float32."""
    import transformers  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    facts = describe_model(config).config
    weights = contestants.start_weights(config, device)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(hf_config(transformers, facts, config.training.seq_len))
    model.to_empty(device=device)
    model.tie_weights()
    with torch.device(device):  # its frequencies are buffers, which to_empty leaves undefined
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    names = registry.SPECS[config.model.name].hf.names
    contestants.copy_weights({hf_name(names, n): w for n, w in weights.items()}, dict(model.named_parameters()))
    model.train()
    return model


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


def main(argv: list[str]) -> int:
    """Take part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.hf")
    parser.add_argument("--liger", action="store_true", help="with Liger's kernels, whose loss writes no logits")
    options, config = contestants.options_of(parser, argv)
    if options.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama  # noqa: PLC0415

        apply_liger_kernel_to_llama(
            rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=True
        )
    device = pick_device(config.training.device, 0)
    channel = contestants.PeakChannel(device)
    model = build(config, device)
    parameters = list(model.parameters())
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        parameters,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    turns = contestants.turns_of(config, device, channel, options.warmup)
    dtype = getattr(torch, config.training.mixed_precision_param)
    prefetch = config.data.prefetch
    for host_batch in batches(config, 10**6, prefetch=prefetch, pin_memory=device.type == "cuda"):
        batch = host_batch.to(device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            # labels that are shifted already: the model's own shift would lose a token
            output = model(
                input_ids=batch.tokens_BT, labels=batch.labels_BT, shift_labels=batch.labels_BT, use_cache=False
            )
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, config.training.max_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not turns.after_step(output.loss.detach()):
            break
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
