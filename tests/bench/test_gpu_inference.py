"""The cases for a GPU on a stage of NumPy arrays; on a real GPU, every peer at small odd shapes."""

import dataclasses
import functools
import json
import sys
import types
import weakref

import numpy as np
import pytest

from checks import random_mlp, rows
from image_networks import residual
from numpy_jax import numpy_jax
from numpy_stage import NumpyStage
from onchip.bench import command
from onchip.bench.cases import decode, gpu_inference, mlp
from onchip.bench.cases.gpu_inference import GpuJob, floor_ms, gpu_cases
from onchip.bench.cases.inference import BASELINE_ROWS
from onchip.bench.frame import Reporter, UnavailableError, run_cases
from onchip.bench.gpu_clock import CALLS, Forward, GpuClock, check, fastest
from onchip.bench.options import Options
from onchip.bench.peers import gpu as gpu_peers
from onchip.bench.peers.dense import dense_layers
from onchip.bench.peers.gpu import Allowance, GpuTask
from onchip.errors import InputError, PlanError
from onchip.kernels import reference
from onchip.measure.pace import OwnClock, Pace
from onchip.measure.truth import Truth, Verdict
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.runtime.placement import plan
from onchip.workloads import load
from text_networks import text_network

QUICK = Pace(rounds=2, block_s=0.001, warm_up_s=0, pause_s=0, min_runs=1, max_runs=2)


class Stage(NumpyStage):
    """A graph takes half the time."""

    def ms(self, work):
        work()
        return float(CALLS if hasattr(work, "times") else 2 * CALLS)


@pytest.fixture
def fake_gpu(monkeypatch):
    """A GPU that runs the reference: `engine` computes y from x, and tests may replace it."""
    fake = types.SimpleNamespace(requested=[], engine=lambda net, x, y: y.__setitem__(..., reference.forward(net, x)))

    def compile(net, device, precision, batch_hint, io):
        fake.requested.append((device, precision, batch_hint, io))
        return lambda x, out: fake.engine(net, x if x.dtype.kind == "i" else x.astype(np.float32), out)

    monkeypatch.setattr(gpu_inference, "make_stage", Stage)
    monkeypatch.setattr(gpu_inference, "compile", compile)
    for module in (gpu_inference, command):
        monkeypatch.setattr(module, "find_device", lambda name, threads=None: (H200, None, "cuda:0 (auto: it is here)"))
    monkeypatch.setattr("onchip.bench.stage.measure_ceilings", lambda index: {"copy_bytes_per_s": 4e12})
    return fake


def job(B=33, **options):
    net = random_mlp(9, 12, 5)
    x = np.random.default_rng(3).standard_normal((B, 9), dtype=np.float32)
    return GpuJob(f"{B} rows", net, B, lambda count: np.resize(x, (count, x.shape[1])), **options)


# -- cases -------------------------------------------------------------------------------------------------


def test_the_cases_of_decode(fake_gpu):
    jobs = decode.gpu_jobs(())
    assert [(job.case, job.precision, job.io) for job in jobs] == [
        ("2097152 rows", "fp16", "fp16"), ("12800 rows, in a graph", "fp16", "fp16"),
        ("12800 rows, a call, synchronised", "fp16", "fp16"), ("2097152 rows, fp32 in and out", "fp16", "fp32"),
        ("2097152 rows", "bf16", "bf16"), ("2097152 rows", "tf32", "fp32"), ("2097152 rows", "fp32", "fp32"),
    ]  # fmt: skip
    assert [job.synchronised for job in jobs] == [False, False, True, False, False, False, False]
    cases = decode.cases(Options(device="cuda", peers=True, rows=(7, 5)))
    assert [case.case for case in cases if case.engine == "onchip"] == ["7 rows", "5 rows"]
    assert [case.engine for case in cases[:6]] == ["onchip", *gpu_peers.make_peers()]


