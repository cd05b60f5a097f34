"""Rules about runs whose bits do not depend on the data-parallel ranks, and about checks that repeat work."""

from crius.config.facts import Facts, Rule, Violations
from crius.config.toml_file import flatten
from crius.errors import ConfigError, LayoutError

_ON = "training.reproducible"
_SHARDS = "training.virtual_shards"


def virtual_shards_cut_the_batch(facts: Facts) -> Violations:
    """Virtual shards are a power of two, which the data-parallel ranks divide; a microbatch is one of them."""
    training, ranks = facts.config.training, facts.data_parallel_ranks
    shards = training.virtual_shards
    if not training.reproducible:
        if facts.origin(_SHARDS) == "command line":
            yield ConfigError(f"{_SHARDS} has no effect without {_ON}.", where=facts.flag(_SHARDS), fix=f"e.g. --{_ON}")
        return
    if shards < 1 or ranks < 1:
        return  # ranges reports it
    if shards & (shards - 1):
        below = 1 << (shards.bit_length() - 1)
        yield ConfigError(
            f"{_SHARDS} {shards} is no power of two.",
            where=facts.flag(_SHARDS),
            why="their gradients are summed as a binary tree, of which every layout holds whole branches",
            fix=f"--{_SHARDS} {below} or {2 * below}",
        )
    elif shards % ranks:
        legal = [1 << power for power in range(shards.bit_length())]
        more = 1 << (ranks - 1).bit_length()
        fix = f"--{_SHARDS} {more}" if more == ranks else "other degrees of [parallelism]"
        yield LayoutError(
            f"{ranks} data-parallel ranks do not divide the {shards} virtual shards of a {_ON} run; legal: "
            f"{', '.join(map(str, legal))}.",
            where=facts.flag(_SHARDS),
            why="each rank computes whole virtual shards, as many as every other",
            fix=fix,
        )
    total, local = training.global_batch_size, training.local_batch_size
    if total >= 1 and local >= 1 and total % shards == 0 and local != total // shards:
        yield ConfigError(
            f"training.local_batch_size {local} is not the {total // shards} sequences of a virtual shard.",
            where=facts.flag("training.local_batch_size"),
            why=f"a {_ON} run computes each of the {shards} virtual shards by itself, whatever the layout",
            fix="--training.local_batch_size -1",
        )


def reproducible_excludes(facts: Facts) -> Violations:
    """What sums or rounds in an order or in blocks that the layout sets is not reproducible."""
    config = facts.config
    if not config.training.reproducible:
        return
    sync, float8, optimizer = config.training.gradient_sync, config.quantize.dense.float8, config.optimizer
    gathers_float8 = float8.enable and float8.enable_fsdp_float8_all_gather
    fused = optimizer.implementation == "fused" and facts.origin("optimizer.implementation") == "command line"
    rows = (
        (
            "parallelism.pipeline_parallel_degree",
            config.parallelism.pipeline_parallel_degree > 1,
            "a schedule sums the gradients of its microbatches by itself",
            "--parallelism.pipeline_parallel_degree 1",
        ),
        (
            "training.gradient_sync",
            sync not in ("default", "immediate"),
            "every microbatch is a branch of the tree, and is summed over the ranks by itself",
            "--training.gradient_sync default",
        ),
        (
            "quantize.dense.float8.enable_fsdp_float8_all_gather",
            gathers_float8,
            "which weights can be sent in float8 depends on how they are split",
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
            fused,
            "it rounds the last numbers of a shard in another way than the others",
            "--optimizer.implementation foreach",
        ),
    )
    values = flatten(config)
    for name, is_wrong, why, fix in rows:
        if is_wrong:
            shown = name if values[name] is True else f"{name} {values[name]}"
            yield ConfigError(
                f"{shown} does not go with {_ON}.",
                where=facts.flag(name),
                why=why,
                fix=f"{fix}, or --training.no_reproducible",
            )


def sdc_checks_have_an_object(facts: Facts) -> Violations:
    """What is to be computed twice or compared exists in this layout."""
    sdc, parallelism = facts.config.sdc, facts.config.parallelism
    if sdc.recompute_interval > 0 and parallelism.pipeline_parallel_degree > 1:
        yield ConfigError(
            f"sdc.recompute_interval {sdc.recompute_interval} does not go with pipeline parallelism.",
            where=facts.flag("sdc.recompute_interval"),
            why="a schedule runs its microbatches together; no stage can repeat one by itself",
            fix="--sdc.recompute_interval 0, or --parallelism.pipeline_parallel_degree 1",
        )
    copies = parallelism.data_parallel_replicate_degree * parallelism.tensor_parallel_degree
    if sdc.replica_interval > 0 and copies == 1:
        yield ConfigError(
            f"sdc.replica_interval {sdc.replica_interval} has no effect: every weight is on one rank only.",
            where=facts.flag("sdc.replica_interval"),
            why="replicas are ranks of data_parallel_replicate_degree, and of tensor parallelism for norm weights",
            fix="--sdc.replica_interval 0 (--sdc.recompute_interval finds wrong gradients on any layout)",
        )


REPRODUCIBLE_RULES: tuple[Rule, ...] = (
    virtual_shards_cut_the_batch,
    reproducible_excludes,
    sdc_checks_have_an_object,
)
