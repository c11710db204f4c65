"""Selections, resizes and row norms in NumPy (network/layers/): against NumPy's own functions and torch's."""

import numpy as np
import pytest

from onchip.errors import ShapeError
from onchip.network.layers import Gather, GroupNorm, LayerNorm, LinearResize, NearestResize, Pad, RMSNorm, Slice, Tile
from onchip.network.types import TensorType


def run(layer, x, **w):
    made = layer.infer((TensorType(("B", *x.shape[1:]), "float64"),), {})
    y = layer.forward((x,), w)
    assert y.shape[1:] == made.row_shape
    return y


X = np.random.default_rng(0).standard_normal((2, 3, 5, 4))


def test_choices_are_numpys():
    assert np.array_equal(run(Slice((2, 1, 0), (2, 2, 4), (-2, 3, 1)), X), X[:, ::-2, 1::3])
    assert np.array_equal(run(Gather(-2, (4, 0, 0)), X), X[:, :, [4, 0, 0]])
    assert np.array_equal(run(Tile((2, 1, 3)), X), np.tile(X, (1, 2, 1, 3)))
    for mode in ("reflect", "edge", "wrap"):  # pads that are longer than the row, too
        got = run(Pad((0, 7, 1, 0, 2, 9), mode), X)
        assert np.array_equal(got, np.pad(X, ((0, 0), (0, 0), (7, 2), (1, 9)), mode))
    got = run(Pad((1, 0, 0, 0, 2, -1), value=3.0), X)
    assert np.array_equal(got, np.pad(X[..., :-1], ((0, 0), (1, 0), (0, 2), (0, 0)), constant_values=3))


@pytest.mark.parametrize(
    ("mode", "options", "layer"),
    [
        ("nearest", {}, lambda *to: NearestResize(*to, "asymmetric", "floor")),
        ("nearest-exact", {}, lambda *to: NearestResize(*to, "half_pixel", "round_prefer_ceil")),
        ("bilinear", {"align_corners": False}, LinearResize),
        ("bilinear", {"align_corners": True}, lambda *to: LinearResize(*to, "align_corners")),
    ],
)
def test_resizes_are_torchs(mode, options, layer):
    torch = pytest.importorskip("torch")
    for sizes in ((10, 8), (7, 3), (5, 4), (1, 9)):
        made = torch.nn.functional.interpolate(torch.tensor(X), sizes, mode=mode, **options).numpy()
        given = layer((3, *sizes), (1.0, sizes[0] / 5, sizes[1] / 4))
        np.testing.assert_allclose(run(given, X), made, rtol=1e-12, atol=1e-12)


def test_norms_are_torchs():
    torch = pytest.importorskip("torch")
    functional, x = torch.nn.functional, torch.tensor(X)
    w, b, C = np.arange(20.0).reshape(5, 4), np.ones((5, 4)), np.arange(3.0)
    pairs = [
        (
            run(LayerNorm(2, 1e-3), X, weight=w, bias=b),
            functional.layer_norm(x, (5, 4), torch.tensor(w), torch.tensor(b), 1e-3),
        ),
        (run(RMSNorm(-1, 1e-3), X, weight=w[0]), functional.rms_norm(x, (4,), torch.tensor(w[0]), 1e-3)),
        (run(GroupNorm(3, 1e-3), X, weight=C), functional.instance_norm(x, weight=torch.tensor(C), eps=1e-3)),
        (run(GroupNorm(1), X, bias=C), functional.group_norm(x, 1, None, torch.tensor(C))),
    ]  # fmt: skip
    for got, made in pairs:
        np.testing.assert_allclose(got, made.numpy(), rtol=1e-12, atol=1e-12)


BAD = {
    "slice beyond": (Slice((0, 0, 3), (3, 5, 2), (1, 1, 1)), "out of range"),
    "slice axes": (Slice((0,), (3,), (1,)), "bad input shape"),
    "gather beyond": (Gather(1, (0, 3)), "out of range"),
    "gather rows": (Gather(0, (0,)), "axis 0 is the batch"),
    "cut off": (Pad((0, 0, 0, 0, -6, 0)), "crop more"),
    "tile axes": (Tile((2,)), "bad input shape"),
    "resize axes": (LinearResize((4,), (1.0,)), "bad input shape"),
    "groups": (GroupNorm(2), "do not divide into groups"),
    "norm rows": (LayerNorm(0), "axis 0 is the batch"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(case):
    layer, words = BAD[case]
    with pytest.raises(ShapeError, match=words):
        layer.infer((TensorType(("B", 3, 5, 4)),), {})


def test_bad_attributes_are_refused():
    for make in (
        lambda: Slice((0,), (1, 2), (1,)), lambda: Gather(1, ()), lambda: Pad((1, 2, 3)), lambda: Pad((1, 2), "mirror"),
        lambda: NearestResize((2,), (0.0,)), lambda: LinearResize((2,), (1.0,), "cubic"), lambda: Tile((-1,)),
    ):  # fmt: skip
        with pytest.raises(ShapeError):
            make()
    with pytest.raises(ShapeError, match="not an int"):
        Pad((1, 1), value=0.5).infer((TensorType(("B", 3), "int32"),), {})
