"""The progress message of the compiler: a bar on a terminal, one line elsewhere, nothing with ONCHIP_QUIET."""

import io
import sys

import pytest

from onchip import cache
from onchip.kernels.cpu.compiler.notice import Notice


class Stream(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


def output_of(monkeypatch, is_terminal, quiet=""):
    """The output while two functions are compiled, the second queued later."""
    monkeypatch.setattr(sys, "stderr", Stream(is_terminal))
    monkeypatch.setattr(cache, "printed", set())
    monkeypatch.setenv("ONCHIP_QUIET", quiet)
    notice = Notice()
    notice.expect(1, processes=1)
    notice.expect(1, processes=2)
    for _ in range(2):
        notice.finish_one()
    return sys.stderr.getvalue()


def test_a_log_gets_one_line(monkeypatch):
    text = output_of(monkeypatch, is_terminal=False)
    assert text.startswith("onchip: compiling 1 kernel for this machine, once; about 2 s (ONCHIP_QUIET=1")
    assert text.count("\n") == 1


def test_a_terminal_gets_a_bar_that_goes(monkeypatch):
    drawn = output_of(monkeypatch, is_terminal=True).split("\r\x1b[K")
    assert drawn[2].startswith("compiling 2 kernels, once: .................... 0 done")
    assert drawn[3].startswith("compiling 2 kernels, once: ##########.......... 1 done")
    assert drawn[-1] == ""
    assert all(len(text) < 80 for text in drawn)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_quiet_is_quiet(monkeypatch, is_terminal):
    assert output_of(monkeypatch, is_terminal, quiet="1") == ""
