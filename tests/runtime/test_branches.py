"""Which groups of a step wait for which."""

import random

import pytest

from onchip.runtime.cuda.branches import Accesses, ends_of, in_branches, in_sequence


def array(i, size=8):
    return "", 16 * i, 16 * i + size


def group(reads, writes, weights=()):
    return Accesses(*(tuple(map(array, arrays)) for arrays in (reads, writes, weights)))


def random_groups(seed):
    """Few arrays, so that most groups conflict with some."""
    rng = random.Random(seed)
    some = lambda most: rng.sample(range(12), rng.randrange(most))  # noqa: E731
    return [group(some(3), rng.sample(range(12), 1), some(2)) for _ in range(rng.randrange(1, 25))]


def ancestors(places):
    found = []
    for place in places:
        found.append(set(place.after).union(*(found[i] for i in place.after)))
    return found


def may_run_beside(places):
    """Per group those that may not have ended when it begins: those that it does not wait for, and of a launch that
    overlaps with its predecessor this one, and what it may run beside."""
    found = []
    for i, (place, before) in enumerate(zip(places, ancestors(places), strict=True)):
        beside = set(range(i)) - before
        if place.overlaps and len(place.after) == 1:
            beside |= {place.after[0]} | found[place.after[0]]
        found.append(beside)
    return found


@pytest.mark.parametrize("seed", range(200))
def test_what_shares_memory_is_ordered(seed):
    groups = random_groups(seed)
    places = in_branches(groups)
    for i, (one, before, beside) in enumerate(zip(groups, ancestors(places), may_run_beside(places), strict=True)):
        for j, other in enumerate(groups[:i]):
            touched = {*one.reads, *one.writes, *one.weights} & {*other.writes}
            if touched or {*one.writes} & {*other.reads, *other.weights}:
                assert j in before
            if {*one.weights} & {*other.writes}:
                assert j not in beside


@pytest.mark.parametrize("seed", range(50))
def test_no_edge_is_implied_by_others(seed):
    places = in_branches(random_groups(seed))
    before = ancestors(places)
    for place in places:
        for j in place.after:
            assert not any(j in before[other] for other in place.after)


def test_gradients_of_weights_are_branches():
    """x -> y -> z, then dy, dw2 and dx of two layers, and the update of both weights."""
    layers = [group([0], [1], [10]), group([1], [2], [11])]
    backward = [group([2], [3]), group([3, 1], [4]), group([3], [5], [11]), group([5, 0], [6])]
    places = in_branches([*layers, *backward, group([4, 6], [10, 11])])
    assert [place.after for place in places] == [(), (0,), (1,), (2,), (2,), (4,), (5, 3)]
    assert list(ends_of(places)) == [6]


def test_parts_of_an_array_meet():
    whole, part, next_to = (Accesses((), (("", *ends),)) for ends in ((0, 64), (32, 40), (64, 80)))
    assert [place.after for place in in_branches([whole, part, next_to])] == [(), (0,), ()]


def test_arrays_of_the_caller_are_no_addresses():
    named = [Accesses((), ((name, 0, 1),)) for name in ("", "x", "y")]
    assert [place.after for place in in_branches(named)] == [(), (), ()]


def test_in_sequence():
    assert [place.after for place in in_sequence(3)] == [(), (0,), (1,)]
    assert list(ends_of(in_sequence(3))) == [2]
