"""The pointwise operations: functions of one or two elements, as layers declare them (network/layers/) and as the
kernels of both devices compute them.

A test runs every operation on both devices, and in NumPy, on the same values.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from onchip.network.layers import (
    BUILT_IN,
    Activation,
    Broadcast,
    Cast,
    Div,
    Elementwise,
    ElementwiseGrad,
    Layer,
    LeakyReLU,
    Mod,
    ReLU,
    Sigmoid,
    Tanh,
    ToInts,
    ToPixels,
)

if TYPE_CHECKING:
    from onchip.network.graph import Network, Node
    from onchip.network.layers.base import Expression

MAX_PARAMETERS = 2  # of a function of one element and of its gradient; other functions of two have none
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d*)?(?:e[+-]?\d+)?")


@dataclass(frozen=True)
class Operation:
    """A layer, or one of its variants, as kernels compute it. A number in its expressions is Element(number)."""

    layer: type[Layer]
    struct: str  # in C++; "" if it has no expression there
    variant: str = ""
    cuda: str = ""
    fast: str = ""
    cpu: str = ""
    operands: tuple[str, ...] = ("x",)
    parameters: tuple[str, ...] = ()  # the attributes in its expressions; a bound of None is infinite

    def float32_parameters(self, layer: Layer) -> tuple[np.float32, ...]:
        """The parameters of a layer, for float32 kernels."""
        return tuple(map(np.float32, self.parameter_values(layer)))

    def parameter_values(self, layer: Layer) -> tuple[float, ...]:
        infinities = {"low": -math.inf, "high": math.inf}
        source = layer.of if isinstance(layer, ElementwiseGrad) else layer
        attributes = [(name, getattr(source, name)) for name in self.parameters]
        return tuple(infinities[name] if value is None else value for name, value in attributes)


@functools.cache
def _declared(kind: type[Elementwise | Broadcast]) -> dict[str, Operation]:
    """The operations of a layer that declares expressions, by variant."""
    operands = ("a", "b") if issubclass(kind, Broadcast) else ("x",)
    fast = getattr(kind, "fast", "")
    return {variant: _operation(kind, variant, kind.cuda, fast, kind.cpu, operands) for variant in _variants(kind)}


@functools.cache
def _gradients(kind: type[Elementwise]) -> dict[str, Operation]:
    """The gradients of an elementwise layer that declares their expressions, by variant."""
    operands, found = (kind.grad_of, "dy"), dict[str, Operation]()
    for variant in _variants(kind) if kind.grad_of else ():
        op = _operation(kind, variant, kind.cuda_grad, "", kind.cpu_grad, operands)
        found[variant] = dataclasses.replace(op, layer=ElementwiseGrad, struct=op.struct and f"{op.struct}Grad")
    return found


def _variants(kind: type[Elementwise | Broadcast]) -> list[str]:
    variants = (key for each in (kind.cuda, kind.cpu) for key in ([""] if isinstance(each, str) else each))
    return list(dict.fromkeys(variants))


def _operation(
    kind: type[Elementwise | Broadcast], variant: str, cuda_texts: Expression, fast_texts: Expression,
    cpu_texts: Expression, operands: tuple[str, ...],
) -> Operation:  # fmt: skip
    cuda, fast, cpu = (_of_variant(texts, variant) for texts in (cuda_texts, fast_texts, cpu_texts))
    named = {word for text in (cuda, cpu) for word in re.findall(r"[A-Za-z_]\w*", text)}
    parameters = tuple(field.name for field in dataclasses.fields(kind) if field.name in named)
    most = 0 if issubclass(kind, Broadcast) else MAX_PARAMETERS
    if len(parameters) > most:
        raise TypeError(f"{kind.__name__}: its expressions may have at most {most} attributes, not {parameters}")
    struct = variant.title() + kind.__name__ if cuda else ""
    if struct and kind not in BUILT_IN:  # unique: two layers of users may have the same name
        struct += "_" + hashlib.sha256(repr((cuda, fast, parameters)).encode()).hexdigest()[:8]
    return Operation(kind, struct, variant, cuda, fast, cpu, operands, parameters)


def _of_variant(expression: Expression, variant: str) -> str:
    text = expression if isinstance(expression, str) else expression.get(variant, "")
    return _NUMBER.sub(r"Element(\g<0>)", text)


# Between dtypes: written out in common/elementwise.cuh and elementwise/pointwise.cu, and on the CPU in casts.py.
_WRITTEN_OUT = (
    Operation(ToPixels, "ToPixels"),
    Operation(Cast, "Rounded<float>", "float32"),
    Operation(Cast, "Rounded<f16>", "float16"),
    Operation(Cast, "Rounded<bf16>", "bfloat16"),
    Operation(ToInts, "Truncated<long long>", "int64"),
    Operation(ToInts, "Truncated<int>", "int32"),
    Operation(ToInts, "Truncated<short>", "int16"),
    Operation(ToInts, "Truncated<signed char>", "int8"),
    Operation(ToInts, "Truncated<unsigned char>", "uint8"),
    Operation(ToInts, "Truncated<bool>", "bool"),
)
_BETWEEN_DTYPES = {(row.layer, row.variant): row for row in _WRITTEN_OUT}
_DECLARED = tuple(kind for kind in BUILT_IN if issubclass(kind, Elementwise | Broadcast))

# Operations of the project's own layers. CODES select the activations at run time: in common/epilogue.cuh, and in
# cpu/microkernels/activation.py.
OPERATIONS = (*(row for kind in _DECLARED for row in _declared(kind).values()), *_WRITTEN_OUT)
GRADIENTS = tuple(row for kind in _DECLARED if issubclass(kind, Elementwise) for row in _gradients(kind).values())
BINARY = tuple(row for row in OPERATIONS if issubclass(row.layer, Broadcast))
UNARY = tuple(row for row in OPERATIONS if row not in BINARY)
ACTIVATIONS = tuple(kind for kind in _DECLARED if issubclass(kind, Activation))
CODES = {row: 1 + i for i, row in enumerate(row for row in OPERATIONS if row.layer in ACTIVATIONS)}
TRAINED = (ReLU, LeakyReLU, Sigmoid, Tanh)  # training kernels compute their derivatives, from their results


def operation_of(layer: Layer) -> Operation | None:
    """A layer's operation; None for one that is not pointwise, and for a Cast to float64, which rounds nothing."""
    if isinstance(layer, ElementwiseGrad):
        return _gradients(type(layer.of)).get(layer.of.variant)
    if isinstance(layer, Elementwise | Broadcast):
        return _declared(type(layer)).get(layer.variant)
    return _BETWEEN_DTYPES.get((type(layer), layer.variant))


# Codes that kernels use by name: no activation, and those of TRAINED. The CPU's gemm microkernel applies RELU itself.
IDENTITY = 0
RELU, LEAKY, SIGMOID, TANH = (CODES[_declared(kind)[""]] for kind in TRAINED)


def may_divide_by_zero(net: Network, node: Node) -> bool:
    """Whether a node divides ints by a value that may be 0: anything but a constant without zeros."""
    if not isinstance(node.layer, Div | Mod) or "float" in net.types[node.name].dtype:
        return False
    constant = net.weights[node.weights["constant"]] if "constant" in node.weights else None
    return not (isinstance(constant, np.ndarray) and bool(constant.all()))
