"""The layer base class: a frozen set of attributes that knows its output type and its flop.

A new layer is one class in a file of this package, registered by its class name, which is also its name in files.
One with attributes is a dataclass(frozen=True, eq=False, repr=False): the shared methods are here, once, since each
method that a dataclass generates adds to the import time.

`forward` and `backward` define what a layer computes, in NumPy and in any float dtype. In float64 they are the
reference for every kernel.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, ClassVar, Literal

from onchip.errors import ShapeError, shorten
from onchip.network.recipe import Array
from onchip.network.types import TensorType

LAYERS: dict[str, type[Layer]] = {}
STEP_LAYERS: dict[str, type[Layer]] = {}  # only of training steps: no file of a network has them
MAX_SHOWN = 60  # characters of an attribute in a repr: a Gather may have any number of indices

Types = tuple[TensorType, ...]
WeightTypes = Mapping[str, TensorType]
Arrays = tuple[Array, ...]
Weights = Mapping[str, Array]  # role -> array
Gradients = tuple[tuple[Array | None, ...], dict[str, Array]]  # per input value (None: no gradient), and by role


@dataclass(frozen=True, eq=False, repr=False)
class Layer(abc.ABC):
    required: ClassVar[tuple[str, ...]] = ()  # roles of required weights, e.g. "weight"
    optional: ClassVar[tuple[str, ...]] = ()  # roles of optional weights, e.g. "bias"
    arity: ClassVar[int | None] = 1  # number of input values; None: one or more
    has_tables: ClassVar[bool] = False  # its weight is a set of tables that may be stored in half precision
    constants: ClassVar[tuple[str, ...]] = ()  # roles of weights without a gradient
    crosses_rows: ClassVar[bool] = False  # a row of y depends on other rows of the batch, or on its place in it
    # Whether `backward` reads x and y; a training step does not keep what it does not read. Without x, y has its type.
    needs_x: ClassVar[bool] = True
    needs_y: ClassVar[bool] = True

    def __init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not abstract:
            LAYERS[cls.__name__] = cls

    @property
    def kind(self) -> str:
        return type(self).__name__

    @property
    def variant(self) -> str:
        """Which of several functions it is; "" for most layers."""
        return ""

    @abc.abstractmethod
    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        """The output's type; ShapeError if these inputs and weights do not fit."""

    @abc.abstractmethod
    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        """Floating-point operations for one row of the batch."""

    @abc.abstractmethod
    def forward(self, xs: Arrays, w: Weights) -> Array:
        """The output."""

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        """The gradients of the inputs and the weights. A layer without a derivative does not override it."""
        raise NotImplementedError

    @property
    def is_differentiable(self) -> bool:
        return type(self).backward is not Layer.backward

    def row_lookup_elements(self, inputs: Types, weights: WeightTypes) -> int:
        """Elements that one row of the batch reads from a table "weight"; 0 for a layer that reads all its weights."""
        return 0

    def check_weights(self, arrays: Mapping[str, Array]) -> None:
        """InputError if the layer cannot use these arrays, by role; weights not computed yet are omitted."""
        return  # most accept any

    def attributes(self) -> dict[str, Any]:
        return dict(vars(self))  # not asdict, which copies deeply: planning calls this often

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.kind, *vars(self).values()))

    def __repr__(self) -> str:
        texts = (f"{name}={shorten([repr(value)], MAX_SHOWN)[0]}" for name, value in vars(self).items())
        return f"{self.kind}({', '.join(texts)})"

    def __str__(self) -> str:
        inside = ", ".join(f"{k}={v}" for k, v in self.attributes().items())
        return f"{self.kind}({inside})" if inside else self.kind


def _refuse(layer: Layer, name: str, value: object = None) -> None:
    raise FrozenInstanceError(f"a {layer.kind} is immutable: {name}")


# Also for layers without attributes, which are not dataclasses themselves.
Layer.__setattr__ = Layer.__delattr__ = _refuse  # type: ignore[method-assign,assignment]


class StepLayer(Layer, abstract=True):
    """A layer of training steps."""

    def __init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(abstract=True, **kwargs)
        if not abstract:
            STEP_LAYERS[cls.__name__] = cls


class Spelling:
    """A layer's name in another library, and the names of its attributes there."""

    def __init__(self, name: str, **attributes: str) -> None:
        self.name, self.attributes = name, attributes  # their name -> ours


Expression = str | Mapping[str, str]  # or one per `variant` of the layer


