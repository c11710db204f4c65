"""onchip: the command line. One file per command; errors common to all commands are caught here.

Exit codes: 0 done; 1 the work failed, or stdout is closed; 2 misuse, bad input, out of memory or disk space, stopped.
"""

from __future__ import annotations

import sys

from onchip.cli.stop import Stoppable, StoppedError, stopping
from onchip.cli.streams import StdoutError, open_streams
from onchip.errors import OnchipError

# No slow imports here, not even typing: until main runs, signals have Python's default handlers.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    import typer

COMMANDS = (
    "demo",
    "run",
    "train",
    "info",
    "plan",
    "profile",
    "scan",
    "check",
    "bench",
    "ladder",
    "report",
    "data",
    "devices",
    "cache",
)
STOPPED = "stopped: no file is half-written"

HELP = """Small neural networks at the speed of the chip.

\b
First steps:
  onchip demo                          train, save, load, run, time a network
  onchip run net.onnx x.npy -o y.npy   run a network on the rows of a file
  onchip run faces --count 64 -o a.png generate 64 images
  onchip train digits -o digits.onnx   train a new network
  onchip plan decode --device h200     what would run, and why; needs no GPU
  onchip profile faces 64              where the time goes, kernel by kernel
  onchip scan x.npy -o sums.npy        prefix sums of the values in a file
  onchip report results                one page of benchmarks and ladders

Every command has an example in its --help, or in onchip help COMMAND. Data goes to stdout, messages to stderr; --json
prints one JSON document.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code.

    Without `argv`, read the command line and own the process's streams and signal handlers.
    """
    try:
        with Stoppable(is_program=argv is None):
            return _run(argv)
    except OnchipError as error:
        return _fail(str(error), error.exit_code)
    except StoppedError:
        return _stopped()
    except MemoryError as error:
        return _fail(str(_no_memory(error)), 2)
    except StdoutError as error:
        return _no_stdout(error)
    except OSError as error:
        return _fail(str(_system_error(error)), 2)


def _run(argv: Sequence[str] | None) -> int:
    if argv is None:
        open_streams()
        _collect_rarely()
    try:
        code = _dispatch(argv)
    except Exception:
        if stopping.is_set():  # a library may raise its own error when the stop interrupts a call
            raise StoppedError from None
        raise
    sys.stdout.flush()
    return code


def _collect_rarely() -> None:
    """Tune the garbage collector for objects that live until exit.

    Collecting every 700 allocations costs a tenth of the start-up time; freeing all objects at exit costs a third of a
    second.
    """
    import atexit
    import gc

    gc.set_threshold(100_000)
    atexit.register(gc.freeze)  # registered first, so called last


def build_app(only: str = "") -> typer.Typer:
    """The app with every command, in help order, or with one. Does not import NumPy, so --help is quick."""
    import importlib

    import typer

    from onchip.cli.values import Command, Group

    # Plain help: examples stay on one line and can be copied.
    app = typer.Typer(
        cls=Group, rich_markup_mode=None, pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip

    @app.callback(help=HELP)
    def options(
        version: bool = typer.Option(
            False, "--version", help="Show the version and exit.", is_eager=True, callback=_show_version
        ),
    ) -> None:
        pass

    for name in (only,) if only else COMMANDS:
        command = getattr(importlib.import_module(f"onchip.cli.{name}"), name)
        app.command(name, cls=Command)(command)
    return app


def _dispatch(argv: Sequence[str] | None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] in ([], ["help"]):
        args = [*args[1:], "--help"]
    from onchip.cli.old_flags import replace_old_flags

    current = replace_old_flags(args)
    try:
        only = args[0] if args[0] in COMMANDS else ""  # load only this command
        code = build_app(only)(args=current, prog_name="onchip", standalone_mode=False, obj=current)
    except Exception as error:
        if not hasattr(error, "show"):  # only option parser errors have it; their class depends on the version
            raise
        from onchip.cli.misuse import misuse

        raise misuse(error, args, COMMANDS) from None
    return code if isinstance(code, int) else 0


def _show_version(requested: bool) -> None:
    if requested:
        import typer

        from onchip import __version__

        typer.echo(f"onchip {__version__}")
        raise typer.Exit


def _fail(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


def _stopped() -> int:
    from os import environ

    # The process that started this rank by `--ranks` stops it and prints the message.
    return 2 if "ONCHIP_SUPERVISOR" in environ else _fail(STOPPED, 2)


def _no_stdout(error: StdoutError) -> int:
    import errno

    if error.errno == errno.EPIPE:  # the reader (head, less) closed the pipe
        return 1
    return _fail(f"cannot write to standard output: {error.strerror}", 1)


def _no_memory(error: MemoryError) -> OnchipError:
    return OnchipError(
        "out of memory", got=str(error) or "an allocation that failed", expected="enough free memory",
        hint="fewer rows at a time (--batch), or a machine with more memory",
    )  # fmt: skip


def _system_error(error: OSError) -> OnchipError:
    import errno

    where = f" {error.filename}" if error.filename else ""
    hint = "check that the file or folder exists and its permissions"
    if error.errno == errno.ENOSPC:
        hint = "free some space, or choose a folder on another disk"
    got = error.strerror or str(error)
    return OnchipError(f"the system refused{where}", got=got, expected="files that can be read and written", hint=hint)
