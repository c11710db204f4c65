"""onchip run: correct results for any chunk size, and no file after an error."""

import errno
import gzip
import json
import os
import signal
import subprocess
import time

import numpy as np
import pytest

from checks import assert_refused, random_mlp, read_terminal, rows
from onchip.formats.load import save
from onchip.runtime.engine import compile
from onchip.workloads import digits

pytestmark = pytest.mark.usefixtures("model")


@pytest.fixture
def model(tmp_path):
    """m.onnx, a network 20-16-3, and x.npy, 100 rows for it."""
    net = random_mlp(20, 16, 3, name="small")
    save(net, tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", rows(100, 20))
    return net


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


# -- right -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [None, 1, 7, 100, 1000])
def test_results_do_not_depend_on_the_chunk_size(cli, tmp_path, model, batch):
    ran = cli("run", "m.onnx", "x.npy", "-o", "y.npy", *([] if batch is None else ["--batch", batch]))
    assert ran.code == 0, ran.err
    assert ran.out == ""
    assert "device: " in ran.err
    assert "wrote y.npy: float32 [100, 3]" in ran.err
    y = np.load(tmp_path / "y.npy")
    assert y.tobytes() == compile(model, device="cpu")(np.load(tmp_path / "x.npy")).tobytes()


def test_without_output_it_shows_and_writes_nothing(cli, tmp_path):
    before = sorted(os.listdir(tmp_path))
    ran = cli("run", "m.onnx", "x.npy")
    assert ran.code == 0
    first, *shown = ran.out.splitlines()
    assert first.startswith("float32 [100, 3]: ")
    assert "rows/s" in first
    assert [line.split(":")[0] for line in shown] == ["row 0", "row 1", "row 2", "row 3", "row 4"]
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("output", [[], ["-o", "y.npy"]])
def test_json_is_one_document(cli, output):
    ran = cli("run", "m.onnx", "x.npy", *output, "--json")
    document = json.loads(ran.out)
    assert document["shape"] == [100, 3]
    assert document["output"] == (output[1] if output else None)
    assert document["rows_per_s"] > 0
    assert document["plan"]["groups"][0]["layers"]


def test_an_empty_input_gives_an_empty_output(cli, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((0, 20), np.float32))
    ran = cli("run", "m.onnx", "x.npy", "-o", "y.npy")
    assert ran.code == 0, ran.err
    y = np.load(tmp_path / "y.npy")
    assert (y.shape, y.dtype) == ((0, 3), np.float32)
    assert "the input has no rows" in ran.err
    assert cli("run", "m.onnx", "x.npy").out.startswith("float32 [0, 3]: ")


def test_nan_and_inf_are_run_and_reported(cli, tmp_path):
    x = rows(100, 20)
    x[31, 4], x[70, 0], x[70, 1] = np.nan, np.inf, -np.inf
    np.save(tmp_path / "x.npy", x)
    ran = cli("run", "m.onnx", "x.npy", "-o", "y.npy", "--batch", 10)
    assert ran.code == 0
    assert "2 rows contain NaN or Inf, the first is row 31" in ran.err
    y = np.load(tmp_path / "y.npy")
    assert np.isnan(y[31]).all()
    assert np.isfinite(np.delete(y, [31, 70], axis=0)).all()
    x[0, 0] = np.nan
    np.save(tmp_path / "x.npy", x)
    document = json.loads(cli("run", "m.onnx", "x.npy", "--json").out)  # NaN in the first rows is not valid JSON
    assert document["first_rows"][0] == [None, None, None]
    assert (document["bad_rows"], document["first_bad_row"]) == (3, 0)


def test_images_need_a_scale_and_are_flattened(cli, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (12, 28, 28), dtype=np.uint8)
    (tmp_path / "images.gz").write_bytes(gzip.compress(idx(images)))
    ran = cli("run", "digits", "images.gz", "-o", "y.npy")
    assert_refused(ran, tmp_path, "uint8", "float32", "--scale 255")
    ran = cli("run", "digits", "images.gz", "-o", "y.npy", "--scale", 255)
    assert ran.code == 0, ran.err
    assert "rows of 28x28 are read as rows of 784" in ran.err
    assert "divided by 255" in ran.err
    x = images.reshape(12, 784).astype(np.float32) / np.float32(255)
    assert np.load(tmp_path / "y.npy").tobytes() == compile(digits.network(), device="cpu")(x).tobytes()


def test_mnist_itself(cli, data_folder):
    ran = cli("run", "digits", data_folder / "mnist" / "t10k-images-idx3-ubyte.gz", "--scale", 255, "--json")
    assert json.loads(ran.out)["shape"] == [10000, 10]


@pytest.mark.parametrize(("flag", "shown"), [("-v", 1), ("--plan", 1), ("-vv", 2), ("-vvv", 3)])
def test_verbosity(cli, flag, shown):
    err = cli("run", "m.onnx", "x.npy", flag).err
    assert "mlp_fused<20,16,3,ReLU>" in err
    assert ("compiled" in err) == (shown >= 2)
    assert ("cache: " in err) == (shown >= 3)
    assert "mlp_fused" not in cli("run", "m.onnx", "x.npy").err


# -- wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nothing", "x.npy"], ["unknown model", "nothing", "decode, digits, faces, sentiment"]),
        (["nothing.onnx", "x.npy"], ["nothing.onnx", "No such file"]),
        (["x.npy", "x.npy"], ["x.npy", "unknown format", ".onnx"]),
        (["m.onnx", "nothing.npy"], ["nothing.npy", "No such file"]),
        (["m.onnx", "m.onnx"], ["m.onnx", "not an array of rows"]),
        (["m.onnx", "x.npy", "--device", "npu"], ["unknown device", "npu"]),
        (["m.onnx", "x.npy", "--precision", "fp7"], ["fp7", "fp32"]),
        (["m.onnx", "x.npy", "--device", "cpu", "--precision", "bf16"], ["bf16", "fp32"]),
        (["m.onnx", "x.npy", "--threads", "0"], ["threads", "0"]),
        (["m.onnx", "x.npy", "--batch", "0"], ["rows per chunk", "0", "try:"]),
        (["m.onnx", "x.npy", "--scale", "0"], ["scale", "--scale 255"]),
        (["m.onnx", "x.npy", "--scale", "nan"], ["scale", "nan"]),
        (["decode", "x.npy"], ["[100, 20]", "float32[B, 72]"]),
    ],
)
def test_bad_requests(cli, tmp_path, args, words):
    assert_refused(cli("run", *args, "-o", "y.npy"), tmp_path, *words)


