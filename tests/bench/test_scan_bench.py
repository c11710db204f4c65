"""The scan benchmark: its reference check, its cases on the CPU, those of a GPU on a stage of NumPy arrays."""

import json

import numpy as np
import pytest

from numpy_stage import NumpyStage
from onchip.bench import CASES, command
from onchip.bench.cases import scan, scan_truth
from onchip.bench.cases.scan import GPU_PEERS, ScanJob, calls_of, inputs
from onchip.bench.cases.scan_truth import SampledScanTruth, naive_sums_at, pairwise_sums, sums_at, verified_indices
from onchip.bench.frame import run_cases
from onchip.bench.options import Options
from onchip.bench.report.results import Results
from onchip.bench.report.table import markdown
from onchip.measure.pace import Pace
from onchip.plan.device import H200
from onchip.runtime.cpu.backend import this_cpu

QUICK = Pace(rounds=2, block_s=0.001, warm_up_s=0, pause_s=0, min_runs=1, max_runs=2)


@pytest.fixture
def short_blocks(monkeypatch):
    """Rows of some thousand elements are checked like those of a billion."""
    for name, value in {"WHOLE": 100, "BLOCK": 16, "BLOCKS": 5, "CHUNK": 64}.items():
        monkeypatch.setattr(scan_truth, name, value)


# -- the check ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("N", [1, 2, 3, 7, 64, 1000, 1001])
def test_pairwise_sums(N):
    x = np.random.default_rng(N).integers(-9, 9, N)
    assert np.array_equal(pairwise_sums(x), np.cumsum(x))


def test_pairwise_sums_are_more_accurate_than_sequential_ones():
    x = inputs(ScanJob(1 << 18))
    truth = np.cumsum(x, dtype=np.float64)
    pairwise, naive = (np.abs(way(x) - truth).max() for way in (pairwise_sums, np.cumsum))
    assert 0 < 5 * pairwise < naive


