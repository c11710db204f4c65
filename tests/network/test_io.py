"""The same network with other float dtypes at its inputs and outputs, in files and on the CPU."""

import numpy as np
import pytest

import onchip
from checks import random_mlp, rows
from onchip.errors import InputError
from onchip.formats.onnx.reader import read_onnx
from onchip.formats.onnx.writer import write_onnx
from onchip.kernels import reference
from onchip.network.graph import Network, Node
from onchip.network.io import IO_DTYPES, with_io
from onchip.network.layers import Add, Cast, Concat, CumSum, Embedding, GlobalMean, Linear, ReLU, Tanh, ToPixels
from onchip.network.types import TensorType, numpy_dtype
from onnx_models import rows_of, run_onnx

HALF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # rounding error


def many_ends(own: str = "float32") -> Network:
    """Inputs ids, x, z and an unused one; outputs inside, at the end, repeated, uint8, and inputs passed through."""
    rng = np.random.default_rng(0)
    weights = {"table": rng.standard_normal((6, 3)), "w": rng.standard_normal((5, 7)), "v": rng.standard_normal((2, 5))}
    nodes = (
        Node("sums", CumSum(), ("ids",)),
        Node("rows", Embedding(), ("ids",), {"weight": "table"}),
        Node("mean", GlobalMean((1,)), ("rows",)),
        Node("both", Concat(), ("mean", "x")),
        Node("hidden", Linear(), ("both",), {"weight": "w"}),
        Node("act", Tanh(), ("hidden",)),
        Node("sum", Add(), ("act", "z", "hidden")),
        Node("x.float32", Linear(), ("sum",), {"weight": "v"}),  # the name that a Cast of x would get
        Node("bytes", ToPixels(), ("x.float32",)),
    )
    inputs = {"ids": TensorType(("B", 3), "int32"), "x": TensorType(("B", 4), own), "z": TensorType(("B", 5), own),
              "unread": TensorType(("B", 1), own)}  # fmt: skip
    outputs = ("hidden", "x.float32", "z", "hidden", "bytes", "sums", "ids")
    return Network(inputs, nodes, outputs, {name: w.astype(own) for name, w in weights.items()}, "many")


def readers(net: Network, value: str) -> list[str]:
    return [node.name for node in net.nodes if value in node.inputs]


def test_each_reader_of_an_input_has_a_separate_cast():
    nodes = (Node("a", Linear(), ("x",), {"weight": "w"}), Node("b", Linear(), ("x",), {"weight": "w"}))
    net = Network({"x": TensorType(("B", 7))}, nodes, ("a", "b"), {"w": np.ones((5, 7), np.float32)})
    changed = with_io(net, "float16")
    assert [node.layer.kind for node in changed.nodes] == ["Cast", "Linear", "Cast"] * 2


@pytest.mark.parametrize("dtype", IO_DTYPES)
@pytest.mark.parametrize("own", ["float32", "float64", "float16"])
def test_types_and_names_at_the_ends(own, dtype):
    net = many_ends(own)
    changed = with_io(net, dtype)
    assert (tuple(changed.inputs), changed.outputs, changed.name) == (tuple(net.inputs), net.outputs, "many")
    for name in (*net.inputs, *net.outputs):
        before, after = net.types[name], changed.types[name]
        assert after == TensorType(before.shape, dtype if "float" in before.dtype else before.dtype)
    assert changed.weights.keys() == net.weights.keys()
    if dtype == own:
        assert changed is net
        return
    # Before the readers of x and z; after hidden and x.float32. Unused and passed-through values need none.
    casts = [node for node in changed.nodes if isinstance(node.layer, Cast)]
    assert [(node.layer.dtype, node.inputs[0] in net.inputs) for node in casts] == [
        (own, True), (dtype, False), (own, True), (dtype, False)
    ]  # fmt: skip
    order = [node.name for node in changed.nodes]
    for cast in casts:  # each is next to its reader or source
        if cast.inputs[0] in net.inputs:
            assert [order.index(reader) - order.index(cast.name) for reader in readers(changed, cast.name)] == [1]
        else:
            assert order.index(cast.name) - order.index(cast.inputs[0]) == 1
    assert [node.layer for node in changed.nodes if node not in casts] == [node.layer for node in net.nodes]
    assert all(changed.types[value].dtype == own for node in changed.nodes if isinstance(node.layer, Linear)
               for value in (*node.inputs, node.name))  # fmt: skip
    assert with_io(changed, dtype) is changed


