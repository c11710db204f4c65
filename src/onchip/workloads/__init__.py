"""The jobs that onchip knows by name, and loading: a name, a file or a Network becomes a Network."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onchip.errors import InputError
from onchip.formats.load import SUFFIXES, load_file, no_open_sizes
from onchip.network.graph import Network, check_network, held_network
from onchip.network.names import did_you_mean
from onchip.workloads import backprop, decode, digits, faces, scan, sentiment

if TYPE_CHECKING:
    from onchip.formats.onnx.shapes import Shapes

WORKLOADS: dict[str, Callable[[], Network]] = {
    "decode": decode.network, "digits": digits.network, "faces": faces.network, "sentiment": sentiment.network,
    "backprop": backprop.network, "scan": scan.network,
}  # fmt: skip


def load(model: Any, example: Any = None, *, shapes: Shapes | None = None) -> Network:
    """A network from a file (.onnx, .safetensors), the name of a workload, with its seeded weights, or a torch module.

    example  for a torch module: what its forward takes, a tensor or array (B, ...), a tuple of them, or a dict of them
             by keyword. The module and the network run on a few rows like it, and must agree
    shapes   sizes that an ONNX file leaves open, by the names of inputs: {"x": ("B", 3, 640, 640)}. "B" is the batch,
             which comes first; a number in its place is the batch that the file is written for. A file of one input
             needs no name: ("B", 3, 640, 640)
    """
    is_path = isinstance(model, str | os.PathLike)
    if shapes is not None and (not is_path or str(model).lower() in WORKLOADS):
        raise no_open_sizes(str(model) if is_path else f"a {type(model).__name__}")
    if isinstance(model, Network):
        return model
    if held_network(model):
        check_network(model)
    if not is_path:
        from onchip.formats.torch.module import read_torch, take_module
        from onchip.runtime.module_check import check_module

        module = take_module(model, example)
        check_module(net := read_torch(module), module)
        return net
    name = model_name(os.fspath(model))
    return WORKLOADS[name]() if name in WORKLOADS else load_file(name, shapes)


def model_name(text: str, known: Iterable[str] = WORKLOADS) -> str:
    """A workload's name as it is known, whatever its case, or the path of a file; InputError if it can be neither."""
    names = {name.lower(): name for name in known}
    if text.lower() in names:
        return names[text.lower()]
    if Path(text).suffix or os.sep in text or Path(text).exists():
        return text
    raise InputError(
        "unknown model", got=text,
        expected=f"a workload ({', '.join(names.values())}) or a file ({', '.join(SUFFIXES)})",
        hint=did_you_mean(text, known) or f"{next(iter(known))}, or the path of a file",
    )  # fmt: skip
