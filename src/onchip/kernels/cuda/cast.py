"""cast on a GPU: the host's side of cast.cu."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onchip.kernels.cuda.mlp_packing import PRECISIONS
from onchip.kernels.cuda.program import (
    EVERY_CHIP,
    NUMBERS,
    Budget,
    Input,
    Instance,
    Int64,
    KernelLaunch,
    LaunchConfig,
    Output,
    Program,
    Steps,
)
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Price, Refusal
from onchip.spec.io import short_name
from onchip.spec.layers import Cast
from onchip.spec.network import Network

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP
THREADS, NUMBERS_A_THREAD, BLOCKS_A_UNIT = 256, 4, 8


@dataclass(frozen=True)
class CastLowering:
    dtypes: tuple[str, str]
    row_size: int
    units: int

    @property
    def program(self) -> Program:
        return Program(SOURCE, f"cast<{', '.join(NUMBERS[dtype] for dtype in self.dtypes)}>")

    @property
    def budget(self) -> Budget:
        return Budget(registers=65536 // (THREADS * BLOCKS_A_UNIT))

    def count(self, B: int) -> int:
        return B * self.row_size

    def launch_config(self, B: int) -> LaunchConfig:
        blocks = -(-self.count(B) // (THREADS * NUMBERS_A_THREAD))
        return LaunchConfig((max(1, min(blocks, self.units * BLOCKS_A_UNIT)), 1, 1), (THREADS, 1, 1), 0)

    def at(self, B: int) -> Steps:
        arguments = (Input(0), Output(0), Int64(self.count(B)))
        return Steps((KernelLaunch(self.program, self.launch_config(B), arguments, self.budget),))


class CastAlone:
    name = "cast"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        node = net.nodes[start]
        if not isinstance(node.layer, Cast) or job.is_training:
            return
        given, made = net.types[node.inputs[0]], net.types[node.name]
        if device.arch not in ARCHITECTURES or not {given.dtype, made.dtype} <= NUMBERS.keys():
            why = f"casts between {', '.join(NUMBERS)} on {', '.join(ARCHITECTURES)}"
            yield Refusal(self.name, node.name, f"{why}, not {given.dtype} to {made.dtype} on {device.arch}")
            return
        yield Claim(
            kernel=self.name,
            label=f"{self.name}<{short_name(given.dtype)},{short_name(made.dtype)}>",
            nodes=(node.name,),
            price=Price(0, given.row_bytes + made.row_bytes),
            why="by itself: what stands beside it has other readers",
            facts=CastLowering((given.dtype, made.dtype), given.row_size, device.units),
        )


def _instance(given: str, made: str) -> Instance:
    return Instance(
        f"{given} to {made}", lambda device: CastLowering((given, made), 1, device.units).at(1 << 20).launches[0]
    )


INSTANCES = (
    _instance("float32", "float16"), _instance("float16", "bfloat16"), _instance("bfloat16", "float32"),
)  # fmt: skip
