"""Scans on a GPU: how they are cut (anywhere), and that they are right (on a GPU)."""

import itertools

import numpy as np
import pytest

import onchip
from checks import narrow_numbers, narrow_sums
from onchip.kernels.cuda.common.arguments import Input, Int64, Output
from onchip.kernels.cuda.scan.scan import GROUP, Scan
from onchip.kernels.reference.scan import scan as reference_scan
from onchip.network.build import sequential
from onchip.network.layers import CumSum, Linear
from onchip.network.scan_op import DTYPES, OPS, ScanOp
from onchip.network.types import TensorType
from onchip.plan.device import A100, H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.placement import kernels_for

SIZES = (1, 7, 2048, 2049, 8191, 8192, 8193, 100_003, 5_000_003)


def numbers(dtype, *shape, seed=0):
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, shape, dtype)


def assert_right(y, x, how):
    """Ints to the bit; float totals within a few roundings of what pairwise summation may err."""
    truth = reference_scan(x, how)
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    if x.dtype.kind == "i" or how.op in ("max", "min"):
        np.testing.assert_array_equal(y, truth.astype(x.dtype))
        return
    eps = np.finfo(x.dtype).eps
    if how.op == "product":
        np.testing.assert_allclose(y, truth, rtol=64 * eps, atol=np.finfo(x.dtype).tiny * 2**40)
        return
    depth = 8 + np.log2(max(2, x.shape[-1]))
    scale = np.maximum.accumulate(np.abs(truth), axis=-1) + np.sqrt(x.shape[-1])
    assert (np.abs(y - truth) <= depth * eps * scale).all()


# -- how it is cut -------------------------------------------------------------------------------------------


def long_launch(scan, device=H200):
    clearing, tiles = scan.steps(device).launches
    assert clearing.program.name_expression == "clear_states"
    return tiles


def test_how_rows_are_taken():
    assert [Scan(ScanOp(), "float32", 5, N).is_long for N in (1, 2048, 2049)] == [False, False, True]
    assert [Scan(ScanOp(), "int64", 5, N).is_long for N in (1024, 1025)] == [False, True]
    assert not Scan(ScanOp(reverse=True), "float32", 5, 1 << 20).is_long
    assert [Scan(ScanOp(), "float32", 9, N).lanes for N in (1, 4, 5, 8, 9, 64, 128, 2000)] == [
        1,
        1,
        2,
        2,
        4,
        16,
        32,
        32,
    ]
    assert Scan(ScanOp(), "float32", 1, 1 << 20, 3).is_narrow
    assert not Scan(ScanOp(), "float32", 1, 1 << 20, 1 << 12).is_narrow  # scanned in place
    assert not Scan(ScanOp(), "float32", 1000, 100, 3).is_narrow


def test_tiles_and_states():
    tile = 8192
    for N, tiles, groups in (
        (tile + 1, 2, 1),
        (GROUP * tile, GROUP, 1),
        (2**20 + 1, 129, 2),
    ):
        scan = Scan(ScanOp(), "float32", 3, N)
        assert (scan.tiles, scan.states) == (tiles, 3 * (tiles + groups))
        assert long_launch(scan).config.grid == (3 * tiles, 1, 1)
    assert [Scan(ScanOp(), dtype, 1, 2**20).group for dtype in ("float32", "int64")] == [2**20, 2**19]
    few, many = Scan(ScanOp(), "float32", 1, 2**26 - 1), Scan(ScanOp(), "float32", 1, 2**26)
    assert (few.tile, many.tile) == (8192, 10_240)  # many tiles are larger
    part = Scan(ScanOp(), "float32", 1, 5, row_length=2**26)
    assert part.is_long  # however short: it continues from a carry, in tiles of the whole row
    assert (part.tile, part.tiles) == (10_240, 1)
    assert long_launch(Scan(ScanOp(), "float32", 1, 2**28)).config.overlaps
    assert not long_launch(Scan(ScanOp(), "float32", 1, 2**28), A100).config.overlaps


def test_names_of_kernels():
    assert long_launch(Scan(ScanOp("max", True), "int64", 1, 9999)).program.name_expression == (
        "scan_tiles<Max, long long, true, 8>"
    )
    (walking,) = Scan(ScanOp("sum", False, True), "float32", 10, 77).steps(H200).launches
    assert walking.program.name_expression == "scan_rows<Sum, float, false, true, 32>"
    assert walking.config.grid == (2, 1, 1)
    (of_a_tile,) = Scan(ScanOp("max", True), "int64", 7, 4096).steps(H200).launches
    assert of_a_tile.program.name_expression == "scan_warps<Max, long long, true>"
    assert of_a_tile.config.grid == (7, 1, 1)
    assert of_a_tile.config.block == (256, 1, 1)  # 512 elements per warp
    for is_aligned, name in ((True, "permute_few"), (False, "permute_tiles")):
        scan = Scan(ScanOp(), "float64", 2, 10_000, 3, is_aligned=is_aligned)
        there, _, _, back = scan.steps(H200).launches
        assert [launch.program.name_expression.partition("<")[0] for launch in (there, back)] == [name] * 2
    assert there.config.grid == back.config.grid == (2 * 10, 1, 1)  # boxes of 1,000 x 3
    odd, _, _, _ = Scan(ScanOp(), "float32", 1, 10_000, 8, is_aligned=False).steps(H200).launches
    assert odd.program.name_expression == "permute_tiles<unsigned, unsigned, u32, 1, 1>"