@pytest.mark.parametrize("dtype", IO_DTYPES)
def test_the_float64_reference_is_the_same(dtype):
    net = many_ends("float64")
    changed = with_io(net, dtype)
    xs = tuple(x.astype(np.float64) if x.dtype != np.int32 else x for x in rows_of(changed))
    for got, truth in zip(reference.forward(changed, xs), reference.forward(net, xs), strict=True):
        assert np.array_equal(got, truth)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("B", [1, 7, 130])
def test_on_the_cpu_only_the_ends_are_rounded(B, dtype):
    net = random_mlp(7, 13, 5, 3, output="Softmax")
    half, wide = (onchip.compile(n, device="cpu") for n in (with_io(net, dtype), net))
    assert [group.claim.kernel for group in half.plan.groups] == ["pointwise", "mlp_fused", "pointwise"]
    x = rows(B, 7).astype(numpy_dtype(dtype))
    got = half(x)
    assert got.dtype == numpy_dtype(dtype)
    expected = wide(x.astype(np.float32)).astype(numpy_dtype(dtype))
    assert got.tobytes() == expected.tobytes()
    # The naive run in float32 rounds where the engine does.
    naive, truth = reference.forward(with_io(net, dtype), x, "float32"), reference.forward(net, x)
    assert HALF[dtype] / 8 < np.abs(naive / truth - 1).max() < 1.01 * HALF[dtype]


@pytest.mark.parametrize("dtype", IO_DTYPES)
def test_many_ends_on_the_cpu(dtype):
    net = with_io(many_ends("float64"), dtype)
    xs = rows_of(net, 9)
    made = onchip.compile(net, device="cpu")(*xs)
    for name, got, truth in zip(net.outputs, made, reference.forward(net, xs), strict=True):
        assert got.dtype == numpy_dtype(net.types[name].dtype)
        if "float" in got.dtype.name:
            np.testing.assert_allclose(got.astype(np.float64), truth, rtol=1.01 * HALF.get(dtype, 2.0**-24))
        else:
            assert np.array_equal(got, truth)


@pytest.mark.parametrize("dtype", IO_DTYPES)
def test_onnx_keeps_it(tmp_path, dtype):
    net = with_io(random_mlp(7, 13, 3, activation="Tanh").replace(outputs=("tanh1", "fc2")), dtype)
    write_onnx(net, tmp_path / "net.onnx")
    back = read_onnx(tmp_path / "net.onnx")
    assert (back.inputs, back.outputs, back.nodes) == (net.inputs, net.outputs, net.nodes)
    if dtype != "bfloat16":  # NumPy lacks it, so ONNX Runtime cannot receive it
        (x,) = rows_of(net)
        tolerance = 4 * HALF.get(dtype, 2.0**-20)
        for got, truth in zip(run_onnx(tmp_path / "net.onnx", x), reference.forward(net, x), strict=True):
            assert got.dtype.name == dtype
            np.testing.assert_allclose(got, truth, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("suffix", [".onnx", ".safetensors"])
def test_every_end_is_stored_in_files(tmp_path, suffix):
    net = with_io(many_ends(), "float16").replace(outputs=("hidden", "x.float32", "bytes"))
    onchip.save(net, tmp_path / f"net{suffix}")
    back = onchip.load(tmp_path / f"net{suffix}")
    assert [back.types[name] for name in back.outputs] == [net.types[name] for name in net.outputs]
    assert back.inputs == net.inputs
    xs = rows_of(net)
    for got, truth in zip(reference.forward(back, xs), reference.forward(net, xs), strict=True):
        np.testing.assert_allclose(got, truth, rtol=1e-6)


@pytest.mark.parametrize("bad", ["fp16", "float64", "int32", ""])
def test_another_dtype_is_an_error(bad):
    with pytest.raises(InputError, match="unsupported dtype for inputs and outputs"):
        with_io(random_mlp(3, 2), bad)


def test_a_network_of_only_ends():
    net = Network({"x": TensorType(("B", 3))}, (Node("y", ReLU(), ("x",)),), ("x", "y", "y"), {})
    half = with_io(net, "float16")
    x = rows(5, 3).astype(np.float16)
    same, y, again = onchip.compile(half, device="cpu")(x)
    assert np.array_equal(same, x)
    assert np.array_equal(y, np.maximum(x, 0))
    assert np.array_equal(again, y)
