"""The faces ladder on a GPU: the report's kernels, one idea per rung, then its staging, then the engine.

The headers of cuda/faces_*.cu explain each kernel. Up to `three-gemms`, z is on the GPU before the clock starts and the
images stay there; the rungs after it start and end on the host, as the report's times do.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import ClassVar

import numpy as np

from onchip.kernels import reference
from onchip.kernels.cuda.common.program import EVERY_CHIP, Program
from onchip.ladders.device import DeviceRows, DeviceRun, rung_instances
from onchip.ladders.faces_staging import HostRun
from onchip.ladders.faces_steps import EVERY_TCONV, MAX_REGISTERS, Method, Sizes
from onchip.ladders.frame import Ladder, Rung, split_gemms
from onchip.ladders.ranks import SPLIT_RANK_RUNGS
from onchip.measure.truth import Verdict, relative_error
from onchip.network.graph import Network
from onchip.network.recipe import Array
from onchip.plan.kernel import Cost
from onchip.runtime import engine
from onchip.runtime.cuda.gpu import Gpu
from onchip.workloads import faces

# The report's seconds by number of faces and of GPUs: two machines with one, two or four GPUs each, of a kind that it
# does not name.
REPORT_S = {
    10: {2: 0.039, 4: 0.088, 8: 0.154}, 100: {2: 0.065, 4: 0.102, 8: 0.155}, 880: {2: 0.248, 4: 0.197, 8: 0.224},
    1_000: {2: 0.278, 4: 0.224, 8: 0.236}, 2_224: {2: 0.485, 4: 0.362, 8: 0.311},
    2_512: {2: 0.536, 4: 0.391, 8: 0.333}, 4_856: {2: 0.955, 4: 0.603, 8: 0.506},
    5_248: {2: 1.014, 4: 0.647, 8: 0.504},
}  # fmt: skip
_BEST_GPUS = {B: min(seconds, key=seconds.__getitem__) for B, seconds in REPORT_S.items()}
LIMIT = 1e-3  # the report's, of each value of an image
_CHECKED = 24  # faces that are compared with float64, spread over the run
_ONE_BY_ONE = 100  # rows of a rung that launches every kernel once per face


class CudaRung(Rung[DeviceRows]):
    """A rung with the report's kernels, z on the GPU."""

    method: ClassVar[Method]
    max_registers: ClassVar[int] = MAX_REGISTERS

    @classmethod
    def programs(cls) -> tuple[Program, ...]:
        return cls.method.programs

    def prepare(self, net: Network, x: DeviceRows, threads: int) -> Callable[[], Array]:
        gpu, sizes, B = Gpu.get(), Sizes.of(net), len(x)
        weights = {name: gpu.upload(w) for name, w in self.method.weights(net).items()}
        steps = self.method.steps(sizes, B)
        return DeviceRun(gpu, steps, x.on(gpu, "float32"), weights, (B, *sizes.image), "float32")

    def cost(self, net: Network, B: int) -> Cost:
        """Each activation is written, read and written by batch norm and by ReLU, and read by the next convolution; an
        image is written, then read and written by tanh."""
        sizes = Sizes.of(net)
        passes = sizes.latent + 6 * sum(sizes.floats[:-1]) + 3 * sizes.floats[-1]
        return Cost(self.method.flop(sizes), 4 * passes, sum(w.nbytes for w in net.weights.values()))


class Direct(CudaRung):
    name = "direct"
    idea = "one thread per output of a layer, one face per launch; each thread tests all 25 taps"
    method = Method(batch=1, direct=EVERY_TCONV, uses_parity=False)
    max_rows = _ONE_BY_ONE


class Parity(CudaRung):
    name = "parity"
    idea = "the loops over taps step by two, from the output's parity on: no test, no divergence"
    why = "a warp runs the loop over channels at most 9 times instead of 25"
    method = Method(batch=1, direct=EVERY_TCONV)
    max_rows = _ONE_BY_ONE


class Gemm(CudaRung):
    name = "gemm"
    idea = "each transposed convolution is a gemm over the stretched input: 16 accumulators per thread, in registers"
    why = "5 loads per 16 multiply-adds instead of 2 per multiply-add; but 3/4 of the multiply-adds are with a zero"
    method = Method(batch=1)
    max_rows = _ONE_BY_ONE


class FourGemms(CudaRung):
    name = "four-gemms"
    idea = "100 faces per gemm, in all four layers"
    why = "a gemm of one face has 16 to 256 blocks of two warps: too few to fill a GPU"
    method = Method()


class TwoGemms(CudaRung):
    name = "two-gemms"
    idea = "the first two layers are gemms, the last two direct, one face per launch"
    why = "slower: the direct kernel loads both operands of each multiply-add, and runs once per face"
    method = Method(direct=2)


class ThreeGemms(CudaRung):
    name = "three-gemms"
    idea = "only the last layer is direct: its 3 channels would leave 61 of a gemm's 64 threads without work"
    why = "the last layer computes a quarter of the products, and with all of its threads"
    method = Method(direct=1)


