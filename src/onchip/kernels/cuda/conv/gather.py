"""An Embedding fused with the Linear or convolution that reads it: one launch of conv/implicit_gemm.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from onchip.kernels.chain import is_closed
from onchip.kernels.cuda.common.arguments import StatusWord
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES, IDS
from onchip.kernels.cuda.common.precision import order_of
from onchip.kernels.cuda.common.weights import multiplied_weight
from onchip.kernels.cuda.conv.direct import Geometry, bias_recipe, geometry_of
from onchip.kernels.cuda.conv.fusion import TAPS, ConvKernel, ConvRun, with_epilogue
from onchip.kernels.cuda.conv.implicit_gemm import MIN_COLUMNS, ImplicitGemmLowering, instance_of, tap_weight
from onchip.kernels.cuda.mma.mma_tile import PART, TILES, scale_of
from onchip.network.graph import Network, Node
from onchip.network.layers import Conv1d, Embedding, Linear, Permute, Reshape
from onchip.network.recipe import Array, Recipe, as_is, rearranging_op
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Use


class ConvGatherKernel(ConvKernel):
    name = "conv_gather"
    layers = (Embedding,)
    dtypes = tuple(IDS)

    def applies(self, net: Network, start: int) -> bool:
        return _embedding_run(net, start) is not None

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim]:
        """An Embedding, its only reader and the layers that may follow; then shorter fusions."""
        unfused = _embedding_run(net, start)
        assert unfused is not None
        for run in with_epilogue(net, start, unfused):
            claim = self._claim(net, run, device, job)
            if claim is not None:
                yield claim

    def _claim(self, net: Network, run: ConvRun, device: Device, job: Job) -> Claim | None:
        first, node, geometry = run.nodes[0], run.conv, _geometry(net, run)
        ids, embedded, y = (net.types[value] for value in (run.input_name, first.name, run.output_name))
        weights = (net.weight_type(name).dtype for name in node.weights.values())
        if geometry is None or geometry.N < MIN_COLUMNS:
            return None
        if not {embedded.dtype, y.dtype, *weights} <= ELEMENT_TYPES.keys():
            return None
        V, E = net.weights[first.weights["weight"]].shape
        lowering = ImplicitGemmLowering.of(
            net, run, geometry, device, job, scale=scale_of(device, job.precision), residual=run.residual_input,
            ids=(ids.dtype, StatusWord(run.input_name, ids.row_shape, V)),
        )  # fmt: skip
        if lowering.why_not():
            return None  # the gather kernel claims the Embedding instead
        is_conv = isinstance(node.layer, Conv1d)
        weight = (tap_weight if is_conv else _row_weight)(net, node, lowering)
        table = Recipe.of(as_is, (first.weights["weight"],), (V, E), embedded.dtype)
        recipes = {"weight": weight, **bias_recipe(net, node), "table": table}
        taps = f"{geometry.taps[1]}," if geometry.taps[1] > 1 else ""
        label = ",".join([f"{V},{E},{taps}{geometry.N}", *run.epilogue()])
        reads = {run.input_name: Use(is_read_often=True)}
        return self.claim_run(
            net, run, lowering, label=f"{self.name}<{label}>",
            cost=lowering.cost(net, run, recipes, job, embedded.row_bytes),
            why="the GEMM loads the looked-up rows directly", recipes=recipes,
            order=order_of(job.precision, "mma", PART, TAPS), **({} if is_conv else {"reads": reads, "writes": {}}),
        )  # fmt: skip


def _embedding_run(net: Network, start: int) -> ConvRun | None:
    """ids -> Embedding -> Linear over the last axis; or -> Reshape -> Linear, or -> Permute -> Conv1d."""
    first = net.nodes[start]
    if not isinstance(first.layer, Embedding):
        return None
    nodes = [first]
    for node in net.nodes[start + 1 : start + 3]:
        if node.inputs != (nodes[-1].name,) or not is_closed(net, [*nodes, node]):
            return None
        nodes.append(node)
        if isinstance(node.layer, Linear | Conv1d):
            is_supported = isinstance(node.layer, Linear) or len(nodes) == 3
            return ConvRun(tuple(nodes), node) if is_supported else None
        if node.layer != Permute((0, 2, 1)) and not (
            isinstance(node.layer, Reshape) and len(net.types[node.name].shape) == 2
        ):
            return None
    return None


def _geometry(net: Network, run: ConvRun) -> Geometry | None:
    """One window over all ids, one window per id, or the windows of the convolution."""
    first, node = run.nodes[0], run.conv
    reshapes = [each.layer for each in run.nodes[1 : run.nodes.index(node)]]
    E = net.weights[first.weights["weight"]].shape[1]
    S = math.prod(net.types[first.inputs[0]].row_shape)
    if isinstance(node.layer, Conv1d):
        return geometry_of(net, node) if isinstance(reshapes[0], Permute) and node.layer.groups == 1 else None
    if reshapes and isinstance(reshapes[0], Permute):
        return None
    taps, positions = (S, 1) if reshapes else (1, S)
    N = net.weights[node.weights["weight"]].shape[0]
    return Geometry(False, E, N, 1, (1, S), (1, positions), (1, taps), (1, 1), (0, 0), (1, 1))


def _row_weight(net: Network, node: Node, lowering: ImplicitGemmLowering) -> Recipe:
    """Weight of a Linear: (N, taps * channels)."""
    g, name = lowering.geometry, node.weights["weight"]
    shape = (g.N, g.taps[1] * lowering.channels)
    weight: str | Recipe = name
    if lowering.channels != g.C:
        dtype = net.weight_type(name).dtype
        weight = Recipe.of(spread_rows, (name,), shape, dtype, taps=g.taps[1], channels=lowering.channels)
    return multiplied_weight(weight, shape, lowering.precision)


@rearranging_op
def spread_rows(weight: Array, taps: int, channels: int) -> Array:
    """(N, taps * C) -> (N, taps * channels), each tap's channels zero-padded."""
    per_tap = weight.reshape(len(weight), taps, -1)
    return np.pad(per_tap, ((0, 0), (0, 0), (0, channels - per_tap.shape[2]))).reshape(len(weight), -1)


INSTANCES = (
    instance_of("128 x 128 fp16 of int32", "fp16", ("float16", "float16"), TILES[0], "int32"),
    instance_of("128 x 64 fp32 of int64", "fp32", ("float32", "float32"), TILES[1], "int64"),
)
