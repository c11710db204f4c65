"""The GPU itself: memory, launches, events, graphs, and messages of faults. Needs a GPU."""

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from checks import rows
from onchip.errors import DeviceError
from onchip.kernels.cuda.common.program import LaunchConfig, Program
from onchip.runtime.cuda.gpu import Gpu

pytestmark = pytest.mark.gpu

SOURCE = """\
template <int N>
__global__ void add(float* x, long long count, float more) {
    extern __shared__ float staged[];
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= count) return;
    staged[threadIdx.x] = x[i];
    x[i] = staged[threadIdx.x] + N + more;
}
__global__ void spin(long long* seen, long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
    *seen = start;
}
__global__ void fault(float* x) { x[1ll << 40] = 1; }
"""


@pytest.fixture(scope="module")
def gpu():
    return Gpu.get(0)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels") / "tried.cu"
    path.write_text(SOURCE)
    return path


def config(count, threads=128, **options):
    return LaunchConfig((-(-count // threads), 1, 1), (threads, 1, 1), 4 * threads, **options)


def test_there_is_one_gpu_object_a_gpu(gpu):
    assert Gpu.get(0) is gpu
    assert gpu.device.kind == "cuda"
    with pytest.raises(DeviceError, match="there is no device cuda:99"):
        Gpu.get(99)


@pytest.mark.parametrize("shape", [(1,), (7, 3), (1000, 72), (0, 5)])
def test_up_and_down(gpu, shape):
    x = rows(*shape)
    buffer = gpu.upload(x)
    assert buffer.nbytes == x.nbytes
    assert np.array_equal(gpu.download(buffer, np.empty_like(x)), x)


def test_the_pool_gives_the_same_memory_again(gpu):
    first = gpu.allocate(1 << 20)
    pointer = first.pointer
    assert pointer % 256 == 0
    del first
    assert gpu.allocate(1 << 20).pointer == pointer


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_launch(gpu, source, overlaps):
    x = rows(1000)
    buffer = gpu.upload(x)
    function = gpu.load(Program(source, "add<3>"), 512)
    for _ in range(2):
        given = [buffer.pointer, ctypes.c_int64(1000), ctypes.c_float(0.5)]
        gpu.launch(function, config(1000, overlaps=overlaps), given)
    three, half = np.float32(3), np.float32(0.5)
    assert np.array_equal(gpu.download(buffer, np.empty_like(x)), x + three + half + three + half)


def test_a_launch_on_another_stream(gpu, source):
    x, stream = rows(1000), gpu.new_stream()
    buffer = gpu.upload(x)
    gpu.launch(
        gpu.load(Program(source, "add<3>"), 512),
        config(1000),
        [buffer.pointer, ctypes.c_int64(1000), ctypes.c_float(0)],
        stream,
    )
    gpu.synchronise(stream)
    assert np.array_equal(gpu.download(buffer, np.empty_like(x)), x + np.float32(3))


def test_what_the_driver_says_about_a_function(gpu, source):
    function = gpu.load(Program(source, "add<3>"), 512)
    assert function is gpu.load(Program(source, "add<3>"))
    assert function.name == "add<3>"
    assert 0 < function.registers <= 64
    assert function.spill_bytes == function.static_shared_bytes == 0
    gpu.load(Program(source, "add<3>"), 100 << 10)  # so large that it may be refused
    few, many = function.blocks_per_sm(1024, 100 << 10), function.blocks_per_sm(128, 512)
    assert 1 <= few < many


def test_more_shared_memory_than_a_block_has_by_default(gpu, source):
    large = 100 << 10
    function = gpu.load(Program(source, "add<5>"), large)
    x = rows(64)
    buffer = gpu.upload(x)
    gpu.launch(
        function, LaunchConfig((1, 1, 1), (64, 1, 1), large), [buffer.pointer, ctypes.c_int64(64), ctypes.c_float(0)]
    )
    assert np.array_equal(gpu.download(buffer, np.empty_like(x)), x + np.float32(5))


def test_events_measure(gpu, source):
    seen = gpu.upload(np.zeros(1, np.int64))
    function = gpu.load(Program(source, "spin"))
    times = []
    for cycles in (200_000_000, 1_000_000, 10_000_000):  # the first one warms up the clock
        before, after = gpu.event(), gpu.event()
        before.record()
        gpu.launch(function, LaunchConfig((1, 1, 1), (1, 1, 1), 0), [seen.pointer, ctypes.c_int64(cycles)])
        after.record()
        times.append(after.ms_since(before))
        assert after.is_done
    assert 0.1 < times[1] < times[2] < 100
    assert 5 < times[2] / times[1] < 15


def test_a_graph_is_launched_again_and_again(gpu, source):
    x = rows(1000)
    buffer, function = gpu.upload(x), gpu.load(Program(source, "add<1>"), 512)

    def enqueue(stream):
        for _ in range(3):
            gpu.launch(function, config(1000), [buffer.pointer, ctypes.c_int64(1000), ctypes.c_float(0)], stream)

    graph = gpu.capture(enqueue)
    assert np.array_equal(gpu.download(buffer, np.empty_like(x)), x)  # captured, not run
    for _ in range(4):
        graph.launch()
    want = x.copy()
    for _ in range(12):
        want += np.float32(1)
    assert np.array_equal(gpu.download(buffer, np.empty_like(x)), want)


def test_an_error_while_capturing_leaves_the_gpu_usable(gpu):
    def enqueue(stream):
        assert gpu.is_capturing(stream)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        gpu.capture(enqueue)
    assert not gpu.is_capturing(gpu.stream)
    gpu.synchronise()


def test_threads_without_a_context(gpu, source):
    function, failures = gpu.load(Program(source, "add<3>"), 512), []

    def work(seed):
        try:
            x = rows(500, seed=seed)
            buffer = gpu.upload(x)
            gpu.launch(function, config(500), [buffer.pointer, ctypes.c_int64(500), ctypes.c_float(0)])
            if not np.array_equal(gpu.download(buffer, np.empty_like(x)), x + np.float32(3)):
                failures.append(seed)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("how", ["allocate", "reserve"])
def test_out_of_memory_says_how_much_there_is(gpu, how):
    with pytest.raises(DeviceError) as error:
        getattr(gpu, how)(1 << 45, row_bytes=304)
    assert error.value.what == f"out of memory on {gpu.device.name}"
    assert f"{1 << 45:,} B requested" in error.value.got
    assert "rows at a time: each needs 304 B" in error.value.hint
    gpu.synchronise()  # and the GPU still works


FAULT = """\
import sys
import numpy as np
from pathlib import Path
from onchip.errors import KernelError
from onchip.kernels.cuda.common.program import LaunchConfig, Program
from onchip.runtime.cuda.gpu import Gpu

gpu = Gpu.get(0)
buffer = gpu.upload(np.zeros(4, np.float32))
gpu.launch(gpu.load(Program(Path(sys.argv[1]), "fault")), LaunchConfig((1, 1, 1), (1, 1, 1), 0), [buffer.pointer])
for _ in range(2):
    try:
        gpu.synchronise()
    except KernelError as error:
        print(error)
"""


def test_a_fault_is_told_once_and_then_the_context_is_lost(source, tmp_path):
    ran = run_python(FAULT, source)
    assert ran.returncode == 0, ran.stderr
    first, later = ran.stdout.split("the CUDA context is lost: an earlier kernel failed")
    assert "kernel unknown failed on the GPU: illegal address" in first
    assert "--debug" in first
    assert "illegal address" in later
    assert "restart the program" in later


def run_python(text, *arguments):
    """Run a script in another process: a fault makes the GPU unusable for its process."""
    src = Path(__file__).parents[2] / "src"
    env = {**os.environ, "PYTHONPATH": str(src)}
    given = [sys.executable, "-c", text, *map(str, arguments)]
    return subprocess.run(given, env=env, capture_output=True, text=True)
