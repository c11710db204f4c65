"""The benchmarks of the reports' inference jobs and of imported networks, at sizes of seconds."""

import dataclasses
import functools
import itertools
import sys
import types

import numpy as np
import pytest

from checks import rows
from numpy_jax import numpy_jax
from onchip.bench import CASES
from onchip.bench.cases import faces, gpu_inference, imported, sentiment, sentiment_rows
from onchip.bench.cases.gpu_inference import GpuJob, gpu_cases
from onchip.bench.cases.inference import PEER_SLACK, Task
from onchip.bench.frame import Reporter, UnavailableError, run_cases
from onchip.bench.options import Options
from onchip.bench.peers import cpu as peers
from onchip.bench.peers import gpu as gpu_peers
from onchip.bench.report.results import Row
from onchip.kernels import reference
from onchip.measure.pace import Pace
from onchip.measure.truth import Truth
from onchip.plan.device import H200
from onchip.runtime.engine import compile
from onchip.workloads import faces as faces_work
from onchip.workloads import sentiment as sentiment_work
from torch_stage import CpuTorchStage

QUICK = Pace(rounds=2, block_s=0.001, warm_up_s=1e-9, pause_s=0, min_runs=1, max_runs=2)
SENTENCES = {"vocabulary": 37, "embedding": 24, "channels": 20, "kernels": (2, 3), "length": 7, "hidden": (19,),
             "classes": 12}  # fmt: skip
FACES = {"latent": 7, "channels": (6, 5, 3), "start": 3}


def quick(cases):
    """Without torch.compile, which takes ten seconds per shape."""
    return [case for case in cases if case.engine != "torch.compile"]


# -- sentiment ---------------------------------------------------------------------------------------------


def test_sentiment(monkeypatch):
    monkeypatch.setattr(sentiment, "DIRECT_ROWS", 80)
    outcome = run_cases(quick(sentiment.cases(Options(peers=True, rows=(100,)), **SENTENCES)), QUICK)
    assert outcome.exit_code == 0, outcome.wrong
    assert list(dict.fromkeys(row.case for row in outcome.rows)) == [
        "100 sentences, random ids", "100 sentences, Zipf ids",
    ]  # fmt: skip
    by_engine = {row.engine: row for row in outcome.rows}
    assert {"onchip", "onchip, fp16 tables", "onchip, not folded"} <= set(by_engine)
    assert {"torch, folded", "torch eager", "torch, windows", "onnxruntime"} - set(by_engine) == set(outcome.skipped)
    for row in outcome.rows:
        assert row.rate == pytest.approx(100 / (row.median_ms / 1e3))
        assert row.unit == "sentences/s"
        assert "checked on 64 rows" in row.setting
        scaled = row.engine not in ("onchip", "onchip, fp16 tables", "torch, folded")
        assert ("timed on 80 sentences, scaled" in row.setting) == scaled
    for name in ("onchip", "onchip, fp16 tables"):
        assert "folded: tables of" in by_engine[name].setting
        assert "built in" in by_engine[name].setting
        assert "compared with onchip, not folded" in by_engine[name].setting
    assert "folded" not in by_engine["onchip, not folded"].setting
    assert by_engine["onchip, fp16 tables"].error > 3 * by_engine["onchip"].error
    assert by_engine["onchip"].floor_ms < by_engine["onchip, not folded"].floor_ms
    assert [row.engine for row in outcome.rows if row.is_peer] == [
        row.engine for row in outcome.rows if not row.engine.startswith("onchip")
    ]


def test_every_torch_form_of_sentiment_is_right():
    pytest.importorskip("torch")
    net = reference.with_arrays(sentiment_work.network(**SENTENCES))
    x = sentiment_rows.random_ids(net, 90)
    truth = sentiment_rows.exact_truth(net, x)
    forms = [sentiment.PEERS["torch eager"], sentiment.PEERS["torch, windows"], sentiment.FOLDED["torch, folded"]]
    for name, build in itertools.chain.from_iterable(form.items() for form in forms):
        with peers.explained(name):
            got = build(peers.subject_of(net), 1)(x)
        assert truth.verify(got).error < 2 * truth.allowed, name


def test_tables_in_fp16_have_their_own_baseline_error():
    net = reference.with_arrays(sentiment_work.network(**SENTENCES))
    x = sentiment_rows.random_ids(net, 90)
    exact = sentiment_rows.exact_truth(net, x)
    half = sentiment_rows.rounded_table_truth(exact, net, x, "fp16")
    np.testing.assert_allclose(exact.y, Truth(net, x).y, rtol=0, atol=1e-12)  # few tokens, the same result
    assert exact.allowed == sentiment_rows.exact_truth(net, x).allowed < half.allowed
    got = {tables: compile(net, "cpu", batch_hint=1 << 20, tables=tables)(x) for tables in ("fp32", "fp16", "bf16")}
    assert exact.verify(got["fp32"]).is_right
    assert half.verify(got["fp16"]).is_right
    assert not exact.verify(got["fp16"]).is_right
    assert not half.verify(got["bf16"]).is_right


