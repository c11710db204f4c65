"""Overlap of memory ranges."""

import pytest

from onchip.errors import ShapeError
from onchip.runtime.arrays.overlap import check_apart, is_apart


@pytest.mark.parametrize(
    ("other", "apart"),
    [((90, 10), True), ((90, 11), False), ((119, 1), False), ((120, 5), True), ((105, 2), False), ((0, 999), False)],
)
def test_neighbours_are_apart(other, apart):
    assert is_apart(100, 20, *other) is is_apart(*other, 100, 20) is apart


def test_outputs_share_memory_with_nobody_and_inputs_may_with_each_other():
    def shares(a, b):
        return not is_apart(*a, *b)

    check_apart([(0, 10), (10, 10)], [(20, 10), (20, 10)], shares)
    for outputs, inputs in [([(0, 10)], [(9, 5)]), ([(0, 10), (5, 10)], [])]:
        with pytest.raises(ShapeError, match="out overlaps an input or another out"):
            check_apart(outputs, inputs, shares)
