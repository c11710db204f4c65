"""`make check-kernels`: it finds every instance, and every kind of defect makes it fail."""

import dataclasses
import sys

import pytest

from onchip.errors import DeviceError
from onchip.kernels.cuda.common.program import Program
from onchip.runtime.cuda import kernel_check
from onchip.runtime.cuda.kernel_check import DEVICES, find_modules, main, run_task, static_shared_bytes, tasks_of
from onchip.runtime.cuda.nvrtc import compile_program, nvrtc_version

KERNEL = """\
template <int N>
__global__ void greedy(float* x) {
    __shared__ float kept[64 * N];
    kept[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < N; i++) sum += kept[(threadIdx.x + i) % (64 * N)];
    x[threadIdx.x] = sum;
}
"""
MODULE = """\
from pathlib import Path
from types import SimpleNamespace
from onchip.errors import PlanError
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = ("sm_80", "sm_90a", "sm_999")

def launch(device, name="greedy<3>", registers=64, shared_bytes=1 << 10, fits=("sm_80", "sm_90a")):
    if device.arch not in fits:
        raise PlanError(f"too large for {device.arch}")
    config = LaunchConfig((1, 1, 1), (64, 1, 1), shared_bytes)
    return KernelLaunch(Program(SOURCE, name), config, (), Budget(registers))

"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """package(instances) -> the name of a package with a kernel, its INSTANCES given as source text."""
    try:
        nvrtc_version()
    except DeviceError as error:
        pytest.skip(error.what)
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)

    def make(instances):
        (tmp_path / "planted" / "inner").mkdir(parents=True)
        for folder in ("planted", "planted/inner"):
            (tmp_path / folder / "__init__.py").write_text("")
        (tmp_path / "planted" / "inner" / "greedy.cu").write_text(KERNEL)
        (tmp_path / "planted" / "inner" / "greedy.py").write_text(f"{MODULE}INSTANCES = ({instances},)\n")
        return "planted"

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == "planted"]:
        del sys.modules[name]


def test_all_is_well_and_the_second_time_it_is_cached(package, capsys):
    name = package('Instance("three", launch), Instance("five", lambda d: launch(d, "greedy<5>", fits=("sm_80",)))')
    assert main([name]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in out[1:-1]] == [
        ["greedy", "three", "sm_80"], ["greedy", "three", "sm_90a"], ["greedy", "five", "sm_80"],
        ["greedy", "five", "sm_90a"],
    ]  # fmt: skip
    assert "of 64" in out[1]
    assert f"{64 * 3 * 4}" in out[1]
    assert out[1].endswith(" s")
    assert out[4].endswith("refused")
    assert out[-1] == "4 instances, 1 do not fit, 0 failed"
    assert main([name]) == 0
    assert capsys.readouterr().out.count("cached") == 3


def test_a_sample_has_one_instance_of_each_kernel_at_least(package, capsys):
    kinds = ["three", "four", "five", "six", "large"]
    fits = {"large": 'fits=("sm_100",)'}
    name = package(", ".join(f'Instance("{kind}", lambda d: launch(d, {fits.get(kind, "")}))' for kind in kinds))
    assert main([name], sample=2) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in out[1:-1]] == [
        ["greedy", "three", "sm_80"], ["greedy", "three", "sm_90a"], ["greedy", "five", "sm_90a"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("registers=4", "registers, at most 4 allowed"),
        ("shared_bytes=240 << 10", "246,528 bytes of shared memory, at most 232,448 allowed"),
        ('name="greedy<x>"', "does not compile for sm_90a"),
        ("fits=()", "bad fits no chip: too large for sm_90a"),
    ],
)
def test_what_is_wrong_is_named(package, capsys, wrong, said):
    assert main([package(f'Instance("good", launch), Instance("bad", lambda d: launch(d, {wrong}))')]) == 1
    out, err = capsys.readouterr()
    assert said in err
    assert "greedy bad" in err
    assert "good" not in err
    assert out.splitlines()[1].endswith((" s", "cached"))  # two that are compiled at once may be the same program


def test_serialised_products_fail(package, monkeypatch):
    (module,) = find_modules([package('Instance("slow", launch)')])
    compiled = kernel_check.compile_program

    def serialise(program, arch):
        return dataclasses.replace(compiled(program, arch), is_serialised=True)

    task = tasks_of(module, ["sm_90a"])[0]
    assert not run_task(task).failed
    monkeypatch.setattr(kernel_check, "compile_program", serialise)
    assert "1 kernel with serialised wgmma" in run_task(task).failed


def test_a_package_without_instances_is_an_error(capsys):
    assert main(["onchip.network.layers"]) == 1
    assert "no INSTANCES in onchip.network.layers" in capsys.readouterr().err


def test_the_representative_comes_first_and_only_declared_architectures(package):
    (module,) = find_modules([package('Instance("a", launch), Instance("b", launch)')])
    tasks = tasks_of(module)
    assert [(task.index, task.arch) for task in tasks] == [(0, "sm_80"), (0, "sm_90a"), (1, "sm_80"), (1, "sm_90a")]
    assert tasks[2].instance.name == "b"
    assert run_task(tasks[0]).static_bytes == "768"


@pytest.mark.parametrize("arch", DEVICES)
def test_static_shared_memory_is_read_from_the_binary(package, tmp_path, arch):
    package("")
    for N in (1, 7):
        binary = compile_program(Program(tmp_path / "planted" / "inner" / "greedy.cu", f"greedy<{N}>"), arch)
        assert static_shared_bytes(binary) == 256 * N
    (tmp_path / "none.cu").write_text("__global__ void none(float* x) { x[0] = 1; }")
    assert static_shared_bytes(compile_program(Program(tmp_path / "none.cu", "none"), arch)) == 0


def test_two_processes_at_most():
    assert kernel_check.PROCESSES <= 2


def test_every_kernel_is_compiled_for_every_chip_and_every_instance_for_one():
    """For similar chips one instance of each kernel is enough."""
    tasks = [task for module in find_modules(["onchip.kernels.cuda", "onchip.ladders"]) for task in tasks_of(module)]
    kept = list(kernel_check._reduced(tasks))
    launched = {task: name for task in tasks if (name := kernel_check._kernel_of(task))}

    def names(some):
        return {(task.module, task.arch, launched[task]) for task in some if task in launched}

    def instances(some):
        return {(task.module, task.index) for task in some if task in launched}

    assert names(kept) == names(tasks)
    assert instances(kept) == instances(tasks)
    assert len(kept) < 0.8 * len(tasks)
