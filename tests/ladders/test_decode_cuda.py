"""The GPU rungs of decode: they compile as intended (anywhere), and are correct (on machines with a GPU)."""

import dataclasses
import json
import math
import re
import types

import numpy as np
import pytest

from onchip.errors import DeviceError
from onchip.kernels.cuda.common.arguments import Int64, Output
from onchip.kernels.cuda.common.program import Budget, KernelLaunch, LaunchConfig
from onchip.ladders import counters, decode_cuda
from onchip.ladders.decode_cuda import LADDER, DecodeTruth, floor_ms, naive_half
from onchip.ladders.device import DeviceRows
from onchip.ladders.frame import climb
from onchip.measure.pace import Pace
from onchip.measure.truth import relative_error
from onchip.plan.device import H200
from onchip.runtime.cuda.gpu import Buffer, Gpu
from onchip.runtime.cuda.kernel_check import find_modules, static_shared_bytes
from onchip.runtime.cuda.nvrtc import compile_program, nvrtc_version
from onchip.runtime.cuda.occupancy import occupancy
from onchip.workloads import decode

RUNGS = {rung.name: rung for rung in LADDER.rungs}
KERNELS = {rung.name: rung for rung in decode_cuda.RUNGS}
PROGRAMS = {p.name_expression: p for rung in KERNELS.values() for p in rung.programs()}
QUICK = Pace(rounds=1, block_s=0.01, warm_up_s=0.001, pause_s=0, min_runs=2, max_runs=3)

# Weights that a thread keeps in registers, as the report counts them.
WEIGHTS = {
    "shared-registers": 64, "shuffles": 64, "registers": 70, "registers-half": 70, "rotating": 70, "coalesced": 70,
    "hidden-loads": 72, "occupancy": 50, "best-few": 36, "best-many": 76,
}  # fmt: skip
# From the kernels' headers.
SHARED_BYTES = {
    "fused-shared": 21_376, "whole-shared": 39_056, "shared-registers": 22_416, "shuffles": 22_416, "registers": 1_600,
    "registers-half": 800, "rotating": 13_312, "best-few": 13_312, "best-many": 13_312, "occupancy": 6_656,
}  # fmt: skip


@pytest.fixture(scope="module")
def _nvrtc():
    try:
        nvrtc_version()
    except DeviceError as error:
        pytest.skip(error.what)


