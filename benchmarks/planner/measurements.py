"""Published measurements: rows of a CSV file to ``Measurement``. Torch-free.

``benchmarks/planner/README.md`` lists the columns. A blank field takes the usual value of its framework; a row that
cannot be planned at all is kept apart with the reason.
"""

import csv
import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, cast

from planner.measured_fields import (
    YES,
    RowError,
    checkpointing,
    count,
    hardware_of,
    layout_of,
    microbatch,
    microbatches,
    number,
    precision,
    schedule,
    stages_per_rank,
)
from planner.trainers import TRAINERS, Other

from crius.errors import ConfigError
from crius.models.description import ModelDescription
from crius.tools.plan.hardware import Hardware
from crius.tools.plan.shapes import PlannedConfig, planned
from crius.tools.plan.workload import Loss, Workload
from crius.units import GIB

NEEDED = (
    *("id", "model", "layers", "dim", "ffn", "heads", "kv_heads", "vocab", "seq_len", "gpu", "n_gpus"),
    *("dp_shard", "dp_replicate", "tp", "cp", "pp", "ac_mode", "precision", "tps_per_gpu", "peak_mem_gib"),
)

FRAMEWORKS = {  # by how the column's text begins
    "crius": "crius",
    "torchtitan-graph": "torchtitan_graph",
    "torchtitan": "torchtitan",
    "kempnerforge": "kempnerforge",
    "megatron": "megatron",
    "nemo": "megatron",
    "simumax": "megatron",
    "llm-foundry": "fsdp1",
    "fms-fsdp": "fsdp1",
    "nanotron": "nanotron",
}
_DELIMITERS = (",", ";", "\t")  # the first of those that the header has most of
MILLION = 1_000_000
"""A smaller number of parameters counts thousands or billions, and does not say which."""
MemoryKind = Literal["reserved", "allocated", "unknown"]


@dataclass(frozen=True)
class Measurement:
    """One published run.

    Attributes:
        name: of the row.
        source: who published it.
        family: of sources whose rows resemble each other.
        workload: what ran.
        gpu: as the row spells it.
        hardware: on what.
        tokens_per_second: of one GPU; None: not published.
        memory_bytes: highest of a rank; None: not published.
        memory_kind: whether the allocator's cache is in ``memory_bytes``.
        says_checkpointing: what is recomputed is stated, not assumed to be nothing.
        too_large: sequences of a microbatch with which the run is said to be out of memory; 0: nothing is said.
        ran_out: the run itself ran out of memory, so that it has no speed and no peak.
        notes: what is assumed.
    """

    name: str
    source: str
    family: str
    workload: Workload
    gpu: str
    hardware: Hardware
    tokens_per_second: float | None
    memory_bytes: float | None
    memory_kind: MemoryKind
    says_checkpointing: bool
    too_large: int
    ran_out: bool
    notes: str

    @property
    def has_experts(self) -> bool:
        """A mixture of experts."""
        return self.workload.model.num_experts > 0


@dataclass(frozen=True)
class Unjudged:
    """A row that cannot be planned, and why."""

    name: str
    reason: str


def read_measurements(path: str | Path) -> tuple[list[Measurement], list[Unjudged]]:
    """The rows of a CSV file.

    Raises:
        ConfigError: no such file, not a CSV file, or columns are missing, all of them named.
    """
    where = str(path)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            text = file.read().lstrip()
        head = text.partition("\n")[0]
        delimiter = max(_DELIMITERS, key=head.count)
        reader = csv.DictReader(io.StringIO(text), delimiter=delimiter, skipinitialspace=True)
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            "the measurements cannot be read.", where=where, why=f"{error}", fix="give a CSV file in UTF-8"
        ) from error
    if not rows:
        raise ConfigError(
            "there are no measurements.",
            where=where,
            why=f"the file has {'a header and no rows' if head else 'nothing in it'}",
            fix="give a CSV file with a header and a row a run",
        )
    missing = [column for column in NEEDED if column not in rows[0]]
    if missing:
        raise ConfigError(
            f"the measurements lack the columns {', '.join(missing)}.",
            where=where,
            why=f"the first line with text in it is the header, and says {head.strip()[:200]!r}",
            fix="add them; benchmarks/planner/README.md says what they hold",
        )
    return judge_rows(rows)


