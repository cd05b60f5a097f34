"""A plain PyTorch loop over the same model, weights, batches and optimizer: what a step costs without a framework."""

import functools
from pathlib import Path

import torch
from torch import Tensor, nn

from crius.config.resolve import BatchSizes
from crius.config.run import RunConfig
from crius.data.loader import BatchLoader
from crius.errors import ConfigError
from crius.launch.environment import Placement, single_placement
from crius.launch.local import run_single
from crius.models import registry
from crius.optim.build import WarmupStableDecay, build_optimizer
from crius.parallel.compile import compile_blocks
from crius.parallel.init import allocate, init_parameters, init_rules
from crius.tools.bench.contestant import Channel, Turns
from crius.tools.bench.train_job import run_facts, wait_for
from crius.train.build import choose_loss, set_up_loss
from crius.train.inputs import describe_model, open_run_corpus, run_batch_sizes
from crius.train.job import set_up_torch


def check_bare(config: RunConfig, num_ranks: int) -> None:
    """Raise ConfigError where a plain loop of this kind would not compute what ``config`` asks for."""
    training, dense = config.training, config.quantize.dense
    asked = {
        f"{num_ranks} ranks": num_ranks > 1,
        f"training.mixed_precision_param {training.mixed_precision_param}": training.mixed_precision_param
        != training.dtype,
        "training.enable_cpu_offload": training.enable_cpu_offload,
        "training.reproducible": training.reproducible,
        f"activation_checkpoint.mode {config.activation_checkpoint.mode}": config.activation_checkpoint.mode != "none",
        f"optimizer.name {config.optimizer.name}": config.optimizer.name != "adamw",
        f"optimizer.state_dtype {config.optimizer.state_dtype}": config.optimizer.state_dtype != "float32",
        "quantize.dense": dense.float8.enable or dense.mxfp8.enable,
        f"model.attention_mask {config.model.attention_mask}": config.model.attention_mask != "causal",
    }
    if found := ", ".join(name for name, is_asked in asked.items() if is_asked):
        raise ConfigError(
            f"the bare loop has no {found}.",
            where="--overhead",
            why="it is the model, AdamW and nothing else, on one device in one precision",
            fix=f"set {training.dtype} and the defaults for these, or leave out --overhead",
        )


def bare_loop(config: RunConfig, run_dir: Path, warmup: int) -> int:
    """Train in turns without ``crius.train``'s loop: forward, backward, clipping, AdamW, on batches that lie ready.

    The model, its kernels and its compilation are those of the run. There is no FSDP, no guard, no report.

    Args:
        config: the run, see ``check_bare``; as many batches as it has steps are read before the first.
        run_dir: folder of the logs.
        warmup: steps before the contestant is ready.

    Returns:
        The exit code.
    """
    return run_single(functools.partial(_run, config, warmup, Channel()), single_placement(), run_dir)


def _run(config: RunConfig, warmup: int, channel: Channel, placement: Placement) -> None:
    device = set_up_torch(config, placement)
    sizes = run_batch_sizes(config, 1)
    batches = _batches(config, sizes, device)
    model = _model(config, device)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, schedule = _adamw(config, model), WarmupStableDecay(config.lr_scheduler, config.training.steps)
    set_up_loss(model, choose_loss(config, describe_model(config), device.type), config)
    tokens = sizes.total * config.training.seq_len  # all of them count: only validation is padded
    turns = Turns(channel, warmup, run_facts(config, device, 1, tokens), settle=functools.partial(wait_for, device))
    done: list[Tensor] = []

    def losses() -> list[tuple[int, float]]:
        first = step - len(done) + 1
        found = [(first + index, loss.item()) for index, loss in enumerate(done)]
        done.clear()
        return found

    step = 0
    for step, microbatches in enumerate(batches, start=1):
        total = torch.zeros((), dtype=torch.float64, device=device)
        for inputs, labels in microbatches:
            loss = model(inputs, labels_BT=labels) / tokens
            loss.backward()
            total += loss.detach()
        if config.training.max_norm > 0:
            torch.nn.utils.clip_grad_norm_(parameters, config.training.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * schedule.factor(step - 1)
        optimizer.step()
        optimizer.zero_grad()
        done.append(total)
        if not turns.after_step(losses):
            return


def _batches(config: RunConfig, sizes: BatchSizes, device: torch.device) -> list[list[tuple[Tensor, Tensor]]]:
    """Tokens and labels ``(B, T)`` of all microbatches of all steps."""
    loader = BatchLoader(
        open_run_corpus(config, 1).train, global_batch_size=sizes.total, rank=0, num_ranks=1, prefetch=0
    )
    steps = [next(loader).to(device) for _ in range(config.training.steps)]
    loader.close()
    return [[(part.tokens_BT, part.labels_BT) for part in batch.microbatches(sizes.local)] for batch in steps]


def _model(config: RunConfig, device: torch.device) -> nn.Module:
    facts = describe_model(config)
    with torch.device("meta"):
        model = registry.build(facts)
    model = model.to(getattr(torch, config.training.dtype))
    allocate(model, device)
    init_parameters(model, init_rules(facts), config.debug.seed)
    if config.compile.enable:
        compile_blocks(model, facts.plan, config.compile)
    return model


def _adamw(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """torch's own, with the groups of the run; ``peak`` of a group is what its learning rate is a share of."""
    plan = describe_model(config).plan
    built = build_optimizer(model.named_parameters(), plan, config.optimizer, seed=config.debug.seed)
    groups = [
        {"params": group["params"], "weight_decay": group["weight_decay"], "peak": group["lr"]}
        for group in built.param_groups
    ]
    how = {"foreach": config.optimizer.implementation == "foreach", "fused": config.optimizer.implementation == "fused"}
    betas = (config.optimizer.beta1, config.optimizer.beta2)
    return torch.optim.AdamW(groups, betas=betas, eps=config.optimizer.eps, **how)
