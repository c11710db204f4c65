"""The command line: help, exit codes, and errors common to all commands."""

import errno
import functools
import os
import signal
import subprocess
import sys

import pytest

from onchip.cli.main import COMMANDS, main
from onchip.cli.output import StoppedError, progress, stopping
from onchip.errors import InputError, KernelError

ORDER = list(COMMANDS)


def test_help_lists_commands_in_order(cli):
    ran = cli("--help")
    assert ran.code == 0
    listed = ran.out[ran.out.index("Commands:") :].splitlines()[1:]
    assert [line.split()[0] for line in listed if line.startswith("  ") and line[2] != " "] == ORDER
    assert ran.out.index("onchip demo") < ran.out.index("onchip run") < ran.out.index("onchip plan")


@pytest.mark.parametrize("args", [[], ["-h"], ["help"]])
def test_help_has_several_names(cli, args):
    ran = cli(*args)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == cli("--help").out
    assert "\\n" not in ran.out


def test_help_fits_80_columns(cli):
    for command in ("", *ORDER):
        ran = cli(*["help", command][: 1 + bool(command)])
        assert ran.out.startswith(f"Usage: onchip {command}")
        assert max(map(len, ran.out.splitlines())) <= 80, command


def test_help_lists_all_names(cli):
    from onchip import workloads
    from onchip.cli.options import WORKLOADS
    from onchip.ladders import LADDERS
    from onchip.plan.device import KNOWN

    assert tuple(workloads.WORKLOADS) == WORKLOADS
    for command, names in (("ladder", LADDERS), ("plan", (*KNOWN, *WORKLOADS)), ("bench", ("decode", "product"))):
        told = cli(command, "--help").out
        assert [name for name in names if name not in told] == []


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("onchip la", ["ladder"]),
        ("onchip plan dec", ["decode"]),
        ("onchip plan decode --device rtx4", ["rtx4090", "rtx4060"]),
        ("onchip run models/ne", ["models/net.onnx", "models/nets/"]),
        ("onchip ladder s", ["scan", "sentiment"]),
    ],
)
def test_a_shell_completes_commands_and_names(tmp_path, typed, offered):
    (tmp_path / "models" / "nets").mkdir(parents=True)
    for name in ("net.onnx", "net.txt"):
        (tmp_path / "models" / name).touch()
    requested = {"_ONCHIP_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    command = [sys.executable, "-c", "import sys; from onchip.cli.main import main; sys.exit(main())"]
    ran = subprocess.run(
        command, env={**os.environ, **requested}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.stdout.split() == offered, ran.stderr


def test_version(cli):
    from onchip import __version__

    ran = cli("--version")
    assert (ran.code, ran.out) == (0, f"onchip {__version__}\n")


def test_help_loads_no_numpy():
    code = (
        "import sys; from onchip.cli.main import main; main(['--help']);"
        "heavy = ('numpy', 'numba', 'onnx', 'sklearn', 'matplotlib', 'torch');"
        "print(*(m for m in heavy if m in sys.modules), file=sys.stderr)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr == "\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nothing"], ["unknown command", "got:      nothing", "expected: demo, run", "try:      onchip -h"]),
        (["cahce"], ["unknown command", "try:      did you mean cache?"]),
        (
            ["run", "--nothing"],
            ["no such option: --nothing", "got:      onchip run --nothing"],
        ),
        (["run"], ["missing argument 'MODEL'", "expected: onchip run [OPTIONS]"]),
        (["run", "decode", "-o"], ["option '-o' requires an argument", "try:      onchip run -h"]),
        (["plan", "decode", "--batch", "many"], ["'--batch'", "got:      onchip plan decode --batch many"]),
        (
            ["cache", "--clear", "now"],
            ["onchip cache takes no such argument", "got:      now"],
        ),
    ],
)
def test_misuse_is_exit_2_and_shows_what_was_got(cli, args, words):
    ran = cli(*args)
    assert ran.code == 2
    assert ran.out == ""
    for word in words:
        assert word in ran.err
    assert "Traceback" not in ran.err


def failing(monkeypatch, error):
    def run(*args, **options):
        raise error

    monkeypatch.setattr("onchip.workloads.load", run)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (InputError("bad thing", got="x", expected="y", hint="z"), 2, ["bad thing", "got:      x", "try:      z"]),
        (KernelError("kernel broke"), 1, ["kernel broke"]),
        (MemoryError("Unable to allocate 9 TiB"), 2, ["out of memory", "9 TiB", "expected:", "try:"]),
        (OSError(errno.ENOSPC, "No space left on device"), 2, ["No space left", "expected:", "free some space"]),
        (PermissionError(errno.EACCES, "Permission denied", "f"), 2, ["f", "Permission denied", "expected:", "try:"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_errors_are_printed_once_without_traceback(cli, monkeypatch, error, code, words):
    failing(monkeypatch, error)
    ran = cli("plan", "decode")
    assert ran.code == code
    assert ran.out == ""
    assert "Traceback" not in ran.err
    for word in words:
        assert word in ran.err


def test_a_bug_keeps_its_traceback(cli, monkeypatch):
    failing(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        cli("plan", "decode")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["onchip.cli.main.build_app", "onchip.workloads.load"])
def test_stopped_anywhere(cli, monkeypatch, number, where):
    """Before the command begins and while it runs; afterwards the previous handlers are restored."""
    before = signal.getsignal(number)
    stop = functools.partial(signal.raise_signal, number)
    monkeypatch.setattr(where, lambda *args, **options: stop())
    ran = cli("plan", "decode")
    assert (ran.code, ran.out, ran.err) == (2, "", "stopped: no file is half-written\n")
    assert signal.getsignal(number) == before


def test_an_ignored_signal_stays_ignored(cli, monkeypatch):
    from onchip.workloads import load

    def interrupted(model, **options):
        signal.raise_signal(signal.SIGINT)
        return load(model, **options)

    monkeypatch.setattr("onchip.workloads.load", interrupted)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert cli("plan", "decode").code == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_closed_pipe_is_quiet(spawn):
    reader, writer = os.pipe()
    process = spawn("plan", "decode", "--device", "h200", stdout=writer)
    os.close(reader)
    os.close(writer)
    _, err = process.communicate()
    assert err == ""
    assert process.returncode == 1


def test_python_m_onchip(spawn):
    out, err = spawn("plan", "decode", "--device", "h200").communicate()
    assert out.startswith("decode on NVIDIA H200")
    assert err == ""


def test_a_stop_that_python_dropped_is_heard_at_the_next_progress():
    stopping.set()
    try:
        with pytest.raises(StoppedError), progress("work", 1.0) as update:
            update(0.5, "half")
    finally:
        stopping.clear()


def test_an_error_that_follows_from_a_stop_is_the_stop(monkeypatch, capsys):
    def cut_short(**options):
        stopping.set()  # like the handler, when Python drops its exception
        raise RuntimeError("no compiled object yet")

    monkeypatch.setattr("onchip.cli.main.build_app", lambda only: cut_short)
    assert main([]) == 2
    assert capsys.readouterr().err == "stopped: no file is half-written\n"


def test_messages_are_bounded_and_escaped(cli, tmp_path):
    ran = cli("plan", "decode", "x\x1b[31m" + "a" * 9000)
    assert ran.code == 2
    assert len(ran.err) < 2000
    assert "\x1b" not in ran.err
    target = tmp_path / "a\x1b[31mb.npy"
    ran = cli("run", "decode", "--count", 3, "--device", "cpu", "-o", target)
    assert ran.code == 0, ran.err
    assert target.exists()
    assert "\x1b" not in ran.err
    assert "\\x1b[31mb.npy" in ran.err