def judge_rows(rows: Iterable[Mapping[str, str | None]]) -> tuple[list[Measurement], list[Unjudged]]:
    """Rows that can be planned, and the others."""
    measured: list[Measurement] = []
    unjudged: list[Unjudged] = []
    for position, row in enumerate(rows, start=1):
        fields = {
            key: (value or "").strip()
            for key, value in row.items()
            if isinstance(key, str) and not isinstance(value, list)
        }
        name = fields.get("id") or f"row {position}"
        try:
            measured.append(measurement(name, fields))
        except (RowError, ConfigError) as error:
            unjudged.append(Unjudged(name, str(error)))
    return measured, unjudged


def measurement(name: str, row: Mapping[str, str]) -> Measurement:
    """One row.

    Raises:
        RowError: it cannot be planned.
    """
    tokens, gibibytes = number(row, "tps_per_gpu", None), number(row, "peak_mem_gib", None)
    ran_out = row.get("oom", "").lower() in YES or "oom" in (row["tps_per_gpu"].lower(), row["peak_mem_gib"].lower())
    if ran_out and tokens is not None:
        raise RowError(f"it ran out of memory (oom), and had {tokens:g} tokens/s")
    if tokens is None and gibibytes is None and not ran_out:
        raise RowError("neither tokens/s nor memory is published, and oom does not say that it ran out of memory")
    kind = row.get("mem_kind", "")
    workload = _workload(row)
    return Measurement(
        name=name,
        source=row.get("source", ""),
        family=row.get("family", "") or "other",
        workload=workload,
        gpu=row["gpu"],
        hardware=hardware_of(row),
        tokens_per_second=tokens,
        memory_bytes=None if gibibytes is None or ran_out else gibibytes * GIB,
        memory_kind=_memory_kind(kind, row.get("framework", "")),
        says_checkpointing=bool(row["ac_mode"]),
        too_large=workload.microbatch if ran_out else _too_large(row.get("notes", "")),
        ran_out=ran_out,
        notes=row.get("notes", ""),
    )


def _too_large(notes: str) -> int:
    found = re.search(r"lbs (\d+) OOMs", notes)
    return int(found[1]) if found else 0


def _memory_kind(text: str, framework: str) -> MemoryKind:
    """What a figure counts; nanotron's tables give what was allocated at most, without saying so."""
    if "alloc" in text or framework.startswith("nanotron"):
        return "allocated"
    return "reserved" if "reserved" in text else "unknown"


def _workload(row: Mapping[str, str]) -> Workload:
    layout = layout_of(row)
    framework = _framework(row.get("framework", ""))
    compiled = _compiled(row, framework)
    mode, every = checkpointing(row["ac_mode"])
    keeps_gradients = framework == "kempnerforge" or "no_sync" in row.get("notes", "")
    usual = 3 if layout.dp_shard > 1 else 1
    zero = count(row, "zero_stage", usual, least=0)
    zero = zero if zero <= 3 else usual
    recipe = row.get("float8_recipe", "")
    kind = Workload if framework == "crius" else partial(Other, framework=framework, **TRAINERS[framework])
    return kind(
        model=_model(row),
        layout=layout,
        seq_len=count(row, "seq_len"),
        microbatch=microbatch(row, layout),
        num_microbatches=microbatches(row, layout),
        schedule=schedule(row),
        stages_per_rank=stages_per_rank(row, layout),
        activation_checkpoint=mode,
        selective_layers=every,
        compile=compiled,
        precision=precision(row),
        float8_recipe=recipe,
        float8_all_gather="allgather" in recipe,
        weight_bytes=2 if "bf16 params" in row.get("state_bytes_note", "") or "PURE" in row.get("notes", "") else 4,
        moment_bytes=2 if "8 B/param" in row.get("state_bytes_note", "") else 4,
        sequence_parallel="no SP" not in row.get("notes", ""),
        reduce_bytes=2 if "PURE" in row.get("notes", "") else 4,
        zero_stage=zero,
        reshard=row.get("reshard", "") or ("never" if framework == "torchtitan_graph" and compiled else "default"),
        gradient_sync="deferred" if keeps_gradients or zero < 2 or layout.pp > 1 else "immediate",
        async_tp=row.get("async_tp", "").lower() in YES or _overlaps_tp(row, framework),
        loss=_loss(row, framework, compiled),
    )


