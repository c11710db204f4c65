"""What onchip raises. Everyone may import this file; it imports nothing.

OnchipError
├── InputError      what came in is wrong: file, shape, dtype, name, option      (exit code 2)
│   ├── FormatError a file is missing, truncated, garbage or not supported
│   ├── MissingPackageError   a package that only some commands need is not installed
│   └── ShapeError  shapes or dtypes do not fit together; names the layer
├── DeviceError     the device asked for is not there or cannot do it            (exit code 2)
├── OutputError     an output cannot be written: no folder, no right, full disk  (exit code 2)
├── PlanError       no kernel can run the network as asked                       (exit code 2)
├── KernelError     a kernel failed to compile or to run                         (exit code 1)
└── RankError       a process of a job died or hangs                             (exit code 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

MAX_MESSAGE = 1_800  # characters: names and values out of files may be of any length, and nobody reads more
_CUT = " [...] "


def printable(text: str, most: int = MAX_MESSAGE) -> str:
    """The text in one line of at most that many characters which a terminal shows as it is; else escaped, as in repr.

    Names come out of files that anybody made: they may hold escape sequences, line ends, letters that turn the order
    of others round, and halves of letters, which cannot be printed at all.
    """
    (text,) = shorten([text], most)  # before it grows
    if text.isprintable():
        return text
    escaped = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)
    return shorten([escaped], most)[0]


def shorten(texts: Sequence[str], most: int) -> list[str]:
    """The same texts, `most` characters in all: the longest lose their middle."""
    longest = most
    while sum(min(len(text), longest) for text in texts) > most:
        longest -= 1
    half = max(0, longest - len(_CUT)) // 2
    return [text if len(text) <= longest else text[:half] + _CUT + text[len(text) - half :] for text in texts]


class OnchipError(Exception):
    """Says what was got, what was expected and what to do, a line each where they are known.

    Each is printable text: what it was made of may not be. All of the message is at most MAX_MESSAGE characters.
    """

    exit_code = 1
    log_lines: ClassVar[bool] = False  # what was got may be a compiler's log, whose lines stay lines

    def __init__(self, what: str, *, got: str = "", expected: str = "", hint: str | tuple[str, ...] = "") -> None:
        """hint  what to do, in one line or in several"""
        hints = (hint,) if isinstance(hint, str) else hint
        lines = shorten([got], MAX_MESSAGE)[0].split("\n") if self.log_lines else [got]
        texts = [printable(what), "\n".join(map(printable, lines)), printable(expected), *map(printable, hints)]
        labels = (2 + len(hints)) * len("\n  expected: ")
        self.what, self.got, self.expected, *told = shorten(texts, MAX_MESSAGE - labels)
        self.hint = told[0] if isinstance(hint, str) else tuple(told)
        super().__init__(self.what)

    def __str__(self) -> str:
        lines = [self.what]
        hints = (self.hint,) if isinstance(self.hint, str) else self.hint
        for label, texts in (("got:", (self.got,)), ("expected:", (self.expected,)), ("try:", hints)):
            for text in filter(None, texts):
                lines.append(f"  {label:<10}{text}")
                label = ""
        return "\n".join(lines)


class InputError(OnchipError, ValueError):
    exit_code = 2


class FormatError(InputError):
    pass


class MissingPackageError(InputError, ImportError):
    def __init__(self, what: str, package: str, extra: str) -> None:
        """what needs the package, which an extra of onchip installs."""
        hint = f"pip install 'onchip[{extra}]'"
        super().__init__(f"{what} needs {package}", got="it is not installed", expected=package, hint=hint)


class ShapeError(InputError):
    pass


class DeviceError(OnchipError):
    exit_code = 2


class OutputError(OnchipError):
    exit_code = 2


class PlanError(OnchipError):
    exit_code = 2


class KernelError(OnchipError):
    log_lines = True


class RankError(OnchipError):
    pass
