"""The pointwise operations: one number in, or two, and one number out. A row an operation, a column for each engine.

| column                | where its arithmetic stands                                                             |
| --------------------- | --------------------------------------------------------------------------------------- |
| `forward`, `backward` | `kernels/reference/`: NumPy, any float dtype; the truth                                 |
| `cpu`                 | `kernels/cpu/activation.py`: a loop of vector code, by this number                      |
| `cuda`                | `kernels/cuda/activation.cuh` and `pointwise.cu`: a struct, one number a call           |

A test runs all columns of every row on the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from onchip.spec.layers import (
    GELU,
    Add,
    Cast,
    Clip,
    Elementwise,
    Layer,
    LeakyReLU,
    Mul,
    ReLU,
    Sigmoid,
    SiLU,
    Tanh,
    ToPixels,
)

if TYPE_CHECKING:
    from onchip.kernels.reference.base import Backward, Forward

# The `cpu` column. The compiled loops compare with these; 0 is no operation, and the tile's own last step does RELU.
IDENTITY, RELU, SIGMOID, TANH, LEAKY, SILU, GELU_ERF, GELU_TANH = range(8)


@dataclass(frozen=True)
class Operation:
    layer: type[Layer]
    cuda: str  # the struct
    cpu: int | None = None  # None: no loop of its own, NumPy does it
    variant: str = ""  # of a layer that is several operations: its `approximate` or `dtype`
    parameters: tuple[str, ...] = ()  # what it is told; a bound of None is an infinity
    slope_of_result: bool = False  # its derivative follows from its result alone: what training on the chip needs

    @property
    def forward(self) -> Forward:
        from onchip.kernels.reference import FORWARD

        return FORWARD[self.layer]

    @property
    def backward(self) -> Backward | None:
        """None for steps, which have no slope."""
        from onchip.kernels.reference import BACKWARD

        return BACKWARD.get(self.layer)

    def told(self, layer: Layer) -> tuple[np.float32, ...]:
        """The parameters of a layer, for what computes in float32."""
        return tuple(map(np.float32, self.told_exactly(layer)))

    def told_exactly(self, layer: Layer) -> tuple[float, ...]:
        none = {"low": -math.inf, "high": math.inf}
        given = [(name, getattr(layer, name)) for name in self.parameters]
        return tuple(none[name] if value is None else value for name, value in given)


OPERATIONS = (
    Operation(ReLU, "ReLU", RELU, slope_of_result=True),
    Operation(LeakyReLU, "LeakyReLU", LEAKY, parameters=("slope",), slope_of_result=True),
    Operation(Clip, "Clip", parameters=("low", "high")),
    Operation(Sigmoid, "Sigmoid", SIGMOID, slope_of_result=True),
    Operation(Tanh, "Tanh", TANH, slope_of_result=True),
    Operation(SiLU, "SiLU", SILU),
    Operation(GELU, "GELU", GELU_ERF, "none"),
    Operation(GELU, "TanhGELU", GELU_TANH, "tanh"),
    Operation(ToPixels, "ToPixels"),
    Operation(Cast, "Rounded<float>", variant="float32"),
    Operation(Cast, "Rounded<f16>", variant="float16"),
    Operation(Cast, "Rounded<bf16>", variant="bfloat16"),
    Operation(Add, "Add"),
    Operation(Mul, "Mul"),
)
_BY_LAYER = {(row.layer, row.variant): row for row in OPERATIONS}

# Layers that other kernels take along with a product: of every row, of those with a loop on the CPU, and of those that
# can be trained through.
ACTIVATIONS: tuple[type[Elementwise], ...] = tuple(
    dict.fromkeys(row.layer for row in OPERATIONS if issubclass(row.layer, Elementwise))
)
CPU_ACTIVATIONS = tuple(kind for kind in ACTIVATIONS if any(r.layer is kind and r.cpu is not None for r in OPERATIONS))
TRAINED = tuple(kind for kind in ACTIVATIONS if any(r.layer is kind and r.slope_of_result for r in OPERATIONS))


def operation_of(layer: Layer) -> Operation | None:
    """A layer's row; None for one that is not pointwise, and for a Cast to float64, which rounds nothing."""
    variant = layer.approximate if isinstance(layer, GELU) else layer.dtype if isinstance(layer, Cast) else ""
    return _BY_LAYER.get((type(layer), variant))
