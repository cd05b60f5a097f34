"""Rules about the layout: degrees, ranks, batches, and which optimisations can be combined."""

import re
from collections.abc import Iterable, Iterator

from crius.config.facts import Facts, Violations
from crius.config.load import did_you_mean
from crius.config.pipeline import microbatch_unit
from crius.config.resolve import batch_sizes
from crius.config.training import SAVE_OPS
from crius.errors import LayoutError
from crius.host import MOST_SHARING, SHARE_GPU, most_open_files

MOST_RANKS_WITHOUT_A_DOUBT = 32
RANKS_A_CORE = 8


def divisors(number: int) -> Iterator[int]:
    """The numbers that divide ``number``, from 1 up."""
    return (n for n in range(1, number + 1) if number % n == 0)


def listed(numbers: Iterable[int]) -> str:
    """The numbers with commas between them."""
    return ", ".join(map(str, numbers))


def degrees_match_ranks(facts: Facts) -> Violations:
    """The product of the degrees is the number of ranks, if something else fixed that number."""
    parallelism = facts.config.parallelism
    ranks = facts.asked_ranks
    total = parallelism.total_ranks(ranks)
    if not ranks or total == ranks or total < 1:
        return
    names = (
        "data_parallel_replicate",
        "data_parallel_shard",
        "tensor_parallel",
        "context_parallel",
        "pipeline_parallel",
    )
    degrees = " x ".join(f"{name} {getattr(parallelism, f'{name}_degree')}" for name in names)
    unit = parallelism.ranks_beside_shards()
    if parallelism.data_parallel_shard_degree == -1:
        yield LayoutError(
            f"{ranks} ranks are not a multiple of {unit}, the product of {degrees}.",
            where=facts.asked_by,
            why="data_parallel_shard_degree -1 takes the ranks left over",
            fix=f"start {-(-ranks // unit) * unit} ranks, or lower a degree",
        )
    else:
        yield LayoutError(
            f"the degrees multiply to {total} ranks, but there are {ranks}: {degrees}.",
            where=facts.asked_by,
            why="the degrees multiply to the number of processes",
            fix=f"start {total} ranks" + ", or --parallelism.data_parallel_shard_degree -1" * (ranks % unit == 0),
        )


def ranks_fit_gpus(facts: Facts) -> Violations:
    """A machine has no more ranks than GPUs, unless the run is on CPUs."""
    device = facts.config.training.device
    if facts.is_dry:
        return
    most = max(MOST_RANKS_WITHOUT_A_DOUBT, RANKS_A_CORE * facts.num_cores)
    if (device == "cpu" or facts.num_gpus == 0) and facts.local_ranks > most:
        yield LayoutError(
            f"{facts.local_ranks} ranks on this machine, which has {facts.num_cores} CPU cores.",
            where=facts.asked_by or "the degrees of [parallelism]",
            why=f"each rank is a process; more than {most} of them would fill the memory and make hardly any progress",
            fix="--dry_run shows memory and work of each rank; or start the run on a cluster with torchrun or Slurm",
        )
    if device == "cuda" and facts.num_gpus == 0:
        yield facts.layout_error(
            "no GPU that torch can use was found.",
            "training.device",
            fix="--training.device cpu; crius doctor shows what is missing",
        )
    elif device != "cpu" and 0 < facts.num_gpus < facts.local_ranks and not facts.sharing:
        yield LayoutError(
            f"{facts.local_ranks} ranks on this machine, but {facts.num_gpus} visible GPUs.",
            where=facts.asked_by or "the degrees of [parallelism]",
            why="each rank needs a GPU of its own",
            fix=f"use at most {facts.num_gpus} ranks here, or --training.device cpu",
        )


def shared_gpu_takes(facts: Facts) -> Violations:
    """Few ranks share a GPU in a test, and Gloo sends no tensor of a GPU from one to another."""
    config = facts.config
    ranks = facts.num_ranks
    on_gpu = config.training.device != "cpu" and facts.num_gpus > 0
    if facts.is_dry or not on_gpu or not facts.sharing:
        return
    if ranks > MOST_SHARING:
        yield LayoutError(
            f"{ranks} ranks would share one GPU.",
            where=f"{SHARE_GPU} (the environment)",
            why=f"it is for tests of layouts, with at most {MOST_SHARING} ranks",
            fix=f"use at most {MOST_SHARING} ranks, unset {SHARE_GPU}, or --training.device cpu",
        )
    degree = config.parallelism.pipeline_parallel_degree
    if degree > 1 and facts.sharing == "gloo":
        yield facts.layout_error(
            f"parallelism.pipeline_parallel_degree {degree} is not possible on a GPU that ranks share over Gloo.",
            "parallelism.pipeline_parallel_degree",
            why="a stage sends its output to the next one, and Gloo sends host memory only",
            fix=f"--parallelism.pipeline_parallel_degree 1, or export {SHARE_GPU}=nccl with NCCL 2.30 or newer: "
            "docs/gpu.md",
        )


