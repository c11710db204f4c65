"""onchip.scan on the CPU: arrays of any layout; errors are raised before anything runs."""

import numpy as np
import pytest

import onchip
from onchip.errors import DeviceError, InputError, ShapeError
from onchip.kernels.reference.scan import scan as reference_scan
from onchip.network.scan_op import ScanOp
from onchip.runtime.scan import PART, scan_array, scan_into


def test_like_numpy():
    rng = np.random.default_rng(0)
    x = rng.integers(-1000, 1000, (4, 5, 6)).astype(np.int32)
    for axis in (-3, -1, 0, 1, 2):
        np.testing.assert_array_equal(onchip.scan(x, axis=axis), np.cumsum(x, axis=axis, dtype=np.int32))
    np.testing.assert_array_equal(onchip.scan(x, "max"), np.maximum.accumulate(x, axis=-1))
    np.testing.assert_array_equal(onchip.scan(x, "product", axis=0), np.cumprod(x, axis=0, dtype=np.int32))
    assert onchip.scan([1, 2, 3]).tolist() == [1, 3, 6]
    assert onchip.scan([1.5, 2.0], exclusive=True).tolist() == [0.0, 1.5]
    assert onchip.scan(np.array([3, 1, 2]), "min", True).tolist() == [np.iinfo(np.int64).max, 3, 1]
    assert onchip.scan(np.empty((0, 3), np.float32)).shape == (0, 3)
    assert onchip.scan(np.empty((3, 0), np.float32), axis=0).shape == (3, 0)


def test_out_in_every_form():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((50, 40)).astype(np.float32)
    truth = onchip.scan(x)
    for out in (np.empty_like(x), np.empty((40, 50), np.float32).T, np.empty((50, 80), np.float32)[:, ::2]):
        assert onchip.scan(x, out=out) is out
        np.testing.assert_array_equal(out, truth)
    across = np.concatenate([x.ravel(), np.zeros(40, np.float32)])
    onchip.scan(across[:-40].reshape(50, 40), out=across[40:].reshape(50, 40))  # overlaps x
    np.testing.assert_array_equal(across[40:].reshape(50, 40), truth)
    onchip.scan(x, out=x)
    np.testing.assert_array_equal(x, truth)
    with_steps = rng.standard_normal((30, 20))[::3, ::-1]
    np.testing.assert_allclose(onchip.scan(with_steps, axis=0), np.cumsum(with_steps, axis=0), rtol=1e-12, atol=1e-12)


def test_torch_on_the_cpu():
    torch = pytest.importorskip("torch")
    x = torch.arange(12.0).reshape(3, 4)
    y = onchip.scan(x)
    assert isinstance(y, torch.Tensor)
    assert torch.equal(y, torch.cumsum(x, -1))
    assert onchip.scan(x, out=x) is x
    assert torch.equal(x, y)
    negative = torch.zeros(3, dtype=torch.complex64).conj().imag  # a view with the bit set
    assert onchip.scan(negative).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("x", "out", "says"),
    [
        (lambda torch: torch.zeros(3, dtype=torch.bfloat16), None, "bfloat16"),
        (lambda torch: torch.zeros(3, device="meta"), None, "meta"),
        (lambda torch: torch.eye(3).to_sparse(), None, "sparse"),
        (lambda torch: torch.zeros(3), lambda torch: np.zeros(3, np.float32), "ndarray"),
        (lambda torch: torch.zeros(3), lambda torch: torch.zeros(3, device="meta"), "meta"),
    ],
    ids=["dtype", "meta", "sparse", "other out", "meta out"],
)
def test_torch_tensors_without_memory_here(x, out, says):
    torch = pytest.importorskip("torch")
    with pytest.raises(InputError, match=says):
        onchip.scan(x(torch), out=out and out(torch))


@pytest.mark.parametrize(
    ("given", "options", "error", "says"),
    [
        ([1, 2], {"op": "mean"}, InputError, "sum, max, min, product"),
        (np.zeros(3, np.float16), {}, InputError, "float16"),
        (np.zeros(3, ">f4"), {}, InputError, ">f4"),
        (["a"], {}, InputError, "unsupported dtype"),
        ([[1, 2], [3]], {}, InputError, "not an array"),
        (np.ma.array([1.0, 2.0], mask=[0, 1]), {}, InputError, "masked"),
        (3.0, {}, ShapeError, "a scalar has no axis"),
        ([1, 2], {"axis": 1}, ShapeError, "no such axis"),
        ([1, 2], {"axis": 0.5}, ShapeError, "no such axis"),
        ([1.0, 2.0], {"out": np.zeros(3)}, ShapeError, "out does not fit"),
        ([1.0, 2.0], {"out": np.zeros(2, np.float32)}, ShapeError, "out does not fit"),
        ([1.0, 2.0], {"out": [0.0, 0.0]}, InputError, "cannot be written"),
        ([1.0, 2.0], {"device": "tpu"}, DeviceError, "unknown device"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(given, options, error, says):
    with pytest.raises(error, match=says):
        onchip.scan(given, **options)


def test_read_only_out():
    out = np.zeros(2)
    out.flags.writeable = False
    with pytest.raises(InputError, match="read-only"):
        onchip.scan([1.0, 2.0], out=out)


def test_no_gpu_is_said():
    from onchip.runtime.cuda.devices import cuda_devices

    if cuda_devices():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceError, match="not available"):
        onchip.scan([1.0, 2.0], device="cuda")


@pytest.mark.parametrize(("kernel", "axis"), [("scan_rows", 1), ("scan_columns", 0)])
def test_the_threads_that_are_asked_for(monkeypatch, kernel, axis):
    from onchip.kernels.cpu.scan import scan as kernels

    requested = []
    monkeypatch.setattr(kernels, kernel, lambda x, y, how, threads: requested.append(threads))
    x = np.zeros((3, 4))
    assert scan_array(x, np.empty_like(x), ScanOp(), axis, "cpu", 1) == "cpu, 1 thread"
    assert requested == [1]


def test_a_long_row_in_parts_has_the_same_bits():
    rng = np.random.default_rng(2)
    x = rng.standard_normal(2 * PART + 12_345, dtype=np.float32)
    for how in (ScanOp(), ScanOp("max", True)):
        y, done = np.full_like(x, np.nan), []
        said = scan_into(x, y, how, threads=1, progress=done.append)
        assert done == [PART, 2 * PART, len(x)]
        assert said.startswith("cpu, 1 thread")
        np.testing.assert_array_equal(y, onchip.scan(x, how.op, how.exclusive))
    truth = reference_scan(x, ScanOp("max", True))
    np.testing.assert_array_equal(y, truth.astype(np.float32))
    scan_into(x[:0], y[:0], ScanOp())
