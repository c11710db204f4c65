"""Clocks per phase of the persistent training kernels: what they count, and that nothing else changes."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

import onchip
from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.errors import DeviceError
from onchip.kernels.cuda.common.program import Program, Steps
from onchip.kernels.cuda.train import phases
from onchip.kernels.cuda.train.layer_parallel import layer_parallel
from onchip.kernels.cuda.train.layer_parallel.layer_parallel import LayerParallelLowering
from onchip.kernels.cuda.train.phases import PHASES, step_phases, with_phase_clocks
from onchip.kernels.cuda.train.resident import resident
from onchip.kernels.cuda.train.resident.resident import ResidentLowering
from onchip.plan.device import H200
from onchip.runtime.cuda import devices
from onchip.runtime.cuda.nvrtc import nvrtc_version, read_sources
from onchip.train.loop import fit
from onchip.train.many import Run, fit_runs
from onchip.train.options import TrainOptions
from training_cases import assert_same_bits, case, pixels, train_only_by

EVERY_STEP = {"load weights", "load rows", "forward", "wait for activations", "outputs and loss", "gradients",
              "update", "store weights"}  # fmt: skip
TRIES = 4
RESIDENT, PARALLEL = "mlp_train_resident", "mlp_train_layer_parallel"
# Kernel, SMs, batch, widths, and the phases besides those of every step.
CASES = [
    (RESIDENT, 1, 16, (37, 20, 9, 4), {"wait for gradients"}),
    (RESIDENT, 6, 32, (20, 24, 16, 3), {"wait for gradients", "wait for other group"}),
    (RESIDENT, 6, 16, (20, 21, 17, 9, 5), {"wait for gradients"}),
    (PARALLEL, 7, 64, (37, 20, 9, 4), {"wait for weights"}),
    (PARALLEL, 100, 30, (20, 21, 17, 9, 5), {"wait for weights", "wait for gradients"}),
]


def problem(batch, widths, **training):
    net, _, y, training = case(*widths, n=3 * batch - 1, batch_size=batch, lr=0.1, **training)
    return (net, pixels(len(y), widths[0]), y), {"device": "cuda", "epochs": 2, "seed": 5} | training


def emulate(monkeypatch, kernel, units):
    emulate_device(monkeypatch)
    monkeypatch.setattr(devices, "probe", lambda: ([dataclasses.replace(H200, units=units)], ""))
    train_only_by(monkeypatch, kernel)


def assert_phases(found, kernel, expected):
    """They are those of one launch, and add up to its time."""
    (one,) = found.trainings
    (launch,) = one.launches
    assert one.kernel.startswith(kernel)
    assert {phase.name for phase in launch.phases} == expected
    assert sum(phase.us for phase in launch.phases) == pytest.approx(launch.us)
    assert all(0 < phase.us <= 1.0001 * phase.most_us < launch.us for phase in launch.phases)
    assert launch.profiled_us > 0
    assert f"phase in {launch.kernel}" in found.text
    assert "longest block" in found.text
    assert all(phase.name in found.text for phase in launch.phases)
    assert "launch that counts clocks" in found.text


@needs_gxx
@pytest.mark.parametrize(("kernel", "units", "batch", "widths", "more"), CASES)
def test_a_profile_has_the_phases(kernel, units, batch, widths, more, monkeypatch):
    emulate(monkeypatch, kernel, units)
    arrays, training = problem(batch, widths)
    plain = fit(*arrays, **training)
    with onchip.profile() as found:
        assert_same_bits(fit(*arrays, **training), plain)
    assert_phases(found, kernel, EVERY_STEP | more)


@needs_gxx
@pytest.mark.parametrize("optimiser", [{}, {"optimiser": "adam"}])
@pytest.mark.parametrize(("kernel", "units", "batch", "widths", "more"), CASES)
def test_a_kernel_that_counts_has_the_same_bits(kernel, units, batch, widths, more, optimiser, monkeypatch):
    emulate(monkeypatch, kernel, units)
    arrays, training = problem(batch, widths, **optimiser)
    plain = fit(*arrays, **training)
    lowering_class = ResidentLowering if kernel == RESIDENT else LayerParallelLowering
    steps, extra_memory = lowering_class.steps, lowering_class.extra_memory
    nbytes = 4 * (1 + len(PHASES)) * H200.units
    monkeypatch.setattr(
        lowering_class, "steps", lambda *args: Steps(tuple(map(with_phase_clocks, steps(*args).launches)))
    )
    monkeypatch.setattr(lowering_class, "extra_memory", lambda self: {**extra_memory(self), "phase_clocks": nbytes})
    assert_same_bits(fit(*arrays, **training), plain)


@needs_gxx
def test_networks_in_one_launch(monkeypatch):
    emulate(monkeypatch, RESIDENT, 6)
    arrays, training = problem(32, (20, 24, 16, 3))
    options = {name: each for name, each in training.items() if name not in ("device", "seed")}
    runs = [Run(arrays[0], TrainOptions(**options, seed=seed)) for seed in range(3)]
    plain = fit_runs(runs, *arrays[1:], device="cuda")
    with onchip.profile() as found:
        for one, other in zip(fit_runs(runs, *arrays[1:], device="cuda"), plain, strict=True):
            assert_same_bits(one, other)
    assert_phases(found, RESIDENT, EVERY_STEP | {"wait for gradients", "wait for other group"})


# -- as data -----------------------------------------------------------------------------------------------------


def test_host_and_kernel_name_the_same_phases():
    declared = re.search(r"enum class Phase \{([^}]*)\}", phases.SOURCE.read_text())[1]
    outside, *names, count = (name.strip() for name in declared.rstrip(", \n").split(","))
    assert (outside, count) == ("OUTSIDE", "COUNT")
    assert tuple(name.lower().replace("_", " ") for name in names) == PHASES


def test_clocks_wrap_and_blocks_may_idle():
    clocks = np.zeros((3, 1 + len(PHASES)), np.uint32)
    clocks[0, [0, 1, 3]] = -40 % 2**32, 10, 30
    clocks[2, [0, 1, 3]] = -(2**31 + 2**30) % 2**32, 2**31, 2**30
    assert [(phase.name, phase.us, phase.most_us) for phase in step_phases(clocks, 12.0)] == [
        (PHASES[0], pytest.approx((3 + 8) / 2), pytest.approx(8)),
        (PHASES[2], pytest.approx((9 + 4) / 2), pytest.approx(9)),
    ]


def ptx_of(program: Program, has_phases: bool) -> bytes:
    """The code before ptxas; without phases: of a source that has none."""
    try:
        nvrtc_version()
    except DeviceError as error:
        pytest.skip(error.what)
    from cuda.bindings import nvrtc

    texts = read_sources(program.source, program.name_expression)
    if not has_phases:
        texts = {
            name: re.sub(r"^ *change_phase\(.*\);\n", "", text, flags=re.MULTILINE) for name, text in texts.items()
        }
    main = texts.pop(program.source.name)
    names, headers = ([each.encode() for each in some] for some in (texts.keys(), texts.values()))
    _, handle = nvrtc.nvrtcCreateProgram(main.encode(), b"kernel.cu", len(names), headers, names)
    nvrtc.nvrtcAddNameExpression(handle, program.name_expression.encode())
    options = [b"--gpu-architecture=compute_90a", b"--std=c++17", *(each.encode() for each in program.options)]
    assert int(nvrtc.nvrtcCompileProgram(handle, len(options), options)[0]) == 0
    ptx = bytes(nvrtc.nvrtcGetPTXSize(handle)[1])
    nvrtc.nvrtcGetPTX(handle, ptx)
    nvrtc.nvrtcDestroyProgram(handle)
    return ptx


@pytest.mark.parametrize("module", [resident, layer_parallel])
def test_the_ordinary_kernel_is_as_if_it_had_no_phases(module):
    launch = module.INSTANCES[0].launch(H200)
    for _ in range(TRIES):  # NVRTC's order of instructions varies now and then
        ordinary, without = (ptx_of(launch.program, has_phases) for has_phases in (True, False))
        if ordinary == without:
            break
    assert ordinary == without
    assert b"%clock" not in ordinary
    counting = ptx_of(with_phase_clocks(launch).program, True)
    assert counting.count(b"%clock") > len(EVERY_STEP)


# -- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [16, 64])
@pytest.mark.parametrize("kernel", [RESIDENT, PARALLEL])
def test_a_profile_of_digits(kernel, batch, monkeypatch):
    train_only_by(monkeypatch, kernel)
    net, _, y, training = case(784, 320, 160, 10, n=batch * 60 + 13, batch_size=batch, lr=0.03)
    x = pixels(len(y), 784)
    options = {"device": "cuda", "epochs": 2, "seed": 5} | training
    plain = fit(net, x, y, **options)
    with onchip.profile() as found:
        assert_same_bits(fit(net, x, y, **options), plain)
    more = {"wait for weights"} if kernel == PARALLEL else {"wait for gradients"}
    more |= {"wait for other group"} if (kernel, batch) == (RESIDENT, 64) else set()
    assert_phases(found, kernel, EVERY_STEP | more)
