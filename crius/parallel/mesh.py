"""The device mesh and its named views. Built here and nowhere else."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from crius.parallel.dims import ParallelDims


@dataclass(frozen=True)
class Mesh:
    """Views of one ``DeviceMesh``.

    Attributes:
        dims: the degrees.
        fsdp: what ``fully_shard`` takes: one axis of shards, or ``(dp_replicate, dp_shard)`` with replicas.
        batch_rank: which of the ``dims.batch`` slices of the global batch this rank reads.
    """

    dims: ParallelDims
    fsdp: DeviceMesh
    batch_rank: int


def build_mesh(dims: ParallelDims, device_type: str) -> Mesh:
    """The mesh of all ranks; axes of degree 1 are left out, but for ``dp_shard``, which FSDP always uses."""
    axes = {axis: degree for axis, degree in dims.degrees.items() if degree > 1 or axis == "dp_shard"}
    mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    data_axes = tuple(axis for axis in ("dp_replicate", "dp_shard") if axis in axes)
    fsdp = mesh[data_axes] if len(data_axes) > 1 else mesh["dp_shard"]
    replica = mesh.get_local_rank("dp_replicate") if "dp_replicate" in axes else 0
    return Mesh(dims, fsdp, replica * dims.dp_shard + mesh.get_local_rank("dp_shard"))
