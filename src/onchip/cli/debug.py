"""--debug of the commands: an error on a GPU names the kernel that failed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from onchip.cli.output import print_message
from onchip.errors import InputError

Debug = Annotated[bool, Option("--debug", help="On a GPU: wait after each kernel and name the one that fails.")]


def check_launches(debug: bool) -> None:
    """With --debug, check every launch of this process."""
    if debug:
        from onchip.runtime.cuda.checked_launches import check_every_launch

        check_every_launch()


def check_no_results(debug: bool, **files: Path | None) -> None:
    """Raise InputError if times measured with --debug are to be written to a file.

    files  by option name
    """
    for name, path in files.items():
        if debug and path is not None:
            got, hint = f"--debug and --{name} {path}", f"omit --{name}, or --debug"
            raise InputError("--debug writes no times to a file", got=got, expected="one of them", hint=hint)


def warn_of_times(debug: bool) -> None:
    if debug:
        print_message("--debug: the times are not meaningful, on a GPU it waits after each kernel")
