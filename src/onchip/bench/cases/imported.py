"""imported: small networks written in torch and imported; the peers run the original modules."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from onchip.bench.cases.gpu_inference import GpuJob, gpu_cases
from onchip.bench.cases.inference import Rows, inference_cases
from onchip.bench.frame import Case, UnavailableError
from onchip.bench.options import Options
from onchip.bench.peers.cpu import (
    Build,
    Subject,
    load_torch,
    onnxruntime_session,
    torch_channels_last,
    torch_compiled,
    torch_eager,
)
from onchip.bench.peers.framework import framework
from onchip.bench.peers.gpu import Build as GpuBuild
from onchip.bench.peers.gpu import GpuTask, make_network_peers
from onchip.measure.pace import Pace
from onchip.workloads import load

if TYPE_CHECKING:
    from onchip.bench.peers.frameworks.torch_models import Model

CHUNKS = (32, 128)
ROWS = (1, 32, 256)
VERIFIED = 64  # rows; on a GPU fewer images, as they are checked again for every case
PACE = Pace(rounds=5, block_s=0.12, warm_up_s=0.05)  # there are many cases
GPU_ROWS, GPU_PRECISIONS, GPU_IMAGES_VERIFIED = (1, 64, 4_096), ("fp32", "fp16"), 16
# Few rounds, for 66 cases: except for torch eager, which is host-bound, 99 % of samples are within 1 % of the median.
GPU_PACE = Pace(rounds=3, block_s=0.02, warm_up_s=0.005, pause_s=0, min_runs=3, max_runs=40)
# torch.compile was no faster than torch's graph at 4,096 rows on an H200 (torch 2.11).
NOT_COMPILED = (
    ("MLP 784-512-256-10", "fp32"),
    ("MLP 784-512-256-10", "fp16"),
    ("MLP 256-1024-256, GELU", "fp16"),
    ("autoencoder", "fp32"),
)

PEERS: dict[str, dict[str, Build]] = {
    "torch eager": {"": torch_eager},
    "torch.compile": {"": torch_compiled},
    "onnxruntime": {"": onnxruntime_session},
}
IMAGE_PEERS: dict[str, dict[str, Build]] = {
    **PEERS, "torch eager": {"NCHW": torch_eager, "NHWC": torch_channels_last},
}  # fmt: skip


def cases(options: Options, models: Sequence[Model] | None = None) -> list[Case]:
    """`models` are for tests; by default those of torch_models."""
    torch = load_torch(options.threads)
    MODELS = framework("torch_models").MODELS

    if options.device != "cpu":
        return _gpu_cases(gpu_jobs(torch, models or MODELS, options.rows or GPU_ROWS), options)
    result: list[Case] = []
    for model in models or MODELS:
        jobs = [
            Rows(_case(model, B), B, functools.partial(model.inputs, B), "random weights") for B in options.rows or ROWS
        ]
        peers = IMAGE_PEERS if model.is_image else PEERS
        result += inference_cases("imported", subject(torch, model), jobs, options, peers=peers, chunks=CHUNKS,
                                  verified=VERIFIED, pace=PACE)  # fmt: skip
    return result


def _gpu_cases(jobs: Sequence[GpuJob], options: Options) -> list[Case]:
    peers = make_network_peers(min_rows=max(GPU_ROWS))
    cases = (gpu_cases("imported", [job], options, _worth_compiling(job, peers), GPU_PACE) for job in jobs)
    return list(itertools.chain.from_iterable(cases))


def gpu_jobs(torch: Any, models: Sequence[Model], counts: Sequence[int]) -> list[GpuJob]:
    """Every network over these row counts; rows are on the GPU in the precision of the gemms."""
    jobs = []
    for model in models:
        form, verified = subject(torch, model), GPU_IMAGES_VERIFIED if model.is_image else VERIFIED
        inputs = functools.lru_cache(maxsize=1)(model.inputs)  # shared by the precisions
        jobs += [
            GpuJob(_case(model, B), form.net, B, inputs, precision, precision, verified=verified, module=form.module)
            for B in counts
            for precision in GPU_PRECISIONS
        ]
    return jobs


def _worth_compiling(job: GpuJob, peers: Mapping[str, GpuBuild]) -> Mapping[str, GpuBuild]:
    """Without torch.compile where it is known to be slower: each compilation takes seconds."""
    if not any(job.case.startswith(f"{name}, ") and job.precision == precision for name, precision in NOT_COMPILED):
        return peers

    def refuse(task: GpuTask, stage: Any) -> NoReturn:
        raise UnavailableError("torch.compile is skipped where it was slower than torch's CUDA graph on an H200")

    return {**peers, "torch.compile": refuse}


def _case(model: Model, B: int) -> str:
    return f"{model.name}, {B} {'row' if B == 1 else 'rows'}"


def subject(torch: Any, model: Model) -> Subject:
    module, example = model.module(), tuple(map(torch.from_numpy, model.inputs(2)))
    names = ["x", *(f"x{i}" for i in range(1, len(example)))]

    def export(path: Path) -> None:
        """By torch's TorchScript exporter, which needs no other package; it cannot export a fused encoder layer."""
        was_fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        torch.onnx.export(module, example, str(path), input_names=names, output_names=["y"], dynamo=False,
                          dynamic_axes={name: {0: "B"} for name in (*names, "y")})  # fmt: skip
        torch.backends.mha.set_fastpath_enabled(was_fused)

    return Subject(load(module, example), lambda: module, export)
