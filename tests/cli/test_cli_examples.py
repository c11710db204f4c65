"""Every --help opens with one line and an example; the examples work."""

import re
import shlex
import subprocess
import sys

import pytest

from onchip.cli.main import COMMANDS

FASTER = {"demo": ["--epochs", "2", "--rows", "500"]}  # the same command with less work


def example_lines(help_text: str) -> list[str]:
    lines = help_text.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.strip() == "Example:") + 1
    found = []
    for line in lines[begin:]:
        if not line.strip():
            break
        found.append(line.strip())
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_help_opens_with_a_line_and_an_example(cli, command):
    ran = cli(command, "--help")
    assert ran.code == 0
    usage, _, first, _, example, *_ = ran.out.splitlines()
    assert usage.startswith(f"Usage: onchip {command}")
    assert re.fullmatch(r"  [A-Z].*\.", first)
    assert example == "  Example:"
    assert any(line.startswith(f"onchip {command}") for line in example_lines(ran.out))


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "data"])  # needs internet
def test_the_example_works(cli, command, tmp_path):
    for line in example_lines(cli(command, "--help").out):
        program, *args = shlex.split(line)
        if program == "python":
            subprocess.run([sys.executable, *args], check=True, cwd=tmp_path)
            continue
        assert program == "onchip"
        ran = cli(*args, *FASTER.get(command, []))
        assert ran.code == 0, ran.err
        assert "--quick" not in args or not (tmp_path / "benchmarks").exists()
        assert "-o" not in args or (tmp_path / args[args.index("-o") + 1]).is_file()
