"""The output of a run: complete or absent, from chunks in any order; a killed run can be resumed."""

from pathlib import Path

import numpy as np
import pytest

from checks import random_mlp, rows
from onchip.errors import InputError, OutputError
from onchip.network.build import sequential
from onchip.network.layers import Reshape
from onchip.network.types import TensorType
from onchip.runtime.io import output as module
from onchip.runtime.io.output import ChunkRecord, open_output
from onchip.runtime.io.slices import SliceFile, digest_rows, has_token, make_line

NET = random_mlp(20, 16, 3)
PLAN = {"device": "of the first run"}
JOB = {"model": "m.onnx", "precision": "fp32"}
Y = rows(10, 3)


def put(output, chunk, y=Y):
    """Write a chunk of 4 rows of y and record it."""
    output.record(ChunkRecord(chunk, output.write(4 * chunk, y[4 * chunk : 4 * chunk + 4])))


def test_the_output_appears_only_when_the_block_ends_well(tmp_path):
    path = tmp_path / "y.npy"

    def stopped():
        with open_output(path, NET, 10) as output:
            output.begin(PLAN, (0, 4, 8))
            put(output, 0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert list(tmp_path.iterdir()) == []  # a few seconds' work is not kept
    with open_output(path, NET, 10) as output:
        output.begin(PLAN, (0, 4, 8))
        for chunk in (2, 0, 1):
            put(output, chunk)
            assert not path.exists()
    assert np.array_equal(np.load(path), Y)
    assert list(tmp_path.iterdir()) == [path]


def killed(path, chunks):
    """Write the files that a run leaves when it is killed after these chunks."""
    with open_output(path, NET, 10, JOB) as output:
        output.begin(PLAN, (0, 4, 8))
        for chunk in chunks:
            put(output, chunk)
        left = {p: p.read_bytes() for p in path.parent.iterdir()}
        for chunk in {0, 1, 2} - set(chunks):
            put(output, chunk)
    path.unlink()
    for p, data in left.items():
        p.write_bytes(data)


def test_a_killed_run_is_resumed(tmp_path):
    path = tmp_path / "y.npy"
    killed(path, [2, 0])
    with open_output(path, NET, 10, JOB, resume=True) as output:
        assert (output.plan, output.cuts, set(output.records)) == (PLAN, (0, 4, 8), {0, 2})
        output.begin({"device": "another"}, (0, 5))
        assert (output.plan, output.cuts) == (PLAN, (0, 4, 8))
        assert np.array_equal(output.read(0, 4), Y[:4])
        put(output, 1)
    assert np.array_equal(np.load(path), Y)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("hurt", ["torn line", "lost rows", "changed row", "no rows", "torn head", "garbage"])
def test_nothing_half_written_passes_for_done(tmp_path, hurt):
    path = tmp_path / "y.npy"
    killed(path, [0, 1])
    data, manifest = Path(f"{path}.partial"), Path(f"{path}.manifest")
    text, stored = manifest.read_bytes(), data.read_bytes()
    if hurt == "torn line":
        manifest.write_bytes(text[:-5])
    elif hurt == "lost rows":
        data.write_bytes(stored[:-1])
    elif hurt == "changed row":
        data.write_bytes(stored[:-1] + bytes([stored[-1] ^ 1]))
    elif hurt == "no rows":
        data.unlink()
    elif hurt == "torn head":
        manifest.write_bytes(text[:20])
    else:
        manifest.write_bytes(text + make_line({"chunk": "x"}) + make_line([1]) + b'{"chunk": 2}\n\xff\n')
    left = {"torn line": {0}, "lost rows": {0}, "changed row": {0}, "garbage": {0, 1}}
    with open_output(path, NET, 10, JOB, resume=True) as output:
        assert set(output.records) == left.get(hurt, set())
        output.begin(PLAN, (0, 4, 8))
        for chunk in {0, 1, 2} - set(output.records):
            put(output, chunk)
    assert np.array_equal(np.load(path), Y)


def test_another_job_is_not_resumed(tmp_path):
    path = tmp_path / "y.npy"
    killed(path, [0])
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}

    def resume():
        with open_output(path, NET, 10, {**JOB, "precision": "fp16"}, resume=True):
            pytest.fail("opened")

    with pytest.raises(InputError, match="belongs to another job") as caught:
        resume()
    assert (caught.value.got, caught.value.expected) == ("precision: 'fp16'", "precision: 'fp32'")
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_without_resume_a_run_begins_anew(tmp_path):
    path = tmp_path / "y.npy"
    killed(path, [0, 1])
    with open_output(path, NET, 10, JOB) as output:
        assert output.found
        output.begin(PLAN, (0, 4, 8))
        assert output.records == {}
        for chunk in range(3):
            put(output, chunk, Y + 1)
    assert np.array_equal(np.load(path), Y + 1)


def fail_after(path, chunks, error, keep_s=10.0):
    with open_output(path, NET, 10, JOB, keep_s=keep_s) as output:
        output.begin(PLAN, (0, 4, 8))
        for chunk in chunks:
            put(output, chunk)
        try:
            raise error
        finally:
            fail_after.output = output


