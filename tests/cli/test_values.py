"""Values of options: converted to their types, and no pydantic is loaded for them."""

import subprocess
import sys
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin, get_type_hints

import pytest
import typer
from typer.main import get_command

from onchip.cli.main import COMMANDS, build_app

GIVEN = {str: "a b", Path: "a/b.npy", int: "-7", float: "2.5e-3", bool: True}


def plain_type(hint):
    """`str | None` -> str, `list[str] | None` -> list[str]."""
    return next((kind for kind in get_args(hint) if kind is not type(None)), hint) if type(hint) is UnionType else hint


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_converted_to_its_type(name):
    command = get_command(build_app(name)).commands[name]
    context, hints = typer.Context(command), get_type_hints(command.callback)
    for parameter in command.get_params(context):
        if parameter.name == "help":  # it would print
            continue
        kind = plain_type(hints[parameter.name])
        if get_origin(kind) is list:
            (each,) = get_args(kind)  # Typer before 0.29 converts paths later
            assert list(map(each, parameter.process_value(context, ["a", "b,c"]))) == [each("a"), each("b,c")]
        elif get_origin(kind) is tuple:
            kinds = get_args(kind)
            assert parameter.process_value(context, tuple(GIVEN[each] for each in kinds)) == tuple(
                each(GIVEN[each]) for each in kinds
            )
        else:
            value = parameter.process_value(context, GIVEN[kind])
            if kind is Path:  # Typer before 0.29 converts it later
                value = Path(value)
            assert (type(value), str(value)) == (type(kind(GIVEN[kind])), str(kind(GIVEN[kind]))), parameter.name


@pytest.mark.parametrize("args", [["--batch", "64"], ["--without", "fold,merge", "--json"]], ids=str)
def test_a_command_loads_itself_and_no_pydantic(args):
    code = (
        "import sys; from onchip.cli.main import main\n"
        f"main(['plan', 'decode', '--device', 'cpu', *{args}])\n"
        "print([m for m in ('pydantic', 'rich', 'onchip.cli.run', 'onchip.cli.train') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["plan", "decode", "--batch", "many"], "invalid value for '--batch': 'many' is not a valid int"),
        (["plan", "decode", "--batch", "2.5"], "invalid value for '--batch': '2.5' is not a valid int"),
        (["run", "decode", "--scale", "x"], "invalid value for '--scale': 'x' is not a valid float"),
    ],
)
def test_a_wrong_value_is_reported(cli, args, what):
    ran = cli(*args)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(what)


def test_commands_receive_paths(cli):
    """With every Typer that pyproject.toml allows."""
    for command in (["run", "decode", "--count", "1"], ["train", "digits", "--data", "sklearn"]):
        ran = cli(*command, "-o", "y.nothing")
        assert ran.code == 2
        assert "y.nothing" in ran.err
