"""permute on a GPU: the host's side of permute.cu, for weights that recipes rearrange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from onchip.kernels.cuda.program import (
    EVERY_CHIP,
    NUMBERS,
    Argument,
    Budget,
    Instance,
    Int64,
    KernelLaunch,
    LaunchConfig,
    Program,
)

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP
THREADS, BLOCKS_A_UNIT, MOST_AXES = 256, 8, 4


def permute(
    dtypes: tuple[str, str], shape: Sequence[int], axes: Sequence[int], units: int, x: Argument, y: Argument
) -> KernelLaunch:
    """x of this shape, row-major, with its axes in another order, as np.transpose takes it."""
    sizes, strides = merged_axes(shape, axes)
    assert len(sizes) <= MOST_AXES, f"{len(sizes)} axes of {tuple(shape)} move apart, at most {MOST_AXES} can"
    missing = MOST_AXES - len(sizes)
    sizes, strides = [*(1,) * missing, *sizes], [*(0,) * missing, *strides]
    count = math.prod(shape)
    blocks = max(1, min(-(-count // THREADS), units * BLOCKS_A_UNIT))
    program = Program(SOURCE, f"permute<{', '.join(NUMBERS[dtype] for dtype in dtypes)}>")
    arguments = (x, y, *map(Int64, (count, *sizes[1:], *strides)))
    return KernelLaunch(program, LaunchConfig((blocks, 1, 1), (THREADS, 1, 1), 0), arguments, Budget(registers=64))


def merged_axes(shape: Sequence[int], axes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Sizes of the result and how far apart each axis' numbers lie in x; axes that stay together are one."""
    strides = list(accumulate(reversed(shape), int.__mul__, initial=1))[-2::-1]
    sizes: list[int] = []
    steps: list[int] = []
    for axis in axes:
        if sizes and steps[-1] == strides[axis] * shape[axis]:
            sizes[-1] *= shape[axis]
            steps[-1] = strides[axis]
        elif shape[axis] != 1:
            sizes.append(shape[axis])
            steps.append(strides[axis])
    return sizes, steps


def _instance(name: str, dtypes: tuple[str, str]) -> Instance:
    return Instance(name, lambda device: permute(dtypes, (512, 64, 9), (2, 0, 1), device.units, Int64(0), Int64(0)))


INSTANCES = (_instance("as it is", ("float32", "float32")), _instance("from half precision", ("bfloat16", "float32")))
