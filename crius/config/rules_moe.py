"""Rules of models with experts."""

from crius.config.facts import Facts, Rule, Violations, without_effect
from crius.config.load import CUSTOM
from crius.config.param_groups import group_of, parse_group
from crius.config.rules_layout import divisors
from crius.errors import ConfigError, LayoutError
from crius.plugins import install_line, installed_torch

EP = "parallelism.expert_parallel_degree"
MESHES_TORCH = (2, 13)
"""The first torch whose FSDP has a mesh for each parameter."""
SETTINGS = ("aux_loss", "aux_loss_coefficient", "z_loss_coefficient", "bias_update_rate")


def settings_need_experts(facts: Facts) -> Violations:
    """What balances experts does nothing where there are none."""
    if facts.model is None:
        return
    if not facts.model.num_experts:
        rows = [(f"--moe.{name}", f": {facts.model_name} has no experts", "leave it out") for name in SETTINGS]
        yield from without_effect(facts, rows)
        return
    has_bias = any(buffer.name.endswith("router.bias") for buffer in facts.model.buffers)
    no_bias = f": the router of {facts.model_name} has no bias"
    rows = [] if has_bias else [("--moe.bias_update_rate", no_bias, "leave it out")]
    if facts.config.moe.aux_loss == "none":
        rows.append(("--moe.aux_loss_coefficient", " with --moe.aux_loss none", "--moe.aux_loss sequence"))
    yield from without_effect(facts, rows)


def experts_are_enough(facts: Facts) -> Violations:
    """A token visits some of the experts, and each of them once."""
    model = facts.model
    if model is None or not model.num_experts or min(model.num_experts, model.top_k) < 1:
        return  # known_model reports it
    if model.top_k > model.num_experts:
        given = [name for name in ("top_k", "num_experts") if facts.origin(f"model.{name}") != "default"]
        yield ConfigError(
            f"model.top_k {model.top_k} is more than the {model.num_experts} experts of {facts.model_name}.",
            where=", ".join(facts.flag(f"model.{name}") for name in given) or facts.flag("model.top_k"),
            why="a token visits each of its experts once",
            fix=f"--model.top_k {model.num_experts}, or more experts: --model.num_experts {model.top_k}",
        )
    is_free = facts.config.model.flavor == CUSTOM and model.config.ffn_dim == facts.config.model.ffn_dim
    if not model.dense[0] and not is_free:
        row = ("--model.ffn_dim", f": all layers of {facts.model_name} have experts", "--model.expert_ffn_dim N")
        yield from without_effect(facts, [row])


def muon_needs_matrices(facts: Facts) -> Violations:
    """Muon would treat stacked experts as no matrices, and leave them to AdamW without a word."""
    optimizer = facts.config.optimizer
    if not facts.has_experts:
        return
    try:
        specs = [parse_group(text) for text in optimizer.param_groups]
    except ValueError:
        return  # another rule says so
    experts = [weight.name for weight in facts.model.weights if weight.kind == "expert"]
    chosen = {name: spec.optimizer if (spec := group_of(specs, name)) else None for name in experts}
    if any((kind or optimizer.name) == "muon" for kind in chosen.values()):
        yield ConfigError(
            f"Muon does not update the experts of {facts.model_name}.",
            where=facts.flag("optimizer.name"),
            why="it is not built yet for matrices that are stacked",
            fix='--optimizer.param_groups "feed_forward.experts: optimizer=adamw", or --optimizer.name adamw',
        )


def expert_parallel_divides(facts: Facts) -> Violations:
    """Expert parallelism gives each rank whole experts, and takes its ranks from those of data, context and tensor."""
    parallelism, model = facts.config.parallelism, facts.model
    degree = parallelism.expert_parallel_degree
    if degree <= 1 or model is None:
        return
    if not facts.has_experts:
        yield LayoutError(
            f"{EP} {degree} has no effect: {facts.model_name} has no experts.",
            where=facts.flag(EP),
            fix=f"--{EP} 1, or a model with experts, such as --model.name qwen3_moe",
        )
        return
    ranks = _ranks_of_a_layer(facts)
    legal = [n for n in divisors(model.num_experts) if ranks % n == 0]
    if degree in legal:
        return
    replicas = parallelism.data_parallel_replicate_degree
    shown = ", ".join(map(str, legal))
    hint = f", or --layout hsdp{replicas // degree}x{degree}_ep{degree}" if _are_replicas(facts) else ""
    yield LayoutError(
        f"{EP} {degree} does not divide the {model.num_experts} experts of {facts.model_name} and the {ranks} ranks of "
        f"shards x context x tensor parallelism that have a layer; legal: {shown}.",
        where=facts.flag(EP),
        why="each rank has whole experts, and replicas of data_parallel_replicate_degree have all of them",
        fix=f"use {shown}, e.g. --{EP} {max(n for n in legal if n <= degree)}{hint}",
    )


