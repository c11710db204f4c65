"""The built-in workloads, and `load`: converts a workload name, a file or a torch module to a Network."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onchip.errors import InputError
from onchip.formats.load import SUFFIXES, load_file, shapes_error
from onchip.network.graph import Network, check_network, network_attribute
from onchip.network.names import did_you_mean
from onchip.workloads import backprop, decode, digits, faces, scan, sentiment

if TYPE_CHECKING:
    from onchip.formats.onnx.shapes import Shapes

WORKLOADS: dict[str, Callable[[], Network]] = {
    "decode": decode.network, "digits": digits.network, "faces": faces.network, "sentiment": sentiment.network,
    "backprop": backprop.network, "scan": scan.network,
}  # fmt: skip


def load(model: Any, example: Any = None, *, shapes: Shapes | None = None) -> Network:
    """Load a network from a file (.onnx, .safetensors), a workload name (with seeded weights) or a torch module.

    example  for a torch module: the input of its forward, a tensor or array (B, ...), a tuple of them, or a dict by
             keyword. The module and the network are run on a few such rows and must agree
    shapes   sizes that an ONNX file leaves open, by input name: {"x": ("B", 3, 640, 640)}. "B" is the batch, always the
             first axis; a number there is the batch size that the file is exported for. A file with one input needs no
             name: ("B", 3, 640, 640)
    """
    is_path = isinstance(model, str | os.PathLike)
    if shapes is not None and (not is_path or str(model).lower() in WORKLOADS):
        raise shapes_error(str(model) if is_path else f"a {type(model).__name__}")
    if isinstance(model, Network):
        return model
    if network_attribute(model):
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
    """The canonical name of a workload, in any case, or the path of a file; InputError if it is neither."""
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
