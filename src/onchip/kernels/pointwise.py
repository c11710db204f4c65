"""The pointwise operations: one or two elements in, one out. One row per operation, one column per engine.

| column                | where its arithmetic is                                                                 |
| --------------------- | --------------------------------------------------------------------------------------- |
| `forward`, `backward` | `kernels/reference/`: NumPy, any float dtype; the reference                             |
| `cpu`                 | `kernels/cpu/elementwise/`: a vectorised loop, by this code                             |
| `cuda`                | `kernels/cuda/common/`: a struct of `activation.cuh` or `function.cuh`                  |

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
    from onchip.kernels.reference.base import Backward, Forward
    from onchip.network.graph import Network, Node

# The `cpu` column. The compiled loops compare with these; 0 is no operation, and the tile's own last step does RELU.
IDENTITY, RELU, SIGMOID, TANH, LEAKY, SILU, GELU_ERF, GELU_TANH = range(8)
CLIP, ELU_CODE, SELU_CODE, HARD_SIGMOID, HARD_SWISH, SOFTPLUS, SOFTSIGN, MISH = range(8, 16)


@dataclass(frozen=True)
class Operation:
    layer: type[Layer]
    cuda: str  # the struct's name
    cpu: int | None = None  # None: no compiled loop, NumPy computes it
    variant: str = ""  # of a layer that is several operations: its distinguishing attribute
    parameters: tuple[str, ...] = ()  # attributes passed to it; a bound of None is an infinity
    slope_of_result: bool = False  # its derivative depends on its result alone: what on-chip training needs
    behind_products: bool = False  # CUDA gemms fuse it: common/epilogue.cuh has a case for it

    @property
    def forward(self) -> Forward:
        from onchip.kernels.reference import FORWARD

        return FORWARD[self.layer]

    @property
    def backward(self) -> Backward | None:
        """None for step functions, which have no derivative."""
        from onchip.kernels.reference import BACKWARD

        return BACKWARD.get(self.layer)

    def told(self, layer: Layer) -> tuple[np.float32, ...]:
        """The parameters of a layer, for float32 kernels."""
        return tuple(map(np.float32, self.parameter_values(layer)))

    def parameter_values(self, layer: Layer) -> tuple[float, ...]:
        none = {"low": -math.inf, "high": math.inf}
        given = [(name, getattr(layer, name)) for name in self.parameters]
        return tuple(none[name] if value is None else value for name, value in given)


OPERATIONS = (
    Operation(ReLU, "ReLU", RELU, slope_of_result=True, behind_products=True),
    Operation(LeakyReLU, "LeakyReLU", LEAKY, parameters=("slope",), slope_of_result=True, behind_products=True),
    Operation(Clip, "Clip", CLIP, parameters=("low", "high"), behind_products=True),
    Operation(Sigmoid, "Sigmoid", SIGMOID, slope_of_result=True, behind_products=True),
    Operation(Tanh, "Tanh", TANH, slope_of_result=True, behind_products=True),
    Operation(SiLU, "SiLU", SILU, behind_products=True),
    Operation(GELU, "GELU", GELU_ERF, "none", behind_products=True),
    Operation(GELU, "TanhGELU", GELU_TANH, "tanh", behind_products=True),
    Operation(ToPixels, "ToPixels"),
    Operation(Cast, "Rounded<float>", variant="float32"),
    Operation(Cast, "Rounded<f16>", variant="float16"),
    Operation(Cast, "Rounded<bf16>", variant="bfloat16"),
    Operation(ELU, "ELU", ELU_CODE, parameters=("alpha",), behind_products=True),
    Operation(SELU, "SELU", SELU_CODE, behind_products=True),
    Operation(HardSigmoid, "HardSigmoid", HARD_SIGMOID, parameters=("slope", "shift"), behind_products=True),
    Operation(HardSwish, "HardSwish", HARD_SWISH, behind_products=True),
    Operation(Softplus, "Softplus", SOFTPLUS, behind_products=True),
    Operation(Softsign, "Softsign", SOFTSIGN, behind_products=True),
    Operation(Mish, "Mish", MISH, behind_products=True),
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
    Operation(ToInts, "Whole<long long>", variant="int64"),
    Operation(ToInts, "Whole<int>", variant="int32"),
    Operation(ToInts, "Whole<short>", variant="int16"),
    Operation(ToInts, "Whole<signed char>", variant="int8"),
    Operation(ToInts, "Whole<unsigned char>", variant="uint8"),
    Operation(ToInts, "Whole<bool>", variant="bool"),
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


# Layers that other kernels fuse into a gemm: CUDA's, the CPU's, and those that train.
ACTIVATIONS = _kinds(row for row in OPERATIONS if row.behind_products)
CPU_ACTIVATIONS = _kinds(row for row in OPERATIONS if row.cpu is not None)
TRAINED = _kinds(row for row in OPERATIONS if row.slope_of_result)
BINARY = tuple(row for row in OPERATIONS if issubclass(row.layer, Broadcast))
UNARY = tuple(row for row in OPERATIONS if row not in BINARY)


def may_divide_by_zero(net: Network, node: Node) -> bool:
    """Whether it divides ints by anything but constants without a 0."""
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
