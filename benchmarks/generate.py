"""Greedy tokens per second, Crius against transformers: same random weights of SmolLM2-135M's shape, float32, eager.

    .venv/bin/python benchmarks/generate.py --rounds 7 --out generate.json

Both generate the same tokens from the same prompts, in turns; each turn times both of transformers' caches and Crius.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from crius.kernels import choice
from crius.kernels.cpu.linear import store_by_columns
from crius.models import registry
from crius.models.config import DecoderConfig
from crius.models.decode import generate
from crius.models.huggingface import config_of
from crius.models.layers import Linear
from crius.models.llama3 import HF, Llama3Config
from crius.models.rope import rope_scaling_text
from crius.models.spec import ModelSpec

SHAPE = Llama3Config(
    dim=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, ffn_dim=1536, vocab_size=49_152,
    rope_theta=1e5, norm_eps=1e-5, tied_embeddings=True,
)  # fmt: skip


def build_ours(config: DecoderConfig) -> torch.nn.Module:
    spec = ModelSpec(name="llama3", flavors={"here": config})
    model = registry.build(spec.describe("here"))
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.04) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    return model.requires_grad_(False)


def build_theirs(ours: torch.nn.Module, config: DecoderConfig) -> LlamaForCausalLM:
    told = config_of(HF, vars(config) | {"rope_scaling": rope_scaling_text(config.rope_scaling)})
    theirs = LlamaForCausalLM(LlamaConfig.from_dict(told | {"max_position_embeddings": 8192})).eval()
    weights = {HF.translated(name): weight for name, weight in ours.named_parameters()}
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return theirs


def run_ours(model: torch.nn.Module, prompts: torch.Tensor, count: int) -> list[list[int]]:
    steps = generate(model, prompts.tolist(), lambda logits: logits.argmax(-1), max_new_tokens=count)
    return torch.stack([step.ids_B for step in steps], 1).tolist()


def run_theirs(model: LlamaForCausalLM, prompts: torch.Tensor, count: int, cache: str) -> list[list[int]]:
    kind = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    ids = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=count, min_new_tokens=count,
        pad_token_id=0, eos_token_id=None, **kind,
    )  # fmt: skip
    return ids[:, prompts.shape[1] :].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    choice.apply(choice.resolve("auto", "torch", "auto", device_type="cpu"))  # as crius generate does
    print("kernels:", choice.current())
    ours = build_ours(SHAPE)
    theirs = build_theirs(ours, SHAPE)
    store_by_columns(module.weight for module in ours.modules() if isinstance(module, Linear))  # as crius generate does
    results = []
    for batch in map(int, args.batches.split(",")):
        prompts = torch.randint(0, SHAPE.vocab_size, (batch, args.prompt), generator=torch.Generator().manual_seed(1))
        contestants = {
            "crius": lambda prompts=prompts: run_ours(ours, prompts, args.tokens),
            "dynamic": lambda prompts=prompts: run_theirs(theirs, prompts, args.tokens, "dynamic"),
            "static": lambda prompts=prompts: run_theirs(theirs, prompts, args.tokens, "static"),
        }
        seconds = {name: [] for name in contestants}
        cpu = {name: [] for name in contestants}
        tokens = {}
        for turn in range(-1, args.rounds):  # the first one warms up
            for name in (list(contestants), list(reversed(contestants)))[turn % 2]:
                wall_began, cpu_began = time.perf_counter(), time.process_time()
                tokens[name] = contestants[name]()
                if turn >= 0:
                    seconds[name].append(time.perf_counter() - wall_began)
                    cpu[name].append(time.process_time() - cpu_began)
        same = tokens["crius"] == tokens["dynamic"] == tokens["static"]
        row = {"batch": batch, "same_tokens": same, "seconds": seconds, "cpu_seconds": cpu}
        for what, times in (("seconds", seconds), ("cpu_seconds", cpu)):
            best = min(("dynamic", "static"), key=lambda name: statistics.median(times[name]))
            ratios = sorted(a / b for a, b in zip(times[best], times["crius"], strict=True))
            row[f"ratio_{what}"] = statistics.median(ratios)
            print(
                f"batch {batch}, {what}: crius {statistics.median(times['crius']):.3f}, "
                f"best cache of transformers ({best}) {statistics.median(times[best]):.3f}: "
                f"{statistics.median(ratios):.2f} x (rounds {ratios[0]:.2f} to {ratios[-1]:.2f}), same tokens {same}"
            )
        results.append(row)
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
