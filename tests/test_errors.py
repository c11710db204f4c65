"""Whatever a message is made of, a terminal shows it as it is, and it has an end."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import numpy as np
import pytest

import onchip
from onchip.errors import MAX_MESSAGE, FormatError, InputError, KernelError, OnchipError, printable
from onchip.network.build import sequential
from onchip.network.layers import Linear, ReLU
from onchip.network.types import TensorType

HOSTILE = {
    "colour": "\x1b[31mred", "title": "\x1b]0;pwned\x07", "c1": "\x9b2J", "line": "a\nonchip: all is well",
    "return": "a\rb", "backspace": "abc\b\b\b", "bell": "\a", "nul": "\0", "delete": "\x7f",
    "override": "\u202egpj.exe", "isolate": "\u2066x",
    "invisible": "\u200b\ufeff", "separator": "\u2028", "half": "\ud800", "tag": "\U000e0041", "private": "\ue000",
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_messages_are_plain_text(case):
    text = HOSTILE[case]
    error = InputError(text, got=text, expected=text, hint=text)
    assert str(error).count("\n") == 3
    assert str(error).replace("\n", "").isprintable()
    assert repr(text)[1:-1] in error.what
    again = FormatError(f"file: {error.what}", got=error.got, expected=error.expected, hint=error.hint)
    assert (again.what, again.got) == (f"file: {error.what}", error.got)  # what is plain stays


@pytest.mark.parametrize("folder", ["formats/onnx/ops", "network/layers"])
def test_what_is_refused_of_a_layer_says_what_is_expected(folder):
    """A file may be sound and still hold what onchip does not run: no general words would help."""
    for path in sorted((Path(onchip.__file__).parent / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("FormatError", "ShapeError"):
                assert "expected" in {keyword.arg for keyword in node.keywords}, f"{path}:{node.lineno}"


def test_plain_text_stays():
    for text in ("naïve café µs", "日本語", "layer 'fc1' (Linear)", r"C:\new\x1b", "emoji 🎉"):
        assert str(OnchipError(text)) == text == printable(text)


@pytest.mark.parametrize("error", [OnchipError, FormatError, KernelError])
@pytest.mark.parametrize("sign", ["x", "\x1b", "\n", "\ud800", "\U000e0041"])
def test_messages_have_an_end(error, sign):
    text = "first " + sign * 10**6 + " last"
    for fields in ({}, {"got": text}, {"got": text, "expected": text, "hint": text}):
        message = str(error(text, **fields))
        assert len(message) <= MAX_MESSAGE < 2000
        assert message.count("first ") == message.count(" last") == 1 + len(fields)
    message = str(error("short", got=text, hint="do this"))
    assert message.startswith("short\n")
    assert message.endswith("\n  try:      do this")


def test_the_lines_of_a_log_stay():
    error = KernelError("does not compile", got="a.cu(1): error\n  x = \x1b[31my\n  ^", hint="look")
    assert str(error) == "does not compile\n  got:      a.cu(1): error\n  x = \\x1b[31my\n  ^\n  try:      look"


def test_several_lines_of_what_to_do():
    error = InputError("what", got="g", expected="e", hint=("do\nthis", "", "or that"))
    assert str(error) == "what\n  got:      g\n  expected: e\n  try:      do\\nthis\n            or that"
    again = FormatError(error.what, got=error.got, expected=error.expected, hint=error.hint)
    assert str(pickle.loads(pickle.dumps(again))) == str(error)
    assert len(str(OnchipError("x" * 10**4, hint=("y" * 10**4,) * 3))) <= MAX_MESSAGE


def test_an_error_survives_a_process_border():
    error = pickle.loads(pickle.dumps(FormatError("what", got="g", expected="e", hint="h")))
    assert str(error) == "what\n  got:      g\n  expected: e\n  try:      h"
    assert (error.got, error.expected, error.hint) == ("g", "e", "h")


@pytest.mark.parametrize("case", HOSTILE)
def test_networks_and_plans_print_their_names_as_text(case):
    from onchip.runtime.placement import plan

    bad = HOSTILE[case]
    weights = {f"{bad}.weight": np.ones((3, 4), np.float32), f"{bad}2.weight": np.ones((2, 3), np.float32)}
    layers = [(bad, Linear()), (f"{bad}2", Linear()), (f"{bad}3", ReLU())]
    net = sequential(TensorType(("B", 4)), layers, weights, name=bad)
    made = plan(net, "h200")
    for text, lines in (
        (str(net), 6),
        (str(made), 3 + len(made.groups) + len(made.rewrites) + len(made.refusals) + str(made).count("slow: ")),
    ):
        assert text.replace("\n", "").isprintable()
        assert text.count("\n") + 1 == lines
        assert repr(bad)[1:-1] in text


def test_long_names_do_not_fill_the_screen():
    net = sequential(TensorType(("B", 4)), [("n" * 10**6, ReLU()), ("last", ReLU())], {})
    assert len(str(net)) < 10_000
