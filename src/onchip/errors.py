"""The exceptions that onchip raises. Any module may import this file; it imports nothing.

OnchipError
├── InputError      the input is wrong: file, shape, dtype, name, option         (exit code 2)
│   ├── FormatError a file is missing, truncated, corrupt or not supported
│   ├── MissingPackageError   an optional package is not installed
│   └── ShapeError  shapes or dtypes do not match; names the layer
├── DeviceError     the requested device is missing or cannot run the job        (exit code 2)
├── OutputError     an output cannot be written: no folder, permission, space    (exit code 2)
├── PlanError       no kernel can run the network as requested                   (exit code 2)
├── KernelError     a kernel failed to compile or to run                         (exit code 1)
└── RankError       a rank of a job died or hangs                                (exit code 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

MAX_MESSAGE = 1_800  # characters; names and values read from files can be of any length
_CUT = " [...] "


def printable(text: str, most: int = MAX_MESSAGE) -> str:
    """The text as one printable line of at most `most` characters; other characters are escaped as in repr.

    Names come from untrusted files: they may hold escape sequences, line breaks, bidirectional control characters and
    lone surrogates, which cannot be printed.
    """
    (text,) = shorten([text], most)  # before escaping makes it longer
    if text.isprintable():
        return text
    escaped = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)
    return shorten([escaped], most)[0]


def shorten(texts: Sequence[str], most: int) -> list[str]:
    """The same texts, `most` characters in total; the longest lose their middle."""
    longest = most
    while sum(min(len(text), longest) for text in texts) > most:
        longest -= 1
    half = max(0, longest - len(_CUT)) // 2
    return [text if len(text) <= longest else text[:half] + _CUT + text[len(text) - half :] for text in texts]


class OnchipError(Exception):
    """States what was got, what was expected and what to do, one line each where known.

    Every field is printable text, whatever it was built from. The whole message is at most MAX_MESSAGE characters.
    """

    exit_code = 1
    log_lines: ClassVar[bool] = False  # `got` may be a compiler log, which keeps its line breaks

    def __init__(self, what: str, *, got: str = "", expected: str = "", hint: str | tuple[str, ...] = "") -> None:
        """hint  what to do, as one line or several"""
        hints = (hint,) if isinstance(hint, str) else hint
        lines = shorten([got], MAX_MESSAGE)[0].split("\n") if self.log_lines else [got]
        texts = [printable(what), "\n".join(map(printable, lines)), printable(expected), *map(printable, hints)]
        labels = (2 + len(hints)) * len("\n  expected: ")
        self.what, self.got, self.expected, *shortened = shorten(texts, MAX_MESSAGE - labels)
        self.hint = shortened[0] if isinstance(hint, str) else tuple(shortened)
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
        """what needs the package; `extra` is the extra of onchip that installs it."""
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
