"""make test-bounds: tests with the oldest and with the newest packages that pyproject.toml admits.

    python tests/bounds.py tests/cli tests/runtime/test_engine.py

Each end has an environment and a cache of its own, in a temporary folder. Needs a package index, and for the oldest
packages a Python that they have wheels for: 3.11.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXTRAS = ("sklearn", "cuda")  # torch is not small
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "onnxruntime")


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(each for extra in EXTRAS for each in project["optional-dependencies"][extra])]


def oldest(requirement: str) -> str:
    """numba==0.61.* for numba>=0.61,<0.69: not every package has a release without a third number."""
    return re.sub(r">=([\w.]+).*", r"==\1.*", requirement)


def run_tests(wanted: Sequence[str], tests: Sequence[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-e", ROOT, *wanted, *TOOLS], check=True)
        subprocess.run([python, "-m", "pip", "list"], check=True)
        env = {**os.environ, "ONCHIP_CACHE": f"{folder}/cache"}
        return subprocess.run([python, "-m", "pytest", "-q", *tests], cwd=ROOT, env=env, check=False).returncode == 0


def main(tests: Sequence[str]) -> int:
    newest = requirements()
    passed = {name: run_tests(wanted, tests) for name, wanted in
              (("oldest", list(map(oldest, newest))), ("newest", newest))}  # fmt: skip
    print(", ".join(f"{name}: {'passed' if ok else 'FAILED'}" for name, ok in passed.items()))
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
