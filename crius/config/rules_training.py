"""Rules about the optimizer, checkpoints, kernels, loss spikes, reproducible runs and checks that repeat work."""

import shlex

from crius.config.facts import Facts, Violations
from crius.config.operation import CheckpointConfig
from crius.config.param_groups import EXAMPLE, KEYS, GroupSpec, fits, group_of, nearest, parse_group
from crius.config.resolve import caps_scores, compares_bits, has_mask, obstacle, varlen_obstacle
from crius.config.rules_layout import listed

_GROUPS = "optimizer.param_groups"


def _parsed(facts: Facts) -> list[GroupSpec]:
    """The well-formed entries of ``optimizer.param_groups``."""
    found = []
    for text in facts.config.optimizer.param_groups:
        try:
            found.append(parse_group(text))
        except ValueError:
            continue
    return found


def _flag(text: str) -> str:
    return f"--{_GROUPS} {shlex.quote(text)}"


def param_groups_are_well_formed(facts: Facts) -> Violations:
    """Every entry has the form PATTERN: key=value ..., with known keys and values."""
    for text in facts.config.optimizer.param_groups:
        try:
            parse_group(text)
        except ValueError as error:
            yield facts.error(
                f"{_GROUPS} {text!r} {error}.",
                _GROUPS,
                why=f"an entry is a pattern, a colon, and values for some of {', '.join(KEYS)} (adamw or muon)",
                fix=f"e.g. {_flag(EXAMPLE)}",
            )


def param_groups_fit_parameters(facts: Facts) -> Violations:
    """Every pattern fits a parameter, and Muon gets only matrices."""
    if facts.model is None:
        return
    shapes = {weight.name: weight.shape for weight in facts.model.trained}
    specs = _parsed(facts)
    for spec in specs:
        if not any(fits(spec.pattern, name) for name in shapes):
            meant = nearest(spec.pattern, list(shapes))
            guess = f", did you mean {meant}?" if meant else "."
            yield facts.error(
                f"{_GROUPS}: {spec.pattern} fits no parameter of {facts.model_name}{guess}",
                _GROUPS,
                why=f"its parameters are {_examples(list(shapes))}",
                fix=f"{_flag(_text(spec, meant))}" if meant else f"leave out {_flag(_text(spec, spec.pattern))}",
            )
        wrong = [
            name
            for name, shape in shapes.items()
            if spec.optimizer == "muon" and len(shape) != 2 and group_of(specs, name) is spec
        ]
        if wrong:
            settings = [f"{_flag(_text(other, other.pattern))}" for other in specs]
            kept = [_flag(f"{name}: optimizer=adamw") for name in dict.fromkeys(map(_in_all_layers, wrong))]
            yield facts.error(
                f"{_GROUPS}: {spec.pattern} gives {_examples(wrong)} to Muon, which takes matrices only.",
                _GROUPS,
                why="it makes the momentum of a matrix orthogonal",
                fix=" ".join([*kept, *settings]),
            )


def _text(spec: GroupSpec, pattern: str) -> str:
    """A spec as a user types it, with another pattern."""
    parts = [f"lr_factor={spec.lr_factor:g}"] if spec.lr_factor != 1 else []
    parts += [f"weight_decay={spec.weight_decay:g}"] if spec.weight_decay is not None else []
    parts += [f"optimizer={spec.optimizer}"] if spec.optimizer else []
    return f"{pattern}: {' '.join(parts) or 'lr_factor=1'}"


