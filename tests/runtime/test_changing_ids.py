"""Ids that another thread changes while they are looked up: an error or the right answer, never a read outside."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import raced_ids
from onchip.kernels import cpu
from onchip.plan.kernel import Job
from onchip.runtime.cpu.backend import CpuBackend
from onchip.runtime.engine import Engine, compile
from onchip.runtime.placement import place
from raced_ids import WAYS, good_ids, text_network


class Meddling:
    """A kernel that overwrites the caller's arrays before each launch, as another thread may at any time."""

    def __init__(self, kernel, arrays):
        self.kernel, self.name, self.arrays = kernel, kernel.name, arrays

    def bind(self, claim, weights):
        launch = self.kernel.bind(claim, weights)

        def run(*arguments):
            for array in self.arrays:
                array[...] = 0  # a valid id: a wrong result if ids are read again, but no fault
            launch(*arguments)

        return run


@pytest.mark.parametrize("way", WAYS)
def test_ids_are_looked_up_as_they_were_checked(way, monkeypatch):
    net, without, ids = text_network(way), WAYS[way][2], good_ids(way, 40)
    truth = compile(net, "cpu", batch_hint=10**9, without=without)(ids)
    plan, _, chosen = place(net, "cpu", Job(batch=10**9, without=without), None)
    arrays = []
    monkeypatch.setattr(cpu, "INFERENCE", [Meddling(kernel, arrays) for kernel in cpu.INFERENCE])
    engine = Engine(plan, CpuBackend(1), chosen)
    out = tuple(np.empty_like(y) for y in truth)
    # Layers that compute ids read the caller's array; the computed ids are checked and looked up.
    arrays += [out[1]] if way == "computed" else [ids, out[1]]
    for got, expected in zip(engine(ids, out=out), truth, strict=True):
        assert np.array_equal(got, expected)


def test_a_thread_that_writes_to_ids_makes_no_call_fail_but_by_an_error():
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(raced_ids.__file__)
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, env=here, check=False)
    assert ran.returncode == 0, f"exit code {ran.returncode}\n{ran.stdout}{ran.stderr}"
    assert len(ran.stdout.splitlines()) == len(WAYS)
