"""The check itself: it passes correct engines, fails wrong ones, and reports unavailable ones."""

import math

import numpy as np
import pytest

from checks import random_mlp
from onchip.errors import InputError, PlanError
from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, Embedding, Reshape, Tanh
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.kernel import PRECISIONS
from onchip.runtime import check
from onchip.runtime.check import NAIVE_DTYPE, ULP, CheckRow, check_network, scaled_error, unequal_batch
from onchip.runtime.engine import compile
from onchip.runtime.io.row_sources import RandomRows
from onchip.workloads import sentiment

NET = random_mlp(20, 16, 3)


def test_a_right_engine_passes_and_every_precision_has_a_row():
    told = []
    report = check_network(NET, rows=40, on_progress=lambda part, what: told.append((part, what)))
    assert report.passed
    cpu = [row for row in report.checks if row.device == "cpu"]
    assert [row.precision for row in cpu] == list(PRECISIONS)
    assert cpu[0].verdict == "ok"
    assert cpu[0].kernels == ("mlp_fused<20,16,3,ReLU>",)
    assert told[0] == (0.0, "cpu fp32")
    for row in cpu:
        assert row.naive_dtype == NAIVE_DTYPE[row.precision]
        assert 0 < row.naive_error < 1
        if row.error is None:
            assert row.verdict == "not available"
            assert row.reason
    naive = {row.precision: row.naive_error for row in cpu}
    assert naive["fp32"] < naive["fp16"] < naive["bf16"] < naive["fp8"]


def test_the_rows_come_from_the_seed():
    one, same, other = (check_network(NET, rows=20, seed=seed).checks[0].error for seed in (1, 1, 2))
    assert one == same != other


def test_sentences_of_different_lengths_are_drawn():
    net = sentiment.network(vocabulary=9, embedding=4, channels=5, kernels=(2, 3), length=6, hidden=(), lengths=True)
    assert check_network(net, rows=40).passed


def test_what_tables_of_fewer_bits_cost():
    net = sentiment.network(vocabulary=50, embedding=8, channels=20, kernels=(2, 3), length=6, hidden=(30,))
    error = {}
    for tables in ("fp32", "fp16", "bf16", "fp8"):
        report = check_network(net, rows=40, tables=tables)
        assert report.passed
        error[tables] = report.checks[0].error
        if tables != "fp32":
            assert "token_max" in report.checks[0].kernels[0]
            assert report.checks[0].ratio < 1.5  # a naive run on the same tables
    assert error["fp32"] < error["fp16"] / 10 < error["bf16"] / 20 < error["fp8"] / 40 < 0.01


def row(error, naive, precision="fp32", unequal=None):
    return CheckRow("cpu", precision, ("k",), error, naive, NAIVE_DTYPE[precision], unequal, "")


def test_the_verdict_is_twice_the_naive_error_and_four_ulp():
    allowed = 2e-7 + 4 * 2.0**-23
    assert row(allowed, 1e-7).verdict == "ok"
    assert row(allowed * 1.001, 1e-7).verdict == "FAIL"
    assert row(0.0, 1e-7, unequal=7).verdict == "FAIL"
    assert row(math.inf, 1e-7).verdict == "FAIL"
    assert row(math.inf, math.inf, "fp16").verdict == "ok"  # the naive run overflows, too
    assert row(3e-7, 1e-7).ratio == pytest.approx(3)
    assert row(3e-7, 0.0).ratio is None


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ulps_are_those_of_the_types(precision):
    if precision == "tf32":  # NumPy has no such type: 10 bits of mantissa
        assert ULP[precision] == 2.0**-10
    else:
        dtype = numpy_dtype(NAIVE_DTYPE[precision])
        one = np.ones(1, dtype)
        following = (one.view(f"u{dtype.itemsize}") + np.array(1, f"u{dtype.itemsize}")).view(dtype)
        assert float(following[0]) - 1 == ULP[precision]


