"""make sanitize: compute-sanitizer over the CUDA kernels. Needs a GPU, and compute-sanitizer in PATH or its wheel.

For each tool a kernel with a planted bug, which the tool must report, and kernels.py, which must be clean: in parts,
side by side, as many as there are cores.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
REPORTED = 99  # compute-sanitizer's exit code where it has reported something
SECONDS = 600  # a planted bug may hang
PARTS = min(8, os.cpu_count() or 1)  # of kernels.py


def find_sanitizer() -> str:
    """compute-sanitizer of a CUDA toolkit in PATH, or of the wheel nvidia-cuda-sanitizer-api."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec is not None else None
    wheels = [file for place in places or () for file in Path(place).glob("cu*/compute-sanitizer/compute-sanitizer")]
    found = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if not found and not wheels:
        sys.exit("compute-sanitizer is not here\n  try:      pip install nvidia-cuda-sanitizer-api, or a CUDA toolkit")
    return found or str(wheels[0])


def command(sanitizer: str, tool: str, *script: str) -> list[str]:
    # API errors are the runtime's to judge: bindings that look for a function of a newer driver fail, and go on.
    options = ["--error-exitcode", str(REPORTED), "--target-processes", "application-only"]
    options += ["--report-api-errors", "no"] if tool == "memcheck" else []
    return [sanitizer, "--tool", tool, *options, sys.executable, str(HERE / script[0]), *script[1:]]


def run(what: str, expected: int, words: list[str]) -> bool:
    """Whether the command ended with the expected code; its output where it did not."""
    start = time.perf_counter()
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS)
        code, output = str(done.returncode), done.stdout
    except subprocess.TimeoutExpired as late:
        code, output = f"nothing in {SECONDS} s", str(late.stdout or "")
    is_right = code == str(expected)
    print(f"{'ok  ' if is_right else 'FAIL'} {what} ({time.perf_counter() - start:.0f} s)", flush=True)
    if not is_right:
        print(f"expected exit code {expected}, got {code} of {' '.join(words)}\n{output[-8000:]}", flush=True)
    return is_right


def main() -> int:
    sanitizer, parts = find_sanitizer(), [f"{number}/{PARTS}" for number in range(1, PARTS + 1)]
    # Without a tool first: it fills the cache of compiled kernels, and what is wrong by itself needs no sanitizer.
    kernels = [sys.executable, str(HERE / "kernels.py"), "cuda"]
    first = [partial(run, f"no tool: kernels are right, part {part}", 0, [*kernels, part]) for part in parts]
    then: list[Callable[[], bool]] = []
    for tool in TOOLS:
        planted = command(sanitizer, tool, "planted.py", tool)
        then.append(partial(run, f"{tool}: reports the planted bug", REPORTED, planted))
        for part in parts:
            clean = command(sanitizer, tool, "kernels.py", "cuda", part)
            then.append(partial(run, f"{tool}: kernels are clean, part {part}", 0, clean))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        right = [*pool.map(lambda task: task(), first), *pool.map(lambda task: task(), then)]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
