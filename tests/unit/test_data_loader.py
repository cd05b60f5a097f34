"""Batches: the same for any number of ranks, resumed exactly, and errors of the thread reach the consumer."""

import json
import threading
import time

import numpy as np
import pytest
import torch
from sft_samples import samples_folder

from crius.config.data import DataConfig, TokenizerConfig
from crius.data.corpus import boundary_of
from crius.data.documents import Piece
from crius.data.loader import IGNORE_INDEX, Batch, BatchLoader, validation_batches
from crius.data.prepare import write
from crius.data.samples import SampleSource
from crius.data.source import Rows
from crius.data.stream import ShardReader, StreamSource
from crius.data.tokens import IndexedSource, TokenFile
from crius.data.work import document_work
from crius.errors import ConfigError, DataError
from crius.tokens.tokenizer import ByteTokenizer

B, T, V = 8, 16, 8
BOUNDARY = boundary_of(DataConfig(), ByteTokenizer())


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    out = tmp_path_factory.mktemp("tokens") / "t"
    pieces = [Piece(f"document {number} " * 5, True) for number in range(40)]
    write(out, document_work(pieces, ByteTokenizer(), TokenizerConfig()), ByteTokenizer(), source="test")
    return TokenFile(out)


def indexed(file, shuffle=True):
    sizes = {"seq_len": T, "vocab_size": 257, "seed": 0}
    return IndexedSource(file, 0, file.meta.num_tokens, boundary=BOUNDARY, **sizes, shuffle=shuffle)


def stream():
    def reader(shard):
        texts = [f"shard {shard} document {number} " * (number % 4 + 1) for number in range(5)]
        return ShardReader(
            lambda document: iter([{"text": text} for text in texts[document:]]),
            f"shard {shard}",
            ByteTokenizer(),
            boundary=BOUNDARY,
            seq_len=T,
            text_field="text",
            keep=lambda document: True,
        )

    return StreamSource(reader, num_shards=V, seq_len=T, identity="test")


@pytest.fixture(scope="module")
def samples_file(tmp_path_factory):
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 20, 150).tolist()
    pairs = [(rng.integers(0, 257, length), np.arange(length) % 3 > 0) for length in lengths]
    return samples_folder(tmp_path_factory.mktemp("samples") / "s", pairs)


def samples(file, **options):
    sizes = {"seq_len": T, "vocab_size": 257, "seed": 0, "packing": True, "too_long": "truncate", "shuffle": True}
    return SampleSource(file, 0, len(file.documents), **sizes | options)


@pytest.fixture(params=["indexed", "stream", "samples"])
def source(request, file, samples_file):
    return {"indexed": lambda: indexed(file), "stream": stream, "samples": lambda: samples(samples_file)}[request.param]


def loaders(source, num_ranks, prefetch=2, size=B, **options):
    return [
        BatchLoader(source(), global_batch_size=size, rank=rank, num_ranks=num_ranks, prefetch=prefetch, **options)
        for rank in range(num_ranks)
    ]


def steps(ranks, count):
    """Rows of each step as {sample id: (tokens, labels, positions)}, over all ranks."""
    found = []
    for _ in range(count):
        rows = {}
        for batch in map(next, ranks):
            assert len(batch) == ranks[0].global_batch_size // len(ranks)
            for row, sample_id in enumerate(batch.sample_ids):
                assert sample_id not in rows
                parts = (batch.tokens_BT[row], batch.labels_BT[row], batch.positions_BT[row])
                rows[sample_id] = tuple(tuple(part.tolist()) for part in parts)
        found.append(rows)
    return found


def close(ranks):
    for rank in ranks:
        rank.close()


def merged(ranks):
    states = json.loads(json.dumps([rank.state_dict() for rank in ranks]))
    return states[0] | {"cursors": {key: value for state in states for key, value in state["cursors"].items()}}