def test_scratch_memory_of_steps():
    """The array with its axes swapped, then a state for each tile and each group of tiles."""
    scan = Scan(ScanOp(), "float32", 2, 10_000, 3)
    steps = scan.steps(H200)
    moved, tiles = 4 * 2 * 10_000 * 3, 2 * 3 * (2 + 1)
    assert steps.scratch_bytes == -(-moved // 256) * 256 + 16 * tiles
    assert [launch.program.name_expression.partition("<")[0] for launch in steps.launches] == [
        "permute_few", "clear_states", "scan_tiles", "permute_few",
    ]  # fmt: skip
    assert Scan(ScanOp(), "float32", 5, 7).steps(H200).scratch_bytes == 0
    assert Scan(ScanOp(), "float32", 0, 7).steps(H200).launches == ()


def test_cumsum_is_planned():
    net = sequential(TensorType(("B", 6, 10, 4)), [("sums", CumSum(axis=2, exclusive=True))], {})
    plan = make_plan(net, H200, kernels_for(H200), Job("fp16"))
    (group,) = plan.groups
    (launch,) = group.claim.facts.at(5).launches
    assert launch.program.name_expression == "scan_columns<Sum, float, true, false>"
    assert launch.arguments == (Input(0), Output(0), Int64(30), Int64(10), Int64(4))
    assert launch.config.grid == (1, 1, 1)
    assert group.claim.cost.row_bytes == 2 * 6 * 10 * 4 * 4


def test_cumsum_of_a_long_row_is_the_scan_of_one():
    net = sequential(TensorType(("B", 1 << 24)), [("sums", CumSum(axis=1))], {})
    (group,) = make_plan(net, H200, kernels_for(H200)).groups
    assert group.claim.facts.at(3) == Scan(ScanOp(), "float32", 3, 1 << 24).steps(H200)
    assert group.claim.cost.launches == 2


# -- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_long_and_short_rows(op, dtype):
    torch = pytest.importorskip("torch")
    for N, exclusive in itertools.product(SIZES, (False, True)):
        how = ScanOp(op, exclusive)
        x = numbers(dtype, N)
        if op == "product" and x.dtype.kind == "f":
            x = np.exp(x / 100).astype(dtype)  # so that products neither vanish nor overflow at once
        there = torch.from_numpy(x).cuda()
        out = torch.full_like(there, 77)
        assert onchip.scan(there, op, exclusive, out=out) is out
        y = out.cpu().numpy()
        if op == "product" and x.dtype.kind == "f":
            y, x = y[:5000], x[:5000]
        assert_right(y, x, how)
        assert torch.equal(onchip.scan(there, op, exclusive), out)  # the same bits


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [(1000, 3), (77, 1), (5, 2047), (300, 2050), (700, 4096), (9, 8191), (3, 70_001), (2, 0), (0, 5), (4, 1_100_000)],
)
def test_rows_are_segments_and_alone_have_the_same_bits(shape):
    torch = pytest.importorskip("torch")
    for dtype in ("float32", "int64"):
        x = numbers(dtype, *shape)
        there = torch.from_numpy(x).cuda()
        y = onchip.scan(there).cpu().numpy()
        assert_right(y, x, ScanOp())
        for row in {0, shape[0] // 2, shape[0] - 1} if x.size else ():
            alone = onchip.scan(there[row : row + 1].clone()).cpu().numpy()
            assert np.array_equal(alone[0], y[row])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(10, 20, 30), (100_003, 3), (3, 5000, 2, 2), (70, 5000), (3000, 1, 5), (9, 4000, 1)])
def test_any_axis(shape):
    torch = pytest.importorskip("torch")
    for dtype, exclusive in (("float32", False), ("int32", True), ("float64", True)):
        x = numbers(dtype, *shape)
        there = torch.from_numpy(x).cuda()
        for axis in range(-len(shape), len(shape)):
            y = onchip.scan(there, "sum", exclusive, axis=axis).cpu().numpy()
            assert_right(np.moveaxis(y, axis, -1), np.moveaxis(x, axis, -1), ScanOp("sum", exclusive))


@pytest.mark.gpu
@pytest.mark.parametrize("inner", [2, 3, 4, 8])
def test_columns_that_do_not_begin_at_16_bytes(inner):
    torch = pytest.importorskip("torch")
    x = numbers("float32", 8000, inner)
    expected = onchip.scan(torch.from_numpy(x).cuda(), axis=0)
    padded = torch.zeros(x.size + 1, device="cuda")
    there = padded[1:].view(8000, inner)
    there.copy_(torch.from_numpy(x))
    assert torch.equal(onchip.scan(there, axis=0), expected)
    assert torch.equal(onchip.scan(there, axis=0, out=there), expected)


