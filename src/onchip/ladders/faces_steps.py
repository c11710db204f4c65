"""The report's way to run the faces generator on a GPU, as launches: host side of cuda/faces_*.cu."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from onchip.kernels.cuda.common.arguments import Argument, Input, Int64, Output, Scratch, UInt32, Weight
from onchip.kernels.cuda.common.program import LaunchConfig, Program, Steps
from onchip.ladders.device import KERNELS, cover
from onchip.ladders.launch_list import LaunchList, moved
from onchip.network.graph import Network
from onchip.network.recipe import Array, materialise
from onchip.workloads.faces import KERNEL

EVERY_TCONV = 1 << 16
TILE, CHANNELS = 4, 2  # of a block in faces_direct.cu
MAX_REGISTERS = 96  # per thread; ten blocks of the gemm then fit into an SM's 65,536
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
        run, floats = LaunchList(), min(B, self.batch) * max(sizes.floats)
        x, y = run.scratch(floats), run.scratch(floats)  # each layer reads one and writes the other
        for first in range(0, B, self.batch):
            self._add_batch(run, sizes, first, min(self.batch, B - first), x, y)
        return run.steps()

    def flop(self, sizes: Sizes) -> int:
        """Per face, with the products with zeros that gemms compute."""
        total, n = 2 * sizes.latent * sizes.floats[0], sizes.start
        for i, (C, K) in enumerate(pairwise(sizes.channels), start=1):
            pixels = 4 * n * n if self.is_gemm(sizes, i) else n * n
            total, n = total + 2 * KERNEL * KERNEL * C * K * pixels, 2 * n
        return total

    def _add_batch(self, run: LaunchList, sizes: Sizes, first: int, faces: int, x: Scratch, y: Scratch) -> None:
        """Add the launches of the faces from `first` on."""
        counts, n = [faces * floats for floats in sizes.floats], sizes.start
        weights = (Weight("proj.weight"), Weight("proj.bias"))
        shape = (Int64(first), Int64(faces), UInt32(sizes.latent), UInt32(sizes.floats[0]))
        self._add_each(run, "project", counts[0], Input(0), *weights, x, *shape)
        for i, (C, K) in enumerate(pairwise(sizes.channels)):
            norm = [Weight(f"bn{i}.{role}") for role in _NORM]
            self._add_each(run, "batch_norm", counts[i], x, *norm, Int64(counts[i]), UInt32(C))
            self._add_each(run, "relu_each", counts[i], x, Int64(counts[i]))
            weights = (Weight(f"tconv{i + 1}.weight"), Weight(f"tconv{i + 1}.bias"))
            if self.is_gemm(sizes, i + 1):
                self._add_gemm(run, x, weights, y, (faces, n, C, K))
            else:
                for face in range(faces):
                    of_x, of_y = (moved(a, 4 * face * floats) for a, floats in ((x, n * n * C), (y, 4 * n * n * K)))
                    self._add_direct(run, of_x, weights, of_y, (n, C, K))
            x, y, n = y, x, 2 * n
        first_value = first * sizes.floats[-1]
        self._add_each(run, "tanh_each", counts[-1], x, Output(0), Int64(first_value), Int64(counts[-1]))

    def _add_each(self, run: LaunchList, kernel: str, count: int, *arguments: Argument) -> None:
        """One thread per element."""
        run.add(_layer_program(kernel), cover(count, self.block), *arguments)

    def _add_direct(
        self, run: LaunchList, x: Scratch, weights: tuple[Weight, ...], y: Scratch, shape: tuple[int, int, int]
    ) -> None:  # fmt: skip
        """Of one face: x (n, n, C), y (2n, 2n, K); shape: n, C, K."""
        n, _, K = shape
        tiles = -(-2 * n // TILE)
        config = LaunchConfig((tiles * tiles, -(-K // CHANNELS), 1), (TILE * TILE * CHANNELS, 1, 1), 0)
        run.add(self.direct_program, config, x, *weights, y, *map(UInt32, shape))

    def _add_gemm(
        self, run: LaunchList, x: Scratch, weights: tuple[Weight, ...], y: Scratch, shape: tuple[int, int, int, int]
    ) -> None:  # fmt: skip
        """Of many faces: x (faces, n, n, C), y (faces, 2n, 2n, K); shape: faces, n, C, K."""
        (faces, n, _, K), threads = shape, self.T * self.V
        config = LaunchConfig((-(-faces * 4 * n * n // self.T), -(-K // threads), 1), (threads, 1, 1), 0)
        run.add(self.gemm_program, config, x, *weights, y, *map(UInt32, shape))


def _layer_program(kernel: str) -> Program:
    return Program(KERNELS / "faces_layers.cu", kernel)