def _model(row: Mapping[str, str]) -> ModelDescription:
    heads, dim = count(row, "heads"), count(row, "dim")
    layers, experts = count(row, "layers"), count(row, "n_experts", 0, least=0)
    published = number(row, "params", None) or 0.0
    chosen = count(row, "top_k", 1 if experts else 0, least=0)
    config = PlannedConfig(
        num_layers=layers,
        dim=dim,
        ffn_dim=count(row, "ffn"),
        num_heads=heads,
        num_kv_heads=count(row, "kv_heads", heads),
        head_dim=count(row, "head_dim", dim // heads),
        vocab_size=count(row, "vocab"),
        tied_embeddings=row.get("tied", "").lower() in YES,
        gated=row.get("gated", "").lower() not in ("0", "0.0", "false", "no"),
        num_experts=experts,
        top_k=experts if "experts as bmm" in row.get("notes", "") else chosen,  # all tokens visit all of them
        expert_ffn_dim=count(row, "moe_ffn", count(row, "ffn") if experts else 0, least=0),
        shared_ffn_dim=count(row, "shared_ffn", 0, least=0),
        num_dense_layers=min(layers, count(row, "n_dense_layers", 0, least=0)),
        attention="mla" if row.get("attn_kind", "") == "mla" else "gqa",
    )
    return planned(row["model"], config, int(published) if published >= MILLION else None)


def _framework(text: str) -> str:
    return next((framework for start, framework in FRAMEWORKS.items() if text.lower().startswith(start)), "other")


def _compiled(row: Mapping[str, str], framework: str) -> bool:
    """Compiled; of Megatron: launched from CUDA graphs, as releases since 26.06 do, and those without token routing."""
    if framework == "megatron":
        release = re.search(r"performance-summary (\d+\.\d+)", row.get("source", ""))
        return (release is not None and float(release[1]) >= 26.06) or "tokendrop" in row.get("notes", "")
    stated = row.get("compile", "")
    return stated.lower() in YES or (framework == "kempnerforge" and not stated)  # its other rows are compiled


def _overlaps_tp(row: Mapping[str, str], framework: str) -> bool:
    """NVIDIA's recipes overlap tensor parallelism (TransformerEngine's user buffers), bare Megatron-LM does not."""
    return framework == "megatron" and not row.get("framework", "").lower().startswith("megatron-lm")


def _loss(row: Mapping[str, str], framework: str, compiled: bool) -> Loss:
    stated = row.get("loss_impl", "").removesuffix("_ce")
    if stated in ("eager", "compiled", "chunked", "fused"):
        return cast(Loss, stated)
    if row.get("framework", "").startswith("llm-foundry"):  # its default: loss_fn fused_crossentropy
        return "fused"
    usual: dict[str, Loss] = {"megatron": "fused", "nanotron": "eager"}
    if "no grad-accum fusion" in row.get("notes", ""):  # nor of anything else
        return "eager"
    return usual.get(framework, "compiled" if compiled else "eager")
