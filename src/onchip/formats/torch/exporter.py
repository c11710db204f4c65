"""torch's newer exporter: torch.export, then onnxscript. It supports operators that tracing does not."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

OPSET = 18  # the opset of the exporter's functions
INSTALL = "pip install 'onchip[torch]' for onnxscript, which supports more operators"


class NoExporterError(Exception):
    """The module could be exported, but the package that writes ONNX is not installed."""


def export_module(torch: Any, module: Any, inputs: Sequence[Any], names: Sequence[str]) -> bytes:
    """Export the module to ONNX with a symbolic batch. NoExporterError without onnxscript; else any error of torch.

    module  in eval mode, with the signature forward(*inputs)
    inputs  tensors (B, ...)
    """
    import torch.export as exporter  # not imported by torch itself

    # With a named dimension, torch.export rejects what holds only for some batch sizes.
    batch = {0: exporter.Dim("B")}
    with _quiet():
        program = exporter.export(module, tuple(inputs), dynamic_shapes=((batch,) * len(inputs),), strict=False)
        if importlib.util.find_spec("onnxscript") is None:
            raise NoExporterError(INSTALL)
        # Without the optimiser: it folds weights, which would lose their names. The planner folds later.
        exported = torch.onnx.export(
            program, dynamo=True, input_names=list(names), opset_version=OPSET, optimize=False, verbose=False
        )
    data: bytes = exported.model_proto.SerializeToString()
    return data


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings and logs of torch and onnxscript: on failure, the error has the information."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
