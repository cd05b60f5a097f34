"""torch.compile of each block, the cache folder of compiled kernels, and a report of what torch compiled.

The ``forward`` of a block is compiled, not the block. So parameter names stay, and FSDP's hooks, which are attached to
the call of the module, stay outside of the graph. Blocks of one class share one code object and so one graph.
"""

import hashlib
import logging
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch._dynamo.config as dynamo_config
import torch._dynamo.utils as dynamo
import torch._inductor.config as inductor_config
import torch.compiler.config as compiler_config
from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from crius.config.training import CompileConfig
from crius.errors import EnvironmentError
from crius.host import COMPILE_SWITCHES, usable_cores, user_cache
from crius.models.plan import ShardingPlan, match
from crius.untrusted import read_named

log = logging.getLogger("crius.parallel")

WARM_STEPS = 3  # compiling is normal in the first steps: a shape or a flag may still change

# torch's default of 8 counts the graphs of one code object, which all activation-checkpointed blocks share. With
# fullgraph, exceeding the limit ends the run.
RECOMPILE_LIMIT = 64
METRICS_KEPT = 1024  # torch's default of 64 events is less than the graphs and backwards of a large pipeline stage

_SIZE = re.compile(r"tensor '(?P<name>.+?)' size mismatch at index (?P<dim>\d+)\. expected (\d+), actual (?P<size>\d+)")
_GRAD_MODE = "grad_mode"

Function = TypeVar("Function", bound=Callable[..., Any])


