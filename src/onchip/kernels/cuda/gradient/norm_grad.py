"""dx of LayerNorm, RMSNorm and GroupNorm: host side of gradient/norm_grad.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.common.arguments import NOTHING, Input, Int64, Output, UInt32, Weight
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.kernel import instance
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, Steps, grid_1d
from onchip.kernels.cuda.common.row_norm import MAX_ELEMENTS, norm_struct
from onchip.kernels.cuda.common.rows import THREADS, RowThreads
from onchip.kernels.cuda.gradient.batch_sum import accumulated
from onchip.kernels.cuda.gradient.kernel import OneDtypeKernel
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.network.graph import Network
from onchip.network.layers import InputGrad, RowNorm
from onchip.network.layers.norm import NormSegments
from onchip.network.recipe import Recipe, as_is
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
BLOCKS_PER_SM, WAVES = 8, 32


@dataclass(frozen=True)
class NormGradLowering:
    """norm_grad_lanes or norm_grad_rows(x, dy, weight, dx, outer, N, norm)"""

    dtype: str
    segments: NormSegments  # per batch row
    weights: int  # elements of the weight; 0: none
    is_centred: bool
    eps: float
    units: int

    def at(self, B: int) -> Steps:
        outer = B * self.segments.count
        if not outer:
            return Steps(())
        threads = RowThreads.of(self.segments.size, self.dtype)
        types = f"{FLOATS[self.dtype]}, {threads.vector}"
        name = f"norm_grad_lanes<{types}, {threads.lanes}, {threads.items}>"
        program = Program(SOURCE, name if threads.lanes else f"norm_grad_rows<{types}>")
        blocks = min(-(-outer * (threads.lanes or THREADS) // THREADS), self.units * BLOCKS_PER_SM * WAVES)
        norm = norm_struct(self.segments, self.weights, self.is_centred, self.eps)
        arguments = (
            Input(0), Input(1), Weight("weight") if self.weights else NOTHING, Output(0), Int64(outer),
            UInt32(self.segments.size), norm,
        )  # fmt: skip
        budget = Budget(registers=256 if self.dtype == "float64" else 128)
        return Steps((KernelLaunch(program, grid_1d(blocks), arguments, budget),))


class NormGradKernel(OneDtypeKernel):
    name = "norm_grad"
    layers = (InputGrad,)

    def applies(self, net: Network, start: int) -> bool:
        layer = net.nodes[start].layer
        return isinstance(layer, InputGrad) and isinstance(layer.of, RowNorm)

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        norm, x = node.layer.attributes()["of"], net.types[node.inputs[0]]
        segments, shape = norm.parts(x), norm.weight_shape(x)
        if segments.size >= MAX_ELEMENTS:
            why = f"supports fewer than {MAX_ELEMENTS:,} values per segment, not {segments.size:,}"
            yield Refusal(self.name, node.name, why)
            return
        weight = node.weights.get("weight")
        recipes = {"weight": Recipe.of(as_is, (weight,), shape, accumulated(x.dtype))} if weight else {}
        lowering = NormGradLowering(
            x.dtype, segments, math.prod(shape) if weight else 0, norm.is_centred, norm.eps, device.units
        )
        yield self.claim(
            net, node, lowering, label=f"{norm.kind.lower()}_grad<{segments.size}>", recipes=recipes,
            cost=Cost(2 * net.row_flop(node), 3 * x.row_bytes, recipe_bytes(recipes), precision="fp32"),
            order="in threads, then in a tree",
        )  # fmt: skip


def _instance(name: str, segments: NormSegments, weights: int, dtype: str = "float32") -> Instance:
    return instance(name, NormGradLowering(dtype, segments, weights, True, 1e-5, 132))


INSTANCES = (
    _instance("rows", NormSegments(1, 768, 1), 768), _instance("short rows", NormSegments(1, 16, 1), 16),
    _instance("odd rows", NormSegments(1, 17, 1), 17), _instance("rows of a warp", NormSegments(1, 1021, 1), 1021),
    _instance("rows of a block", NormSegments(1, 8192, 1), 8192),
    _instance("odd rows of a block", NormSegments(1, 8191, 1), 8191),
    _instance("groups", NormSegments(8, 4 * 49, 49), 32), _instance("long groups", NormSegments(8, 50176, 12544), 32),
    _instance("long odd groups", NormSegments(8, 3 * 12321, 12321), 24),
    _instance("rows of float16", NormSegments(1, 768, 1), 768, "float16"),
    _instance("odd rows of a block, bfloat16", NormSegments(1, 8191, 1), 8191, "bfloat16"),
    _instance("doubles", NormSegments(1, 768, 1), 768, "float64"),
    _instance("many doubles", NormSegments(1, 8192, 1), 8192, "float64"),
    _instance("long groups of doubles", NormSegments(8, 50176, 12544), 32, "float64"),
)  # fmt: skip
