"""Every CUDA kernel's representative compiles within its budget and keeps its wgmma asynchronous, with no GPU.

`make check-kernels` does all instances.
"""

import importlib

import pytest

from onchip.errors import DeviceError
from onchip.kernels.cuda import KERNELS
from onchip.runtime.cuda.kernel_check import find_modules, run_task, tasks_of
from onchip.runtime.cuda.nvrtc import nvrtc_version

MODULES = find_modules(["onchip.kernels.cuda"])
REPRESENTATIVES = [task for module in MODULES for task in tasks_of(module, ("sm_80", "sm_90a")) if task.index == 0]


@pytest.mark.sample(16)  # `make check-kernels` compiles every instance
@pytest.mark.parametrize("task", REPRESENTATIVES, ids=lambda task: f"{task.kernel}-{task.arch}")
def test_representative(task):
    try:
        nvrtc_version()
    except DeviceError as error:
        pytest.skip(error.what)
    outcome = run_task(task)
    assert not outcome.refused
    assert not outcome.failed


WITHOUT_A_LAUNCH = ("view", "permute")  # of their own: permute uses common/permute.py


@pytest.mark.parametrize(
    "kernel", [k for k in KERNELS if k.name not in WITHOUT_A_LAUNCH], ids=lambda kernel: kernel.name
)
def test_every_kernel_has_instances_with_names_of_their_own(kernel):
    module = importlib.import_module(type(kernel).__module__)
    assert module in MODULES, f"{module.__name__} has no INSTANCES"
    names = [instance.name for instance in module.INSTANCES]
    assert len(set(names)) == len(names)
