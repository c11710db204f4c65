"""A fused MLP in Triton: a program runs a tile of rows through all layers; imported only if Triton is installed.

Widths are padded to powers of two of at least 16, as tl.dot requires. The input may be split in two instead: 72
columns as 64 and 16, not 128.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, attr-defined, import-not-found"
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from onchip.bench.frame import UnavailableError
from onchip.bench.peers.dense import Dense


@triton.jit(do_not_specialize=["B"])
def _mlp(
    x, w, b, y, B, D_in: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, W: tl.constexpr, L: tl.constexpr,
    D_out: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr, TILE: tl.constexpr, RESIDENT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """All rows of x (B, D_in) to y (B, D_out).

    w         (KA + KB, W), then L - 1 times (W, W), then (W, N), contiguous, padded with zeros
    b         L * W and then N floats
    RESIDENT  whether weights are loaded once per program: with a store in the loop, Triton does not hoist the loads
    """
    kind = w.dtype.element_ty
    rows = tl.arange(0, TILE)
    hidden = tl.arange(0, W)
    last = tl.arange(0, N)
    ka = tl.arange(0, KA)
    w_last = w + (KA + KB) * W + (L - 1) * W * W
    if RESIDENT:
        resident_a = tl.load(w + ka[:, None] * W + hidden[None, :])
        if KB > 0:
            resident_b = tl.load(w + (KA + tl.arange(0, KB))[:, None] * W + hidden[None, :])
        if L == 2:
            resident_middle = tl.load(w + (KA + KB) * W + hidden[:, None] * W + hidden[None, :])
        resident_last = tl.load(w_last + hidden[:, None] * N + last[None, :])
    for tile in range(tl.program_id(0), tl.cdiv(B, TILE), tl.num_programs(0)):
        first = tile.to(tl.int64) * TILE
        is_row = rows < B - first
        x_rows = x + first * D_in + rows[:, None] * D_in
        x_a = tl.load(x_rows + ka[None, :], mask=is_row[:, None] & (ka < D_in)[None, :], other=0.0)
        if RESIDENT:
            weight = resident_a
        else:
            weight = tl.load(w + ka[:, None] * W + hidden[None, :])
        h = tl.dot(x_a.to(kind), weight, input_precision=PRECISION)
        if KB > 0:
            kb = KA + tl.arange(0, KB)
            x_b = tl.load(x_rows + kb[None, :], mask=is_row[:, None] & (kb < D_in)[None, :], other=0.0)
            if RESIDENT:
                weight_b = resident_b
            else:
                weight_b = tl.load(w + kb[:, None] * W + hidden[None, :])
            h = tl.dot(x_b.to(kind), weight_b, h, input_precision=PRECISION)
        if BIAS:
            h += tl.load(b + hidden)[None, :]
        values = tl.maximum(h, 0.0).to(kind)
        for i in tl.static_range(1, L):
            if RESIDENT and L == 2:
                weight_i = resident_middle
            else:
                w_i = w + (KA + KB) * W + (i - 1) * W * W
                weight_i = tl.load(w_i + hidden[:, None] * W + hidden[None, :])
            h = tl.dot(values, weight_i, input_precision=PRECISION)
            if BIAS:
                h += tl.load(b + i * W + hidden)[None, :]
            values = tl.maximum(h, 0.0).to(kind)
        if RESIDENT:
            weight_last = resident_last
        else:
            weight_last = tl.load(w_last + hidden[:, None] * N + last[None, :])
        out = tl.dot(values, weight_last, input_precision=PRECISION)
        if BIAS:
            out += tl.load(b + L * W + last)[None, :]
        y_rows = y + first * D_out + rows[:, None] * D_out + last[None, :]
        tl.store(y_rows, out.to(y.dtype.element_ty), mask=is_row[:, None] & (last < D_out)[None, :])


@dataclass(frozen=True)
class Choice:
    """The parameters that an autotuner would search."""

    TILE: int  # rows per tile
    warps: int
    stages: int = 1
    programs: int = 0  # persistent programs per SM, each looping over tiles. 0: one program per tile
    resident: bool = False  # weights are loaded once per program

    @property
    def uses_wgmma(self) -> bool:
        """Whether Triton uses wgmma on Hopper; else mma per warp."""
        return self.TILE >= 64 and self.warps % 4 == 0

    def __str__(self) -> str:
        loop = f", {self.programs} programs per SM, {self.stages} stages" if self.programs else ""
        return f"{self.TILE} rows per tile, {self.warps} warps{loop}{', resident weights' if self.resident else ''}"


SMALL = (Choice(16, 4), Choice(32, 4), Choice(64, 4))
# Of 200 settings for decode in fp16 on an H200 the first was the fastest: 0.102 ms, the second 0.109.
WGMMA = (
    *(Choice(64, 4, 3, 4, True), Choice(128, 4, 3, 2, True), Choice(128, 4, 2, 2), Choice(128, 8, 3, 4, True)),
    *(Choice(256, 8, 2, 1, True), Choice(128, 4), Choice(128, 8), Choice(256, 8)),
)
MMA = (Choice(32, 4), Choice(32, 4, 2, 4), Choice(32, 4, 2, 4, True), Choice(32, 2), Choice(16, 4))
FEW_ROWS = 16_384  # from here on there are more tiles than SMs
# Above these limits, Triton 3.6 miscompiles this kernel with wgmma: wrong results or faults (48-128-128-128-3).
WGMMA_WIDTH, WGMMA_LAYERS = 64, 2


class TritonMlp:
    """The network's weights, padded, on the GPU."""

    def __init__(self, layers: list[Dense], dtype: Any, device: Any, split: bool) -> None:
        widths = [layers[0].weight.shape[1], *(len(layer.weight) for layer in layers)]
        if len(layers) < 2 or len(set(widths[1:-1])) != 1:
            raise UnavailableError("the Triton kernel needs hidden layers of one width", got=str(widths))
        if not all(layer.relu for layer in layers[:-1]) or layers[-1].relu:
            raise UnavailableError("the Triton kernel needs ReLU between layers and no activation after the last")
        self.D_in, self.D_out, self.L = widths[0], widths[-1], len(layers) - 1
        self.W, self.N = padded(widths[1]), padded(self.D_out)
        self.KA, self.KB = split_width(self.D_in) if split else (padded(self.D_in), 0)
        shapes = [(self.KA + self.KB, self.W), *[(self.W, self.W)] * (self.L - 1), (self.W, self.N)]
        flat_w, flat_b = [], []
        for layer, (K, N) in zip(layers, shapes, strict=True):
            w, b = torch.zeros(K, N), torch.zeros(N)
            w[: layer.weight.shape[1], : len(layer.weight)] = torch.from_numpy(layer.weight.T.copy())
            if layer.bias is not None:
                b[: len(layer.bias)] = torch.from_numpy(layer.bias.copy())
            flat_w.append(w.flatten())
            flat_b.append(b)
        self.bias = any(layer.bias is not None for layer in layers)
        self.w, self.b = torch.cat(flat_w).to(device).to(dtype), torch.cat(flat_b).to(device)
        self.units = torch.cuda.get_device_properties(device).multi_processor_count

    def __call__(self, x: Any, y: Any, choice: Choice, precision: str) -> Any:
        """Run the network; y (B, D_out) is overwritten and returned."""
        tiles = triton.cdiv(len(x), choice.TILE)
        grid = (min(tiles, choice.programs * self.units) if choice.programs else tiles,)
        _mlp[grid](
            x, self.w, self.b, y, len(x), D_in=self.D_in, KA=self.KA, KB=self.KB, W=self.W, L=self.L, D_out=self.D_out,
            N=self.N, BIAS=self.bias, TILE=choice.TILE, RESIDENT=choice.resident, PRECISION=precision,
            num_warps=choice.warps, num_stages=choice.stages,
        )  # fmt: skip
        return y


