"""Requests scored per second, Crius against a plain loop of transformers: the same weights, tokens, threads, float32.

    .venv/bin/python benchmarks/evaluate.py smol hf --documents 40 --rounds 5 --out evaluate.json

``smol`` is what ``crius import`` made of a model, ``hf`` what ``crius export`` made of that. The loop of transformers
runs in two forms, one request at a time, and sorted by length in padded batches of as many tokens as Crius takes; the
better one counts. All three run in turns, and their log-probabilities are compared.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from crius.tools.evaluate.encode import TokenRow
from crius.tools.evaluate.run import open_model, score_groups
from crius.tools.evaluate.settings import EvaluateSettings
from crius.tools.evaluate.tasks import read_tasks


@torch.inference_mode()
def run_theirs(model: torch.nn.Module, rows: list[TokenRow], batch_tokens: int) -> list[float]:
    """Log-probabilities of ``rows``, in batches of at most ``batch_tokens`` with their padding; 1: one at a time."""
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number].tokens))
    found = [0.0] * len(rows)
    while order:
        longest = len(rows[order[0]].tokens)
        batch, order = order[: max(1, batch_tokens // longest)], order[max(1, batch_tokens // longest) :]
        sizes = [len(rows[number].tokens) for number in batch]
        ids = torch.tensor([[*rows[n].tokens, *[0] * (longest - size)] for n, size in zip(batch, sizes, strict=True)])
        mask = torch.tensor([[1] * size + [0] * (longest - size) for size in sizes])
        log_probs = model(ids, attention_mask=mask).logits.log_softmax(-1)
        for place, (number, size) in enumerate(zip(batch, sizes, strict=True)):
            targets = torch.tensor(rows[number].targets)
            mine = log_probs[place, size - len(targets) : size].gather(1, targets[:, None])
            found[number] = float(mine.double().sum())
    return found


def run_ours(source: object, groups: list[list[TokenRow]], batch_tokens: int) -> list[float]:
    """The same by Crius, for the rows of each document."""
    found: dict[int, list[float]] = {}
    score_groups(source, groups, batch_tokens, lambda n, scores: found.update({n: [one.log_prob for one in scores]}))
    return [log_prob for number in range(len(groups)) for log_prob in found[number]]


def main() -> None:
    """Time and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="for crius evaluate")
    parser.add_argument("folder", help="of transformers, with the same weights")
    parser.add_argument("--task", default="piqa")
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--batch_tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    source, encoder = open_model(args.source, EvaluateSettings())
    theirs = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32)
    [task] = read_tasks([args.task], args.documents)
    groups = [
        [row for request in document.requests for row in encoder.rows(request, task.kind, "")]
        for document in task.documents
    ]
    rows = [row for group in groups for row in group]
    contestants = {
        "crius": lambda: run_ours(source, groups, args.batch_tokens),
        "one at a time": lambda: run_theirs(theirs, rows, 1),
        "batches": lambda: run_theirs(theirs, rows, args.batch_tokens),
    }
    times: dict[str, dict[str, list[float]]] = {what: {name: [] for name in contestants} for what in ("wall", "cpu")}
    found: dict[str, list[float]] = {}
    for turn in range(-1, args.rounds):  # the first one warms up
        for name in (list(contestants), list(reversed(contestants)))[turn % 2]:
            wall, cpu = time.perf_counter(), time.process_time()
            found[name] = contestants[name]()
            if turn >= 0:
                times["wall"][name].append(time.perf_counter() - wall)
                times["cpu"][name].append(time.process_time() - cpu)
    apart = max(abs(a - b) for a, b in zip(found["crius"], found["one at a time"], strict=True))
    print(f"{task.name}, {len(rows)} requests; log-probabilities at most {apart:.1e} apart")
    ratios = {}
    for what, seconds in times.items():
        best = min((name for name in seconds if name != "crius"), key=lambda name: statistics.median(seconds[name]))
        each = sorted(a / b for a, b in zip(seconds[best], seconds["crius"], strict=True))
        ratios[what] = statistics.median(each)
        medians = ", ".join(f"{name} {statistics.median(taken):.2f} s" for name, taken in seconds.items())
        print(f"{what}: {medians}: {ratios[what]:.2f} x of {best} (rounds {each[0]:.2f} to {each[-1]:.2f})")
    if args.out:
        told = {"task": task.name, "requests": len(rows), "apart": apart, "ratios": ratios, "seconds": times}
        args.out.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
