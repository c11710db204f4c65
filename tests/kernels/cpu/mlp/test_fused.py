"""The fused MLP on the CPU: accuracy, the same bits for any batch and thread count, and limits."""

import concurrent.futures
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from checks import assert_error_within, random_mlp, rows
from mlp_networks import NETWORKS
from onchip.kernels import reference
from onchip.kernels.chain import find_chain
from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.microkernels.tile import PANEL, pack, packed_size, unpack
from onchip.network.build import mlp, sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import (
    GELU,
    LeakyReLU,
    Linear,
    LogSoftmax,
    ReLU,
    Reshape,
    Sigmoid,
    SiLU,
    Softmax,
    Tanh,
)
from onchip.network.types import TensorType
from onchip.runtime.cpu.backend import core_count
from onchip.runtime.engine import compile

SRC = Path(__file__).parents[4] / "src"


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("B", [1, 7, 64, 65, 1000])  # below, at and past a tile; odd on purpose
def test_forward_is_right(name, B):
    net = NETWORKS[name]
    x = rows(B, *net.input.row_shape)
    got = compile(net, device="cpu")(x)
    assert_error_within(got, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))


@pytest.mark.parametrize("N", [1, 2])
@pytest.mark.parametrize("K", [1, 3, 20, 64, 100, 256, 784, 1024])
def test_sums_that_cancel_keep_their_digits(K, N):
    """Few outputs: BLAS reduces such a gemm in many chains, so the naive float32 run is as accurate as that."""
    rng = np.random.default_rng(K)
    w = np.linspace(-1, 1, K) + 1e-3 * rng.standard_normal((N, K))
    net = mlp(K, N, seed=0, bias=False)
    net = net.replace(weights={name: w.astype(np.float32) for name in net.weights})
    x = (1 + 0.01 * rng.standard_normal((1000, K))).astype(np.float32)
    got, truth = compile(net, device="cpu")(x), reference.forward(net, x)
    naive = reference.forward(net, x, "float32")
    assert_error_within(got, truth, baseline=naive, ulps=0.5)


@pytest.mark.parametrize("N", [1, 2, 3, 4])
def test_few_outputs_do_not_read_the_next_row(N):
    """Rows are contiguous, and a vector along K may extend past the end of one."""
    net, x = random_mlp(21, N), rows(9, 21)
    clean = compile(net, device="cpu")(x)
    x[3] = np.nan
    got = compile(net, device="cpu")(x)
    assert np.isnan(got[3]).all()
    assert np.array_equal(np.delete(got, 3, axis=0), np.delete(clean, 3, axis=0))


@pytest.mark.parametrize("name", NETWORKS)
def test_same_bits_for_any_batch_and_threads(name):
    net = NETWORKS[name]
    x = rows(1000, *net.input.row_shape)
    whole = compile(net, device="cpu", threads=1)(x)
    engine = compile(net, device="cpu", threads=core_count())
    for B in (1, 2, 7, 512, 1000):
        assert np.array_equal(engine(x[:B]), whole[:B])
    assert np.array_equal(engine(x[313:320]), whole[313:320])  # at any position in the batch