def test_ids():
    net = sentiment_work.network(**{**SENTENCES, "vocabulary": 1_000})
    for draw in sentiment_rows.IDS.values():
        ids = draw(net, 500)
        assert ids.dtype == np.int32
        assert ids.shape == (500, 7)
        assert ids.min() >= 0
        assert ids.max() < 1_000
    assert np.mean(sentiment_rows.zipf_ids(net, 500) == 0) == pytest.approx(
        1 / 7.485, rel=0.2
    )  # 1 / (1 + 1/2 + ... + 1/1000)
    assert np.mean(sentiment_rows.random_ids(net, 500) < 100) == pytest.approx(0.1, rel=0.2)


def test_break_even():
    def row(engine, ms):
        return Row("sentiment", "100 sentences", engine, "fp32", ms, ms, ms, 1.0, "sentences/s", 1.0, 0.0, True)

    built = sentiment.Built(None, 30.0)
    remark = functools.partial(sentiment.break_even, "onchip", lambda: built, 100)
    ours, direct, peer = row("onchip", 10.0), row(sentiment.DIRECT, 1_010.0), row("torch eager", 3_010.0)
    # 1,000 ms saved on 100 sentences are 10 ms each: 30 s are 3,000 sentences.
    folded = row("torch, folded", 20.0)  # has tables too: not compared
    assert remark([ours, direct, row("slow", 9_999.0), folded, peer]) == (
        "built in 30.0 s, pays off above 3,000 sentences compared with onchip, not folded, "
        "pays off above 1,000 sentences compared with torch eager"
    )
    assert "never pays off" in remark([ours, row(sentiment.DIRECT, 9.0)])
    assert remark([dataclasses.replace(ours, median_ms=None), direct]) == "built in 30.0 s"
    assert remark([ours]) == "built in 30.0 s"


# -- faces -------------------------------------------------------------------------------------------------


def test_faces():
    outcome = run_cases(quick(faces.cases(Options(peers=True, rows=(1, 3)), **FACES)), QUICK)
    assert outcome.exit_code == 0, outcome.wrong
    assert list(dict.fromkeys(row.case for row in outcome.rows)) == ["1 image", "3 images", "3 images, uint8"]
    assert {row.engine for row in outcome.rows} | set(outcome.skipped) >= {
        "onchip", "torch eager", "torch channels_last", "onnxruntime",
    }  # fmt: skip
    assert all(row.unit == "images/s" and row.rate > 0 for row in outcome.rows)


def test_pixels_are_checked_by_the_values_they_stand_for():
    net, x = faces_work.network(**FACES), rows(4, 7)
    truth = faces.PixelTruth(net, x)
    right = compile(faces_work.network(pixels=True, **FACES), "cpu")(x)
    assert truth.verify(right).is_right
    for index in ((0, 0, 0, 0), (3, 7, 2, 1)):
        wrong = right.copy()
        wrong[index] += 1 if wrong[index] < 255 else -1
        assert not truth.verify(wrong).is_right
        assert truth.verify(wrong[: index[0]]).is_right
    exact = (truth.y + 1) / 2 * 255
    near = np.unravel_index(np.argmin(np.abs(exact - np.round(exact))), exact.shape)
    truth.y[near] = np.round(exact[near]) / 255 * 2 - 1 + truth.allowed / 4  # exactly at a step, both bytes are right
    for value in (np.round(exact[near]), np.round(exact[near]) - 1):
        other = right.copy()
        other[near] = value
        assert truth.verify(other).is_right
    assert not truth.verify(right.astype(np.float32)).is_right
    assert not truth.verify(right[:, :-1]).is_right
    assert truth.verify(right[:2]).is_right


# -- imported ----------------------------------------------------------------------------------------------


def small_models():
    from torch import nn

    from onchip.bench.peers.frameworks.torch_models import Model, floats, ids
    from onchip.bench.peers.frameworks.torch_sequences import KeywordLSTM, TextCNN
    from onchip.bench.peers.frameworks.torch_tables import WideAndDeep

    def convs():
        return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(),
                             nn.Linear(3 * 5 * 4, 6))  # fmt: skip

    return [
        Model("MLP", lambda: nn.Sequential(nn.Linear(9, 7), nn.GELU(), nn.Linear(7, 3)), (floats(9),)),
        Model("convs", convs, (floats(2, 5, 4),)),
        Model("text", lambda: TextCNN(23, 6, (2, 3), 5, 2), (ids(8, 23),)),
        Model("LSTM", lambda: KeywordLSTM(3, 4, 2), (floats(5, 3),)),
        Model("two inputs", lambda: WideAndDeep(2, 7, 3, 4), (ids(2, 7), floats(4))),
    ]


