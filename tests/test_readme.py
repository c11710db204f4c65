"""The first block of the README, typed as it stands: in a copy of the project, with nothing installed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILT_FROM = ("src", "pyproject.toml", "README.md", "LICENSE", "NOTICE")


@pytest.fixture
def bare(tmp_path):
    """run(line): a line for a shell where python3 is this Python without its packages; skipped without an index."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(os.path.realpath(sys.executable))
    for name in BUILT_FROM:
        path, copy = ROOT / name, tmp_path / "project" / name
        copy.parent.mkdir(exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(path, copy)
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "ONCHIP_DATA")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env |= {"PATH": f"{tmp_path / 'bin'}:{env['PATH']}", "PIP_NO_COMPILE": "1"}  # bytecode of all modules takes long

    def run(script):
        return subprocess.run(
            ["bash", "-ec", script], cwd=tmp_path / "project", env=env, capture_output=True, text=True, check=False
        )

    index = run(f"python3 -m pip download --quiet --no-deps --dest {tmp_path / 'index'} typing_extensions")
    if index.returncode:
        pytest.skip(f"no package index to install from: {index.stderr.strip()[-200:]}")
    return run


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_first_block_works_in_a_bare_environment(bare):
    block = re.search(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = block[1].splitlines()  # without a prompt: they can be pasted
    assert any(line.startswith("pip install") for line in lines)
    ran = bare(
        "\n".join([*lines, "find .venv -path '*/onchip/*.cu*' -printf '%P\\n' | sed 's#.*/onchip/##'", "which onchip"])
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert re.search(r"^accuracy 9\d\.\d\d% on 360 test images$", ran.stdout, re.MULTILINE), ran.stdout
    assert ran.stdout.endswith("/project/.venv/bin/onchip\n")
    package = ROOT / "src" / "onchip"
    kernels = {str(path.relative_to(package)) for path in package.rglob("*.cu*") if path.suffix in (".cu", ".cuh")}
    assert kernels <= set(ran.stdout.splitlines()), "the wheel holds every CUDA file"
