"""The fast path for few rows: the same bits, and the same messages for arrays that do not fit."""

from __future__ import annotations

import concurrent.futures

import numpy as np
import pytest

from checks import assert_error_within, random_mlp, rows
from onchip.errors import InputError, ShapeError
from onchip.kernels import reference
from onchip.network.graph import Network, Node
from onchip.network.layers import Linear, ReLU, Reshape, Softmax
from onchip.network.types import TensorType
from onchip.runtime.cpu import quick_call
from onchip.runtime.cpu.backend import CpuBackend
from onchip.runtime.engine import Engine, compile


def two_heads() -> Network:
    """Three groups: a value with two readers between them, and one output that is a view of a kernel's output."""
    weights = {"a": rows(20, 8, seed=1), "b": rows(3, 20, seed=2), "c": rows(6, 20, seed=3)}
    nodes = (
        Node("h", Linear(), ("x",), {"weight": "a"}),
        Node("r", ReLU(), ("h",)),
        Node("p", Linear(), ("r",), {"weight": "b"}),
        Node("softmax", Softmax(), ("p",)),
        Node("q", Linear(), ("r",), {"weight": "c"}),
        Node("turned", Reshape((2, 3)), ("q",)),
    )
    return Network({"x": TensorType(("B", 8))}, nodes, ("softmax", "turned"), weights)


def long_way(engine: Engine, *given: np.ndarray) -> tuple[np.ndarray, ...]:
    """With several outputs that the caller allocated."""
    out = tuple(np.full_like(y, np.nan) for y in engine(*given))
    engine(*given, out=out)
    return out


@pytest.mark.parametrize("B", [1, 7, 300, 20_000])  # the last: more intermediate values than an engine caches
def test_several_groups_are_one_call(B):
    engine, x = compile(two_heads(), device="cpu"), rows(B, 8)
    got = CpuBackend(None).bind(engine.plan).quick_call()((x,), None)
    assert isinstance(got, tuple)
    for y, other in zip(got, long_way(engine, x), strict=True):
        assert np.array_equal(y, other)
    truth, naive = (reference.forward(engine.plan.network, x, dtype) for dtype in ("float64", "float32"))
    for y, exact, baseline in zip(got, truth, naive, strict=True):
        assert_error_within(y, exact, baseline)


def test_a_chain_over_vectors_is_told_the_rows_of_the_batch():
    net = random_mlp(6, 5, 4)
    given = Network({"x": TensorType(("B", 3, 6))}, net.nodes, net.outputs, net.weights)
    engine, x = compile(given.replace(nodes=tuple(_reading_x(given, net))), device="cpu"), rows(5, 3, 6)
    assert CpuBackend(None).bind(engine.plan).quick_call() is not None
    assert np.array_equal(engine(x).reshape(15, -1), compile(net, device="cpu")(x.reshape(15, 6)))


def _reading_x(given: Network, net: Network) -> list[Node]:
    (name,) = net.inputs
    return [
        Node(n.name, n.layer, tuple("x" if i == name else i for i in n.inputs), dict(n.weights)) for n in given.nodes
    ]


def test_what_does_not_fit_is_looked_at_by_the_other():
    engine, x = compile(random_mlp(6, 5, 4), device="cpu"), rows(9, 6)
    truth = engine(x)
    read_only = x.copy()
    read_only.flags.writeable = False
    for same in (x.astype(">f4"), np.asfortranarray(x), np.repeat(x, 2, axis=0)[::2], read_only, x.view(np.matrix)):
        assert np.array_equal(engine(same), truth)
    assert engine(x[:0]).shape == (0, 4)
    for wrong, words in ((x[:, :5].copy(), "shape"), (x.astype(complex), "dtype"), (x[0], "shape"), ({1}, "array")):
        with pytest.raises(ShapeError, match=words):
            engine(wrong)
    for given in ((), (x, x)):
        with pytest.raises(InputError, match="wrong number of inputs"):
            engine(*given)


def test_out_is_written_where_it_fits_and_refused_where_it_does_not():
    engine, x = compile(random_mlp(6, 5, 6), device="cpu"), rows(9, 6)
    truth, out = engine(x), np.empty((9, 6), np.float32)
    assert engine(x, out=out) is out
    assert np.array_equal(out, truth)
    both, read_only = np.empty((12, 6), np.float32), out.copy()
    read_only.flags.writeable = False
    for wrong in (out[:8], out.astype(np.float64), np.asfortranarray(out), read_only):
        with pytest.raises(ShapeError, match=r"out (has the wrong|is not row-major)"):
            engine(x, out=wrong)
    with pytest.raises(ShapeError, match="overlaps"):
        engine(both[:9], out=both[3:])


def test_shapes_that_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr(quick_call, "MAX_SHAPES", 3)
    engine, x = compile(random_mlp(6, 5, 4), device="cpu"), rows(9, 6)
    truth = engine(x)
    for B in range(1, 10):
        assert np.array_equal(engine(x[:B]), truth[:B])


def test_calls_at_the_same_time_have_values_in_between_of_their_own():
    engine, batches = compile(two_heads(), device="cpu"), [rows(B, 8, seed=B) for B in (1, 40, 300)]
    truths = [engine(x) for x in batches]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for i, got in enumerate(pool.map(lambda i: engine(batches[i % 3]), range(60))):
            assert all(np.array_equal(y, truth) for y, truth in zip(got, truths[i % 3], strict=True))
