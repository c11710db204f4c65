"""A plain fused MLP in Triton: a program runs a tile of rows through all layers; imported only if Triton is installed.

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
    D_out: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr, TILE: tl.constexpr, KEPT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """All rows of x (B, D_in) to y (B, D_out).

    w     (KA + KB, W), then L - 1 times (W, W), then (W, N), contiguous, padded with zeros
    b     L * W and then N floats
    KEPT  whether weights are loaded once per program: with a store in the loop, Triton does not hoist the loads
    """
    kind = w.dtype.element_ty
    rows = tl.arange(0, TILE)
    hidden = tl.arange(0, W)
    last = tl.arange(0, N)
    ka = tl.arange(0, KA)
    w_last = w + (KA + KB) * W + (L - 1) * W * W
    if KEPT:
        kept_a = tl.load(w + ka[:, None] * W + hidden[None, :])
        if KB > 0:
            kept_b = tl.load(w + (KA + tl.arange(0, KB))[:, None] * W + hidden[None, :])
        if L == 2:
            kept_middle = tl.load(w + (KA + KB) * W + hidden[:, None] * W + hidden[None, :])
        kept_last = tl.load(w_last + hidden[:, None] * N + last[None, :])
    for tile in range(tl.program_id(0), tl.cdiv(B, TILE), tl.num_programs(0)):
        first = tile.to(tl.int64) * TILE
        inside = rows < B - first
        from_x = x + first * D_in + rows[:, None] * D_in
        part = tl.load(from_x + ka[None, :], mask=inside[:, None] & (ka < D_in)[None, :], other=0.0)
        if KEPT:
            weight = kept_a
        else:
            weight = tl.load(w + ka[:, None] * W + hidden[None, :])
        h = tl.dot(part.to(kind), weight, input_precision=PRECISION)
        if KB > 0:
            kb = KA + tl.arange(0, KB)
            rest = tl.load(from_x + kb[None, :], mask=inside[:, None] & (kb < D_in)[None, :], other=0.0)
            if KEPT:
                weight_b = kept_b
            else:
                weight_b = tl.load(w + kb[:, None] * W + hidden[None, :])
            h = tl.dot(rest.to(kind), weight_b, h, input_precision=PRECISION)
        if BIAS:
            h += tl.load(b + hidden)[None, :]
        values = tl.maximum(h, 0.0).to(kind)
        for i in tl.static_range(1, L):
            if KEPT and L == 2:
                weight_i = kept_middle
            else:
                at = w + (KA + KB) * W + (i - 1) * W * W
                weight_i = tl.load(at + hidden[:, None] * W + hidden[None, :])
            h = tl.dot(values, weight_i, input_precision=PRECISION)
            if BIAS:
                h += tl.load(b + i * W + hidden)[None, :]
            values = tl.maximum(h, 0.0).to(kind)
        if KEPT:
            weight_last = kept_last
        else:
            weight_last = tl.load(w_last + hidden[:, None] * N + last[None, :])
        out = tl.dot(values, weight_last, input_precision=PRECISION)
        if BIAS:
            out += tl.load(b + L * W + last)[None, :]
        to_y = y + first * D_out + rows[:, None] * D_out + last[None, :]
        tl.store(to_y, out.to(y.dtype.element_ty), mask=inside[:, None] & (last < D_out)[None, :])


@dataclass(frozen=True)
class Choice:
    """The parameters that an autotuner would search."""

    TILE: int  # rows per tile
    warps: int
    stages: int = 1
    programs: int = 0  # persistent programs per SM, each looping over tiles. 0: one program per tile
    kept: bool = False  # weights are loaded once per program

    @property
    def by_warp_groups(self) -> bool:
        """Whether Triton uses wgmma on Hopper; else each warp uses mma by itself."""
        return self.TILE >= 64 and self.warps % 4 == 0

    def __str__(self) -> str:
        walk = f", {self.programs} programs a multiprocessor, {self.stages} stages" if self.programs else ""
        return f"{self.TILE} rows a tile, {self.warps} warps{walk}{', weights kept' if self.kept else ''}"


SMALL = (Choice(16, 4), Choice(32, 4), Choice(64, 4))
# Of 200 settings of decode in fp16 on an H200 the first was the best: 0.102 ms, the second 0.109.
BY_GROUPS = (
    *(Choice(64, 4, 3, 4, True), Choice(128, 4, 3, 2, True), Choice(128, 4, 2, 2), Choice(128, 8, 3, 4, True)),
    *(Choice(256, 8, 2, 1, True), Choice(128, 4), Choice(128, 8), Choice(256, 8)),
)
BY_WARPS = (Choice(32, 4), Choice(32, 4, 2, 4), Choice(32, 4, 2, 4, True), Choice(32, 2), Choice(16, 4))
FEW_ROWS = 16_384  # from here on there are more tiles than SMs
# Above these limits, Triton 3.6 miscompiles this kernel with wgmma: wrong results or faults (48-128-128-128-3).
GROUPS_WIDTH, GROUPS_LAYERS = 64, 2


class TritonMlp:
    """The network's weights, padded, on the GPU."""

    def __init__(self, layers: list[Dense], dtype: Any, device: Any, split: bool) -> None:
        widths = [layers[0].weight.shape[1], *(len(layer.weight) for layer in layers)]
        if len(layers) < 2 or len(set(widths[1:-1])) != 1:
            raise UnavailableError("the Triton kernel is for hidden layers of one width", got=str(widths))
        if not all(layer.relu for layer in layers[:-1]) or layers[-1].relu:
            raise UnavailableError("the Triton kernel is for ReLU between the layers and nothing behind the last")
        self.D_in, self.D_out, self.L = widths[0], widths[-1], len(layers) - 1
        self.W, self.N = padded(widths[1]), padded(self.D_out)
        self.KA, self.KB = two_parts(self.D_in) if split else (padded(self.D_in), 0)
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
            N=self.N, BIAS=self.bias, TILE=choice.TILE, KEPT=choice.kept, PRECISION=precision,
            num_warps=choice.warps, num_stages=choice.stages,
        )  # fmt: skip
        return y


def choices(B: int, net: TritonMlp) -> Iterator[Choice]:
    """Settings to try for this number of rows, the most promising first."""
    groups_work = net.W <= GROUPS_WIDTH and net.L <= GROUPS_LAYERS
    for choice in SMALL if B < FEW_ROWS else BY_GROUPS if groups_work else BY_WARPS:
        if groups_work or not choice.by_warp_groups:
            yield choice


def around(best: Choice) -> list[Choice]:
    """The best so far with one parameter changed; persistent settings with more or fewer programs and stages."""
    walking = best if best.programs else replace(best, stages=2, programs=3, kept=True)
    stages = [replace(walking, stages=stages) for stages in (3, 1, 4, 2)]
    few = walking.programs
    programs = [replace(walking, programs=programs) for programs in (few + 1, few + 2, 2 * few, few - 1)]
    found = dict.fromkeys([*stages, *programs, replace(walking, kept=not walking.kept)])
    return [choice for choice in found if choice.programs > 0 and choice != best]


def padded(width: int) -> int:
    return max(16, int(triton.next_power_of_2(width)))


def two_parts(width: int) -> tuple[int, int]:
    """The largest power of two that fits, and the remainder, padded: 72 -> 64, 16."""
    whole = padded(width)
    if whole <= max(width, 16):
        return whole, 0
    return whole // 2, padded(width - whole // 2)
