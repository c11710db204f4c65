"""The rungs of the ladder of Linear layers: emulated on small layers, at full size on machines with a GPU."""

import re
from itertools import pairwise

import numpy as np
import pytest

from emulated_cuda import emulated_gpu, needs_gxx
from onchip.errors import DeviceError
from onchip.kernels.cuda.common.arguments import Int64, Output
from onchip.ladders import linear_cuda
from onchip.ladders.device import KERNELS, DeviceRows
from onchip.ladders.frame import climb
from onchip.ladders.linear_cuda import LADDER, NARROW, RELU, TILED, floor_ms
from onchip.measure.pace import Pace
from onchip.measure.truth import Truth
from onchip.network.build import mlp
from onchip.plan.device import H200
from onchip.runtime.cuda.kernel_check import find_modules, static_shared_bytes
from onchip.runtime.cuda.nvrtc import compile_program, nvrtc_version

RUNGS = {rung.name: rung for rung in linear_cuda.RUNGS}
QUICK = Pace(rounds=1, block_s=0.01, warm_up_s=0.001, pause_s=0, min_runs=2, max_runs=3)


def with_biases(net):
    rng = np.random.default_rng(1)
    biases = {name: rng.standard_normal(w.shape).astype("f4") for name, w in net.weights.items() if "bias" in name}
    return net.replace(weights={**net.weights, **biases})


@pytest.fixture(scope="module")
def _nvrtc():
    try:
        nvrtc_version()
    except DeviceError as error:
        pytest.skip(error.what)


@pytest.mark.usefixtures("_nvrtc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("program", "shared"), [(NARROW, 2_176), (TILED, 8_704), (RELU, 0)])
def test_every_kernel_compiles_as_the_header_says(program, shared, arch):
    binary = compile_program(program, arch)
    assert binary.spill_bytes == 0
    assert binary.registers <= 80
    assert static_shared_bytes(binary) == shared


def test_check_kernels_finds_all_of_them():
    assert linear_cuda in find_modules(["onchip.ladders"])
    assert {instance.launch(H200).program for instance in linear_cuda.INSTANCES} == {NARROW, TILED, RELU}


@pytest.mark.parametrize("name", RUNGS)
def test_launches_cover_the_outputs_and_match_the_kernels_parameters(name):
    shapes = {f"fc{i}": (D_out, D_in) for i, (D_in, D_out) in enumerate(pairwise(linear_cuda.WIDTHS), start=1)}
    launches = RUNGS[name]().steps(shapes, 1024).launches
    assert [launch.program for launch in launches] == [RUNGS[name].kernel, RELU] * 3 + [NARROW]
    sources = "".join(path.read_text() for path in KERNELS.glob("*.cu"))
    for launch in launches:
        kernel = launch.program.name_expression.partition("<")[0]
        parameters = re.search(rf"\b{kernel}\(([^)]*long long \w+)\) {{", sources)[1].split(",")
        for argument, parameter in zip(launch.arguments, parameters, strict=True):
            assert isinstance(argument, Int64) != ("*" in parameter)
    assert launches[0].config.grid == {"narrow": (64, 128, 1), "tiled": (16, 32, 1)}[name]
    assert launches[-1].arguments[3] == Output(0)


def test_floors(monkeypatch):
    monkeypatch.setattr(linear_cuda.Gpu, "get", lambda: type("", (), {"device": H200}))
    flop = 2 * 1024 * (4096 * 2048 + 2048 * 1024 + 1024 * 512 + 512 * 2)
    assert floor_ms(LADDER.network(), 1024, "fp32") == pytest.approx(flop / 66.9e12 * 1e3, rel=1e-2)
    assert floor_ms(LADDER.network(), 1024, "3xtf32") == pytest.approx(3 * flop / 494.7e12 * 1e3, rel=1e-2)


@needs_gxx
@pytest.mark.parametrize("B", [1, 17, 70])
@pytest.mark.parametrize("name", RUNGS)
def test_every_rung_is_right_when_emulated(name, B, monkeypatch):
    emulated_gpu(monkeypatch)
    net = with_biases(mlp(36, 72, 20, 3))
    x = DeviceRows(np.random.default_rng(B).standard_normal((B, 36), dtype=np.float32))
    got = RUNGS[name]().prepare(net, x, 1)()
    verdict = Truth(net, x.host).verify(got)  # sums of 72 terms: stricter than the report's limit
    assert verdict.is_right, f"{name} is off by {verdict.error:.3g}, allowed {verdict.allowed:.3g}"
    assert RUNGS[name]().verify(Truth(net, x.host), got).allowed == 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 65, 1024])
@pytest.mark.parametrize("rung", LADDER.rungs)
def test_every_rung_is_right(rung, B):
    net, x = with_biases(LADDER.network()), linear_cuda.inputs(B)
    run = rung().prepare(net, x, 1)
    assert rung().verify(Truth(net, x.host), run()).is_right
    np.testing.assert_array_equal(run(), run())


@pytest.mark.gpu
def test_the_ladder_end_to_end():
    climbed = climb(LADDER, rows=64, pace=QUICK)
    assert climbed.all_right
    assert [step.rung for step in climbed.steps] == ["narrow", "tiled", "onchip"]