def test_the_cases_of_mlp(fake_gpu):
    on_gpu, on_cpu = ([c.case for c in mlp.cases(Options(device=device))] for device in ("cuda", "cpu"))
    assert on_gpu == on_cpu
    assert len(on_gpu) == 20
    assert {"128-64x5-3, 262144 rows", "16-32-1, 1 row", "100-200-200-10, 7 rows"} <= set(on_gpu)
    net = mlp.network(*mlp.SHAPES["128-128x5-3"])
    assert [len(layer.weight) for layer in dense_layers(net)] == [128, 128, 128, 128, 128, 3]
    assert all(np.any(layer.bias) for layer in dense_layers(net))


def test_the_floor_is_the_plans():
    true_fp32 = GpuJob("", decode.decode.network(), 2_097_152, lambda count: None, "fp32", "fp32")
    assert 1e3 * floor_ms(true_fp32, H200) == plan(true_fp32.net, H200, Job("fp32", true_fp32.B)).floor_us


def test_a_job_without_a_kernel_is_skipped(fake_gpu, monkeypatch):
    def refuse(*_, **__):
        raise PlanError("no kernel takes it")

    monkeypatch.setattr(gpu_inference, "compile", refuse)
    monkeypatch.setattr(gpu_inference, "plan", refuse)
    outcome = run_cases(gpu_cases("mlp", [job()], Options(device="cuda")), QUICK)
    assert outcome.rows == ()
    assert outcome.skipped == {"onchip": "no kernel for 33 rows, fp16: no kernel takes it"}


# -- checked, then timed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("io", ["fp16", "fp32"])
def test_onchip_is_checked_and_timed(fake_gpu, io):
    outcome = run_cases(gpu_cases("mlp", [job(io=io)], Options(device="cuda:0")), QUICK)
    (row,) = outcome.rows
    assert row.checked, row.error
    assert (row.precision, row.threads, row.median_ms) == ("fp16", None, 1.0)
    assert row.setting == "graph of 20 calls, random data, the same in every call: what fits stays in L2"
    assert fake_gpu.requested == [("cuda:0", "fp16", 33, io)]


def test_an_unwritten_row_is_wrong(fake_gpu):
    def lazy(net, x, y):
        y[:-1] = reference.forward(net, x[:-1])

    task = job(500, verified=5)
    verified = gpu_inference.load_job(task, 0).verified
    assert (verified[0], verified[-1], len(verified)) == (0, 499, 5)

    def skips(net, x, y):
        y[...] = reference.forward(net, x)
        y[next(i for i in range(500) if i not in verified)] = np.nan

    for engine in (lazy, skips, lambda net, x, y: y.fill(0)):
        fake_gpu.engine = engine
        outcome = run_cases(gpu_cases("mlp", [task], Options(device="cuda")), QUICK)
        assert outcome.exit_code == 1
        assert outcome.rows[0].median_ms is None


@pytest.mark.parametrize(("precision", "io"), [("fp16", "fp16"), ("bf16", "bf16"), ("tf32", "fp32"), ("fp32", "fp32")])
def test_the_allowed_error_depends_on_the_precision(fake_gpu, precision, io):
    ulp = {"fp16": 2e-3, "tf32": 2e-3, "bf16": 2e-2, "fp32": 1e-6}[precision]
    loaded = gpu_inference.load_job(job(precision=precision, io=io), 0)
    assert ulp / 20 < loaded.truth.allowed < 20 * ulp
    truth = loaded.truth.y.astype(np.float32)
    assert loaded.verify(truth + np.float32(loaded.truth.allowed / 4)).is_right
    assert not loaded.verify(truth + np.float32(20 * loaded.truth.allowed)).is_right
    assert not loaded.verify(truth[:-1]).is_right


def test_the_fastest_way_is_chosen():
    stage = Stage()
    y = np.zeros(3)
    run, name = fastest({"a": Forward(lambda: y, captures=False), "b": Forward(lambda: y)}, stage, False)
    assert (name, run.sample_ms()) == ("b, graph of 20 calls", 1.0)
    run, name = fastest({"a": Forward(lambda: y, captures=False)}, stage, False)
    assert (name, run.sample_ms()) == ("a, 20 calls", 2.0)
    assert isinstance(run, OwnClock)
    assert run() is y


