"""Plans that run all launches chunk by chunk: the same bits for any chunk size, and memory reuse."""

import numpy as np
import pytest

import onchip
from checks import assert_error_within, rows
from onchip.kernels import reference
from onchip.network.graph import Network, Node
from onchip.network.layers import LSTM, Add, GlobalMax, LayerNorm, Linear, Mul, ReLU, Slice, Tanh
from onchip.network.types import TensorType
from onchip.runtime.cpu import chunks
from onchip.runtime.cpu.backend import CpuBackend


def several_groups() -> Network:
    """Groups with every kind of launch: gemms, norms, pointwise chains, reductions, selections, a recurrence."""
    weights = {"a": rows(12, 8, seed=1), "g": rows(12, seed=2), "b": rows(12, 12, seed=3), "c": rows(4, 12, seed=4)}
    weights |= {"r": rows(1, 12, 3, seed=5), "s": rows(12, seed=6)}
    nodes = (
        Node("h", Linear(), ("x",), {"weight": "a"}),
        Node("n", LayerNorm(2), ("h",), {"weight": "g"}),
        Node("u", Linear(), ("n",), {"weight": "b"}),
        Node("t", Tanh(), ("u",)),
        Node("m", Mul(), ("t", "h"), {"constant": "s"}),
        Node("v", Add(), ("m", "n")),
        Node("l", LSTM(), ("v",), {"recurrence": "r"}),
        Node("w", Slice((0, 1), (5, 2), (1, 1)), ("l",)),
        Node("e", GlobalMax((1,)), ("v",)),
        Node("f", Linear(), ("e",), {"weight": "c"}),
        Node("y", ReLU(), ("f",)),
    )
    return Network({"x": TensorType(("B", 5, 8))}, nodes, ("y", "w"), weights)


@pytest.mark.parametrize("kept", [1 << 10, 1 << 20])  # one row at a time; all rows of a thread at once
def test_a_rows_bits_do_not_depend_on_its_chunk(monkeypatch, kept):
    monkeypatch.setattr(chunks, "MIN_BYTES", kept)
    monkeypatch.setattr(chunks, "MAX_BYTES", kept)
    net, x = several_groups(), rows(301, 5, 8, seed=7)
    engines = [onchip.compile(net, "cpu", threads=threads) for threads in (None, 1)]
    whole = engines[0](x)
    exact, naive = (reference.forward(net, x, dtype) for dtype in ("float64", "float32"))
    for got, truth, baseline in zip(whole, exact, naive, strict=True):
        assert_error_within(got, truth, baseline)
    for engine in engines:
        assert CpuBackend(None).bind(engine.plan).chunks is not None
        for first, count in ((0, 1), (2, 7), (5, 296), (300, 1)):
            for got, expected in zip(engine(x[first : first + count]), whole, strict=True):
                np.testing.assert_array_equal(got, expected[first : first + count])


def test_few_rows_are_shared_and_many_are_cut():
    engine = onchip.compile(several_groups(), "cpu")
    found = CpuBackend(None).bind(engine.plan).chunks
    found.threads = 4  # of a machine with more cores
    assert found.rows_of_chunk(1) == 1
    share = found.rows_of_chunk(4_000)
    assert share <= 1_000
    assert share * found.between_bytes <= chunks.MIN_BYTES
    found.weight_bytes = 1 << 30  # every chunk would fetch them
    assert found.rows_of_chunk(40) == 40
