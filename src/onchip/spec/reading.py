"""What the readers share: whatever is wrong inside a file becomes a FormatError that names the file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from onchip.errors import FormatError, InputError

MAX_RANK = 64  # NumPy's own limit
MAX_DIM = 2**63 - 1
MAX_SHOWN = 120  # characters of a name or value in a message


@contextlib.contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Any InputError of the block leaves as a FormatError whose first words are the file's name."""
    try:
        yield
    except InputError as error:
        raise FormatError(
            f"{path}: {error.what}", got=error.got or "what the file says", expected=error.expected or "a sound file",
            hint=error.hint or "make, export or copy the file again",
        ) from None  # fmt: skip
    except OSError as error:
        raise FormatError(
            f"cannot read {path}", got=error.strerror or str(error), expected="a readable file", hint="copy it again"
        ) from None
    except MemoryError:
        raise FormatError(
            f"{path} does not fit into memory", got=f"{path.stat().st_size:,} B", expected="room for all of it",
            hint="a machine with more memory",
        ) from None  # fmt: skip


def show(value: object) -> str:
    """A name or value out of a file, short enough for a message."""
    if isinstance(value, str | bytes):
        value = value[:MAX_SHOWN]  # before it becomes even longer
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of thousands of digits, a list in a list in a list ...
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
