"""The schedule of a mixture: shares at every prefix, and places that are found without what came before."""

import random
from fractions import Fraction

import numpy as np
import pytest

from crius.config.data import DENOMINATOR, integers
from crius.data.mixture import Plan, Schedule, Walk
from crius.errors import DataError


def weights_of(kind, number, rng):
    if kind == "equal":
        return [1] * number
    if kind == "one tiny":
        return [1] + [rng.randint(10**4, 10**5) for _ in range(number - 1)]
    if kind == "a half and many":
        return [number - 1] + [1] * (number - 1)
    return [rng.randint(1, 10**4) for _ in range(number)]


def assert_shares(weights, length):
    """Tijdeman's bound at each prefix, in integers: |n - w t| <= 1 - 1 / (2 sources - 2)."""
    chosen = Schedule(weights, [0] * len(weights)).take(length)
    total = sum(weights)
    steps = np.arange(1, length + 1)
    for source, weight in enumerate(weights):
        distance = int(np.abs(np.cumsum(chosen == source) * total - weight * steps).max())  # times the total
        assert distance * (2 * len(weights) - 2) <= total * (2 * len(weights) - 3), source


@pytest.mark.parametrize("number", [2, 3, 10, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["equal", "one tiny", "a half and many", "random"])
def test_each_prefix_has_each_source_within_one_sequence_of_its_share(kind, number):
    assert_shares(weights_of(kind, number, random.Random(f"{kind} {number}")), 20_000 if number < 1000 else 100_000)


@pytest.mark.full
def test_prefixes_of_random_mixtures_have_their_shares():
    rng = random.Random(49)
    for number in [*(rng.randint(2, 40) for _ in range(12)), rng.randint(40, 1000)]:
        assert_shares(weights_of("random", number, rng), 100_000)


def test_a_schedule_continues_from_its_counts_also_at_ten_billion():
    weights = [5, 3, 2, 7, 11]
    whole = Schedule(weights, [0] * 5)
    begin = whole.take(1234)
    rest = Schedule(weights, np.bincount(begin, minlength=5).tolist()).take(500)
    assert rest.tolist() == whole.take(500).tolist()
    far = Schedule(weights, [weight * (10**10 // sum(weights)) for weight in weights])
    assert far.take(sum(weights)).tolist() == Schedule(weights, [0] * 5).take(sum(weights)).tolist()


def test_counts_that_no_schedule_reaches_are_refused():
    with pytest.raises(ValueError, match="not those of these weights"):
        Schedule([1, 1], [3, 1])


def test_shares_become_integers_without_loss_or_rounded_to_a_millionth():
    assert integers([Fraction("0.5"), Fraction("0.3"), Fraction("0.2")]) == (5, 3, 2)
    rounded = integers([Fraction(1), Fraction(10**9), Fraction(10**9 + 1)])
    assert abs(sum(rounded) - DENOMINATOR) <= 2
    assert min(rounded) == 1


def plan_of(limits=(0, 0, 0), stops=(False,) * 3, stages=((0, (5, 3, 2)),)):
    return Plan(names=("a", "b", "c"), sizes=(7, 50, 90), limits=limits, stops=stops, stages=stages)


PLANS = {
    "repeat": plan_of(),
    "share": plan_of(limits=(7, 50, 0)),
    "stop": plan_of(limits=(7, 50, 0), stops=(False, True, False)),
    "stages": plan_of(limits=(0, 30, 0), stages=((0, (5, 3, 2)), (83, (1, 1, 0)), (84, (1, 1, 8)))),
}


def walked(walk, end):
    """The source and the number of each sample, and the place before each, in order."""
    rows = []
    places = []
    while walk.place.sample < end and any(walk.place.span.weights):
        places.append(walk.place)
        ((source,), (number,)) = walk.take(1)
        rows.append((int(source), int(number)))
    return rows, places


@pytest.mark.parametrize("name", PLANS)
def test_any_sample_is_found_with_and_without_the_counts_before_it(name):
    plan = PLANS[name]
    rows, places = walked(Walk(plan), 300)
    for source in range(3):
        numbers = [number for one, number in rows if one == source]
        assert numbers == list(range(len(numbers)))  # each sequence of a source in turn
    for sample in range(0, len(rows), 23):
        sought = Walk(plan)
        sought.seek(sample)
        assert sought.place == places[sample]
        assert walked(sought, min(300, sample + 40))[0] == rows[sample : sample + 40]
        assert walked(Walk(plan, places[sample]), 300)[0] == rows[sample:]
    blocks = Walk(plan)
    taken = []
    while len(taken) < len(rows):
        sources, numbers = blocks.take(64)
        taken += list(zip(sources.tolist(), numbers.tolist(), strict=True))
    assert taken[: len(rows)] == rows


def ends_of(name, sample):
    walk = Walk(PLANS[name])
    walk.seek(sample)
    return walk.ends()


def test_a_source_that_ends_leaves_its_share_to_the_others_in_proportion():
    ends = ends_of("share", 300)
    assert [place.span.weights for place in ends] == [(5, 3, 2), (0, 3, 2), (0, 0, 1)]
    assert [place.totals[:2] for place in ends][1:] == [(7, 50), (7, 50)]
    assert ends[-1].sample == 300


def test_the_data_ends_where_a_source_stops_it():
    walk = Walk(PLANS["stop"])
    walk.seek(1000)
    assert walk.place.totals[1] == 50
    with pytest.raises(DataError, match="has ended"):
        walk.take(1)


def test_a_stage_begins_at_its_sample_with_new_counts():
    ends = ends_of("stages", 200)
    firsts = [place.span.first for place in ends]
    assert firsts[:3] == [0, 83, 84]
    assert [place.span.weights for place in ends[:3]] == [(5, 3, 2), (1, 1, 0), (1, 1, 8)]
    assert ends[1].counts in [(1, 0, 0), (0, 1, 0)]
    assert ends[-1].span.weights == (1, 0, 8)  # the second source has ended
