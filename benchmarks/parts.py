"""Parts of a run that its peers need too: its first weights, its batches, and facts for the driver."""

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from crius.config.run import RunConfig
from crius.data.loader import Batch, BatchLoader
from crius.metrics.device import peak_tflops
from crius.models import registry
from crius.parallel.allocate import allocate
from crius.parallel.init import init_parameters, init_rules
from crius.tools.bench.machine import BenchMachine
from crius.train.inputs import describe_model, open_run_corpus, run_batch_sizes


def first_model(config: RunConfig, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model with the weights that Crius starts ``config`` with."""
    facts = describe_model(config)
    with torch.device("meta"):
        model = registry.build(facts)
    model = model.to(dtype)
    allocate(model, device)
    init_parameters(model, init_rules(facts), config.debug.seed)
    return model


def batches(config: RunConfig, steps: int, *, prefetch: int = 0, pin_memory: bool = False) -> Iterator[Batch]:
    """Batches of the first ``steps`` steps on the host, in the order of a run; one rank reads all of them."""
    loader = BatchLoader(
        open_run_corpus(config, 1).train,
        global_batch_size=run_batch_sizes(config, 1).total,
        rank=0,
        num_ranks=1,
        prefetch=prefetch,
        pin_memory=pin_memory,
    )
    for _ in range(steps):
        yield next(loader)
    loader.close()


def run_facts(config: RunConfig, device: torch.device, num_ranks: int, tokens_per_step: int) -> dict[str, Any]:
    """Facts about a run that the driver needs to turn its times into rates."""
    facts = describe_model(config)
    return {
        "machine": BenchMachine.of(device).as_dict(),
        "threads_environ": os.environ.get("OMP_NUM_THREADS", ""),
        "num_ranks": num_ranks,
        "tokens_per_step": tokens_per_step,
        "parameters": facts.num_parameters,
        "flops_per_token": facts.flops_per_token((config.training.seq_len + 1) / 2),
        "peak_tflops": config.metrics.peak_tflops or peak_tflops(device),
    }
