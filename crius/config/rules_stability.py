"""Rules about the stability policies: what is given for one is not given to another."""

from crius.config.facts import Facts, Rule, Violations
from crius.errors import ConfigError


def stability_flags_have_effect(facts: Facts) -> Violations:
    """Settings that were given on the command line belong to a policy of this run."""
    stability = facts.config.stability
    no_spikes = stability.spike == "off"
    counts = stability.nonfinite != "stop" or stability.spike in ("skip", "warn")
    rows = (
        ("spike_zscore", no_spikes, "stability.spike off", "--stability.spike warn"),
        ("window", no_spikes, "stability.spike off", "--stability.spike warn"),
        (
            "snapshot_interval",
            stability.nonfinite != "rollback",
            f"stability.nonfinite {stability.nonfinite}, which takes no snapshots",
            "--stability.nonfinite rollback",
        ),
        (
            "max_consecutive",
            not counts,
            f"stability.nonfinite stop and spike {stability.spike}: the run goes on after neither",
            "--stability.nonfinite skip",
        ),
    )
    for field, is_vain, reason, fix in rows:
        name = f"stability.{field}"
        if is_vain and facts.origin(name) == "command line":
            yield ConfigError(f"{name} has no effect with {reason}.", where=facts.flag(name), fix=f"e.g. {fix}")


STABILITY_RULES: tuple[Rule, ...] = (stability_flags_have_effect,)
