"""Operators on NaN, infinities, signed zeros and huge values, as in ONNX Runtime and NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

import onchip
from onchip.kernels import reference
from onchip.network.layers import Equal, Greater, GreaterOrEqual, Linear
from onnx_models import F32, model, numbers, op, read, run_onnx

INF, NAN = np.inf, np.nan
SPECIAL = np.array(
    [0.0, -0.0, INF, -INF, NAN, 1, -1, 0.5, -0.5, 0.7, 2, 3, -3, 1e10, -1e10, 1e20, 3e38, -3e38, 1e-30, 1e-40, -1e-45]
)
PAIRS = np.repeat(SPECIAL, len(SPECIAL))[:, None], np.tile(SPECIAL, len(SPECIAL))[:, None]
KINDS = {
    "Equal": Equal, "Greater": Greater, "GreaterOrEqual": GreaterOrEqual, "Less": Greater,
    "LessOrEqual": GreaterOrEqual,
}  # fmt: skip
CAST = op("Cast", "m", to=F32)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def device(request, monkeypatch):
    """The device that this test compiles engines for."""
    monkeypatch.setitem(globals(), "DEVICE", request.param)


DEVICE = "cpu"


def of_two(nodes, weights=None, element=F32):
    """A model of x and z, one element each per row."""
    proto = model(nodes, weights, ("N", 1), element=element)
    proto.graph.input.append(helper.make_tensor_value_info("z", element, ("N", 1)))
    return proto


def assert_same(net, xs, expected, rtol=2e-6):
    """The reference in the network's own dtype, and the device's engine."""
    dtype = "float64" if xs[0].dtype == np.float64 else "float32"
    with np.errstate(all="ignore"):
        for got in (reference.forward(net, xs, dtype), onchip.compile(net, DEVICE)(*xs)):
            np.testing.assert_allclose(got, expected, rtol=rtol, atol=2.0**-126)


def check(tmp_path, proto, *xs):
    net = read(tmp_path, proto)
    assert_same(net, xs, run_onnx(proto, *xs)[0])
    return net


CHOICES = {
    "as floats": [CAST],
    "turned": [op("Not", "m", "n"), op("Cast", "n", to=F32)],
    "values": [op("Where", "m x z")],
    "constants": [op("Where", "m inf nan")],
    "one of each": [op("Where", "m many z", "w"), op("Where", "m w inf")],
}
CONSTANTS = {"inf": np.array(-INF, "f4"), "nan": np.array(NAN, "f4"), "many": np.array([[NAN]], "f4")}


@pytest.mark.parametrize("then", CHOICES)
@pytest.mark.parametrize("kind", KINDS)
def test_comparisons(tmp_path, kind, then):
    """Comparisons with NaN are false, and elements that a Where rejects never reach the result."""
    x, z = (values.astype("f4") for values in PAIRS)
    net = check(tmp_path, of_two([op(kind, "x z", "m"), *CHOICES[then]], CONSTANTS), x, z)
    assert KINDS[kind] in [type(node.layer) for node in net.nodes]


@pytest.mark.parametrize("operands", ["x k", "k x"])
@pytest.mark.parametrize("kind", KINDS)
def test_comparisons_with_constants(tmp_path, kind, operands):
    for k in (0.0, NAN, INF):
        proto = model([op(kind, operands, "m"), CAST], {"k": np.array(k, "f4")}, ("N", 1))
        check(tmp_path, proto, SPECIAL[:, None].astype("f4"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "element"), [("int64", TensorProto.INT64), ("int32", TensorProto.INT32)])
def test_ints_are_compared_as_ints(tmp_path, kind, dtype, element):
    """Also if no float represents them, or their difference overflows."""
    info = np.iinfo(dtype)
    few = np.array([info.min, info.min + 1, -(1 << 24) - 1, -1, 0, 1, 1 << 24, (1 << 24) + 1, info.max - 1, info.max])
    few = few.astype(dtype)
    x, z = np.repeat(few, len(few))[:, None], np.tile(few, len(few))[:, None]
    proto = of_two([op(kind, "x z", "m"), CAST], element=element)
    proto.graph.output[0].type.tensor_type.elem_type = F32
    check(tmp_path, proto, x, z)
    for k in few:
        proto = model([op(kind, "x k", "m"), CAST], {"k": np.array(k)}, ("N", 1), element=element)
        proto.graph.output[0].type.tensor_type.elem_type = F32
        check(tmp_path, proto, few[:, None])


@pytest.mark.parametrize(("dtype", "element"), [("float32", F32), ("float64", TensorProto.DOUBLE)])
def test_mod(tmp_path, dtype, element):
    """C's fmod over all magnitudes; without fmod, which ONNX lacks for floats, NumPy's mod."""
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((2, 500, 1)) * 10.0 ** rng.integers(-6, 12, (2, 500, 1))
    x, z = (np.concatenate([a, b]).astype(dtype) for a, b in zip(PAIRS, wide, strict=True))
    with np.errstate(all="ignore"):
        assert_same(read(tmp_path, of_two([op("Mod", "x z", fmod=1)], element=element)), (x, z), np.fmod(x, z), 0)
        assert_same(read(tmp_path, of_two([op("Mod", "x z")], element=element)), (x, z), np.mod(x, z), 0)
        for k in (0.7, 3.0, -0.7):
            proto = model([op("Mod", "x k", fmod=1)], {"k": np.array(k, dtype)}, ("N", 1), element=element)
            assert_same(read(tmp_path, proto), (1000 * x,), np.fmod(1000 * x, np.array(k, dtype)), 0)


def test_mod_with_the_sign_of_the_divisor_is_written_as_other_operators(tmp_path):
    x, z = (values.astype("f4") for values in PAIRS)
    net = read(tmp_path, of_two([op("Mod", "x z")]))
    onchip.save(net, tmp_path / "saved.onnx")
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(run_onnx(tmp_path / "saved.onnx", x, z)[0], np.mod(x, z))


@pytest.mark.parametrize("power", [0.5, -0.5, 0, 1, 2, 3, -1, -2, 1.5, INF, NAN])
def test_powers(tmp_path, power):
    proto = model([op("Pow", "x p")], {"p": np.array(power, "f4")}, ("N", 1))
    check(tmp_path, proto, SPECIAL[:, None].astype("f4"))


@pytest.mark.parametrize(
    "kind", ["Sign", "Abs", "Sqrt", "Reciprocal", "Log", "Floor", "Round", "Relu", "IsNaN", "IsInf"]
)
def test_functions(tmp_path, kind):
    x = SPECIAL[:, None].astype("f4")
    nodes = [op(kind, "x", "m"), CAST] if kind.startswith("Is") else [op(kind, "x")]
    check(tmp_path, model(nodes, {}, ("N", 1)), x)
    if kind == "Sign":
        assert_same(read(tmp_path, model(nodes, {}, ("N", 1))), (x,), np.sign(x))


def test_signs_of_ints(tmp_path):
    x = np.array([[np.iinfo("i8").min, -3, 0, 5]])
    net = read(tmp_path, model([op("Sign", "x")], {}, ("N", 4), element=TensorProto.INT64))
    np.testing.assert_array_equal(onchip.compile(net, DEVICE)(x), np.sign(x))


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("kind", ["LogSumExp", "Max", "Min", "L1", "LogSum", "SumSquare"])
def test_reductions(tmp_path, kind, keep):
    rows = [
        [1, 2, 3], [INF, 1, 2], [-INF, 1, 2], [-INF] * 3, [INF] * 3, [INF, -INF, 0], [NAN, 1, 2], [NAN, INF, -INF],
        [3e38, 0, -3e38], [0, -0.0, 0], [-1e20, -1e20, -1e20],
    ]  # fmt: skip
    check(tmp_path, model([op(f"Reduce{kind}", "x", axes=[1], keepdims=keep)], {}, ("N", 3)), np.array(rows, "f4"))


RESIZES = {"up": ([16, 27], 0, 0), "down": ([5, 4], 0, 0), "smoothed": ([5, 4], 1, 0), "excluded": ([11, 9], 0, 1)}


@pytest.mark.parametrize("special", [NAN, INF])
@pytest.mark.parametrize("how", ["half_pixel", "align_corners", "asymmetric"])
@pytest.mark.parametrize("case", RESIZES)
def test_a_cubic_resize_keeps_a_nan_where_it_counts(tmp_path, case, how, special):
    """Only outputs with a nonzero weight for it change; all others are unaffected."""
    sizes, smooth, exclude = RESIZES[case]
    given = {"mode": "cubic", "axes": [2, 3], "coordinate_transformation_mode": how}
    node = op("Resize", "x", **given, antialias=smooth, exclude_outside=exclude)
    node.input[:] = ["x", "", "", "sizes"]
    net = read(tmp_path, model([node], {"sizes": np.array(sizes)}, ("N", 2, 8, 9), opset=18))
    assert Linear not in [type(each.layer) for each in net.nodes]
    engine, x = onchip.compile(net, DEVICE), numbers(2, 2, 8, 9)
    one = np.zeros_like(x)
    one[0, 1, 3, 6] = 1
    counts = np.abs(engine(one)) > 1e-7
    assert 0 < counts.sum() < counts[0, 1].size
    bad = x.copy()
    bad[0, 1, 3, 6] = special
    got = engine(bad)
    np.testing.assert_array_equal(~np.isfinite(got), counts)
    np.testing.assert_array_equal(got[~counts], engine(x)[~counts])