def test_without_a_state_it_starts_after_the_steps_that_are_done(file):
    [loader] = loaders(lambda: indexed(file), 1)
    next(loader)
    loader.start_at(3)
    assert next(loader).sample_ids == tuple(range(3 * B, 4 * B))
    assert loader.step == 4
    loader.close()


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_batch_of_a_step_is_the_same_for_any_number_of_ranks(source, num_ranks, prefetch):
    one, many = loaders(source, 1, prefetch), loaders(source, num_ranks, prefetch)
    want = steps(one, 12)
    assert [sorted(rows) for rows in want] == [list(range(s * B, s * B + B)) for s in range(12)]
    assert steps(many, 12) == want
    close(one + many)


@pytest.mark.parametrize("source", ["indexed", "stream"], indirect=True)
def test_labels_are_the_next_tokens(source):
    (loader,) = loaders(source, 1)
    batch = next(loader)
    assert batch.tokens_BT.shape == batch.labels_BT.shape == batch.positions_BT.shape == (B, T)
    assert {tensor.dtype for tensor in (batch.tokens_BT, batch.labels_BT, batch.positions_BT)} == {torch.int64}
    assert torch.equal(batch.tokens_BT[:, 1:], batch.labels_BT[:, :-1]) and batch.ends_BM is None
    loader.close()


@pytest.mark.parametrize("before, after", [(1, 1), (2, 2), (2, 4), (8, 1)])
def test_it_resumes_at_every_boundary_on_any_number_of_ranks(source, before, after):
    whole = loaders(source, 1, prefetch=0)
    want = steps(whole, 10)
    for at in range(10):
        first = loaders(source, before)
        steps(first, at)
        state = merged(first)
        close(first)
        second = loaders(source, after)
        for loader in second:
            loader.load_state_dict(state)
            assert loader.step == at
        assert merged(second) == state
        assert steps(second, 10 - at) == want[at:]
        close(second)


def test_a_loader_that_ran_ahead_can_be_set_back(source):
    (loader,) = loaders(source, 1)
    want = steps([loader], 2)
    state = loader.state_dict()
    want = steps([loader], 3)
    loader.load_state_dict(state)
    assert steps([loader], 3) == want
    loader.close()


def test_the_state_is_what_was_consumed_not_what_was_prefetched(source):
    (eager,), (lazy,) = loaders(source, 1, prefetch=4), loaders(source, 1, prefetch=0)
    next(eager), next(lazy)
    time.sleep(0.1)  # the thread is 4 batches ahead by now
    assert eager.state_dict() == lazy.state_dict()
    eager.close()


def test_another_batch_size_goes_on_with_the_next_sample(source):
    first = loaders(source, 2)
    seen = [sample_id for rows in steps(first, 3) for sample_id in rows]
    second = loaders(source, 4, size=12)
    for loader in second:
        loader.load_state_dict(merged(first))
    for rows in steps(second, 3):
        seen += rows
    assert sorted(seen) == list(range(3 * 8 + 3 * 12))
    assert [loader.state_dict()["since"] for loader in (first[0], second[0])] == [[0, 0, 8, 0], [3, 24, 12, 0]]
    close(first + second)


def test_a_batch_size_that_moves_the_ranks_keeps_the_shards_apart():
    """4 samples in, 4 % 5 is not 0: rank r must read the shards it has the cursors of, rank 4 from their start."""
    make = lambda: StreamSource(stream().reader, num_shards=20, seq_len=T, identity="test")  # noqa: E731
    first = loaders(make, 4, size=4)
    seen = steps(first, 1)
    second = loaders(make, 5, size=10)
    for loader in second:
        loader.load_state_dict(merged(first))
    seen += steps(second, 2)
    whole = loaders(make, 1, size=24)
    assert {k: v for rows in seen for k, v in rows.items()} == steps(whole, 1)[0]
    close(first + second + whole)


def test_an_epoch_trains_on_no_sequence_twice(file):
    data = indexed(file)
    (loader,) = loaders(lambda: data, 1, size=1)
    tokens = [tuple(next(loader).tokens_BT[0].tolist()) for _ in range(2 * data.num_samples)]
    all_windows = sorted(map(tuple, indexed(file, shuffle=False).read(range(data.num_samples)).tokens.tolist()))
    assert sorted(tokens[: data.num_samples]) == sorted(tokens[data.num_samples :]) == all_windows
    assert tokens[: data.num_samples] != tokens[data.num_samples :]
    loader.close()


