"""Permute and layout conversions on a GPU: every order of axes, every dtype."""

import itertools
import math
import struct

import numpy as np
import pytest

import onchip
from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, run_claim
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.fast_divide import small_divider
from onchip.kernels.cuda.common.permute import MAX_AXES, MAX_LINES, SLOTS, TILE, merge_axes, tile_for
from onchip.kernels.cuda.layout.permute import PermuteKernel, PermuteLowering
from onchip.network.build import sequential
from onchip.network.graph import Network, Node
from onchip.network.layers import Cast, Permute, ReLU
from onchip.network.types import TensorType, numpy_dtype
from onchip.plan.device import H200
from onchip.plan.kernel import Job, Refusal
from onchip.plan.layout import CHANNELS_LAST, ROWS
from onchip.plan.planner import make_plan
from onchip.runtime.cuda.bound_steps import BoundSteps

ORDERS = [(0, *axes) for rank in (2, 3, 4) for axes in itertools.permutations(range(1, rank + 1))]


def one(row_shape, axes, dtype="float32"):
    return sequential(TensorType(("B", *row_shape), dtype), [("p", Permute(axes))], {})


@pytest.mark.parametrize("axes", ORDERS, ids=str)
def test_the_same_move_with_fewer_axes(axes):
    for shape in itertools.product((1, 2, 3), repeat=len(axes)):
        x = np.arange(math.prod(shape)).reshape(shape)
        merged, order = merge_axes(shape, axes)
        assert sorted(order) == list(range(len(merged)))
        assert np.array_equal(x.reshape(merged).transpose(order).reshape(-1), x.transpose(axes).reshape(-1))
        assert all(b != a + 1 for a, b in itertools.pairwise(order)), "those two stay together"


def moved(gpu, lowering, x):
    y = np.full_like(x, 77)
    B = len(x)
    BoundSteps(gpu, lowering.at(B)).enqueue([x.ctypes.data], [y.ctypes.data], 0, gpu.stream)
    return y.reshape(-1)


@needs_gxx
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "int64"])
def test_every_order_moves_every_number(monkeypatch, dtype):
    gpu = emulated_gpu(monkeypatch)
    for axes in ORDERS:
        for B, sizes in ((1, (3, 5, 2, 4)), (7, (37, 1, 6, 3)), (2, (9, 16, 8, 11))):
            shape = (B, *sizes[: len(axes) - 1])
            x = np.random.default_rng(B).integers(0, 100, shape).astype(dtype)
            lowering = PermuteLowering((dtype, dtype), shape[1:], axes, 2)
            assert np.array_equal(moved(gpu, lowering, x), x.transpose(axes).reshape(-1))
    assert {name.partition("<")[0] for name in gpu.driver.programs} >= {
        "permute_tiles", "permute_rows", "permute_small",
    }  # fmt: skip


# Long and short axes, aligned and not, of one box or of several, and an axis that lines and columns both want.
MOVES = [
    ((2, 3, 1100), (0, 2, 1)), ((2, 1100, 3), (0, 2, 1)), ((2, 64, 192), (0, 2, 1)), ((2, 68, 100), (0, 2, 1)),
    ((3, 49, 128), (0, 2, 1)), ((3, 128, 49), (0, 2, 1)), ((2, 65, 67), (0, 2, 1)), ((2, 3, 20, 30), (0, 3, 2, 1)),
    ((2, 20, 30, 3), (0, 3, 1, 2)), ((2, 10, 40, 5), (0, 3, 2, 1)), ((500, 2, 2, 2), (3, 2, 1, 0)),
    ((2, 2, 2, 500), (3, 2, 1, 0)), ((130, 70), (1, 0)), ((1000, 2), (1, 0)), ((2, 2100), (1, 0)),
    ((300, 3, 5), (0, 2, 1)), ((70, 5, 4, 3, 2), (0, 4, 3, 2, 1)), ((70, 5, 4, 3), (0, 2, 1, 3)),
    ((5, 32, 64), (0, 2, 1)), ((16, 3, 30, 8), (0, 3, 2, 1)),
    ((3, 3, 10, 16), (0, 2, 3, 1)), ((3, 10, 16, 3), (0, 3, 1, 2)), ((2, 2, 4112), (0, 2, 1)),
    ((2, 4112, 2), (0, 2, 1)), ((5, 4, 4), (0, 2, 1)), ((70, 16, 4), (0, 2, 1)), ((70, 4, 16), (0, 2, 1)),
    ((3, 5008), (1, 0)), ((5008, 3), (1, 0)),
    ((7, 9, 2, 3), (1, 0, 3, 2)), ((3, 4, 5, 6, 7, 8), (5, 4, 3, 2, 1, 0)), ((3, 4, 5, 6, 7, 8), (2, 5, 0, 3, 1, 4)),
]  # fmt: skip


