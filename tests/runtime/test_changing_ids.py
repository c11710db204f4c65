"""Ids that another thread changes while they are looked up: an error or the right answer, never a read outside."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import raced_ids
from onchip.plan.kernel import Job
from onchip.runtime.cpu.backend import CpuBackend
from onchip.runtime.engine import Engine, compile
from onchip.runtime.placement import place
from raced_ids import WAYS, good_ids, text_network


class MeddlingBackend(CpuBackend):
    """Overwrites the caller's arrays before each launch, as another thread may at any time."""

    def __init__(self):
        super().__init__(threads=1)
        self.arrays = []

    def bind(self, plan, debug=False):
        def meddled(launch):
            def run(*arguments):
                for array in self.arrays:
                    array[...] = 0  # an id that is there: a wrong answer, where ids are read again, and no fault
                launch(*arguments)

            return run

        bound = super().bind(plan)
        bound._steps = [dataclasses.replace(step, launch=meddled(step.launch)) for step in bound._steps]
        return bound


@pytest.mark.parametrize("way", WAYS)
def test_ids_are_looked_up_as_they_were_checked(way):
    net, without, ids = text_network(way), WAYS[way][2], good_ids(way, 40)
    truth = compile(net, "cpu", batch_hint=10**9, without=without)(ids)
    plan, _, chosen = place(net, "cpu", Job(batch=10**9, without=without), None)
    engine = Engine(plan, backend := MeddlingBackend(), chosen)
    out = tuple(np.empty_like(y) for y in truth)
    # What computes ids reads the caller's array; it is what it makes of them that is checked and looked up.
    backend.arrays = [out[1]] if way == "computed" else [ids, out[1]]
    for got, expected in zip(engine(ids, out=out), truth, strict=True):
        assert np.array_equal(got, expected)


def test_a_thread_that_writes_to_ids_makes_no_call_fail_but_by_an_error():
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(raced_ids.__file__)
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, env=here, check=False)
    assert ran.returncode == 0, f"exit code {ran.returncode}\n{ran.stdout}{ran.stderr}"
    assert len(ran.stdout.splitlines()) == len(WAYS)
