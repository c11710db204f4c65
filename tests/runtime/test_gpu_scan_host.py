"""Host rows through a scan on a GPU, part by part, with a fake driver in Python: no GPU needed."""

import ctypes
import itertools

import numpy as np
import pytest

import onchip
from fake_cuda import fake_gpu
from onchip.kernels.cuda.scan import scan as kernels
from onchip.network.scan_op import ScanOp
from onchip.runtime import scan as scan_module
from onchip.runtime.arrays.adapters import DlpackArrays
from onchip.runtime.cuda import chunks, staging
from onchip.runtime.cuda import scan as gpu_scan
from onchip.runtime.cuda.scan import scan_rows_through
from onchip.runtime.scan import scan_into
from scan_recorder import Recorder, arguments


@pytest.fixture
def driver():
    return Recorder()


@pytest.fixture
def gpu(monkeypatch, driver):
    monkeypatch.setattr(scan_module, "find_device", lambda device, threads: (None, None, "cuda:0"))
    yield fake_gpu(monkeypatch, driver)
    gpu_scan.bound_scan.cache_clear()
    DlpackArrays.release_all()


def at(pointer, count):
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(pointer))


def sum_tiles(given):
    """scan_tiles of an int64 sum, of one row."""
    total = np.cumsum(at(given["x"], given["N"]))
    if given["before"]:
        total += at(given["before"], 1)
        at(given["after"], 1)[0] = total[-1]
    at(given["y"], given["N"])[...] = total


@pytest.fixture
def small(monkeypatch, driver):
    """Parts and slots of few elements; returns those of an int64 part."""
    monkeypatch.setattr(kernels, "GROUP", 2)
    part = 2 * 4096
    monkeypatch.setattr(gpu_scan, "SLOT_BYTES", 4 * 8 * part)
    monkeypatch.setattr(chunks, "SLOT_BYTES", 4 * 8 * part + 1024)
    monkeypatch.setattr(chunks, "MIN_CHUNK_BYTES", 1000)
    monkeypatch.setattr(staging, "MAPPED_BYTES", 1000)
    monkeypatch.setattr(staging, "SMALL_BYTES", 1000)
    driver.compute = sum_tiles
    return part


def numbers(*shape):
    return np.random.default_rng(0).integers(-1000, 1000, shape)


def test_a_long_row_hands_its_total_from_chunk_to_chunk(gpu, driver, small):
    x = numbers(7 * small + 5)
    y = onchip.scan(x, device="cuda")
    np.testing.assert_array_equal(y, np.cumsum(x))
    scans = [arguments(each) for each in driver.launches if each.kernel.startswith("scan_tiles")]
    sizes = [each["N"] for each in scans]
    assert sum(sizes) == len(x)
    assert len(sizes) > 3
    assert all(size % small == 0 for size in sizes[:-1])
    assert sizes[-1] == 5
    # Two alternating slots: a chunk continues from the total of the previous one.
    slots = [(each["before"], each["after"]) for each in scans]
    assert slots[0][1] - slots[0][0] == 8
    assert all(after == before for (_, after), (before, _) in itertools.pairwise(slots))
    assert {before for before, _ in slots} == set(slots[0])
    # And waits for it: on its own stream, between a wait for the event and a record of it.
    streams = [each.stream for each in driver.launches if each.kernel.startswith("scan_tiles")]
    (event,) = {what.split()[1] for what, _ in driver.log if what.startswith("hold")}
    order = ["allocate", f"hold {event}", "clear_states", "scan_tiles", f"record {event}", "free"]
    assert driver.log == [(what, stream) for stream in streams for what in order]
    assert len(set(streams[:5])) == min(5, len(streams))


def test_every_row_begins_anew(gpu, driver, small):
    x = numbers(3, 5 * small + 1)
    y = np.empty_like(x)
    scan_rows_through(gpu, x, y, ScanOp())
    np.testing.assert_array_equal(y, np.cumsum(x, axis=1))


@pytest.mark.parametrize(
    ("op", "dtype", "start"),
    [
        ("sum", "float32", np.float64(0)),
        ("product", "float32", np.float64(1)),
        ("max", "float32", np.float32(-np.inf)),
        ("min", "int64", np.int64(2**63 - 1)),
    ],
)
def test_a_row_begins_with_the_identity_of_its_op(gpu, driver, small, op, dtype, start):
    found = []
    driver.compute = lambda given: found.append((ctypes.string_at(given["before"], start.nbytes), given))
    scan_into(np.zeros(9 * small, dtype), np.zeros(9 * small, dtype), ScanOp(op), "cuda")
    begun, given = found[0]
    assert begun == start.tobytes()
    assert given["after"] - given["before"] == start.nbytes


def test_a_row_from_anywhere_is_told_of_in_parts(gpu, driver, small, monkeypatch):
    monkeypatch.setattr(scan_module, "PART", 3 * small + 77)
    x, done = numbers(7 * small + 5), []
    y = np.empty_like(x)
    assert scan_into(x, y, ScanOp(), "cuda", progress=done.append) == "cuda:0"
    np.testing.assert_array_equal(y, np.cumsum(x))
    assert done == [3 * small, 6 * small, len(x)]
    done.clear()
    scan_into(x[:small], y[:small], ScanOp(), "cuda", progress=done.append)  # not in parts
    assert done == [small]
    np.testing.assert_array_equal(y[:small], np.cumsum(x[:small]))


def test_rows_that_fit_go_many_at_a_time_and_nobody_waits(gpu, driver, small):
    x = numbers(40, 1000)
    onchip.scan(x, device="cuda")
    rows = [arguments(each)["rows"] for each in driver.launches]
    assert sum(rows) == 40
    assert len(rows) > 2
    assert {what for what, _ in driver.log} == {"scan_rows"}
    driver.log.clear()
    onchip.scan(numbers(5, small), device="cuda")
    streams = [stream for what, stream in driver.log if what == "scan_tiles"]
    order = ["allocate", "clear_states", "scan_tiles", "free"]
    assert driver.log == [(what, stream) for stream in streams for what in order]
