"""The pointwise operations: one or two elements in, one out. One row per operation, one column per backend.

| column  | its implementation                                                                      |
| ------- | --------------------------------------------------------------------------------------- |
| `layer` | its `forward` and `backward`: NumPy, any float dtype; the reference                     |
| `cpu`   | `kernels/cpu/elementwise/`: a vectorised loop, selected by this code                    |
| `cuda`  | `kernels/cuda/common/`: a struct of `activation.cuh` or `function.cuh`                  |

A test runs all columns of every row on the same values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from onchip.network.layers import (
    ELU,
    GELU,
    SELU,
    Abs,
    Add,
    Atan,
    Broadcast,
    Cast,
    Ceil,
    Clip,
    Cos,
    Div,
    Elementwise,
    Equal,
    Erf,
    Exp,
    Floor,
    Greater,
    GreaterOrEqual,
    HardSigmoid,
    HardSwish,
    Layer,
    LeakyReLU,
    Log,
    Mask,
    Max,
    Min,
    Mish,
    Mod,
    Mul,
    Pow,
    PReLU,
    Reciprocal,
    ReLU,
    Round,
    Sigmoid,
    Sign,
    SiLU,
    Sin,
    Softplus,
    Softsign,
    Sqrt,
    Sub,
    Tanh,
    ToInts,
    ToPixels,
)

if TYPE_CHECKING:
    from onchip.network.graph import Network, Node

# Codes of the `cpu` column, as the compiled loops read them. The gemm microkernel itself applies RELU.
IDENTITY, RELU, SIGMOID, TANH, LEAKY, SILU, GELU_ERF, GELU_TANH = range(8)
CLIP, ELU_CODE, SELU_CODE, HARD_SIGMOID, HARD_SWISH, SOFTPLUS, SOFTSIGN, MISH = range(8, 16)


@dataclass(frozen=True)
class Operation:
    layer: type[Layer]
    cuda: str  # the struct's name
    cpu: int | None = None  # None: no compiled loop, NumPy computes it
    variant: str = ""  # for a layer with several rows: the attribute that selects this one
    parameters: tuple[str, ...] = ()  # attributes passed to it; a bound of None is infinite
    derivative_from_output: bool = False  # its derivative is a function of its result: on-chip training requires it
    in_gemm_epilogue: bool = False  # CUDA gemms fuse it: common/epilogue.cuh has a case for it

    def float32_parameters(self, layer: Layer) -> tuple[np.float32, ...]:
        """The parameters of a layer, for float32 kernels."""
        return tuple(map(np.float32, self.parameter_values(layer)))

    def parameter_values(self, layer: Layer) -> tuple[float, ...]:
        infinities = {"low": -math.inf, "high": math.inf}
        attributes = [(name, getattr(layer, name)) for name in self.parameters]
        return tuple(infinities[name] if value is None else value for name, value in attributes)


OPERATIONS = (
    Operation(ReLU, "ReLU", RELU, derivative_from_output=True, in_gemm_epilogue=True),
    Operation(LeakyReLU, "LeakyReLU", LEAKY, parameters=("slope",), derivative_from_output=True, in_gemm_epilogue=True),
    Operation(Clip, "Clip", CLIP, parameters=("low", "high"), in_gemm_epilogue=True),
    Operation(Sigmoid, "Sigmoid", SIGMOID, derivative_from_output=True, in_gemm_epilogue=True),
    Operation(Tanh, "Tanh", TANH, derivative_from_output=True, in_gemm_epilogue=True),
    Operation(SiLU, "SiLU", SILU, in_gemm_epilogue=True),
    Operation(GELU, "GELU", GELU_ERF, "none", in_gemm_epilogue=True),
    Operation(GELU, "TanhGELU", GELU_TANH, "tanh", in_gemm_epilogue=True),
    Operation(ToPixels, "ToPixels"),
    Operation(Cast, "Rounded<float>", variant="float32"),
    Operation(Cast, "Rounded<f16>", variant="float16"),
    Operation(Cast, "Rounded<bf16>", variant="bfloat16"),
    Operation(ELU, "ELU", ELU_CODE, parameters=("alpha",), in_gemm_epilogue=True),
    Operation(SELU, "SELU", SELU_CODE, in_gemm_epilogue=True),
    Operation(HardSigmoid, "HardSigmoid", HARD_SIGMOID, parameters=("slope", "shift"), in_gemm_epilogue=True),
    Operation(HardSwish, "HardSwish", HARD_SWISH, in_gemm_epilogue=True),
    Operation(Softplus, "Softplus", SOFTPLUS, in_gemm_epilogue=True),
    Operation(Softsign, "Softsign", SOFTSIGN, in_gemm_epilogue=True),
    Operation(Mish, "Mish", MISH, in_gemm_epilogue=True),
    Operation(Abs, "Abs"),
    Operation(Sign, "Sign"),
    Operation(Sqrt, "Sqrt"),
    Operation(Reciprocal, "Reciprocal"),
    Operation(Exp, "Exp"),
    Operation(Log, "Log"),
    Operation(Sin, "Sin"),
    Operation(Cos, "Cos"),
    Operation(Atan, "Atan"),
    Operation(Erf, "Erf"),
    Operation(Floor, "Floor"),
    Operation(Ceil, "Ceil"),
    Operation(Round, "Round"),
    Operation(ToInts, "Truncated<long long>", variant="int64"),
    Operation(ToInts, "Truncated<int>", variant="int32"),
    Operation(ToInts, "Truncated<short>", variant="int16"),
    Operation(ToInts, "Truncated<signed char>", variant="int8"),
    Operation(ToInts, "Truncated<unsigned char>", variant="uint8"),
    Operation(ToInts, "Truncated<bool>", variant="bool"),
    Operation(Add, "Add"),
    Operation(Mul, "Mul"),
    Operation(Max, "Max"),
    Operation(Min, "Min"),
    Operation(Sub, "Sub"),
    Operation(Mask, "Mask"),
    Operation(Div, "Div"),
    Operation(Mod, "Mod", variant="floored"),
    Operation(Mod, "TruncatedMod", variant="truncated"),
    Operation(Pow, "Pow"),
    Operation(PReLU, "PReLU"),
    Operation(Greater, "Greater"),
    Operation(GreaterOrEqual, "GreaterOrEqual"),
    Operation(Equal, "Equal"),
)
_BY_LAYER = {(row.layer, row.variant): row for row in OPERATIONS}


def _kinds(rows: Iterable[Operation]) -> tuple[type[Elementwise], ...]:
    return tuple(dict.fromkeys(row.layer for row in rows if issubclass(row.layer, Elementwise)))


# Layers fused into the epilogue of a gemm: on CUDA, on the CPU, and in training.
ACTIVATIONS = _kinds(row for row in OPERATIONS if row.in_gemm_epilogue)
CPU_ACTIVATIONS = _kinds(row for row in OPERATIONS if row.cpu is not None)
TRAINED = _kinds(row for row in OPERATIONS if row.derivative_from_output)
BINARY = tuple(row for row in OPERATIONS if issubclass(row.layer, Broadcast))
UNARY = tuple(row for row in OPERATIONS if row not in BINARY)


def may_divide_by_zero(net: Network, node: Node) -> bool:
    """Whether a node divides ints by a value that may be 0: anything but a constant without zeros."""
    if not isinstance(node.layer, Div | Mod) or "float" in net.types[node.name].dtype:
        return False
    constant = net.weights[node.weights["constant"]] if "constant" in node.weights else None
    return not (isinstance(constant, np.ndarray) and bool(constant.all()))


def operation_of(layer: Layer) -> Operation | None:
    """A layer's row; None for one that is not pointwise, and for a Cast to float64, which rounds nothing."""
    variant = ""
    if isinstance(layer, GELU):
        variant = layer.approximate
    elif isinstance(layer, Cast | ToInts):
        variant = layer.dtype
    elif isinstance(layer, Mod):
        variant = "truncated" if layer.truncated else "floored"
    return _BY_LAYER.get((type(layer), variant))
