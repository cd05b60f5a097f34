"""Tensors that are stored in pieces: read whole, stacked, and filled into tensors of a process."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoint_samples import TENSORS, local, pieces

from crius.checkpoint.contents import contents_hash
from crius.checkpoint.folder import read_manifest
from crius.checkpoint.load import load_tensors
from crius.checkpoint.manifest import digest_of
from crius.checkpoint.pieces import Piece, TensorSource, misfits, rows_from, shortened, stacked
from crius.checkpoint.plain import load_whole
from crius.errors import CheckpointError

BOXES = [((2, 1), (3, 2)), ((0, 0), (2, 3)), ((2, 0), (3, 1))]


def source_of(numbers, *, by_rows, dtype="F32"):
    """A tensor in the pieces of ``BOXES``."""

    def piece(at, offset, shape):
        rows, columns = (slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        part = numbers[rows, columns]

        def read(first=0, last=None):
            return memoryview(bytearray(part[first:last].tobytes()))

        return Piece(offset, shape, read, read if by_rows else None, ("file", -at))

    return TensorSource("w", dtype, numbers.shape, tuple(piece(at, *box) for at, box in enumerate(BOXES)))


@pytest.mark.parametrize("by_rows", [False, True])
def test_pieces_and_stacks_of_them_are_the_tensor_that_was_cut(by_rows):
    numbers = np.arange(30, dtype=np.float32).reshape(2, 5, 3)
    one, other = (source_of(part, by_rows=by_rows) for part in numbers)
    both = stacked("both", [one, other])
    assert (one.num_bytes, both.num_bytes, both.shape) == (60, 120, (2, 5, 3))
    assert np.array_equal(np.frombuffer(one.read(), np.float32), numbers[0].ravel())
    assert np.array_equal(np.frombuffer(both.read(), np.float32), numbers.ravel())
    for fill in (load_tensors, load_whole):
        targets = {"one": torch.nn.Parameter(torch.zeros(5, 3)), "both": torch.zeros(2, 5, 3)}
        fill({"one": one, "both": both}, targets)
        assert torch.equal(targets["one"], torch.from_numpy(numbers[0]))
        assert torch.equal(targets["both"], torch.from_numpy(numbers))


@pytest.mark.parametrize("by_rows", [False, True])
def test_rows_of_a_tensor_are_a_tensor_whose_rows_are_read_alone(by_rows):
    numbers = np.arange(15, dtype=np.float32).reshape(5, 3)

    def read(first=0, last=None):
        return memoryview(numbers[first:last].tobytes())

    whole = TensorSource("w", "F32", (5, 3), (Piece((0, 0), (5, 3), read, read if by_rows else None, ("file", 0)),))
    part = rows_from(whole, 1, 3)
    assert (part.shape, part.pieces[0].offset, part.pieces[0].shape) == ((3, 3), (0, 0), (3, 3))
    assert part.read() == numbers[1:4].tobytes()
    assert part.pieces[0].read_rows(1, 3) == numbers[2:4].tobytes()


def test_parts_of_several_dtypes_are_not_one_tensor():
    numbers = np.zeros((5, 3), np.float32)
    with pytest.raises(CheckpointError, match="w has dtype F32, w has dtype I32, but both"):
        stacked("both", [source_of(numbers, by_rows=False, dtype=dtype) for dtype in ("F32", "I32")])


def test_a_piece_of_the_only_size_is_read_as_it_is():
    data = memoryview(bytes(4))
    assert TensorSource("w", "F32", (1,), (Piece((0,), (1,), lambda: data),)).read() is data


def test_all_differences_of_two_models_are_named_and_many_are_counted():
    there = {"a": (1,), "b": (2, 3), "c": ()}
    assert misfits(there, there, "S", "T") == ""
    found = misfits(there, {"b": (3, 2), "c": (), "d": (4,)}, "S", "T")
    assert found.split("; ") == [
        "1 that T has and S lacks: d",
        "1 that S has and T lacks: a",
        "1 of another shape: b: [2, 3] in S, [3, 2] in T",
    ]
    assert misfits({"a": ()}, {"b": ()}, "S", "T", {"a", "b"}.__contains__) == ""
    assert shortened(list("abcdefgh")) == list("abcdefgh")
    assert shortened(list("abcdefghij")) == [*"abcdefgh", "and 2 more"]


@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_hash_of_the_contents_is_that_of_all_tensors_in_one_piece_without_those_of_ranks(prefix, tmp_path):
    disk = local(tmp_path, 20)
    manifest = read_manifest(disk, "step-00000020")
    of_ranks = {"rng.0": manifest.tensors["mask"], "model.w_scale.0": manifest.tensors["mask"]}
    data = b""
    for name, (dtype, shape, _) in sorted(TENSORS.items()):
        if name.startswith(prefix):
            parts = [part.tobytes() for _, of, _, _, _, part in pieces(0) if of == name]  # cut along the first dim
            data += json.dumps([name, dtype, shape]).encode() + b"".join(parts)
    full = replace(manifest, tensors={**manifest.tensors, **of_ranks})
    assert contents_hash(disk, "step-00000020", full, prefix) == digest_of(data)
