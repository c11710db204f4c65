"""Sentiment and faces on a GPU: torch on its CPU, onchip as the reference; on a real GPU, small sizes of both."""

import types

import numpy as np
import pytest

from checks import rows
from emulated_cuda import needs_gxx
from emulated_engine import emulate_device
from onchip.bench.cases import faces, gpu_host, gpu_inference, sentiment, sentiment_rows, sentiment_tables
from onchip.bench.cases.sentiment_rows import Truths, exact_truth, random_ids, zipf_ids
from onchip.bench.frame import run_cases
from onchip.bench.options import Options
from onchip.bench.peers import faces as faces_peers
from onchip.bench.peers import sentiment as sentiment_peers
from onchip.bench.peers.gpu import GpuTask
from onchip.kernels import reference
from onchip.measure.pace import Pace
from onchip.network.recipe import materialise
from onchip.plan.device import H200
from onchip.plan.kernel import Job
from onchip.plan.planner import make_plan
from onchip.runtime.placement import kernels_for
from onchip.workloads import faces as faces_work
from onchip.workloads import sentiment as sentiment_work
from torch_stage import CpuTorchStage

QUICK = Pace(rounds=2, block_s=0.001, warm_up_s=1e-9, pause_s=0, min_runs=1, max_runs=2)
SENTENCES = {"vocabulary": 37, "embedding": 24, "channels": 20, "kernels": (2, 3), "length": 7, "hidden": (19, 8),
             "classes": 12}  # fmt: skip
FACES = {"latent": 7, "channels": (6, 5, 3), "start": 3}


@pytest.fixture
def torch_gpu(monkeypatch):
    """torch's CPU as the GPU, nothing compiled, onchip runs the reference; returns its compile calls."""
    torch, requested = pytest.importorskip("torch"), []

    class Engine:
        plan = types.SimpleNamespace(fold="folded", device=H200)

        def __init__(self, net):
            self.net, self.output = net, net.output

        def __call__(self, x, out=None):
            y = reference.forward(self.net, np.asarray(x))
            if isinstance(out, np.ndarray):
                out[...] = y
            elif out is not None:
                out.copy_(torch.from_numpy(y))
            return y

    def compile(net, device, precision, batch_hint, io="", **options):
        requested.append((precision, batch_hint, io, options))
        return Engine(net)

    class NoStream:
        def __getattr__(self, name):
            return lambda *_: None

    monkeypatch.setattr(gpu_host, "chunk_rows", lambda plan: 300)
    monkeypatch.setattr(sentiment_tables, "builder", lambda plan, index: lambda: None)
    for module in (gpu_inference, gpu_host, sentiment_tables):
        monkeypatch.setattr(module, "compile", compile)
        monkeypatch.setattr(module, "make_stage", CpuTorchStage)
    monkeypatch.setattr(gpu_inference, "find_device", lambda name: (H200, None, "cuda:0"))
    monkeypatch.setattr(gpu_inference, "calls_of", lambda floor: 1)
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "current_stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    return requested


def without_jax(cases):
    return [case for case in cases if case.engine != "jax"]


# -- faces -------------------------------------------------------------------------------------------------


def test_faces(torch_gpu, monkeypatch):
    monkeypatch.setattr(faces, "GPU_ROWS", (40, 50, 1, 3))
    monkeypatch.setattr(faces, "GPU_FEW", 3)
    monkeypatch.setattr(faces_peers, "CHUNK", 16)
    outcome = run_cases(faces.cases(Options(device="cuda", peers=True), **FACES), QUICK)
    assert outcome.exit_code == 0, outcome.wrong
    assert not outcome.skipped
    assert list(dict.fromkeys((row.case, row.precision) for row in outcome.rows)) == [
        ("40 images", "fp16"), ("50 images", "fp16"), ("1 image, a call, synchronised", "fp16"),
        ("3 images, a call, synchronised", "fp16"), ("40 images", "tf32"), ("40 images", "fp32"),
        ("50 images, to the host", "fp16"), ("50 images, to the host, uint8", "fp16"),
    ]  # fmt: skip
    few = ["onchip", "torch eager", "torch graph", "torch.compile, four phases"]
    assert [row.engine for row in outcome.rows if row.case.startswith("1 image")] == few
    assert [row.engine for row in outcome.rows if row.case.endswith("uint8")] == ["onchip", faces_peers.PHASES]
    assert all(row.unit == "images/s" for row in outcome.rows)
    assert torch_gpu[0] == ("fp16", 40, "fp16", {})
    assert torch_gpu[-1] == ("fp16", 50, "", {})