FILES = 128
"""Files that a rank has open besides Gloo's connections; with those a rank of an 8-rank run had up to 64."""


def open_files_suffice(facts: Facts) -> Violations:
    """The limit of open files suffices. A rank may open a connection to each other rank, and again in each group."""
    needed = FILES + facts.num_ranks * 3 // 2
    there = most_open_files()
    if not facts.is_dry and there < needed:
        yield LayoutError(
            f"{facts.num_ranks} ranks need about {needed:,} open files each, but this host allows {there:,}.",
            where="the hard limit of open files (ulimit -Hn)",
            why="Gloo connects each rank with all others, and again in each of its groups",
            fix=f"raise it to {needed} or more: LimitNOFILE= of the service of Slurm or the container, or "
            "/etc/security/limits.conf; a run raises its soft limit itself",
        )


def batch_divides(facts: Facts) -> Violations:
    """The global batch splits into whole microbatches."""
    training = facts.config.training
    sizes = (training.local_batch_size, training.global_batch_size)
    if any(size < 1 and size != -1 for size in sizes) or facts.data_parallel_ranks < 1:
        return  # ranges reports it
    try:
        batch_sizes(training, facts.data_parallel_ranks, microbatch_unit(facts.config.parallelism))
    except ValueError as error:
        sentence, _, remedy = str(error).partition("; ")
        yield facts.error(
            f"{sentence}.",
            *facts.given("training.global_batch_size", "training.local_batch_size"),
            why="every rank computes whole microbatches, at least one per step",
            fix=f"--training.global_batch_size {remedy.rpartition(' ')[2]} ({remedy})",
        )


def reshard_degree_divides(facts: Facts) -> Violations:
    """An integer ``reshard_after_forward_mode`` is a proper divisor of the shard degree."""
    name = "parallelism.reshard_after_forward_mode"
    parallelism = facts.config.parallelism
    mode = parallelism.reshard_after_forward_mode
    if isinstance(mode, str):
        return
    shards = parallelism.shard_degree(facts.num_ranks) * parallelism.context_parallel_degree
    legal = [n for n in range(2, shards) if shards % n == 0]
    if mode not in legal:
        yield facts.layout_error(
            f"{name} {mode} is not a proper divisor of the shard degree {shards}.",
            name,
            why="weights are resharded to groups of that many ranks; 1 means never, the shard degree means always",
            fix=f"use {listed(legal) or 'always or never'}",
        )


def reshard_groups_need_all_ranks(facts: Facts) -> Violations:
    """FSDP creates the groups of an integer reshard mode in a call that all ranks must make in the same order."""
    parallelism = facts.config.parallelism
    name = "parallelism.reshard_after_forward_mode"
    mode = parallelism.reshard_after_forward_mode
    split = {"tensor": parallelism.tensor_parallel_degree, "pipeline": parallelism.pipeline_parallel_degree}
    others = [kind for kind, degree in split.items() if degree > 1]
    if isinstance(mode, int) and others:
        yield facts.layout_error(
            f"{name} {mode} is not possible under {' and '.join(others)} parallelism.",
            name,
            why="torch creates its groups in a call of all ranks, and ranks with different weights would wait for ever",
            fix=f"--{name} never",
        )


