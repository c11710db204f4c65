"""The GPU rungs of backprop: compiled, emulated on the host, and run on machines with a GPU."""

import re

import numpy as np
import pytest

from emulated_cuda import emulated_gpu, needs_gxx
from onchip.errors import DeviceError
from onchip.kernels.cuda.common.arguments import UInt32
from onchip.ladders import backprop_cuda
from onchip.ladders.backprop_cuda import LADDER, Part, Shapes
from onchip.ladders.frame import climb
from onchip.ladders.training import TrainingRows
from onchip.measure.pace import Pace
from onchip.plan.device import H200
from onchip.runtime.cuda.kernel_check import find_modules, static_shared_bytes
from onchip.runtime.cuda.nvrtc import compile_program, nvrtc_version
from onchip.workloads import backprop

RUNGS = {rung.name: rung for rung in LADDER.rungs}
LADDER_RUNGS = {rung.name: rung for rung in backprop_cuda.RUNGS}
PROGRAMS = list(dict.fromkeys(p for rung in LADDER_RUNGS.values() for p in rung.programs()))
QUICK = Pace(rounds=1, block_s=0.01, warm_up_s=0.001, pause_s=0, min_runs=2, max_runs=3)
# From the kernels' headers.
SHARED_BYTES = {
    "feed_forward": 2176, "gradient_tiles": 3200, "sum_error": 2048, "backward_atomics<true>": 3264, "reduce_error": 64,
}  # fmt: skip


def random_network(pixels, hidden, seed=3):
    net, rng = backprop.network(pixels, hidden, seed), np.random.default_rng(seed)
    biases = {k: rng.standard_normal(w.shape, dtype=np.float32) for k, w in net.weights.items() if k.endswith("bias")}
    return net.replace(weights={**net.weights, **biases})


def random_rows(n, pixels, seed=1):
    rng = np.random.default_rng(seed)
    return TrainingRows(rng.random((n, pixels), dtype=np.float32), backprop.one_hot(rng.integers(0, 10, n)))


# -- compilation ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _nvrtc():
    try:
        nvrtc_version()
    except DeviceError as error:
        pytest.skip(error.what)


