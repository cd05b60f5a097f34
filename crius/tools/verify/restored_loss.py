"""The loss of a checkpoint that is restored in this process, on the CPU: a rehearsal of ``--checkpoint.rehearse``."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from crius.checkpoint.folder import damages, read_manifest
from crius.checkpoint.whereabouts import find_checkpoints
from crius.data.loader import IGNORE_INDEX
from crius.errors import CheckpointError, CriusError, EnvironmentError
from crius.host import free_host_bytes, usable_cores
from crius.interop.weights import open_weights
from crius.launch.stop import ask_for_signal
from crius.tools.generate.source import build_decoder, choose_kernels
from crius.units import GIB
from crius.untrusted import parse_json


def main() -> None:
    """Restore the checkpoint that the standard input names, and print the result as JSON."""
    ask_for_signal(signal.SIGKILL)  # when the rank ends
    os.nice(19)
    with contextlib.suppress(OSError):  # if memory runs out, this process ends and not the run
        Path("/proc/self/oom_score_adj").write_text("1000")
    torch.set_num_threads(max(1, usable_cores() // 4))
    began = time.monotonic()
    asked = parse_json(sys.stdin.read())
    loss = None
    try:
        loss = restored_loss(asked)
        problem = ""
        if not abs(loss - asked["loss"]) <= asked["tolerance"] * abs(asked["loss"]):
            problem = f"the loss of its batch is {loss:.6f}, in the run it was {asked['loss']:.6f}"
    except CriusError as error:
        problem = error.what
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps({"loss": loss, "seconds": time.monotonic() - began, "problem": problem}))


def restored_loss(asked: Mapping[str, Any]) -> float:
    """Mean loss, in nats, of a batch with the weights of a checkpoint, every byte of which was compared with its hash.

    Args:
        asked: path of the checkpoint, and ``tokens``, ``positions`` and ``labels``, each ``(B, T)``.

    Raises:
        CheckpointError: the checkpoint is damaged.
        EnvironmentError: the host has too little memory for the model.
    """
    path = asked["path"]
    place = find_checkpoints(path)
    for damage in damages(place.folder.disk, place.name, read_manifest(place.folder.disk, place.name)):
        raise CheckpointError(f"{damage}.", where=path)
    weights = open_weights(path)
    needed = 4 * weights.facts.num_parameters
    free = free_host_bytes()
    if needed > free:
        raise EnvironmentError(f"its weights take {needed / GIB:.1f} GiB of host memory, {free / GIB:.1f} are free.")
    device = torch.device("cpu")
    choose_kernels(device, "auto")
    model = build_decoder(weights, "float32", device)
    labels_BT = torch.tensor(asked["labels"])
    total = model(torch.tensor(asked["tokens"]), torch.tensor(asked["positions"]), labels_BT)
    return float(total) / int((labels_BT != IGNORE_INDEX).sum())


if __name__ == "__main__":
    main()