def test_four_phases_give_the_same_images():
    torch = pytest.importorskip("torch")
    net, x = faces_work.network(**FACES), rows(5, 7)
    assert not any("Transpose" in node.layer.kind for node in faces_peers.four_phases(net).nodes)
    task, stage = GpuTask(net, "fp32", "float32", torch.from_numpy(x)), CpuTorchStage()
    for calls in (faces_peers.direct_calls, faces_peers.phase_calls):
        for call in calls(task, stage).values():
            np.testing.assert_allclose(call(task.x).numpy(), reference.forward(net, x), rtol=0, atol=1e-5)


def test_a_compiled_form_is_reused_by_the_next_job(torch_gpu, monkeypatch):
    torch = pytest.importorskip("torch")
    compilations = []
    monkeypatch.setattr(faces_peers, "CHUNK", 4)
    monkeypatch.setattr(faces_peers, "compile_faster", lambda *_: compilations.append(1) or ("", lambda x: x))
    compiled = faces_peers.Compiled(None, None)
    for rows_of, precision, count in ((9, "fp16", 1), (6, "fp16", 1), (3, "fp16", 2), (9, "fp32", 3)):
        x = torch.zeros(rows_of, 2)
        ((_, forward),) = compiled(GpuTask(None, precision, "float16", x), CpuTorchStage()).items()
        assert forward.call().shape == x.shape
        assert len(compilations) == count


# -- sentiment ---------------------------------------------------------------------------------------------


def test_sentiment(torch_gpu):
    cases = sentiment.cases(Options(device="cuda", peers=True, rows=(40,)), **SENTENCES)
    outcome = run_cases(without_jax(cases), QUICK)
    assert outcome.exit_code == 0, outcome.wrong
    assert not outcome.skipped
    assert list(dict.fromkeys((row.case, row.precision) for row in outcome.rows)) == [
        *[(f"40 sentences, {kind}", "fp16") for kind in ("random ids", "Zipf ids", "from the host")],
        ("40 sentences, from NumPy arrays", "fp16"), ("2560 sentences, from a file", "fp16"),
        *[(f"40 sentences, {kind} ids", p) for p in ("bf16", "fp32") for kind in ("random", "Zipf")],
        *[(f"40 sentences, {kind} ids, fp8 tables", "fp16") for kind in ("random", "Zipf")],
        ("40 sentences, not folded", "bf16"),
        *[(case, p) for p in ("bf16", "fp32") for case in (sentiment_tables.TABLES, sentiment_tables.FIRST)],
    ]  # fmt: skip
    engines = {case: {row.engine for row in outcome.rows if row.case.endswith(case)} for case in ("ids", "not folded")}
    assert engines["ids"] == {"onchip", "torch.compile, folded", "torch embedding_bag"}
    assert engines["not folded"] == {"onchip", "torch, one product"}
    assert [case.engine for case in cases if case.case.endswith("not folded")][-1] == "jax"
    assert ("bf16", 40, "fp32", {"without": ("fold",)}) in torch_gpu
    assert torch_gpu.count(("fp16", 40, "fp32", {"tables": "fp8"})) == 2
    assert {row.case for row in outcome.rows if "pinned" in row.setting} == {"40 sentences, from the host"}
    settings = [row.setting for row in outcome.rows if row.case == sentiment_tables.TABLES and row.engine == "onchip"]
    assert ["as measured" in setting for setting in settings] == [True, False]  # convolutions are timed in bf16
    assert not any("as measured" in row.setting for row in outcome.rows if row.case != sentiment_tables.TABLES)


