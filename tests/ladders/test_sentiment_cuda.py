"""The GPU rungs of sentiment: they compile as intended, launch what the report launched, and are correct: emulated on
small networks anywhere, at full size on machines with a GPU."""

import re

import numpy as np
import pytest

from emulated_cuda import emulated_gpu, needs_gxx
from emulated_engine import emulate_device
from onchip.errors import DeviceError, PlanError
from onchip.kernels import cuda, reference
from onchip.kernels.cuda.common.arguments import Int64, Output
from onchip.ladders import sentiment_cuda
from onchip.ladders.device import KERNELS, DeviceRows
from onchip.ladders.frame import climb
from onchip.ladders.sentiment_cuda import FOLDED, LADDER, REPORTED, floor_ms
from onchip.ladders.sentiment_report import Sizes
from onchip.ladders.sentiment_truth import SentimentTruth
from onchip.measure.pace import Pace
from onchip.measure.truth import naive_run
from onchip.plan.device import H200
from onchip.runtime.cuda.kernel_check import find_modules, static_shared_bytes
from onchip.runtime.cuda.nvrtc import compile_program, nvrtc_version
from onchip.workloads import sentiment

RUNGS = {rung.name: rung for rung in sentiment_cuda.RUNGS}
ENGINE = [rung for rung in LADDER.rungs if rung.name not in RUNGS]
PROGRAMS = {program: rung for rung in reversed(sentiment_cuda.RUNGS) for program in rung.programs()}
BY_NAME = {program.name_expression: program for program in PROGRAMS}
QUICK = Pace(rounds=1, block_s=0.01, warm_up_s=0.001, pause_s=0, min_runs=2, max_runs=3)
VOCABULARY = 50
NETWORKS = {  # B -> sizes: groups and channels that fill their tiles in part, an odd number of outputs
    18: {"embedding": 32, "channels": 80, "kernels": (2, 3, 4, 5), "length": 9},
    5: {"embedding": 16, "channels": 16, "kernels": (3, 5, 7, 9), "length": 16},
    1: {"embedding": 16, "channels": 528, "kernels": (2, 3, 4, 5), "length": 6},
}


def small_network(B):
    """A network and B sentences."""
    net = sentiment.network(vocabulary=VOCABULARY, hidden=(24, 20, 12), classes=3, **NETWORKS[B])
    ids = np.random.default_rng(B).integers(0, VOCABULARY, (B, NETWORKS[B]["length"]), dtype=np.int32)
    return reference.with_arrays(net), DeviceRows(ids)


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
@pytest.mark.parametrize("name", BY_NAME)
def test_every_kernel_compiles_without_spills(name, arch):
    binary = compile_program(BY_NAME[name], arch)
    assert binary.spill_bytes == 0
    assert binary.registers <= PROGRAMS[BY_NAME[name]].max_registers


@pytest.mark.usefixtures("_nvrtc")
def test_the_tuned_gemm_fills_an_sm_and_the_one_before_does_not():
    """Of 2048 threads per SM, 65,536 registers and 227 KiB of shared memory, in units of 8 registers per thread."""

    def warps(name, threads):
        binary = compile_program(BY_NAME[name], "sm_90a")
        by_registers = 65_536 // (threads * -(-binary.registers // 8) * 8)
        return min(by_registers, (227 << 10) // (static_shared_bytes(binary) + 1024), 2048 // threads) * threads // 32

    assert warps("matmul_tiles<32, 2, true>", 1024) == 64
    assert warps("matmul_tiles<16, 1, false>", 512) < 64


@pytest.mark.usefixtures("_nvrtc")
@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("matmul_wmma", 16_384), ("matmul_tiles<16, 1, false>", 33_792), ("matmul_tiles<32, 2, true>", 33_792),
        ("matmul_joined<14>", 19_968),
    ],
)  # fmt: skip
def test_shared_memory_is_what_the_header_says(name, shared):
    assert static_shared_bytes(compile_program(BY_NAME[name], "sm_80")) == shared


def test_check_kernels_finds_all_of_them():
    assert sentiment_cuda in find_modules(["onchip.ladders"])
    assert {instance.launch(H200).program for instance in sentiment_cuda.INSTANCES} == set(PROGRAMS)


# -- what is launched ----------------------------------------------------------------------------------------


def test_the_reported_sizes_are_those_of_the_network():
    assert Sizes.of(sentiment.network()) == REPORTED
    assert [REPORTED.steps(K) for K in REPORTED.kernels] == [14, 12, 10, 8]


@pytest.mark.parametrize("B", [1, 1024])
@pytest.mark.parametrize("name", RUNGS)
def test_launches_match_the_kernels_parameters(name, B):
    steps = RUNGS[name]().steps(REPORTED, B)
    sources = "".join(path.read_text() for path in KERNELS.glob("*.cu"))
    for launch in steps.launches:
        kernel = launch.program.name_expression.partition("<")[0]
        parameters = re.search(rf"\b{kernel}\(([^)]*long long \w+)\) {{", sources)[1].split(",")
        assert len(launch.arguments) == len(parameters)
        for argument, parameter in zip(launch.arguments, parameters, strict=True):
            if "padded" not in parameter:
                assert isinstance(argument, Int64) != ("*" in parameter)
        assert launch.config.grid[1] < 65_536
    assert steps.launches[-1].arguments[3] == Output(0)
    assert steps.scratch_bytes % 256 == 0


