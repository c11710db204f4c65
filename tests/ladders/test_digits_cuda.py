"""The GPU rungs of digits: compiled, emulated on the host, and run on machines with a GPU."""

import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from emulated_cuda import emulated_gpu, needs_gxx
from onchip.bench.cases.training import TrainingCase
from onchip.bench.peers.torch_training import Autograd
from onchip.errors import DeviceError, PlanError
from onchip.kernels.cuda.common.arguments import Output, State, UInt32, Weight
from onchip.ladders import digits_cuda
from onchip.ladders.device import KERNELS
from onchip.ladders.digits_cuda import LADDER
from onchip.ladders.digits_rung import Step
from onchip.ladders.digits_truth import DigitsTruth, batch_sizes, half_run
from onchip.ladders.frame import climb
from onchip.ladders.training import TrainingRows, floor_ms, layer_arrays, network_of
from onchip.measure.pace import Pace
from onchip.measure.truth import flat_run
from onchip.plan.device import H200
from onchip.runtime.cuda.kernel_check import find_modules, static_shared_bytes
from onchip.runtime.cuda.nvrtc import compile_program, nvrtc_version
from onchip.train.order import epoch_order
from onchip.workloads import digits

RUNGS = {rung.name: rung for rung in LADDER.rungs}
LADDER_RUNGS = {rung.name: rung for rung in digits_cuda.RUNGS}
PROGRAMS = list(dict.fromkeys(p for rung in LADDER_RUNGS.values() for p in rung.programs()))
QUICK = Pace(rounds=1, block_s=0.01, warm_up_s=0.001, pause_s=0, min_runs=2, max_runs=3)
# From the kernels' headers.
SHARED_BYTES = {
    "forward_softmax": 1024, "forward_relu<0>": 2048, "forward_relu<8>": 3072, "forward_softmax<8>": 4096,
    "forward_half<true>": 8704, "forward_vectors<true>": 2368,
}  # fmt: skip


def random_rows(n, pixels, seed=1, classes=digits.CLASSES):
    rng = np.random.default_rng(seed)
    return TrainingRows(rng.random((n, pixels), dtype=np.float32),
                        np.eye(classes, dtype=np.float32)[rng.integers(0, classes, n)])  # fmt: skip


# -- compilation ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _nvrtc():
    try:
        nvrtc_version()
    except DeviceError as error:
        pytest.skip(error.what)


