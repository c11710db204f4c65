"""What every test may use: the command line in this process or in one of its own, real data, and loud skips."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from browser import find_browser
from onchip.cache import cache_dir
from onchip.runtime.cpu import backend as cpu
from onchip.runtime.cuda import checked_launches

SRC = Path(__file__).parent.parent / "src"
KERNEL_FOLDERS = (SRC / "onchip" / "kernels" / "cuda", SRC / "onchip" / "ladders" / "cuda")
NOT_EMULATED = {  # CUDA kernels that are tested on a GPU alone
    "fused_global", "mlp/fused", "mlp/tensor_core", "registers", "rotating", "separate", "shared_memory",
    "shared_registers",
}  # fmt: skip
os.environ["ONCHIP_QUIET"] = "1"  # what is said to be compiled depends on what ran before
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background job: what tests stop would not hear it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test depends on the clock: examples have no deadline, and a busy machine is no reason to fail.
settings.register_profile(
    "onchip", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("onchip")


# -- one machine for all plans -----------------------------------------------------------------------------

STATED_FLOPS, STATED_BANDWIDTH = 60e9, 8e9  # a second, of a core: about a 2.5 GHz server's
MEASURES = {name: getattr(cpu, name) for name in ("measure_flops", "measure_bandwidth")}

if "PYTEST_XDIST_WORKER" not in os.environ:  # which has the folder from the process that started it
    os.environ["ONCHIP_CACHE"] = str(cache_dir() / "tests")  # the user's own rates stay
    shutil.rmtree(cache_dir() / "rates", ignore_errors=True)
    # Workers and the hundreds of processes that tests start load modules as bytecode, also where the environment says
    # that Python writes none; beside the cache, so that the tree stays clean.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(cache_dir() / "bytecode")


def pytest_sessionstart() -> None:
    """State what this CPU can do: plans made here, or by a process that a test starts, are the same on any machine."""
    cpu.measure_flops = lambda: STATED_FLOPS * cpu.core_count()
    cpu.measure_bandwidth = lambda cores: STATED_BANDWIDTH * cores
    cpu.this_cpu()  # kept for the processes that tests start


@pytest.fixture
def measured_rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What this CPU can do, measured: for tests that compare its plans' estimates with a clock."""
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    for name, measure in MEASURES.items():
        monkeypatch.setattr(cpu, name, measure)


# -- loud skips --------------------------------------------------------------------------------------------


def why_no_gpu() -> str:
    from onchip.runtime.cuda.devices import cuda_devices, why_no_cuda

    return "" if cuda_devices() else why_no_cuda()