def kernels_of(name, B=1024):
    launches = RUNGS[name]().steps(REPORTED, B).launches
    return [launch.program.name_expression.partition("<")[0] for launch in launches], launches


@pytest.mark.parametrize(("name", "gemms"), [("im2col-wmma", 4), ("pipelined", 16), ("one-im2col", 1)])
def test_a_rung_has_so_many_gemms(name, gemms):
    names, launches = kernels_of(name)
    assert sum(kernel.startswith("matmul") for kernel in names) == gemms
    assert names[-7:] == ["linear_tiled", "relu"] * 3 + ["linear_narrow"]
    if name != "pipelined":
        assert all(launch.after is None for launch in launches)


def test_four_streams_are_four_chains_between_permute_and_concat():
    names, launches = kernels_of("four-streams")
    copies = [i for i, name in enumerate(names) if name == "copy_quads"]
    assert copies == [2, 7, 12, 17]
    assert all(launches[i].after == (1,) for i in copies)
    assert names[2:7] == ["copy_quads", "spread_input", "matmul_tiles", "relu", "take_max"]
    assert launches[names.index("concat_four")].after == (6, 11, 16, 21)


def test_windows_of_the_next_sentences_are_written_during_a_gemm():
    names, launches = kernels_of("pipelined")
    assert names[2:13] == ["copy_quads", *["spread_input", "matmul_tiles"] * 4, "relu", "take_max"]
    assert [launch.after for launch in launches[3:11]] == [(2,), (3,), (3,), (5, 4), (5,), (7, 6), (7,), (9, 8)]
    assert sum(launch.arguments[2].value for launch in launches[3:11:2]) == 1024
    assert [name for name in kernels_of("pipelined", B=1)[0] if name == "spread_input"] == ["spread_input"] * 4


def test_the_reports_rates_are_those_of_several_gpus():
    climbed = {rung.name: (rung.report_ms.get(1024), rung.report_on.get(1024)) for rung in LADDER.rungs}
    assert climbed["shared-tiles"] == (pytest.approx(1e3 * 1024 / 9_622), "4 GPUs, one node")
    assert climbed["pipelined"] == (pytest.approx(1e3 * 1024 / 37_060), "16 GPUs, 4 nodes")
    assert [name for name, (_, on) in climbed.items() if on == "4 GPUs, one node"] == [
        "naive", "im2col-wmma", "shared-tiles",
    ]  # fmt: skip
    assert [name for name, (ms, _) in climbed.items() if ms is None] == [
        "four-streams", "joined-samples", "one-im2col", "onchip-direct", "onchip-folded",
    ]  # fmt: skip


def test_costs():
    net = sentiment.network()
    costs = {name: rung().cost(net, 1024) for name, rung in RUNGS.items()}
    exact = 2 * (1024 * 4096 * (3 * 14 + 5 * 12 + 7 * 10 + 9 * 8) + 11_011_072)
    assert costs["naive"].row_flop == costs["joined-samples"].row_flop == exact
    assert costs["shared-tiles"].row_flop == 2 * (1024 * 4096 * 24 * 16 + 11_011_072)
    windows, x = 2 * 2 * 4096 * 24 * 16, 4 * 16 * 4096
    assert costs["im2col-wmma"].row_bytes - costs["naive"].row_bytes == windows
    assert costs["global-sums"].row_bytes - costs["shared-tiles"].row_bytes == 4 * 2 * 4 * 1024 * 16
    assert costs["four-streams"].row_bytes - costs["global-sums"].row_bytes == 4 * 2 * x
    assert costs["joined-samples"].row_bytes - costs["one-im2col"].row_bytes == 4 * 2 * x
    assert costs["pipelined"].fixed_bytes - costs["four-streams"].fixed_bytes == 3 * 2 * 1024 * 4096 * 24


# -- right or wrong ------------------------------------------------------------------------------------------


def test_fp32_has_the_reports_limit_and_fp16_that_of_a_naive_run():
    net, x = small_network(18)
    truth = SentimentTruth(net, x)
    assert truth.verify(truth.y.astype(np.float32)).is_right
    assert not truth.verify(truth.y + 2e-3 * np.maximum(1, np.abs(truth.y))).is_right
    half = naive_run(net, x.host, "float16")
    assert truth.verify_in("fp16", half).is_right
    allowed = {name: truth.verify_in(name, half).allowed for name in ("fp32", "fp16 convolutions", "fp16")}
    assert allowed["fp32"] == 1e-3
    assert 1e-5 < allowed["fp16 convolutions"] < 0.02
    assert 1e-5 < allowed["fp16"] < 0.02
    assert not truth.verify_in("fp16", half + 2 * allowed["fp16"] * np.maximum(1, np.abs(half))).is_right


