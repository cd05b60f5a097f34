"""Rules of models with experts."""

from crius.config.facts import Facts, Violations
from crius.config.load import CUSTOM
from crius.config.param_groups import group_of, parse_group

SETTINGS = (
    "--moe.aux_loss",
    "--moe.aux_loss_coefficient",
    "--moe.z_loss_coefficient",
    "--moe.bias_update_rate",
)


def balance_is_of_sequences(facts: Facts) -> Violations:
    """A balance loss is taken over the tokens of one sequence, which no layout splits."""
    asked = facts.config.moe.aux_loss
    if asked not in ("sequence", "none"):
        yield facts.error(
            f"moe.aux_loss {asked} must be sequence or none.",
            "moe.aux_loss",
            why="a balance loss over a microbatch or a rank's part of the batch depends on how the batch is split: "
            "another layout would give another curve",
            fix="--moe.aux_loss sequence",
        )


def settings_need_experts(facts: Facts) -> Violations:
    """Settings that balance experts are given only for models with experts."""
    if facts.model is None or facts.config.model.num_experts == 0:
        return  # known_model or ranges reports it
    if not facts.model.num_experts:
        yield from facts.no_effect(SETTINGS, f": {facts.model_name} has no experts", "leave it out")
        return
    if not getattr(facts.model.config, "router_bias", False):
        reason = f": the router of {facts.model_name} has no bias"
        yield from facts.no_effect(["--moe.bias_update_rate"], reason, "leave it out")
    if facts.config.moe.aux_loss == "none":
        reason = " with --moe.aux_loss none"
        yield from facts.no_effect(["--moe.aux_loss_coefficient"], reason, "--moe.aux_loss sequence")


def experts_are_enough(facts: Facts) -> Violations:
    """A token visits some of the experts, each of them once."""
    model = facts.model
    if model is None or not model.num_experts or min(model.num_experts, model.top_k) < 1:
        return  # known_model reports it
    if model.top_k > model.num_experts:
        yield facts.error(
            f"model.top_k {model.top_k} is more than the {model.num_experts} experts of {facts.model_name}.",
            *(facts.given("model.top_k", "model.num_experts") or ["model.top_k"]),
            why="a token visits each of its experts once",
            fix=f"--model.top_k {model.num_experts}, or more experts: --model.num_experts {model.top_k}",
        )
    is_free = facts.config.model.flavor == CUSTOM and model.config.ffn_dim == facts.config.model.ffn_dim
    if not model.dense[0] and not is_free:
        reason = f": all layers of {facts.model_name} have experts, whose width is model.expert_ffn_dim"
        yield from facts.no_effect(["--model.ffn_dim"], reason, "leave it out")


def router_learns(facts: Facts) -> Violations:
    """A router that chooses one expert, and gives it weight 1, has no gradient but that of the balance losses."""
    model = facts.model
    moe = facts.config.moe
    if not facts.has_experts or model.top_k != 1 or not model.config.norm_topk or facts.config.lora.is_on:
        return
    if (moe.aux_loss == "none" or moe.aux_loss_coefficient == 0) and moe.z_loss_coefficient == 0:
        yield facts.error(
            f"the router of {facts.model_name} would learn nothing with model.top_k 1 and without a balance loss.",
            "model.top_k",
            why="the weights of a token's experts are divided by their sum: with one expert the weight is always 1",
            fix="--model.top_k 2, or --moe.aux_loss sequence --moe.aux_loss_coefficient 1e-3",
        )


def some_layer_has_experts(facts: Facts) -> Violations:
    """The first layers of a model with experts may be dense, but not all of them."""
    model = facts.model
    num_dense = getattr(model.config, "num_dense_layers", 0) if model else 0
    if model is not None and 0 < model.num_layers <= num_dense:
        yield facts.error(
            f"model.num_layers {model.num_layers} leaves {facts.model_name} no layer with experts.",
            "model.num_layers",
            why=f"its first {num_dense} are dense",
            fix=f"--model.num_layers {num_dense + 1}",
        )


def groups_have_enough(facts: Facts) -> Violations:
    """Groups have equal size and at least two experts, and the best groups have enough experts for a token."""
    model = facts.model
    groups = getattr(model.config, "num_groups", 1) if model else 1
    if model is None or not facts.has_experts or groups <= 1 or min(model.num_experts, model.top_k) < 1:
        return
    experts = model.num_experts
    best = model.config.top_groups
    if experts % groups or experts < 2 * groups:
        yield facts.error(
            f"model.num_experts {experts} does not divide into {groups} equal groups of two or more.",
            "model.num_experts",
            why=f"{facts.model_name} chooses among its groups by their two best experts",
            fix=f"--model.num_experts {max(2, -(-experts // groups)) * groups}",
        )
    elif model.top_k > best * experts // groups:
        yield facts.error(
            f"model.top_k {model.top_k} is more than the experts in the best {best} of {groups} groups of "
            f"{facts.model_name}, {best * experts // groups} of {experts}.",
            "model.top_k",
            why="a token visits experts of its best groups only",
            fix=f"--model.top_k {max(1, best * experts // groups)}",
        )


def muon_needs_matrices(facts: Facts) -> Violations:
    """Muon would not recognise stacked experts as matrices, and would leave them to AdamW without a message."""
    optimizer = facts.config.optimizer
    if not facts.has_experts:
        return
    try:
        specs = [parse_group(text) for text in optimizer.param_groups]
    except ValueError:
        return  # another rule reports it
    experts = [weight.name for weight in facts.model.weights if weight.kind == "expert"]
    chosen = {name: spec.optimizer if (spec := group_of(specs, name)) else None for name in experts}
    if any((kind or optimizer.name) == "muon" for kind in chosen.values()):
        yield facts.error(
            f"Muon does not update the experts of {facts.model_name}.",
            "optimizer.name",
            why="Muon for stacked matrices is not built yet",
            fix='--optimizer.param_groups "feed_forward.experts: optimizer=adamw", or --optimizer.name adamw',
        )


MOE_RULES = (
    balance_is_of_sequences,
    settings_need_experts,
    experts_are_enough,
    router_learns,
    some_layer_has_experts,
    groups_have_enough,
    muon_needs_matrices,
)
