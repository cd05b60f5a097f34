"""The checkpoints of a run: when they are saved, their contents, and what a resumed run loads from them."""

import contextlib
import logging
import platform
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import crius
from crius.checkpoint.disk import open_disk
from crius.checkpoint.folder import CheckpointFolder, read_manifest
from crius.checkpoint.load import Found, check_tensors, dtype_of, find, load_tensors
from crius.checkpoint.manifest import Manifest
from crius.checkpoint.names import step_name
from crius.checkpoint.plain import NAMES
from crius.checkpoint.save import PieceOnDisk, Saver
from crius.config.changes import changes, check_changes
from crius.config.run import RunConfig, replace_fields
from crius.config.toml_file import shown
from crius.data.loader import BatchLoader
from crius.errors import CheckpointError, ConfigError
from crius.interop.kept import Origin, files_to_keep, origin_of
from crius.launch.environment import Placement
from crius.launch.status import status
from crius.metrics.ledger import TimeLedger
from crius.optim import state as optimizer_state
from crius.optim.build import WarmupStableDecay
from crius.shards import named_buffers, named_parameters, named_state, plain
from crius.tokens.tokenizer import Tokenizer
from crius.train.build import Job
from crius.train.guard import UpdateGuard
from crius.train.inputs import (
    check_steps_left,
    checkpoint_folder,
    nothing_to_load,
    settings_to_compare,
    tokenizer_of,
)
from crius.train.pretrained import load_base, load_initial
from crius.train.saving import check_newest, remember
from crius.train.state import TrainState, restore_streams, seed_streams, streams

log = logging.getLogger("crius.checkpoint")


@dataclass(frozen=True)
class Parts:
    """Parts of a run that are saved.

    Attributes:
        state: state of the training.
        guard: has the stability monitor.
        loader: has the data cursor.
        dataset: fingerprint of the data, which gives sample ids their meaning.
        ledger: time ledger of this command.
        tokenizer: tokenizer of the run.
    """

    state: TrainState
    guard: UpdateGuard
    loader: BatchLoader
    dataset: str
    ledger: TimeLedger
    tokenizer: Tokenizer

    def tensors(self) -> dict[str, Tensor]:
        """Weights, buffers and optimizer state by their names in a checkpoint."""
        weights = {f"model.{name}": plain(tensor) for name, tensor in named_state(self.state.parts)}
        names = {parameter: name for name, parameter in named_parameters(self.state.parts)}
        moments = optimizer_state.to_save(self.state.optimizer, names)
        return weights | {f"optim.{name}": tensor for name, tensor in moments.items()}


