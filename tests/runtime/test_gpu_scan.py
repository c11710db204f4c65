"""Driver calls of scans, recorded by a fake driver in Python: no GPU needed."""

import gc
import sys
import threading
import weakref

import numpy as np
import pytest

import onchip
from fake_cuda import fake_gpu
from onchip.errors import DeviceError, InputError, ShapeError
from onchip.network.scan_op import ScanOp
from onchip.runtime import scan as scan_module
from onchip.runtime.arrays import dlpack
from onchip.runtime.arrays.adapters import DeviceArray, DlpackArrays
from onchip.runtime.cuda import scan as gpu_scan
from onchip.runtime.cuda.scan import bound_scan
from scan_recorder import STREAM, Array, Recorder, arguments, name_of, zeros


@pytest.fixture
def driver():
    return Recorder()


@pytest.fixture
def gpu(monkeypatch, driver):
    monkeypatch.setattr(scan_module, "find_device", lambda device, threads: (None, None, "cuda:0"))
    yield fake_gpu(monkeypatch, driver)
    gpu_scan.bound_scan.cache_clear()
    DlpackArrays.release_all()


# -- launches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "N", "tiles", "states"), [(1, 8193, 2, 3), (3, 8193, 2, 9), (1, 1048577, 129, 131)])
def test_long_rows_clear_and_scan(gpu, driver, rows, N, tiles, states):
    x, y = zeros(rows, N), zeros(rows, N)
    assert onchip.scan(x, "max", True, out=y) is y
    order = ["allocate", "clear_states", "scan_tiles", "free"]
    assert driver.log == [(what, STREAM) for what in order]
    assert driver.requested_bytes == [16 * states]
    clear, scan = driver.launches
    scratch = clear.words[0]
    assert arguments(clear) == {"states": scratch, "count": states}
    assert arguments(scan) == {
        "x": x.pointer, "y": y.pointer, "states": scratch, "before": 0, "after": 0, "N": N, "tiles": tiles,
    }  # fmt: skip
    assert scan.kernel == "scan_tiles<Max, float, true, 8>"
    assert scan.grid == (rows * tiles, 1, 1)
    assert clear.block == scan.block == (256, 1, 1)
    assert (clear.overlaps, scan.overlaps) == (False, True)  # tiles are loaded while states are cleared


