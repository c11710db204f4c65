"""What `make sanitize` runs, as far as it goes with no GPU: planted bugs compile, its networks are right on the CPU."""

import contextlib
import itertools
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import onchip.kernels.cuda
from every_network import programs_of
from fake_cuda import FakeDriver, fake_gpu
from onchip.errors import DeviceError, PlanError
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.common.program import Program
from onchip.kernels.cuda.recipes.recipes import RecipeLowering, Source
from onchip.kernels.cuda.scan.scan import Scan
from onchip.network.scan_op import ScanOp
from onchip.network.training import TrainingStep
from onchip.plan.build_cost import device_recipes, dtype_of, recipe_rates_of, shape_of
from onchip.plan.device import H200
from onchip.plan.gradient.step import training_step
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.cuda import gpu as gpu_module
from onchip.runtime.cuda.nvrtc import compile_program, nvrtc_version
from onchip.runtime.cuda.step import CudaStep
from sanitizer import kernels, planted, run

CUDA_FILES = Path(onchip.kernels.cuda.__file__).parent
# __global__ void __launch_bounds__(128, 2) name(
ENTRY = re.compile(r"__global__ void\s+(?:__launch_bounds__\([^{;]*?\)\s*)?(?!__launch_bounds__)(\w+)\(")


def makes(plan) -> set[Program]:
    """What makes a plan's weights on the GPU."""
    weights, wanted = plan.network.weights, [r for group in plan.groups for r in group.claim.recipes.values()]
    found = set()
    for recipe in device_recipes(wanted, weights, recipe_rates_of(KERNELS, H200)):
        sources = tuple(Source(shape_of(name, weights), dtype_of(name, weights)) for name in recipe.sources)
        found |= {launch.program for launch in RecipeLowering(recipe, sources, H200).at(recipe.shape[0]).launches}
    return found


def programs_of_step(step, job) -> set[Program]:
    """What its engine loads on an H200."""
    found = set[Program]()
    with pytest.MonkeyPatch.context() as patch:
        gpu = fake_gpu(patch, FakeDriver())
        compiled = gpu_module.compile_program
        patch.setattr(gpu_module, "compile_program", lambda *task: found.add(task[0]) or compiled(*task))
        CudaStep(gpu, make_plan(step, H200, KERNELS, job)).bound.at(kernels.CHECKED_ROWS)
    return found


def launched() -> set[Program]:
    """What kernels.py launches on an H200."""
    plans = []
    for name, net in kernels.cases():
        for precision in kernels.PRECISIONS:
            with contextlib.suppress(PlanError):
                job = Job(precision, kernels.expected_rows(name), tables=kernels.tables_of(name))
                plans.append((make_plan(net, H200, KERNELS, job), kernels.rows_of(name)))
    found = {program for plan, rows in plans for program in {*programs_of([plan], rows), *makes(plan)}}
    for (name, (net, _, options)), precision in itertools.product(kernels.TRAININGS.items(), kernels.PRECISIONS):
        loss, optimiser = options.get("loss", "cross_entropy"), options.get("optimiser", "sgd")
        scale = 1 / 255 if "bytes" in name else 0.0
        most = options.get("clip_norm", 0.0)
        step = training_step(net, TrainingStep(loss, optimiser, byte_scale=scale, clip_norm=most))
        (group,) = make_plan(step, H200, KERNELS, Job(precision, options["batch_size"])).groups
        steps = group.claim.facts.steps(1), group.claim.facts.losses()
        found |= {launch.program for some in steps for launch in some.launches}
    for (_, step), precision in itertools.product(kernels.steps(), kernels.PRECISIONS):
        found |= programs_of_step(step.step, Job(precision, kernels.STEP_ROWS))
    found |= programs_of_step(kernels.rows_step("lenet5"), Job(batch=kernels.STEP_ROWS))
    for shape, (op, dtype) in itertools.product(kernels.SCANS, kernels.SCAN_OPS):
        for axis in {0, len(shape) - 1}:
            sizes = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
            found |= {launch.program for launch in Scan(ScanOp(op), dtype, *sizes).steps(H200).launches}
    return found


