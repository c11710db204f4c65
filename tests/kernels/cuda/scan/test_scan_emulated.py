"""The CUDA scan kernels, emulated on the host: correct to the last bit at every alignment. No GPU is needed."""

from dataclasses import replace

import numpy as np
import pytest

import emulated_cuda
import onchip
from checks import narrow_numbers, narrow_sums
from emulated_cuda import Kernel, emulated_gpu, needs_gxx
from onchip.kernels import reference
from onchip.kernels.cuda.common.arguments import Input, Output, Scratch
from onchip.kernels.cuda.common.program import Program, Steps
from onchip.kernels.cuda.scan.scan import Scan, ScanKernel
from onchip.kernels.reference.scan import scan as reference_scan
from onchip.network.build import sequential
from onchip.network.layers import CumSum
from onchip.network.scan_op import ScanOp
from onchip.network.types import TensorType
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime import scan as scan_module
from onchip.runtime.cuda import bound_plan
from onchip.runtime.cuda import scan as gpu_scan
from onchip.runtime.cuda.backend import CudaBackend
from onchip.runtime.cuda.bound_steps import BoundSteps
from onchip.runtime.cuda.scan import bound_scan
from onchip.runtime.engine import Engine
from onchip.runtime.placement import kernels_for
from onchip.runtime.scan import scan_into

pytestmark = needs_gxx
GUARD = 64  # bytes on both sides
KINDS = [
    ("sum", "float32", False),
    ("sum", "int32", True),
    ("max", "float64", True),
    ("min", "float32", False),
    ("product", "int64", False),
]


@pytest.fixture
def gpu(monkeypatch):
    """One SM, so that there are few blocks, and each loops."""
    made = emulated_gpu(monkeypatch)
    made.device = replace(H200, units=1)
    monkeypatch.setattr(scan_module, "find_device", lambda device, threads: (None, None, "cuda:0"))
    yield made
    gpu_scan.bound_scan.cache_clear()


class There:
    """An array on the fake GPU, `shift` bytes past a multiple of 16, with guard bytes on both sides."""

    def __init__(self, values, shift=0):
        self._room = np.full(values.nbytes + 2 * GUARD + 16, 0xCD, np.uint8)
        self._begin = GUARD - (self._room.ctypes.data + GUARD) % 16 + 16 + shift
        inside = slice(self._begin, self._begin + values.nbytes)
        self.values = self._room[inside].view(values.dtype).reshape(values.shape)
        self.values[...] = values

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": self.values.shape, "typestr": self.values.dtype.str, "data": (self.values.ctypes.data, False),
            "strides": None, "version": 3, "stream": 1234,
        }  # fmt: skip

    def is_all_that_was_written(self):
        around = np.delete(self._room, slice(self._begin, self._begin + self.values.nbytes))
        return bool((around == 0xCD).all())


