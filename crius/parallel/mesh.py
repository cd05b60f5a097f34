"""The device mesh and its named views. Only this file builds it."""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from crius.config.layout import Layout


@dataclass(frozen=True)
class Mesh:
    """Views of the ranks, as seen from this rank.

    Attributes:
        layout: the degrees.
        fsdp: mesh for ``fully_shard``: one axis of ``dp_shard * cp`` shards, or ``(dp_replicate, fsdp)``.
        shards: axis ``fsdp`` alone: ranks that weights are split over.
        tp: ranks that share the matmuls of a layer; None at degree 1.
        cp: ranks that share a sequence; None at degree 1.
        pp: ranks that hold the stages of one pipeline; None at degree 1.
        experts: mesh for ``fully_shard`` of experts, with an axis ``efsdp``; None: as ``fsdp``.
        ep: ranks that share the experts of a layer; None at degree 1.
        batch_rank: index of the slice of the global batch that this rank reads, below ``layout.batch``.
    """

    layout: Layout
    fsdp: DeviceMesh
    shards: DeviceMesh
    tp: DeviceMesh | None
    cp: DeviceMesh | None
    pp: DeviceMesh | None
    experts: DeviceMesh | None
    ep: DeviceMesh | None
    batch_rank: int


def build_mesh(layout: Layout, device_type: str, *, has_experts: bool = False) -> Mesh:
    """The mesh of all ranks. Axes of degree 1 are left out, except ``fsdp``, which every layout has.

    FSDP splits weights also over the ranks that share a sequence. So ``dp_shard`` and ``cp`` are one axis of the mesh,
    which ``fully_shard`` and tensor parallelism share. The ranks of one sequence are neighbours on this axis and have a
    second mesh. Experts have a third mesh if they are split over other ranks than the rest: also over the ranks of
    tensor parallelism, and first by expert.
    """
    degrees = {
        "pp": layout.pp,
        "dp_replicate": layout.dp_replicate,
        "fsdp": layout.dp_shard * layout.cp,
        "tp": layout.tp,
    }
    axes = {axis: degree for axis, degree in degrees.items() if degree > 1 or axis == "fsdp"}
    mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    cp = None
    if layout.cp > 1:
        ranks = torch.arange(layout.num_ranks).view(-1, layout.cp, layout.tp).transpose(1, 2).reshape(-1, layout.cp)
        cp = DeviceMesh(device_type, ranks, mesh_dim_names=("sequence", "cp"))["cp"]
    sparse = _expert_mesh(layout, device_type) if has_experts and max(layout.tp, layout.ep) > 1 else None
    replica = mesh.get_local_rank("dp_replicate") if "dp_replicate" in axes else 0
    return Mesh(
        layout=layout,
        fsdp=_with_replicas(mesh, "fsdp"),
        shards=mesh["fsdp"],
        tp=mesh["tp"] if "tp" in axes else None,
        cp=cp,
        pp=mesh["pp"] if "pp" in axes else None,
        experts=sparse and _with_replicas(sparse, "efsdp"),
        ep=sparse["ep"] if sparse and layout.ep > 1 else None,
        batch_rank=replica * layout.dp_shard + mesh.get_local_rank("fsdp") // layout.cp,
    )


def _with_replicas(mesh: DeviceMesh, shards: str) -> DeviceMesh:
    """The axis ``shards``, preceded by the axis of replicas if there are any."""
    return mesh["dp_replicate", shards] if "dp_replicate" in (mesh.mesh_dim_names or ()) else mesh[shards]


def _expert_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """All ranks for experts. Ranks that share the experts of a layer are neighbours."""
    degrees = {"pp": layout.pp, "dp_replicate": layout.dp_replicate, "efsdp": layout.efsdp, "ep": layout.ep}
    axes = {axis: degree for axis, degree in degrees.items() if degree > 1 or axis == "efsdp"}
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
