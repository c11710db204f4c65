"""Winograd convolutions of conv_fused, along rows: F(2, 3) and F(2, 2), two neighbouring outputs at a time.

F(2, 3), taps g0, g1, g2 on pixels d0 .. d3: four multiplications instead of six:
    m0 = g0 (d0 - d2)                   m1 = (g0 + g1 + g2) / 2 (d1 + d2)
    m2 = (g0 - g1 + g2) / 2 (d2 - d1)   m3 = g2 (d1 - d3)
    y0 = m0 + m1 + m2   y1 = m1 - m2 - m3
F(2, 2), on d0 .. d2: three instead of four:
    m0 = g0 (d0 - d1)   m1 = (g0 + g1) d1   m2 = g1 (d1 - d2)        y0 = m0 + m1   y1 = m1 - m2
Each m is a KH x 1 convolution over all channels (Taps). WinogradInput transforms the input, WinogradOutput the outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from onchip.kernels.cpu.compiler.emit import LANES
from onchip.kernels.cpu.compiler.jit import ALL, compiled, floats_at
from onchip.kernels.cpu.conv.lowering import Lowering, image_sizes, window_of
from onchip.kernels.cpu.conv.operation import (
    Activated,
    Operation,
    call_at,
    fields_of,
    finish,
    row_span,
    runs,
)
from onchip.kernels.cpu.conv.operations.taps import Taps
from onchip.kernels.cpu.conv.values import View
from onchip.kernels.cpu.conv.weights import weight_recipe
from onchip.kernels.cpu.memory import aligned_zeros
from onchip.kernels.cpu.microkernels.tile import pack, packed_size, padded, padded_bias
from onchip.network.graph import Node
from onchip.network.layers.conv import geometry
from onchip.network.recipe import Array, recipe_op

_ZERO, _ONE = np.float32(0), np.float32(1)


@dataclass(frozen=True, eq=False, kw_only=True)
class WinogradInput(Operation):
    """Per pair of outputs: KW + 1 planes of C elements from the pixels d0, d1, ... of their windows; pads are 0."""

    x: View
    y: View
    taps: int
    PX: int

    def flop(self) -> int:
        return math.prod(self.y.sizes) * self.taps


@dataclass(frozen=True, eq=False, kw_only=True)
class WinogradOutput(Activated):
    """The two outputs of each pair from its KW + 1 planes."""

    order = "Winograd: two outputs from three or four multiplications"
    exact = True
    x: View
    taps: int

    def flop(self) -> int:
        return math.prod(self.y.sizes) * self.taps


def uses_winograd(to: Lowering, node: Node) -> bool:
    stride, _, dilation = geometry(node.layer)
    KW = to.net.weights[node.weights["weight"]].shape[-1]
    N, _, WO = image_sizes(to.net.types[node.name].row_shape)
    return KW in (2, 3) and stride[-1] == dilation[-1] == 1 and WO > 1 and N >= LANES


def lower_winograd(to: Lowering, node: Node, x: View) -> None:
    window = window_of(node, to.net.weights[node.weights["weight"]].shape[2:])
    KH, KW = window.KH, window.KW
    (C, H, _), (N, HO, WO) = x.sizes, image_sizes(to.net.types[node.name].row_shape)
    planes, pairs = KW + 1, -(-WO // 2)
    key = (x, KW, window.PX, pairs)
    if key not in to.winograd_inputs:  # phases of a transposed convolution share it
        store = to.allocate("", (planes * padded(C), H, pairs)).store
        to.emit(WinogradInput(x=x, y=View(store, (C, H, pairs)), taps=KW, PX=window.PX))
        to.winograd_inputs[key] = store
    gemms = to.allocate("", (planes * padded(N), HO, pairs)).store
    for i in range(planes):
        x_plane = View(to.winograd_inputs[key], (C, H, pairs), channel=i * padded(C))
        y = View(gemms, (N, HO, pairs), channel=i * padded(N))
        w = weight_recipe(pack_pairs, node, packed_size(KH * C, N), plane=i, KH=KH)
        b = padded_bias(node.weights.get("bias") if i == 1 else None, N)  # m1 is in both outputs
        to.emit(Taps(x=x_plane, y=y, window=window._replace(KW=1, PX=0), w=w, b=b))
    to.make(node, WinogradOutput, x=View(gemms, (N, HO, pairs)), taps=KW)


@recipe_op
def pack_pairs(W: Array, size: int, plane: int, KH: int) -> Array:
    """(N, C, KH, KW) -> transformed weights of one plane, packed (KH * C, N)."""
    N, C, KW = W.shape[0], W.shape[1], W.shape[-1]
    g = np.moveaxis(W.reshape(N, C, KH, KW).astype(np.float64), -1, 0)
    if KW == 3:
        transformed = (g[0], (g[0] + g[1] + g[2]) / 2, (g[0] - g[1] + g[2]) / 2, g[2])[plane]
    else:
        transformed = (g[0], g[0] + g[1], g[1])[plane]
    return pack(transformed.transpose(2, 1, 0).reshape(KH * C, N).astype(np.float32), aligned_zeros(size))


_winograd_input, _winograd_output = fields_of(WinogradInput), fields_of(WinogradOutput)


@compiled()
def _add(dst: Array, x: Array, has_x: bool, z: Array, has_z: bool, sign: np.float32) -> None:
    """dst = x + sign * z, where a missing operand counts as 0."""
    if has_x and has_z:
        for c in range(len(dst)):
            dst[c] = x[c] + sign * z[c]
    elif has_x:
        for c in range(len(dst)):
            dst[c] = x[c]
    elif has_z:
        for c in range(len(dst)):
            dst[c] = sign * z[c]
    else:
        for c in range(len(dst)):
            dst[c] = _ZERO


@runs(WinogradInput)
def winograd_input(row: int, call: int) -> None:
    op, args = _winograd_input(row, call), call_at(call)
    a, x, y, C = floats_at(args.base, ALL), op.x, op.y, op.x.C
    plane = y.pixel // (op.taps + 1)
    top, bottom = row_span(y.H, args.part, args.parts)
    for i in range(args.images):
        for iy in range(top, bottom):
            for j in range(y.W):
                ix = 2 * j - op.PX
                d, t = (
                    x.offset + i * x.image + iy * x.row + ix * x.pixel,
                    y.offset + i * y.image + iy * y.row + j * y.pixel,
                )
                in0, in1, in2, in3 = 0 <= ix < x.W, 0 <= ix + 1 < x.W, 0 <= ix + 2 < x.W, 0 <= ix + 3 < x.W
                d0, d1 = a[d : d + C], a[d + x.pixel : d + x.pixel + C]
                d2 = a[d + 2 * x.pixel : d + 2 * x.pixel + C]
                t0, t1 = a[t : t + C], a[t + plane : t + plane + C]
                t2 = a[t + 2 * plane : t + 2 * plane + C]
                if op.taps == 3:
                    d3 = a[d + 3 * x.pixel : d + 3 * x.pixel + C]
                    _add(t0, d0, in0, d2, in2, -_ONE)
                    _add(t1, d1, in1, d2, in2, _ONE)
                    _add(t2, d2, in2, d1, in1, -_ONE)
                    _add(a[t + 3 * plane : t + 3 * plane + C], d1, in1, d3, in3, -_ONE)
                else:
                    _add(t0, d0, in0, d1, in1, -_ONE)
                    _add(t1, d1, in1, d1, False, _ONE)
                    _add(t2, d1, in1, d2, in2, -_ONE)


@runs(WinogradOutput)
def winograd_output(row: int, call: int) -> None:
    op, args = _winograd_output(row, call), call_at(call)
    a, x, y, N = floats_at(args.base, ALL), op.x, op.y, op.y.C
    plane = x.pixel // (op.taps + 1)
    top, bottom = row_span(y.H, args.part, args.parts)
    for i in range(args.images):
        for oy in range(top, bottom):
            for ox in range(y.W):
                m = x.offset + i * x.image + oy * x.row + ox // 2 * x.pixel
                begin = y.offset + i * y.image + oy * y.row + ox * y.pixel
                out = a[begin : begin + N]
                m0, m1 = a[m : m + N], a[m + plane : m + plane + N]
                m2 = a[m + 2 * plane : m + 2 * plane + N]
                m3 = a[m + op.taps * plane : m + op.taps * plane + N]
                if op.taps == 3:
                    if ox % 2 == 0:
                        for n in range(N):
                            out[n] = m0[n] + m1[n] + m2[n]
                    else:
                        for n in range(N):
                            out[n] = m1[n] - m2[n] - m3[n]
                elif ox % 2 == 0:
                    for n in range(N):
                        out[n] = m0[n] + m1[n]
                else:
                    for n in range(N):
                        out[n] = m1[n] - m2[n]
    finish(args.base, y, args.images, top, bottom, op.activation)