def pytest_report_header() -> list[str]:
    reason = why_no_gpu()
    data = os.environ.get("ONCHIP_DATA")
    chromium = find_browser()
    has_mpi = importlib.util.find_spec("mpi4py") is not None
    return [
        f"GPU: none, tests marked gpu are skipped: {reason}" if reason else "GPU: tests marked gpu run on it",
        "MPI: its tests run" if has_mpi else "MPI: none, its tests are skipped: pip install 'onchip[mpi]'",
        f"browser: {chromium}" if chromium else "browser: none, its tests are skipped: install chromium",
        f"real data: {data}" if data else "real data: none, its tests are skipped: ONCHIP_DATA is not set",
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "every case of every test, also of those that run a sample of them by default"
    parser.addoption("--all-cases", "--all-emulated", action="store_true", help=text)


def sample_of(item: pytest.Item) -> int:
    """n, where every n-th of the test's cases is run by default: as it is marked, else 16 if g++ compiles kernels."""
    mark = item.get_closest_marker("sample")
    is_emulated = any("g++" in mark.kwargs.get("reason", "") for mark in item.iter_markers("skipif"))
    return mark.args[0] if mark is not None else 16 if is_emulated else 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all-cases"):
        counts: Counter[str] = Counter()  # of each test's cases
        left_out = []
        for item in items:
            test = item.nodeid.partition("[")[0]
            if counts[test] % sample_of(item):
                left_out.append(item)
            counts[test] += 1
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            out = set(left_out)
            items[:] = [item for item in items if item not in out]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := why_no_gpu()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {reason}"))


def is_whole_run(config: pytest.Config) -> bool:
    chosen = config.getoption("keyword") or config.getoption("markexpr") or config.getoption("lf", False)
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not chosen


emulated_by_others: set[str] = set()  # by xdist's workers


def emulated_kernels() -> set[str]:
    module = sys.modules.get("emulated_cuda")
    return set() if module is None else {name for path in module.compiled if (name := kernel_name(path))}


def kernel_name(path: Path) -> str:
    """As "mlp/fused"; nothing for a kernel of a test."""
    folder = next((folder for folder in KERNEL_FOLDERS if path.is_relative_to(folder)), None)
    return "" if folder is None else path.relative_to(folder).with_suffix("").as_posix()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    emulated_by_others.update(getattr(node, "workeroutput", {}).get("emulated", ()))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A whole run fails if a CUDA kernel that can be emulated was not, whatever sample was taken."""
    seen = emulated_kernels()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["emulated"] = sorted(seen)
    elif is_whole_run(session.config) and shutil.which("g++") and sys.platform == "linux":
        kernels = {kernel_name(path) for folder in KERNEL_FOLDERS for path in folder.rglob("*.cu")}
        if never := kernels - seen - emulated_by_others - NOT_EMULATED:
            print(f"\nno test emulated the CUDA kernels {', '.join(sorted(never))}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _debug_ends_with_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """--debug and debug=True hold for the rest of a process, which here runs other tests too."""
    monkeypatch.setattr(checked_launches, "_is_on", False)


@pytest.fixture
def data_folder() -> Path:
    """The folder with real data ($ONCHIP_DATA); a test that asks for it is skipped where there is none."""
    if not (given := os.environ.get("ONCHIP_DATA")):
        pytest.skip("no real data: ONCHIP_DATA is not set")
    return Path(given)


# -- what somebody else puts where a file will be written ----------------------------------------------------

PLANTS = ("link", "dangling link", "hard link", "pipe", "socket", "folder", "another user's")


@pytest.fixture(params=PLANTS)
def plant(request, tmp_path_factory, monkeypatch) -> Callable[[Path], Callable[[], bool]]:
    """plant(path) puts something there that is no file of the user's own; what it gives says whether that is intact."""
    kind, folder = request.param, tmp_path_factory.mktemp("others")
    precious = folder / "precious"
    precious.write_bytes(b"precious")

    def put(path: Path) -> Callable[[], bool]:
        if kind in ("link", "dangling link"):
            path.symlink_to(precious if kind == "link" else folder / "new")
        elif kind == "hard link":
            os.link(precious, path)
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            monkeypatch.chdir(path.parent)  # the path of a socket is short
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(path.name)
        elif kind == "folder":
            path.mkdir()
        else:
            path.write_bytes(b"precious")
            if os.geteuid():
                pytest.skip("only root gives files to others")
            os.chown(path, 12345, -1)
        before = os.lstat(path)

        def is_intact() -> bool:
            after = os.lstat(path)
            same = all(getattr(before, name) == getattr(after, name) for name in ("st_ino", "st_mode", "st_size"))
            is_whole = kind != "another user's" or path.read_bytes() == b"precious"
            names = sorted(os.listdir(folder))
            return same and is_whole and names == ["precious"] and precious.read_bytes() == b"precious"

        return is_intact

    return put


# -- the command line --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys) -> Callable[..., Ran]:
    """cli("plan", "decode") in this process, in an empty folder."""
    from onchip.cli.main import main

    monkeypatch.chdir(tmp_path)

    def call(*args: object) -> Ran:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@pytest.fixture
def spawn(tmp_path) -> Callable[..., subprocess.Popen[str]]:
    """spawn("plan", "decode") as a process of its own, in an empty folder, its output piped."""
    started: list[subprocess.Popen[str]] = []

    def call(*args: object, **options: object) -> subprocess.Popen[str]:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path, **options}
        env = {**os.environ, "PYTHONPATH": str(SRC)}
        process = subprocess.Popen([sys.executable, "-m", "onchip", *map(str, args)], env=env, **options)
        started.append(process)
        return process

    yield call
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