def test_every_kernel_of_every_file_is_launched():
    there = {(file, name) for file in CUDA_FILES.rglob("*.cu") for name in ENTRY.findall(file.read_text())}
    assert {file for file, _ in there} == set(CUDA_FILES.rglob("*.cu"))
    ran = {(program.source, program.name_expression.partition("<")[0]) for program in launched()}
    assert sorted(name for _, name in there - ran) == [], "give tests/sanitizer/kernels.py a case that launches it"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("tool", run.TOOLS)
def test_planted_bugs_compile(tool, arch):
    try:
        nvrtc_version()
    except DeviceError as error:
        pytest.skip(error.what)
    assert "planted" in compile_program(planted.program(tool), arch).entry


@pytest.mark.sample(7)
@pytest.mark.parametrize("part", [f"{number}/7" for number in range(1, 8)])
def test_the_networks_run_and_what_no_kernel_takes_is_reported(capsys, part):
    number, parts = map(int, part.split("/"))
    assert kernels.main("cpu", part) == 0
    *lines, total = capsys.readouterr().out.splitlines()
    tasks = [name for name, _ in kernels.tasks("cpu")][number - 1 :: parts]
    assert len(lines) == len(tasks) >= 40
    assert all(line.startswith(name) for line, name in zip(lines, tasks, strict=True))
    ran = [line for line in lines if "left out" not in line]
    assert total == f"{len(ran)} ran, 0 were wrong"
    assert all("fp32" in line or line.startswith("scan ") for line in ran)  # the CPU has no other precision
    left_out = [line for line in lines if "left out" in line]
    assert not [line for line in left_out if "fp32" in line]


def test_parts_are_all_of_it(capsys, monkeypatch):
    monkeypatch.setattr(kernels, "tasks", lambda device: [(str(i), lambda: "ran") for i in range(11)])
    assert [kernels.main("cpu", f"{part}/3") for part in (1, 2, 3)] == [0, 0, 0]
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith(" ran")]
    assert sorted(names, key=int) == [str(i) for i in range(11)]


def test_a_wrong_result_is_a_failure(monkeypatch, capsys):
    compile = kernels.compile

    def off(net, device, precision, **options):
        engine = compile(net, device, precision, **options)
        return lambda *x: engine(*x) + np.float16(0.5)

    monkeypatch.setattr(kernels, "cases", lambda: [("small", kernels.NETWORKS["small"])])
    monkeypatch.setattr(kernels, "compile", off)
    assert kernels.main("cpu") == 1
    assert "WRONG: error" in capsys.readouterr().out


def test_a_wrong_scan_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "cases", lambda: [("small", kernels.NETWORKS["small"])])
    monkeypatch.setattr(kernels, "scan", lambda x, op, axis, device: x)
    assert kernels.main("cpu") == 1
    assert "WRONG: axis" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "right"), [(0, False), (1, False), (run.REPORTED, True)])
def test_only_the_tools_own_code_counts_as_a_report(code, right, capsys):
    words = [sys.executable, "-c", f"print('a report'); raise SystemExit({code})"]
    assert run.run("planted", run.REPORTED, words) is right
    assert ("a report" in capsys.readouterr().out) is not right


def test_a_kernel_that_hangs_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(run, "SECONDS", 0.5)
    assert not run.run("planted", run.REPORTED, [sys.executable, "-c", "while True: pass"])
    assert "nothing in 0.5 s" in capsys.readouterr().out


def test_every_tool_is_asked_for_an_exit_code():
    for tool in run.TOOLS:
        words = run.command("compute-sanitizer", tool, "planted.py", tool)
        assert words[:5] == ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(run.REPORTED)]
        assert (run.HERE / f"{tool}.cu").exists()


def test_the_ladders_kernels_run_but_those_that_are_not_deterministic():
    found = kernels.rungs("cuda")
    assert ("decode", "separate") in found
    assert ("scan", "two-level") in found
    assert ("scan", "single-pass") not in found  # marked
    assert ("scan", "onchip") not in found  # of the engine, which runs above
    names = [name for name, _ in kernels.tasks("cuda")]
    assert [name for name in names if name.startswith("ladder ")] == [f"ladder {a} {b}:" for a, b in found]
    assert kernels.run_rung("decode", "numpy", "cpu") == "1, 33 rows"