@pytest.mark.usefixtures("_nvrtc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name_expression)
def test_every_kernel_compiles_within_64_registers(program, arch):
    binary = compile_program(program, arch)
    assert binary.spill_bytes == 0
    assert binary.registers <= 64


@pytest.mark.usefixtures("_nvrtc")
@pytest.mark.parametrize("name", SHARED_BYTES)
def test_shared_memory_is_what_the_header_says(name):
    program = next(p for p in PROGRAMS if p.name_expression == name)
    assert static_shared_bytes(compile_program(program, "sm_80")) == SHARED_BYTES[name]


def test_check_kernels_finds_all_of_them():
    assert backprop_cuda in find_modules(["onchip.ladders"])
    assert {instance.launch(H200).program for instance in backprop_cuda.INSTANCES} == set(PROGRAMS)


# -- launches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LADDER_RUNGS)
def test_launches_match_the_kernels_parameters(name):
    """Arguments are pointers, structs of one pointer or handle, or 32 bits for an int or a float."""
    rung, shapes = LADDER_RUNGS[name](), Shapes((784, 56, 28, 10), 45_846, 60_000, 1)
    launches = (*rung.part(shapes, Part(0, 60_000)), *rung.tail(shapes))
    assert len(launches) == {"atomics": 11, "streams": 11, "reduction": 12}.get(name, 10)
    for launch in launches:
        kernel = launch.program.name_expression.partition("<")[0]
        parameters = re.search(rf"\b{kernel}\(([^)]*)\) {{", launch.program.source.read_text())[1].split(",")
        assert len(launch.arguments) == len(parameters)
        for argument, parameter in zip(launch.arguments, parameters, strict=True):
            assert isinstance(argument, UInt32) != ("*" in parameter or "Targets" in parameter)


@pytest.mark.parametrize(
    ("name", "hidden"), [("sliding-tiles", (6, 7)), ("ldg", (6, 7)), ("atomics", (3 + 2 + 4, 3 + 2 + 2))]
)
def test_the_cost_counts_every_operand_once(name, hidden):
    """x twice; an atomic add is a read and a write per tile of 16 columns of the next layer."""
    cost, output = LADDER_RUNGS[name]().cost(backprop.network(), 60_000), 5 if name == "atomics" else 6
    assert cost.row_bytes == 4 * (2 * 784 + 56 * hidden[0] + 28 * hidden[1] + 10 * output)
    assert cost.fixed_bytes == 4 * 45_846 * (3 + 4 + (64 if name == "atomics" else 0))


@needs_gxx
@pytest.mark.parametrize("name", ["sliding-tiles", "streams"])
def test_a_run_may_be_timed_before_it_is_called(name, monkeypatch):
    net, rows, gpu = random_network(5, (4, 3)), random_rows(20, 5), emulated_gpu(monkeypatch)
    run = LADDER_RUNGS[name]().prepare(net, rows, 1)
    for which, array in run._memory.host.items():
        np.testing.assert_array_equal(gpu.download(run._memory.buffers[which], np.empty_like(array)), array)


def test_patterns_are_split_among_three_streams():
    assert [LADDER_RUNGS["streams"]().split(B) for B in (1, 2, 3, 60_001)] == [
        [1], [1, 1], [1, 1, 1], [20_000, 20_000, 20_001],
    ]  # fmt: skip


# -- right or wrong ------------------------------------------------------------------------------------------


@needs_gxx
@pytest.mark.sample(3)  # every kernel file
@pytest.mark.parametrize("n", [1, 70])
@pytest.mark.parametrize("name", LADDER_RUNGS)
def test_every_rung_is_right_when_emulated(name, n, monkeypatch):
    for limit, value in {"GRID_ROWS": 2, "GRID_COLUMNS": 1, "SLICES": 2, "ERROR_BLOCKS": 2}.items():
        monkeypatch.setattr(backprop_cuda, limit, value)  # small matrices are larger than the grid
    net, rows = random_network(37, (35, 18)), random_rows(n, 37)
    emulated_gpu(monkeypatch)
    rung, truth = LADDER_RUNGS[name](), backprop_cuda.truth(net, rows)
    run = rung.prepare(net, rows, 1)
    got = run()
    verdict = rung.verify(truth, got)
    assert verdict.is_right, f"{name} is off by {verdict.error:.3g}, allowed {verdict.allowed:.3g}"
    assert run.sample_ms() > 0
    assert float(run.facts["first epoch ms"]) > 0
    np.testing.assert_array_equal(run(), got)  # a run starts from the given weights


def test_the_check_finds_one_wrong_value():
    net, rows = random_network(5, (4, 3)), random_rows(20, 5)
    truth = backprop_cuda.truth(net, rows)
    for at in range(len(truth.run)):
        got = truth.run.astype(np.float32)
        assert truth.verify(got).is_right
        got[at] += 1e-4
        assert not truth.verify(got).is_right


@needs_gxx
def test_uploads_take_a_copy_per_row_or_one_or_one_per_stream(monkeypatch):
    net, rows, gpu = random_network(5, (4, 3)), random_rows(20, 5), emulated_gpu(monkeypatch)
    copies = {}
    for name in ("sliding-tiles", "flat-upload", "streams"):
        run = LADDER_RUNGS[name]().prepare(net, rows, 1)
        before = gpu.driver.calls.count("cuMemcpyHtoDAsync")
        run._first_epoch(gpu.stream)
        copies[name] = gpu.driver.calls.count("cuMemcpyHtoDAsync") - before
    rows_of_weights = 5 + 1 + 4 + 1 + 3 + 1
    assert copies == {"sliding-tiles": rows_of_weights + 1 + 20 + 20, "flat-upload": 1, "streams": 2 + 3 * 2}


# -- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 37, 1_000])
@pytest.mark.parametrize("name", RUNGS)
def test_every_rung_is_right(name, n):
    net, rows = backprop.network(seed=n), backprop_cuda.inputs(n)
    rung, truth = RUNGS[name](), backprop_cuda.truth(net, rows)
    run = rung.prepare(net, rows, 1)
    for _ in range(3):
        verdict = rung.verify(truth, run())
        assert verdict.is_right, f"{name} is off by {verdict.error:.3g}, allowed {verdict.allowed:.3g}"
    if not rung.nondeterministic:
        np.testing.assert_array_equal(run(), run())


@pytest.mark.gpu
def test_the_ladder_end_to_end():
    climbed = climb(LADDER, rows=6_000, pace=QUICK)
    assert climbed.all_right
    assert [step.rung for step in climbed.steps] == list(RUNGS)
    assert all(step.timing.median_ms > 0 for step in climbed.steps)