def _are_replicas(facts: Facts) -> bool:
    """Whether expert parallelism could have its ranks from the replicas."""
    parallelism = facts.config.parallelism
    replicas, degree = parallelism.data_parallel_replicate_degree, parallelism.expert_parallel_degree
    return _ranks_of_a_layer(facts) == 1 and replicas % degree == 0 and facts.model.num_experts % degree == 0


def _ranks_of_a_layer(facts: Facts) -> int:
    """Ranks that experts are split over: all that have a layer, but for replicas."""
    parallelism = facts.config.parallelism
    shards = parallelism.shard_degree(facts.num_ranks)
    return shards * parallelism.context_parallel_degree * parallelism.tensor_parallel_degree


def experts_are_sharded_evenly(facts: Facts) -> Violations:
    """Where there are fewer experts on a rank than FSDP has shards, it splits each of them, into equal parts."""
    degree = facts.config.parallelism.expert_parallel_degree
    if not facts.has_experts or degree < 1 or list(expert_parallel_divides(facts)):
        return
    model, parallelism = facts.model, facts.config.parallelism
    ranks, own = _ranks_of_a_layer(facts), model.num_experts // degree
    widths = {"dim": model.dim, "expert_ffn_dim": model.ffn_dim}

    def undivided(ranks: int) -> list[str]:
        wrong = [f"{name} {width}" for name, width in widths.items() if width % (ranks // degree)]
        return wrong if ranks > model.num_experts else []

    if wrong := undivided(ranks):
        shards, replicas = parallelism.shard_degree(facts.num_ranks), parallelism.data_parallel_replicate_degree
        beside = ranks // shards
        whole = [n for n in divisors(shards) if n * beside % degree == 0 and not undivided(n * beside)]
        fewer = whole[-1] if whole else 1
        yield LayoutError(
            f"the {own} experts of a rank are fewer than the {ranks // degree} ranks that they are split over, which "
            f"do not divide {' and '.join(wrong)} of {facts.model_name}.",
            where=facts.flag("parallelism.data_parallel_shard_degree"),
            why="FSDP then splits each expert, into equal parts only",
            fix=f"--parallelism.data_parallel_shard_degree {fewer} "
            f"--parallelism.data_parallel_replicate_degree {replicas * shards // fewer}",
        )


def own_mesh_of_experts_goes_with(facts: Facts) -> Violations:
    """What does not work where experts are split over other ranks than the rest of a layer."""
    config = facts.config
    parallelism = config.parallelism
    if not facts.has_experts or max(parallelism.expert_parallel_degree, parallelism.tensor_parallel_degree) <= 1:
        return
    asked = EP if parallelism.expert_parallel_degree > 1 else "parallelism.tensor_parallel_degree"
    mode = parallelism.reshard_after_forward_mode
    if isinstance(mode, int) and parallelism.expert_parallel_degree > 1:
        yield LayoutError(
            f"parallelism.reshard_after_forward_mode {mode} does not go with {EP} above 1.",
            where=facts.flag("parallelism.reshard_after_forward_mode"),
            why="torch does not reshard weights that are split over two axes of a mesh to fewer ranks",
            fix="--parallelism.reshard_after_forward_mode default",
        )
    if config.training.reproducible and parallelism.expert_parallel_degree > 1:
        yield ConfigError(
            f"training.reproducible does not go with {EP} {parallelism.expert_parallel_degree}.",
            where=facts.flag("training.reproducible"),
            why="the order in which an expert's rows are summed would depend on the degree; it is not built yet",
            fix=f"--{EP} 1, or --training.no_reproducible",
        )
    if (version := installed_torch()) and version[0] < MESHES_TORCH:
        yield LayoutError(
            f"{asked} above 1 with experts needs torch 2.13 or newer; torch {version[1]} is installed.",
            where=facts.flag(asked),
            why="in older ones all parameters of a layer are split over the same ranks",
            fix=f"--{asked} 1, or {install_line('--upgrade', 'torch>=2.13')}",
        )


MOE_RULES: tuple[Rule, ...] = (
    settings_need_experts,
    experts_are_enough,
    muon_needs_matrices,
    expert_parallel_divides,
    experts_are_sharded_evenly,
    own_mesh_of_experts_goes_with,
)
