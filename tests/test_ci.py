"""What continuous integration runs: both the checks and the tests, and it fails if one of them does."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

MAKE = """#!/bin/sh
echo "$*" >> "$CALLS"
case " $FAILING " in *" $1 "*) exit 2 ;; esac
"""


@pytest.mark.parametrize("failing", ["", "check", "test", "check test"])
def test_the_checks_and_the_tests_run_and_one_that_fails_fails_all(tmp_path, failing):
    (tmp_path / "project" / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", tmp_path / "project" / ".ci" / "run")
    (tmp_path / "make").write_text(MAKE)
    (tmp_path / "make").chmod(0o755)
    calls = tmp_path / "calls"
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls), "FAILING": failing}
    ran = subprocess.run([tmp_path / "project" / ".ci" / "run"], env=env, check=False)
    assert calls.read_text().split() == ["check", "test"]
    assert (ran.returncode != 0) == bool(failing)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_what_make_check_runs():
    """Dry: the commands are printed, not run."""
    told = subprocess.run(["make", "-n", "check"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for command in ("ruff check", "ruff format --check", "mypy", "python -m pytest -q tests/test_architecture.py"):
        assert f"bin/{command}\n" in told, told
    assert "kernel_check onchip.kernels.cuda onchip.ladders" in told


def test_the_tools_of_the_checks_are_pinned():
    """Another version of a formatter formats otherwise: the same commit would pass on one day and fail on the next."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    tools = [tool for tool in extras["dev"] if not tool.startswith("onchip[")]
    assert {re.split(r"\W", tool)[0] for tool in tools} == {"mypy", "ruff"}
    for tool in tools:
        assert re.fullmatch(r"\w+==[\d.]+", tool), tool
