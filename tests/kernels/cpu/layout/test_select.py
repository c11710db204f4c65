"""Selections on the CPU: every element at its position, for every element size and layout."""

import numpy as np
import pytest

import onchip
from layer_cases import CASES
from onchip.kernels import reference
from onchip.kernels.cpu.layout.select import SelectKernel, segments_of
from onchip.network.build import sequential
from onchip.network.layers import Identity, Pad, Selection, Slice
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Job

SELECTIONS = [(case.layer, case.rows[0]) for case in CASES if isinstance(case.layer, Selection)]
SELECTIONS += [
    (Slice((0, 8), (3, 100), (1, 1)), (3, 300)), (Pad((0, 50, 3, 0, 50, 1), "reflect"), (2, 60, 70)),
    (Slice((1, 2, 3), (2, 3, 4), (1, 1, 1)), (4, 6, 9)),
    (Slice((1, 0, 2, 3), (2, 2, 3, 4), (1, 1, 2, 1)), (4, 2, 9, 9)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "int64", "float16", "uint8"])
def test_every_element_is_at_its_position(dtype):
    for layer, row in SELECTIONS:
        if dtype != "float32" and layer.fill % 1:
            continue
        net = sequential(TensorType(("B", *row), dtype), [("a", Identity()), ("y", layer), ("z", Identity())], {})
        for claim in SelectKernel().claims(net, 1, H200, Job()):
            run, is_last = SelectKernel().bind(claim, {}), bool(claim.writes)
            for B in (1, 5):
                x = np.random.default_rng(B).integers(0, 100, (B, *row)).astype(numpy_dtype(dtype))
                truth = reference.forward(net, x)
                stored = np.ascontiguousarray(np.moveaxis(x, 1, -1) if is_last else x)
                y = np.full((np.moveaxis(truth, 1, -1) if is_last else truth).shape, 77, x.dtype)
                run([stored], [y], 2)
                assert np.array_equal(np.moveaxis(y, -1, 1) if is_last else y, truth)


def test_neighbours_are_one_stretch():
    assert segments_of(np.array([4, 5, 6]), 1).tolist() == [[0, 4, 3]]
    assert segments_of(np.array([-1, -1, 0, 2, 4, -1]), 2).tolist() == [[0, -1, 4], [4, 0, 6], [10, -1, 2]]
    assert segments_of(np.array([3, 2, 2]), 1).tolist() == [[0, 3, 1], [1, 2, 1], [2, 2, 1]]
    assert segments_of(np.array([], np.int64), 1).tolist() == []


def test_empty_selection():
    net = sequential(TensorType(("B", 3, 6)), [("s", Slice((0, 0), (3, 0), (1, 1)))], {})
    assert onchip.compile(net, "cpu")(np.zeros((2, 3, 6), np.float32)).shape == (2, 3, 0)


def test_the_planner_chooses_it_on_the_cpu():
    net = sequential(TensorType(("B", 3, 6, 7)), [("p", Pad((0, 1, 1, 0, 1, 1), "edge"))], {})
    engine = onchip.compile(net, "cpu")
    assert [group.claim.kernel for group in engine.plan.groups] == ["select"]
    assert engine(np.zeros((0, 3, 6, 7), np.float32)).shape == (0, 3, 8, 9)
