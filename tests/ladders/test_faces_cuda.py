"""The GPU rungs of faces: compiled, emulated on small generators, and run on machines with a GPU."""

import dataclasses
import re

import numpy as np
import pytest

from emulated_cuda import emulated_gpu, needs_gxx
from onchip.errors import DeviceError
from onchip.kernels.cuda.common.arguments import Int64, Output, UInt32
from onchip.ladders import faces_cuda
from onchip.ladders.device import KERNELS
from onchip.ladders.faces_cuda import HOST_RUNGS, LADDER, LIMIT, REPORT_S, FacesTruth, floor_ms, inputs
from onchip.ladders.faces_steps import EVERY_TCONV, Method, Sizes
from onchip.ladders.frame import climb
from onchip.measure.pace import Pace
from onchip.plan.device import H200
from onchip.runtime.cuda.kernel_check import find_modules, static_shared_bytes
from onchip.runtime.cuda.nvrtc import compile_program, nvrtc_version
from onchip.workloads import faces

RUNGS = {rung.name: rung for rung in (*faces_cuda.RUNGS, *HOST_RUNGS)}
PROGRAMS = {p.name_expression: p for rung in RUNGS.values() for p in rung.programs()}
QUICK = Pace(rounds=1, block_s=0.01, warm_up_s=0.001, pause_s=0, min_runs=2, max_runs=3)
# Generators of the same structure: as many layers, and widths around those of a tile.
SMALL = {"latent": 7, "channels": (6, 5, 4, 3, 3), "start": 1}
ODD = {"latent": 3, "channels": (17, 66, 1), "start": 3}
FULL = Sizes(100, 4, (512, 256, 128, 64, 3))


def with_batch(rung, batch):
    """The same rung, with at most so many faces per launch."""
    method = dataclasses.replace(rung.method, batch=min(batch, rung.method.batch))
    return type(rung.name, (rung,), {"method": method})


# -- what is launched ----------------------------------------------------------------------------------------


def test_sizes_are_those_of_the_network():
    assert Sizes.of(faces.network()) == FULL
    assert FULL.floats == (8_192, 16_384, 32_768, 65_536, 12_288)
    assert FULL.image == (64, 64, 3)
    assert Sizes.of(faces.network(**ODD)) == Sizes(3, 3, (17, 66, 1))
    assert Sizes.of(faces.network(**ODD)).image == (12, 12, 1)