def test_a_slower_graph_is_freed_before_the_next_is_recorded():
    """Each holds the memory of all activations."""
    graphs, alive_at_trim = [], []

    class Counting(Stage):
        def record(self, work, times):
            graph = super().record(work, times)
            graphs.append(weakref.ref(graph))
            return graph

        def trim(self):
            alive_at_trim.append(sum(graph() is not None for graph in graphs))

    y = np.zeros(3)
    run, name = fastest({name: Forward(lambda: y, eager=False) for name in "abc"}, Counting())
    assert (name, len(graphs), alive_at_trim) == ("a, graph of 20 calls", 3, [1, 1, 1])
    assert run() is y


def test_cached_memory_is_freed_before_an_engine_is_checked():
    """The first launch of a graph allocates memory, which peers that were prepared later may have cached."""
    calls = []

    class Trimmed(Stage):
        def trim(self):
            calls.append("trim")

    stage, y = Trimmed(), np.zeros(3)
    run = GpuClock(stage, lambda: calls.append("run") or y, 1)
    assert check(stage, run, lambda y: Verdict(0, 1)).is_right
    assert calls == ["trim", "run", "run"]


def test_a_synchronised_call_is_one_call_and_a_wait():
    stage, calls = Stage(), []
    run, name = fastest({"": Forward(lambda: calls.append(1) or "y", captures=False)}, stage, True)
    calls.clear()
    stage.waits = 0
    assert run() == "y"
    assert run.sample_ms() > 0
    assert (name, len(calls), stage.waits) == ("", 2, 2)


def test_an_engine_with_its_own_streams_is_waited_for():
    stage, waited = Stage(), []
    for synchronised, times in ((False, CALLS), (True, 1)):
        calls = []
        forward = Forward(lambda calls=calls: calls.append(1) or len(calls), captures=False, wait=waited.append)
        run, _ = fastest({"": forward}, stage, synchronised)
        calls.clear()
        waited.clear()
        assert run() == times
        assert run.sample_ms() > 0
        assert waited == [times, 2 * times]
    assert stage.waits == 0


def test_a_peer_without_torch_is_skipped(fake_gpu):
    lines = []
    cases = gpu_cases("mlp", [job()], Options(device="cuda", peers=True))
    outcome = run_cases(cases, QUICK, Reporter(log=lines.append))
    assert [row.engine for row in outcome.rows] == ["onchip"]
    assert set(outcome.skipped) == set(gpu_peers.make_peers())
    assert "is not installed" in outcome.skipped["triton"]


def test_ids_are_passed_unchanged(fake_gpu):
    net = text_network(V=9, E=3, S=5, branches=((2, 4),))
    ids = np.random.default_rng(3).integers(0, 9, (33, 5)).astype(np.int32)
    received = []

    def engine(net, x, y):
        received.append(x.copy())
        y[...] = reference.forward(net, x)

    fake_gpu.engine = engine
    task = GpuJob("ids", net, 33, lambda count: np.resize(ids, (count, 5)), verified=20)
    (row,) = run_cases(gpu_cases("imported", [task], Options(device="cuda")), QUICK).rows
    assert row.checked, row.error
    assert len(gpu_inference.load_job(task, 0).verified) <= 20
    assert np.array_equal(received[0], ids)
    assert gpu_inference.load_job(task, 0).x[0].dtype == np.int32


def test_a_long_job_has_fewer_calls_per_sample():
    assert [gpu_inference.calls_of(floor) for floor in (None, 0.001, 0.99, 4.0, 70.0)] == [20, 20, 5, 1, 1]


# -- peers -------------------------------------------------------------------------------------------------


