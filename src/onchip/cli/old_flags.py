"""Flags of earlier versions, replaced by the options of this one."""

from __future__ import annotations

from collections.abc import Sequence

from onchip.cli.output import print_message
from onchip.runtime.distributed.launchers import launched_as

_COMMANDS = ("run", "plan")
_REPLACED = {f"--no-{name}": name for name in ("fold", "merge", "windows", "phases", "early")}


def replace_old_flags(args: Sequence[str]) -> list[str]:
    """["run", "m.onnx", "--no-fold"] -> ["run", "m.onnx", "--without=fold"], with a note.

    args  the command line after `onchip`
    """
    end = args.index("--") if "--" in args else len(args)
    options, values = list(args[:end]), list(args[end:])
    names = list(dict.fromkeys(_REPLACED[option] for option in options if option in _REPLACED))
    if not names or args[0] not in _COMMANDS:
        return list(args)
    rank, _ = launched_as() or (0, 1)
    if rank == 0:
        old = " ".join(f"--no-{name}" for name in names)
        print_message(f"note: {old} is now --without {','.join(names)}")
    return [f"--without={_REPLACED[option]}" if option in _REPLACED else option for option in options] + values
