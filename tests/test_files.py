"""Files that appear whole or not at all, whoever is killed beside them; outputs that are nobody else's file."""

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import onchip
from onchip.errors import FormatError, InputError, OutputError
from onchip.files import (
    atomic_write,
    check_memory,
    check_outputs,
    check_writable,
    free_memory,
    open_input,
    open_locked,
    open_owned,
)

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


# -- files that stay until the next run --------------------------------------------------------------------


def test_a_file_of_ones_own_is_made_kept_and_locked(tmp_path):
    path = tmp_path / "y.npy.manifest"
    with open_locked(path) as file:
        file.write(b"ours")
        assert open_locked(path) is None
    with open_locked(path) as file, open_owned(path, create=False) as again:
        assert (file.read(), again.read()) == (b"ours", b"ours")
    with pytest.raises(OutputError, match="No such file"):
        open_owned(tmp_path / "none", create=False)
    assert os.listdir(tmp_path) == [path.name]


def test_what_is_no_file_of_ones_own_is_refused(tmp_path, plant):
    path = tmp_path / "y.npy.partial"
    is_intact = plant(path)
    for attempt in (open_owned, open_locked, lambda path: open_owned(path, create=False)):
        with pytest.raises(OutputError, match="cannot write") as caught:
            attempt(path)
        assert caught.value.got
        assert caught.value.hint
    assert is_intact()
    assert os.listdir(tmp_path) == [path.name]


def test_a_file_of_another_owner_than_new_ones_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "y.npy.partial"
    path.write_bytes(b"theirs")
    open_owned(path).close()
    monkeypatch.setattr("onchip.files.new_owner", lambda folder: os.stat(path).st_uid + 1)
    with pytest.raises(OutputError, match="a file of another user"):
        open_owned(path)


def test_a_file_that_is_renamed_before_it_is_locked_is_opened_again(tmp_path, monkeypatch):
    import fcntl

    path = tmp_path / "y.part"
    path.write_bytes(b"whole")

    def finish_first(file, operation):
        monkeypatch.undo()
        path.rename(tmp_path / "y")
        fcntl.flock(file, operation)

    monkeypatch.setattr("fcntl.flock", finish_first)
    with open_locked(path) as file:
        file.write(b"ours")
    assert (tmp_path / "y").read_bytes() == b"whole"
    assert path.read_bytes() == b"ours"


# -- outputs that are somebody else's file -----------------------------------------------------------------


@pytest.fixture
def files(tmp_path, monkeypatch):
    """x.npy under other names, and names of nothing."""
    monkeypatch.chdir(tmp_path)
    Path("x.npy").write_bytes(b"precious")
    Path("folder").mkdir()
    Path("link.npy").symlink_to("x.npy")
    os.link("x.npy", "hard.npy")
    Path("same").symlink_to(".")
    Path("dangling.npy").symlink_to("new.npy")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("name", ["x.npy", "./folder/../x.npy", "same/x.npy", "link.npy", "hard.npy", Path("x.npy")])
def test_an_output_is_no_input(name):
    with pytest.raises(InputError, match="--log would overwrite --data") as error:
        check_outputs({"--data": "x.npy", "--labels": "new.npy"}, {"--output": None, "--log": name})
    assert (str(name) in error.value.got, error.value.exit_code) == (True, 2)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("one", "other"),
    [("new.npy", "./new.npy"), ("new.npy", "dangling.npy"), ("same/new.npy", "new.npy"), ("x.npy", "hard.npy")],
)
def test_an_output_is_no_other_output(one, other):
    with pytest.raises(InputError, match="--log would overwrite --output"):
        check_outputs({}, {"--output": one, "--log": other})


@pytest.mark.usefixtures("files")
def test_inputs_may_be_the_same_and_outputs_may_replace_what_nobody_reads():
    check_outputs({"--data": "x.npy", "--test-data": "link.npy"}, {"--output": "new.npy", "--log": "folder/new.npy"})
    check_outputs({"--data": "new.npy"}, {"--output": "x.npy"})


def test_an_output_is_not_where_stdout_goes(tmp_path):
    code = "import sys; from onchip.files import check_outputs; check_outputs({}, {'--log': sys.argv[1]})"
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    for name, words in (("out.txt", "--log would overwrite standard output"), ("new.txt", "")):
        with (tmp_path / "out.txt").open("w") as out:
            args = [sys.executable, "-c", code, str(tmp_path / name)]
            err = subprocess.run(args, env=env, stdout=out, stderr=subprocess.PIPE, text=True, check=False).stderr
        assert words in err
        assert bool(words) == bool(err)


# -- what is read: nothing that never begins, never ends, or is larger than memory ----------------------------


@pytest.fixture(params=["device", "link", "pipe", "socket"])
def no_file(request, tmp_path):
    path = tmp_path / "x.onnx"
    if request.param == "device":
        yield "/dev/zero"
    elif request.param == "link":
        path.symlink_to("/dev/random")
        yield path
    elif request.param == "pipe":
        os.mkfifo(path)
        yield path
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
            yield path


def test_what_is_no_file_is_refused_at_once(no_file):
    with pytest.raises(FormatError, match="cannot read") as caught:
        open_input(no_file)
    assert "pipe" in caught.value.got


def test_names_that_cannot_be(tmp_path):
    for name in ("a\0b", "n" * 5000):
        with pytest.raises(FormatError, match="cannot read"):
            open_input(tmp_path / name)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(FormatError, match="cannot read"):
        open_input(tmp_path / "loop")


def test_memory_is_asked_before_it_is_taken():
    assert 0 < free_memory() < 1 << 60
    check_memory(1, "a byte")
    with pytest.raises(InputError, match="an ocean does not fit into memory") as caught:
        check_memory(1 << 60, "an ocean")
    assert "B, which are free" in caught.value.expected


@pytest.mark.parametrize("name", ["rows.npy", "net.onnx", "table.csv"])
def test_a_pointer_of_git_lfs_is_not_the_file(tmp_path, name):
    path = tmp_path / name
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n")
    with pytest.raises(FormatError, match="Git LFS") as caught:
        open_input(path)
    assert f"git lfs pull --include '{name}'" in str(caught.value)
    path.write_text("version https://")
    with open_input(path) as file:
        assert file.read() == b"version https://"
