"""A convolution with the layers fused into it, as conv/sm90.py and conv/implicit_gemm.py claim them."""

from __future__ import annotations

from dataclasses import dataclass

from onchip.kernels.chain import is_closed
from onchip.kernels.cuda.common.program import ELEMENT_TYPES
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.network.graph import Network, Node
from onchip.network.layers import Add, Cast, Convolution, Elementwise, TransposedConvolution
from onchip.plan.kernel import Use
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels


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
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes)

    @property
    def activation(self) -> Elementwise | None:
        return next((node.layer for node in self.nodes if isinstance(node.layer, Elementwise)), None)

    @property
    def residual_input(self) -> int | None:
        """Input index of the residual: 0 if it is x itself, else 1."""
        return len({self.input_name, self.residual}) - 1 if self.residual else None

    def dtypes(self, net: Network) -> tuple[str, str]:
        return net.types[self.input_name].dtype, net.types[self.output_name].dtype

    def are_floats(self, net: Network) -> bool:
        """Whether input, weights and output have dtypes that the tensor cores support."""
        weights = (net.weight_type(name).dtype for name in self.conv.weights.values())
        return {*self.dtypes(net), *weights} <= ELEMENT_TYPES.keys()

    def row_flop(self, net: Network) -> int:
        return sum(map(net.row_flop, self.nodes))

    def row_bytes(self, net: Network) -> int:
        values = dict.fromkeys((self.input_name, self.residual, self.output_name))
        return sum(net.types[value].row_bytes for value in values if value)

    def label(self, net: Network) -> str:
        """Channels, taps, and the fused layers."""
        C, N = (net.types[value].row_shape[0] for value in (self.conv.inputs[0], self.conv.name))
        taps = "x".join(map(str, net.weights[self.conv.weights["weight"]].shape[2:]))
        return ",".join([f"{C},{N},{taps}", *self.epilogue])

    @property
    def epilogue(self) -> list[str]:
        return [node.layer.kind for node in self.nodes[self.nodes.index(self.conv) + 1 :]]

    def reads(self, net: Network) -> dict[str, Use]:
        return {
            value: Use(CHANNELS_LAST if has_channels(net.types[value]) else ROWS, value == self.input_name)
            for value in (self.residual, self.input_name)
            if value
        }

    def writes(self, net: Network) -> dict[str, str]:
        return {self.output_name: CHANNELS_LAST} if has_channels(net.types[self.output_name]) else {}


def find_runs(net: Network, start: int, operand_dtype: str) -> list[ConvRun]:
    """All fusions that begin at a node: the longest first, then every shorter one that includes the convolution.

    operand_dtype  the tensor cores' operand dtype: a preceding Cast to it is fused
    """
    first = net.nodes[start]
    has_cast = isinstance(first.layer, Cast) and first.layer.dtype == operand_dtype != net.types[first.inputs[0]].dtype
    nodes = net.nodes[start : start + 1 + has_cast]
    conv = nodes[-1]
    if not isinstance(conv.layer, Convolution | TransposedConvolution):
        return []
    if has_cast and (conv.inputs != (first.name,) or not is_closed(net, list(nodes))):
        return []
    return with_epilogue(net, start, ConvRun(nodes, conv))


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