class HostRung(CudaRung):
    """The kernels of `three-gemms`, from z on the host to images on the host."""

    method = ThreeGemms.method

    def prepare(self, net: Network, x: DeviceRows, threads: int) -> HostRun:
        return HostRun(Gpu.get(), net, self.method, x.host, self.run_batches)

    @abc.abstractmethod
    def run_batches(self, run: HostRun) -> None: ...


class Pageable(HostRung):
    name = "pageable"
    idea = "the same from host to host: after each batch of 100 the host waits while its images are copied"
    why = "slower: 49 KB per face cross the bus, through a small pinned buffer of the driver"

    def run_batches(self, run: HostRun) -> None:
        for batch in run.batches:
            run.send(batch)
            run.download(batch)


class Pinned(HostRung):
    name = "pinned"
    idea = "images are copied to pinned memory, then by the host to their destination"
    why = "copies at the rate of the bus; but no faster, as the host then copies the images once more"

    def run_batches(self, run: HostRun) -> None:
        for batch in run.batches:
            run.send(batch)
            run.receive(batch)
            run.copy_out(batch)


class Overlapped(HostRung):
    name = "overlapped"
    idea = "the host copies the images of a batch while the GPU computes the next"
    why = "the host's copies overlap with kernels"
    report_ms: ClassVar[Mapping[int, float]] = {B: seconds[_BEST_GPUS[B]] * 1e3 for B, seconds in REPORT_S.items()}
    report_on: ClassVar[Mapping[int, str]] = {B: f"{gpus} GPUs" for B, gpus in _BEST_GPUS.items()}

    def run_batches(self, run: HostRun) -> None:
        for previous, batch in zip([None, *run.batches], run.batches, strict=False):
            run.send(batch)
            if previous is not None:
                run.copy_out(previous)  # while the kernels of this batch run
            run.receive(batch)
        run.copy_out(run.batches[-1])


class Onchip(Rung[DeviceRows]):
    """The engine, from host to host."""

    name = "onchip"
    idea = "the engine in fp32: implicit gemms without the zeros, on tensor cores (3xTF32); copies on five streams"
    why = "a quarter of the products, on tensor cores, and no passes for batch norm and ReLU"
    precision, is_engine = "3xtf32", True

    def prepare(self, net: Network, x: DeviceRows, threads: int) -> Callable[[], Array]:
        generate = engine.compile(net, "cuda", batch_hint=len(x))
        images = np.zeros((len(x), *generate.output.row_shape), np.float32)  # written, so that no page fault is timed

        def run() -> Array:
            result: Array = generate(x.host, out=images)
            return result

        return run


# -- reference and floor -------------------------------------------------------------------------------------


class FacesTruth:
    """The float64 images of some faces of a run: the first and the last, those at a batch's end, others in between."""

    def __init__(self, net: Network, x: DeviceRows) -> None:
        batch_end = [row for row in (99, 100) if row < len(x)]
        spread = np.linspace(0, len(x) - 1, _CHECKED).astype(np.int64)
        self._rows, self._count = np.unique([*spread, *batch_end]), len(x)
        self.y = reference.forward(net, (x.host[self._rows],))

    def verify(self, got: Array) -> Verdict:
        error = relative_error(got[self._rows], self.y) if len(got) == self._count else float("inf")
        return Verdict(error, LIMIT)


def inputs(B: int, latent: int = faces.LATENT) -> DeviceRows:
    return DeviceRows(np.random.default_rng(1).standard_normal((B, latent), dtype=np.float32))


def floor_ms(net: Network, B: int, precision: str) -> float:
    """The network's multiply-adds, without those with zeros; z read and images written once. Copies are not in it."""
    flop, rate = split_gemms(sum(map(net.row_flop, net.nodes)), precision)
    weights = sum(w.nbytes for w in net.weights.values())
    cost = Cost(flop, net.input.row_bytes + net.output.row_bytes, weights, launches=0)
    return cost.floor_us(Gpu.get().device, rate, B) / 1e3


RUNGS: tuple[type[CudaRung], ...] = (Direct, Parity, Gemm, FourGemms, TwoGemms, ThreeGemms)
HOST_RUNGS: tuple[type[HostRung], ...] = (Pageable, Pinned, Overlapped)
LADDER = Ladder(
    name="faces",
    title="images of 64 x 64 from 100 values each (a projection, four transposed convolutions), on a GPU",
    rungs=(*RUNGS, *HOST_RUNGS, Onchip),
    network=faces.network,
    inputs=inputs,
    floor_ms=floor_ms,
    rows=max(REPORT_S),
    truth=FacesTruth,
    device="cuda",
    over_ranks=SPLIT_RANK_RUNGS,
)


# -- for make check-kernels --------------------------------------------------------------------------------


ARCHITECTURES = EVERY_CHIP
INSTANCES = rung_instances(RUNGS)
