"""A model whose layers several processes of this host share."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from crius.checkpoint.load import load_tensors
from crius.config.layout import Layout
from crius.interop.weights import open_weights
from crius.launch.environment import Placement
from crius.launch.local import run_workers
from crius.models.decoder import Decoder
from crius.models.description import ModelDescription
from crius.parallel.mesh import build_mesh
from crius.parallel.runtime import pick_device, world
from crius.parallel.tensor import apply_tensor_parallel
from crius.tools.generate.run import answer, answer_all
from crius.tools.generate.settings import Prompt, Settings
from crius.tools.generate.source import read_source

_TIMEOUT_SECONDS = 600


def run_split(path: str, prompts: Sequence[Prompt], settings: Settings, started: float, *, as_json: bool) -> int:
    """Answer ``prompts`` in ``settings.ranks`` workers; the first one prints. Returns the exit code.

    Args:
        path: run, checkpoint or Hugging Face folder.
        prompts: prompts of the command.
        settings: settings that were checked.
        started: ``time.monotonic()`` at the start of the command.
        as_json: print a line of JSON for each prompt.
    """
    with TemporaryDirectory() as folder:
        job = functools.partial(_rank, path, tuple(prompts), settings, started, as_json)
        return run_workers(job, settings.ranks, Path(folder))


def _rank(
    path: str, prompts: Sequence[Prompt], settings: Settings, started: float, as_json: bool, placement: Placement
) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    device = pick_device(settings.device, placement.local_rank, flag="--device")
    with world(placement.rank, placement.world_size, device, placement.rendezvous, _TIMEOUT_SECONDS):
        mesh = build_mesh(Layout(tp=settings.ranks), device.type).tp

        def split(model: Decoder, facts: ModelDescription) -> None:
            apply_tensor_parallel(model, facts.plan, facts.num_kv_heads, mesh)  # type: ignore[arg-type]  # ranks > 1

        source = read_source(open_weights(path), settings, placement.local_rank, split, load_tensors)
        if placement.rank == 0:
            answer_all(source, prompts, settings, started, as_json=as_json)
            return
        for first in range(0, len(prompts), settings.batch_size):
            answer(source, prompts[first : first + settings.batch_size], settings, first=first)
