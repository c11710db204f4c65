"""Gradients of tables on an emulated GPU: rows of any width, ids that occur never, once and often."""

import numpy as np
import pytest

from checks import assert_error_within
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, one_layer, run_claim
from onchip.kernels.cuda.gradient import sort_ids
from onchip.kernels.cuda.gradient.embedding import chunk_bits_of
from onchip.kernels.cuda.gradient.sort_ids import MAX_RANKED, digit_shifts
from onchip.network.layers import Embedding, TokenConv, WeightGrad
from onchip.network.types import TensorType, numpy_dtype

pytestmark = needs_gxx


def gradient(layer, table, ids, dtype="float32"):
    """The network with the gradient of a table, and the inputs that it reads from a batch of ids."""
    weights = {"weight": np.zeros(table, numpy_dtype(dtype))}
    given = TensorType(("B", *ids.shape[1:]), ids.dtype.name)
    y = layer.infer((given,), {"weight": TensorType(table, dtype)})
    dy = np.random.default_rng(1).standard_normal((len(ids), *y.row_shape)).astype(numpy_dtype(dtype))
    return one_layer(WeightGrad(layer, "weight"), given, y, weights=weights), (ids, dy)


def check(gpu, net, xs, launches):
    (claim,) = claims_of(net, "embedding_grad")
    assert len(claim.facts.at(len(xs[0])).launches) == launches
    got, (ids, dy), layer = run_claim(gpu, net, claim, *xs), xs, net.nodes[0].layer
    truth = layer.forward((ids, dy.astype(np.float64)), net.weights)
    naive = layer.forward((ids, dy.astype(np.float32)), net.weights).astype(dy.dtype)
    assert_error_within(got.astype(np.float64), truth, baseline=naive)
    assert got.tobytes() == run_claim(gpu, net, claim, *xs).tobytes()
    return got


def ids_of(B, shape, V, dtype="int32", often=0.0):
    """Ids below V; the last one `often`."""
    rng = np.random.default_rng(B)
    ids = rng.integers(0, V, (B, *shape))
    return np.where(rng.random(ids.shape) < often, V - 1, ids).astype(dtype)


@pytest.mark.parametrize("B", [1, 5, 33, 257])
@pytest.mark.parametrize(("E", "dtype"), [(1, "float32"), (12, "float32"), (7, "float16"), (3, "float64")])
def test_few_ids(monkeypatch, B, E, dtype):
    gpu = emulated_gpu(monkeypatch)
    net, xs = gradient(Embedding(), (41, E), ids_of(B, (3,), 29, "int64" if B == 5 else "int32", often=0.3), dtype)
    got = check(gpu, net, xs, 2 + (3 * B >= 32))
    assert not got[0, 29:].any()


@pytest.mark.parametrize("E", [128, 260])
def test_wide_rows(monkeypatch, E):
    gpu = emulated_gpu(monkeypatch)
    check(gpu, *gradient(Embedding(), (5, E), ids_of(33, (5,), 4, often=0.5)), 3)


@pytest.mark.parametrize(("V", "often", "launches"), [(9, 0.0, 6), (70_001, 0.0, 9), (3000, 0.9, 9), (1, 0.0, 6)])
def test_many_ids(monkeypatch, V, often, launches):
    """More than are compared with each other: sorted by digits."""
    gpu = emulated_gpu(monkeypatch)
    B = MAX_RANKED // 3 + 1234
    check(gpu, *gradient(Embedding(), (V, 2), ids_of(B, (3,), V, often=often)), launches)


def test_chunks_of_one_id_at_any_place(monkeypatch):
    """Runs that begin and end at, before and after the bounds of chunks."""
    gpu = emulated_gpu(monkeypatch)
    for runs in ([32, 31, 33, 64, 1, 63], [31, 65, 32, 96], [1, 32, 95, 32], [160]):
        ids = np.repeat(np.arange(len(runs)), runs).astype(np.int32)
        np.random.default_rng(0).shuffle(ids)
        check(gpu, *gradient(Embedding(), (len(runs) + 1, 5), ids), 3)


def test_ids_out_of_range_are_left_out(monkeypatch):
    """The forward pass reports them."""
    gpu = emulated_gpu(monkeypatch)
    for dtype, count in (("int32", 70), ("int64", 70), ("int64", 9001)):
        ids = ids_of(count, (), 6, dtype)
        bad = np.arange(count) % 7 == 3
        net, (_, dy) = gradient(Embedding(), (6, 3), ids)
        given = np.where(bad, np.where(np.arange(count) % 2, -1, 1 << 31 if dtype == "int64" else 6), ids).astype(dtype)
        (claim,) = claims_of(net, "embedding_grad")
        truth = WeightGrad(Embedding()).forward((ids[~bad], dy[~bad].astype(np.float64)), net.weights)
        np.testing.assert_allclose(run_claim(gpu, net, claim, given, dy), truth, rtol=1e-4, atol=1e-4)


def test_no_rows(monkeypatch):
    gpu = emulated_gpu(monkeypatch)
    net, xs = gradient(Embedding(), (9, 3), np.zeros((0, 4), np.int32))
    assert not check(gpu, net, xs, 1).any()


@pytest.mark.parametrize("layer", [TokenConv(), TokenConv(1, (2, 1)), TokenConv(3, (0, 2)), TokenConv(2, (1, 0))])
def test_windows(monkeypatch, layer):
    gpu = emulated_gpu(monkeypatch)
    for B in (1, 33):
        check(gpu, *gradient(layer, (11, 3, 5), ids_of(B, (8,), 9, often=0.3)), 2 + (8 * B >= 32))


def test_digits_cover_every_key():
    for V in (1, 2, 1023, 1024, 100_000, (1 << 20) - 1, 1 << 20, (1 << 31) - 1):
        shifts = digit_shifts(V)
        bits = shifts[1] if len(shifts) > 1 else V.bit_length()
        assert bits <= sort_ids.DIGIT_BITS
        assert shifts == [bits * i for i in range(len(shifts))]
        assert V >> bits * len(shifts) == 0
    assert [chunk_bits_of(N) for N in (0, 2800, 1 << 21)] == [5, 5, 8]
