"""What is read is a file: nothing that never begins, never ends, or is larger than memory."""

from __future__ import annotations

import os
import socket

import pytest

from onchip.errors import FormatError, InputError
from onchip.files import check_memory, free_memory, open_input


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