def test_cuda_without_a_gpu_is_an_error(cli, tmp_path):
    from onchip.runtime.cuda.devices import cuda_devices

    if cuda_devices():
        pytest.skip("there is a GPU here")
    ran = cli("run", "m.onnx", "x.npy", "-o", "y.npy", "--device", "cuda")
    assert_refused(ran, tmp_path, "device 'cuda' is not available", "try:", "--device cpu")


@pytest.mark.parametrize("name", ["x.npy", "m.onnx"])
@pytest.mark.parametrize("damage", ["empty", "garbage", "truncated"])
def test_damaged_files(cli, tmp_path, name, damage):
    path = tmp_path / name
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "garbage": b"\xff" * 500, "truncated": whole[: len(whole) // 2]}[damage])
    assert_refused(cli("run", "m.onnx", "x.npy", "-o", "y.npy"), tmp_path, name)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((5, 21), np.float32), ["[5, 21]", "float32[B, 20]"]),
        (np.zeros(20, np.float32), ["[20]", "x.reshape(1, -1)"]),
        (np.zeros((5, 20)), ["float64", "float32", "--scale 1"]),
        (np.zeros((5, 20), np.int32), ["int32", "--scale 255"]),
        (np.zeros((5, 20), np.complex64), ["unsupported dtype"]),
        (np.zeros((5, 20), object), ["unsupported dtype"]),
    ],
    ids=["width", "one row", "float64", "int32", "complex", "object"],
)
def test_wrong_rows(cli, tmp_path, array, words):
    np.save(tmp_path / "x.npy", array)
    assert_refused(cli("run", "m.onnx", "x.npy", "-o", "y.npy"), tmp_path, *words)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("no/folder/y.npy", ["No such file or directory", "mkdir -p no/folder"]),
        ("/dev/null/y.npy", ["Not a directory", "another folder"]),
        ("x.npy/y.npy", ["Not a directory"]),
        ("y.jpg", ["unknown format", ".npy, .bin, .csv, .parquet, .txt, .bmp, .png", "-o y.npy"]),
        ("y", ["unknown format", "no suffix", "-o y.npy"]),
        ("y.txt", ["does not output images", "float32[B, 3]", "-o y.npy"]),
        ("y.png", ["does not output images", "float32[B, 3]", "-o y.npy"]),
        ("folder.npy", ["a folder"]),
    ],
)
def test_outputs_that_cannot_be_written_are_known_before_the_work(cli, tmp_path, monkeypatch, output, words):
    (tmp_path / "folder.npy").mkdir()
    monkeypatch.setattr("onchip.runtime.engine.compile", lambda *args, **options: pytest.fail("the work began"))
    assert_refused(cli("run", "m.onnx", "x.npy", "-o", output), tmp_path, *words)


def test_a_full_disk(cli, tmp_path, monkeypatch):
    (tmp_path / "y.npy").write_text("from yesterday")

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    ran = cli("run", "m.onnx", "x.npy", "-o", "y.npy")
    assert (tmp_path / "y.npy").read_text() == "from yesterday"
    (tmp_path / "y.npy").unlink()
    assert_refused(ran, tmp_path, "cannot write y.npy", "No space left on device", "free some space")


# -- Ctrl-C and a terminal ---------------------------------------------------------------------------------


def long_rows(folder):
    """Rows for minutes in chunks of 64; the file is sparse and takes no space."""
    np.lib.format.open_memmap(folder / "long.npy", "w+", np.float32, (5_000_000, 20))


def test_ctrl_c_leaves_nothing(spawn, tmp_path):
    long_rows(tmp_path)
    before = sorted(os.listdir(tmp_path))
    process = spawn("run", "m.onnx", "long.npy", "-o", "y.npy", "--batch", 64)
    assert "device: " in process.stderr.readline()
    while not (begun := [path for path in tmp_path.glob("y.npy.partial") if path.stat().st_size > 1000]):
        assert process.poll() is None
        time.sleep(0.02)
    assert begun
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 2
    assert out == ""
    assert err == "stopped: no file is half-written\n"
    assert sorted(os.listdir(tmp_path)) == before


def test_a_terminal_sees_a_bar_and_stdout_stays_clean(spawn, tmp_path):
    pty = pytest.importorskip("pty")
    np.save(tmp_path / "x.npy", rows(2000, 20))
    leader, follower = pty.openpty()
    process = spawn("run", "m.onnx", "x.npy", "--batch", 10, "--json", stderr=follower, stdout=subprocess.PIPE)
    os.close(follower)
    seen = read_terminal(leader)
    out, _ = process.communicate()
    assert json.loads(out)["shape"] == [2000, 3]
    assert b"run small" in seen
    assert b"rows/s" in seen