def numbers(op, dtype, *shape, seed=0):
    """Such that no float is rounded on the way: every order of the work has the same result."""
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "i":
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype)
    if op == "sum":
        return rng.integers(-50, 51, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def expected(x, how, axis=-1):
    return np.moveaxis(reference_scan(np.moveaxis(x, axis, -1), how).astype(x.dtype), -1, axis)


def assert_scans(x, op, exclusive, axis=-1):
    """Aligned or not, from x to y and in place."""
    want = expected(x, ScanOp(op, exclusive), axis)
    each = x.itemsize
    for shift_x, shift_y in ((0, 0), (each, each), (0, each), (each, 0)):
        given, made = There(x, shift_x), There(np.full_like(x, 77), shift_y)
        onchip.scan(given, op, exclusive, axis, out=made)
        np.testing.assert_array_equal(made.values, want)
        np.testing.assert_array_equal(given.values, x)
        assert made.is_all_that_was_written()
        if shift_x == shift_y:
            onchip.scan(given, op, exclusive, axis, out=given)
            np.testing.assert_array_equal(given.values, want)
            assert given.is_all_that_was_written()


# -- rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "dtype", "exclusive"), KINDS, ids=str)
def test_short_rows(gpu, op, dtype, exclusive):
    for shape in ((1,), (7,), (2500, 3), (37, 6), (11, 77), (300, 1), (2, 1021)):
        assert_scans(numbers(op, dtype, *shape), op, exclusive)
    assert {name.partition("<")[0] for name in gpu.driver.programs} == {"scan_rows"}


@pytest.mark.parametrize(("op", "dtype", "exclusive"), KINDS, ids=str)
def test_long_rows(gpu, op, dtype, exclusive):
    tile = Scan(ScanOp(op), dtype, 1, 1 << 20).tile
    for shape in ((tile + 1,), (2 * tile - 1,), (3, 2 * tile + 777)):
        assert_scans(numbers(op, dtype, *shape), op, exclusive)
    assert {name.partition("<")[0] for name in gpu.driver.programs} == {"scan_tiles", "clear_states"}


@pytest.mark.parametrize(("op", "dtype", "exclusive"), KINDS, ids=str)
def test_rows_of_a_tile_at_most(gpu, op, dtype, exclusive):
    tile = Scan(ScanOp(op), dtype, 1, 1 << 20).tile
    for shape in ((2049,), (3, tile // 2), (3, tile // 2 + 1), (2, tile - 1), (tile,)):
        assert_scans(numbers(op, dtype, *shape), op, exclusive)
    assert {name.partition("<")[0] for name in gpu.driver.programs} == {"scan_warps"}


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "uint8"])
@pytest.mark.parametrize("N", [4096, 3001])
def test_rows_of_a_tile_have_the_bits_of_a_tile(gpu, dtype, N):
    """Rounded on the way, as scan_tiles rounds."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((3, N)) if "float" in dtype else rng.integers(0, 256, (3, N))).astype(dtype)
    scan = Scan(ScanOp("sum", True), dtype, 3, N)
    made = np.zeros_like(x), np.zeros_like(x)
    scratch = np.zeros(2 * scan.states + 2, np.uint64)
    tiles = Steps(scan._along_rows(H200, Input(0), Output(0), Scratch(0)), scratch.nbytes)
    for y, steps in zip(made, (scan.steps(H200), tiles), strict=True):
        at = -(-scratch.ctypes.data // 16) * 16
        BoundSteps(gpu, steps).enqueue([x.ctypes.data], [y.ctypes.data], at, gpu.stream)
    assert made[0].tobytes() == made[1].tobytes()


@pytest.mark.parametrize(("op", "dtype", "exclusive"), KINDS[:2], ids=str)
def test_rows_of_two_groups_of_tiles(gpu, op, dtype, exclusive):
    x = numbers(op, dtype, 2, Scan(ScanOp(op), dtype, 1, 1 << 20).group + 8195)
    given, made = There(x), There(np.full_like(x, 77))
    onchip.scan(given, op, exclusive, out=made)
    np.testing.assert_array_equal(made.values, expected(x, ScanOp(op, exclusive)))
    assert made.is_all_that_was_written()


@pytest.mark.parametrize("N", [5, 200, 2000, 20_001])
def test_a_row_alone_has_the_same_bits(gpu, N):
    x = np.random.default_rng(N).standard_normal((5, N), dtype=np.float32)
    together, alone = There(np.empty_like(x)), There(np.empty_like(x[3]), x.itemsize)
    onchip.scan(There(x), out=together)
    onchip.scan(There(x[3]), out=alone)
    assert alone.values.tobytes() == together.values[3].tobytes()


@pytest.mark.parametrize("N", [1500, 300_001])
def test_float32_sums_of_any_length_lose_a_rounding_or_two(gpu, N):
    x = np.random.default_rng(N).random(N, dtype=np.float32)
    y, truth = There(np.empty_like(x)), reference_scan(x, ScanOp())
    onchip.scan(There(x), out=y)
    assert (np.abs(y.values - truth) <= 1.5 * np.spacing(truth.astype(np.float32)) + 1e-4).all()


@pytest.mark.parametrize("N", [600, 20_000])
@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_nan_passes_on(gpu, op, N):
    x = numbers(op, "float32", N)
    x[N // 3], x[N // 2], x[N // 4] = np.nan, np.inf, -np.inf
    y = There(np.zeros_like(x))
    onchip.scan(There(x), op, out=y)
    np.testing.assert_array_equal(y.values, expected(x, ScanOp(op)))
    assert np.isnan(y.values[N // 3 :]).all()


# -- parts of a row ------------------------------------------------------------------------------------------


def test_a_row_in_parts_has_the_bits_of_one_go(gpu, monkeypatch):
    part = Scan(ScanOp(), "float32", 1, 1 << 20).group
    x = np.random.default_rng(3).standard_normal(2 * part + 12_345, dtype=np.float32)
    whole = There(np.empty_like(x))
    onchip.scan(There(x), exclusive=True, out=whole)
    through = onchip.scan(x, exclusive=True, device="cuda")
    assert through.tobytes() == whole.values.tobytes()
    y, done = np.empty_like(x), []
    monkeypatch.setattr(scan_module, "PART", part + 99)
    assert scan_into(x, y, ScanOp("sum", True), "cuda", progress=done.append) == "cuda:0"
    assert y.tobytes() == whole.values.tobytes()
    assert done == [part, 2 * part, len(x)]


@pytest.mark.parametrize(("op", "dtype", "exclusive"), KINDS[:3], ids=str)
def test_a_part_goes_on_from_a_total_in_tiles_of_the_whole_row(gpu, op, dtype, exclusive):
    how, x = ScanOp(op, exclusive), numbers(op, dtype, 25_003)
    planned = bound_scan(gpu, how, dtype, (1, len(x) - 1, 1), whole=1 << 26)
    totals = np.array([x[0], 0]).astype(how.total_dtype(dtype))
    given, made = There(x[1:]), There(np.zeros_like(x[1:]))
    before, scratch = totals.ctypes.data, np.zeros(planned.scratch_bytes // 16 + 1, np.complex128)  # 16 B aligned
    x_at, y_at = given.values.ctypes.data, made.values.ctypes.data
    planned.enqueue(x_at, y_at, 1, scratch.ctypes.data, before, before + totals.itemsize)
    np.testing.assert_array_equal(made.values, expected(x, how)[1:])
    assert totals[1] == expected(x, ScanOp(op))[-1]
    assert made.is_all_that_was_written()
    assert f"scan_tiles<{Scan(how, dtype, 1, 1).template}, 10>" in gpu.driver.programs


# -- columns -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "dtype", "exclusive"), KINDS, ids=str)
def test_columns(gpu, op, dtype, exclusive):
    for shape, axis in (((3, 5), 0), ((1, 1, 2), 1), ((5, 8, 700), 1), ((2, 17, 33), 1), ((9, 2, 3, 4), -2)):
        assert_scans(numbers(op, dtype, *shape), op, exclusive, axis)
    assert {name.partition("<")[0] for name in gpu.driver.programs} == {"scan_columns"}


@pytest.mark.parametrize(("op", "dtype", "exclusive"), KINDS[:3], ids=str)
def test_long_and_narrow(gpu, op, dtype, exclusive):
    for shape, axis in (((2500, 33), 0), ((3, 2049, 2, 2), 1), ((2, 9000, 3), 1)):
        assert_scans(numbers(op, dtype, *shape), op, exclusive, axis)
    assert {name.partition("<")[0] for name in gpu.driver.programs} == {
        "permute_tiles", "permute_few", "scan_tiles", "clear_states",
    }  # fmt: skip


def test_numbers_of_the_host_along_any_axis(gpu):
    x = numbers("sum", "int64", 30, 7, 5)
    for axis in range(3):
        np.testing.assert_array_equal(onchip.scan(x, axis=axis, device="cuda"), np.cumsum(x, axis=axis))


# -- as a layer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [CumSum(1), CumSum(2, True), CumSum(3, False, True), CumSum(1, True, True)], ids=str)
def test_a_layer_of_a_network(gpu, layer):
    net = sequential(TensorType(("B", 6, 5, 7)), [("sums", layer)], {})
    engine = Engine(make_plan(net, gpu.device, [ScanKernel()]), CudaBackend(0), "cuda:0")
    x = numbers("sum", "float32", 33, 6, 5, 7)
    how = ScanOp("sum", layer.exclusive, layer.reverse)
    np.testing.assert_array_equal(engine(x), expected(x, how, layer.axis))


# -- the emulator itself -------------------------------------------------------------------------------------


def run_body(tmp_path, body):
    """x of a kernel with this body, of two blocks of 64 threads."""
    source, x = tmp_path / "kernel.cu", There(np.zeros(64, np.int32))
    source.write_text(f"__global__ void kernel(int* x) {{ {body} }}")
    Kernel(Program(source, "kernel")).run(2, 64, (x.values.ctypes.data,))
    return x.values


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("if (threadIdx.x < 40) __syncthreads();", "barrier not reached"),
        ("if (threadIdx.x) __shfl_sync(~0u, 1, 0);", "barrier not reached"),
        ("while (!__any_sync(~0u, false));", "does not terminate"),
        ("__nanosleep(32);", "has not started"),
        ("__ldcs(reinterpret_cast<const uint4*>(x + 1));", "misaligned"),
        ('asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(0u), "l"(x) : "memory");', "without a wait"),
    ],
)
def test_what_kernels_must_not_do_is_seen(tmp_path, body, says):
    with pytest.raises(AssertionError, match=says):
        run_body(tmp_path, body)


def test_a_barrier_that_is_not_there_shows(tmp_path, monkeypatch):
    """In the values; with races looked for, they would be found before."""
    monkeypatch.setattr(emulated_cuda, "SANITIZED", [])
    shared = "__shared__ int of[64]; of[threadIdx.x] = blockIdx.x + 1;"
    assert (run_body(tmp_path, f"{shared} __syncthreads(); x[threadIdx.x] = of[63 - threadIdx.x];") == 2).all()
    assert (run_body(tmp_path, f"{shared} x[threadIdx.x] = of[63 - threadIdx.x];") != 2).any()


# -- as layers of a network ----------------------------------------------------------------------------------


def test_layers_of_several_launches_share_one_arena(gpu):
    """Long rows need scratch memory, and so do values between layers: three layers, each of two launches."""
    layers = [(f"sums{i}", CumSum(axis=1)) for i in range(3)]
    net = sequential(TensorType(("B", 5001), "int64"), layers, {})
    plan = make_plan(net, gpu.device, kernels_for(gpu.device), Job("fp32", 3))
    assert [len(group.claim.facts.at(3).launches) for group in plan.groups] == [2, 2, 2]
    engine = Engine(plan, CudaBackend(), "cuda:0")
    for B in (1, 3, 3, 3):  # the second time that the same comes, and from then on, it is a graph
        x = np.random.default_rng(B).integers(-9, 9, (B, 5001))
        np.testing.assert_array_equal(engine(x), x.cumsum(1).cumsum(1).cumsum(1))
    bound = CudaBackend().bind(plan).bind(3)
    row = -(-8 * 5001 * 3 // 256) * 256
    # While the second layer runs, its input, its output and its scratch are live: never all values.
    assert 2 * row < bound.arena_bytes < 3 * row


def test_rows_go_in_chunks_where_the_arena_would_not_fit(gpu, monkeypatch):
    layers = [(f"sums{i}", CumSum(axis=1)) for i in range(3)]
    net = sequential(TensorType(("B", 601), "int32"), layers, {})
    plan = make_plan(net, gpu.device, kernels_for(gpu.device))
    x = np.random.default_rng(0).integers(-9, 9, (75, 601), np.int32)
    whole = Engine(plan, CudaBackend(), "cuda:0")(x)
    wholes = gpu.device.memory_bytes // CudaBackend().bind(plan).bind(75).arena_bytes
    monkeypatch.setattr(bound_plan, "ARENA_PART", 4 * wholes)
    engine = Engine(plan, CudaBackend(), "cuda:0")
    ran, run = [], gpu.driver.run
    gpu.driver.run = lambda launched: (ran.append(launched), run(launched))  # by itself or in a graph
    assert engine(x).tobytes() == whole.tobytes() == x.cumsum(1).cumsum(1).cumsum(1).astype(np.int32).tobytes()
    assert len(ran) == 3 * 5  # 16 rows at a time


@pytest.mark.parametrize("shape", [(7,), (3, 2049, 2), (2, 30), (4, 2500)], ids=str)
@pytest.mark.parametrize(("exclusive", "reverse"), [(False, False), (True, True)])
def test_a_layer_scans_rows_of_any_length(gpu, shape, exclusive, reverse):
    for axis in range(1, len(shape) + 1):
        net = sequential(TensorType(("B", *shape), "int64"), [("s", CumSum(axis, exclusive, reverse))], {})
        plan = make_plan(net, gpu.device, kernels_for(gpu.device))
        engine = Engine(plan, CudaBackend(), "cuda:0")
        x = np.random.default_rng(7).integers(-9, 9, (2, *shape))
        np.testing.assert_array_equal(engine(x), reference.forward(net, x))


@pytest.mark.parametrize("shape", [(7,), (3, 2049, 2), (4, 2500), (1001,)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int16", "uint8"])
def test_narrow_numbers_are_rounded_once(gpu, dtype, shape):
    """Added up in float32 or int32. Sums here are exact in both, so what is stored is what NumPy rounds them to."""
    x = narrow_numbers(dtype, 3, *shape)
    for axis in range(1, len(shape) + 1):
        for exclusive, reverse in ((False, False), (True, axis == 1)):
            net = sequential(TensorType(("B", *shape), dtype), [("s", CumSum(axis, exclusive, reverse))], {})
            engine = Engine(make_plan(net, gpu.device, [ScanKernel()]), CudaBackend(), "cuda:0")
            np.testing.assert_array_equal(engine(x), narrow_sums(net, x))