def prepare_compile(
    config: CompileConfig, cache_root: Path | None = None, *, local_ranks: int = 1, for_cpu: bool = False
) -> Path:
    """Set up torch.compile in this process. Call before anything is compiled.

    Args:
        config: the section.
        cache_root: the user's cache folder of Crius; None: ``crius`` below ``XDG_CACHE_HOME``, else below ~/.cache.
        local_ranks: processes that share the cores of this host, and so the compiler threads.
        for_cpu: also apply settings that pay on a CPU only (docs/kernels.md). An input of a backward matmul, such as
            SwiGLU's product, is then not kept if pointwise operations can compute it again.

    Returns:
        The cache folder: ``config.cache_dir``, else ``TORCHINDUCTOR_CACHE_DIR`` from the user's environment, else
        ``compile/torch-<version>`` below ``cache_root``, which only its owner may enter.

    Raises:
        EnvironmentError: the folder cannot be written, or it is the last of the three and another user owns it or may
            write into it.
    """
    folder, is_own = _cache_folder(config, cache_root)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "Permission denied", str(folder))
        if is_own:
            _keep_private(folder)
    except OSError as error:
        raise EnvironmentError(
            f"the folder of compiled kernels {folder} cannot be written: {error.strerror or error}.",
            where="--compile.cache_dir",
            fix="--compile.cache_dir DIR, a folder that can be written",
        ) from error
    if config.backend == "inductor":
        from crius.parallel.kernel_cache import keep_whole  # noqa: PLC0415

        keep_whole(folder)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    if config.cache_dir:
        os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    else:
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        # inductor would start that many threads in every rank; the variable alone is not enough: it is read on import
        threads = max(1, min(32, usable_cores() // max(1, local_ranks)))
        inductor_config.compile_threads = threads
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
    compiler_config.cache_key_tag = f"{os.environ.get('TORCH_COMPILE_CACHE_KEY_TAG', '')}{_kernels_tag()}"
    if for_cpu:
        from crius.kernels.cpu.inductor import suit_cpu  # noqa: PLC0415

        suit_cpu()
    elif torch.are_deterministic_algorithms_enabled():
        inductor_config.deterministic = True  # no kernel is chosen by timing: another kernel may add in another order
    dynamo_config.recompile_limit = max(RECOMPILE_LIMIT, dynamo_config.recompile_limit)
    return folder


def compile_blocks(model: nn.Module, plan: ShardingPlan, config: CompileConfig) -> int:
    """Compile the ``forward`` of each module that matches ``plan.block``, in place.

    Call this after tensor parallelism and activation checkpointing, whose operations belong in the graph, and before
    FSDP, whose hooks do not.

    Returns:
        Number of blocks. It is 0 if this part of the model has no blocks, as a pipeline stage of the embedding alone.
        If the environment disables torch.compile, blocks are counted but not compiled, and the report says so.
    """
    blocks = [module for name, module in model.named_modules() if match(plan.block, name)]
    for block in () if _is_disabled() else blocks:  # torch 2.13 fails in the first call if compiling is disabled
        block.forward = torch.compile(block.forward, backend=config.backend, fullgraph=True)
    return len(blocks)


def compile_loss(loss_fn: Function, config: CompileConfig) -> Function:
    """``loss_fn`` compiled as one graph, so that the float32 copy of the logits is never written."""
    if _is_disabled():
        return loss_fn
    return torch.compile(loss_fn, backend=config.backend, fullgraph=True)  # type: ignore[return-value]


class CompileReport:
    """Counts the graphs that torch compiled, and the recompilations.

    Call ``start()`` before the first step, ``lines()`` after it, and ``step(n)`` after every step.

    Attributes:
        graphs: forward graphs since ``start()``, including those of validation and of the loss.
        recompiles: graphs that were compiled after step 3 because a guard failed.
    """

    def __init__(self, config: CompileConfig) -> None:
        self._config = config
        self._spans: list[tuple[int, int]] = []  # begin and end of each compilation in microseconds
        self._functions: Counter[str] = Counter()  # graphs by function
        self._validation: Counter[str] = Counter()  # graphs by function that were compiled only for another grad mode
        self._culprits: Counter[str] = Counter()
        self._sizes: dict[str, list[str]] = {}
        self._why: dict[str, str] = {}  # by function, why it has several graphs
        self._last: Any = None
        self._counters: Counter[str] = Counter()
        self._warned = False
        self.graphs = 0
        self.recompiles = 0

    def start(self) -> None:
        """Start counting."""
        dynamo.set_compilation_metrics_limit(METRICS_KEPT)
        self._last = next(reversed(dynamo.get_compilation_metrics()), None)
        self._counters = _cache_counters()

    @property
    def seconds(self) -> float:
        """Wall-clock seconds in which this rank compiled."""
        total = 0
        done = 0
        for begin, end in sorted(self._spans):
            total += max(0, end - max(begin, done))
            done = max(done, end)
        return total / 1e6

    @property
    def reason(self) -> str:
        """Why nothing was compiled; empty if blocks were compiled.

        A block is compiled whole or not at all: if it cannot be, the run ends with torch's error (fullgraph).
        """
        if _is_disabled():
            return f"switched off by {' or '.join(COMPILE_SWITCHES)}"
        return "" if self.graphs else "torch.compile was called but compiled nothing; see TORCH_LOGS=+dynamo"

    def lines(self) -> list[str]:
        """One line with graphs, seconds and cache, then one line per function with several training graphs."""
        self._read(is_warm=True)
        if not self.graphs:
            return [f"compile: 0 graphs, the model runs eager ({self.reason})"]
        noun = "graph" if self.graphs == 1 else "graphs"
        return [
            f"compile: {self.graphs} {noun}, {self.seconds:.1f} s, {self._cache()}",
            *(
                f"compile: {name} has {self._functions[name]} graphs, lastly for {why}"
                for name, why in self._why.items()
            ),
        ]

    def step(self, number: int) -> None:
        """Log graphs compiled since the last call, if ``number`` is past the first three steps."""
        self._read(is_warm=number <= WARM_STEPS, step=number)
        if self.recompiles > self._config.max_recompiles and not self._warned:
            self._warned = True
            log.warning("%s", self._advice())

    def _read(self, is_warm: bool, step: int = 0) -> None:
        """Read the events since the last call. A backward has no function name and does not count as a graph."""
        events = dynamo.get_compilation_metrics()
        if not events or events[-1] is self._last:
            return
        known = next((index for index in reversed(range(len(events))) if events[index] is self._last), -1)
        self._last = events[-1]
        for event in events[known + 1 :]:
            begin = getattr(event, "start_time_us", None)
            end = getattr(event, "end_time_us", None)
            if begin and end:
                self._spans.append((begin, end))
            if event.co_name is None:
                continue
            if not event.has_guarded_code:  # compilation failed and the caller got the error, or nothing to compile
                continue
            place = "/".join(Path(event.co_filename or "?").parts[-2:])
            function = f"{event.co_name} ({place}:{event.co_firstlineno})"
            self.graphs += 1
            reason = _first_line(getattr(event, "recompile_reason", None) or "")
            self._note_graph(function, reason, is_warm, step)

    def _note_graph(self, function: str, reason: str, is_warm: bool, step: int) -> None:
        """Count a graph. Validation runs without gradients, so each training graph may have one more for it."""
        if _GRAD_MODE in reason and self._validation[function] < self._functions[function]:
            self._validation[function] += 1
            if not is_warm:
                log.info("compile: %s compiled once more for validation, which needs no gradient", function)
            return
        self._functions[function] += 1
        if self._functions[function] > 1:
            self._why[function] = reason or "a guard that torch does not report"
        if is_warm or self._functions[function] == 1:
            return
        self.recompiles += 1
        culprit = reason
        if size := _SIZE.search(reason):
            culprit = f"size of dim {size['dim']} of {size['name']}"
            self._sizes.setdefault(culprit, [size[3]]).append(size["size"])
        self._culprits[culprit] += 1
        log.info("compile: step %d compiled %s again: %s", step, function, reason or "torch reports no guard")

    def _advice(self) -> str:
        """The warning about too many recompilations, with the guard that failed most often and a remedy."""
        culprit, count = self._culprits.most_common(1)[0]
        text = (
            f"compile: {self.recompiles} recompilations after step {WARM_STEPS}, more than compile.max_recompiles "
            f"{self._config.max_recompiles}; {count} of them by one guard: {culprit or 'torch reports none'}"
        )
        if culprit in self._sizes:
            sizes = ", ".join(dict.fromkeys(self._sizes[culprit]))
            return (
                f"{text} (was {sizes}). Give every batch the same shape: the same --training.local_batch_size and "
                "--training.seq_len in every step, with short rows padded."
            )
        return f"{text}. TORCH_LOGS=recompiles shows each; --compile.no_enable runs without compiling."

    def _cache(self) -> str:
        if self._config.backend != "inductor":
            return f"no cache (backend {self._config.backend})"
        counts = _cache_counters() - self._counters
        hits = counts["hit"]
        misses = counts["miss"]
        bypassed = counts["bypass"]
        if bypassed:
            return f"cache bypassed by {bypassed} graphs ({hits} hits, {misses} misses)"
        if hits and misses:
            return f"cache {hits} hits, {misses} misses"
        if not hits and not misses:
            return "cache off"
        return "cache hit" if hits else "cache miss"


def _cache_folder(config: CompileConfig, cache_root: Path | None) -> tuple[Path, bool]:
    """The cache folder of compiled kernels, and whether it is Crius's default."""
    if config.cache_dir:
        return Path(config.cache_dir).expanduser().absolute(), False
    from_user = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if from_user and from_user != default_cache_dir():  # inductor sets the variable to its default on import
        return Path(from_user).absolute(), False
    return ((cache_root or user_cache()) / "compile" / f"torch-{torch.__version__}").absolute(), True


def _keep_private(folder: Path) -> None:
    """Close ``folder`` to other users: inductor unpickles its files and loads its libraries.

    Raises:
        EnvironmentError: other users could write into it before.
    """
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise EnvironmentError(
            f"other users may write into the folder of compiled kernels {folder}.",
            why="the files in it are executed",
            fix=f"rm -r {shlex.quote(str(folder))}, or --compile.cache_dir DIR, a folder that you trust",
        )
    if status.st_mode & 0o077:
        folder.chmod(0o700)


def _kernels_tag(package: Path = Path(__file__).parents[1]) -> str:
    """A digest of our kernels for the cache key, which torch's own key lacks. Compiled code depends on the shapes that
    our operators return, and on inductor's code for them. Cached code of an older Crius would fail in a newer Crius."""
    files = sorted((package / "kernels").rglob("*.py"))
    return "crius-" + hashlib.sha256(b"\0".join(read_named(file) for file in files)).hexdigest()[:16]


def _is_disabled() -> bool:
    return dynamo_config.disable or any(os.environ.get(name) == "1" for name in COMPILE_SWITCHES)


def _cache_counters() -> Counter[str]:
    """Graphs so far by inductor's cache: found (hit), compiled (miss) or not cacheable (bypass)."""
    counts = dynamo.counters["inductor"]
    return Counter({end: counts[f"fxgraph_cache_{end}"] for end in ("hit", "miss", "bypass")})


def _first_line(text: str) -> str:
    """The first line, without the number of the graph whose guard failed."""
    lines = text.strip().splitlines()
    return re.sub(r"^\d+/\d+: ", "", lines[0]).strip() if lines else ""
