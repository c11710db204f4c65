"""The rungs of scan: on the CPU; those of the GPU compiled, emulated, and run on machines with a GPU."""

import itertools
import re

import numpy as np
import pytest

from emulated_cuda import Kernel, emulated_gpu, needs_gxx
from onchip.errors import DeviceError
from onchip.kernels.cuda.common.arguments import Int64, Output
from onchip.kernels.cuda.common.program import Program
from onchip.ladders import scan_cuda
from onchip.ladders.decode_cuda import KERNELS
from onchip.ladders.device import DeviceRows
from onchip.ladders.frame import climb
from onchip.ladders.scan import LADDER, ScanTruth, device_floor_ms
from onchip.measure.pace import Pace
from onchip.plan.device import H200
from onchip.runtime.cuda.kernel_check import find_modules, static_shared_bytes
from onchip.runtime.cuda.nvrtc import compile_program, nvrtc_version
from onchip.workloads import scan

RUNGS = {rung.name: rung for rung in LADDER.rungs}
CUDA_RUNGS = {rung.name: rung for rung in scan_cuda.LADDER.rungs}
LADDER_RUNGS = {rung.name: rung for rung in scan_cuda.RUNGS}
PROGRAMS = {p.name_expression: p for rung in LADDER_RUNGS.values() for p in rung.programs()}
QUICK = Pace(rounds=2, block_s=0.01, warm_up_s=0.001, pause_s=0, min_runs=2, max_runs=3)
LENGTHS = [1, 7, 1023, 1025, 100_003]


# -- right or wrong ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_truth():
    return ScanTruth(scan.network(), scan.inputs(300_001, seed=4))


def test_the_check_accepts_the_truth_and_a_naive_run(long_truth):
    rounded, naive = long_truth.verify(long_truth.y.astype(np.float32)), long_truth.verify(np.cumsum(long_truth.x))
    assert rounded.is_right
    assert naive.is_right
    assert rounded.error <= 2**-24 < naive.error
    assert naive.allowed == pytest.approx(2 * naive.error, rel=0.1)


@pytest.mark.parametrize("at", [0, 1, 1023, 150_000, 299_999])
@pytest.mark.parametrize("what", ["left out", "twice", "late", "of a lane", "nan", "inf"])
def test_the_check_finds_one_wrong_element(long_truth, at, what):
    x, y = long_truth.x, long_truth.y.copy()
    if what == "left out":
        y[at:] -= x[at]
    elif what == "twice":
        y[at:] += x[at]
    elif what == "late":  # a thread that did not wait: y[at] == y[at - 1]
        y[at] -= x[at]
    elif what == "of a lane":
        y[at] += 1
    else:
        y[at] = float(what)
    assert not long_truth.verify(y.astype(np.float32)).is_right


def test_the_check_finds_a_lost_total_and_another_scan(long_truth):
    x, y = long_truth.x, long_truth.y
    lost = y.copy()
    lost[8192:12_288] -= lost[8191]
    assert not long_truth.verify(lost).is_right
    assert not long_truth.verify(y - x).is_right  # exclusive
    assert not long_truth.verify(y[::-1]).is_right
    assert not long_truth.verify(y[:-1]).is_right
    assert not long_truth.verify(y + 1).is_right  # every step but the first is right
    drift = y * (1 + 1e-4)  # every step is right
    assert not long_truth.verify(drift).is_right


# -- on the CPU ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNGS)
@pytest.mark.parametrize("N", LENGTHS)
@pytest.mark.parametrize("threads", [1, 2])
def test_every_rung_is_right(name, N, threads):
    x = scan.inputs(N, seed=N)
    before, run = x.copy(), RUNGS[name]().prepare(scan.network(N), x, threads)
    verdict = ScanTruth(scan.network(N), x).verify(run())
    assert verdict.is_right, f"{name} is off by {verdict.error:.3g}, allowed {verdict.allowed:.3g}"
    assert run().tobytes() == run().tobytes()
    assert x.tobytes() == before.tobytes()


@pytest.mark.parametrize("name", RUNGS)
def test_every_rung_propagates_nan(name):
    x = scan.inputs(1000)
    x[333] = np.nan
    y = RUNGS[name]().prepare(scan.network(1000), x, 2)()
    assert np.isfinite(y[:333]).all()
    assert np.isnan(y[333:]).all()


