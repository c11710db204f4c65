"""Files that appear whole or not at all, whoever is killed beside them."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import onchip
from onchip.errors import OutputError
from onchip.files import atomic_write, check_writable

SRC = Path(onchip.__file__).parent.parent
WRITER = """
import sys
from onchip.files import atomic_write
with atomic_write(sys.argv[1]) as file:
    file.write(b"theirs")
    print("writing", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def writer(tmp_path):
    """A process that is in the midst of writing y.npy until its stdin has a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "y.npy")], env={**os.environ, "PYTHONPATH": str(SRC)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "writing\n"
    yield process
    process.kill()
    process.communicate()


def write(path: Path, content: bytes) -> None:
    with atomic_write(path) as file:
        file.write(content)


# -- temporary files ---------------------------------------------------------------------------------------


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path, writer):
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".y.npy.")
    write(tmp_path / "other.npy", b"ours")
    assert left in os.listdir(tmp_path)
    write(tmp_path / "y.npy", b"ours")
    assert sorted(os.listdir(tmp_path)) == ["other.npy", "y.npy"]


def test_a_living_writer_keeps_its_file(tmp_path, writer):
    write(tmp_path / "y.npy", b"ours")
    check_writable(tmp_path / "y.npy")
    assert (tmp_path / "y.npy").read_bytes() == b"ours"
    writer.communicate("go on\n")
    assert writer.returncode == 0
    assert (tmp_path / "y.npy").read_bytes() == b"theirs"
    assert os.listdir(tmp_path) == ["y.npy"]


def test_a_file_that_is_taken_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    import fcntl

    def take_first(file, operation):
        monkeypatch.undo()
        (taken,) = tmp_path.iterdir()
        taken.unlink()
        fcntl.flock(file, operation)

    monkeypatch.setattr("fcntl.flock", take_first)
    write(tmp_path / "y.npy", b"ours")
    assert (tmp_path / "y.npy").read_bytes() == b"ours"
    assert os.listdir(tmp_path) == ["y.npy"]


def test_a_writer_of_a_shorter_name_is_not_the_same(tmp_path):
    (tmp_path / ".y.npy.abcdefgh.tmp").touch()
    write(tmp_path / "y", b"ours")
    assert sorted(os.listdir(tmp_path)) == [".y.npy.abcdefgh.tmp", "y"]


# -- what is written to ------------------------------------------------------------------------------------


def test_a_link_is_replaced_and_what_it_points_to_stays(tmp_path):
    (tmp_path / "x.npy").write_bytes(b"precious")
    (tmp_path / "link").symlink_to("x.npy")
    check_writable(tmp_path / "link")
    write(tmp_path / "link", b"ours")
    assert (tmp_path / "link").read_bytes() == b"ours"
    assert (tmp_path / "x.npy").read_bytes() == b"precious"


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_refused_and_stays(tmp_path, kind):
    path = tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to(os.devnull)
    else:
        path.mkdir()
    before = os.stat(path).st_mode
    for attempt in (lambda: check_writable(path), lambda: write(path, b"ours")):
        with pytest.raises(OutputError, match="expected: a file name"):
            attempt()
    assert os.stat(path).st_mode == before
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert os.listdir(tmp_path) == [kind]
