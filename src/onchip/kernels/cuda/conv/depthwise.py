"""Host side of conv/depthwise.cu: depthwise convolution."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.chain import with_activation
from onchip.kernels.cuda.common.activation import activation_words
from onchip.kernels.cuda.common.arguments import NOTHING, Argument, Input, Output, UInt32, Weight
from onchip.kernels.cuda.common.costs import costs_of
from onchip.kernels.cuda.common.dtypes import FLOATS
from onchip.kernels.cuda.common.fast_divide import divider
from onchip.kernels.cuda.common.kernel import CudaKernel, instance
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, Program, Steps
from onchip.kernels.cuda.common.window import Windows
from onchip.kernels.cuda.conv.direct import bias_recipe, conv_recipes
from onchip.kernels.layer_kernel import recipe_bytes
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.kernels.window import Axis, axes_of
from onchip.network.graph import Network, Node
from onchip.network.layers import Convolution, Elementwise
from onchip.network.layers.conv import conv_groups
from onchip.network.recipe import Recipe, as_is
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Cost, Job, Refusal, Use
from onchip.plan.layout import CHANNELS_LAST, ROWS, has_channels

SOURCE = Path(__file__).with_suffix(".cu")
UNROLLED = ((3, 3, 1), (3, 3, 2), (5, 5, 1), (5, 5, 2), (1, 3, 1), (1, 5, 1))
MAX_ROWS = (8, 4)
PART = 128  # K elements per partial sum, as in conv/direct.cu


@dataclass(frozen=True)
class DepthwiseLowering:
    """depthwise(x, weights, bias, y, windows, multiplier, activation code and parameters)"""

    dtype: str
    windows: Windows
    has_bias: bool
    activation: Elementwise | None

    @property
    def vector(self) -> int:
        """Channels per thread in NHWC: four, or fewer if the weights would not fit in registers."""
        w = self.windows
        V = 1 if self.dtype == "float64" or w.C != w.N else 2 if math.prod(w.window[:2]) > 9 else 4
        return V if w.is_nhwc and w.C % V == 0 else 1

    def at(self, B: int) -> Steps:
        if not B:
            return Steps(())
        template, config, windows = self.windows.arguments(B, self.vector)
        arguments: tuple[Argument, ...] = (
            Input(0), Weight("weight"), Weight("bias") if self.has_bias else NOTHING, Output(0), windows,
            divider(self.windows.N // self.windows.C), *map(UInt32, activation_words(self.activation)),
        )  # fmt: skip
        is_long = str(self.windows.h.taps * self.windows.w.taps > PART).lower()
        program = Program(SOURCE, f"depthwise<{FLOATS[self.dtype]}, {is_long}, {template}>")
        return Steps((KernelLaunch(program, config, arguments, Budget(registers=128)),))


class DepthwiseKernel(CudaKernel):
    """A convolution with one channel per group, and its activation."""

    name = "depthwise"
    layers = (Convolution,)

    def applies(self, net: Network, start: int) -> bool:
        node = net.nodes[start]
        return conv_groups(node.layer) == net.types[node.inputs[0]].row_shape[0]

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        if why := _windows(net, node, False, device).why_not():
            yield Refusal(self.name, node.name, why)
            return
        x = net.types[node.inputs[0]]
        nodes = (node,) if x.dtype == "float64" else with_activation(net, start, ACTIVATIONS)
        last, acc_dtype = nodes[-1], "float64" if x.dtype == "float64" else "float32"
        y, activation = net.types[last.name], last.layer if isinstance(last.layer, Elementwise) else None
        may_be_nhwc = has_channels(x) and has_channels(y) and net.readers(last.name)
        for is_nhwc in (False, True) if may_be_nhwc else (False,):
            windows = _windows(net, node, is_nhwc, device)
            recipes = _recipes(net, node, is_nhwc, acc_dtype)
            taps = "x".join(map(str, net.weights[node.weights["weight"]].shape[2:]))
            labels = (str(windows.C), str(windows.N), taps, *([activation.kind] if activation else ()))
            is_read_often = windows.h.taps * windows.w.taps > 1 or windows.N > windows.C
            costs = costs_of(device).depthwise
            tap_us = costs.tap_us if windows.is_unrolled else costs.loop_tap_us
            yield self.claim(
                net, node, DepthwiseLowering(x.dtype, windows, "bias" in recipes, activation),
                label=f"{self.name}<{','.join(labels)}>", nodes=tuple(each.name for each in nodes),
                cost=Cost(
                    sum(map(net.row_flop, nodes)), x.row_bytes + y.row_bytes, recipe_bytes(recipes),
                    precision="fp32", rate=costs.share if windows.is_unrolled else costs.loop_share,
                    min_us=windows.h.taps * windows.w.taps * tap_us,
                ),
                why="one input channel per output channel", recipes=recipes,
                order=f"taps in order, partial sums of {PART}",
                reads={node.inputs[0]: Use(CHANNELS_LAST if is_nhwc else ROWS, is_read_often)},
                writes={last.name: CHANNELS_LAST} if is_nhwc else {},
            )  # fmt: skip


def _windows(net: Network, node: Node, is_nhwc: bool, device: Device) -> Windows:
    (C, *sizes), (N, *counts) = (net.types[value].row_shape for value in (node.inputs[0], node.name))
    taps = net.weights[node.weights["weight"]].shape[2:]
    h, w = axes_of(node.layer, tuple(sizes), tuple(counts), taps)
    # Not in float64: a window's weights and accumulators would take all registers.
    dtype = net.types[node.name].dtype
    unrolled = () if dtype == "float64" else UNROLLED
    return Windows(C, N, h, w, is_nhwc, DTYPE_BYTES[dtype], unrolled, MAX_ROWS, device.units)


def _recipes(net: Network, node: Node, is_nhwc: bool, dtype: str) -> dict[str, Recipe]:
    """Weights as (N, 1, taps...) for NCHW, (taps..., 1, N) for NHWC."""
    if is_nhwc:
        return conv_recipes(net, node, dtype)
    name = node.weights["weight"]
    return {"weight": Recipe.of(as_is, (name,), net.weights[name].shape, dtype), **bias_recipe(net, node, dtype)}


def _instance(name: str, dtype: str, is_nhwc: bool, taps: int = 3, stride: int = 1, multiplier: int = 1) -> Instance:
    axis = Axis(16 * stride, 16, taps, stride, 1, 1, 16 * stride + 1)
    windows = Windows(64, 64 * multiplier, axis, axis, is_nhwc, DTYPE_BYTES[dtype], UNROLLED, MAX_ROWS, 132)
    lowering = DepthwiseLowering(dtype, windows, True, None)
    return instance(name, lowering)


INSTANCES = (
    _instance("3 x 3", "float32", False),
    _instance("3 x 3, NHWC", "float32", True),
    _instance("3 x 3, stride 2", "bfloat16", False, stride=2),
    _instance("3 x 3, stride 2, NHWC", "float16", True, stride=2),
    _instance("5 x 5", "float16", False, 5),
    _instance("5 x 5, NHWC", "float32", True, 5),
    _instance("5 x 5 of 16 bits, NHWC", "bfloat16", True, 5),
    _instance("5 x 5, NHWC, two outputs per channel", "float32", True, 5, multiplier=2),
    _instance("any window in float64", "float64", False, 4),
    _instance("any window", "float32", False, 4),
    _instance("any window, NHWC", "bfloat16", True, 4),
    _instance("any window, stride 2", "float16", False, 7, 2),
    _instance("any window, stride 2, NHWC", "float16", True, 7, 2),
    _instance("7 x 7", "float32", False, 7),
    _instance("long sums", "float32", False, 12),
    _instance("long sums, NHWC", "float32", True, 12),
    _instance("any window in float64, NHWC", "float64", True, 4),
)
