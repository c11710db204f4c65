"""onchip info: what a network is, and where it runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Exit

from onchip.cli.options import Json, Model, Shape, parse_shapes
from onchip.cli.output import print_json, print_message, terminal_width
from onchip.errors import FormatError
from onchip.network.text import columns, fitted_columns, size_text

if TYPE_CHECKING:
    from onchip.formats.onnx.summary import OnnxSummary
    from onchip.runtime.info import DeviceInfo, NetworkInfo


def info(model: Model, shapes: Shape = None, as_json: Json = False) -> None:
    """Show what a network is, and what each device refuses.

    \b
    Example:
      onchip info decode

    \b
    An ONNX file, also one that onchip cannot run:
      onchip info net.onnx
      onchip info detector.onnx --shape images=B,3,640,640

    It shows inputs, outputs, operators, parameters and memory. Nothing runs. Memory per row is what inputs, outputs and
    values between kernels take in fp32; weights are counted as the kernels store them. Exit code 1 if the network does
    not load, or a device cannot run one of its layers.
    """
    from onchip.runtime.info import describe_network
    from onchip.workloads import load

    found, refused = None, None
    file = _summary(model)
    try:
        found = describe_network(load(model, shapes=parse_shapes(shapes)))
    except FormatError as error:
        if file is None:
            raise
        refused = error
    if as_json:
        print_json({
            "model": model, "file": file and asdict(file), "network": found and asdict(found),
            "refused": refused and str(refused),
        })  # fmt: skip
    else:
        if file is not None:
            print(columns(*_file_rows(model, file)))
        if found is not None:
            print(columns(*_network_rows(found, file)))
            print()
            head = ["device", "kernels", "weights", "memory/row", "refused"]
            print(fitted_columns(head, list(map(_cells, found.devices)), terminal_width(sys.stdout), right=(1, 2, 3)))
            for device in found.devices:
                for layer, why in device.refused.items():
                    print_message(f"{device.device}: layer {layer}: {why}")
        if refused is not None:
            print_message(str(refused))
    if found is None or not all(device.can_run for device in found.devices):
        raise Exit(1)


def _summary(model: str) -> OnnxSummary | None:
    """Of an ONNX file; None for anything else."""
    if Path(model).suffix.lower() != ".onnx":
        return None
    from onchip.formats.onnx.summary import summarise_onnx

    return summarise_onnx(model)


def _file_rows(model: str, file: OnnxSummary) -> tuple[list[str], list[list[str]]]:
    written = f" by {file.producer}" if file.producer else ""
    return ["file", f"{model}, ONNX opset {file.opset}{written}"], [
        ["operators", _counts(file.operators)], *_ends(file.inputs, file.outputs),
    ]  # fmt: skip


def _network_rows(found: NetworkInfo, file: OnnxSummary | None) -> tuple[list[str], list[list[str]]]:
    ends = [] if file else _ends(found.inputs, found.outputs)
    return ["network", found.name], [
        *ends,
        ["layers", _counts(found.layers)],
        ["parameters", f"{found.parameters:,}, {size_text(found.weight_bytes)}"],
        ["work", f"{found.row_flop:,} flop/row"],
    ]  # fmt: skip


def _ends(inputs: Mapping[str, str], outputs: Mapping[str, str]) -> list[list[str]]:
    rows = [["input", f"{name} {kind}"] for name, kind in inputs.items()]
    return [*rows, *(["output", f"{name} {kind}"] for name, kind in outputs.items())]


def _counts(kinds: Mapping[str, int]) -> str:
    each = ", ".join(kind if count == 1 else f"{kind} x{count}" for kind, count in kinds.items())
    return f"{sum(kinds.values()):,}: {each}"


def _cells(device: DeviceInfo) -> list[str]:
    if device.error:
        return [device.device, "", "", "", device.error]
    layers = ", ".join(device.refused) or "nothing"
    return [device.device, str(device.kernels), size_text(device.weight_bytes), size_text(device.row_bytes), layers]