@pytest.mark.gpu
def test_in_place_unaligned_and_overlapping():
    torch = pytest.importorskip("torch")
    x = numbers("float32", 300_007)
    whole = onchip.scan(torch.from_numpy(x).cuda()).cpu().numpy()
    there = torch.from_numpy(x).cuda()
    assert onchip.scan(there, out=there) is there
    assert np.array_equal(there.cpu().numpy(), whole)
    padded = torch.zeros(300_008, device="cuda")
    padded[1:] = torch.from_numpy(x)
    assert np.array_equal(onchip.scan(padded[1:]).cpu().numpy(), whole)  # does not begin at 16 bytes
    with pytest.raises(onchip.OnchipError, match="overlaps"):
        onchip.scan(padded[1:], out=padded[:-1])


@pytest.mark.gpu
def test_nan_passes_on_and_infinities_stay():
    torch = pytest.importorskip("torch")
    for op, dtype in itertools.product(OPS, ("float32", "float64")):
        x = numbers(dtype, 40_000)
        x[20_011] = np.nan
        y = onchip.scan(torch.from_numpy(x).cuda(), op).cpu().numpy()
        assert np.isnan(y[20_011:]).all()
        assert not np.isnan(y[:20_011]).any()
        x[20_011] = np.inf
        y = onchip.scan(torch.from_numpy(x).cuda(), op).cpu().numpy()
        np.testing.assert_array_equal(np.isfinite(y), np.isfinite(reference_scan(x, ScanOp(op)).astype(dtype)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_numpy_rows_through_the_gpu_have_the_same_bits(dtype):
    torch = pytest.importorskip("torch")
    part = Scan(ScanOp(), dtype, 1, 2**20).group
    for shape, axis in (
        ((5 * part + 1234,), 0),
        ((3, 1000), 1),
        ((1000, 3, 2), 0),
        ((7, 3_000_000), 1),
        ((0,), 0),
    ):
        x = numbers(dtype, *shape)
        here = onchip.scan(x, axis=axis, device="cuda")
        rows = np.ascontiguousarray(np.moveaxis(x, axis, -1))
        there = onchip.scan(torch.from_numpy(rows).cuda()).cpu().numpy()
        assert np.array_equal(np.moveaxis(here, axis, -1), there)


@pytest.mark.gpu
def test_other_libraries_and_graphs():
    torch, cupy = pytest.importorskip("torch"), pytest.importorskip("cupy")
    x = numbers("int32", 200_001)
    truth = np.cumsum(x, dtype=np.int32)
    assert np.array_equal(onchip.scan(cupy.asarray(x)).get(), truth)
    there, out = torch.from_numpy(x).cuda(), torch.zeros(200_001, dtype=torch.int32, device="cuda")
    onchip.scan(there, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        onchip.scan(there, out=out)
        made = onchip.scan(out, "max")
    for seed in range(3):
        x = numbers("int32", 200_001, seed=seed)
        there.copy_(torch.from_numpy(x))
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert np.array_equal(out.cpu().numpy(), np.cumsum(x, dtype=np.int32))
        assert np.array_equal(made.cpu().numpy(), np.maximum.accumulate(np.cumsum(x, dtype=np.int32)))


@pytest.mark.gpu
def test_jax():
    jax = pytest.importorskip("jax")
    x = numbers("float32", 300, 40)
    y = onchip.scan(jax.numpy.asarray(x), axis=0)
    assert isinstance(y, jax.Array)
    assert_right(np.asarray(y).T, x.T, ScanOp())


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [CumSum(1), CumSum(2, True), CumSum(3, False, True), CumSum(-1, True, True)])
def test_a_layer_of_a_network(layer):
    net = sequential(TensorType(("B", 6, 10, 40)), [("sums", layer)], {})
    x = numbers("float32", 33, 6, 10, 40)
    engine = onchip.compile(net, "cuda")
    y = engine(x)
    how = ScanOp("sum", layer.exclusive, layer.reverse)
    assert_right(np.moveaxis(y, layer.axis, -1), np.moveaxis(x, layer.axis, -1), how)
    assert np.array_equal(engine(x[:1]), y[:1])
    weights = {"in.weight": numbers("float32", 9, 12), "out.weight": numbers("float32", 3, 9, seed=1)}
    layers = [("in", Linear()), ("sums", CumSum(1)), ("out", Linear())]
    between = sequential(TensorType(("B", 12)), layers, weights)
    rows = numbers("float32", 50, 12)
    here, there = (onchip.compile(between, device)(rows) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(there, here, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(7,), (3000, 5), (3, 2049), (1_000_003,), (300, 5000)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int16", "uint8"])
def test_narrow_numbers_are_rounded_once(dtype, shape):
    for axis, exclusive, reverse in ((1, False, False), (-1, True, True)):
        net = sequential(TensorType(("B", *shape), dtype), [("s", CumSum(axis, exclusive, reverse))], {})
        engine = onchip.compile(net, "cuda")
        for B in (0, 1, 7):
            x = narrow_numbers(dtype, B, *shape)
            np.testing.assert_array_equal(engine(x), narrow_sums(net, x))