@pytest.mark.parametrize("B", [1, 100, 201])
@pytest.mark.parametrize("name", RUNGS)
def test_launches_match_the_kernels_parameters(name, B):
    method = RUNGS[name].method
    steps = method.steps(FULL, B)
    sources = "".join(path.read_text() for path in KERNELS.glob("faces_*.cu"))
    assert {launch.program for launch in steps.launches} == set(method.programs) == set(RUNGS[name].programs())
    for launch in {launch.program: launch for launch in steps.launches}.values():  # one per kernel
        kernel = launch.program.name_expression.partition("<")[0]
        parameters = re.search(rf"\b{kernel}\(([^)]*)\) {{", sources)[1].split(",")
        assert len(launch.arguments) == len(parameters)
        for argument, parameter in zip(launch.arguments, parameters, strict=True):
            assert isinstance(argument, Int64) == ("long long" in parameter)
            assert isinstance(argument, UInt32) == (re.search(r"\bint ", parameter) is not None)
    batches = -(-B // method.batch)
    direct = min(method.direct, 4)
    assert len(steps.launches) == batches * (10 + 4 - direct) + B * direct
    assert steps.scratch_bytes == 2 * 4 * 65_536 * min(B, method.batch)
    written = [launch for launch in steps.launches if Output(0) in launch.arguments]
    assert [launch.arguments[2].value for launch in written] == [12_288 * first for first in range(0, B, method.batch)]
    assert sum(launch.arguments[3].value for launch in written) == 12_288 * B


def test_choices_of_the_rungs():
    gemms = {name: [rung.method.is_gemm(FULL, i) for i in range(1, 5)] for name, rung in RUNGS.items()}
    assert gemms["direct"] == gemms["parity"] == [False] * 4
    assert gemms["gemm"] == gemms["four-gemms"] == [True] * 4
    assert gemms["two-gemms"] == [True, True, False, False]
    assert gemms["three-gemms"] == gemms["pageable"] == gemms["overlapped"] == [True, True, True, False]
    assert [name for name, rung in RUNGS.items() if rung.method.batch == 1] == ["direct", "parity", "gemm"]
    report = RUNGS["three-gemms"].method
    assert (report.T, report.V, report.batch, report.block) == (16, 4, 100, 128)


def test_gemms_multiply_four_times_as_much():
    net = faces.network()
    tconvs = sum(net.row_flop(node) for node in net.nodes if node.name.startswith("tconv")) - sum(FULL.floats[1:])
    projection = 2 * 100 * 8_192
    assert Method(direct=EVERY_TCONV).flop(FULL) == tconvs + projection
    assert Method().flop(FULL) == 4 * tconvs + projection
    cost = RUNGS["direct"]().cost(net, 7)
    assert (cost.row_flop, cost.fixed_bytes) == (tconvs + projection, 4 * 5_137_283)
    assert 3.0e6 < cost.row_bytes < 3.2e6  # as faces_layers.cu says


def test_the_reports_times_are_those_of_the_best_number_of_gpus():
    assert sorted(REPORT_S) == [10, 100, 880, 1_000, 2_224, 2_512, 4_856, 5_248]
    rung = RUNGS["overlapped"]
    assert {B: rung.report_ms[B] for B in (10, 1_000, 5_248)} == pytest.approx({10: 39, 1_000: 224, 5_248: 504})
    assert {B: rung.report_on[B] for B in (10, 1_000, 5_248)} == {10: "2 GPUs", 1_000: "4 GPUs", 5_248: "8 GPUs"}
    assert LADDER.rows == 5_248


# -- compilation ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _nvrtc():
    try:
        nvrtc_version()
    except DeviceError as error:
        pytest.skip(error.what)


@pytest.mark.usefixtures("_nvrtc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_kernel_compiles_without_spills(name, arch):
    binary = compile_program(PROGRAMS[name], arch)
    assert binary.spill_bytes == 0
    assert binary.registers <= 96
    assert static_shared_bytes(binary) == (1024 if "gemm" in name else 0)  # from the kernel's header


def test_check_kernels_finds_all_of_them():
    assert faces_cuda in find_modules(["onchip.ladders"])
    assert {instance.launch(H200).program for instance in faces_cuda.INSTANCES} == set(PROGRAMS.values())


# -- arithmetic, emulated on the host ------------------------------------------------------------------------


@needs_gxx
@pytest.mark.sample(4)  # every rung
@pytest.mark.parametrize("sizes", [SMALL, ODD], ids=["small", "odd"])
@pytest.mark.parametrize("name", RUNGS)
def test_every_rung_is_right_when_emulated(name, sizes, monkeypatch):
    gpu = emulated_gpu(monkeypatch)
    gpu.driver.lazy = True  # a stream's work is done when the host waits for it
    net, x = faces.network(seed=3, **sizes), inputs(3, sizes["latent"])
    rung = with_batch(RUNGS[name], 2)()
    run, truth = rung.prepare(net, x, 1), FacesTruth(net, x)
    for _ in range(2):
        verdict = rung.verify(truth, run())
        assert verdict.is_right, f"{name} is off by {verdict.error:.3g}"
        assert verdict.error < 1e-5  # the limit is the report's; fp32 is better


@needs_gxx
@pytest.mark.parametrize(("T", "V"), [(4, 4), (8, 2)])
def test_tiles_of_other_sizes(T, V, monkeypatch):
    emulated_gpu(monkeypatch)
    net, x = faces.network(seed=4, **ODD), inputs(1, ODD["latent"])
    rung = type("tiles", (RUNGS["four-gemms"],), {"method": Method(T=T, V=V, block=32)})()
    assert FacesTruth(net, x).verify(rung.prepare(net, x, 1)()).error < 1e-5


@needs_gxx
@pytest.mark.parametrize("name", ["parity", "three-gemms"])
def test_nan_stays_in_its_face(name, monkeypatch):
    emulated_gpu(monkeypatch)
    net, x = faces.network(**SMALL), inputs(3, SMALL["latent"])
    x.host[1, 2] = np.nan
    y = RUNGS[name]().prepare(net, x, 1)()
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[[0, 2]]).all()


@needs_gxx
def test_times_of_many_launches_of_a_kernel_add_up(monkeypatch):
    emulated_gpu(monkeypatch)
    run = RUNGS["two-gemms"]().prepare(faces.network(**ODD), inputs(3, ODD["latent"]), 1)
    launches = [launch.program.name_expression for launch in run._steps.launches]
    first = launches.index("tconv_direct<true>")
    monkeypatch.setattr(run, "_launch_ms", lambda: [1000.0 if i == first else 0.2 for i in range(len(launches))])
    times = {kernel["kernel"]: (kernel["launches"], kernel["ms"]) for kernel in run.kernels}
    assert times["tconv_direct<true>"] == (6, 1001.0)
    assert times["relu_each"] == (2, 0.4)


@needs_gxx
def test_order_of_copies(monkeypatch):
    """z to the GPU, a graph of kernels, images back; the overlapped run copies images out after the next batch is
    sent."""
    gpu = emulated_gpu(monkeypatch)
    net, x = faces.network(**ODD), inputs(3, ODD["latent"])
    calls = {}
    for rung in HOST_RUNGS:
        run = with_batch(rung, 1)().prepare(net, x, 1)
        assert run.facts == {"launches": 3 * 8}
        gpu.driver.calls.clear()
        run()
        of_interest = {
            "cuMemcpyHtoDAsync": "z", "cuGraphLaunch": "kernels", "cuMemcpyDtoHAsync": "images",
            "cuEventSynchronize": "wait",
        }  # fmt: skip
        calls[rung.name] = [of_interest[call] for call in gpu.driver.calls if call in of_interest]
    batch = ["z", "kernels", "images"]
    assert calls["pageable"] == 3 * batch
    assert calls["pinned"] == 3 * [*batch, "wait"]
    assert calls["overlapped"] == [*batch, *2 * ["z", "kernels", "wait", "images"], "wait"]


# -- right or wrong ------------------------------------------------------------------------------------------


def test_the_truth_finds_a_wrong_face():
    net, x = faces.network(seed=1, **SMALL), inputs(150, SMALL["latent"])
    truth = FacesTruth(net, x)
    right = np.zeros((150, 16, 16, 3), np.float32)
    right[truth._rows] = truth.y
    assert truth.verify(right).is_right
    for face in (0, 99, 100, 149):
        wrong = right.copy()
        wrong[face, 15, 3, 1] += 2 * LIMIT
        assert not truth.verify(wrong).is_right
    assert not truth.verify(right[:149]).is_right


def test_floors(monkeypatch):
    class FakeGpu:
        device = H200

        @staticmethod
        def get():
            return FakeGpu

    monkeypatch.setattr(faces_cuda, "Gpu", FakeGpu)
    net = faces.network()
    flop = sum(map(net.row_flop, net.nodes))
    assert floor_ms(net, 5_248, "fp32") == pytest.approx(5_248 * flop / 66.9e12 * 1e3, rel=1e-3)
    assert floor_ms(net, 5_248, "3xtf32") == pytest.approx(10.40, rel=1e-3)


# -- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 99, 101, 250])
@pytest.mark.parametrize("name", [*RUNGS, "onchip"])
def test_every_rung_is_right(name, B):
    net, x = faces.network(), inputs(B)
    (rung,) = LADDER.pick([name])
    run = rung.prepare(net, x, 1)
    got = run().copy()
    verdict = rung.verify(FacesTruth(net, x), got)
    assert verdict.is_right, f"{name} is off by {verdict.error:.3g}, allowed {verdict.allowed:.3g}"
    np.testing.assert_array_equal(run(), got)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RUNGS)
def test_small_and_odd_generators(name):
    for sizes in (SMALL, ODD):
        net, x = faces.network(seed=3, **sizes), inputs(5, sizes["latent"])
        rung = with_batch(RUNGS[name], 2)()
        assert rung.verify(FacesTruth(net, x), rung.prepare(net, x, 1)()).error < 1e-5


@pytest.mark.gpu
def test_the_ladder_end_to_end():
    climbed = climb(LADDER, rows=1_000, pace=QUICK)
    assert climbed.all_right
    assert [step.rung for step in climbed.steps] == [*RUNGS, "onchip"]
    steps = {step.rung: step for step in climbed.steps}
    assert steps["direct"].rows == 100
    assert steps["overlapped"].report_ms == 224
    assert all(step.timing.median_ms > 0 for step in climbed.steps)