@pytest.mark.parametrize("ranks", [(1, 1, 1), (2, 4, 1), (4, 8, 2)])
def test_epochs_train_on_each_sample_as_often_wherever_the_run_resumes(file, samples_file, ranks):
    """The batch changes too, and no step but the last of an attempt is short."""
    for make in (lambda: indexed(file), lambda: samples(samples_file)):
        end, seen, state, parts = 3 * make().num_samples, [], None, []
        for num_ranks, size in zip(ranks, (8, 24, 16), strict=True):
            parts = loaders(make, num_ranks, size=size, end_sample=end)
            for loader in parts if state else ():
                loader.load_state_dict(state)
            left = parts[0].steps_left
            assert left == -(-(end - len(seen)) // size)
            for rows in steps(parts, left if num_ranks == ranks[-1] and size == 16 else min(left, 4)):
                assert all(set(labels) == {IGNORE_INDEX} for number, (_, labels, _) in rows.items() if number < 0)
                seen += [number for number in rows if number >= 0]
            state = merged(parts)
            close(parts)
        assert sorted(seen) == list(range(end)) and parts[0].steps_left == 0
        more = loaders(
            make, 2, end_sample=end + 5
        )  # an epoch more starts with the next sample, not with the next batch
        for loader in more:
            loader.load_state_dict(state)
        assert sorted(number for number in steps(more, 1)[0] if number >= 0) == list(range(end, end + 5))
        close(more)


def test_padding_keeps_its_place_among_virtual_shards(file):
    """Each shard has as many rows as in any other step, so that sums are the same on any number of ranks."""
    (loader,) = loaders(lambda: indexed(file), 1, end_sample=B + 3)
    assert next(loader).grouped(4).sample_ids == (0, 4, 1, 5, 2, 6, 3, 7)
    grouped = next(loader).grouped(4)
    assert [number if number >= 0 else ~number for number in grouped.sample_ids] == [8, 12, 9, 13, 10, 14, 11, 15]
    assert [number >= 0 for number in grouped.sample_ids] == [True, False, True, False, True, False, False, False]
    loader.close()


def test_start_step_begins_there_and_a_stream_refuses_it(file):
    (loader,) = loaders(lambda: indexed(file), 1, start_step=3)
    assert next(loader).sample_ids == tuple(range(3 * B, 4 * B)) and loader.step == 4
    loader.close()
    with pytest.raises(DataError, match="step 3 of a stream"):
        next(loaders(stream, 1, start_step=3)[0])


def test_a_state_of_other_shards_or_other_data_is_noticed(file, caplog):
    (loader,) = loaders(stream, 1)
    state = loader.state_dict()
    less = {key: value for key, value in state["cursors"].items() if key != "7"}
    with pytest.raises(DataError, match=r"needs 7 here(?s:.)*--data.virtual_shards"):
        loader.load_state_dict(state | {"cursors": less})
    with pytest.raises(DataError, match="this run has 8 shards"):
        loader.load_state_dict(state | {"cursors": state["cursors"] | {"8": [0, 0, 0]}})
    (other,) = loaders(lambda: indexed(file), 1)
    other.load_state_dict(state | {"cursors": {}})
    assert "the data changed since the checkpoint" in caplog.text


def test_ranks_that_do_not_divide_are_refused(file):
    with pytest.raises(ConfigError, match=r"3 data-parallel ranks(?s:.)*--training.global_batch_size 9"):
        loaders(lambda: indexed(file), 3)
    with pytest.raises(ConfigError, match=r"3 data-parallel ranks(?s:.)*--data.virtual_shards 9"):
        loaders(stream, 3, size=6)


class Breaks:
    """A source whose third batch cannot be read."""

    seq_len, num_shards, identity = T, 0, "breaks"

    def read(self, sample_ids):
        if sample_ids[0] >= 2 * B:
            raise DataError("the disk is gone.")
        return Rows(*np.zeros((3, len(sample_ids), T), np.int64))

    def cursors(self, shards):
        return {}


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_an_error_of_the_thread_reaches_the_consumer_after_the_good_batches_and_stays(prefetch):
    (loader,) = loaders(Breaks, 1, prefetch)
    start = time.monotonic()
    next(loader), next(loader)
    for _ in range(2):
        with pytest.raises(DataError, match="the disk is gone"):
            next(loader)
    assert time.monotonic() - start < 2 and loader.step == 2
    loader.close()


def test_close_stops_the_thread_also_when_nothing_was_taken(source):
    for prefetch in (0, 1, 3):
        (loader,) = loaders(source, 1, prefetch)
        next(loader)
        loader.close()
        loader.close()
        assert not any(thread.name == "crius-prefetch" for thread in threading.enumerate())
        with pytest.raises(StopIteration):
            next(loader)
    loaders(source, 1)[0].close()


def test_microbatches_are_slices_and_must_divide(file):
    (loader,) = loaders(lambda: indexed(file), 1)
    batch = next(loader)
    parts = list(batch.microbatches(2))
    assert (
        len(parts) == 4
        and len([*batch.microbatches(1)]) == B
        and sum((part.sample_ids for part in parts), ()) == batch.sample_ids
    )
    assert torch.equal(torch.cat([part.labels_BT for part in parts]), batch.labels_BT)
    assert isinstance(batch.to("cpu"), Batch) and batch.to("cpu").tokens_BT is batch.tokens_BT
    for size in (0, 3, 16):
        with pytest.raises(ValueError, match="do not divide"):
            list(batch.microbatches(size))
    loader.close()


@pytest.mark.parametrize(
    ("starts", "length", "ends"),
    [
        ([(2, 3, 5), (), (1,)], 6, [[2, 3, 5, 6], [6, 6, 6, 6], [1, 6, 6, 6]]),
        ([(4,), (3,), (5,)], 6, [[4, 6], [3, 6], [5, 6]]),
        ([(), ()], 6, [[6], [6]]),
        ([(1, 2)], 3, [[1, 2, 3, 3]]),  # more columns than tokens
    ],
)
def test_a_batch_has_the_ends_of_the_documents_of_each_row(starts, length, ends):
    positions = torch.arange(length).repeat(len(starts), 1)
    for row, places in enumerate(starts):
        for place in places:
            positions[row, place:] = torch.arange(length - place)
    batch = Batch(positions, positions, positions, tuple(range(len(starts))))
    most = 1 + max(map(len, starts))
    assert batch.with_ends(most).ends_BM.tolist() == ends
    assert batch.with_ends(most - 1).ends_BM is None
    counted = batch.with_ends(most).counted()
    assert counted.ends_BM is None and counted.positions_BT.tolist() == [list(range(length))] * len(starts)


@pytest.mark.parametrize("num_samples, batch_size", [(10, 2), (7, 3), (10_000, 8), (1, 4)])
def test_validation_scores_the_same_sequences_on_any_number_of_ranks(file, num_samples, batch_size):
    held = indexed(file, shuffle=False)

    def scored(num_ranks):
        ranks = [
            list(validation_batches(held, num_samples=num_samples, batch_size=batch_size, rank=r, num_ranks=num_ranks))
            for r in range(num_ranks)
        ]
        assert len({len(batches) for batches in ranks}) == 1
        rows = {}
        for batch in (batch for batches in ranks for batch in batches):
            assert batch.tokens_BT.shape == (batch_size, T) and batch.ends_BM is None
            for row, sample_id in enumerate(batch.sample_ids):
                if sample_id == -1:
                    assert (batch.labels_BT[row] == IGNORE_INDEX).all()
                else:
                    assert sample_id not in rows and (batch.labels_BT[row] != IGNORE_INDEX).all()
                    rows[sample_id] = batch.tokens_BT[row].tolist()
        return rows

    want = scored(1)
    assert len(want) == min(num_samples, held.num_samples)
    for num_ranks in (2, 3, 8):
        assert scored(num_ranks) == want


def test_validation_is_spread_over_what_is_held_out(file):
    held = indexed(file, shuffle=False)
    (batch,) = validation_batches(held, num_samples=4, batch_size=4, rank=0, num_ranks=1)
    assert batch.sample_ids == tuple(held.num_samples * k // 4 for k in range(4))
