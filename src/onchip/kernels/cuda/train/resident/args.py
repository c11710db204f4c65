"""The argument of the two persistent training kernels: a struct with one entry per layer."""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from onchip.kernels.cuda.common.arguments import State, Struct
from onchip.kernels.cuda.common.c_struct import CStruct
from onchip.kernels.cuda.train.large_batch.launches import LargeBatchLowering
from onchip.kernels.cuda.train.large_batch.structs import Networks
from onchip.network.training import LOSSES

MAX_LAYERS = 15
DEADLINE_MS = 10_000  # longest wait for another block


class LayerFacts(CStruct):
    source, c_name = Path(__file__).parent / "weights.cuh", "LayerFacts"
    _fields_ = (("stride", c_int32), ("has_bias", c_uint32), ("slope", c_uint32))


def args_structs(path: Path, name: str, layer: type[CStruct], *extra: str) -> dict[int, type[CStruct]]:
    """The structs name<L> by their number of layers; `extra` pointers are before the layers."""

    def struct_of(L: int) -> type[CStruct]:
        class Args(CStruct):
            source, c_name = path, f"{name}<{L}>"
            _fields_ = (
                ("x", c_void_p), ("targets", c_void_p), ("order", c_void_p), ("per_step_values", c_void_p),
                ("progress", c_void_p), ("step_losses", c_void_p), ("step_correct", c_void_p), ("status", c_void_p),
                *((each, c_void_p) for each in extra), ("layers", layer * L), ("batch", c_int64), ("x_stride", c_int64),
                ("networks", Networks), ("scale", c_float), ("deadline_ms", c_uint32), ("facts", LayerFacts * L),
            )  # fmt: skip

        return Args

    return {L: struct_of(L) for L in range(2, MAX_LAYERS + 1)}


def pack_args(
    structs: dict[int, type[CStruct]], lowering: LargeBatchLowering, layers: list[Struct], **extra: Any
) -> Struct:
    first, byte_rows = lowering.layers[0], lowering.byte_rows
    facts = [
        LayerFacts.of(stride=layer.stride, has_bias=layer.bias is not None, slope=layer.activation[1])
        for layer in lowering.layers
    ]
    names = ("targets", "order", "per_step_values", "progress", "step_losses", "step_correct", "status")
    return structs[len(layers)].of(
        x=State("bytes" if byte_rows else "x"), layers=layers, batch=lowering.batch,
        x_stride=byte_rows.stride if byte_rows else first.stride,
        networks=Networks.of(stride_bytes=lowering.stride_bytes),
        scale=lowering.training.byte_scale or 1.0, deadline_ms=DEADLINE_MS, facts=facts,
        **{name: State(name) for name in names}, **extra,
    )  # fmt: skip


def template_codes(lowering: LargeBatchLowering) -> str:
    """Codes<...> of train/resident/step.cuh: 4 bits each, the loss first; then the layers' widths."""
    codes = LOSSES.index(lowering.training.loss)
    for i, layer in enumerate(lowering.layers, 1):
        codes |= layer.activation[0] << 4 * i
    return ", ".join(map(str, (f"{codes}ull", lowering.layers[0].D, *(layer.N for layer in lowering.layers))))