def tensor_parallel_divides(facts: Facts) -> Violations:
    """Tensor parallelism gives each rank whole heads and equal parts of the hidden dim and of the sequence."""
    name = "parallelism.tensor_parallel_degree"
    degree = facts.config.parallelism.tensor_parallel_degree
    model = facts.model
    if degree <= 1 or model is None:
        return
    if not model.plan.tensor_parallel:
        yield facts.layout_error(
            f"the sharding plan of {facts.model_name} has no tensor-parallel rows.",
            name,
            why="the rows say how each module is split",
            fix=f"--{name} 1, or add rows to the plan: docs/adding_a_model.md",
        )
        return
    queries, pairs = (getattr(model, field) for field in facts.heads)
    if min(queries, pairs) < 1:
        return  # known_model reports it

    widths = {layer.feed_forward.width for _, layer in model.layers}  # of experts: the shared ones

    def undivided(n: int) -> list[str]:
        fitting = {
            f"{facts.heads[0]} {queries}": queries % n == 0,
            f"{facts.heads[1]} {pairs}": pairs % n == 0 or n % pairs == 0,
            **{f"ffn_dim {width}": width % n == 0 for width in sorted(widths)},
        }
        return [size for size, is_fit in fitting.items() if not is_fit]

    legal = [n for n in divisors(queries) if not undivided(n)]
    if degree not in legal:
        shown = listed(legal)
        yield facts.layout_error(
            f"tensor_parallel_degree {degree} does not divide {' and '.join(undivided(degree))} of "
            f"{facts.model_name}; legal: {shown}.",
            name,
            why="each rank has whole heads; if there are fewer key/value heads than ranks, they are replicated evenly",
            fix=f"use {shown}, e.g. --{name} {max(n for n in legal if n <= degree)}",
        )