def test_floors(monkeypatch):
    monkeypatch.setattr(sentiment_cuda.Gpu, "get", lambda: type("", (), {"device": H200}))
    net, flop = sentiment.network(), 2 * 1024 * (1024 * 4096 * (3 * 14 + 5 * 12 + 7 * 10 + 9 * 8) + 11_011_072)
    assert floor_ms(net, 1024, "fp16") == pytest.approx(flop / 989.5e12 * 1e3, rel=1e-2)
    assert floor_ms(net, 1024, "fp32") == pytest.approx(flop / 66.9e12 * 1e3, rel=1e-2)
    assert floor_ms(net, 1024, FOLDED) < floor_ms(net, 1024, "fp16") / 20
    assert floor_ms(net, 1024, "3xtf32") == pytest.approx(3 * flop / 494.7e12 * 1e3, rel=2e-2)  # of ranks: not folded
    assert floor_ms(net, 65_536, "3xtf32") < 64 * floor_ms(net, 1024, "3xtf32") / 5  # folded


@needs_gxx
@pytest.mark.sample(len(NETWORKS))  # every rung
@pytest.mark.parametrize("B", NETWORKS)
@pytest.mark.parametrize("name", RUNGS)
def test_every_rung_is_right_when_emulated(name, B, monkeypatch):
    gpu = emulated_gpu(monkeypatch)
    net, x = small_network(B)
    run = RUNGS[name]().prepare(net, x, 1)
    got = run()
    verdict = RUNGS[name]().verify(SentimentTruth(net, x), got)
    assert verdict.is_right, f"{name} is off by {verdict.error:.3g}, allowed {verdict.allowed:.3g}"
    np.testing.assert_array_equal(run(), got)
    memory = gpu.driver.memory[run._y.pointer]
    begin = run._y.pointer - memory.ctypes.data
    assert (np.delete(memory, slice(begin, begin + 12 * B)) == 0xAB).all()  # untouched


@needs_gxx
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["naive", "global-sums", "one-im2col"])
def test_a_sentence_with_nan_leaves_the_others_alone_when_emulated(name, monkeypatch):
    emulated_gpu(monkeypatch)
    net, x = small_network(5)
    x.host[x.host == 7] = 8
    x.host[2, 3] = 7
    table = net.weights["emb.weight"].copy()
    table[7, 5] = np.nan
    net = net.replace(weights={**net.weights, "emb.weight": table})
    y = RUNGS[name]().prepare(net, x, 1)()
    assert np.isnan(y[2]).all()
    assert np.isfinite(np.delete(y, 2, axis=0)).all()


@needs_gxx
def test_the_engines_rungs_are_right_when_emulated(monkeypatch):
    emulate_device(monkeypatch)
    monkeypatch.setattr(sentiment_cuda, "ENGINE_KERNELS", cuda.KERNELS)
    net, x = small_network(18)
    truth, (direct, folded) = SentimentTruth(net, x), ENGINE
    with pytest.raises(PlanError, match="does not fold"):  # tables do not pay for a network as small
        folded().prepare(net, x, 1)
    monkeypatch.setattr(sentiment, "SENTENCES", 1 << 30)
    for rung in (direct, folded):
        run = rung().prepare(net, x, 1)
        verdict = rung().verify(truth, run())
        assert verdict.is_right, f"{rung.name} is off by {verdict.error:.3g}, allowed {verdict.allowed:.3g}"
        assert run.facts["launches"] > 1
        assert run.sample_ms() > 0


# -- on a GPU ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full_size():
    return reference.with_arrays(sentiment.network(seed=3))


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 17])
def test_every_rung_is_right(full_size, B):
    x = sentiment_cuda.inputs(B)
    truth = SentimentTruth(full_size, x)
    for rung in LADDER.rungs:
        run = rung().prepare(full_size, x, 1)
        verdict = rung().verify(truth, run())
        assert verdict.is_right, f"{rung.name} is off by {verdict.error:.3g}, allowed {verdict.allowed:.3g}"
        np.testing.assert_array_equal(run(), run())


@pytest.mark.gpu
@pytest.mark.parametrize("B", NETWORKS)
@pytest.mark.parametrize("name", RUNGS)
def test_every_rung_is_right_on_small_networks(name, B):
    net, x = small_network(B)
    assert RUNGS[name]().verify(SentimentTruth(net, x), RUNGS[name]().prepare(net, x, 1)()).is_right


@pytest.mark.gpu
def test_the_ladder_end_to_end():
    climbed = climb(LADDER, rows=64, pace=QUICK)
    assert climbed.all_right
    assert [step.rung for step in climbed.steps] == [rung.name for rung in LADDER.rungs]
    steps = {step.rung: step for step in climbed.steps}
    assert all(step.timing.median_ms > 0 for step in climbed.steps)
    assert steps["onchip-direct"].report_ms is None
    assert steps["onchip-folded"].floor_ms < steps["onchip-direct"].floor_ms