@pytest.mark.parametrize("width", [5, 2 * LANES, 3 * LANES, PANEL, PANEL + 7])
def test_tiles_of_any_number_of_rows(width):
    """The last register tile has as many rows as remain."""
    net, x = random_mlp(19, width), rows(64, 19)
    engine = compile(net, device="cpu", threads=1)
    whole = engine(x)
    assert_error_within(whole, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
    for B in range(1, 24):
        assert np.array_equal(engine(x[:B]), whole[:B])


@pytest.mark.parametrize("activation", ["ReLU", "Tanh"])
def test_threads_share_the_columns_of_heavy_layers(activation):
    net = random_mlp(300, 333, 200, 7, activation=activation, output="Softmax")  # the last layer is too small to split
    x = rows(300, 300)
    whole = compile(net, device="cpu", threads=1)(x)
    engine = compile(net, device="cpu", threads=core_count())
    for B in (1, 5, 31, 64, 65, 300):
        assert np.array_equal(engine(x[:B]), whole[:B])


def test_an_empty_batch_and_out():
    net = random_mlp(6, 5, 4)
    engine = compile(net, device="cpu")
    assert engine(rows(0, 6)).shape == (0, 4)
    x, out = rows(9, 6), np.full((9, 4), np.nan, np.float32)
    assert engine(x, out=out) is out
    assert np.array_equal(out, engine(x))
    strided = np.asfortranarray(x)
    assert np.array_equal(engine(strided), out)
    x.flags.writeable = False
    assert np.array_equal(engine(x), out)


def test_nan_and_inf_pass_through():
    net, x = random_mlp(6, 5, 4), rows(20, 6)
    x[3, 2], x[11, 0] = np.nan, np.inf
    got, truth = compile(net, device="cpu")(x), reference.forward(net, x, "float32")
    assert np.isnan(got[3]).all()
    assert np.array_equal(np.isnan(got), np.isnan(truth))
    untouched = [r for r in range(20) if r not in (3, 11)]
    assert np.isfinite(got[untouched]).all()


@pytest.mark.parametrize(
    "layer", [ReLU(), Sigmoid(), Tanh(), LeakyReLU(0.2), LeakyReLU(-1.5), SiLU(), GELU(), GELU("tanh")], ids=str
)
def test_activations_over_their_whole_range(layer):
    x = np.concatenate([np.linspace(-120, 120, 20001), np.geomspace(1e-30, 1, 1000), -np.geomspace(1e-30, 1, 1000)])
    x = np.concatenate([x, [0.0, np.inf, -np.inf, np.nan]]).astype(np.float32)
    got = compile(sequential(TensorType(("B", x.size)), [("a", layer)], {}), device="cpu")(x[None])[0]
    with np.errstate(all="ignore"):
        truth = layer.forward((x.astype(np.float64),), {})
    # A GELU far below zero is a tiny tail whose exponent is rounded: there the absolute error counts.
    tolerance = (1e-6, 1e-6) if isinstance(layer, GELU | SiLU) else (5e-7, 1e-37)
    np.testing.assert_allclose(got, truth, rtol=tolerance[0], atol=tolerance[1])


@pytest.mark.parametrize("kind", [Softmax, LogSoftmax])
def test_very_wide_rows_keep_their_digits(kind):
    net, x = sequential(TensorType(("B", 300_000)), [("s", kind())], {}), rows(2, 300_000)
    got = compile(net, device="cpu")(x)
    assert_error_within(got, reference.forward(net, x), baseline=reference.forward(net, x, "float32"))


def test_foreign_byte_order_is_converted():
    engine, x = compile(random_mlp(6, 5, 4), device="cpu"), rows(9, 6)
    assert np.array_equal(engine(x.astype(">f4")), engine(x))


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(SRC)} | variables
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def test_works_without_a_cache_folder_and_leaves_no_files():
    code = (
        "import pathlib, numpy as np, onchip\n"
        "net = onchip.mlp(2, 2, output='ReLU', bias=False)\n"
        "net = net.replace(weights={'fc1.weight': np.eye(2, dtype=np.float32)})\n"
        "print(onchip.compile(net, 'cpu')(np.array([[-1.0, 2.0]], np.float32))[0].tolist())\n"
        "print(list(pathlib.Path(onchip.__file__).parent.rglob('*.nb?')))\n"
    )
    done = run_python(code, ONCHIP_CACHE="/dev/null/nothing")
    assert done.stdout.splitlines() == ["[0.0, 2.0]", "[]"], done.stderr
    assert done.stderr.startswith("cache: nothing is cached in /dev/null/nothing: Not a directory; ")
    assert done.stderr.count("\n") == 1


def test_concurrent_calls_do_not_disturb_each_other():
    net, x = random_mlp(72, 64, 64, 4), rows(3000, 72)
    engine = compile(net, device="cpu")
    truth = engine(x)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: engine(x), range(40)):
            assert np.array_equal(got, truth)


@pytest.mark.parametrize(("K", "N"), [(1, 1), (3, PANEL), (5, PANEL + 1), (7, 2 * PANEL - 1), (4, 100)])
def test_pack_and_unpack_are_inverse(K, N):
    w = np.random.default_rng(0).standard_normal((K, N), dtype=np.float32)
    assert pack(w).size == packed_size(K, N)
    assert np.array_equal(unpack(pack(w), K, N), w)


def test_linear_over_vectors_and_reshapes_stay_one_group():
    weights = {"a.weight": rows(6, 5, seed=3), "b.weight": rows(2, 6, seed=4)}
    layers = [
        ("flat", Reshape((4, 5))),
        ("a", Linear()),
        ("r", ReLU()),
        ("b", Linear()),
        ("s", Softmax()),
        ("out", Reshape((8,))),
    ]
    net = sequential(TensorType(("B", 20)), layers, weights)
    engine = compile(net, device="cpu")
    assert len(engine.plan.groups) == 1
    x = rows(33, 20)
    assert_error_within(engine(x), reference.forward(net, x), baseline=reference.forward(net, x, "float32"))


def test_layers_without_a_gemm_run_as_single_layers():
    layers = [("r", ReLU()), ("s", Softmax(1)), ("t", LogSoftmax(2)), ("flat", Reshape((-1,)))]
    net = sequential(TensorType(("B", 3, 5)), layers, {})
    engine, x = compile(net, device="cpu"), rows(70, 3, 5)
    before = x.copy()
    assert_error_within(engine(x), reference.forward(net, x), baseline=reference.forward(net, x, "float32"))
    assert np.array_equal(x, before)
    assert np.array_equal(engine(x[:1]), engine(x)[:1])


def test_a_value_with_two_readers_ends_the_chain():
    w = {"w": rows(4, 4, seed=5)}
    nodes = (
        Node("a", Linear(), ("x",), {"weight": "w"}),
        Node("b", ReLU(), ("a",)),
        Node("c", Softmax(), ("a",)),
    )
    net = Network({"x": TensorType(("B", 4))}, nodes, ("c",), w)
    chain = find_chain(net, 0)
    assert chain is not None
    assert chain.nodes == ("a",)
    x = rows(5, 4)
    assert_error_within(
        compile(net, device="cpu")(x), reference.forward(net, x), baseline=reference.forward(net, x, "float32")
    )


def test_a_negative_slope():
    weights = {"a.weight": rows(5, 6), "b.weight": rows(3, 5, seed=2)}
    net = sequential(TensorType(("B", 6)), [("a", Linear()), ("leak", LeakyReLU(-0.5)), ("b", Linear())], weights)
    x = rows(9, 6)
    assert_error_within(compile(net, device="cpu")(x), reference.forward(net, x), reference.forward(net, x, "float32"))