@pytest.mark.sample(5)  # `make check-kernels` compiles all of them
@pytest.mark.usefixtures("_nvrtc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: " ".join((p.name_expression, *p.options)))
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
    assert digits_cuda in find_modules(["onchip.ladders"])
    assert {instance.launch(H200).program for instance in digits_cuda.INSTANCES} == set(PROGRAMS)


@pytest.mark.parametrize(("pad", "ways"), [(0, 8), (1, 1), (2, 1), (4, 2), (8, 4)])
def test_bank_conflicts_of_the_tile_that_z_grad_reads_by_columns(pad, ways):
    """A warp covers two rows of a tile: 16 threads read element k of 16 rows, the others the same elements."""
    words = np.arange(16) * (16 + pad)
    assert np.bincount(words % 32).max() == ways


# -- launches ------------------------------------------------------------------------------------------------


def launches_of(name, n):
    sizes = batch_sizes(n)
    steps = [Step(i, B, (784, 320, 160, 10), sizes[0]) for i, B in enumerate(sizes)]
    return LADDER_RUNGS[name]().epoch(steps)


@pytest.mark.parametrize("name", LADDER_RUNGS)
def test_launches_match_the_kernels_parameters(name):
    """Arguments are pointers, or 32 bits for an int or a float."""
    launches = launches_of(name, 65)
    per_step = {"separate": 18, "online-softmax": 11, "tensor-cores": 11, "vector-loads": 11, "graph": 9}
    later = dict.fromkeys(("atomic-bias", "restrict", "unrolled", "register-cap"), 10)
    assert len(launches) == 2 * (per_step | later).get(name, 13)
    for launch in launches:
        kernel = launch.program.name_expression.partition("<")[0]
        text = launch.program.source.read_text()
        parameters = re.search(rf"\b{kernel}\(([^)]*)\) {{", text)[1].split(",")
        assert len(launch.arguments) == len(parameters)
        for argument, parameter in zip(launch.arguments, parameters, strict=True):
            assert isinstance(argument, UInt32) != ("*" in parameter)
    assert [a for launch in launches for a in launch.arguments].count(Output(0)) == 2
    assert {launch.program.source.parent for launch in launches} == {KERNELS}


IN_PLACE = {"apply_relu", "softmax_row", "mask_by_relu", "online_softmax", "update_weights", "update_layer",
            "update_layer_half", "update_vectors"}  # fmt: skip


@pytest.mark.parametrize("name", LADDER_RUNGS)
def test_the_cost_is_that_of_the_launches(name):
    """Every operand of every launch once, twice where it is read and written."""
    widths, n = (784, 320, 160, 10), 128
    step, passes = Step(0, 64, widths, 64), Counter()
    sizes = {step.a(i): 64 * width for i, width in enumerate(widths[1:])}
    sizes |= {step.dz(i): 64 * width for i, width in enumerate(widths[1:])}
    sizes |= {State(f"w{i}"): K * N for i, (K, N) in enumerate(pairwise(widths))}
    for launch in launches_of(name, n):
        kernel, operands = launch.program.name_expression.partition("<")[0], launch.arguments
        in_place = operands[2 if kernel.startswith("update") else 0] if kernel in IN_PLACE else None
        for operand in operands:
            passes[operand] += 2 if operand == in_place else 1
    sizes |= {Weight(f"{of}{i}"): 64 * width for of, width in (("x", 784), ("y", 10)) for i in range(2)}
    values = sum(count * sizes.get(operand, 0) for operand, count in passes.items())
    cost = RUNGS[name]().cost(digits.network(), n)
    assert cost.row_bytes * n + cost.fixed_bytes == 4 * values
    assert cost.row_flop == 2 * (3 * (784 * 320 + 320 * 160 + 160 * 10) - 784 * 320)


def test_the_graph_has_a_branch_for_the_loss_and_each_other_update():
    launches = launches_of("graph", 130)
    names = [launch.program.name_expression.partition("<")[0] for launch in launches]
    assert names[:9] == [
        "forward_vectors", "forward_vectors", "forward_softmax_grad", "z_grad_vectors", "cross_entropy_sequential",
        "z_grad_vectors", "update_vectors", "update_vectors", "update_vectors",
    ]  # fmt: skip
    assert [launch.after for launch in launches[:9]] == [(), (0,), (1,), (2,), (2,), (3,), (3,), (5,), (5,)]
    assert launches[9].after == (4, 6, 7, 8)
    assert launches[13].after == (4, 11)  # the loss waits for its branch's last launch too: it keeps its stream


def test_more_than_16_classes_are_refused(monkeypatch):
    emulated_gpu(monkeypatch)
    net = digits.network(5, (4,))
    wide = net.replace(weights={**net.weights, "fc2.weight": np.zeros((17, 4)), "fc2.bias": np.zeros(17)})
    with pytest.raises(PlanError, match="17 classes"):
        LADDER_RUNGS["fused"]().prepare(wide, random_rows(3, 5, classes=17), 1)


# -- right or wrong ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    """A network of odd widths, and three steps of which the last is short."""
    net, rows = digits.network(21, (19, 7), seed=3), random_rows(2 * digits.BATCH_SIZE + 5, 21)
    return net, rows, DigitsTruth(net, rows)


def test_fp16_is_checked_against_a_naive_run(small):
    net, rows, truth = small
    naive = half_run(net, rows)
    verdict = truth.verify_in("fp16", naive)
    assert 1e-6 < verdict.error < verdict.allowed < 1e-2
    assert not truth.verify_in("fp32", naive).is_right


@pytest.mark.parametrize("what", ["a loss", "a weight", "a bias", "nan"])
def test_the_check_finds_one_wrong_value(small, what):
    net, _, truth = small
    got = truth.run.astype(np.float32).copy()
    assert truth.verify(got).is_right
    arrays = layer_arrays(net)
    got[{"a loss": 1, "a weight": len(got) - 1, "a bias": 4, "nan": 2}[what]] += np.nan if what == "nan" else 1e-3
    assert not truth.verify(got).is_right
    assert not truth.verify(flat_run(got[:3], network_of(net, arrays))).is_right  # the weights before the first step


@needs_gxx
@pytest.mark.sample(3)  # every kernel file
@pytest.mark.parametrize("pixels", [21, 24])  # 24: rows of x are 16-byte aligned
@pytest.mark.parametrize("name", LADDER_RUNGS)
def test_every_rung_is_right_when_emulated(name, pixels, small, monkeypatch):
    net, rows, truth = small
    if pixels != 21:
        net, rows = digits.network(pixels, (20, 8), seed=3), random_rows(digits.BATCH_SIZE + 7, pixels)
        truth = DigitsTruth(net, rows)
    emulated_gpu(monkeypatch)
    rung = LADDER_RUNGS[name]()
    run = rung.prepare(net, rows, 1)
    got = run()
    verdict = rung.verify(truth, got)
    assert verdict.is_right, f"{name} is off by {verdict.error:.3g}, allowed {verdict.allowed:.3g}"
    assert run.facts["launches"] == len(run._steps.launches)  # its kernels are timed, which trains
    np.testing.assert_array_equal(run(), got)  # the emulator adds atomics in a fixed order


@needs_gxx
def test_a_sample_starts_from_the_given_weights(small, monkeypatch):
    net, rows, truth = small
    emulated_gpu(monkeypatch)
    for name in ("fused", "graph"):
        run = LADDER_RUNGS[name]().prepare(net, rows, 1)
        assert run.sample_ms() > 0
        assert truth.verify(run()).is_right


# -- the torch peer ------------------------------------------------------------------------------------------


def torch_losses(net, x, classes, device):
    """The loss of every batch of fit's first epoch, by torch's autograd and optimiser; and the row order."""
    pytest.importorskip("torch")
    case = TrainingCase(lambda seed: net, x, classes, digits.TRAIN, 1, device)
    run = Autograd(case, form="foreach", compiled=False, device=device)
    steps = len(batch_sizes(len(x)))
    losses = [run.step(*batch).item() for batch, _ in zip(run.batches(), range(steps), strict=False)]
    return np.array(losses), np.concatenate(case.batches(0)[:steps])


@needs_gxx
@pytest.mark.parametrize("name", ["separate", "register-cap"])
def test_every_batch_has_the_loss_of_the_torch_peer(name, monkeypatch):
    n = 3 * digits.BATCH_SIZE + 5
    net, given = digits.network(21, (19, 7)), random_rows(n, 21)
    losses, order = torch_losses(net, given.x, given.y.argmax(axis=1), "cpu")
    emulated_gpu(monkeypatch)
    rows = TrainingRows(given.x[order], given.y[order])
    got = LADDER_RUNGS[name]().prepare(net, rows, 1)()[: len(losses)]
    np.testing.assert_allclose(got, losses, rtol=1e-5)


# -- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("n", [5, 64, 1_000])
@pytest.mark.parametrize("name", RUNGS)
def test_every_rung_is_right(name, n):
    net, rows = digits.network(seed=n), digits_cuda.inputs(n)
    rung, truth = RUNGS[name](), DigitsTruth(net, rows)
    run = rung.prepare(net, rows, 1)
    for _ in range(3):
        verdict = rung.verify(truth, run())
        assert verdict.is_right, f"{name} is off by {verdict.error:.3g}, allowed {verdict.allowed:.3g}"
    if not rung.nondeterministic:
        np.testing.assert_array_equal(run(), run())


@pytest.mark.gpu
def test_every_batch_of_an_epoch_has_the_loss_of_the_torch_peer():
    rows, net = digits_cuda.inputs(12_800), digits.network()
    order = epoch_order(len(rows), digits.TRAIN.seed, 0)
    before = np.argsort(order)  # rows as they were before they were put into training order
    losses, of_torch = torch_losses(net, rows.x[before], rows.y[before].argmax(axis=1), "cuda")
    np.testing.assert_array_equal(of_torch, order)
    got = LADDER_RUNGS["register-cap"]().prepare(net, rows, 1)()[: len(losses)]
    np.testing.assert_allclose(got, losses, rtol=1e-3)


@pytest.mark.gpu
def test_the_ladder_end_to_end():
    climbed = climb(LADDER, rows=6_400, pace=QUICK)
    assert climbed.all_right
    assert [step.rung for step in climbed.steps] == list(RUNGS)
    assert all(step.timing.median_ms > 0 for step in climbed.steps)


def test_the_floor():
    net = digits.network()
    flop = 2 * (3 * (784 * 320 + 320 * 160 + 160 * 10) - 784 * 320)
    split = floor_ms(net, 60_000, "3xbf16", H200)
    assert split == pytest.approx(60_000 * 3 * flop / H200.peak.flops["bf16"] * 1e3)
    assert floor_ms(net, 60_000, "fp32", H200) == pytest.approx(60_000 * flop / H200.peak.flops["fp32"] * 1e3)