def test_imported():
    pytest.importorskip("torch")
    outcome = run_cases(quick(imported.cases(Options(peers=True, rows=(1, 70)), small_models())), QUICK)
    assert outcome.exit_code == 0, outcome.wrong
    cases = [f"{model.name}, {rows}" for model in small_models() for rows in ("1 row", "70 rows")]
    assert list(dict.fromkeys(row.case for row in outcome.rows)) == cases
    eager = [row for row in outcome.rows if row.engine == "torch eager"]
    assert all(("NHWC" in row.setting or "NCHW" in row.setting) == row.case.startswith("convs") for row in eager)
    assert all(("checked on 64 rows" in row.setting) == ("70 rows" in row.case) for row in outcome.rows)
    other = imported.cases(Options(), small_models()[:1])
    assert [(case.case, case.engine) for case in other] == [
        (f"MLP, {B}", "onchip") for B in ("1 row", "32 rows", "256 rows")
    ]


def test_torch_exports_its_own_encoder(tmp_path):
    """torch runs it as one operator, which ONNX lacks."""
    torch = pytest.importorskip("torch")
    onnxruntime = pytest.importorskip("onnxruntime")
    from onchip.bench.peers.frameworks.torch_models import Model, ids
    from onchip.bench.peers.frameworks.torch_sequences import TextTransformer

    model = Model("encoder", lambda: TextTransformer(11, 4, 8, 2, 3), (ids(4, 11),))
    subject = imported.subject(torch, model)
    with peers.explained("the export"):
        subject.write_onnx(tmp_path / "encoder.onnx")
    assert torch.backends.mha.get_fastpath_enabled()
    session = onnxruntime.InferenceSession(tmp_path / "encoder.onnx", providers=["CPUExecutionProvider"])
    (x,) = model.inputs(5)
    (y,) = session.run(None, {"x": x})
    np.testing.assert_allclose(y, reference.forward(subject.net, x), atol=1e-5)


def test_imported_on_a_gpu():
    torch = pytest.importorskip("torch")
    jobs = imported.gpu_jobs(torch, small_models(), (1, 70))
    assert [(job.case, job.precision) for job in jobs[:4]] == [
        ("MLP, 1 row", "fp32"), ("MLP, 1 row", "fp16"), ("MLP, 70 rows", "fp32"), ("MLP, 70 rows", "fp16"),
    ]  # fmt: skip
    dtypes = [job.input_dtypes for job in jobs[:2] + jobs[8:10] + jobs[-2:]]
    assert dtypes == [["float32"], ["float16"], ["int64"], ["int64"], ["int64", "float32"], ["int64", "float16"]]
    assert [job.verified for job in jobs[::4]] == [64, 16, 64, 64, 64]


def test_imported_on_a_gpu_with_peers(monkeypatch):
    """End to end on torch's CPU: onchip is the reference, JAX a NumPy stand-in, nothing is compiled."""
    torch = pytest.importorskip("torch")

    def compile_ours(net, device, precision, batch_hint, io):
        def run(*xs, out):
            return out.copy_(torch.from_numpy(reference.forward(net, tuple(x.numpy() for x in xs)).astype(np.float32)))

        return run

    monkeypatch.setattr(gpu_inference, "make_stage", CpuTorchStage)
    monkeypatch.setattr(gpu_inference, "compile", compile_ours)
    monkeypatch.setattr(gpu_inference, "find_device", lambda name, threads=None: (H200, None, "cuda:0"))
    monkeypatch.setattr(gpu_inference, "CALLS", 2)
    monkeypatch.setattr(imported, "GPU_ROWS", (1, 70))
    monkeypatch.setattr(gpu_peers, "load_jax", numpy_jax)
    monkeypatch.setitem(sys.modules, "jax", types.ModuleType("jax"))
    monkeypatch.setitem(sys.modules, "jax.dlpack", types.SimpleNamespace(from_dlpack=lambda x: x.numpy()))
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    lines, models = [], [model for model in small_models() if model.name in ("convs", "LSTM", "two inputs")]
    outcome = run_cases(imported.cases(Options(device="cuda", peers=True), models), QUICK, Reporter(lines.append))
    assert outcome.exit_code == 0, outcome.wrong
    assert outcome.skipped == {
        name: f"{name} is skipped below 70 rows: it takes long to compile" for name in ("torch.compile", "jax")
    }
    engines = ["onchip", "torch eager", "torch graph", "torch.compile", "jax"]
    for model in models:
        for precision in imported.GPU_PRECISIONS:
            rows = [row for row in outcome.rows if row.case.startswith(model.name) and row.precision == precision]
            assert [row.engine for row in rows if "70" in row.case] == engines
            assert [row.engine for row in rows if "1 row" in row.case] == engines[:3]
    assert sum("x torch" in line or "x jax" in line for line in lines) == 3 * 2 * 2


