"""imported: small networks that were written in torch, loaded from there; the peers run the modules themselves."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onchip.bench.frame import Case
from onchip.bench.gpu_inference import GpuJob, gpu_cases
from onchip.bench.gpu_peers import make_torch_peers
from onchip.bench.inference import Rows, inference_cases
from onchip.bench.options import Options
from onchip.bench.peers import (
    Build,
    Subject,
    load_torch,
    onnxruntime_session,
    torch_channels_last,
    torch_compiled,
    torch_eager,
)
from onchip.measure.pace import Pace
from onchip.workloads import load

if TYPE_CHECKING:
    from onchip.bench.torch_models import Model

PIECES = (32, 128)
JUDGED = 64  # rows; on a GPU fewer images, as they are judged anew for every case
PACE = Pace(rounds=5, block_s=0.12, warm_up_s=0.05)  # there are many cases
GPU_ROWS, GPU_PRECISIONS, GPU_IMAGES_JUDGED = (1, 64, 4_096), ("fp32", "fp16"), 16

PEERS: dict[str, dict[str, Build]] = {
    "torch eager": {"": torch_eager},
    "torch.compile": {"": torch_compiled},
    "onnxruntime": {"": onnxruntime_session},
}
IMAGE_PEERS: dict[str, dict[str, Build]] = {
    **PEERS, "torch eager": {"channels first": torch_eager, "channels last": torch_channels_last},
}  # fmt: skip


def cases(options: Options, models: Sequence[Model] | None = None) -> list[Case]:
    """`models` are for tests; the benchmark's own are in torch_models."""
    torch = load_torch(options.threads)
    from onchip.bench.torch_models import MODELS

    if options.device != "cpu":
        on_gpu = gpu_jobs(torch, models or MODELS, options.rows or GPU_ROWS)
        return gpu_cases("imported", on_gpu, options, make_torch_peers(least_rows=max(GPU_ROWS)))
    made: list[Case] = []
    for model in models or MODELS:
        jobs = [
            Rows(_case(model, B), B, functools.partial(model.inputs, B), "random weights")
            for B in options.rows or model.batches
        ]
        peers = IMAGE_PEERS if _is_image(model) else PEERS
        made += inference_cases("imported", subject(torch, model), jobs, options, peers=peers, pieces=PIECES,
                                judged=JUDGED, pace=PACE)  # fmt: skip
    return made


def gpu_jobs(torch: Any, models: Sequence[Model], counts: Sequence[int]) -> list[GpuJob]:
    """Every network over these numbers of rows, which lie on the GPU in the precision that is computed in."""
    return [
        GpuJob(_case(model, B), net, B, model.inputs, precision, precision, judged=judged)
        for model in models
        for net, judged in [(subject(torch, model).net, GPU_IMAGES_JUDGED if _is_image(model) else JUDGED)]
        for B in counts
        for precision in GPU_PRECISIONS
    ]


def _is_image(model: Model) -> bool:
    return len(model.row_shape) == 3


def _case(model: Model, B: int) -> str:
    return f"{model.name}, {B} {'row' if B == 1 else 'rows'}"


def subject(torch: Any, model: Model) -> Subject:
    module, example = model.module(), torch.from_numpy(model.inputs(2))

    def export(path: Path) -> None:
        """By torch's own exporter, the one that needs no other package."""
        torch.onnx.export(module, (example,), str(path), input_names=["x"], output_names=["y"], dynamo=False,
                          dynamic_axes={"x": {0: "B"}, "y": {0: "B"}})  # fmt: skip

    return Subject(load(module, example), lambda: module, export)
