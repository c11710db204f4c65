"""What the GEMM kernels of a Linear share: the layers that they fuse with it, the claim and the lowering."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from onchip.kernels.chain import Chain, Dense, end_dtypes, find_chain, forward_cost, is_closed
from onchip.kernels.cuda.common.arguments import NOTHING, Argument, Input, Output, Weight
from onchip.kernels.cuda.common.chain import ChainKernel, FitsInBlock, unsupported_dtype
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES
from onchip.kernels.cuda.common.gemm import Gemm
from onchip.kernels.cuda.common.precision import PRECISIONS
from onchip.kernels.cuda.common.program import KernelLaunch, Steps
from onchip.kernels.cuda.common.weights import narrow_weight
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.network.graph import Network
from onchip.network.layers import Add, Cast, Elementwise
from onchip.network.recipe import Recipe, as_is
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Use


@dataclass(frozen=True)
class FusedLinear:
    """A chain of one layer; the epilogue adds `residual`, if any, before the activation."""

    chain: Chain
    residual: str = ""

    @property
    def layer(self) -> Dense:
        return self.chain.layers[0]

    @property
    def label(self) -> str:
        return f"{self.chain.label},Add" if self.residual else self.chain.label

    @property
    def bias(self) -> Argument:
        return NOTHING if self.layer.bias is None else Weight("bias")

    def input_name(self, net: Network) -> str:
        return net.by_name[self.chain.nodes[0]].inputs[0]

    def residual_input(self, net: Network) -> Argument:
        return Input(len({self.input_name(net), self.residual}) - 1) if self.residual else NOTHING

    def arrays(self, net: Network, *residual: Argument) -> tuple[Argument, ...]:
        """x, w, bias, the residual if the kernel adds one, y"""
        return Input(0), Weight("weight"), self.bias, *residual, Output(0)

    def work(self, net: Network) -> tuple[int, int]:
        """Per row of the batch: flop, and bytes of the values at both ends."""
        cost = forward_cost(net, self.chain)
        residual_bytes = net.types[self.residual].row_bytes if self.residual not in ("", self.input_name(net)) else 0
        return cost.row_flop, cost.row_bytes + residual_bytes

    def recipes(self, weight: Recipe) -> dict[str, Recipe]:
        """The weight in the kernel's layout; the bias in float32."""
        layer = self.layer
        bias = {} if layer.bias is None else {"bias": Recipe.of(as_is, (layer.bias,), (layer.D_out,))}
        return {"weight": weight, **bias}


@dataclass(frozen=True)
class LinearGemm(Gemm):
    """A gemm that is one launch."""

    @classmethod
    def of(cls, net: Network, linear: FusedLinear, precision: str) -> Self:
        """For one row of the batch."""
        layer, chain = linear.layer, linear.chain
        return cls(chain.vectors, layer.D_out, layer.D_in, precision, end_dtypes(net, chain), layer.activation)

    def launch(self, device: Device, *arrays: Argument) -> KernelLaunch:
        """arrays: x, w, bias, the residual if the kernel adds one, y."""
        raise NotImplementedError


@dataclass(frozen=True)
class LinearLowering:
    """A Linear and the layers fused with it, lowered to one launch."""

    gemm: LinearGemm  # for one row of the batch
    arrays: tuple[Argument, ...]  # of the launch
    device: Device

    def at(self, B: int) -> Steps:
        gemm = replace(self.gemm, M=B * self.gemm.M)
        return Steps((gemm.launch(self.device, *self.arrays),) if gemm.M else ())


class GemmKernel(ChainKernel):
    """A kernel of one Linear with its activation and surrounding Casts."""

    activations: ClassVar[tuple[type[Elementwise], ...]] = ACTIVATIONS

    def find(self, net: Network, start: int) -> Chain | None:
        """The Linear with its activation and surrounding Casts, if the kernel supports their dtypes."""
        chain = find_chain(net, start, self.activations, casts=True, most=1)
        return None if chain is None or unsupported_dtype(net, chain) else one_layer(net, chain)

    def claim_linear(self, net: Network, linear: FusedLinear, lowering: object, **changes: Any) -> Claim:
        reads = {linear.input_name(net): Use(is_read_often=True)}  # once per column of tiles
        fields = {"label": f"{self.name}<{linear.label}>", "reads": reads}
        return self.claim_chain(net, linear.chain, lowering, **(fields | changes))


def large_layer(net: Network, start: int, device: Device, job: Job, fits_in_block: FitsInBlock) -> Chain | str | None:
    """The Linear at `start` with its activation and surrounding Casts, where it does not fit in a block.

    None: it fits. A string: the reason for a refusal.
    """
    chain = find_chain(net, start, ACTIVATIONS, casts=True, most=1)
    assert chain is not None
    if not (why_not := unsupported_dtype(net, chain)):
        one = one_layer(net, chain)
        return None if fits_in_block(net, one, device, job) else one
    # y or the weights may be float64: retry without the Casts; recipes round the weights.
    linear = find_chain(net, start, ACTIVATIONS, most=1)
    if linear is not None and set(end_dtypes(net, one := one_layer(net, linear))) <= ELEMENT_TYPES.keys():
        return one
    return why_not


def one_layer(net: Network, chain: Chain) -> Chain:
    """The first layer of the chain, without its softmax or other normaliser."""
    chain = chain.first(1)
    if not chain.normaliser:
        return chain
    end = next(i for i, name in enumerate(chain.nodes) if net.by_name[name].layer.kind == chain.normaliser)
    return replace(chain, nodes=chain.nodes[:end], normaliser="", ends=(end,))


def residuals(net: Network, start: int, chain: Chain) -> Iterator[FusedLinear]:
    """The chain of one layer at net.nodes[start]: by itself, with the Add after it, and with the activation after that.

    An intermediate value that another node reads is not fused.
    """
    yield FusedLinear(chain)
    (layer,), end = chain.layers, start + len(chain.nodes)
    last, *after = net.nodes[end - 1 : end + 2]
    if not after or not isinstance(after[0].layer, Add) or layer.activation or isinstance(last.layer, Cast):
        return
    add, *active = after
    others = [value for value in add.inputs if value != last.name]
    alike = len({net.types[value] for value in (*add.inputs, add.name)}) == 1
    if len(add.inputs) != 2 or len(others) != 1 or add.weights or not alike or not is_closed(net, [last, add]):
        return
    nodes = (*chain.nodes, add.name)
    yield FusedLinear(replace(chain, nodes=nodes, ends=(len(nodes),)), *others)
    for node in active:
        if isinstance(node.layer, ACTIVATIONS) and node.inputs == (add.name,) and is_closed(net, [add, node]):
            nodes = (*nodes, node.name)
            layers = (replace(layer, activation=node.layer),)
            yield FusedLinear(replace(chain, nodes=nodes, layers=layers, ends=(len(nodes),)), *others)


def plain_weight(layer: Dense, precision: str) -> Recipe:
    """w (N, K) in the type of the precision."""
    op, dtype = narrow_weight if precision == "fp16" else as_is, PRECISIONS[precision].dtype
    return Recipe.of(op, (layer.weight,), (layer.D_out, layer.D_in), dtype)