def test_torch_also_runs_the_original_module():
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.ReLU())
    net = load(module, torch.zeros(2, 2, 5, 4))
    x, stage = torch.randn(3, 2, 5, 4), types.SimpleNamespace(torch=torch, device="cpu", channels_last=None)
    calls = gpu_peers.torch_calls(GpuTask(net, "bf16", "float32", x, module=lambda: module), stage)
    assert list(calls) == ["", "NHWC", "as written", "as written, NHWC"]
    for call in calls.values():
        torch.testing.assert_close(call(x), module(x), rtol=0.02, atol=0.02)
    assert {p.dtype for p in module.parameters()} == {torch.float32}  # it is not modified


def test_a_spent_allowance_is_an_error():
    allowance = Allowance(0.0)
    with pytest.raises(UnavailableError, match="0 s"), allowance.spend("frob"):
        pytest.fail("no time is left")
    allowance = Allowance(1e-9)
    with allowance.spend("frob"):
        pass
    with pytest.raises(UnavailableError), allowance.spend("frob"):
        pass


def test_slow_compilers_are_skipped_in_small_cases():
    task = GpuTask(random_mlp(4, 3), "fp16", "float16", np.zeros((7, 4)))
    peers = gpu_peers.make_peers()
    for name in ("torch.compile", "jax"):
        with pytest.raises(UnavailableError, match=f"{name} .* 12,800 rows"):
            peers[name](task, None)