def choices(B: int, net: TritonMlp) -> Iterator[Choice]:
    """Settings to try for this number of rows, the most promising first."""
    wgmma_works = net.W <= WGMMA_WIDTH and net.L <= WGMMA_LAYERS
    for choice in SMALL if B < FEW_ROWS else WGMMA if wgmma_works else MMA:
        if wgmma_works or not choice.uses_wgmma:
            yield choice


def around(best: Choice) -> list[Choice]:
    """The best so far with one parameter changed; persistent settings with more or fewer programs and stages."""
    looping = best if best.programs else replace(best, stages=2, programs=3, resident=True)
    stages = [replace(looping, stages=stages) for stages in (3, 1, 4, 2)]
    few = looping.programs
    programs = [replace(looping, programs=programs) for programs in (few + 1, few + 2, 2 * few, few - 1)]
    found = dict.fromkeys([*stages, *programs, replace(looping, resident=not looping.resident)])
    return [choice for choice in found if choice.programs > 0 and choice != best]


def padded(width: int) -> int:
    return max(16, int(triton.next_power_of_2(width)))


def split_width(width: int) -> tuple[int, int]:
    """The largest power of two that fits, and the remainder, padded: 72 -> 64, 16."""
    full = padded(width)
    if full <= max(width, 16):
        return full, 0
    return full // 2, padded(width - full // 2)
