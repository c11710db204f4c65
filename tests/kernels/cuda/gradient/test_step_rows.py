"""What begins and ends a step over a data set, on an emulated GPU: the bits of the reference."""

import numpy as np
import pytest

from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, emulate_device, run_claim
from onchip.kernels import reference
from onchip.kernels.cuda.gradient import step_counters, step_rows
from onchip.network.graph import Network, Node
from onchip.network.layers import Counted, DataRows, RowIds
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.kernel import Job, Refusal
from onchip.runtime.cuda.step import CudaStep
from onchip.runtime.placement import plan
from row_steps import logged, rows_of_any_kind

KEPT = [("ids", "rows", "row"), ("rows", "row"), ("rows",), ("ids",), ("row",)]


@needs_gxx
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "bool", "bfloat16"])
@pytest.mark.parametrize("row", [(), (3,), (2, 4), (300, 16)], ids=str)
def test_rows_of_any_kind(monkeypatch, dtype, row):
    """What is outside the order, the data or the table is the nearest that is inside."""
    gpu = emulated_gpu(monkeypatch)
    for kept in KEPT:
        net = rows_of_any_kind(dtype, row, kept)
        (claim,) = claims_of(net, "step_rows")
        for B in (1, 5, 257):
            x = np.zeros((B, 2), np.float32)
            _, state = reference.run_step(net, x)
            values = reference.forward_all(net, x, "float64", state)
            got = run_claim(gpu, net, claim, x)
            for name, array in zip((name for name in ("ids", "rows", "row") if name in kept),
                                   got if len(kept) > 1 else (got,), strict=True):  # fmt: skip
                assert np.array_equal(array.astype(values[name].dtype), values[name]), name


@needs_gxx
def test_more_arrays_than_one_launch_copies(monkeypatch):
    gpu, count = emulated_gpu(monkeypatch), step_rows.MAX_ARRAYS + 3
    names = [f"y{i}" for i in range(count)]
    weights = {name: np.full((4, 1 + i), [[i], [i + 1], [i + 2], [i + 3]], np.float32) for i, name in enumerate(names)}
    weights |= {"order": np.array([3, 1, 2]), "position": np.array([0, 1])}
    nodes = [Node("ids", RowIds(), ("x",), {"order": "order", "position": "position"})]
    nodes += [Node(f"{name}.rows", DataRows(), ("ids",), {"data": name}) for name in names]
    outputs = tuple(f"{name}.rows" for name in names)
    net = Network({"x": TensorType(("B",))}, tuple(nodes), outputs, weights, state=dict.fromkeys(weights, ""))
    (claim,) = claims_of(net, "step_rows")
    assert len(claim.facts.at(2).launches) == 2
    x = np.zeros(2, np.float32)
    for got, expected in zip(run_claim(gpu, net, claim, x), reference.forward(net, x), strict=True):
        assert np.array_equal(got, expected)


@needs_gxx
def test_a_log_that_other_layers_read_is_replaced_at_the_end(monkeypatch):
    net = logged()
    bound = CudaStep(emulate_device(monkeypatch), plan(net, "cuda", Job(batch=4)))
    assert bound.plan.groups[-1].claim.kernel == "step_counters"
    state = None
    for i in range(1, 5):
        outputs = bound.run({"x": np.full(i, i, np.float32)}, i)
        expected, state = reference.run_step(net, np.full(i, i, np.float32), state)
        for got, wanted in zip(outputs.values(), expected, strict=True):
            assert np.array_equal(got, wanted)
        assert all(np.array_equal(array, state[name]) for name, array in bound.read_state().items())


def test_more_counters_than_a_launch_has_are_refused():
    n = step_counters.MAX_COUNTERS + 1
    nodes = (Node("next", Counted((1,) * n, (0,) * n), ("x",), {"counters": "c"}),)
    net = Network({"x": TensorType(("B",))}, nodes, ("next",), {"c": np.zeros(n, np.int64)}, state={"c": "next"})
    (answer,) = step_counters.StepCountersKernel().claims(net, 0, H200, Job())
    assert isinstance(answer, Refusal)
    assert "counters" in answer.why
