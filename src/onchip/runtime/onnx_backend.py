"""onchip as a backend for ONNX's own test suite and any other user of onnx.backend.base.

rep = OnchipBackend.prepare(model)     # an onnx.ModelProto
(y,) = rep.run([x])                    # NumPy in, NumPy out
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep

from onchip.errors import DeviceError, FormatError, InputError
from onchip.formats.onnx.ops.base import READERS
from onchip.formats.onnx.reader import read_model
from onchip.network.recipe import Array
from onchip.runtime.engine import Engine, compile
from onchip.runtime.placement import find_device

# Operands that a layer stores as weights or attributes. Where a graph has them as inputs, they are bound to the arrays
# of the first run. All other inputs are values.
OPERANDS = {
    "BatchNormalization": (1, 2, 3, 4), "Clip": (1, 2), "Conv": (1, 2), "ConvTranspose": (1, 2), "CumSum": (1,),
    "Dropout": (1, 2), "Expand": (1,), "Gather": (1,), "Gemm": (1, 2), "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2), "LayerNormalization": (1, 2), "Pad": (1, 2, 3), "RMSNormalization": (1,),
    "Resize": (1, 2, 3), "Split": (1,), "Tile": (1,), "Upsample": (1,), "Reshape": (1,), "Slice": (1, 2, 3, 4),
    "Squeeze": (1,), "Unsqueeze": (1,), "Where": (0,), **{kind: (1,) for kind in READERS if kind.startswith("Reduce")},
    "GRU": (1, 2, 3), "LSTM": (1, 2, 3), "RNN": (1, 2, 3), "TopK": (1,), "Trilu": (1,), "DFT": (1, 2),
    "STFT": (1, 2, 3), "QuantizeLinear": (1, 2), "DequantizeLinear": (1, 2),
}  # fmt: skip


class OnchipBackend(Backend):  # type: ignore[misc]  # onnx has no types
    """Runs ONNX models through `onchip.compile`, on the CPU or on a GPU: "CPU", "CUDA", "CUDA:1"."""

    @classmethod
    def supports_device(cls, device: str) -> bool:
        try:
            find_device(device.lower())
        except DeviceError:
            return False
        return device != "AUTO"

    @classmethod
    def is_compatible(cls, model: Any, device: str = "CPU", **kwargs: Any) -> bool:
        return cls.supports_device(device) and all(node.op_type in READERS for node in model.graph.node)

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **kwargs: Any) -> OnchipRep:
        if not cls.supports_device(device):
            raise DeviceError("no such device", got=device, expected="CPU, or CUDA where there is a GPU")
        return OnchipRep(model, device.lower())

    @classmethod
    def run_node(
        cls, node: Any, inputs: Sequence[Array], device: str = "CPU", outputs_info: Any = None, **kwargs: Any
    ) -> tuple[Array, ...]:
        """Run one node; opset_version selects the version of its operator, by default the newest."""
        opset = kwargs.get("opset_version", onnx.defs.onnx_opset_version())
        names = [name for name in node.input if name]
        types = [onnx.helper.np_dtype_to_tensor_dtype(array.dtype) for array in inputs]
        graph = onnx.helper.make_graph(
            [node], "node",
            [onnx.helper.make_tensor_value_info(n, t, a.shape) for n, t, a in zip(names, types, inputs, strict=True)],
            [onnx.helper.make_empty_tensor_value_info(name) for name in node.output],
        )  # fmt: skip
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
        return cls.prepare(model, device).run(inputs)


class OnchipRep(BackendRep):  # type: ignore[misc]
    """A model and, after the first run, its engine: the operands are only known from the arrays."""

    def __init__(self, model: Any, device: str) -> None:
        self._model, self._device = model, device
        weights = {tensor.name for tensor in model.graph.initializer}
        self._inputs = [value.name for value in model.graph.input if value.name not in weights]
        operands = {
            name
            for node in model.graph.node
            for i, name in enumerate(node.input)
            if i in OPERANDS.get(node.op_type, ()) and not (node.op_type == "Gather" and node.input[0] in weights)
        }
        self._operands = [name for name in self._inputs if name in operands]
        self._bound: dict[str, Array] = {}
        self._engine: Engine | None = None
        self._one_row = False

    def run(self, inputs: Sequence[Array], **kwargs: Any) -> tuple[Array, ...]:
        arrays = dict(zip(self._inputs, inputs, strict=True))
        operands = {name: np.asarray(arrays[name]) for name in self._operands}
        if self._engine is None:
            self._engine, self._bound = self._compile(operands), operands
        elif any(not np.array_equal(array, self._bound[name]) for name, array in operands.items()):
            raise InputError("the operands changed", expected="those of the first run", hint="prepare the model again")
        rows = [np.asarray(arrays[name]) for name in self._inputs if name not in operands]
        if self._one_row:
            rows = [array[None] for array in rows]
        results = self._engine(*rows)
        outputs = results if isinstance(results, tuple) else (results,)
        return tuple(array[0] for array in outputs) if self._one_row else outputs

    def _compile(self, operands: dict[str, Array]) -> Engine:
        """Rows along axis 0 if the model can be read that way; else the whole input is one row (axis 0 is no batch)."""
        try:
            net = read_model(self._model, operands=operands)
        except FormatError as error:
            try:
                net = read_model(self._model, operands=operands, one_row=True)
            except FormatError:
                raise error from None
            self._one_row = True
        return compile(net, self._device)