@pytest.mark.parametrize(("precision", "io"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float32")])
def test_torch_converts_inputs_and_outputs(precision, io):
    torch = pytest.importorskip("torch")
    net, x = random_mlp(9, 12, 5), rows(33, 9)
    rounded = torch.from_numpy(x).to(getattr(torch, io))
    task = GpuTask(net, precision, io, rounded)
    stage = types.SimpleNamespace(torch=torch, device="cpu")
    for build in (gpu_peers.torch_eager, gpu_peers.torch_graph):
        (forward,) = build(task, stage).values()
        assert forward.captures != forward.eager
        y = forward.call()
        assert y.dtype == rounded.dtype
        error = np.abs(y.double().numpy() - reference.forward(net, x)).max()
        assert error < {"fp32": 1e-5, "bf16": 0.1, "fp16": 1e-2}[precision]
        assert (error > 1e-5) == (precision != "fp32")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_torch_tries_images_in_nhwc(precision):
    torch = pytest.importorskip("torch")
    net, x = residual(), rows(5, 3, 9, 11)
    task = GpuTask(net, precision, "float32", torch.from_numpy(x))
    stage = types.SimpleNamespace(torch=torch, device="cpu")
    for build in (gpu_peers.torch_eager, gpu_peers.torch_graph):
        variants = build(task, stage)
        assert list(variants) == ["", "NHWC"]
        for forward in variants.values():
            error = np.abs(forward.call().double().numpy() - reference.forward(net, x)).max()
            assert error < {"fp32": 1e-5, "bf16": 0.2}[precision]


def test_torch_gets_ids_unchanged():
    torch = pytest.importorskip("torch")
    net = text_network(dtype="int64")
    ids = np.random.default_rng(0).integers(0, 60, (7, 11))
    stage = types.SimpleNamespace(torch=torch, device="cpu")
    for precision, io in (("fp32", "float32"), ("bf16", "float32")):
        (forward,) = gpu_peers.torch_eager(GpuTask(net, precision, io, torch.from_numpy(ids)), stage).values()
        assert np.abs(forward.call().double().numpy() - reference.forward(net, ids)).max() < 0.5


@pytest.mark.parametrize(("precision", "io"), [("fp32", "float32"), ("fp16", "float16"), ("fp16", "float32")])
def test_jax_runs_the_same_network(precision, io, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(gpu_peers, "load_jax", numpy_jax)
    monkeypatch.setitem(sys.modules, "jax", types.ModuleType("jax"))
    monkeypatch.setitem(sys.modules, "jax.dlpack", types.SimpleNamespace(from_dlpack=lambda x: x.numpy()))
    ids = np.random.default_rng(0).integers(0, 60, (7, 11))
    networks = (
        (random_mlp(9, 12, 5), rows(33, 9)),
        (residual(), rows(5, 3, 9, 11)),
        (text_network(dtype="int64"), ids),
    )
    for net, x in networks:
        x_torch = torch.from_numpy(x)
        task = GpuTask(net, precision, io, x_torch.to(getattr(torch, io)) if x_torch.is_floating_point() else x_torch)
        (forward,) = gpu_peers.make_network_peers(min_rows=1)["jax"](task, None).values()
        y = forward.call()
        forward.wait(y)
        assert y.dtype == io
        assert not forward.captures
        near = 1e-5 if precision == "fp32" else 0.1
        np.testing.assert_allclose(y.astype(np.float64), reference.forward(net, x), rtol=near, atol=near)


def test_torch_compiles_the_faster_layout(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    stage = types.SimpleNamespace(torch=torch, ms=lambda work: work(), synchronise=lambda: None)
    task = GpuTask(residual(), "fp16", "float16", rows(5, 3, 9, 11))
    for ms, best in (
        ({"": 1.0, "NHWC": 2.0}, ("default", 1.0)),
        ({"": 2.0, "NHWC": 1.5}, ("default, NHWC", 1.5)),
        ({"": 3.0}, ("default", 3.0)),
    ):
        calls = {name: lambda x, ms=ms[name]: ms for name in ms}  # a call that returns its time
        monkeypatch.setattr(gpu_peers, "torch_calls", lambda task, stage, calls=calls: calls)
        ((name, forward),) = gpu_peers.make_network_peers(min_rows=1)["torch.compile"](task, stage).items()
        assert (name, forward.call()) == best


def test_dense_layers():
    net = random_mlp(4, 3, 2, output="ReLU")
    layers = dense_layers(net)
    h = np.random.default_rng(0).standard_normal((5, 4))
    truth = reference.forward(net, h)
    for layer in layers:
        h = h @ layer.weight.T + layer.bias
        h = np.maximum(h, 0) if layer.relu else h
    np.testing.assert_allclose(h, truth, rtol=1e-12)
    assert dense_layers(random_mlp(4, 2, bias=False))[0].bias is None
    with pytest.raises(UnavailableError, match="Tanh"):
        dense_layers(random_mlp(4, 3, 2, activation="Tanh"))


# -- the command -------------------------------------------------------------------------------------------


def test_the_result_file_of_a_gpu(fake_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(command.machine, "versions", lambda device: {"nvrtc": "13.0"})
    options = Options(device="cuda:0", rows=(7,))
    written, exit_code = command.run_benchmarks(["decode", "mlp"], options, tmp_path, pace=QUICK)
    assert exit_code == 0
    assert list(written) == ["decode", "mlp"]
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json")) == [
        "h200/decode.json", "h200/mlp.json",
    ]  # fmt: skip
    document = json.loads((tmp_path / "h200" / "decode.json").read_text())
    assert document["machine"]["ceilings"] == {"copy_bytes_per_s": 4e12}
    assert document["versions"] == {"nvrtc": "13.0"}
    assert [(row["case"], row["precision"], row["checked"]) for row in document["rows"]] == [("7 rows", "fp16", True)]


def test_an_unknown_benchmark(fake_gpu, tmp_path):
    with pytest.raises(InputError, match="unknown benchmark"):
        command.run_benchmarks(["none"], Options(device="cuda"), tmp_path)


def test_auto_is_the_gpu_if_there_is_one(fake_gpu):
    lines = []
    reporter = Reporter(log=lines.append)
    assert command.choose_device("auto", None, reporter) == "cuda:0"
    assert command.choose_device("cuda:1", None, reporter) == "cuda:1"
    assert lines == ["device: cuda:0 (auto: it is here)"]


def test_threads_are_the_cpus():
    reporter = Reporter()
    assert command.choose_device("auto", 2, reporter) == "cpu"
    assert command.choose_device("cpu", 2, reporter) == "cpu"
    with pytest.raises(InputError, match="only a CPU has threads"):
        command.choose_device("cuda", 2, reporter)


# -- on a GPU ----------------------------------------------------------------------------------------------

TASKS = [("fp16", "fp16"), ("fp16", "fp32"), ("bf16", "bf16"), ("tf32", "fp32"), ("fp32", "fp32")]


def normal_rows(D_in, count):
    return np.random.default_rng(3).standard_normal((count, D_in), dtype=np.float32)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "io"), TASKS, ids=str)
@pytest.mark.parametrize("name", ["onchip", *gpu_peers.make_peers()])
def test_every_engine_is_right_on_odd_shapes(name, precision, io, monkeypatch):
    if name == "torch.compile" and (precision, io) != ("fp16", "fp32"):
        pytest.skip("compiling takes seconds each: one is enough")
    monkeypatch.setattr(gpu_peers, "COMPILED_ROWS", 1)
    monkeypatch.setattr(gpu_peers, "MODE", "default")  # quicker to compile
    monkeypatch.setattr("onchip.bench.peers.triton_search.TUNE_S", 2.0)
    for widths, B in (((72, 64, 64, 4), 333), ((17, 33, 33, 33, 5), 1)):
        net = random_mlp(*widths, bias=B == 1)
        task = GpuJob(f"{B} rows", net, B, functools.partial(normal_rows, widths[0]), precision, io)
        options = Options(device="cuda", peers=True)
        for synchronised in (False, True):
            cases = gpu_cases("mlp", [dataclasses.replace(task, synchronised=synchronised)], options)
            outcome = run_cases([case for case in cases if case.engine == name], QUICK)
            if outcome.skipped and "not installed" in outcome.skipped[name]:
                pytest.skip(outcome.skipped[name])
            assert not outcome.skipped
            assert outcome.exit_code == 0, outcome.wrong
            assert outcome.rows[0].median_ms > 0


@pytest.mark.gpu
def test_onchip_without_torch(monkeypatch):
    monkeypatch.setattr("onchip.bench.stage.has_torch", lambda: False)
    task = job(333)
    for synchronised in (False, True):
        cases = gpu_cases("mlp", [dataclasses.replace(task, synchronised=synchronised)], Options(device="cuda"))
        outcome = run_cases(cases, QUICK)
        assert outcome.exit_code == 0, outcome.wrong
        assert outcome.rows[0].median_ms > 0


@pytest.mark.gpu
def test_ceilings_are_plausible():
    from onchip.bench.stage import measure_ceilings

    found = measure_ceilings(0)
    assert 1e10 < found["copy_bytes_per_s"] < 2e13
    assert 1e11 < found.get("fp16_product_flops", 1e12) < 1e16


def test_few_rows_are_checked_with_the_baseline_error_of_many():
    net = mlp.network(48, 128, 3)
    many = mlp.inputs(BASELINE_ROWS, 48)
    steady = mlp.steady_truth(net, many)
    few = mlp.steady_truth(net, many[:1])
    assert few.allowed == steady.allowed == Truth(net, many).allowed
    assert Truth(net, many[:1]).allowed < few.allowed  # the error of three values, by chance
    assert len(few.y) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["onchip", "torch eager", "torch graph", "jax"])
def test_imported_networks_on_a_gpu(name):
    if name != "onchip":
        pytest.importorskip("torch")
    if name == "jax":
        pytest.importorskip("jax")
    networks = {"image": (residual(), (3, 9, 11)), "text": (text_network(dtype="int64"), (11,))}
    for kind, (net, row_shape) in networks.items():

        def inputs(count, kind=kind, row_shape=row_shape):
            rng = np.random.default_rng(3)
            if kind == "text":
                return rng.integers(0, 60, (count, *row_shape))
            return rng.standard_normal((count, *row_shape), dtype=np.float32)

        jobs = [GpuJob(kind, net, 70, inputs, precision, precision, verified=64) for precision in ("fp32", "fp16")]
        cases = gpu_cases("imported", jobs, Options(device="cuda", peers=True), gpu_peers.make_network_peers(1))
        outcome = run_cases([case for case in cases if case.engine == name], QUICK)
        assert not outcome.skipped
        assert outcome.exit_code == 0, outcome.wrong
        assert [row.precision for row in outcome.rows] == ["fp32", "fp16"]