def test_scaled_error():
    truth = np.array([[4.0, -8.0], [0.0, 1.0]])
    assert scaled_error(truth.astype(np.float32), truth) == 0
    assert scaled_error(np.array([[4.0, -6.0], [0.0, 1.0]]), truth) == 0.25
    assert scaled_error(np.full((1, 2), 0.5), np.zeros((1, 2))) == 0.5
    assert scaled_error(np.zeros((0, 3)), np.zeros((0, 3))) == 0
    special = np.array([np.nan, np.inf, -np.inf, 1.0])
    assert scaled_error(special, special) == 0
    for wrong in ([0, np.inf, -np.inf, 1.0], [np.nan, -np.inf, -np.inf, 1.0], [np.nan, np.inf, -np.inf, np.nan]):
        assert scaled_error(np.array(wrong), special) == math.inf


def test_a_row_that_depends_on_its_batch_is_found():
    engine, x = compile(NET, device="cpu"), RandomRows(NET.input, 30, 0).read(0, 30)
    whole = engine(x)
    assert unequal_batch(engine, (x,), whole) is None

    def fickle(x):
        y = engine(x)
        return np.nextafter(y, np.float32(9)) if len(x) == 7 else y

    assert unequal_batch(fickle, (x,), whole) == 7


def test_bad_requests():
    with pytest.raises(InputError, match="rows"):
        check_network(NET, rows=0)
    with pytest.raises(InputError, match="seed"):
        check_network(NET, seed=-1)
    with pytest.raises(InputError, match="floats or token ids"):
        check_network(sequential(TensorType(("B", 4), "int32"), [("r", Reshape((2, 2)))], {}))


def test_where_nothing_could_be_checked_nothing_has_passed(monkeypatch):
    def refuse(*_, **options):
        raise PlanError("no kernel takes it")

    monkeypatch.setattr("onchip.runtime.check.compile", refuse)
    report = check_network(NET, rows=5)
    assert {row.verdict for row in report.checks} == {"not available"}
    assert not report.passed


def test_ids_and_several_inputs_are_made_up_and_narrow_networks_judged_by_their_own_dtype():
    table = {"e.weight": np.random.default_rng(0).standard_normal((11, 4), dtype=np.float32)}
    nodes = (Node("e", Embedding(), ("ids",), {"weight": "e.weight"}), Node("y", Add(), ("e", "x")))
    types = {"ids": TensorType(("B", 3), "int64"), "x": TensorType(("B", 3, 4))}
    assert check_network(Network(types, nodes, ("y",), table), rows=20).passed
    halves = check_network(sequential(TensorType(("B", 4), "float16"), [("t", Tanh())], {}), rows=20)
    assert halves.passed
    assert halves.checks[0].naive_dtype == "float16"


def test_very_long_rows_are_fewer_unless_asked_for(monkeypatch):
    monkeypatch.setattr(check, "MAX_NUMBERS", 100)
    longest = max(NET.input.row_size, *(given.row_size for given in NET.types.values()))
    assert check_network(NET).rows == 100 // longest
    assert check_network(NET, rows=40).rows == 40
    monkeypatch.setattr(check, "MAX_NUMBERS", 1)
    assert check_network(NET).rows == 1


def test_rows_of_large_networks_are_fewer(monkeypatch):
    flop = sum(NET.row_flop(node) for node in NET.nodes)
    monkeypatch.setattr(check, "MAX_FLOP", 7 * flop)
    assert check_network(NET).rows == 7
    assert check_network(NET, rows=40).rows == 40


def test_the_yardstick_has_tables_of_the_tokens_that_occur(monkeypatch):
    net = sentiment.network(
        vocabulary=5000, embedding=8, channels=20, kernels=(2, 3), length=6, hidden=(), lengths=True
    )
    requested, rounded = [], check.with_rounded_tables
    monkeypatch.setattr(check, "with_rounded_tables", lambda few, kind: requested.append(few) or rounded(few, kind))
    report = check_network(net, rows=10, tables="fp8")
    assert report.passed
    assert report.checks[0].ratio == pytest.approx(1, abs=1e-3)  # rounded as the engine's tables of all tokens are
    assert requested[0].weights["emb.weight"].shape[0] <= 60


def test_unknown_tables_are_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(check.reference, "forward", lambda *_: pytest.fail("it worked first"))
    with pytest.raises(InputError, match="unknown tables"):
        check_network(random_mlp(3, 2), 5, 0, tables="fp9")