@pytest.mark.sample(5)  # `make check-kernels` compiles all of them
@pytest.mark.usefixtures("_nvrtc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_kernel_compiles_without_spills(name, arch):
    assert compile_program(PROGRAMS[name], arch).spill_bytes == 0


@pytest.mark.usefixtures("_nvrtc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("rung", WEIGHTS)
def test_weights_are_in_registers_within_the_limit(rung, arch):
    (program,) = KERNELS[rung].programs()
    assert WEIGHTS[rung] <= compile_program(program, arch).registers <= KERNELS[rung].max_registers


@pytest.mark.usefixtures("_nvrtc")
@pytest.mark.parametrize("rung", SHARED_BYTES)
def test_shared_memory_is_what_the_header_says(rung):
    (program,) = KERNELS[rung].programs()
    assert static_shared_bytes(compile_program(program, "sm_80")) == SHARED_BYTES[rung]


def test_check_kernels_finds_all_of_them():
    assert decode_cuda in find_modules(["onchip.ladders"])
    assert {instance.launch(H200).program for instance in decode_cuda.INSTANCES} == set(PROGRAMS.values())


# -- which thread reads what in rotating.cu -------------------------------------------------------------------


ROTATING = [name for name in PROGRAMS if name.startswith("rotating<")]


def bank_ways(words, lanes):
    """The most words of one bank that `lanes` threads request in one access; words (threads, width)."""
    worst = 0
    for first in range(0, len(words), lanes):
        requested = np.unique(words[first : first + lanes])
        worst = max(worst, np.bincount(requested % 32).max())
    return worst


@pytest.mark.parametrize("name", ROTATING)
def test_rotating_threads_compute_every_fma_once_without_bank_conflicts(name):
    share, tile, _, last, hides_loads, *_ = json.loads(name.replace("rotating<", "[").replace(">", "]"))
    rows = tile // (256 // (64 * share))
    thread = np.arange(256)
    group, n, part = thread // (64 * share), thread % (64 * share) // share, thread % share
    for K, stride, step in ((72, 72, 4 if share == 2 else 2), (64, 68, 4)):
        done = np.zeros((tile, 64, K), int)
        for step_row in range(rows):
            row = group * rows + ((n + step_row) & (rows - 1))
            for i in range(0, K // share, step):
                k = part * (K // share) + i
                halves = (row * stride + k)[:, None] + np.arange(step)
                assert bank_ways(np.unique(halves // 2, axis=1), 32 if step == 2 else 16) == 1
                for j in range(step):
                    np.add.at(done, (row, n, k + j), 1)
        assert (done == 1).all()
    parts, threads = 64 // last, 128 if hides_loads else 256
    done = np.zeros((tile, 4, 64), int)
    for first in range(0, tile, threads // (4 * parts)):
        for t in range(threads):
            k = t % parts * last
            done[first + t // (4 * parts), t // parts % 4, k : k + last] += 1
    assert (done == 1).all()


# -- what is launched ----------------------------------------------------------------------------------------


class FakeGpu:
    """Accepts all calls, computes nothing."""

    device = H200

    def load(self, program, shared_bytes=0):
        return types.SimpleNamespace(
            name=program.name_expression, registers=100, static_shared_bytes=1000, blocks_per_sm=lambda *_: 2
        )

    def allocate(self, nbytes):
        return Buffer(self, 16, nbytes, None)

    def upload(self, array):
        return Buffer(self, 16, array.nbytes, None)

    def free(self, *_): ...


@pytest.mark.parametrize("B", [1, 33, 12_800])
@pytest.mark.parametrize("name", KERNELS)
def test_launches_cover_the_rows_and_match_the_kernels_parameters(name, B):
    rung = KERNELS[name]()
    steps = rung.steps(FakeGpu(), B)
    launches = steps.launches
    assert len(launches) == (5 if name == "separate" else 1)
    assert steps.scratch_bytes == (2 * B * 64 * 4 if name in ("separate", "fused-global") else 0)
    sources = "".join(path.read_text() for path in decode_cuda.KERNELS.glob("*.cu"))
    for launch in launches:
        kernel = launch.program.name_expression.partition("<")[0]
        parameters = re.search(rf"\b{kernel}\(([^)]*long long \w+)\) {{", sources)[1]
        assert len(launch.arguments) == len(parameters.split(","))
        for argument, parameter in zip(launch.arguments, parameters.split(","), strict=True):
            assert isinstance(argument, Int64) != ("*" in parameter)
        assert math.prod(launch.config.block) == 256
    if name != "separate":
        blocks = launches[0].config.grid[0]
        assert blocks == min(-(-B // rung.tile), 264 if rung.is_persistent and name != "fused-global" else B)
    assert launches[-1].arguments[-2] == Output(0)


def test_occupancy():
    program = next(iter(PROGRAMS.values()))
    launch = KernelLaunch(program, LaunchConfig((9, 1, 1), (16, 16, 1), 0), (), Budget(100))
    assert occupancy(launch, FakeGpu().load(program), "sm_90a") == 2 * 8 / 64


def test_rows_are_uploaded_once_in_each_precision():
    rows, gpu = DeviceRows(decode.inputs(5)), FakeGpu()
    assert rows[:5] is rows
    assert len(rows[:3]) == 3
    assert rows.on(gpu, "float16") is rows.on(gpu, "float16")
    assert (rows.on(gpu, "float16").nbytes, rows.on(gpu, "float32").nbytes) == (720, 1440)


# -- right or wrong ------------------------------------------------------------------------------------------


def test_fp16_is_checked_against_a_naive_run_with_the_same_accumulators():
    net, x = decode.network(), DeviceRows(decode.inputs(129))
    truth = DecodeTruth(net, x)
    errors = {sums: relative_error(naive_half(net, x.host, sums), truth.y) for sums in ("float16", "float32")}
    assert 1e-4 < errors["float32"] < errors["float16"] < 0.05
    for sums, error in errors.items():
        verdict = truth.verify_in("fp16", naive_half(net, x.host, sums), sums)
        assert error < verdict.allowed < 0.05
        assert verdict.error == error
        assert not truth.verify_in("fp16", truth.y + 2 * verdict.allowed, sums).is_right
    assert not truth.verify_in("fp32", naive_half(net, x.host, "float32")).is_right
    assert truth.verify_in("fp32", truth.y.astype(np.float32)).is_right


def test_the_reports_limit_holds_where_the_naive_run_is_worse(monkeypatch):
    monkeypatch.setattr(decode_cuda, "naive_half", lambda net, x, sums: np.full((len(x), 4), 99.0))
    x = DeviceRows(decode.inputs(3))
    assert DecodeTruth(decode.network(), x).verify_in("fp16", np.zeros((3, 4))).allowed == 0.15


def test_floors(monkeypatch):
    monkeypatch.setattr(decode_cuda, "Gpu", types.SimpleNamespace(get=FakeGpu))
    net = decode.network()
    assert floor_ms(net, 2_097_152, "fp16") == pytest.approx(2_097_152 * 152 / 4.8e12 * 1e3, rel=1e-3)  # memory
    assert floor_ms(net, 2_097_152, "fp32") == pytest.approx(2_097_152 * 17_920 / 66.9e12 * 1e3, rel=1e-3)  # arithmetic


# -- bank conflicts ------------------------------------------------------------------------------------------

NCU = """#!/bin/sh
case "$*" in *"--replay-mode app-range "*) ;; *) echo "every launch is profiled"; exit 1;; esac
echo '==PROF== Connected to process 7 (/usr/bin/python)'
echo '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
echo '"0","7","range","{ld}","","1,000"'
echo '"0","7","range","{st}","","5"'
echo '"0","7","range","other","","77"'
echo '"1","7","range","{ld}","","3"'
echo '"1","7","range","{st}","","0"'
""".format(ld=counters.METRICS[0], st=counters.METRICS[1])


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    def write_script(script):
        path = tmp_path / "ncu"
        path.write_text(script)
        path.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    return write_script


def test_bank_conflicts_are_those_of_each_rungs_run(ncu):
    """One profiled range per rung, however many launches it has."""
    ncu(NCU)
    assert counters.bank_conflicts("decode", 7, ["separate", "rotating"]) == {"separate": 1005, "rotating": 3}
    with pytest.raises(DeviceError, match="number of runs"):
        counters.bank_conflicts("decode", 7, ["separate"])


class ProfiledGpu:
    """Records when the profiler counts, in place of a GPU."""

    def __init__(self):
        self.done = []
        self.driver = types.SimpleNamespace(
            cuProfilerStart=lambda: self.record("start"), cuProfilerStop=lambda: self.record("stop")
        )

    def record(self, what):
        self.done.append(what)
        return (0,)

    def wait_for_all(self):
        self.done.append("wait")


def test_a_profiled_rung_runs_as_many_rows_as_a_timed_one_and_only_its_run_counts(monkeypatch):
    gpu = ProfiledGpu()

    class Slow(decode_cuda.Separate):
        max_rows = 33

        def prepare(self, net, x, threads):
            gpu.done.append(len(x))
            return lambda: gpu.done.append("run")

    monkeypatch.setattr(counters, "find_ladder", lambda *_: dataclasses.replace(LADDER, rungs=(Slow,)))
    monkeypatch.setattr(counters.Gpu, "get", lambda: gpu)
    counters.main("decode", 100, ["separate"])
    counters.main("decode", 7, ["separate"])
    profiled = ["wait", "start", "run", "wait", "stop"]
    assert gpu.done == [33, *profiled, 7, *profiled]


def test_ncu_missing_or_without_permission(ncu):
    with pytest.raises(DeviceError, match="ncu"):
        counters.bank_conflicts("decode", 7, ["separate"])
    ncu("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM'\nexit 1\n")
    with pytest.raises(DeviceError, match="ERR_NVGPUCTRPERM"):
        counters.bank_conflicts("decode", 7, ["separate"])


# -- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 7, 31, 33, 1000, 12_805])
@pytest.mark.parametrize("name", KERNELS)
def test_every_rung_is_right(name, B):
    net, x = decode.network(3), DeviceRows(decode.inputs(B, seed=B))
    x.host[:, decode.SIGNALS :] = 0
    rung = KERNELS[name]()
    run = rung.prepare(net, x, 1)
    verdict = rung.verify(DecodeTruth(net, x), run())
    assert verdict.is_right, f"{name} is off by {verdict.error:.3g}, allowed {verdict.allowed:.3g}"
    np.testing.assert_array_equal(run(), run())


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_every_rung_hands_nan_on_and_writes_only_its_rows(name):
    net, x = decode.network(), DeviceRows(decode.inputs(70))
    x.host[33, 5] = np.nan
    y = KERNELS[name]().prepare(net, x, 1)()
    assert np.isnan(y[33]).all()
    assert np.isfinite(np.delete(y, 33, axis=0)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rung", [rung for name, rung in RUNGS.items() if name not in KERNELS])
@pytest.mark.parametrize("B", [1, 33, 1000])
def test_the_engines_rungs_are_right(rung, B):
    net, x = decode.network(), DeviceRows(decode.inputs(B))
    assert rung().verify(DecodeTruth(net, x), rung().prepare(net, x, 1)()).is_right


@pytest.mark.gpu
def test_the_ladder_end_to_end():
    climbed = climb(LADDER, rows=12_800, pace=QUICK)
    assert climbed.all_right
    assert [step.rung for step in climbed.steps] + list(climbed.skipped) == list(RUNGS)
    for step in climbed.steps:
        assert 0 < step.timing.median_ms < 10
        assert step.facts["registers"] > 0
        assert step.facts["launches"] == (5 if step.rung == "separate" else 1)
    steps = {step.rung: step for step in climbed.steps}
    assert all(steps[rung].facts["registers"] >= weights for rung, weights in WEIGHTS.items())
    assert {rung: steps[rung].facts["shared bytes"] for rung in SHARED_BYTES} == SHARED_BYTES
    assert climbed.steps[0].report_ms == 0.392
    assert Gpu.get().device.kind == "cuda"