class Elementwise(Layer, abstract=True):
    """A function of one element: `function` and its `derivative` in NumPy, and its names in other libraries.

    `cuda` and `cpu` are its expressions of x and of its attributes in C++ and in Python: in terms of the functions of
    kernels/cuda/common/elementwise.cuh and of kernels/cpu/microkernels/. Numbers in them have the type of x. The
    kernels of a device without an expression refuse the layer.

    `cuda_grad` and `cpu_grad` are the expressions of dx: of dy, and of either x or y; `grad_of` says which.
    `derivative` must then return the same for that one in place of both.
    """

    flop_each: ClassVar[int] = 1
    onnx: ClassVar[Spelling | None] = None  # the operator
    torch: ClassVar[Spelling | None] = None  # a function of torch or torch.nn.functional, with keywords
    jax: ClassVar[str] = ""  # a function of jax, "nn.silu"
    cuda: ClassVar[Expression] = ""
    fast: ClassVar[Expression] = ""  # in C++, for hidden layers in 16 bits: error at most 2^-12 of the largest result
    cpu: ClassVar[Expression] = ""
    grad_of: ClassVar[Literal["", "x", "y"]] = ""
    cuda_grad: ClassVar[Expression] = ""
    cpu_grad: ClassVar[Expression] = ""

    @abc.abstractmethod
    def function(self, x: Array) -> Array:
        """y of x."""

    @abc.abstractmethod
    def derivative(self, x: Array, y: Array) -> Array:
        """dy / dx."""

    def forward(self, xs: Arrays, w: Weights) -> Array:
        return self.function(xs[0])

    def backward(self, xs: Arrays, w: Weights, y: Array, dy: Array) -> Gradients:
        return (dy * self.derivative(xs[0], y),), {}

    def infer(self, inputs: Types, weights: WeightTypes) -> TensorType:
        need_float(inputs[0])
        return inputs[0]

    def row_flop(self, inputs: Types, weights: WeightTypes) -> int:
        return self.flop_each * inputs[0].row_size


class Activation(Elementwise, abstract=True):
    """An Elementwise that kernels fuse into the layer before it; it has both expressions."""

    def __init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        if not (abstract or (cls.cuda and cls.cpu)):
            raise TypeError(f"{cls.__name__}: an Activation needs the expressions `cuda` and `cpu`; see Elementwise")
        if not {*cls.__bases__}.isdisjoint(LAYERS.values()):  # kernels would run it as that layer
            raise TypeError(f"{cls.__name__}: derive it from Activation, not from another layer")
        super().__init_subclass__(abstract, **kwargs)


def need_float(x: TensorType, weights: WeightTypes | None = None) -> None:
    """ShapeError if the input or a weight is not floating-point. Weights may be wider or narrower than the input."""
    if "float" not in x.dtype:
        raise ShapeError("needs floating-point input", got=str(x), expected="a float dtype")
    for role, weight in (weights or {}).items():
        if "float" not in weight.dtype:
            expected, hint = f"a float dtype, as the input {x}", f"save the {role} as {x.dtype}"
            raise ShapeError(f"needs a floating-point {role}", got=str(weight), expected=expected, hint=hint)


def row_axis(axis: int, x: TensorType) -> int:
    """`axis` as a non-negative index; ShapeError if it is out of range or the batch."""
    rank = len(x.shape)
    if not -rank <= axis < rank:
        raise ShapeError("axis out of range", got=f"axis {axis}", expected=f"-{rank} to {rank - 1} for {x}")
    if axis % rank == 0:
        raise ShapeError(
            "axis 0 is the batch: rows must not depend on each other", got=f"axis {axis}", expected="an axis of a row"
        )
    return axis % rank


def need_bias(weights: WeightTypes, width: int) -> None:
    """ShapeError if there is a bias of another shape than [width]."""
    bias = weights.get("bias")
    if bias is not None and bias.shape != (width,):
        raise ShapeError("bias and weight do not fit", got=str(bias), expected=f"[{width}]")


def as_sizes(layer: Layer, **least: int) -> None:
    """Convert a frozen layer's attributes to tuples of ints, each at least `least`."""
    for name, lowest in least.items():
        values = getattr(layer, name)
        try:
            sizes = tuple(int(n) for n in values)
        except TypeError:
            raise ShapeError(f"bad {name}", got=repr(values), expected="a tuple of ints") from None
        if any(n < lowest for n in sizes) or any(int(n) != n for n in values):
            raise ShapeError(f"bad {name}", got=str(sizes), expected=f"ints of at least {lowest}")
        object.__setattr__(layer, name, sizes)
