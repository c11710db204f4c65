"""The report's way to run the faces generator on a GPU, as launches: host side of cuda/faces_*.cu."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from onchip.kernels.cuda.common.arguments import Argument, Input, Int64, Output, Scratch, UInt32, Weight
from onchip.kernels.cuda.common.program import Budget, KernelLaunch, LaunchConfig, Program, Steps
from onchip.ladders.device import KERNELS, cover
from onchip.network.graph import Network
from onchip.network.recipe import Array, materialise
from onchip.workloads.faces import KERNEL

EVERY_TCONV = 1 << 16
TILE, CHANNELS = 4, 2  # of a block in faces_direct.cu
MAX_REGISTERS = 96  # per thread; ten blocks of the gemm then fit into an SM's 65,536
_BUDGET = Budget(MAX_REGISTERS)
_NORM = ("mean", "var", "weight", "bias")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a faces network."""

    latent: int
    start: int  # height and width of the projection; each transposed convolution doubles them
    channels: tuple[int, ...]  # of the projection and of each transposed convolution

    @classmethod
    def of(cls, net: Network) -> Sizes:
        width, latent = net.weights["proj.weight"].shape
        count = sum(name.startswith("tconv") for name in net.weights) // 2  # each has a weight and a bias
        weights = [net.weights[f"tconv{i}.weight"] for i in range(1, count + 1)]
        channels = (weights[0].shape[0], *(w.shape[1] for w in weights))
        return cls(latent, math.isqrt(width // channels[0]), channels)

    @property
    def floats(self) -> tuple[int, ...]:
        """Values per face: of the projection and of each transposed convolution."""
        return tuple((self.start << i) ** 2 * C for i, C in enumerate(self.channels))

    @property
    def image(self) -> tuple[int, int, int]:
        """Height, width, channels."""
        side = self.start << (len(self.channels) - 1)
        return side, side, self.channels[-1]


@dataclass(frozen=True)
class Method:
    """How to run the generator: the choices of a rung, and the report's constants."""

    batch: int = 100  # faces per launch; a direct convolution has one
    direct: int = 0  # so many transposed convolutions, counted from the last, are direct; the others are gemms
    uses_parity: bool = True  # in direct ones
    T: int = 16  # tiles of T x T and T x TV
    V: int = 4
    block: int = 128  # threads per block, where a thread computes one element of a layer

    @property
    def direct_program(self) -> Program:
        return Program(KERNELS / "faces_direct.cu", f"tconv_direct<{str(self.uses_parity).lower()}>")

    @property
    def gemm_program(self) -> Program:
        return Program(KERNELS / "faces_gemm.cu", f"tconv_gemm<{self.T}, {self.V}>")

    @property
    def programs(self) -> tuple[Program, ...]:
        """Every kernel that it launches."""
        tconvs = [self.direct_program] if self.direct else []
        tconvs += [self.gemm_program] if self.direct != EVERY_TCONV else []
        return (*map(_layer_program, ("project", "batch_norm", "relu_each", "tanh_each")), *tconvs)

    def is_gemm(self, sizes: Sizes, i: int) -> bool:
        """Whether the i-th transposed convolution, counted from 1, is a gemm."""
        return i < len(sizes.channels) - self.direct

    def weights(self, net: Network) -> dict[str, Array]:
        """The weights as the kernels read them.

        They are stored as in network.bin, (5, 5, C_out, C_in), but those of gemms (5, 5, C_in, C_out) with the taps in
        reverse order: the matrix by which a row, the window of an output pixel, is multiplied.
        """
        sizes = Sizes.of(net)
        found = {name: materialise(name, net.weights) for name in net.weights}  # as the network's layers have them
        found["proj.weight"] = found["proj.weight"].T
        for i in range(1, len(sizes.channels)):
            w = found[f"tconv{i}.weight"]  # (C_in, C_out, 5, 5)
            is_gemm = self.is_gemm(sizes, i)
            found[f"tconv{i}.weight"] = (
                w[:, :, ::-1, ::-1].transpose(2, 3, 0, 1) if is_gemm else w.transpose(2, 3, 1, 0)
            )
        return {name: np.ascontiguousarray(w) for name, w in found.items()}

    def steps(self, sizes: Sizes, B: int) -> Steps:
        """Input(0): z (B, latent); Output(0): images (B, height, width, channels)."""
        half = min(B, self.batch) * max(sizes.floats) * 4  # each layer reads one half of the scratch, writes the other
        batches = [(first, min(self.batch, B - first)) for first in range(0, B, self.batch)]
        launches = (launch for batch in batches for launch in self._batch(sizes, *batch, half))
        return Steps(tuple(launches), 2 * half)

    def flop(self, sizes: Sizes) -> int:
        """Per face, with the products with zeros that gemms compute."""
        total, n = 2 * sizes.latent * sizes.floats[0], sizes.start
        for i, (C, K) in enumerate(pairwise(sizes.channels), start=1):
            pixels = 4 * n * n if self.is_gemm(sizes, i) else n * n
            total, n = total + 2 * KERNEL * KERNEL * C * K * pixels, 2 * n
        return total

    def _batch(self, sizes: Sizes, first: int, faces: int, half: int) -> Iterator[KernelLaunch]:
        """The launches of the faces from `first` on."""
        counts = [faces * floats for floats in sizes.floats]
        x, y, n = 0, half, sizes.start
        weights = (Weight("proj.weight"), Weight("proj.bias"))
        shape = (Int64(first), Int64(faces), UInt32(sizes.latent), UInt32(sizes.floats[0]))
        yield self._each("project", counts[0], Input(0), *weights, Scratch(x), *shape)
        for i, (C, K) in enumerate(pairwise(sizes.channels)):
            norm = [Weight(f"bn{i}.{role}") for role in _NORM]
            yield self._each("batch_norm", counts[i], Scratch(x), *norm, Int64(counts[i]), UInt32(C))
            yield self._each("relu_each", counts[i], Scratch(x), Int64(counts[i]))
            weights = (Weight(f"tconv{i + 1}.weight"), Weight(f"tconv{i + 1}.bias"))
            if self.is_gemm(sizes, i + 1):
                yield self._gemm(Scratch(x), weights, Scratch(y), faces, n, C, K)
            else:
                for face in range(faces):
                    of_face = [Scratch(at + 4 * face * floats) for at, floats in ((x, n * n * C), (y, 4 * n * n * K))]
                    yield self._direct(of_face[0], weights, of_face[1], n, C, K)
            x, y, n = y, x, 2 * n
        first_value = first * sizes.floats[-1]
        yield self._each("tanh_each", counts[-1], Scratch(x), Output(0), Int64(first_value), Int64(counts[-1]))

    def _each(self, kernel: str, count: int, *arguments: Argument) -> KernelLaunch:
        """One thread per element."""
        return KernelLaunch(_layer_program(kernel), cover(count, self.block), arguments, _BUDGET)

    def _direct(
        self, x: Argument, weights: tuple[Argument, ...], y: Argument, n: int, C: int, K: int
    ) -> KernelLaunch:  # fmt: skip
        """Of one face: x (n, n, C), y (2n, 2n, K)."""
        tiles = -(-2 * n // TILE)
        config = LaunchConfig((tiles * tiles, -(-K // CHANNELS), 1), (TILE * TILE * CHANNELS, 1, 1), 0)
        return KernelLaunch(self.direct_program, config, (x, *weights, y, *map(UInt32, (n, C, K))), _BUDGET)

    def _gemm(
        self, x: Argument, weights: tuple[Argument, ...], y: Argument, faces: int, n: int, C: int, K: int
    ) -> KernelLaunch:  # fmt: skip
        """Of many faces: x (faces, n, n, C), y (faces, 2n, 2n, K)."""
        threads = self.T * self.V
        config = LaunchConfig((-(-faces * 4 * n * n // self.T), -(-K // threads), 1), (threads, 1, 1), 0)
        return KernelLaunch(self.gemm_program, config, (x, *weights, y, *map(UInt32, (faces, n, C, K))), _BUDGET)


def _layer_program(kernel: str) -> Program:
    return Program(KERNELS / "faces_layers.cu", kernel)
