"""Option values equal to Typer's, without Typer's imports."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from onchip.cli.main import COMMANDS, build_app

VALUES = [None, "", "7", "-7", "2.5", "1e-3", "inf", "1_0", " 7", "x", "a/b.npy", "٣", 3, 0.5, Path("x"), (), ["a"]]


def outcome(process, context, value, kind):
    """The value with its type, or the kind of error."""
    with contextlib.suppress(typer.Exit):
        try:
            got = process(context, value)
        except Exception as error:
            return type(error).__name__, str(error)
        if kind is Path and isinstance(got, str):  # Typer before 0.29 converts it later
            got = Path(got)
        return type(got).__name__, str(got)
    return "exit"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_converted_as_typer_does_it(name):
    command = get_command(build_app(name)).commands[name]
    context = typer.Context(command)
    for parameter in command.get_params(context):
        if parameter.name == "help":  # it would print
            continue
        for value in VALUES:
            kind = parameter.process_value.kind
            quick = outcome(parameter.process_value, context, value, kind)
            assert quick == outcome(parameter.process_value.slow, context, value, kind), (parameter.name, value)


def test_a_command_loads_itself_and_no_pydantic():
    code = (
        "import sys; from onchip.cli.main import main\n"
        "main(['plan', 'decode', '--device', 'h200', '--batch', '64'])\n"
        "print([m for m in ('pydantic', 'rich', 'onchip.cli.run', 'onchip.cli.train') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


def test_a_wrong_value_is_still_reported(capfd):
    from onchip.cli.main import main

    assert main(["plan", "decode", "--batch", "many"]) == 2
    assert "--batch" in capfd.readouterr().err
