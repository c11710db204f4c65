"""Errors of the option parser in the form of every other error: got, expected, try."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from onchip.errors import InputError

_EXTRA = re.compile(r"(?s)Got unexpected extra argument\S* \((.*)\)")


def misuse(error: Any, args: Sequence[str], commands: Sequence[str]) -> InputError:
    """error: the parser's, whose class depends on its version. args: the command line after `onchip`."""
    command = args[0] if args and args[0] in commands else ""
    context, got = error.ctx, shlex.join(["onchip", *args])
    expected = " ".join(context.get_usage().removeprefix("Usage: ").split()) if context is not None else ""
    what, hint = error.format_message().rstrip("."), f"onchip {command} -h" if command else "onchip -h"
    if extra := _EXTRA.fullmatch(what):
        what, got = f"onchip {command} takes no such argument", extra[1]
    elif not command and args and not args[0].startswith("-"):
        from onchip.network.names import did_you_mean

        what, got, expected = "unknown command", args[0], ", ".join(commands)
        hint = did_you_mean(args[0], commands) or hint
    return InputError(what[0].lower() + what[1:], got=got, expected=expected, hint=hint)