@pytest.mark.parametrize(("outer", "N", "inner"), [(1, 5000, 5), (2, 2049, 40)])
def test_long_and_narrow_is_swapped_scanned_and_swapped_back(gpu, driver, outer, N, inner):
    x, y = zeros(outer, N, inner), zeros(outer, N, inner)
    onchip.scan(x, axis=1, out=y)
    order = ["allocate", "permute_tiles", "clear_states", "scan_tiles", "permute_tiles", "free"]
    assert driver.log == [(what, STREAM) for what in order]
    there, clear, scan, back = driver.launches
    moved = there.words[1]
    states, count = clear.words
    tiles = -(-N // 8192)
    assert count == outer * inner * (tiles + 1)
    assert states % 16 == 0
    assert states >= moved + x.values.nbytes
    assert driver.requested_bytes == [states - moved + 16 * count]
    assert arguments(there).items() >= {"x": x.pointer, "y": moved, "Na": N, "Nb": inner}.items()
    assert arguments(back).items() >= {"x": moved, "y": y.pointer, "Na": inner, "Nb": N}.items()
    assert arguments(scan) == {
        "x": moved, "y": moved, "states": states, "before": 0, "after": 0, "N": N, "tiles": tiles,
    }  # fmt: skip
    assert scan.grid == (outer * inner * tiles, 1, 1)
    assert [each.overlaps for each in driver.launches] == [False, False, True, False]


@pytest.mark.parametrize(
    ("shape", "axis", "kernel", "sizes"),
    [
        ((7, 2048), -1, "scan_rows<Sum, float, false, false, 32>", (7, 2048)),
        ((5, 9, 3), -1, "scan_rows<Sum, float, false, false, 1>", (45, 3)),
        ((300, 5, 1), 1, "scan_rows<Sum, float, false, false, 2>", (300, 5)),
        ((2, 3, 4, 5), 1, "scan_columns<Sum, float, false, false>", (2, 3, 20)),
        ((3000, 4096), 0, "scan_columns<Sum, float, false, false>", (1, 3000, 4096)),
    ],
)
def test_short_rows_and_columns_are_one_launch_without_memory(gpu, driver, shape, axis, kernel, sizes):
    x, y = zeros(*shape), zeros(*shape)
    onchip.scan(x, axis=axis, out=y)
    (launched,) = driver.launches
    assert driver.log == [(name_of(kernel), STREAM)]
    assert (launched.kernel, launched.words) == (kernel, (x.pointer, y.pointer, *sizes))


@pytest.mark.parametrize(("shape", "axis"), [((0,), 0), ((0, 5), 1), ((5, 0), 1), ((5, 0), 0), ((9000, 0), 0)])
def test_of_nothing_nothing_is_launched(gpu, driver, shape, axis):
    y = zeros(*shape)
    assert onchip.scan(zeros(*shape), axis=axis, out=y) is y
    assert onchip.scan(zeros(*shape), axis=axis).shape == shape
    assert onchip.scan(np.zeros(shape), axis=axis, device="cuda").shape == shape
    assert driver.log == []


def test_without_out_the_result_is_of_the_same_dtype_and_stream(gpu, driver):
    y = onchip.scan(zeros(3, 9000, dtype=np.int64), "product")
    assert isinstance(y, DeviceArray)
    assert (y.shape, y.dtype, y.stream) == ((3, 9000), "int64", STREAM)
    assert driver.launches[-1].words[1] == y.__cuda_array_interface__["data"][0]
    onchip.scan(zeros(9, stream=None))
    assert driver.launches[-1].stream == 1  # without a stream: CUDA's default one


def test_x_may_be_out_and_neighbours_may_touch(gpu, driver):
    x = zeros(8192)
    onchip.scan(x, out=x)
    assert driver.launches[-1].words[:2] == (x.pointer, x.pointer)
    both = np.zeros(8192, np.float32)
    onchip.scan(Array(both[:4096]), out=Array(both[4096:]))
    onchip.scan(Array(both[4096:]), out=Array(both[:4096]))
    assert len(driver.launches) == 3


def test_a_call_takes_the_scratch_that_it_is_given(gpu, driver):
    planned = bound_scan(gpu, ScanOp(), "float32", (1, 9000, 1))
    assert planned.scratch_bytes == 16 * (2 + 1)
    planned.enqueue(16, 32, 77, 4800)
    assert driver.log == [("clear_states", 77), ("scan_tiles", 77)]
    assert driver.launches[0].words[0] == 4800
    assert driver.launches[1].words[:3] == (16, 32, 4800)


# -- refusals ------------------------------------------------------------------------------------------------


class OtherArray(Array):
    pass


class FarExchanged:
    def __dlpack_device__(self):
        return dlpack.CUDA, 1

    def __dlpack__(self, *, stream):
        return dlpack.export(4096, (9000,), "float32", 1, self)


def elsewhere(driver, array):
    driver.elsewhere.add(array.pointer)
    return array


ACROSS = np.zeros(9001, np.float32)
REFUSED = {
    "on another device": (lambda d: (elsewhere(d, zeros(9000)), {}), InputError, "x is on another device"),
    "DLPack of another device": (lambda d: (FarExchanged(), {}), InputError, "x is on another device"),
    "of the GPU, for the CPU": (lambda d: (zeros(9000), {"device": "cpu"}), InputError, "x is on a GPU"),
    "every second number": (lambda d: (zeros(9000, strides=(8,)), {}), ShapeError, "x is not row-major"),
    "columns first": (lambda d: (zeros(90, 100, strides=(4, 360)), {}), ShapeError, "x is not row-major"),
    "float16": (lambda d: (zeros(9000, dtype=np.float16), {}), InputError, "unsupported dtype"),
    "no such axis": (lambda d: (zeros(9000), {"axis": 1}), ShapeError, "no such axis"),
    "a single number": (lambda d: (zeros(), {}), ShapeError, "a scalar has no axis"),
    "out of another shape": (lambda d: (zeros(9000), {"out": zeros(8999)}), ShapeError, "out does not fit"),
    "out of another rank": (lambda d: (zeros(9000), {"out": zeros(1, 9000)}), ShapeError, "out does not fit"),
    "out of another dtype": (
        lambda d: (zeros(9000), {"out": zeros(9000, dtype=np.int32)}),
        ShapeError,
        "out does not fit",
    ),
    "out of the host": (
        lambda d: (zeros(9000), {"out": np.zeros(9000, np.float32)}),
        InputError,
        "out is of another kind",
    ),
    "out of another kind": (
        lambda d: (OtherArray(np.zeros(9000, np.float32)), {"out": zeros(9000)}),
        InputError,
        "out is of another kind",
    ),
    "out elsewhere": (
        lambda d: (zeros(9000), {"out": elsewhere(d, zeros(9000))}),
        InputError,
        "out is on another device",
    ),
    "out with steps": (lambda d: (zeros(9000), {"out": zeros(9000, strides=(8,))}), ShapeError, "out is not row-major"),
    "out behind x": (lambda d: (Array(ACROSS[:-1]), {"out": Array(ACROSS[1:])}), ShapeError, "out overlaps x"),
    "out before x": (lambda d: (Array(ACROSS[1:]), {"out": Array(ACROSS[:-1])}), ShapeError, "out overlaps x"),
    "read-only out": (
        lambda d: (zeros(9000), {"out": zeros(9000, data=(1 << 20, True))}),
        InputError,
        "out cannot be written to",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_any_launch(gpu, driver, case):
    made, error, says = REFUSED[case]
    x, options = made(driver)
    with pytest.raises(error, match=says):
        onchip.scan(x, **options)
    assert driver.log == []
    assert not driver.launches


@pytest.mark.parametrize("shape", [(9000,), (9000, 3)])
def test_a_want_of_memory_is_told_before_any_launch(gpu, driver, shape):
    driver.max_bytes = 10
    with pytest.raises(DeviceError, match="out of memory"):
        onchip.scan(zeros(*shape), axis=0, out=zeros(*shape))
    assert not driver.launches


# -- threads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(9000,), (2500, 2)])
def test_threads_that_share_a_call_do_not_write_over_each_others_arguments(gpu, driver, shape):
    arrays = {stream: (zeros(*shape, stream=stream), zeros(*shape, stream=stream)) for stream in range(100, 106)}
    failures = []

    def work(x, y):
        try:
            for _ in range(60):
                onchip.scan(x, axis=0, out=y)
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=pair) for pair in arrays.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    each = 2 if len(shape) == 1 else 4
    assert len(driver.launches) == 6 * 60 * each
    for stream, (x, y) in arrays.items():
        launches = [arguments(launched) for launched in driver.launches if launched.stream == stream]
        for start in range(0, len(launches), each):
            *there, clear, scan = launches[start : start + min(each, 3)]
            back = launches[start + 3 : start + each]
            assert clear["states"] == scan["states"]
            assert [(swap["x"], swap["y"]) for swap in there] == [(x.pointer, scan["x"])] * len(there)
            assert [(swap["x"], swap["y"]) for swap in back] == [(scan["y"], y.pointer)] * len(back)
            if each == 2:
                assert (scan["x"], scan["y"]) == (x.pointer, y.pointer)


# -- DLPack --------------------------------------------------------------------------------------------------


class Memory:
    def __init__(self, N):
        self.values = np.zeros(N, np.float32)


class Exchanged:
    """An array with only DLPack. Its memory is a separate object: holding that does not hold this one."""

    def __init__(self, N):
        self.memory, self.requested = Memory(N), []

    def __dlpack_device__(self):
        return dlpack.CUDA, 0

    def __dlpack__(self, *, stream):
        self.requested.append(stream)
        values = self.memory.values
        return dlpack.export(values.ctypes.data, values.shape, values.dtype.name, 0, self.memory)


def test_memory_of_dlpack_is_kept_until_the_work_is_done(gpu, driver):
    driver.answers["cuEventQuery"] = 600  # CUDA_ERROR_NOT_READY
    x = Exchanged(9000)
    gone = weakref.ref(x.memory)
    y = onchip.scan(x)
    assert isinstance(y, DeviceArray)
    assert x.requested == [gpu.stream] == [driver.launches[-1].stream]
    assert "cuStreamSynchronize" not in driver.calls
    del x
    gc.collect()
    assert gone() is not None
    onchip.scan(Exchanged(7))  # with another adapter: the first call is still running
    gc.collect()
    assert gone() is not None
    del driver.answers["cuEventQuery"]
    onchip.scan(Exchanged(7))
    gc.collect()
    assert gone() is None


def test_an_out_of_dlpack_is_waited_for_since_its_owner_cannot_know(gpu, driver):
    x, y = Exchanged(9000), Exchanged(9000)
    assert onchip.scan(x, out=y) is y
    assert driver.launches[-1].words[:2] == (x.memory.values.ctypes.data, y.memory.values.ctypes.data)
    order = [name for name in driver.calls if name in ("cuLaunchKernelEx", "cuStreamSynchronize")]
    assert order == ["cuLaunchKernelEx"] * 2 + ["cuStreamSynchronize"]
