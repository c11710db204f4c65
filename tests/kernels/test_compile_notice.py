"""What is said while kernels are compiled: a bar on a terminal, one line elsewhere, nothing where it is not wanted."""

import io
import sys

import pytest

from onchip import cache
from onchip.kernels.cpu.compile_notice import _Notice


class Stream(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.fixture
def stderr(monkeypatch, request):
    stream = Stream(request.param)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(cache, "_said", set())
    monkeypatch.delenv("ONCHIP_QUIET", raising=False)
    return stream


def compile_two():
    notice = _Notice()
    notice.expect(1)
    notice.expect(1)  # found on the way
    for _ in range(2):
        notice.finish_one()


@pytest.mark.parametrize("stderr", [False], indirect=True)
def test_a_log_gets_one_line(stderr):
    compile_two()
    assert stderr.getvalue().startswith("onchip: compiling 1 kernel for this machine, once; about 2 s (ONCHIP_QUIET=1")
    assert stderr.getvalue().count("\n") == 1


@pytest.mark.parametrize("stderr", [True], indirect=True)
def test_a_terminal_gets_a_bar_that_goes(stderr):
    compile_two()
    drawn = stderr.getvalue().split("\r\x1b[K")
    assert drawn[2].startswith("compiling 2 kernels, once: .................... 0 done")
    assert drawn[3].startswith("compiling 2 kernels, once: ##########.......... 1 done")
    assert drawn[-1] == ""
    assert all(len(text) < 80 for text in drawn)


@pytest.mark.parametrize("stderr", [False, True], indirect=True)
def test_quiet_is_quiet(stderr, monkeypatch):
    monkeypatch.setenv("ONCHIP_QUIET", "1")
    compile_two()
    assert stderr.getvalue() == ""