class Checkpoints:
    """Saves and resumes one run. Every rank makes the same calls.

    Args:
        job: the run.
        run_dir: its folder.
        placement: place of this process among the ranks.

    Attributes:
        folder: folder of the checkpoints.
        found: checkpoint that ``find`` chose to resume from; None if there is none.
        before_write: called before each write with the number of the save in this process, from 1.
        after_save: called on every rank with the step, once its state is copied or written.
        committed: step of the last save of this process that is complete; known on rank 0. -1: none.
    """

    _parts: Parts

    def __init__(self, job: Job, run_dir: Path, placement: Placement) -> None:
        self._config = job.config
        self._layout = job.mesh.layout
        self._ranks = job.ranks
        assert self._ranks.store is not None
        self.before_write: Callable[[int], None] = lambda save: None
        self.after_save: Callable[[int], None] = lambda step: None
        self.committed = -1
        self._saves = 0
        self.folder = CheckpointFolder(open_disk(checkpoint_folder(self._config, run_dir)))
        self._attempt = self._ranks.gather_json(uuid.uuid4().hex[:8])[0]
        self._run_dir = run_dir
        self._command = placement.scratch.name if placement.scratch else ""
        place = PieceOnDisk(
            self._ranks.rank,
            self._ranks.size,
            placement.local_world_size,
            self._ranks.store,
            self._ranks.gather_json,
            self._attempt,
        )
        self.saver = Saver(self.folder, self._config.checkpoint, place, self._beat, self._wait, self._remember)
        self.found: Found | None = None
        self._run_id = ""
        self._initial = dict[str, str]()
        self._last_saved = -1
        self._last_time = time.monotonic()

    def find(self) -> None:
        """Find the newest good checkpoint, of the run or of ``checkpoint.load_path``: ``found``, the same on all ranks.

        This needs no model, so weights that will be loaded need not be drawn first.

        Raises:
            CheckpointError: there are checkpoints, but none can be used.
            ConfigError: the newest checkpoint of the run is missing.
            MissingPathError: there is no checkpoint in ``checkpoint.load_path``.
        """
        config = self._config.checkpoint
        with status.during("load"):
            if self._ranks.rank == 0:
                for line in self.folder.collect(self._attempt):
                    log.info("checkpoint: %s", line)
            step, *refusal = self._ranks.gather_json(self._asked() if self._ranks.rank == 0 else None)[0]
            if refusal:
                what, where, why, fix = refusal
                raise ConfigError(what, where=where, why=why, fix=fix)
            self.found = self._find(self.folder, step)
            if self._ranks.rank == 0 and self.found:
                remember(self._run_dir, self.folder, self.found.manifest)
            if self.found is None and config.load_path:
                self.found = self._find(CheckpointFolder(open_disk(config.load_path)), config.load_step)
                if self.found is None:
                    raise nothing_to_load(config.load_path)
                check_steps_left(self.found.manifest.step, self._config)

    def resume(self, parts: Parts) -> dict[str, float]:
        """Continue from the checkpoint that ``find`` chose, or start from the beginning.

        Args:
            parts: parts of the run to load, and to save from now on.

        Returns:
            Seconds of the time ledger in the checkpoint; empty without a checkpoint, or if another command saved it.

        Raises:
            CheckpointError: the checkpoint lacks tensors of the run, or cannot be read.
            ConfigError: settings or data of the run differ in a way that it cannot resume with.
        """
        self._parts = parts
        found = self.found
        parts.guard.before_change = self.saver.before_change
        status.update(phase="load")
        seed_streams(self._ranks.device, self._config.debug.seed, self._ranks.rank)
        if found is None:
            self._run_id = self._ranks.gather_json(uuid.uuid4().hex)[0]
            self._initial, origin = load_initial(self._config, self._ranks, self._parts.state)
            self._prepare_saves(origin)
            return {}
        begin = time.monotonic()
        self._load(found)
        self._set_aside_later(found)
        if self._ranks.rank == 0 and found.folder is self.folder:
            self.saver.prune()  # a kill right after a commit leaves more checkpoints than keep_last
        step = self._parts.state.step
        if self._ranks.rank == 0:
            where = found.folder.disk.where
            seconds = time.monotonic() - begin
            log.info("resume: step %d of %s, saved on %s, %.1f s", step, where, found.manifest.layout, seconds)
        self._last_saved = step if found.folder is self.folder else -1
        self._last_time = time.monotonic()
        self._run_id = found.manifest.run_id
        self._initial = found.state.get("init_from", {})
        if self._config.lora.is_on:
            self._initial, _ = load_base(self._config, self._ranks, parts.state.parts, self._initial)
        self._prepare_saves(origin_of(found.folder.disk, found.manifest))
        ledger = found.state.get("ledger", {})
        is_ours = self._command and ledger.get("command") == self._command
        return dict(ledger["seconds"]) if is_ours else {}

    def take_steps(self, config: RunConfig) -> None:
        """Take the run with as many steps as its epochs have, and log the first learning rate that the resume changes.

        Args:
            config: the run, which further checkpoints keep.
        """
        self._config = config
        found = self.found
        state = self._parts.state
        step = state.step
        lr = state.next_lr(config.optimizer.lr)
        if found is None or "lr" not in found.state or self._ranks.rank or step >= config.training.steps:
            return
        if found.state["lr"].get("next", lr) != lr:
            log.warning("resume: learning rate %.4g in step %d -> %.4g in step %d", state.lr, step, lr, step + 1)
            return
        with contextlib.suppress(ArithmeticError, LookupError, TypeError, ValueError):  # what a manifest may have
            names = ("optimizer.lr", "training.steps", "lr_scheduler.")
            saved = found.manifest.config.items()
            old = replace_fields(RunConfig(), {name: value for name, value in saved if name.startswith(names)})
            same = [(one.optimizer.lr, one.training.steps, one.lr_scheduler) for one in (old, config)]
            if same[0] == same[1]:
                return
            schedule = WarmupStableDecay(old.lr_scheduler, old.training.steps)
            for later in range(step, min(old.training.steps, config.training.steps)):
                update = state.updates + later - step
                before = old.optimizer.lr * schedule.factor(update)
                lr = config.optimizer.lr * state.schedule.factor(update)
                if before != lr:
                    log.warning("resume: learning rate of step %d: %.4g -> %.4g", later + 1, before, lr)
                    return

    def poll(self) -> tuple[bool, bool]:
        """Whether a checkpoint is due by rank 0's clock, and whether too many saves failed. Takes no time."""
        self.saver.poll()
        config = self._config.checkpoint
        minutes = config.interval_minutes
        passed = time.monotonic() - self._last_time
        is_due = minutes > 0 and self._ranks.rank == 0 and passed >= 60 * minutes
        return is_due, self.saver.failures >= config.max_failures

    def save(self, *, wait: bool = False) -> None:
        """Save the present state, unless it is already saved."""
        state = self._parts.state
        if state.step == self._last_saved:
            self.saver.wait()
            return
        status.update(phase="save")
        self._saves += 1
        self._parts.guard.before_save()
        rng = {f"rng.{self._ranks.rank}.{name}": stream for name, stream in streams(self._ranks.device).items()}
        self.saver.save(state.step, self._parts.tensors() | rng, self._state(), self._head(), wait=wait)
        self._last_saved = state.step
        self._last_time = time.monotonic()
        self.after_save(state.step)

    def finish(self) -> None:
        """Wait for the save in progress.

        Raises:
            CheckpointError: the last save failed.
        """
        status.update(phase="save")
        self.saver.wait()
        if self.saver.failures:
            self.give_up()

    def give_up(self) -> None:
        """End the run because its saves failed.

        Raises:
            CheckpointError: always.
        """
        newest = self._ranks.gather_json(self.folder.good()[-1:] if self._ranks.rank == 0 else None)[0]
        count, reason = self._ranks.gather_json([self.saver.failures, self.saver.last_error])[0]
        raise CheckpointError(
            f"the last {count} saves failed: {reason}." if count > 1 else f"the last save failed: {reason}.",
            where=self.folder.disk.where,
            why=f"the newest good checkpoint is of step {newest[0]}" if newest else "there is no good checkpoint",
            fix=f"make room or repair the disk, and start the same command with --job.run_dir {self._run_dir}",
        )

    def _prepare_saves(self, origin: Origin) -> None:
        """Have each save keep the tokenizer and what the source of the weights said; record if there is no save yet."""
        if self._ranks.rank == 0:
            if self._last_saved < 0:
                remember(self._run_dir, self.folder, None)
            path = tokenizer_of(self._config, self._run_dir).path
            self.saver.kept = files_to_keep(path, self._parts.tokenizer, origin)

    def _remember(self, manifest: Manifest) -> None:
        remember(self._run_dir, self.folder, manifest)
        self.committed = manifest.step

    def _beat(self) -> None:
        self.before_write(self._saves)
        if status.phase in ("save", "load"):  # a save in a thread does not show that the training is alive
            status.update()

    def _wait(self, rank: int, has_moved: bool) -> None:
        if status.phase == "save" and (has_moved or status.waits_for != rank):
            status.update(waits_for=rank)

    def _asked(self) -> list[Any]:
        """Step of the run's own checkpoints to load, or -1; then the parts of an error if the newest one is missing."""
        step = self._own_step()
        try:
            line = check_newest(self._run_dir, self.folder, step, accepts=self._config.checkpoint.restart)
        except ConfigError as error:
            return [step, error.what, error.where, error.why, error.fix]
        if line:
            log.warning("resume: %s", line)
        return [step]

    def _own_step(self) -> int:
        """``checkpoint.load_step`` if it is a step of this run that the run has not returned to before; else -1.

        The same command continues from later checkpoints, after a failure or a stop. A command with settings that
        change the curve returns to the step once more.
        """
        config = self._config.checkpoint
        if config.load_path:
            return -1  # the present settings were used after that return
        later = [step for step in self.folder.steps() if step > config.load_step >= 0]
        for step in later[-1:]:
            with contextlib.suppress(CheckpointError):
                saved = read_manifest(self.folder.disk, step_name(step)).config
                is_same = all(change.kind == "free" for change in changes(saved, shown(self._config)))
                if is_same and saved.get("checkpoint.load_step") == config.load_step:
                    log.info("resume: the run returned to step %d before, and continues from there", config.load_step)
                    return -1
        return config.load_step

    def _find(self, folder: CheckpointFolder, load_step: int) -> Found | None:
        return find(
            folder,
            load_step,
            rank=self._ranks.rank,
            size=self._ranks.size,
            gather=self._ranks.gather_json,
            verify=self._config.checkpoint.verify_on_load,
            beat=self._beat,
        )

    def _head(self) -> Manifest:
        return Manifest(
            step=self._parts.state.step,
            run_id=self._run_id,
            versions={"crius": crius.__version__, "torch": torch.__version__, "python": platform.python_version()},
            config=shown(self._config),
            layout=str(self._layout),
            num_ranks=self._ranks.size,
            dataset=self._parts.dataset,
            files={},
            tensors={},
        )

    def _state(self) -> dict[str, Any]:
        """Values that are not tensors. A collective: each rank knows the cursors of its own shards of a stream."""
        state = self._parts.state
        data = dict(self._parts.loader.state_dict())
        cursors = self._ranks.gather_json(data["cursors"])
        data["cursors"] = {shard: cursor for of_rank in cursors for shard, cursor in of_rank.items()}
        return {
            "train": state.counters(),
            "lr": {"last": state.lr, "next": state.next_lr(self._config.optimizer.lr)},
            "data": data,
            "stability": self._parts.guard.state(),
            "run": {"id": self._run_id, "threads": torch.get_num_threads()},
            "ledger": {"command": self._command, "seconds": self._parts.ledger.seconds},
            **({"init_from": self._initial} if self._initial else {}),
        }

    def _load(self, found: Found) -> None:
        manifest = found.manifest
        state = found.state
        is_import = bool(state.get("imported"))
        self._compare_settings(found, is_import)
        parts = self._parts.state.parts
        names = {parameter: name for name, parameter in named_parameters(parts)}
        saved = {name.removeprefix("optim.") for name in manifest.tensors if name.startswith("optim.")}
        moments, finish = optimizer_state.to_load(self._parts.state.optimizer, names, saved)
        targets = {f"model.{name}": plain(tensor) for name, tensor in named_state(parts)}
        targets |= {f"optim.{name}": tensor for name, tensor in moments.items()}
        for line in self._check_tensors(manifest, targets, is_import):
            log.warning("resume: dtype changes: %s", line)
        own = f"rng.{self._ranks.rank}."
        rng = {
            name: torch.empty(entry.shape, dtype=dtype_of(manifest, name))
            for name, entry in manifest.tensors.items()
            if name.startswith(own)
        }
        wanted = {name: target for name, target in targets.items() if name in manifest.tensors} | rng
        load_tensors(found.sources(wanted), wanted)
        finish()
        optimizer_state.fill_copies(self._parts.state.optimizer, names)  # of a tied weight on two stages of one rank
        self._restore_state(found, is_import)
        if rng and manifest.num_ranks == self._ranks.size:
            restore_streams({name.removeprefix(own): stream for name, stream in rng.items()}, self._ranks.device)
        else:
            seed_streams(self._ranks.device, self._config.debug.seed, self._ranks.rank, self._parts.state.step)
            if self._ranks.rank == 0:
                log.info(
                    "resume: %d ranks, saved on %d: random streams restart from the seed",
                    self._ranks.size,
                    manifest.num_ranks,
                )

    def _compare_settings(self, found: Found, is_import: bool) -> None:
        allowed = self._config.checkpoint.allow_changes
        where = f"{found.folder.disk.where}/{found.name}"
        if is_import:
            log.warning("resume: %s is an import: its settings and its data are not known", where)
            return
        saved = settings_to_compare(found.folder.disk, found.manifest, self._config.tokenizer.path)
        differences = changes(saved, shown(self._config))
        check_changes(differences, allowed, where)
        if self._ranks.rank == 0:
            for change in differences:
                level = logging.INFO if change.kind == "free" else logging.WARNING
                log.log(level, "resume: changed since the checkpoint: %s", change)
        if found.manifest.dataset != self._parts.dataset and "data" not in allowed:
            raise ConfigError(
                "the data differs from the checkpoint's.",
                where=where,
                why=f"the checkpoint's data is {found.manifest.dataset}, now it is {self._parts.dataset}",
                fix="use the data, tokenizer and seed of the checkpoint, or --checkpoint.allow_changes data",
            )

    def _check_tensors(self, manifest: Manifest, targets: dict[str, Tensor], is_import: bool) -> list[str]:
        wanted = {name: (tuple(t.shape), NAMES[t.dtype]) for name, t in targets.items()}
        buffers = [name for name, _ in named_buffers(self._parts.state.parts, persistent=True)]
        told = self._ranks.gather_json([wanted, buffers])
        everyones = {name: (tuple(shape), dtype) for of_rank, _ in told for name, (shape, dtype) in of_rank.items()}
        keeps_state = not is_import and not any("optimizer.name" in p for p in self._config.checkpoint.allow_changes)

        def may_lack(name: str) -> bool:
            is_scale = optimizer_state.SCALE + "." in name
            return name.startswith("rng.") or is_scale or (name.startswith("optim.") and not keeps_state)

        lines = check_tensors(manifest, everyones, may_lack)
        if self._ranks.rank:
            return []
        extra = manifest.tensors.keys() - everyones.keys()
        left = sorted(n for n in extra if n.startswith("optim.") and optimizer_state.SCALE + "." not in n)
        if left:
            log.warning("resume: %d tensors of optimizer state are not used, such as %s", len(left), left[0])
        if manifest.step or is_import:
            weights = {name.removeprefix("model.") for name in everyones if name.startswith("model.")}
            weights -= {name for _, of_rank in told for name in of_rank}
            anew = sorted(name for name in weights if f"optim.{name}.step" not in everyones)
            if anew:
                log.warning("resume: optimizer state of %d parameters starts from zero, such as %s", len(anew), anew[0])
        return lines

    def _restore_state(self, found: Found, is_import: bool) -> None:
        state = found.state
        parts = self._parts
        parts.state.restore(state["train"])
        parts.state.lr = state.get("lr", {}).get("last", 0.0)
        if "data" in state:
            parts.loader.load_state_dict(state["data"])
        elif parts.state.step:
            parts.loader.start_at(parts.state.step)
        missing = [name for name in ("data", "stability") if name not in state]
        if missing and self._ranks.rank == 0:
            lacks = ", ".join(missing)
            step = parts.state.step
            sample = parts.loader.state_dict()["next_sample"]
            log.warning("resume: the checkpoint has no %s: step %d, data from sample %d", lacks, step, sample)
        if "stability" in state:
            parts.guard.load(state["stability"])
        saved = state.get("run", {}).get("threads")
        now = torch.get_num_threads()
        if saved not in (None, now) and self._ranks.device.type == "cpu":
            log.warning("resume: %d threads, saved with %d: sums on a CPU differ in their last bits", now, saved)

    def _set_aside_later(self, found: Found) -> None:
        """Move checkpoints after the step to resume from to another name, because the run repeats those steps."""
        if self._ranks.rank or found.folder is not self.folder:
            return
        for step in (step for step in self.folder.steps() if step > found.manifest.step):
            self.folder.disk.set_aside(step_name(step))
            log.warning("checkpoint: step %d, after the step that the run resumes from, was set aside", step)
