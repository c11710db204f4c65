"""conv_sm90_images: how conv_sm90 runs many images in 16 bits. On the host, then on a GPU."""

import dataclasses

import numpy as np
import pytest

import onchip
from checks import rows
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import run_claim
from kernels.cuda.conv.test_sm90 import (
    EPS,
    claim_of,
    compile_alone,
    conv_alone,
    conv_inside,
    exact_of,
    residual,
    weight,
)  # fmt: skip
from onchip.kernels import reference
from onchip.kernels.cuda.conv.direct import Geometry
from onchip.kernels.cuda.conv.sm90 import ConvSm90Kernel, ConvSm90Lowering
from onchip.kernels.cuda.conv.sm90_images import IMAGES, SKIPPED
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, ReLU
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Job

CASES = {
    "faces": (ConvTranspose2d((2, 2), (1, 1, 2, 2)), (40, 3, 2), (40, 72, 5, 5)),
    "phases of several taps": (ConvTranspose2d((2, 2), (1, 1, 1, 1), (1, 1)), (136, 2, 3), (136, 16, 3, 3)),
    "odd sides": (ConvTranspose2d((2, 2), (1, 1, 1, 0)), (48, 3, 2), (48, 24, 4, 4)),
    "strides that differ": (ConvTranspose2d((4, 1), (0, 2, 1, 0), (2, 0)), (40, 2, 3), (40, 24, 5, 3)),
    "same": (Conv2d(pads=(1, 1, 1, 1)), (40, 3, 5), (64, 40, 3, 3)),
    "many channels": (Conv2d((2, 1), (0, 1, 1, 0)), (72, 5, 3), (264, 72, 2, 2)),
    "dilation": (Conv2d((1, 2), (2, 0, 1, 3), (2, 1)), (40, 5, 4), (136, 40, 2, 3)),
    "a signal": (Conv1d(pads=(2, 1)), (64, 7), (24, 64, 4)),
    "a signal, twice": (ConvTranspose1d((2,)), (40, 5), (40, 136, 3)),
    "from one pixel": (ConvTranspose2d(), (104, 1, 1), (104, 24, 4, 4)),
}


MANY = ("faces", "many channels", "a signal, twice")  # more than the images of a tile, too


@needs_gxx
@pytest.mark.parametrize(
    ("name", "precision", "dtype", "B"),
    [(name, "fp16", "float16", 5) for name in CASES] + [(name, "bf16", "bfloat16", IMAGES + 3) for name in MANY],
)
def test_on_an_emulated_gpu(monkeypatch, name, precision, dtype, B):
    """As exact as conv_sm90, and the same bits; also of more images than a tile has."""
    layer, row, shape = CASES[name]
    net = conv_inside(layer, row, weight(*shape), activation=ReLU(), dtype=dtype)
    claim, gpu = claim_of(net, precision), emulated_gpu(monkeypatch)
    x = rows(B, int(np.prod(row))).reshape(B, *row).astype(numpy_dtype(dtype))
    claim = dataclasses.replace(claim, facts=dataclasses.replace(claim.facts, units=6))  # blocks compute several tiles
    monkeypatch.setattr(ConvSm90Lowering, "uses_images", lambda *_: True)
    launch = claim.facts.at(B).launches[0]
    assert launch.program.name_expression.startswith("conv_sm90_images")
    got = run_claim(gpu, net, claim, x)
    exact = exact_of(net, precision, x)
    assert np.abs(got.astype(float) - exact).max() <= (1e-3 if precision == "fp16" else 8e-3) * np.abs(exact).max()
    monkeypatch.setattr(ConvSm90Lowering, "uses_images", lambda *_: False)
    some = slice(0, None, 40)
    assert np.array_equal(run_claim(gpu, net, claim, x[some]), got[some])


@needs_gxx
@pytest.mark.parametrize(("way", "B"), [("plain", 5), ("of x", 5), ("twice", IMAGES + 3)])
def test_a_sum_behind_it(monkeypatch, way, B):
    """The bits of conv_sm90, which its own tests check."""
    net = residual("float16", 72, 72, twice=way == "twice", of_x=way == "of x")
    claim = next(iter(ConvSm90Kernel().claims(net, 2, H200, Job("fp16", 100_000))))
    assert claim.nodes == ("c", "s", "a")
    claim = dataclasses.replace(claim, facts=dataclasses.replace(claim.facts, units=6))
    given = [
        rows(B, net.types[name].row_size, seed=seed).reshape(B, *net.types[name].row_shape).astype(np.float16)
        for seed, name in enumerate("b" if way == "of x" else "bo")
    ]
    gpu, made = emulated_gpu(monkeypatch), {}
    for by_images in (True, False):
        monkeypatch.setattr(ConvSm90Lowering, "uses_images", lambda *_, uses=by_images: uses)
        made[by_images] = run_claim(gpu, net, claim, *given)
        assert claim.facts.at(B).launches[0].program.name_expression.startswith("conv_sm90_images") == by_images
    assert np.array_equal(made[True], made[False])
    assert made[True].any()