def test_the_models_are_deterministic():
    torch = pytest.importorskip("torch")
    from onchip.bench.peers.frameworks.torch_models import MODELS

    assert len({model.name for model in MODELS}) == len(MODELS)
    for model in MODELS:
        state = torch.random.get_rng_state()
        first, second = model.module(), model.module()
        assert torch.equal(torch.random.get_rng_state(), state)
        assert not first.training
        weights = first.state_dict()
        assert all(torch.equal(weights[name], other) for name, other in second.state_dict().items())
        initialised = [w for name, w in weights.items() if "running" in name or "bias" in name]
        assert all(w[0] not in (0, 1) for w in initialised), model.name  # none has its default
        x = model.inputs(2)
        net = imported.subject(torch, model).net
        with torch.inference_mode():
            y = first(*map(torch.from_numpy, x)).numpy()
        assert Task(2, lambda x=x: x, net.output, functools.partial(Truth, net, x)).verify(y, PEER_SLACK).is_right


TINY = {
    "DS-CNN": (23_180, 12),
    "MobileNetV1 0.25": (213_586, 2),
    "ResNet-8": (77_946, 10),
    "FC autoencoder": (267_928, 640),
}


@pytest.mark.parametrize("name", TINY)
def test_the_networks_of_mlperf_tiny(name):
    torch = pytest.importorskip("torch")
    from onchip.bench.peers.frameworks.torch_models import MODELS

    model = next(model for model in MODELS if model.name == name)
    module, net = model.module(), imported.subject(torch, model).net
    assert (sum(p.numel() for p in module.parameters()), *net.output.row_shape) == TINY[name]
    (x,) = model.inputs(3)
    with torch.inference_mode():
        truth = module.double()(torch.from_numpy(x).double()).numpy()
    assert np.abs(compile(net, "cpu", threads=1)(x) - truth).max() < 1e-5 * np.abs(truth).max()


NEWER = (
    "keyword LSTM", "text transformer", "frame transformer", "fastText", "wide and deep", "tabular ResNet", "U-Net",
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*TINY, *NEWER])
def test_networks_of_the_benchmark_on_a_gpu(name):
    torch = pytest.importorskip("torch")
    from onchip.bench.peers.frameworks.torch_models import MODELS

    models = [model for model in MODELS if model.name == name]
    outcome = run_cases(gpu_cases("imported", imported.gpu_jobs(torch, models, (1, 21)), Options(device="cuda")), QUICK)
    assert not outcome.skipped
    assert outcome.exit_code == 0, outcome.wrong
    assert len(outcome.rows) == 4


def test_where_torch_compile_is_skipped():
    pytest.importorskip("torch")
    from onchip.bench.peers.frameworks.torch_models import MODELS

    assert {name for name, _ in imported.NOT_COMPILED} < {model.name for model in MODELS}
    build = object()
    for case, precision, is_skipped in (
        ("autoencoder, 4096 rows", "fp32", True),
        ("autoencoder, 4096 rows", "fp16", False),
        ("FC autoencoder, 4096 rows", "fp32", False),
    ):
        job = GpuJob(case, None, 4096, None, precision, precision)
        peers = imported._worth_compiling(job, {"torch graph": build, "torch.compile": build})
        assert peers["torch graph"] is build
        assert (peers["torch.compile"] is not build) == is_skipped
        if is_skipped:
            with pytest.raises(UnavailableError, match="slower"):
                peers["torch.compile"](None, None)


def test_imported_without_torch_names_what_to_install(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"pip install 'onchip\[peers\]'"):
        CASES["imported"](Options())


# -- checks ------------------------------------------------------------------------------------------------


def test_an_engine_that_returns_too_few_rows_is_wrong():
    from checks import random_mlp

    net, x = random_mlp(5, 3), rows(20, 5)
    y = Truth(net, x).y.astype(np.float32)
    for verified in (None, 6):
        task = Task(20, lambda: x, net.output, lambda verified=verified: Truth(net, x[:verified]), verified)
        assert task.verify(y).is_right
        assert not task.verify(y[:-1]).is_right
        assert not task.verify(y[:3]).is_right
        assert not task.verify(y + np.float32(1e-3)).is_right
    far = task.truth().allowed * 5
    assert task.verify(y + np.float32(far), PEER_SLACK).is_right
    assert not task.verify(y + np.float32(far)).is_right
