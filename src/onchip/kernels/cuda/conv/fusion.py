"""What the kernels of convolutions share: the layers that they fuse with one, the claim, and the lowering's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from onchip.kernels.chain import is_closed
from onchip.kernels.cuda.common.arguments import NOTHING, Argument, Weight
from onchip.kernels.cuda.common.costs import H200, CudaCosts, costs_of
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES
from onchip.kernels.cuda.common.kernel import CudaKernel
from onchip.kernels.cuda.common.precision import tensor_core_cost
from onchip.kernels.cuda.conv.direct import Geometry
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, Cast, Convolution, Elementwise, Embedding, Layer, ToPixels, TransposedConvolution
from onchip.network.recipe import Recipe
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Use
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels

TAPS = "taps, then channels"  # the usual order of K


@dataclass(frozen=True)
class ConvRun:
    """Consecutive nodes with one convolution (or a Linear after an Embedding)."""

    nodes: tuple[Node, ...]
    conv: Node
    residual: str = ""  # the value that a following Add adds

    @property
    def input_name(self) -> str:
        return self.nodes[0].inputs[0]

    @property
    def output_name(self) -> str:
        return self.nodes[-1].name

    @property
    def activation(self) -> Elementwise | None:
        return next((node.layer for node in self.nodes if isinstance(node.layer, Elementwise)), None)

    @property
    def residual_input(self) -> int | None:
        """Input index of the residual: 0 if it is x itself, else 1."""
        return len({self.input_name, self.residual}) - 1 if self.residual else None

    def dtypes(self, net: Network) -> tuple[str, str]:
        """Of x, or of the values that an Embedding looks up, and of y."""
        first = self.nodes[0]
        x = first.name if isinstance(first.layer, Embedding) else self.input_name
        return net.types[x].dtype, net.types[self.output_name].dtype

    def are_floats(self, net: Network) -> bool:
        """Whether weights and values, except for pixels at the end, have dtypes that the tensor cores support."""
        weights = (net.weight_type(name).dtype for name in self.conv.weights.values())
        floats = (node.name for node in self.nodes if not isinstance(node.layer, ToPixels))
        return {*(net.types[value].dtype for value in (self.input_name, *floats)), *weights} <= ELEMENT_TYPES.keys()

    def cost(
        self, net: Network, precision: str, recipes: Mapping[str, Recipe], rate: float, min_us: float,
        extra_bytes: int = 0,
    ) -> Cost:  # fmt: skip
        """At a share of the tensor cores' rate. extra_bytes: per row, in addition to the values at both ends."""
        values = dict.fromkeys((self.input_name, self.residual, self.output_name))
        return tensor_core_cost(
            precision, sum(map(net.row_flop, self.nodes)),
            sum(net.types[value].row_bytes for value in values if value) + extra_bytes,
            sum(recipe.nbytes for name, recipe in recipes.items() if name != "table"), rate=rate, min_us=min_us,
        )  # fmt: skip

    def label(self, net: Network, hidden: tuple[type[Layer], ...] = ()) -> str:
        """Channels, taps, and the fused layers, except for `hidden` ones."""
        C, N = (net.types[value].row_shape[0] for value in (self.conv.inputs[0], self.conv.name))
        taps = "x".join(map(str, net.weights[self.conv.weights["weight"]].shape[2:]))
        return ",".join([f"{C},{N},{taps}", *self.epilogue(hidden)])

    def epilogue(self, hidden: tuple[type[Layer], ...] = ()) -> list[str]:
        after = self.nodes[self.nodes.index(self.conv) + 1 :]
        return [node.layer.kind for node in after if not isinstance(node.layer, hidden)]

    def extended(self, net: Network, node: Node) -> ConvRun | None:
        """The run extended by a node, if the node reads only the run's output, and no other node reads that."""
        follows = node.inputs == (self.output_name,) and is_closed(net, [*self.nodes, node])
        return ConvRun((*self.nodes, node), self.conv) if follows else None


def find_conv(net: Network, start: int) -> ConvRun | None:
    """The convolution that begins at a node, or follows a Cast there, if the tensor cores support its dtypes."""
    nodes = net.nodes[start : start + (2 if isinstance(net.nodes[start].layer, Cast) else 1)]
    conv = nodes[-1]
    if not isinstance(conv.layer, Convolution | TransposedConvolution):
        return None
    if len(nodes) > 1 and (conv.inputs != (nodes[0].name,) or not is_closed(net, list(nodes))):
        return None
    run = ConvRun(nodes, conv)
    return run if run.are_floats(net) else None


