"""Rules about the split of experts over ranks."""

from crius.config.facts import Facts, Violations
from crius.config.rules_layout import divisors, listed, reshard_degree_divides

DEGREE = "parallelism.expert_parallel_degree"


def _ranks(facts: Facts) -> int:
    """Ranks that share the experts of a layer, by expert parallelism and by FSDP."""
    parallelism = facts.config.parallelism
    degrees = (parallelism.context_parallel_degree, parallelism.tensor_parallel_degree)
    return parallelism.shard_degree(facts.num_ranks) * degrees[0] * degrees[1]


def expert_parallel_divides(facts: Facts) -> Violations:
    """Expert parallelism gives each rank the same number of whole experts, and its ranks share a layer."""
    degree = facts.config.parallelism.expert_parallel_degree
    model = facts.model
    if degree <= 1 or model is None or facts.config.model.num_experts == 0:
        return
    if not facts.has_experts:
        yield facts.layout_error(
            f"expert_parallel_degree {degree} needs a model with experts, and {facts.model_name} has none.",
            DEGREE,
            fix=f"--{DEGREE} 1",
        )
        return
    ranks = _ranks(facts)
    experts = model.num_experts
    legal = [n for n in divisors(ranks) if experts % n == 0]
    if degree in legal or ranks < 1:
        return
    shards, replicas = (f"parallelism.data_parallel_{name}_degree" for name in ("shard", "replicate"))
    copies = facts.config.parallelism.data_parallel_replicate_degree
    is_among_replicas = experts % degree == 0 and copies % degree == 0
    fix = f"use {listed(legal)}, e.g. --{DEGREE} {max(n for n in legal if n <= degree)}"
    if is_among_replicas:  # as in ddp4_ep2, which is to be hsdp2x2_ep2
        more = facts.config.parallelism.shard_degree(facts.num_ranks) * degree
        one = f"hsdp{copies // degree}x{more}" if copies > degree else f"fsdp{more}"
        fix = f"split over them, as in the layout {one}_ep{degree}: --{replicas} {copies // degree} --{shards} {more}"
    counts = {
        f"number of experts of {facts.model_name}, {experts}": experts,
        f"ranks that share a layer, {ranks}": ranks,
    }
    undivided = ", and ".join(f"the {what}" for what, count in counts.items() if count % degree)
    yield facts.layout_error(
        f"expert_parallel_degree {degree} does not divide {undivided}; legal: {listed(legal)}.",
        DEGREE,
        why="the ranks are those of FSDP, context and tensor parallelism; replicas have all experts each",
        fix=fix,
    )


def _uneven(facts: Facts, degree: int, num_ranks: int) -> list[str]:
    """Sizes of experts that FSDP cannot split over the ranks that expert parallelism of ``degree`` leaves."""
    assert facts.model is not None
    ranks = num_ranks // degree
    experts = facts.model.num_experts // degree
    layer = facts.model.experts[1]
    assert layer is not None
    inside = {weight.shape[1] for weight in layer.weights if weight.is_routed} if experts < ranks else set()
    return [str(size) for size in sorted(inside) if size % ranks]


def experts_split_evenly(facts: Facts) -> Violations:
    """If FSDP has more ranks than a rank has experts, it splits each expert inside, into equal parts."""
    degree = facts.config.parallelism.expert_parallel_degree
    if not facts.has_experts or min(degree, _ranks(facts)) < 1 or list(expert_parallel_divides(facts)):
        return
    assert facts.model is not None
    experts = facts.model.num_experts
    ranks = _ranks(facts)
    legal = [n for n in divisors(ranks) if experts % n == 0 and not _uneven(facts, n, ranks)]
    if degree not in legal:
        shown = [f"--{DEGREE} {n}" for n in legal if n > degree][:1] or [f"--{DEGREE} {n}" for n in legal[-1:]]
        yield facts.layout_error(
            f"{ranks // degree} FSDP ranks share {experts // degree} experts of a layer and do not divide "
            f"{' and '.join(_uneven(facts, degree, ranks))}, rows of each.",
            DEGREE,
            why="with fewer experts than ranks FSDP splits the rows of every expert into equal parts",
            fix=shown[0] if shown else _more_replicas(facts),
        )


def _more_replicas(facts: Facts) -> str:
    """Flags that split weights over fewer ranks, and have more replicas, so that experts are split evenly."""
    parallelism = facts.config.parallelism
    shards = parallelism.shard_degree(facts.num_ranks)
    degree = parallelism.expert_parallel_degree
    legal = [n for n in divisors(shards) if n % degree == 0 and not _uneven(facts, degree, _ranks(facts) // shards * n)]
    if not legal:
        return "--model.expert_ffn_dim with a multiple of the ranks"
    replicas = parallelism.data_parallel_replicate_degree * shards // max(legal)
    return (
        f"--parallelism.data_parallel_replicate_degree {replicas} --parallelism.data_parallel_shard_degree {max(legal)}"
    )


def experts_are_not_resharded(facts: Facts) -> Violations:
    """An integer ``reshard_after_forward_mode`` needs whole weights that FSDP alone splits, by their first dim."""
    parallelism = facts.config.parallelism
    name = "parallelism.reshard_after_forward_mode"
    degree = parallelism.expert_parallel_degree
    mode = parallelism.reshard_after_forward_mode
    if not facts.has_experts or isinstance(mode, str) or degree < 1 or list(reshard_degree_divides(facts)):
        return
    assert facts.model is not None
    is_inside = facts.model.num_experts < _ranks(facts)
    if degree > 1 or is_inside:
        yield facts.layout_error(
            f"{name} {mode} is not possible "
            + (f"with expert_parallel_degree {degree}." if degree > 1 else "where experts are split inside."),
            name,
            why="torch reshards to fewer ranks only weights that FSDP alone has split, by their first dim",
            fix=f"--{name} never",
        )


EXPERT_RULES = (
    expert_parallel_divides,
    experts_split_evenly,
    experts_are_not_resharded,
)