@pytest.mark.parametrize("N", [101, 159, 160, 161, 176, 1000, 1003])
def test_checked_indices_and_sums_of_long_rows(short_blocks, N):
    indices = verified_indices(N)
    assert np.array_equal(indices, np.unique(indices))
    ends = {*range(15, N, 16), N - 1}
    assert ends | set(range(16)) <= set(indices.tolist())
    assert len(indices) < N or N < 130
    x = np.random.default_rng(N).integers(-(2**31), 2**31, N, dtype=np.int32)
    for way in (np.cumsum, pairwise_sums):
        assert np.array_equal(sums_at(indices, x, "int64", way), np.cumsum(x, dtype=np.int64)[indices])


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("N", [1, 77, 1003])
def test_right_and_wrong_results(short_blocks, N, dtype):
    x = inputs(ScanJob(N, dtype))
    truth = SampledScanTruth(x)
    y = np.cumsum(x, dtype=np.float64 if dtype == "float32" else np.int32).astype(dtype)
    assert truth.verify(y).is_right
    assert truth.verify(y, peer=True).is_right
    if dtype == "int32":
        assert truth.verify(y).error == truth.allowed == truth.allowed_peer == 0
    else:
        assert 1e-7 < truth.allowed < 1e-5
    for i in (0, N // 2, N - 1):
        off = y.copy()
        off[i:] += np.float32(0.1) if dtype == "float32" else 1
        assert not truth.verify(off).is_right, i
    assert not truth.verify(y[:-1]).is_right
    assert not truth.verify(y.astype(np.float64)).is_right
    assert not truth.verify(np.full_like(y, -1 if dtype == "int32" else np.nan)).is_right


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_unwritten_elements_are_found_anywhere(short_blocks, dtype):
    N = 100_003
    x = inputs(ScanJob(N, dtype))
    truth = SampledScanTruth(x)
    assert truth.note == f"checked on {len(truth.indices)} sums"
    between = np.setdiff1d(np.arange(N), truth.indices)
    y = np.cumsum(x, dtype=x.dtype)
    assert truth.verify(y, peer=True).is_right
    y[between[1000:1017]] = -1 if dtype == "int32" else np.nan
    assert truth.verify(y, peer=True).error == np.inf


@pytest.mark.parametrize("whole", [True, False])
def test_a_peer_may_add_sequentially(short_blocks, monkeypatch, whole):
    x = inputs(ScanJob((1 << 19) + 7))
    if whole:
        monkeypatch.setattr(scan_truth, "WHOLE", len(x))
    truth = SampledScanTruth(x)
    naive = np.cumsum(x)
    assert naive_sums_at(truth.indices, x).tobytes() == naive[truth.indices].tobytes()
    assert truth.allowed_peer == pytest.approx(20 * truth.verify(naive).error, rel=0.1)
    assert not truth.verify(naive).is_right
    assert truth.verify(naive, peer=True).is_right
    assert truth.verify(pairwise_sums(x)).is_right


def test_inputs_do_not_depend_on_the_length(monkeypatch):
    monkeypatch.setattr(scan, "CHUNK", 10)
    for dtype in ("float32", "int32"):
        some, more = inputs(ScanJob(20, dtype)), inputs(ScanJob(33, dtype))
        assert (more.dtype, len(np.unique(more))) == (dtype, 33)
        assert np.array_equal(some, more[:20])
    assert np.abs(inputs(ScanJob(1000, "int32")).astype(float)).max() > 2**30


# -- cases -------------------------------------------------------------------------------------------------


def test_the_cases(fake_gpu):
    on_cpu = [(c.case, c.precision) for c in scan.cases(Options())]
    assert on_cpu == [("2^20 numbers", "fp32"), ("2^24 numbers", "fp32"), ("2^24 numbers", "int32")]
    on_gpu = [(c.case, c.precision) for c in scan.cases(Options(device="cuda"))]
    assert on_gpu == [(f"2^{power} numbers", kind) for power in (20, 24, 28, 30) for kind in ("fp32", "int32")]
    assert [c.engine for c in scan.cases(Options(peers=True))][:3] == ["onchip", "numpy", "torch"]
    assert [c.engine for c in scan.cases(Options(device="cuda", peers=True))][:4] == ["onchip", "torch", "cupy", "jax"]
    assert [c.case for c in scan.cases(Options(rows=(1025,)))] == ["1025 numbers"] * 2
    assert "scan" in CASES


def test_on_the_cpu_with_peers():
    threads = 1
    cases = scan.cases(Options(peers=True, rows=(70_001,), threads=threads))
    outcome = run_cases(cases, QUICK)
    assert outcome.exit_code == 0, outcome.wrong
    assert {row.engine for row in outcome.rows} >= {"onchip", "numpy"}
    for row in outcome.rows:
        assert (row.unit, row.threads) == ("numbers/s", threads)
        assert row.rate == pytest.approx(70_001 / row.median_ms * 1e3)
        assert row.floor_ms == pytest.approx(2 * 4 * 70_001 / this_cpu().peak.cache_bandwidth * 1e3)
        assert row.setting.startswith("random")
        assert row.error == 0 or row.precision == "fp32"


@pytest.mark.parametrize("wrong", ["lazy", "off"])
def test_a_wrong_engine_gets_no_time(monkeypatch, wrong):
    def scan_into(x, y, op, device, threads):
        y[:-1] = np.cumsum(x, dtype=np.float64 if y.dtype == "float32" else np.int32)[:-1]
        if wrong == "off":
            y[-1] = x[-1]

    monkeypatch.setattr(scan, "scan_into", scan_into)
    outcome = run_cases(scan.cases(Options(rows=(1000,))), QUICK)
    assert [row.median_ms for row in outcome.rows] == [None, None]


# -- on a GPU ----------------------------------------------------------------------------------------------


class Stage(NumpyStage):
    """A copy takes half the time of other work, and a graph half the time of calls."""

    def __init__(self, index=0):
        super().__init__(index)
        self.copies = 0

    def copy(self, x, y):
        self.copies += 1
        y[...] = x
        return y

    def ms(self, work):
        before = self.copies
        work()
        return (0.5 if self.copies > before else 1.0) * (1 if hasattr(work, "times") else 2)


@pytest.fixture
def fake_gpu(monkeypatch):
    monkeypatch.setattr(scan, "make_stage", Stage)
    monkeypatch.setattr(scan, "find_device", lambda name, threads=None: (H200, None, name))
    monkeypatch.setattr(command, "find_device", lambda name, threads=None: (H200, None, "cuda:0 (auto: it is here)"))
    monkeypatch.setattr("onchip.bench.stage.measure_ceilings", lambda index: {"copy_bytes_per_s": 4e12})
    monkeypatch.setattr(command.machine, "versions", lambda device: {"nvrtc": "13.0"})


def test_fewer_calls_of_long_rows():
    assert [calls_of(N) for N in (7, 1 << 20, 1 << 24, 1 << 26, 1 << 28, 1 << 30, 1 << 33)] == [20, 20, 20, 16, 4, 4, 4]


def test_onchip_on_a_gpu(fake_gpu, tmp_path):
    written, exit_code = command.run_benchmarks(["scan"], Options(device="cuda:0", rows=(5003,)), tmp_path, pace=QUICK)
    assert exit_code == 0
    ((name, results),) = written.items()
    path = tmp_path / "h200" / f"{name}.json"
    rows = json.loads(path.read_text())["rows"]
    assert [(row["case"], row["precision"], row["checked"]) for row in rows] == [
        ("5003 numbers", "fp32", True), ("5003 numbers", "int32", True),
    ]  # fmt: skip
    for row in rows:
        assert 20 * row["median_ms"] == 1.0
        assert row["floor_ms"] == pytest.approx(2 * 4 * 5003 / H200.peak.cache_bandwidth * 1e3)
        assert row["setting"].startswith("graph of 20 calls, random")
        assert "0.02500 ms" in row["setting"]
    assert table_line(results).startswith("| 5003 numbers | 0.05000 ms | - | - | 0% |")


def table_line(results):
    """A line of the README table, for a machine whose launches cost nothing."""
    return markdown([Results({**results.machine, "launch_us": 0.0}, {}, "", "", "", results.rows)]).splitlines()[6]


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_unwritten_elements_on_a_gpu_are_wrong(fake_gpu, monkeypatch, dtype):
    def lazy(x, out):
        out[:-1] = np.cumsum(x, dtype=np.float64 if dtype == "float32" else np.int32)[:-1]

    monkeypatch.setattr(scan, "scan", lazy)
    outcome = run_cases(scan.gpu_cases((ScanJob(1000, dtype),), Options(device="cuda")), QUICK)
    assert [row.checked for row in outcome.rows] == [False]


def test_one_jobs_arrays_at_a_time(fake_gpu, monkeypatch):
    loaded, load = [], scan.load_gpu_job
    monkeypatch.setattr(scan, "load_gpu_job", lambda job, index: loaded.append(job) or load(job, index))
    jobs = (ScanJob(7), ScanJob(9, "int32"))
    outcome = run_cases(scan.gpu_cases(jobs, Options(device="cuda", peers=True)), QUICK)
    assert tuple(loaded) == jobs
    assert [row.engine for row in outcome.rows] == ["onchip", "onchip"]
    assert set(outcome.skipped) == set(GPU_PEERS)
    assert "is not installed" in outcome.skipped["cupy"]


def test_torch_keeps_the_dtype():
    torch = pytest.importorskip("torch")
    stage = type("Stage", (), {"torch": torch})
    for dtype in ("float32", "int32"):
        x = torch.from_numpy(inputs(ScanJob(1001, dtype)))
        y = torch.empty_like(x)
        task = scan.LoadedGpuJob(ScanJob(1001, dtype), None, x, y, SampledScanTruth(x.numpy()), 1.0)
        assert GPU_PEERS["torch"](task, stage).call() is y
        assert task.truth.verify(y.numpy(), peer=True).is_right


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["onchip", *GPU_PEERS])
@pytest.mark.parametrize("N", [1, 4099, (1 << 20) + 5])
def test_every_engine_on_a_gpu(engine, N):
    cases = [c for c in scan.cases(Options(device="cuda", peers=True, rows=(N,))) if c.engine == engine]
    outcome = run_cases(cases, QUICK)
    if "not installed" in outcome.skipped.get(engine, ""):
        pytest.skip(outcome.skipped[engine])
    assert outcome.skipped == {}
    assert outcome.wrong == ()
    assert all(row.median_ms > 0 and row.floor_ms > 0 for row in outcome.rows)


@pytest.mark.gpu
def test_a_gpu_without_torch(monkeypatch):
    monkeypatch.setattr("onchip.bench.stage.has_torch", lambda: False)
    outcome = run_cases(scan.cases(Options(device="cuda", rows=(5003,))), QUICK)
    assert outcome.exit_code == 0, outcome.wrong
    assert [row.checked for row in outcome.rows] == [True, True]
