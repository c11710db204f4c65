"""Trainings on a GPU, each several times over: every run must have the bits of the first.

`python tests/repeated_training.py [--repetitions 20] [--every 1]` runs every training kernel with every optimiser, last
batches of 1, 3 and B - 1 rows and every precision, and prints the cases whose runs differ. In each run the GPU memory
that it takes, and before it the shared memory of the SMs, are filled with another byte.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import itertools
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest

from onchip.errors import PlanError
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import LaunchConfig, Program
from onchip.network.build import mlp
from onchip.runtime.cuda.gpu import Buffer, Gpu
from onchip.train.loop import fit
from onchip.train.training_run import FitResult
from training_cases import WAYS, pixels

WIDTHS = (50, 33, 17, 3)  # rows of weights that end within a vector of four, next to their bias
OPTIMISERS = {
    "sgd": {"lr": 0.02}, "momentum": {"lr": 0.02, "momentum": 0.9}, "adam": {"optimiser": "adam", "lr": 0.003},
    "adamw": {"optimiser": "adamw", "lr": 0.003, "weight_decay": 0.1},
}  # fmt: skip
FILLS = (0x00, 0xFF, 0x7F)


@dataclass(frozen=True)
class Case:
    way: str  # of WAYS
    optimiser: str  # of OPTIMISERS
    precision: str
    batch: int
    last: int  # rows of the last batch

    def run(self, epochs: int = 3) -> FitResult:
        n = 30 * self.batch + self.last
        x = pixels(n, WIDTHS[0])
        if self.way in ("launches", "resident"):  # the others take rows of bytes alone
            x = np.random.default_rng(0).standard_normal((n, WIDTHS[0]), dtype=np.float32)
        y = np.random.default_rng(1).integers(0, WIDTHS[-1], n)
        how = {"batch_size": self.batch, "epochs": epochs, "seed": 4, "precision": self.precision}
        return fit(mlp(*WIDTHS, seed=1), x, y, device="cuda", **how, **OPTIMISERS[self.optimiser])


CASES = tuple(
    Case(way, optimiser, precision, batch, last)
    for way, optimiser, precision, batch in itertools.product(
        [way for way in WAYS if way != "as planned"], OPTIMISERS, PRECISIONS, (7, 40)
    )
    for last in (1, 3, batch - 1)
)


def fill_memory(patch: pytest.MonkeyPatch, gpu: Gpu, byte: int) -> None:
    """Memory that is taken from now on holds this byte, and so does the shared memory of every SM.

    Freed memory that was filled does not do: the driver may clear it, or hand out other pages.
    """
    device, reserve, allocate = gpu.device, Gpu.reserve, Gpu.allocate

    def fill(buffer: Buffer, stream: int) -> Buffer:
        with gpu:
            gpu.driver.cuMemsetD8Async(buffer.pointer, byte, buffer.nbytes, stream)
            gpu.synchronise(stream)
        return buffer

    def allocate_filled(self: Gpu, nbytes: int, stream: int | None = None, row_bytes: int = 0) -> Buffer:
        return fill(allocate(self, nbytes, stream, row_bytes), self.stream if stream is None else stream)

    patch.setattr(Gpu, "allocate", allocate_filled)
    patch.setattr(Gpu, "reserve", lambda self, *given: fill(reserve(self, *given), self.stream))
    function = gpu.load(Program(Path(__file__).parent / "fill_shared.cu", "fill_shared"), device.fast_bytes)
    config = LaunchConfig((2 * device.units, 1, 1), (512, 1, 1), device.fast_bytes)
    with gpu:
        gpu.launch(function, config, [ctypes.c_uint(byte * 0x01010101), ctypes.c_int(device.fast_bytes // 4)])
        gpu.synchronise()


def digest(result: FitResult) -> str:
    """Of all that a run ends with: losses, weights, optimiser state."""
    arrays = [result.losses, *result.network.weights.values(), *result.state.values()]
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()


def judge_case(case: Case, repetitions: int) -> str:
    """ "" if all runs have the same bits; "refused" if the kernel does not take the case; else what differs."""
    with pytest.MonkeyPatch.context() as patch:
        WAYS[case.way](patch)
        try:
            first = case.run()  # compiles, too
        except PlanError:
            return "refused"
        gpu, differ = Gpu.get(0), 0
        for i in range(repetitions):
            with patch.context() as filled:
                fill_memory(filled, gpu, FILLS[i % len(FILLS)])
                differ += digest(case.run()) != digest(first)
    return f"{case}: {differ} of {repetitions} runs differ from the first" if differ else ""


def judge_all(cases: Sequence[Case], repetitions: int) -> list[str]:
    """In processes: compiling is most of it."""
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(judge_case, cases, repeat(repetitions), chunksize=3))


def main() -> None:
    parser = argparse.ArgumentParser(description="Trainings whose runs differ.")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--every", type=int, default=1, help="take every so many-th case")
    args = parser.parse_args()
    verdicts = judge_all(CASES[:: args.every], args.repetitions)
    wrong = [verdict for verdict in verdicts if verdict not in ("", "refused")]
    refused = verdicts.count("refused")
    print(
        "\n".join(
            [*wrong, f"{len(verdicts)} cases, {args.repetitions} runs each: {len(wrong)} differ, {refused} refused"]
        )
    )
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