def _in_all_layers(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _examples(names: list[str]) -> str:
    found = list(dict.fromkeys(map(_in_all_layers, names)))
    return ", ".join(found if len(found) <= 4 else [*found[:3], "...", found[-1]])


def optimizer_flags_have_effect(facts: Facts) -> Violations:
    """Settings of Muon or of bfloat16 storage are not given on the command line for a run without them."""
    optimizer = facts.config.optimizer
    dtype = facts.config.training.dtype
    has_muon = optimizer.name == "muon" or any(spec.optimizer == "muon" for spec in _parsed(facts))
    if not has_muon:
        names = [f"optimizer.{name}" for name in vars(optimizer) if name.startswith("muon_")]
        fix = "leave out --NAME, or --optimizer.name muon"
        yield from facts.no_effect(names, f" with optimizer.name {optimizer.name}", fix)
    if "bfloat16" not in (dtype, optimizer.state_dtype):
        yield from facts.no_effect(
            ["optimizer.stochastic_rounding"],
            f" with training.dtype {dtype} and optimizer.state_dtype {optimizer.state_dtype}",
            why="it rounds only values that are stored in bfloat16",
            fix="leave out --NAME, or --optimizer.state_dtype bfloat16",
        )


OPTIMIZER_RULES = (
    param_groups_are_well_formed,
    param_groups_fit_parameters,
    optimizer_flags_have_effect,
)


def stability_flags_have_effect(facts: Facts) -> Violations:
    """Settings on the command line belong to a policy of this run."""
    stability = facts.config.stability
    if stability.spike == "off":
        names = ("stability.spike_zscore", "stability.window")
        yield from facts.no_effect(names, " with stability.spike off", "e.g. --stability.spike warn")
    if stability.nonfinite != "rollback":
        reason = f" with stability.nonfinite {stability.nonfinite}, which takes no snapshots"
        yield from facts.no_effect(["stability.snapshot_interval"], reason, "e.g. --stability.nonfinite rollback")
    if stability.nonfinite == "stop" and stability.spike not in ("skip", "warn"):
        reason = f" with stability.nonfinite stop and spike {stability.spike}, after which no run continues"
        yield from facts.no_effect(["stability.max_consecutive"], reason, "e.g. --stability.nonfinite skip")


STABILITY_RULES = (stability_flags_have_effect,)


_LINEAR = "kernels.linear"
_POINTWISE = "kernels.pointwise"
_ATTENTION = "kernels.attention"
_FLASH_VERSIONS = ("flash3", "flash4")
_NO_SOFTCAP = "it does not bound the scores, as model.words attention_softcap asks"
_HALF_ONLY = ("cudnn", "flash", "varlen", *_FLASH_VERSIONS)  # on a GPU: bfloat16 and float16


def _is_on_gpu(facts: Facts) -> bool:
    """Whether the run, or the run that a dry run stands for, is on GPUs."""
    device = facts.config.training.device
    return device == "cuda" or (device == "auto" and (facts.num_gpus > 0 or facts.is_dry))


def cpu_kernels_run_on_cpus(facts: Facts) -> Violations:
    """oneDNN and the fused pointwise kernels are for CPUs."""
    kernels = facts.config.kernels
    on_gpu = _is_on_gpu(facts)
    for name, asked in ((_LINEAR, kernels.linear == "onednn"), (_POINTWISE, kernels.pointwise == "fused")):
        if asked and on_gpu:
            value = "onednn" if name == _LINEAR else "fused"
            yield facts.error(
                f"{name} {value} is for CPUs, but the run is on GPUs.",
                name,
                fix=f"--{name} torch, or --training.device cpu",
            )


def attention_backend_runs(facts: Facts) -> Violations:
    """The backend of attention supports the device, the dtype and the mask."""
    config = facts.config
    asked = config.kernels.attention
    on_gpu = _is_on_gpu(facts)
    is_masked = has_mask(config, facts.model)
    why = ""
    fix = f"--{_ATTENTION} auto"
    if not on_gpu:
        if asked == "blocked":
            why, fix = obstacle(config, facts.model)
        elif asked == "flash" and caps_scores(facts.model):
            why = _NO_SOFTCAP
        elif asked not in ("auto", "flash", "math"):
            why = "on a CPU the backends are flash, math and blocked"
    elif caps_scores(facts.model) and config.parallelism.context_parallel_degree > 1:
        why = "with bounded scores only flex runs on a GPU, and context parallelism makes masks that it does not take"
        fix = "--parallelism.context_parallel_degree 1"
    elif caps_scores(facts.model) and asked not in ("auto", "flex", "blocked"):
        why = _NO_SOFTCAP
    elif asked == "blocked":
        why, fix = "it is for CPUs", f"{fix}, or --training.device cpu"
    elif asked in _HALF_ONLY and config.training.mixed_precision_param == "float32":
        why, fix = "on a GPU it needs 16-bit numbers", f"--training.mixed_precision_param bfloat16, or {fix}"
    elif asked == "cudnn" and config.debug.deterministic:
        why = "its backward pass is not deterministic, but debug.deterministic is on"
        fix = f"--{_ATTENTION} flash"
    elif asked in ("cudnn", "flash") and is_masked:
        # pytorch/pytorch#196678
        why = "it takes no mask" if asked == "flash" else "its gradient of masked attention is NaN at some lengths"
        fix = f"--{_ATTENTION} varlen, flex or efficient"
    elif asked in ("flex", "varlen") and not is_masked:
        why, fix = "it is for masks of documents and windows", f"{fix}, or --model.attention_mask document"
    elif asked in ("varlen", *_FLASH_VERSIONS) and is_masked:
        why = varlen_obstacle(config, facts.model)
    elif asked not in ("auto", *_FLASH_VERSIONS) and config.parallelism.context_parallel_degree > 1:
        why = "context parallelism makes masks of its own, which it does not support"
    if why:
        yield facts.error(f"{_ATTENTION} {asked} does not run here.", _ATTENTION, why=why, fix=fix)


KERNEL_RULES = (cpu_kernels_run_on_cpus, attention_backend_runs)


def checkpoint_flags_have_effect(facts: Facts) -> Violations:
    """Settings of checkpoints are given on the command line only if the run has checkpoints."""
    checkpoint = facts.config.checkpoint
    if not checkpoint.is_enabled:
        yield from facts.no_effect(
            [f"checkpoint.{name}" for name in vars(checkpoint) if name not in ("enable", "init_from")],
            ": this run neither saves checkpoints nor resumes",
            why=f"checkpoint.enable is off ({facts.origin('checkpoint.enable')})",
            fix="--checkpoint.enable, or leave out --NAME",
        )


def a_rehearsal_has_a_batch(facts: Facts) -> Violations:
    """The batch whose loss a rehearsal compares is of a validation set."""
    config = facts.config
    validation = config.validation
    has_batch = validation.interval > 0 and (validation.fraction > 0 or validation.path)
    if config.checkpoint.rehearse and not has_batch:
        yield facts.error(
            "checkpoint.rehearse has no batch to compute a loss of.",
            "checkpoint.rehearse",
            why="it is of the first validation set, and this run has none",
            fix="--validation.interval 500 --validation.fraction 0.02, or leave out --checkpoint.rehearse",
        )


def checkpoints_have_a_folder(facts: Facts) -> Violations:
    """The folder of checkpoints has a name: an empty one would put them among the files of the run folder."""
    folder = facts.config.checkpoint.folder
    if not folder.strip():
        yield facts.error(
            f"checkpoint.folder {folder!r} is not a folder's name.",
            "checkpoint.folder",
            why="checkpoints need a folder of their own, inside the run folder or elsewhere",
            fix=f"--checkpoint.folder {CheckpointConfig.folder}, which is the default",
        )


def checkpoints_outlive_the_process(facts: Facts) -> Violations:
    """Checkpoints are not kept in the memory of a process, where fsspec's memory URLs would put them."""
    for name in ("folder", "load_path", "init_from"):
        value = getattr(facts.config.checkpoint, name)
        if value.startswith("memory://"):
            yield facts.error(
                f"checkpoint.{name} {value} is in memory and would be lost when the process ends.",
                f"checkpoint.{name}",
                fix=f"give a folder, or the URL of a permanent store, e.g. --checkpoint.{name} checkpoints",
            )


def a_run_starts_from_one_thing(facts: Facts) -> Violations:
    """A run starts from weights alone or from the whole state of another run, not from both."""
    checkpoint = facts.config.checkpoint
    if checkpoint.init_from and checkpoint.load_path:
        yield facts.error(
            f"checkpoint.init_from {checkpoint.init_from} excludes checkpoint.load_path {checkpoint.load_path}.",
            "checkpoint.init_from",
            why="init_from loads the weights only and starts at step 0, load_path continues from a whole checkpoint",
            fix="leave out one of them",
        )


CHECKPOINT_RULES = (
    a_run_starts_from_one_thing,
    checkpoint_flags_have_effect,
    a_rehearsal_has_a_batch,
    checkpoints_have_a_folder,
    checkpoints_outlive_the_process,
)


def virtual_shards_cut_the_batch(facts: Facts) -> Violations:
    """The number of virtual shards is a power of two that the data-parallel ranks divide, and a microbatch is one
    shard.
    """
    training = facts.config.training
    ranks = facts.data_parallel_ranks
    shards = training.virtual_shards
    if not training.reproducible:
        yield from facts.no_effect(
            ["training.virtual_shards"], " without training.reproducible", "e.g. --training.reproducible"
        )
        return
    if shards < 1 or ranks < 1:
        return  # ranges reports it
    if shards & (shards - 1):
        below = 1 << (shards.bit_length() - 1)
        yield facts.error(
            f"training.virtual_shards {shards} is not a power of two.",
            "training.virtual_shards",
            why="their gradients are summed as a binary tree, and every layout has whole branches of it",
            fix=f"--training.virtual_shards {below} or {2 * below}",
        )
    elif shards % ranks:
        legal = [1 << power for power in range(shards.bit_length())]
        more = 1 << (ranks - 1).bit_length()
        fix = f"--training.virtual_shards {more}" if more == ranks else "other degrees of [parallelism]"
        yield facts.layout_error(
            f"{ranks} data-parallel ranks do not divide the {shards} virtual shards of a training.reproducible run; "
            f"legal: {listed(legal)}.",
            "training.virtual_shards",
            why="each rank computes the same number of whole virtual shards",
            fix=fix,
        )
    total = training.global_batch_size
    local = training.local_batch_size
    if total >= 1 and local >= 1 and total % shards == 0 and local != total // shards:
        yield facts.error(
            f"training.local_batch_size {local} is not the {total // shards} sequences of a virtual shard.",
            "training.local_batch_size",
            why=f"a training.reproducible run computes each of the {shards} virtual shards by itself, whatever the "
            "layout",
            fix="--training.local_batch_size -1",
        )


def reproducible_excludes(facts: Facts) -> Violations:
    """Settings that sum or round in an order, or in blocks, that depends on the layout exclude reproducible."""
    config = facts.config
    if not config.training.reproducible:
        return
    sync = config.training.gradient_sync
    float8 = config.quantize.dense.float8
    optimizer = config.optimizer
    gathers_float8 = float8.enable and float8.enable_fsdp_float8_all_gather
    is_on_host = config.training.enable_cpu_offload or not _is_on_gpu(facts)
    fused = optimizer.implementation == "fused" and facts.origin("optimizer.implementation") == "command line"
    rows = (
        (
            "parallelism.pipeline_parallel_degree",
            config.parallelism.pipeline_parallel_degree > 1,
            "a schedule sums the gradients of its microbatches in its own order",
            "--parallelism.pipeline_parallel_degree 1",
        ),
        *(
            (
                f"parallelism.{kind}_parallel_degree",
                facts.has_experts and getattr(config.parallelism, f"{kind}_parallel_degree") > 1,
                "experts would add the rows of several virtual shards at once; summing them as a tree is not built yet",
                f"--parallelism.{kind}_parallel_degree 1",
            )
            for kind in ("expert", "tensor")
        ),
        (
            "training.gradient_sync",
            sync not in ("default", "immediate"),
            "every microbatch is a branch of the tree and is summed over the ranks by itself",
            "--training.gradient_sync default",
        ),
        (
            "quantize.dense.float8.enable_fsdp_float8_all_gather",
            gathers_float8,
            "the layout decides which weights can be sent in float8",
            "--quantize.dense.float8.no_enable_fsdp_float8_all_gather",
        ),
        (
            "optimizer.state_dtype",
            optimizer.state_dtype == "8bit",
            "the blocks that share a scale lie along this rank's shard",
            "--optimizer.state_dtype bfloat16",
        ),
        (
            "optimizer.implementation",
            fused and is_on_host,
            "on a CPU it rounds the last numbers of a shard differently from the others",
            "--optimizer.implementation foreach",
        ),
    )
    for name, is_wrong, why, fix in rows:
        if is_wrong:
            yield facts.error(
                f"{facts.shown(name)} does not go with training.reproducible.",
                name,
                why=why,
                fix=f"{fix}, or --training.no_reproducible",
            )


def equal_bits_need_deterministic_kernels(facts: Facts) -> Violations:
    """Settings that compare bits on a GPU have the deterministic kernels that ``resolve`` turns on."""
    name = "debug.deterministic"
    needed = compares_bits(facts.config)
    if facts.config.debug.deterministic is False and needed and _is_on_gpu(facts):
        yield facts.error(
            f"{name} off does not go with {' and '.join(needed)} on a GPU.",
            name,
            why="other kernels add gradients in the order in which their threads finish, so bits differ by chance",
            fix=f"leave out {name}, which is then on, or {' and '.join(needed)}",
        )


def sdc_checks_have_an_object(facts: Facts) -> Violations:
    """Work that is to be computed twice, and weights that are to be compared, exist in this layout."""
    sdc = facts.config.sdc
    parallelism = facts.config.parallelism
    if sdc.recompute_interval > 0 and parallelism.pipeline_parallel_degree > 1:
        yield facts.error(
            f"sdc.recompute_interval {sdc.recompute_interval} does not go with pipeline parallelism.",
            "sdc.recompute_interval",
            why="a schedule runs its microbatches together, so no stage can repeat one of them",
            fix="--sdc.recompute_interval 0, or --parallelism.pipeline_parallel_degree 1",
        )
    copies = parallelism.data_parallel_replicate_degree * parallelism.tensor_parallel_degree
    if sdc.replica_interval > 0 and copies == 1:
        yield facts.error(
            f"sdc.replica_interval {sdc.replica_interval} has no effect: every weight is on one rank only.",
            "sdc.replica_interval",
            why="replicas are ranks of data_parallel_replicate_degree, and of tensor parallelism for norm weights",
            fix="--sdc.replica_interval 0 (--sdc.recompute_interval finds wrong gradients on any layout)",
        )


REPRODUCIBLE_RULES = (
    virtual_shards_cut_the_batch,
    reproducible_excludes,
    equal_bits_need_deterministic_kernels,
    sdc_checks_have_an_object,
)
