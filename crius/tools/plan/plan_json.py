"""A plan as data, for ``--json``. Torch-free."""

from collections.abc import Iterable, Mapping
from typing import Any

from crius.tools.plan.explain import explain
from crius.tools.plan.hardware import Hardware
from crius.tools.plan.memory import model_parameters
from crius.tools.plan.plan import Plan
from crius.tools.plan.remedies import Remedy
from crius.tools.plan.render import flags
from crius.tools.plan.search import Candidate, usable_bytes


def impossible_data(plan: Plan, remedies: Iterable[Remedy]) -> dict[str, Any]:
    """A plan of which nothing fits: the smallest layout, and what to change."""
    smallest = candidate_data(plan.smallest, plan.case.hardware) if plan.smallest else None
    return {**plan_data(plan, {}), "smallest": smallest, "remedies": [one.as_dict() for one in remedies]}


def plan_data(plan: Plan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes, seconds and tokens/s of a GPU."""
    case, winner, hardware = plan.case, plan.winner, plan.case.hardware
    return {
        "model": {
            "name": case.shape.name,
            "parameters": model_parameters(case.shape),
            "trainable": case.facts is not None,
        },
        "gpu": hardware.name,
        "num_gpus": case.num_gpus,
        "seq_len": case.config.training.seq_len,
        "global_batch_size": case.global_batch_size,
        "memory_bytes": hardware.memory_bytes,
        "usable_bytes": usable_bytes(hardware),
        "fits": winner is not None,
        "recommended": candidate_data(winner, hardware) if winner else None,
        "flags": " ".join(flags(settings)),
        "settings": dict(settings),
        "best": [candidate_data(one, hardware) for one in plan.rows],
        "rejected": [{**candidate_data(one.candidate, hardware), "reason": one.reason} for one in plan.rejected],
        "sensitivity": [
            {"change": one.text, "result": candidate_data(one.candidate, hardware) if one.candidate else None}
            for one in plan.nearby
        ],
        "least_gpus": plan.least_gpus or None,
        "outside_validated_range": plan.outside,
        "explanation": explain(plan.found, winner),
        "num_judged": plan.found.num_judged,
        "seconds": plan.seconds,
    }


def candidate_data(one: Candidate, hardware: Hardware) -> dict[str, Any]:
    """A candidate as data."""
    work = one.workload
    return {
        "layout": str(work.layout),
        "degrees": work.layout.degrees,
        "schedule": work.schedule if work.layout.pp > 1 else None,
        "stages_per_rank": work.stages_per_rank,
        "local_batch_size": work.microbatch,
        "num_microbatches": work.num_microbatches,
        "activation_checkpoint": work.activation_checkpoint,
        "compile": work.compile,
        "precision": work.precision,
        "async_tp": work.async_tp,
        "reshard": work.reshard,
        "gradient_sync": work.gradient_sync,
        "fits": one.fits,
        "tokens_per_second": one.tokens_per_second,
        "mfu": one.mfu(hardware),
        "step_seconds": one.time.total,
        "memory_bytes": one.memory.total,
        "memory": dict(one.memory.parts),
        "time": dict(one.time.parts),
    }