def sequence_divides(facts: Facts) -> Violations:
    """Context and sequence parallelism cut a sequence into equal parts."""
    parallelism = facts.config.parallelism
    seq_len = facts.config.training.seq_len
    tp = parallelism.tensor_parallel_degree
    cp = parallelism.context_parallel_degree
    if min(tp, cp, seq_len) < 1:
        return  # other rules report it
    chunks = 2 * cp if cp > 1 and parallelism.context_parallel_method == "all_gather" else cp
    unit = cp * tp * (chunks // cp if (cp * tp) % chunks else 1)
    if seq_len % unit == 0 or list(tensor_parallel_divides(facts)):
        return
    below = seq_len // unit * unit
    above = -(-seq_len // unit) * unit
    parts = [f"{tp} tensor-parallel ranks"] * (tp > 1) + [f"{cp} context-parallel ranks"] * (cp > 1)
    yield facts.layout_error(
        f"training.seq_len {seq_len} is not a multiple of {unit}, which {' and '.join(parts)} need.",
        "training.seq_len",
        why="each rank holds an equal part of every sequence" + ": an early and a late one" * (chunks > cp),
        fix=f"--training.seq_len {below or above}" + f", or {above}" * bool(below),
    )


def ulysses_divides(facts: Facts) -> Violations:
    """Ulysses gives each rank of a sequence whole heads; with a single rank the method has no effect."""
    parallelism = facts.config.parallelism
    model = facts.model
    cp = parallelism.context_parallel_degree
    tp = parallelism.tensor_parallel_degree
    method = "parallelism.context_parallel_method"
    if cp == 1 and facts.origin(method) == "command line" and parallelism.context_parallel_method != "all_gather":
        yield facts.error(
            f"{method} {parallelism.context_parallel_method} has no effect at context_parallel_degree 1.",
            method,
            fix="--parallelism.context_parallel_degree 2, or leave it out",
        )
    if cp <= 1 or tp < 1 or model is None or parallelism.context_parallel_method != "ulysses":
        return
    queries, pairs = (getattr(model, field) for field in facts.heads)
    heads = max(1, queries // tp)
    kv = max(1, pairs // tp)
    legal = [n for n in divisors(heads) if kv % n == 0 or n % kv == 0]
    if cp not in legal:
        near = max(n for n in legal if n <= cp)
        yield facts.layout_error(
            f"context_parallel_degree {cp} does not divide the {heads} query and {kv} key/value heads of a rank; "
            f"legal with ulysses: {listed(legal)}.",
            "parallelism.context_parallel_degree",
            why="ulysses gives each rank all tokens of some heads",
            fix=f"--parallelism.context_parallel_degree {near}, or --parallelism.context_parallel_method all_gather",
        )


def gradient_sync_under_pipeline(facts: Facts) -> Violations:
    """A pipeline schedule synchronises gradients once per step."""
    config = facts.config
    mode = config.training.gradient_sync
    if config.parallelism.pipeline_parallel_degree > 1 and mode in ("immediate", "auto"):
        yield facts.error(
            f"gradient_sync {mode} is not possible under pipeline parallelism.",
            "training.gradient_sync",
            why="torch.distributed.pipelining reduces gradients once per step, after the last microbatch",
            fix="--training.gradient_sync deferred, or leave it out",
        )


def async_tensor_parallel_needs(facts: Facts) -> Violations:
    """Async tensor parallelism is a compiler pass over tensor parallelism, so it needs both."""
    config = facts.config
    name = "parallelism.enable_async_tensor_parallel"
    if not config.parallelism.enable_async_tensor_parallel:
        return
    if not config.compile.enable:
        yield facts.error(
            "enable_async_tensor_parallel needs torch.compile.",
            name,
            why="a pass of its inductor backend fuses matmuls with their communication",
            fix="--compile.enable",
        )
    elif config.compile.backend != "inductor":
        yield facts.error(
            f"enable_async_tensor_parallel has no effect with compile.backend {config.compile.backend}.",
            "compile.backend",
            fix="--compile.backend inductor",
        )
    if config.parallelism.tensor_parallel_degree == 1:
        yield facts.error(
            "enable_async_tensor_parallel has no effect at tensor_parallel_degree 1.",
            name,
            fix="--parallelism.tensor_parallel_degree 2, or leave it out",
        )


def compile_flags_have_effect(facts: Facts) -> Violations:
    """Settings of torch.compile are given only with it."""
    compile_ = facts.config.compile
    if compile_.loss and not compile_.enable:
        yield facts.error("compile.loss needs compile.enable.", "compile.loss", fix="--compile.enable")
    if compile_.enable and compile_.backend == "cudagraphs" and facts.num_ranks > 1:
        yield facts.error(
            f"compile.backend cudagraphs does not go with {facts.num_ranks} ranks.",
            "compile.backend",
            why="a CUDA graph has fixed addresses, and FSDP gathers weights to new addresses in each step",
            fix="--compile.backend inductor",
        )
    if not compile_.enable:
        names = ("compile.backend", "compile.cache_dir", "compile.max_recompiles")
        yield from facts.no_effect(names, " without compile.enable", "--compile.enable")


def activation_checkpoint_options(facts: Facts) -> Violations:
    """The options of activation checkpointing belong to its mode."""
    config = facts.config
    section = config.activation_checkpoint
    mode = section.mode
    owners = {"selective_option": "selective", "save_ops": "selective", "memory_budget": "memory_budget"}
    for field, owner in owners.items():
        name = f"activation_checkpoint.{field}"
        is_asked = facts.origin(name) == "command line"
        # auto uses the default options of each mode; a file may have options of the mode that none or full replaced
        is_lost = mode == "auto" and facts.changed([name])
        if mode != owner and (is_asked or is_lost):
            yield facts.error(
                f"{name} has no effect with activation_checkpoint.mode {mode}.",
                name,
                fix=f"--activation_checkpoint.mode {owner}, or leave it out",
            )
    if isinstance(section.selective_option, int) and section.selective_option < 1:
        yield facts.error(
            f"activation_checkpoint.selective_option {section.selective_option} must be op, or an integer of at least "
            "1.",
            "activation_checkpoint.selective_option",
            fix="e.g. --activation_checkpoint.selective_option 2",
        )
    for entry in section.save_ops:
        if entry not in SAVE_OPS and not re.fullmatch(r"\w+\.\w+\.\w+", entry):
            guess = did_you_mean(entry, SAVE_OPS) or "."
            yield facts.error(
                f"activation_checkpoint.save_ops {entry} is neither a category nor an ATen op{guess}",
                "activation_checkpoint.save_ops",
                why=f"categories are {', '.join(SAVE_OPS)}; ops are written like aten.mm.default",
                fix="--activation_checkpoint.save_ops attention",
            )
    if mode == "memory_budget" and not config.compile.enable:
        yield facts.error(
            "activation_checkpoint.mode memory_budget needs torch.compile.",
            "activation_checkpoint.mode",
            why="its partitioner chooses the ops to recompute",
            fix="--compile.enable",
        )
    elif mode == "memory_budget" and config.compile.backend == "eager":
        yield facts.error(
            "activation_checkpoint.mode memory_budget has no effect with compile.backend eager.",
            "compile.backend",
            fix="--compile.backend inductor",
        )


LAYOUT_RULES = (
    degrees_match_ranks,
    ranks_fit_gpus,
    shared_gpu_takes,
    open_files_suffice,
    batch_divides,
    reshard_degree_divides,
    reshard_groups_need_all_ranks,
    tensor_parallel_divides,
    sequence_divides,
    ulysses_divides,
    gradient_sync_under_pipeline,
    async_tensor_parallel_needs,
    compile_flags_have_effect,
    activation_checkpoint_options,
)
