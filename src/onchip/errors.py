"""What onchip raises. Everyone may import this file; it imports nothing.

OnchipError
├── InputError      what came in is wrong: file, shape, dtype, name, option      (exit code 2)
│   ├── FormatError a file is missing, truncated, garbage or not supported
│   └── ShapeError  shapes or dtypes do not fit together; names the layer
├── DeviceError     the device asked for is not there or cannot do it            (exit code 2)
├── OutputError     an output cannot be written: no folder, no right, full disk  (exit code 2)
├── PlanError       no kernel can run the network as asked                       (exit code 2)
└── KernelError     a kernel failed to compile or to run                         (exit code 1)
"""

from __future__ import annotations


class OnchipError(Exception):
    """Says what was got, what was expected and what to do, a line each where they are known."""

    exit_code = 1

    def __init__(self, what: str, *, got: str = "", expected: str = "", hint: str = "") -> None:
        lines = [what]
        for label, text in (("got", got), ("expected", expected), ("try", hint)):
            if text:
                lines.append(f"  {label + ':':<10}{text}")
        super().__init__("\n".join(lines))
        self.what, self.got, self.expected, self.hint = what, got, expected, hint


class InputError(OnchipError, ValueError):
    exit_code = 2


class FormatError(InputError):
    pass


class ShapeError(InputError):
    pass


class DeviceError(OnchipError):
    exit_code = 2


class OutputError(OnchipError):
    exit_code = 2


class PlanError(OnchipError):
    exit_code = 2


class KernelError(OnchipError):
    pass
