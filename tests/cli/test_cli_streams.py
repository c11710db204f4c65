"""Standard streams that are closed, full or broken: lost data is an error, lost messages are not."""

import os
import subprocess
import sys

import numpy as np
import pytest

from conftest import SRC

FULL = "/dev/full"
needs_full = pytest.mark.skipif(not os.path.exists(FULL), reason=f"no {FULL}")
DATA = [["plan", "decode", "--device", "h200"], ["devices"], ["--help"], ["--version"]]
RUN = ["run", "decode", "--count", "4", "--device", "cpu", "-o", "y.npy"]


def close(*fds):
    """For `preexec_fn`: what a shell does for >&- and similar."""

    def now():
        for fd in fds:
            os.close(fd)

    return now


def finish(process):
    out, err = process.communicate()
    return process.returncode, out or "", err or ""


# -- stdout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", DATA, ids=" ".join)
def test_data_for_a_closed_stdout_is_an_error_in_one_line(spawn, args):
    code, _, err = finish(spawn(*args, stdout=None, preexec_fn=close(1)))
    assert (code, err) == (1, "cannot write to standard output: Bad file descriptor\n")


@needs_full
@pytest.mark.parametrize("args", DATA[:3], ids=" ".join)
def test_data_for_a_full_disk_is_an_error_in_one_line(spawn, args):
    with open(FULL, "w") as full:
        code, _, err = finish(spawn(*args, stdout=full))
    assert code == 1
    assert "No space left on device" in err.splitlines()[-1]
    assert "Traceback" not in err


@needs_full
def test_more_data_than_a_buffer_is_refused_in_the_same_way(spawn):
    """It fails while printing, not at exit."""
    with open(FULL, "w") as full:
        code, _, err = finish(spawn("ladder", "--json", stdout=full))
    assert (code, err) == (1, "cannot write to standard output: No space left on device\n")


@pytest.mark.parametrize("fds", [(1,), (0, 1, 2)], ids=str)
def test_a_command_that_writes_a_file_needs_no_stdout(spawn, tmp_path, fds):
    code, _, err = finish(spawn(*RUN, stdin=None, stdout=None, preexec_fn=close(*fds)))
    assert code == 0, err
    assert np.load(tmp_path / "y.npy").shape == (4, 4)
    assert ("wrote y.npy" in err) == (2 not in fds)


def test_a_librarys_output_does_not_go_into_a_file():
    """With stdout closed, the next opened file would get descriptor 1, and prints would go into it."""
    code = (
        "import os; from onchip.cli.streams import open_streams; open_streams();"
        "file = open(os.devnull); assert file.fileno() > 2, file.fileno();"
        "os.write(2, b'a library'); import sys; sys.stderr.write('talk'); sys.stdin.read()"
    )
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    for fds in ((1,), (0, 1), (0, 1, 2), (2,)):
        closed = subprocess.run([sys.executable, "-c", code], env=env, preexec_fn=close(*fds), check=False)
        assert closed.returncode == 0, fds


# -- stderr ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("args", "expected"), [(RUN, 0), (["devices"], 0), (["nothing"], 2), (["--version"], 0)])
def test_talk_for_a_closed_stderr_is_dropped(spawn, args, expected):
    code, out, _ = finish(spawn(*args, stderr=None, preexec_fn=close(2)))
    assert code == expected
    assert "units:" not in out  # a message of `devices`
    assert bool(out) == (args in (["devices"], ["--version"]))


@needs_full
@pytest.mark.parametrize(("args", "expected"), [(RUN, 0), (["devices"], 0), (["plan", "nothing"], 2)])
def test_talk_for_a_full_disk_is_dropped(spawn, args, expected):
    with open(FULL, "w") as full:
        assert finish(spawn(*args, stderr=full))[0] == expected


def test_all_streams_closed(spawn):
    code, _, _ = finish(spawn("devices", stdin=None, stdout=None, stderr=None, preexec_fn=close(0, 1, 2)))
    assert code == 1
