"""A mixture read by loaders: the same samples on any number of ranks, and from any state."""

from itertools import islice

import numpy as np
import pytest
from mixture_samples import BATCH, STEPS, mixture_flags

from crius.cli.settings import run_of
from crius.data.loader import BatchLoader
from crius.errors import DataError
from crius.host import Machine
from crius.train.inputs import open_run_data, resolve


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return mixture_flags(tmp_path_factory.mktemp("mixture") / "data")


def opened(flags, *more):
    config = resolve(run_of(*flags, *more), Machine(device="cpu")).config
    return open_run_data(config, 1)[1]


def rows_of(corpus, num_ranks, prefetch, state=None, steps=STEPS, batch=BATCH):
    """Sample id to its tokens and labels, over all ranks, and the merged state after the last step."""
    found = {}
    for rank in range(num_ranks):
        loader = BatchLoader(corpus().train, global_batch_size=batch, rank=rank, num_ranks=num_ranks, prefetch=prefetch)
        if state:
            loader.load_state_dict(state)
        for read in islice(loader, steps - loader.step):
            for row, sample in enumerate(read.sample_ids):
                found[sample] = read.tokens_BT[row].tolist(), read.labels_BT[row].tolist()
        after = loader.state_dict()
        loader.close()
    return found, after


@pytest.fixture(scope="module")
def whole(flags):
    return rows_of(lambda: opened(flags), 1, 0)[0]


@pytest.mark.parametrize(("num_ranks", "prefetch"), [(1, 2), (2, 0), (3, 2)])
def test_steps_have_the_same_sequences_on_any_ranks_with_any_prefetch(num_ranks, prefetch, flags, whole):
    assert rows_of(lambda: opened(flags), num_ranks, prefetch)[0] == whole
    assert len(whole) == STEPS * BATCH


def test_a_run_resumes_from_its_state_anywhere_on_other_ranks(flags, whole):
    state = None
    for end, num_ranks, prefetch in ((7, 1, 2), (19, 2, 0), (33, 3, 2), (50, 1, 0)):
        found, state = rows_of(lambda: opened(flags), num_ranks, prefetch, state, end)
        assert found.items() <= whole.items() and found
    assert max(found) == STEPS * BATCH - 1


def test_sources_are_read_in_their_own_order_with_their_share(flags, whole):
    mixed = opened(flags).train
    sources, numbers = mixed.found(range(STEPS * BATCH))
    for number, source in enumerate(mixed.sources.values()):
        samples = np.flatnonzero(sources == number)
        assert numbers[samples].tolist() == list(range(len(samples)))
        rows = source.read(range(len(samples)))
        assert [whole[sample][0] for sample in samples.tolist()] == rows.tokens.tolist()
    first = np.bincount(sources[: 19 * BATCH], minlength=3)
    limit = mixed.plan.limits[1]
    assert limit and np.bincount(sources)[1] == limit, "the second source ends"
    assert np.abs(first - np.array([0.5, 0.3, 0.2]) * 19 * BATCH).max() < 1


def test_a_larger_batch_from_a_checkpoint_on_moves_the_stage_to_its_step(flags):
    _, state = rows_of(lambda: opened(flags), 1, 0, steps=10)
    corpus = opened(flags, "--training.global_batch_size", "12")
    loader = BatchLoader(corpus.train, global_batch_size=12, rank=0, num_ranks=1, prefetch=0)
    loader.load_state_dict(state)
    assert [first for first, _ in corpus.train.plan.stages] == [0, 10 * BATCH + 9 * 12]
    list(islice(loader, 9))
    assert loader.state_dict()["mixture"]["chat"][1:] == [0, 2]  # step 20 is next


def test_other_weights_count_from_the_checkpoint_on_and_each_source_continues(flags, caplog):
    _, state = rows_of(lambda: opened(flags), 1, 0, steps=5)
    totals = {name: before + count for name, (before, count, _) in state["mixture"].items()}
    stage = '{"from": 1, "weights": {"words": 1, "chat": 3}}'
    corpus = opened(flags, "--data.stage", stage)
    loader = BatchLoader(corpus.train, global_batch_size=BATCH, rank=0, num_ranks=1, prefetch=0)
    loader.load_state_dict(state)
    assert "other weights from sample 30 on" in caplog.text
    list(islice(loader, 4))
    after = loader.state_dict()["mixture"]
    assert after == {"words": [totals["words"], 6, 1], "sums": [totals["sums"], 0, 0], "chat": [totals["chat"], 18, 3]}


def test_a_state_that_no_run_reaches_is_refused(flags):
    _, state = rows_of(lambda: opened(flags), 1, 0, steps=5)
    state["mixture"]["words"][1] += 3
    state["mixture"]["chat"][1] -= 3
    loader = BatchLoader(opened(flags).train, global_batch_size=BATCH, rank=0, num_ranks=1, prefetch=0)
    with pytest.raises(DataError, match="no run reaches"):
        loader.load_state_dict(state)


def test_a_run_ends_where_a_source_stops_it(flags):
    corpus = opened(flags)
    size = corpus.train.plan.sizes[2]
    entries = [entry.replace('"share"', '"repeat"') for entry in run_of(*flags).data.mix]
    entries[2] = entries[2].replace("0.2", '0.2, "on_end": "stop"')
    given = [part for entry in entries for part in ("--data.mix", entry)]
    config, stopped = open_run_data(
        resolve(run_of(*flags, *given, "--training.steps", "1000"), Machine(device="cpu")).config, 1
    )
    end = stopped.train.end_before(1000 * BATCH)
    assert config.training.steps == -(-end // BATCH) < 1000
    assert np.bincount(stopped.train.found(range(end))[0])[2] == size
    loader = BatchLoader(stopped.train, global_batch_size=BATCH, rank=0, num_ranks=1, prefetch=0)
    assert len(list(islice(loader, end // BATCH))) == end // BATCH, "what is read ahead may lie beyond the end"
    assert any("ends after" in line for line in stopped.description)


@pytest.mark.parametrize(("batch", "steps"), [(2, 1000), (12, 1000), (2, 20)])
def test_another_batch_moves_the_end_of_the_data_with_the_stages(flags, batch, steps):
    entries = [entry.replace('"share"', '"stop"') for entry in run_of(*flags).data.mix]
    given = [part for entry in entries for part in ("--data.mix", entry)]
    _, state = rows_of(lambda: opened(flags, *given), 1, 0, steps=10)
    source = opened(flags, *given, f"--training.global_batch_size={batch}").train
    end = source.end_before(steps * batch)  # 0: a run with this batch from its start does not reach it
    loader = BatchLoader(source, global_batch_size=batch, rank=0, num_ranks=1, prefetch=0, end_sample=end)
    loader.load_state_dict(state)
    list(islice(loader, loader.steps_left))
    assert loader.next_sample == loader.end_sample != end
    assert loader.state_dict()["since"][3] == loader.end_sample
    assert loader.state_dict()["mixture"]["sums"][0] == source.plan.limits[1]
