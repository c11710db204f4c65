"""Gradients of recurrent layers over few sequences, weights in registers: emulated, and on a GPU where there is one."""

import dataclasses

import pytest

from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import claims_of, run_claim
from onchip.kernels.cuda import KERNELS
from onchip.kernels.cuda.recurrent.clusters import MAX_BLOCKS
from onchip.kernels.cuda.recurrent.gradient_resident import RecurrentGradResidentKernel, RecurrentGradResidentLowering
from onchip.network.layers import GRU, LSTM, RNN
from onchip.plan.device import A100, H200
from onchip.plan.kernel import Job, Refusal
from onchip.plan.planner import make_plan
from onchip.runtime.cuda.gpu import Gpu
from onchip.runtime.cuda.step import CudaStep
from recurrent_gradients import CELLS, check, gradient, inputs_of, verify

KERNEL = "recurrent_grad_resident"
RESIDENT = [layer for layer in CELLS if layer != GRU(reset_after=False)]

# A layer, leading axes, units, whether it has a bias or an initial cell, a dtype. A cluster has more than one block.
CASES = {
    "lstm": (LSTM(), (3,), 5, False, "float32"),
    "lstm, one block": (LSTM("bidirectional"), (9,), 33, True, "float32"),
    "lstm, a cluster": (LSTM("reverse"), (3,), 128, True, "float32"),
    "lstm, a warp has two units": (LSTM(), (2,), 130, False, "float32"),
    "lstm, last cell": (LSTM("bidirectional", "cell"), (2, 4), 6, True, "float16"),
    "gru": (GRU("bidirectional"), (9,), 33, True, "float32"),
    "gru, a cluster": (GRU("reverse", "last"), (3,), 90, False, "bfloat16"),
    "rnn": (RNN("bidirectional"), (1,), 1, False, "float32"),
    "rnn, a cluster": (RNN(), (3,), 130, False, "float32"),
    "relu": (RNN("reverse", "last", "relu"), (2, 3), 31, False, "float32"),
}


def resized(lowering, units):
    """The lowering on a GPU of so many SMs: with few, a cluster has several sequences."""
    return dataclasses.replace(lowering, units=units)


@needs_gxx
@pytest.mark.parametrize("case", CASES)
def test_few_sequences(monkeypatch, case):
    gpu, net = emulated_gpu(monkeypatch), gradient(CASES[case][0], 0, *CASES[case][1:])
    (claim,) = claims_of(net, KERNEL)
    assert (claim.facts.clusters.blocks_for(1) > 1) == ("cluster" in case or "two units" in case)
    xs, got = check(gpu, net, 7, kernel=KERNEL)
    assert run_claim(gpu, net, claim, *(x[3:4] for x in xs)).tobytes() == got[3:4].tobytes()
    counts = set()
    for units in (1, 4, 40):
        facts = resized(claim.facts, units)
        counts.add(facts.clusters.sequences_for(7 * facts.sequences))
        _, same = check(gpu, net, 7, lambda _, facts=facts: facts, KERNEL)
        assert same.tobytes() == got.tobytes()
    assert max(counts) >= 4
    assert len(counts) > 1


@needs_gxx
@pytest.mark.parametrize("layer", RESIDENT, ids=str)
def test_initial_states_and_last_outputs(monkeypatch, layer):
    gpu = emulated_gpu(monkeypatch)
    for output in ("sequence", "last", "cell") if isinstance(layer, LSTM) else ("sequence", "last"):
        for direction in ("reverse", "bidirectional"):
            changed = dataclasses.replace(layer, output=output, direction=direction)
            for index in range(layer.states + 1):
                net = gradient(changed, index, (3,), 6, has_extras=output != "last")
                check(gpu, net, 3, kernel=KERNEL)


@needs_gxx
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("layer", RESIDENT, ids=str)
def test_the_initial_state_of_a_cluster(monkeypatch, layer, direction):
    layer = dataclasses.replace(layer, direction=direction)
    check(emulated_gpu(monkeypatch), gradient(layer, 1, (4,), 67, has_extras=True), 1, kernel=KERNEL)


def test_a_block_has_at_most_512_threads_and_a_lane_64_weights():
    for cell, most in (("Lstm", 256), ("GruAfter", 256), ("RnnTanh", 512)):
        for H in (1, 5, 33, 64, 65, 128, 129, 170, 256, 300, 512, 513):
            lowering = RecurrentGradResidentLowering(
                cell, "float32", (0, 1, 2, 3), 1, 9, 1, H, False, "sequence", 0, False, 132, MAX_BLOCKS
            )
            assert lowering.fits == (most >= H)
            for N in (1, 64, 1 << 14) if lowering.fits else ():
                config = lowering.at(N).launches[0].config
                assert config.block[0] <= 512
                assert lowering.chunks * lowering.warp_units <= 16
                assert config.cluster * config.block[0] // 32 * lowering.warp_units >= H
    assert lowering.at(0).launches == ()


def test_few_sequences_keep_the_weights_in_registers():
    net = gradient(LSTM(), 0, (64,), 128)
    kernels = [make_plan(net, H200, KERNELS, Job(batch=B)).groups[0].claim.kernel for B in (1, 64, 1 << 13)]
    assert kernels == [KERNEL, KERNEL, "recurrent_grad"]
    (claim,) = claims_of(net, KERNEL)
    clusters = claim.facts.clusters
    assert [(clusters.blocks_for(N), clusters.sequences_for(N)) for N in (1, 33, 64, 256)] == [
        (4, 1), (4, 1), (2, 1), (2, 4),
    ]  # fmt: skip
    (small,) = claims_of(gradient(LSTM(), 0, (64,), 64), KERNEL)
    assert small.facts.clusters.blocks_for(1) == 1  # of 512 threads: no exchange between blocks


@pytest.mark.parametrize(
    ("layer", "H", "device", "why"),
    [
        (GRU(reset_after=False), 5, H200, "second exchange"),
        (LSTM(), 257, H200, "257 units exceeds the registers of a cluster on sm_90a"),
        (RNN(), 3000, H200, "3,000 units"),
        (LSTM(), 65, A100, "cluster on sm_80"),
    ],
    ids=str,
)
def test_refusals(layer, H, device, why):
    (answer,) = RecurrentGradResidentKernel().claims(gradient(layer, 0, (3,), H), 0, device, Job())
    assert isinstance(answer, Refusal)
    assert why in answer.why
    if device is H200:
        assert claims_of(gradient(layer, 0, (3,), H), "recurrent_grad")


@pytest.mark.gpu
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("case", [*CASES, "step of lstm", "wide"])
def test_few_sequences_on_a_gpu(case, index):
    others = {
        "step of lstm": (LSTM(), (64,), 128, False, "float32"),
        "wide": (LSTM("bidirectional"), (7,), 256, True, "float32"),
    }
    layer, *given = (CASES | others)[case]
    net = gradient(layer, index, *given)
    gpu = Gpu.get()
    step = CudaStep(gpu, make_plan(net, gpu.device, [RecurrentGradResidentKernel()], Job()))

    def run(*xs):
        return step.run(dict(zip(net.inputs, xs, strict=True)), len(xs[0]))["y"]

    xs = inputs_of(net, 1025)
    y = run(*xs)
    verify(net, xs, y)
    assert run(*xs).tobytes() == y.tobytes()
    for rows in (slice(0, 1), slice(1024, 1025), slice(7, 71), slice(100, 400)):
        assert run(*(x[rows] for x in xs)).tobytes() == y[rows].tobytes()