FACES = [Geometry(True, C, C // 2, 1, (n, n), (2 * n, 2 * n), (5, 5), (2, 2), (1, 1), (1, 1))
         for C, n in ((512, 4), (256, 8), (128, 16))]  # fmt: skip


def lowering(geometry, dtype="float16", **more):
    return ConvSm90Lowering(geometry, "fp16", ("float16", dtype), None, True, H200.units, **more)


@pytest.mark.parametrize("geometry", FACES)
def test_many_images_are_its_own(geometry):
    facts = lowering(geometry)
    assert facts.uses_images(5248)
    assert not facts.uses_images(1)
    inside = [0 <= (o + 1 - tap) // 2 < n and (o + 1 - tap) % 2 == 0
              for n in [geometry.sides_in[0]] for o in range(2 * n) for tap in range(5)]  # fmt: skip
    assert facts.images.row_flop == 2 * geometry.C * geometry.N * sum(inside) ** 2
    assert len(facts.images.steps) == 9
    taps = np.array([taps for _, _, taps in facts.images.steps]).T  # of each unit
    assert [sum(unit != SKIPPED) for unit in taps] == [9, 6, 6, 4]
    assert sorted(taps[taps != SKIPPED]) == list(range(25))


def test_what_it_leaves_to_conv_wgmma():
    geometry = FACES[2]
    assert lowering(geometry, "float32").images is None
    assert lowering(geometry, split_k=2).images is None
    assert lowering(dataclasses.replace(geometry, C=32)).images is None  # several taps a slice
    assert lowering(dataclasses.replace(geometry, N=36)).images is None
    assert lowering(dataclasses.replace(geometry, stride=(3, 3))).images is None  # nine positions per cell
    assert lowering(dataclasses.replace(geometry, taps=(21, 21), before=(9, 9))).images is None  # too many pixels


def test_the_floor_leaves_out_what_is_outside():
    net = conv_inside(*CASES["faces"][:2], weight(*CASES["faces"][2]), dtype="float16")
    prices = {B: next(iter(ConvSm90Kernel().claims(net, 1, H200, Job("fp16", B)))).cost for B in (1, 100_000)}
    assert prices[100_000].row_flop < prices[1].row_flop == net.row_flop(net.by_name["c"])


# -- on a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("precision", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_on_a_gpu(monkeypatch, name, precision, dtype):
    """Many images here, few by conv_sm90: the same bits."""
    layer, row, shape = CASES[name]
    net = conv_alone(layer, row, weight(*shape), dtype)
    engine = compile_alone(monkeypatch, net, precision, 100_000)
    x = rows(4097, int(np.prod(row))).reshape(4097, *row).astype(numpy_dtype(dtype))
    monkeypatch.setattr(ConvSm90Lowering, "uses_images", lambda _, B: B > 7)
    got, exact = engine(x), reference.forward(net, x)
    assert np.abs(got.astype(float) - exact).max() <= EPS[precision] * np.abs(exact).max()
    for first, count in ((0, 1), (17, 7), (500, 64), (130, 300), (4096, 1)):
        assert np.array_equal(engine(x[first : first + count]), got[first : first + count])


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16")])
@pytest.mark.parametrize(("N", "side"), [(64, 8), (136, 5)])
def test_a_residual_on_a_gpu(monkeypatch, precision, dtype, N, side):
    """Several tiles per block, with a residual that the previous kernel has just written."""
    row = TensorType(("B", N, side, side), dtype)
    nodes = (
        Node("p", Conv2d(pads=(1, 1, 1, 1)), ("x",), {"weight": "v"}),
        Node("c", Conv2d(pads=(1, 1, 1, 1)), ("p",), {"weight": "w"}),
        Node("s", Add(), ("c", "p")),
        Node("a", ReLU(), ("s",)),
    )
    weights = {name: weight(N, N, 3, 3).astype(numpy_dtype(dtype)) for name in "vw"}
    net = Network({"x": row}, nodes, ("a",), weights)
    engine = onchip.compile(net, "cuda", precision, batch_hint=100_000)
    assert [group.claim.kernel for group in engine.plan.groups].count("conv_sm90") == 2
    x = rows(2049, row.row_size).reshape(2049, *row.row_shape).astype(numpy_dtype(dtype))
    monkeypatch.setattr(ConvSm90Lowering, "uses_images", lambda _, B: B > 7)
    got, exact = engine(x), reference.forward(net, x)
    assert np.abs(got.astype(float) - exact).max() <= 2 * EPS[precision] * np.abs(exact).max()
    for first, count in ((0, 1), (17, 7), (500, 64), (130, 300), (2048, 1)):
        assert np.array_equal(engine(x[first : first + count]), got[first : first + count])
