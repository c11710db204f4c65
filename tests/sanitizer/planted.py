"""python tests/sanitizer/planted.py TOOL: launch the kernel of TOOL.cu, which has the bug that the tool must report.

It ends with 0 whatever becomes of the kernel: a tool that destroys the context is a tool that has seen the bug, and
the exit code is the tool's to set.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from onchip.errors import KernelError
from onchip.kernels.cuda.common.program import LaunchConfig, Program
from onchip.runtime.cuda.gpu import Gpu

THREADS = 64


def program(tool: str) -> Program:
    return Program(Path(__file__).with_name(f"{tool}.cu"), "planted")


def main(tool: str) -> None:
    gpu = Gpu.get()
    nothing = np.zeros(THREADS, np.float32)
    x = gpu.allocate(nothing.nbytes) if tool == "initcheck" else gpu.upload(nothing)
    try:
        gpu.launch(gpu.load(program(tool)), LaunchConfig((1, 1, 1), (THREADS, 1, 1), 0), [x.pointer])
        gpu.synchronise()
    except KernelError as error:
        print(f"the kernel ended with: {error}")


if __name__ == "__main__":
    main(sys.argv[1])
