"""faces: images of 64x64 pixels, as values between -1 and 1 and as the bytes of an image file.

On a GPU the results stay in device memory, or are copied to pinned host memory.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from onchip.bench.cases.gpu_host import HostJob, host_cases
from onchip.bench.cases.gpu_inference import GpuJob, gpu_cases
from onchip.bench.cases.inference import Rows, inference_cases
from onchip.bench.frame import Case
from onchip.bench.options import Options
from onchip.bench.peers.cpu import (
    Build,
    onnxruntime_session,
    subject_of,
    torch_channels_last,
    torch_compiled,
    torch_eager,
)
from onchip.bench.peers.faces import FacesPeers
from onchip.measure.pace import Pace
from onchip.measure.truth import Truth, Verdict
from onchip.network.recipe import Array
from onchip.workloads import faces

ROWS = (1, 32, 64)
CHUNKS = (32,)
GPU_ROWS, GPU_FEW = (5_248, 65_536, 1, 10, 100), 100
GPU_VERIFIED = 6
PACE = Pace(rounds=6)

PEERS: dict[str, dict[str, Build]] = {
    "torch eager": {"": torch_eager},
    "torch channels_last": {"": torch_channels_last},
    "torch.compile": {"": torch_compiled},
    "onnxruntime": {"": onnxruntime_session},
}


def cases(options: Options, **sizes: Any) -> list[Case]:
    """`sizes` are keyword arguments of faces.network; tests use smaller ones."""
    if options.device != "cpu":
        return gpu_faces(options, **sizes)
    counts = options.rows or ROWS
    floats, pixels = faces.network(**sizes), faces.network(pixels=True, **sizes)
    latent = floats.input.row_size
    jobs = [Rows(_images(N), N, functools.partial(inputs, N, latent), "random weights") for N in counts]
    uint8_job = Rows(f"{_images(counts[-1])}, uint8", counts[-1], jobs[-1].inputs, "random weights")
    cases_of = functools.partial(
        inference_cases, "faces", options=options, peers=PEERS, chunks=CHUNKS, unit="images/s", pace=PACE
    )
    truth = functools.partial(PixelTruth, floats)
    return [*cases_of(subject_of(floats), jobs), *cases_of(subject_of(pixels), [uint8_job], truth=truth)]


def gpu_faces(options: Options, **sizes: Any) -> list[Case]:
    """Many images in fp16, few in synchronised calls, the report's count in every precision; copies to the host."""
    net, peers = faces.network(**sizes), FacesPeers()
    draw = functools.lru_cache(maxsize=1)(functools.partial(inputs, latent=net.input.row_size))

    def job(N: int, precision: str = "fp16") -> GpuJob:
        few = N <= GPU_FEW
        case = f"{_images(N)}, a call, synchronised" if few else _images(N)
        io = "fp16" if precision == "fp16" else "fp32"
        return GpuJob(case, net, N, draw, precision, io, synchronised=few, verified=GPU_VERIFIED)

    jobs = [job(N) for N in options.rows or GPU_ROWS]
    if not options.rows:
        jobs += [job(GPU_ROWS[0], precision) for precision in ("tf32", "fp32")]
    result: list[Case] = []
    for gpu_job in jobs:
        result += gpu_cases("faces", [gpu_job], options, peers.on_gpu(gpu_job.B), unit="images/s")
    N = max(options.rows or GPU_ROWS)
    host_jobs = [
        HostJob(f"{_images(N)}, to the host", net, N, draw, "fp16", functools.partial(Truth, net), GPU_VERIFIED),
        HostJob(f"{_images(N)}, to the host, uint8", faces.network(pixels=True, **sizes), N, draw, "fp16",
                functools.partial(PixelTruth, net), GPU_VERIFIED),
    ]  # fmt: skip
    return result + host_cases("faces", host_jobs, options, peers.to_host(net), "images/s")


def _images(N: int) -> str:
    return "1 image" if N == 1 else f"{N} images"


def inputs(N: int, latent: int) -> Array:
    return np.random.default_rng(1).standard_normal((N, latent), dtype=np.float32)


class PixelTruth(Truth):
    """The reference for images in bytes: byte b accepts any exact value in [b, b + 1].

    Comparing bytes with bytes would count an error of 1e-6 at a rounding step as 1, like a wrong pixel.
    """

    def verify(self, got: Array) -> Verdict:
        exact, low = (self.y[: len(got)] + 1) / 2 * 255, np.asarray(got).astype(np.float64)
        if got.dtype != np.uint8 or got.shape != exact.shape:
            return Verdict(float("inf"), self.allowed)
        outside = np.maximum(low - exact, exact - (low + 1))
        return Verdict(float(outside.max(initial=0)), self.allowed * 255 / 2)
