"""A module by torch's newer exporter: torch.export, then onnxscript. It knows operators that tracing does not."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

OPSET = 18  # the one that the exporter's functions are written in
INSTALL = "pip install 'onchip[torch]' for onnxscript, by which torch writes more operators"


class NoExporterError(Exception):
    """The module could be exported, but the package that writes ONNX is not installed."""


def export_module(torch: Any, module: Any, inputs: Sequence[Any], names: Sequence[str]) -> bytes:
    """The module as ONNX, its batch open. NoExporterError without onnxscript; else any error, of torch or the module.

    module  in eval mode, with forward(*inputs) for its signature
    inputs  tensors (B, ...)
    """
    import torch.export as exporter  # not loaded with torch itself

    # Of a dimension with a name, torch.export refuses what holds for some numbers of rows only.
    batch = {0: exporter.Dim("B")}
    with _quiet():
        program = exporter.export(module, tuple(inputs), dynamic_shapes=((batch,) * len(inputs),), strict=False)
        if importlib.util.find_spec("onnxscript") is None:
            raise NoExporterError(INSTALL)
        # Without its optimiser, which folds weights: they would lose their names. The planner folds, later.
        made = torch.onnx.export(
            program, dynamo=True, input_names=list(names), opset_version=OPSET, optimize=False, verbose=False
        )
    data: bytes = made.model_proto.SerializeToString()
    return data


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings, and without what torch and onnxscript log: where they fail, the error says it."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
