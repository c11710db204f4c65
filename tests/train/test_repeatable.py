"""Training on a GPU has the same bits every time, whatever its memory contained before."""

from __future__ import annotations

import numpy as np
import pytest

from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.runtime.cuda.gpu import Gpu
from repeated_training import CASES, FILLS, OPTIMISERS, Case, fill_memory, judge_case
from training_cases import WAYS

# All combinations take minutes: tests/repeated_training.py. Here: every kernel, with every optimiser.
SAMPLE = [
    Case(way, optimiser, list(PRECISIONS)[i % len(PRECISIONS)], (7, 40)[(i + j) % 2], (1, 3, 6)[(i + j) % 3])
    for i, way in enumerate(way for way in WAYS if way != "as planned")
    for j, optimiser in enumerate(OPTIMISERS)
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*SAMPLE, Case("resident", "adam", "fp16", 7, 3)], ids=str)
def test_runs_have_the_same_bits_whatever_memory_contains(case):
    verdict = judge_case(case, repetitions=3)
    if verdict == "refused":
        pytest.skip(f"{case.way} does not take it")
    assert not verdict


@pytest.mark.gpu
@pytest.mark.parametrize("byte", FILLS)
def test_allocated_memory_is_filled(byte, monkeypatch):
    gpu = Gpu.get(0)
    fill_memory(monkeypatch, gpu, byte)
    for take in (gpu.reserve, gpu.allocate):
        assert np.all(gpu.download(take(5000), np.empty(5000, np.uint8)) == byte)


def test_every_kernel_optimiser_precision_and_last_batch_is_a_case():
    assert {case.way for case in CASES} == {*WAYS} - {"as planned"}
    assert {case.last for case in CASES} == {1, 3, 6, 39}
    assert len(CASES) == len(set(CASES)) == (len(WAYS) - 1) * len(OPTIMISERS) * len(PRECISIONS) * 2 * 3
