"""Slice, Gather, Pad, Tile and resizes on a GPU, emulated and real: every element at its position, in every layout."""

from dataclasses import replace

import numpy as np
import pytest

import onchip
from checks import assert_error_within
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, run_claim
from layer_cases import CASES
from onchip.kernels import reference
from onchip.kernels.selection import tables_of
from onchip.network.build import sequential
from onchip.network.layers import Gather, Identity, LinearResize, NearestResize, Pad, Selection, Slice
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.layout import has_channels

CHOICES = [(case.layer, case.rows[0]) for case in CASES if isinstance(case.layer, Selection)]
RESIZES = [(case.layer, case.rows[0]) for case in CASES if isinstance(case.layer, LinearResize)]
RESIZES += [
    (LinearResize((4, 5, 6), (2.0, 5 / 3, 1.5)), (2, 3, 4)), (LinearResize((4, 5, 6), (2.0, 1.0, 1.5)), (2, 5, 4)),
    (LinearResize((4, 6, 19), (1.0, 2.0, 19 / 7)), (4, 3, 7)),
]  # fmt: skip


def inside(layer, row, dtype="float32"):
    """The layer 'y' between others, so that any layout is allowed."""
    return sequential(TensorType(("B", *row), dtype), [("a", Identity()), ("y", layer), ("z", Identity())], {})


def some(B, row, dtype):
    return np.random.default_rng(B).integers(0, 100, (B, *row)).astype(numpy_dtype(dtype))


@needs_gxx
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "int64"])
def test_every_number_is_in_its_place(monkeypatch, dtype):
    gpu = emulated_gpu(monkeypatch)
    more = [
        (Slice((0, 8), (3, 16), (1, 1)), (3, 48)),
        (Pad((0, 4, 4, 0, 8, 0)), (3, 8, 4)),
        (Gather(1, (1, 0)), (2, 16)),
    ]
    for layer, row in (*CHOICES, *more):
        if dtype != "float32" and getattr(layer, "fill", 0.0) % 1:
            continue
        net = inside(layer, row, dtype)
        claims = claims_of(net, "select", start=1)
        assert len(claims) == 1 + all(has_channels(net.types[value]) for value in ("a", "y"))
        for claim in claims:
            for B in (1, 5):
                x = some(B, row, dtype)
                assert np.array_equal(run_claim(gpu, net, claim, x), reference.forward(net, x))


def test_what_stays_together_is_moved_together():
    row = (4, 6, 32)
    assert tables_of(row, Slice((0, 0, 16), (4, 6, 16), (1, 1, 1)).source_indices(row)).run == 16
    assert tables_of(row, Slice((0, 0, 12), (4, 6, 20), (1, 1, 1)).source_indices(row)).run == 4
    assert tables_of(row, Slice((0, 1, 0), (4, 3, 32), (1, 2, 1)).source_indices(row)).run == 32
    assert tables_of(row, Pad((0, 0, 8, 0, 0, 8)).source_indices(row)).run == 8
    assert tables_of(row, Gather(3, (5, 4)).source_indices(row)).run == 1
    many = tables_of((2,) * 6, Pad((1,) * 12).source_indices((2,) * 6))
    assert [len(offsets) for offsets in many.offsets] == [4**4, 4, 4]
    assert many.x_row == 2**6


@needs_gxx
def test_rows_are_resized(monkeypatch):
    gpu = emulated_gpu(monkeypatch)
    for layer, row in RESIZES:
        net = inside(layer, row)
        for claim in claims_of(net, "resize", start=1):
            x = np.random.default_rng(0).standard_normal((5, *row)).astype(np.float32)
            got = run_claim(gpu, net, claim, x)
            assert_error_within(got, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
            assert np.array_equal(run_claim(gpu, net, claim, x[3:4]), got[3:4])
            # As with many rows: several outputs per thread.
            many = replace(claim, facts=replace(claim.facts, units=0))
            assert many.facts.per_thread(5) > claim.facts.per_thread(5) or many.facts.per_store >= 8
            assert np.array_equal(run_claim(gpu, net, many, x), got)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_all_of_them_on_a_gpu(dtype):
    large = [
        (Pad((0, 3, 3, 0, 3, 3), "reflect"), (3, 224, 224)),
        (NearestResize((64, 56, 56), (1.0, 2.0, 2.0)), (64, 28, 28)),
        (LinearResize((64, 56, 56), (1.0, 2.0, 2.0)), (64, 28, 28)), (Slice((0, 768), (49, 768), (1, 1)), (49, 2304)),
    ]  # fmt: skip
    for layer, row in (*CHOICES, *RESIZES, *large):
        net = inside(layer, row, dtype)
        engine = onchip.compile(net, "cuda")
        for B in (0, 1, 7, 65):
            x = some(B, row, dtype)
            truth = reference.forward(net, x)
            if isinstance(layer, LinearResize):
                got = engine(x).astype(np.float64)
                assert_error_within(got, truth, baseline=reference.forward(net, x, dtype))
            else:
                assert np.array_equal(engine(x), truth.astype(numpy_dtype(dtype)))
