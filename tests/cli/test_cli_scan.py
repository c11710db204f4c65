"""onchip scan: correct results for any op and axis, and no file after an error."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import time

import numpy as np
import pytest

from checks import assert_refused, read_terminal
from onchip.runtime.io import scan_file

OPS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "product": np.multiply}


def numbers(dtype, *shape):
    rng = np.random.default_rng(7)
    if dtype.startswith("int"):
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)
    return rng.standard_normal(shape).astype(dtype)


def truth(x, op="sum", axis=-1):
    with np.errstate(all="ignore"):
        return OPS[op].accumulate(x, axis, dtype=x.dtype)


def assert_same(got, expected):
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    if got.dtype.kind == "i":
        assert np.array_equal(got, expected)
    else:
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)


# -- results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64"])
@pytest.mark.parametrize("op", OPS)
def test_every_op_and_dtype(cli, tmp_path, op, dtype):
    x = numbers(dtype, 1003)
    np.save(tmp_path / "x.npy", x)
    ran = cli("scan", "x.npy", "-o", "y.npy", "--op", op)
    assert ran.code == 0, ran.err
    assert ran.out == ""
    (line,) = ran.err.splitlines()
    assert line.startswith(f"wrote y.npy: {op} of 1003 {dtype} on cpu")
    assert " s, " in line
    assert "GB/s" in line
    assert_same(np.load(tmp_path / "y.npy"), truth(x, op))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_every_axis(cli, tmp_path, axis, order):
    x = numbers("int32", 5, 33, 7)
    np.save(tmp_path / "x.npy", np.asarray(x, order=order))
    ran = cli("scan", "x.npy", "-o", "y.npy", "--axis", axis)
    assert ran.code == 0, ran.err
    assert "sum of 5x33x7 int32 on cpu" in ran.err
    assert_same(np.load(tmp_path / "y.npy"), truth(x, axis=axis))


@pytest.mark.parametrize("shape", [(0,), (1,), (0, 3), (3, 0)])
def test_few_numbers(cli, tmp_path, shape):
    x = numbers("float32", *shape)
    np.save(tmp_path / "x.npy", x)
    assert cli("scan", "x.npy", "-o", "y.npy").code == 0
    assert_same(np.load(tmp_path / "y.npy"), x)


@pytest.mark.parametrize("shape", [(101,), (3, 101)])
def test_exclusive(cli, tmp_path, shape):
    x = numbers("int64", *shape)
    np.save(tmp_path / "x.npy", x)
    ran = cli("scan", "x.npy", "-o", "y.npy", "--exclusive")
    assert "exclusive sum of" in ran.err
    y = np.load(tmp_path / "y.npy")
    assert (y[..., 0] == 0).all()
    assert np.array_equal(y[..., 1:], truth(x)[..., :-1])


def test_chunks_are_reported_and_carried_over(cli, tmp_path, monkeypatch):
    from onchip.cli import scan as command
    from onchip.runtime import scan

    monkeypatch.setattr(scan, "PART", 1 << 20)
    told = []

    class Bar:
        def __enter__(self):
            return lambda done, text: told.append((round(done, 3), text.split()[-1]))

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(command, "progress", lambda what, total: Bar())
    x = numbers("int32", (5 << 19) + 3)
    np.save(tmp_path / "x.npy", x)
    assert cli("scan", "x.npy", "-o", "y.npy").code == 0
    assert_same(np.load(tmp_path / "y.npy"), truth(x))
    assert told == [(0.4, "elements/s"), (0.8, "elements/s"), (1.0, "elements/s")]


def test_json_is_one_document(cli, tmp_path):
    np.save(tmp_path / "x.npy", numbers("float32", 50))
    ran = cli("scan", "x.npy", "-o", "y.npy", "--threads", 1, "--op", "max", "--json")
    assert ran.err == ""
    document = json.loads(ran.out)
    assert document["shape"] == [50]
    assert document["seconds"] > 0
    assert document["bytes_per_s"] == pytest.approx(400 / document["seconds"])
    assert document["device"].startswith("cpu, 1 thread")
    told = {name: document[name] for name in ("input", "output", "op", "exclusive", "axis", "dtype")}
    assert told == {
        "input": "x.npy", "output": "y.npy", "op": "max", "exclusive": False, "axis": -1, "dtype": "float32",
    }  # fmt: skip


# -- wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--op", "mean"], ["unknown op", "mean", "sum, max, min, product"]),
        (["--axis", "1"], ["no such axis", "1"]),
        (["--axis", "-2"], ["no such axis", "-2"]),
        (["--device", "tpu"], ["tpu"]),
        (["--threads", "0"], ["threads", "0"]),
    ],
)
def test_bad_requests(cli, tmp_path, args, words):
    np.save(tmp_path / "x.npy", numbers("float32", 9))
    assert_refused(cli("scan", "x.npy", "-o", "y.npy", *args), tmp_path, *words)


def test_threads_of_arrays_of_any_shape(cli, tmp_path):
    x = numbers("float32", 9, 3)
    np.save(tmp_path / "x.npy", x)
    ran = cli("scan", "x.npy", "-o", "y.npy", "--axis", 0, "--threads", 1)
    assert ran.code == 0
    assert "on cpu, 1 thread (auto" in ran.err
    assert_same(np.load(tmp_path / "y.npy"), truth(x, "sum", 0))


def test_cuda_without_a_gpu_is_an_error(cli, tmp_path):
    from onchip.runtime.cuda.devices import cuda_devices

    if cuda_devices():
        pytest.skip("there is a GPU here")
    for shape in ((9,), (3, 3)):
        np.save(tmp_path / "x.npy", numbers("float32", *shape))
        ran = cli("scan", "x.npy", "-o", "y.npy", "--device", "cuda")
        assert_refused(ran, tmp_path, "device 'cuda' is not available")


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros(5, np.float16), ["float16", "int32, int64, float32, float64"]),
        (np.zeros(5, np.uint8), ["uint8", "int32, int64, float32, float64"]),
        (np.zeros(5, ">i4"), [">i4", "int32, int64, float32, float64"]),
        (np.zeros(5, object), ["unsupported dtype"]),
        (np.array(["a", "b"]), ["unsupported dtype"]),
        (np.zeros(5, np.complex64), ["unsupported dtype"]),
        (np.float32(3), ["shape ()"]),
    ],
    ids=["float16", "uint8", "big-endian", "object", "text", "complex", "0-d"],
)
def test_arrays_that_cannot_be_scanned(cli, tmp_path, array, words):
    np.save(tmp_path / "x.npy", array)
    assert_refused(cli("scan", "x.npy", "-o", "y.npy"), tmp_path, "x.npy", *words)


@pytest.mark.parametrize("damage", ["empty", "garbage", "truncated", "too long", "idx", "folder"])
def test_damaged_files(cli, tmp_path, damage):
    path = tmp_path / "x.npy"
    if damage == "folder":
        path.mkdir()
    else:
        np.save(path, numbers("float32", 99))
        whole = path.read_bytes()
        idx = b"\0\0\x08\x01\0\0\0\x02ab"
        other = {"empty": b"", "garbage": b"\xff" * 500, "truncated": whole[:-4], "too long": whole + b"0", "idx": idx}
        path.write_bytes(other[damage])
    assert_refused(cli("scan", "x.npy", "-o", "y.npy"), tmp_path, "x.npy")


@pytest.mark.parametrize(
    ("name", "words"), [("nothing.npy", ["No such file"]), ("x.txt", ["unknown format", ".npy", "numpy.loadtxt"])]
)
def test_other_files(cli, tmp_path, name, words):
    (tmp_path / "x.txt").write_text("1 2 3\n")
    assert_refused(cli("scan", name, "-o", "y.npy"), tmp_path, name, *words)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("no/folder/y.npy", ["No such file or directory", "mkdir -p no/folder"]),
        ("x.npy/y.npy", ["Not a directory"]),
        ("y.txt", ["unknown format", ".txt", "-o y.npy"]),
        ("y", ["unknown format", "no suffix", "-o y.npy"]),
        ("folder.npy", ["a folder"]),
    ],
)
def test_outputs_that_cannot_be_written_are_known_before_the_work(cli, tmp_path, monkeypatch, output, words):
    (tmp_path / "folder.npy").mkdir()
    np.save(tmp_path / "x.npy", numbers("float32", 9))
    monkeypatch.setattr(scan_file, "scan_into", lambda *_: pytest.fail("the work began"))
    assert_refused(cli("scan", "x.npy", "-o", output), tmp_path, *words)


@pytest.mark.parametrize("when", ["posix_fallocate", "fsync"])
def test_a_full_disk(cli, tmp_path, monkeypatch, when):
    np.save(tmp_path / "x.npy", numbers("float32", 9))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, when, full)
    ran = cli("scan", "x.npy", "-o", "y.npy")
    assert_refused(ran, tmp_path, "cannot write y.npy", "No space left on device", "free some space")


# -- Ctrl-C and a terminal ---------------------------------------------------------------------------------


def long_row(folder, N):
    """The file is sparse and takes no space."""
    np.lib.format.open_memmap(folder / "long.npy", "w+", np.float32, (N,))


def test_ctrl_c_leaves_nothing(cli, tmp_path, monkeypatch):
    from onchip.runtime import scan

    monkeypatch.setattr(scan, "PART", 1 << 16)
    long_row(tmp_path, 1 << 20)
    parts = []

    def stopped(x, y, how, device, threads, progress, scan_into=scan_file.scan_into):
        def stop(done):
            parts.append(done)
            if len(parts) == 3:
                signal.raise_signal(signal.SIGINT)
            progress(done)

        return scan_into(x, y, how, device, threads, stop)

    monkeypatch.setattr(scan_file, "scan_into", stopped)
    (tmp_path / "y.npy").write_text("from yesterday")
    ran = cli("scan", "long.npy", "-o", "y.npy")
    assert (ran.code, ran.out, ran.err) == (2, "", "stopped: no file is half-written\n")
    assert parts == [1 << 16, 2 << 16, 3 << 16]
    assert (tmp_path / "y.npy").read_text() == "from yesterday"
    assert sorted(os.listdir(tmp_path)) == ["long.npy", "y.npy"]


def test_ctrl_c_of_a_process(spawn, tmp_path):
    long_row(tmp_path, 1 << 26)
    process = spawn("scan", "long.npy", "-o", "y.npy", "--threads", 1)
    begun = False
    while not begun:
        assert process.poll() is None
        time.sleep(0.002)
        with contextlib.suppress(FileNotFoundError):  # the first is there only to see whether one can be
            begun = any(path.stat().st_size for path in tmp_path.glob(".y.npy*"))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (2, "", "stopped: no file is half-written\n")
    assert os.listdir(tmp_path) == ["long.npy"]


def test_a_terminal_sees_a_bar_and_stdout_stays_clean(spawn, tmp_path):
    pty = pytest.importorskip("pty")
    long_row(tmp_path, 1 << 20)
    leader, follower = pty.openpty()
    process = spawn("scan", "long.npy", "-o", "y.npy", "--json", stderr=follower, stdout=subprocess.PIPE)
    os.close(follower)
    seen = read_terminal(leader)
    out, _ = process.communicate()
    assert json.loads(out)["shape"] == [1 << 20]
    assert b"scan long.npy" in seen
    assert b"elements/s" in seen
