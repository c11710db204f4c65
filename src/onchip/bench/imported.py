"""imported: small networks that were written in torch, loaded from there; the peers run the modules themselves."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onchip.bench.frame import Case
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
JUDGED = 64
PACE = Pace(rounds=5, block_s=0.12, warm_up_s=0.05)  # there are many cases

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

    made: list[Case] = []
    for model in models or MODELS:
        jobs = [
            Rows(
                f"{model.name}, {B} {'row' if B == 1 else 'rows'}",
                B,
                functools.partial(model.inputs, B),
                "random weights",
            )
            for B in options.rows or model.batches
        ]
        peers = IMAGE_PEERS if len(model.row_shape) == 3 else PEERS
        made += inference_cases("imported", subject(torch, model), jobs, options, peers=peers, pieces=PIECES,
                                judged=JUDGED, pace=PACE)  # fmt: skip
    return made


def subject(torch: Any, model: Model) -> Subject:
    module, example = model.module(), torch.from_numpy(model.inputs(2))

    def export(path: Path) -> None:
        """By torch's own exporter, the one that needs no other package."""
        torch.onnx.export(module, (example,), str(path), input_names=["x"], output_names=["y"], dynamo=False,
                          dynamic_axes={"x": {0: "B"}, "y": {0: "B"}})  # fmt: skip

    return Subject(load(module, example), lambda: module, export)