@needs_gxx
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "int64"])
def test_lines_of_any_length(monkeypatch, dtype):
    gpu = emulated_gpu(monkeypatch)
    for shape, axes in MOVES:
        x = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
        got = moved(gpu, PermuteLowering((dtype, dtype), shape[1:], axes, 2), x)
        assert np.array_equal(got, x.transpose(axes).reshape(-1)), (shape, axes)


@needs_gxx
@pytest.mark.parametrize(("given", "made"), [*itertools.permutations(FLOATS, 2)])
def test_moves_between_dtypes(monkeypatch, given, made):
    gpu = emulated_gpu(monkeypatch)
    for shape, axes in (*MOVES[::8], ((3, 50), (0, 1)), ((7,), (0,))):
        x = np.random.default_rng(0).integers(0, 100, shape).astype(numpy_dtype(given))
        y = np.full(x.size, 77, numpy_dtype(made))
        steps = BoundSteps(gpu, PermuteLowering((given, made), shape[1:], axes, 2).at(len(x)))
        steps.enqueue([x.ctypes.data], [y.ctypes.data], 0, gpu.stream)
        assert np.array_equal(y, x.transpose(axes).reshape(-1).astype(y.dtype)), (shape, axes)


def test_few_channels_have_a_kernel_of_their_own():
    def kernel(dtype, shape, axes):
        (launch,) = PermuteLowering((dtype, dtype), shape[1:], axes, 132).at(shape[0]).launches
        return launch.program.name_expression

    assert kernel("float32", (8, 3, 224, 224), (0, 2, 3, 1)) == "permute_few<unsigned, u32, 3, true>"
    assert kernel("uint8", (8, 224, 224, 4), (0, 3, 1, 2)) == "permute_few<unsigned char, u32, 4, false>"
    assert kernel("float32", (1 << 20, 3, 224, 224), (0, 2, 3, 1)) == "permute_few<unsigned, long long, 3, true>"
    for shape in ((8, 3, 225, 225), (8, 5, 224, 224)):  # not in 16 bytes; too many
        assert kernel("float32", shape, (0, 2, 3, 1)).startswith("permute_tiles")