def with_conversion(net: Network, start: int, run: ConvRun) -> ConvRun:
    """Extend a run by an activation, and by a Cast or ToPixels, where they follow."""
    for kinds in (ACTIVATIONS, (Cast, ToPixels)):
        for node in net.nodes[start + len(run.nodes) : start + len(run.nodes) + 1]:
            run = (isinstance(node.layer, kinds) and run.extended(net, node)) or run
    return run


def find_runs(net: Network, start: int, operand_dtype: str) -> list[ConvRun]:
    """All fusions that begin at a node, longest first; each includes the convolution.

    operand_dtype  the tensor cores' operand dtype: a preceding Cast to it is fused
    """
    run = find_conv(net, start)
    if run is None:
        return []
    x, operand = (net.types[value].dtype for value in (run.input_name, run.conv.inputs[0]))
    if len(run.nodes) > 1 and not x != operand == operand_dtype:
        return []
    return [each for each in with_epilogue(net, start, run) if each.are_floats(net)]


def with_epilogue(net: Network, start: int, run: ConvRun) -> list[ConvRun]:
    """Extend a run that ends with its convolution by the layers that may follow; longest first."""
    runs = [run]
    for node in net.nodes[start + len(run.nodes) : start + len(run.nodes) + 3]:
        run, last = runs[-1], runs[-1].nodes[-1]
        if last.name not in node.inputs or not is_closed(net, [*run.nodes, node]):
            break
        residual = run.residual
        if isinstance(node.layer, Add) and last is run.conv and _is_residual_sum(net, node):
            (residual,) = (value for value in node.inputs if value != last.name)
        elif not (
            (isinstance(node.layer, ACTIVATIONS) and not isinstance(last.layer, (*ACTIVATIONS, Cast)))
            or (isinstance(node.layer, Cast) and not isinstance(last.layer, Cast) and not residual)
        ):
            break
        runs.append(ConvRun((*run.nodes, node), run.conv, residual))
    return runs[::-1]


def _is_residual_sum(net: Network, node: Node) -> bool:
    """Whether an Add has two distinct inputs of the same shape."""
    shapes = {net.types[value].shape for value in (*node.inputs, node.name)}
    return len(node.inputs) == len(set(node.inputs)) == 2 and not node.weights and len(shapes) == 1


@dataclass(frozen=True)
class ConvLowering:
    """A convolution and the layers fused with it, lowered to one launch."""

    geometry: Geometry
    precision: str
    dtypes: tuple[str, str]  # of x (or of the table) and y
    activation: Elementwise | None
    has_bias: bool
    units: int
    costs: CudaCosts = field(default=H200, kw_only=True, repr=False)

    @classmethod
    def of(cls, net: Network, run: ConvRun, geometry: Geometry, device: Device, job: Job, **fields: Any) -> Self:
        """The lowering of a run; `fields` are those that a subclass adds."""
        dtypes, has_bias, costs = run.dtypes(net), "bias" in run.conv.weights, costs_of(device)
        return cls(geometry, job.precision, dtypes, run.activation, has_bias, device.units, costs=costs, **fields)

    @property
    def bias(self) -> Argument:
        return Weight("bias") if self.has_bias else NOTHING


class ConvKernel(CudaKernel):
    """A kernel of a convolution on the tensor cores; the layers that it fuses may begin with a Cast."""

    layers: ClassVar[tuple[type[Layer], ...]] = (Cast, Convolution, TransposedConvolution)
    dtypes = tuple(ELEMENT_TYPES)

    def claim_run(self, net: Network, run: ConvRun, lowering: ConvLowering, **changes: Any) -> Claim:
        """The claim of a run, by default in NHWC at both ends; `changes` replace fields."""
        fields = {
            "nodes": tuple(node.name for node in run.nodes), "label": f"{self.name}<{run.label(net)}>",
            "reads": {
                value: Use(CHANNELS_LAST if has_channels(net.types[value]) else ROWS, value == run.input_name)
                for value in (run.residual, run.input_name) if value
            },
            "writes": {run.output_name: CHANNELS_LAST} if has_channels(net.types[run.output_name]) else {},
        }  # fmt: skip
        return self.claim(net, run.conv, lowering, **(fields | changes))