def test_break_even_of_several_jobs():
    def row(ms, work=1.0):
        return types.SimpleNamespace(engine="onchip", median_ms=ms, rate=None if ms is None else work / ms * 1e3)

    break_even = sentiment_tables.BreakEven()
    assert break_even.remark([row(10.0)]) == ""
    assert break_even.record("folded", [row(2.0, 1000)]) == break_even.record("direct", [row(52.0, 1000)]) == ""
    assert break_even.remark([row(10.0)]) == "as measured, they pay off above 200 sentences"
    assert break_even.remark([row(None)]) == break_even.remark([]) == ""
    break_even.record("direct", [row(1.0, 1000)])
    assert break_even.remark([row(10.0)]) == "as measured, they never pay off"


@needs_gxx
def test_tables_are_built_from_uploaded_weights(monkeypatch):
    gpu = emulate_device(monkeypatch)
    net = reference.with_arrays(sentiment_work.network(**SENTENCES))
    plan = make_plan(net, H200, kernels_for(H200), Job(batch=10**9))
    assert plan.groups[0].claim.label.startswith("token_max")
    run, uploaded, upload = sentiment_tables.builder(plan, 0), [], gpu.upload
    monkeypatch.setattr(gpu, "upload", lambda array: uploaded.append(array.shape) or upload(array))
    tables = run()
    assert (37, 24) not in uploaded  # the embedding
    for recipe, buffer in tables.items():
        expected = materialise(recipe, plan.network.weights)
        assert gpu.download(buffer, np.empty_like(expected)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("form", ["looked_up", "bags", "windows"])
def test_every_torch_form_of_sentences_is_right(form):
    torch = pytest.importorskip("torch")
    net = reference.with_arrays(sentiment_work.network(**SENTENCES))
    ids, stage = random_ids(net, 30), CpuTorchStage()
    weights = sentiment_peers.Weights.on_gpu(net, "fp32", stage)
    taps = [W.permute(2, 1, 0).reshape(-1, len(W)) for W, _ in weights.convs] if form == "windows" else weights.taps()
    y = getattr(sentiment_peers, form)(torch, weights, taps, torch.from_numpy(ids))
    verdict = exact_truth(net, ids).verify(y.numpy())
    assert verdict.error < 2 * verdict.allowed


def test_float64_runs_once(monkeypatch):
    net = reference.with_arrays(sentiment_work.network(**SENTENCES))
    ids, runs, truths = random_ids(net, 6), [], Truths()
    monkeypatch.setattr(sentiment_rows, "exact_truth", lambda *args: runs.append(args) or exact_truth(*args))
    allowed = [truths(net, ids.copy(), dtype).allowed for dtype in ("float32", "float16", "bfloat16", "float16")]
    assert len(runs) == 1
    assert allowed[0] < allowed[1] == allowed[3] < allowed[2]
    assert allowed[1] == exact_truth(net, ids, "float16").allowed
    truths(net, (ids + 1) % 37, "float32")
    assert len(runs) == 2


def test_each_network_has_its_own_truth():
    one, other = (reference.with_arrays(sentiment_work.network(**SENTENCES, seed=seed)) for seed in (1, 2))
    ids, truths = random_ids(one, 6), Truths()
    verdicts = [truths(net, ids, "float32").verify(reference.forward(other, ids)) for net in (one, other)]
    assert [verdict.error <= verdict.allowed for verdict in verdicts] == [False, True]


def test_the_steepness_of_zipf():
    net = sentiment_work.network(**{**SENTENCES, "vocabulary": 1_000})
    first = [np.mean(zipf_ids(net, 3_000, a) == 0) for a in (1.0, 1.2)]
    share = 1 / np.sum(1 / np.arange(1, 1_001) ** 1.2)
    assert first[1] == pytest.approx(share, rel=0.1)
    assert first[0] < first[1]


# -- on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["faces", "sentiment"])
def test_every_engine_on_a_gpu(what, monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    monkeypatch.setattr(faces_peers, "CHUNK", 16)
    module, sizes = {"faces": (faces, FACES), "sentiment": (sentiment, SENTENCES)}[what]
    cases = module.cases(Options(device="cuda", peers=True, rows=(40,)), **sizes)
    outcome = run_cases(cases, QUICK)
    assert outcome.exit_code == 0, outcome.wrong
    assert not outcome.skipped