def test_numbers_in_parts():
    n = np.arange(1 << 15, dtype=np.uint64)
    for size in (*range(1, 300), 1000, 1023, 1024, 2047, 2048, 4096):
        given, magic = struct.unpack("<II", small_divider(size).data)
        assert given == size
        assert np.array_equal(((2 * n + 1) * magic >> 32) // 2, n // size)


def test_a_box_has_room_and_is_well_used():
    for Na, Nb in itertools.product((*range(2, 140), 1000, 4097, 1 << 33), repeat=2):
        R, C = tile_for(Na, Nb)
        assert R * C <= TILE
        assert R * (C | 1) <= SLOTS
        assert max(R, C) <= MAX_LINES
        assert all(N % 4 or each % 4 == 0 for N, each in ((Na, R), (Nb, C))), "aligned pieces"
        used = Na * Nb / (-(-Na // R) * -(-Nb // C) * TILE)
        assert used > 0.25 or Na * Nb < TILE or min(Na, Nb) < 3, (Na, Nb, R, C)


@needs_gxx
@pytest.mark.parametrize("row_shape", [(5, 7), (3, 4, 6)])
def test_a_value_goes_to_another_layout_and_back(monkeypatch, row_shape):
    gpu = emulated_gpu(monkeypatch)
    net = sequential(TensorType(("B", *row_shape)), [("r", ReLU()), ("s", ReLU())], {})
    there, back = (
        PermuteKernel().conversion(net, "r", *layouts, H200, Job())
        for layouts in ((ROWS, CHANNELS_LAST), (CHANNELS_LAST, ROWS))
    )
    x = np.random.default_rng(0).standard_normal((9, *row_shape), dtype=np.float32)
    turned = moved(gpu, there.facts, x)
    assert np.array_equal(turned, np.moveaxis(x, 1, -1).reshape(-1))
    again = moved(gpu, back.facts, turned.reshape(9, *row_shape[1:], row_shape[0]))
    assert np.array_equal(again, x.reshape(-1))


@needs_gxx
@pytest.mark.parametrize(("given", "made"), [("float32", "float16"), ("bfloat16", "float32")])
def test_a_cast_goes_to_another_layout_and_back(monkeypatch, given, made):
    gpu = emulated_gpu(monkeypatch)
    nodes = [Node("r", ReLU(), ("x",)), Node("c", Cast(made), ("r",)), Node("s", ReLU(), ("c",))]
    net = Network({"x": TensorType(("B", 3, 4, 6), given)}, tuple(nodes), ("s",), {})
    x = np.random.default_rng(0).standard_normal((9, 3, 4, 6), dtype=np.float32).astype(numpy_dtype(given))
    there, back = claims_of(net, "permute", start=1)
    assert (there.layout_read("r"), dict(there.writes)) == (ROWS, {"c": CHANNELS_LAST})
    assert (back.layout_read("r"), dict(back.writes)) == (CHANNELS_LAST, {})
    for claim in (there, back):
        assert np.array_equal(run_claim(gpu, net, claim, x), x.astype(numpy_dtype(made)))


def test_a_cast_at_an_end_lies_in_rows_there():
    net = sequential(TensorType(("B", 3, 4, 6)), [("c", Cast("float16")), ("s", ReLU()), ("d", Cast("float32"))], {})
    (first,), (last,) = claims_of(net, "permute"), claims_of(net, "permute", start=2)
    assert first.writes == {"c": CHANNELS_LAST}
    assert last.layout_read("s") == CHANNELS_LAST


def test_nothing_to_move_is_no_launch():
    assert PermuteLowering(("float32", "float32"), (3, 5), (0, 2, 1), 132).at(0).launches == ()


def test_a_network_with_a_permute_is_planned():
    plan = make_plan(one((3, 5, 7), (0, 3, 2, 1)), H200, KERNELS, Job("fp16"))
    assert [group.claim.label for group in plan.groups] == ["permute<0,3,2,1>"]
    assert plan.groups[0].claim.cost.row_bytes == 2 * 4 * 105
    many = one((2,) * 8, (0, 8, 7, 6, 5, 4, 3, 2, 1))
    (refusal,) = PermuteKernel().claims(many, 0, H200, Job())
    assert isinstance(refusal, Refusal)
    assert f"up to {MAX_AXES} axes" in refusal.why


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "int64", "uint8"])
def test_every_order_on_a_gpu(dtype):
    moves = [((B, *shape[1:]), axes) for shape, axes in MOVES if axes[0] == 0 for B in (1, 7, 257)]
    for shape, axes in moves:
        x = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
        assert np.array_equal(onchip.compile(one(shape[1:], axes, dtype), "cuda")(x), x.transpose(axes)), (shape, axes)
    for axes in ORDERS:
        engine = onchip.compile(one((37, 5, 66, 3)[: len(axes) - 1], axes, dtype), "cuda")
        for B in (1, 7, 130):
            x = np.random.default_rng(B).integers(0, 100, (B, *engine.plan.network.input.row_shape)).astype(dtype)
            assert np.array_equal(engine(x), x.transpose(axes))
