"""Shared by the file readers: any error inside a file becomes a FormatError that names the file."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onchip.errors import FormatError, InputError

MAX_RANK = 64  # NumPy's own limit
MAX_DIM = 2**63 - 1
MAX_SHOWN = 120  # characters of a name or value in a message


@contextlib.contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Re-raise any InputError of the block as a FormatError that begins with the file's name."""
    try:
        yield
    except InputError as error:
        raise FormatError(
            f"{path}: {error.what}", got=error.got or "the file's content",
            expected=error.expected or "a file that onchip reads",
            hint=error.hint or "if the file is damaged, copy or write it again",
        ) from None  # fmt: skip
    except OSError as error:
        raise FormatError(
            f"cannot read {path}", got=error.strerror or str(error), expected="a readable file", hint="copy it again"
        ) from None
    except MemoryError:
        raise FormatError(
            f"{path} does not fit into memory", got=f"{path.stat().st_size:,} B", expected="enough free memory",
            hint="a machine with more memory",
        ) from None  # fmt: skip


def is_text(value: str) -> bool:
    """Whether it has no lone surrogates: JSON can spell one ("\\ud800"), which cannot be printed."""
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def is_count(text: str) -> bool:
    """Whether it is a whole number in plain digits, small enough for int()."""
    return text.isascii() and text.isdigit() and len(text) < 19


def show(value: object) -> str:
    """A name or value from a file, short enough for a message."""
    if isinstance(value, str | bytes):
        value = value[:MAX_SHOWN]  # truncate before repr makes it longer
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits, or deeply nested lists
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


# -- one value of a file's JSON ------------------------------------------------------------------------------------


def fields(value: Any, names: tuple[str, ...], where: str) -> None:
    """FormatError unless it is an object with exactly these fields."""
    if not isinstance(value, dict):
        raise FormatError(f"{where} is not an object", got=name_of(value), expected="an object")
    if missing := [name for name in names if name not in value]:
        raise FormatError(f"{where} is incomplete", got=f"no '{missing[0]}'", expected=", ".join(names))
    if unknown := [name for name in value if name not in names]:
        raise FormatError(f"{where} has an unknown field", got=show(unknown[0]), expected=", ".join(names))


def whole(value: Any, where: str, low: int, high: int) -> int:
    """The int, if it is from `low` to `high`; else FormatError."""
    if type(value) is not int or not low <= value <= high:
        expected = f"{low} to {high}" if low < high else str(low)
        raise FormatError(f"{where} does not fit", got=name_of(value), expected=expected)
    return value


def real(value: Any, where: str, high: float = sys.float_info.max) -> float:
    """The number, if it is from 0 to `high`; else FormatError."""
    if type(value) not in (int, float) or not 0 <= value <= high:
        expected = "a finite number of at least 0" if high else "0"
        raise FormatError(f"{where} does not fit", got=name_of(value), expected=expected)
    return float(value)


def name_of(value: Any) -> str:
    """A value for a message; of a list or an object, which may be deep, only its type."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return show(value)