@pytest.mark.parametrize(
    ("error", "chunks", "is_kept"),
    [(OutputError("the disk is full"), [0], True), (OutputError("the disk is full"), [], False),
     (InputError("row 9 is bad"), [0, 1], False), (KeyboardInterrupt(), [0, 1], False)],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)  # fmt: skip
def test_what_is_kept_of_a_run_that_fails(tmp_path, error, chunks, is_kept):
    with pytest.raises(type(error)):
        fail_after(tmp_path / "y.npy", chunks, error)
    names = {"y.npy.partial", "y.npy.manifest"} if is_kept else set()
    assert {p.name for p in tmp_path.iterdir()} == names
    said = fail_after.output.resume_hint
    assert ("1 of 3 chunks are saved" in said and "--resume" in said) if is_kept else said == ""


def test_work_of_a_while_is_kept_when_it_is_stopped(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fail_after(tmp_path / "y.npy", [0], KeyboardInterrupt(), keep_s=0.0)
    assert {p.name for p in tmp_path.iterdir()} == {"y.npy.partial", "y.npy.manifest"}


@pytest.mark.parametrize("name", ["open_locked", "open_owned"])
def test_a_run_that_is_stopped_as_it_opens_its_files_leaves_none(tmp_path, monkeypatch, name):
    real = getattr(module, name)

    def open_and_stop(path):
        monkeypatch.setattr(module, name, real)
        real(path).close()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, name, open_and_stop)
    with pytest.raises(KeyboardInterrupt), open_output(tmp_path / "y.npy", NET, 10):
        pass
    assert list(tmp_path.iterdir()) == []


def test_two_runs_do_not_write_one_output(tmp_path):
    path = tmp_path / "y.npy"

    def second():
        with open_output(path, NET, 10):
            pytest.fail("opened")

    with open_output(path, NET, 4) as output:
        output.begin(PLAN, (0,))
        with pytest.raises(OutputError, match="another run is writing"):
            second()
        put(output, 0)
    assert len(np.load(path)) == 4


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["y.npy.partial", "y.npy.manifest"])
def test_what_is_no_file_of_ones_own_is_neither_written_nor_read(tmp_path, plant, name, resume):
    is_intact = plant(tmp_path / name)

    def attempt():
        with open_output(tmp_path / "y.npy", NET, 10, JOB, resume):
            pytest.fail("opened")

    with pytest.raises(OutputError, match=f"cannot write .*{name}"):
        attempt()
    assert is_intact()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_other_processes_know_the_output_by_its_token(tmp_path):
    with open_output(tmp_path / "y.bin", NET, 10) as output:
        output.begin(PLAN, (0, 4, 8))
        assert has_token(output.slices)
        file = SliceFile(output.slices)
        for chunk in range(3):
            digest = file.write(4 * chunk, Y[4 * chunk : 4 * chunk + 4])
            assert digest == digest_rows(Y[4 * chunk : 4 * chunk + 4].tobytes())
            output.record(ChunkRecord(chunk, digest))
        file.close()
        manifest = Path(f"{output.path}.manifest")
        manifest.write_bytes(make_line({"token": "another"}))
        assert not has_token(output.slices)
        manifest.unlink()
        assert not has_token(output.slices)
    assert (tmp_path / "y.bin").read_bytes() == Y.tobytes()


def image_net(*shape, dtype="float32"):
    return sequential(TensorType(("B", 4 * 5 * 3), dtype), [("image", Reshape(shape))], {}, name="painter")


@pytest.mark.parametrize("suffix", [".npy", ".bin", ".txt", ".bmp", ".png", ".PNG"])
def test_the_suffix_says_the_format(tmp_path, suffix):
    y = np.random.default_rng(0).uniform(-1, 1, (7, 4, 5, 3)).astype(np.float32)
    path = tmp_path / f"y{suffix}"
    with open_output(path, image_net(4, 5, 3), 7) as output:
        output.begin(PLAN, (0, 3))
        output.record(ChunkRecord(1, output.write(3, y[3:])))
        assert not path.exists()
        output.record(ChunkRecord(0, output.write(0, y[:3])))
    assert list(tmp_path.iterdir()) == [path]
    data = path.read_bytes()
    begin = {".npy": b"\x93NUMPY", ".bin": y.tobytes(), ".txt": b"7\n", ".bmp": b"BM", ".png": b"\x89PNG"}
    assert data.startswith(begin[suffix.lower()])
    if suffix == ".bin":
        assert data == y.astype("<f4").tobytes()
    if suffix == ".npy":
        assert np.array_equal(np.load(path), y)


@pytest.mark.parametrize("suffix", [".txt", ".bmp", ".png"])
def test_only_images_are_drawn(tmp_path, suffix):
    def open_it():
        with open_output(tmp_path / f"y{suffix}", NET, 4):
            pytest.fail("opened")

    with pytest.raises(InputError, match="does not output images") as caught:
        open_it()
    assert "float32[B, 3]" in caught.value.got
    assert ".npy, .bin" in caught.value.expected
    assert "y.npy" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_no_path_no_output():
    with open_output((), NET, 4) as output:
        assert output is None