def test_climb_times_every_rung():
    climbed = climb(LADDER, rows=40_001, threads=2, pace=QUICK)
    assert climbed.all_right
    assert [step.rung for step in climbed.steps] == list(RUNGS)
    assert all(step.timing is not None and step.timing.median_ms > 0 for step in climbed.steps)
    errors = {step.rung: step.verdict.error for step in climbed.steps}
    assert errors["onchip"] < errors["numpy"] / 10  # because its totals are float64


def test_the_floor_is_each_element_read_and_written_once():
    assert device_floor_ms(H200, 1 << 24) == pytest.approx(8 * 2**24 / 4.8e12 * 1e3)
    assert device_floor_ms(H200, 1 << 20) == pytest.approx(8 * 2**20 / 33.45e12 * 1e3, rel=1e-3)  # out of L2


# -- on a GPU: compilation -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _nvrtc():
    try:
        nvrtc_version()
    except DeviceError as error:
        pytest.skip(error.what)


@pytest.mark.usefixtures("_nvrtc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_kernel_compiles_within_64_registers(name, arch):
    binary = compile_program(PROGRAMS[name], arch)
    assert binary.spill_bytes == 0
    assert binary.registers <= 64


@pytest.mark.usefixtures("_nvrtc")
@pytest.mark.parametrize(
    ("name", "shared"), [("sliding_block", 132), ("scan_tiles", 32), ("scan_totals", 132), ("single_pass", 40)]
)
def test_shared_memory_is_what_the_header_says(name, shared):
    assert static_shared_bytes(compile_program(PROGRAMS[name], "sm_80")) == shared


def test_check_kernels_finds_all_of_them():
    assert scan_cuda in find_modules(["onchip.ladders"])
    assert {instance.launch(H200).program for instance in scan_cuda.INSTANCES} == set(PROGRAMS.values())


# -- on a GPU: launches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("N", [1, 4096, 4097, 1 << 24])
@pytest.mark.parametrize("name", LADDER_RUNGS)
def test_launches_cover_the_elements_and_match_the_kernels_parameters(name, N):
    tiles, steps = -(-N // 4096), LADDER_RUNGS[name]().steps(N)
    assert [launch.program.name_expression for launch in steps.launches] == list(LADDER_RUNGS[name].kernels)
    assert steps.scratch_bytes == {"two-level": 4 * tiles, "single-pass": 8 * (1 + tiles)}.get(name, 0)
    source = (KERNELS / LADDER_RUNGS[name].file).read_text()
    for launch in steps.launches:
        kernel = launch.program.name_expression
        parameters = re.search(rf"\b{kernel}\(([^)]*long long \w+)\) {{", source)[1].split(",")
        assert len(launch.arguments) == len(parameters)
        for argument, parameter in zip(launch.arguments, parameters, strict=True):
            assert isinstance(argument, Int64) != ("*" in parameter)
        blocks, n = launch.config.grid[0], launch.arguments[-1].value
        threads = {"one_thread": 1, "sliding_block": 1024, "scan_totals": 1024}.get(kernel, 256)
        assert launch.config.block == (threads, 1, 1)
        if kernel == "clear_words":
            assert n == 1 + tiles <= blocks * threads
        else:
            assert n == (tiles if kernel == "scan_totals" else N)
            assert blocks == (tiles if threads == 256 else 1)
    assert steps.launches[-1].arguments[-2] == Output(0)


# -- on a GPU: arithmetic, emulated on the host --------------------------------------------------------------


@needs_gxx
@pytest.mark.sample(6)  # every rung, each with another N
@pytest.mark.parametrize("N", [1, 7, 1025, 4096, 9001])
@pytest.mark.parametrize("name", CUDA_RUNGS)
def test_every_cuda_rung_is_right_when_emulated(name, N, monkeypatch):
    gpu = emulated_gpu(monkeypatch)
    x = np.random.default_rng(N).integers(-30, 71, N).astype(np.float32)
    run = CUDA_RUNGS[name]().prepare(scan.network(N), DeviceRows(x), 1)
    np.testing.assert_array_equal(run(), np.cumsum(x, dtype=np.float64))
    memory = gpu.driver.memory[run._y.pointer]
    begin = run._y.pointer - memory.ctypes.data
    assert (np.delete(memory, slice(begin, begin + 4 * N)) == 0xAB).all()  # untouched


@needs_gxx
def test_a_run_of_several_kernels_shows_the_heaviest(monkeypatch):
    emulated_gpu(monkeypatch)
    run = CUDA_RUNGS["two-level"]().prepare(scan.network(9001), DeviceRows(scan.inputs(9001)), 1)
    assert [(kernel["kernel"], kernel["launches"], kernel["threads"]) for kernel in run.kernels] == [
        ("scan_tiles", 1, 256), ("scan_totals", 1, 1024), ("add_prefixes", 1, 256),
    ]  # fmt: skip
    for kernel, ms, registers in zip(run.kernels, (2.0, 3.0, 1.0), (10, 20, 30), strict=True):
        assert kernel["ms"] > 0
        kernel |= {"ms": ms, "registers": registers}
    assert run.facts["launches"] == 3
    assert run.facts["registers"] == 20


@needs_gxx
def test_look_back_stops_at_the_nearest_prefix(tmp_path):
    """Tiles have published their totals, 0, 1, 2, ..; the first and one other their inclusive prefixes."""
    source = tmp_path / "look.cu"
    source.write_text(f"""#include "{KERNELS / "scan_single_pass.cu"}"
        __global__ void look(const u64* words, float* found, long long tile) {{
            found[threadIdx.x] = look_back(words, tile);
        }}""")
    kernel = Kernel(Program(source, "look"))
    for tile, other in itertools.product((1, 2, 32, 33, 65, 100), (0, 1, 31, 32, 40, 99)):
        has_prefix = np.isin(np.arange(tile), (0, other))
        values = np.where(has_prefix, np.cumsum(np.arange(tile)), np.arange(tile)).astype(np.float32)
        words = values.view(np.uint32).astype(np.uint64) | np.where(has_prefix, 2, 1).astype(np.uint64) << np.uint64(32)
        found = np.zeros(32, np.float32)
        kernel.run(1, 32, (words.ctypes.data, found.ctypes.data, tile))
        assert (found == tile * (tile - 1) // 2).all(), (tile, other)


# -- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("N", [*LENGTHS, 4096, 4097, 3_000_001])
@pytest.mark.parametrize("name", CUDA_RUNGS)
def test_every_cuda_rung_is_right(name, N):
    net, x = scan.network(N), DeviceRows(scan.inputs(N, seed=N))
    run = CUDA_RUNGS[name]().prepare(net, x, 1)
    truth = ScanTruth(net, x.host)
    for _ in range(3):  # a run must not depend on memory left by the previous one
        verdict = truth.verify(run())
        assert verdict.is_right, f"{name} is off by {verdict.error:.3g}, allowed {verdict.allowed:.3g}"
    if not CUDA_RUNGS[name].nondeterministic:
        np.testing.assert_array_equal(run(), run())


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUDA_RUNGS)
def test_every_cuda_rung_is_exact_where_floats_are(name):
    host = np.random.default_rng(0).integers(-3, 4, 1_000_003).astype(np.float32)
    run = CUDA_RUNGS[name]().prepare(scan.network(len(host)), DeviceRows(host), 1)
    np.testing.assert_array_equal(run(), np.cumsum(host, dtype=np.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CUDA_RUNGS)
def test_every_cuda_rung_propagates_nan(name):
    x = DeviceRows(scan.inputs(20_000))
    x.host[9_999] = np.nan
    y = CUDA_RUNGS[name]().prepare(scan.network(20_000), x, 1)()
    assert np.isfinite(y[:9_999]).all()
    assert np.isnan(y[9_999:]).all()


@pytest.mark.gpu
def test_the_cuda_ladder_end_to_end():
    climbed = climb(scan_cuda.LADDER, rows=1 << 20, pace=QUICK)
    assert climbed.all_right
    assert [step.rung for step in climbed.steps] == list(CUDA_RUNGS)
    steps = {step.rung: step for step in climbed.steps}
    assert [steps[name].facts["launches"] for name in LADDER_RUNGS] == [1, 1, 3, 2]
    assert steps["one-thread"].rows == 1 << 16
    for step in climbed.steps:
        assert step.timing.median_ms > 0
        assert step.facts["registers"] > 0
