"""Two faults at once, again and again: the run ends as it would have without them, bit for bit."""

import os
import random
from functools import partial

import pytest
from harness import parse
from pretrained_samples import save
from sft_samples import tokenizer_folder, write_conversations

from crius.checkpoint.disk import open_disk
from crius.checkpoint.folder import CheckpointFolder
from crius.checkpoint.names import step_name
from crius.cli.app import facts_of
from crius.tools.verify.equality import compare
from crius.tools.verify.starts import all_starts, num_threads
from crius.tools.verify.survival import Course, live

SEED = os.environ.get("HOSTILE_SEED", "1")
STEPS = 24
KILLS = 10
_CHAT = (
    "--data.source jsonl --data.format chat --data.path chat.jsonl --tokenizer.path model "
    "--checkpoint.init_from model --training.seq_len 128"
)
RUNS = {
    "sft": f"{_CHAT} --layout fsdp2",
    "lora": f"{_CHAT} --lora.rank 2 --layout ddp2",
    "experts": "--model.name qwen3_moe --model.num_layers 1 --training.seq_len 16 --layout fsdp2_ep2",
    "pipeline": "--model.name qwen3_moe --model.num_layers 2 --training.seq_len 16 --layout fsdp2_pp2_ep2",
}
_ALL = (
    "--training.device cpu --validation.interval 0 --training.global_batch_size 4 --watchdog.limit_seconds 8 "
    "--watchdog.startup_seconds 20"
)
FAULTS = ("full disk, then kill", "kill, then stop in the restart", "kill, then a flipped bit")


class Faults:
    """What happens to each attempt of a run.

    Args:
        start: how each attempt starts.
        folder: folder of the run.
        drawn: random numbers.
    """

    def __init__(self, start, folder, drawn):
        self.done = []
        self.flips = 0
        self._start = start
        self._drawn = drawn
        self._run_dir = folder
        self._folder = CheckpointFolder(open_disk(str(folder / "checkpoints")))

    def assign(self, number):
        """The faults of an attempt: it has a kill, and the one after a second fault."""
        started = self._start.config, self._start.num_ranks
        faults = []
        if self.done and self.done[-1] == FAULTS[1] and not self._stopped:
            self._stopped = True
            phase = self._drawn.choice(("start", "load"))
            return *started, f"stop:phase={phase},rank={self._drawn.randrange(started[1])},attempt={number}"
        if len(self.done) < KILLS:
            self.done.append(FAULTS[len(self.done) % len(FAULTS)])
            self._stopped = False
            first = max(self._folder.good(), default=0) + 1
            step = min(STEPS, self._drawn.randint(first + 1, first + 3))
            phase = self._drawn.choice(("data", "forward", "backward", "optimizer"))
            rank = self._drawn.randrange(started[1])
            faults.append(f"kill:step={step},phase={phase},rank={rank},attempt={number}")
            if self.done[-1] == FAULTS[0]:
                faults.append(f"disk:save={self._drawn.choice((1, 2))},error=enospc")
        return *started, ";".join(faults)

    def failed(self, attempt):
        """Flip a bit of the newest checkpoint; the one before it stays."""
        if self.done[-1] == FAULTS[2] and len(steps := self._folder.good()) > 1:
            files = sorted((self._run_dir / "checkpoints" / step_name(steps[-1])).glob("*.safetensors"))
            file = self._drawn.choice(files)
            content = bytearray(file.read_bytes())
            content[self._drawn.randrange(len(content))] ^= 1 << self._drawn.randrange(8)
            file.write_bytes(content)
            self.flips += 1


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_two_faults_at_once_is_the_undisturbed_one(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("llama", tmp_path / "model")
    tokenizer_folder(tmp_path / "model")
    write_conversations(tmp_path / "chat.jsonl", 60)
    facts = facts_of(parse([*RUNS[name].split(), *_ALL.split()]), 0, None)
    [start] = all_starts(facts, STEPS, interval=1)
    threads = num_threads(facts, [start])
    course = partial(Course, config=start.config, num_ranks=start.num_ranks, seconds=1200, threads=threads)
    calm = live(course(folder=tmp_path / "calm"))
    assert not calm.trouble
    faults = Faults(start, tmp_path / "run", random.Random(f"{SEED} {name}"))
    life = live(course(folder=tmp_path / "run", restarts=2 * KILLS, assignment=faults.assign, on_failure=faults.failed))
    assert not life.trouble, life.trouble
    equality = compare(calm.folder, life.folder, STEPS, 0.0)
    assert equality, equality.problems
    stops = [attempt for attempt in life.failures if "SIGSTOP" in attempt.cause]
    assert len(life.kills()) >= KILLS and len(stops) == faults.done.count(FAULTS[1]) == 3 and faults.flips >= 2
    assert life.processes_left == ()
    left = [path for path in life.folder.rglob("*") if ".tmp-" in path.name or ".partial-" in path.name]
    assert not left
