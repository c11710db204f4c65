"""--without, and the flags that it replaces."""

import os
import subprocess
import sys

import pytest

from onchip.plan.kernel import OPTIONAL_REWRITES

COMMANDS = [["run", "decode", "--count", 4, "--device", "cpu"], ["plan", "faces", "--device", "h200"]]
RENAMED = "note: --no-merge --no-fold is now --without merge,fold\n"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_an_old_flag_does_the_same_and_prints_a_note(cli, command):
    old, new = cli(*command, "--no-merge", "--no-fold"), cli(*command, "--without", "merge,fold")
    assert (old.code, new.code) == (0, 0)
    assert old.err == RENAMED + new.err
    if command[0] == "plan":
        assert old.out == new.out != cli(*command).out


def test_only_rank_0_prints_the_note():
    for rank, notes in ("0", 1), ("1", 0):
        env = {**os.environ, "PMI_RANK": rank, "PMI_SIZE": "2"}
        code = "from onchip.cli.old_flags import replace_old_flags as new; print(new(['plan', 'm', '--no-early']))"
        ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert ran.stdout == "['plan', 'm', '--without=early']\n"
        assert ran.stderr.count("note: --no-early is now --without early") == notes


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_bad_name(cli, command):
    ran = cli(*command, "--without", "fold,marge")
    assert (ran.code, ran.out) == (2, "")
    expected = f"expected: {', '.join(OPTIONAL_REWRITES)}"
    for line in ("unknown rewrite", "got:      marge", expected, "try:      did you mean merge?"):
        assert line in ran.err
    assert "try:      --without fold,merge" in cli(*command, "--without", "").err


def test_help_has_the_rewrites_and_no_old_flag(cli):
    for command, *_ in COMMANDS:
        text = " ".join(cli(command, "--help").out.split())
        assert [name for name in OPTIONAL_REWRITES if f"{name} (" not in text] == []
        assert "--no-" not in text


def test_other_commands_have_no_old_flags(cli):
    ran = cli("train", "digits", "--no-fold")
    assert ran.code == 2
    assert "no such option: --no-fold" in ran.err


def test_a_value_after_two_hyphens_is_no_flag(cli):
    ran = cli("plan", "--device", "cpu", "--", "--no-fold")
    assert ran.code == 2
    assert "note:" not in ran.err
