"""Host side of mlp/tensor_core.cu: pure Python: it plans for a chip that is not here.

The host packs the weights in the order in which the kernel's lanes hold the numbers, and compiles the kernel with
the bytes that this took: it does not compile where the two sides differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onchip.errors import PlanError
from onchip.kernels.chain import Chain, end_dtypes, find_chain, forward_price
from onchip.kernels.cuda.common.activation import cpp_name
from onchip.kernels.cuda.common.precision import PRECISIONS, Precision, round_up
from onchip.kernels.cuda.common.program import (
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
    Weight,
)
from onchip.kernels.cuda.mlp.packing import first_steps, fitting_layers, pack_recipe, weight_bytes
from onchip.kernels.pointwise import ACTIVATIONS
from onchip.network.build import mlp
from onchip.network.graph import Network
from onchip.network.io import short_name, with_io
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Price, Refusal

SOURCE = Path(__file__).with_suffix(".cu")
ARCHITECTURES = EVERY_CHIP


# Steps of the first layer with all of a row in registers, if it comes through shared memory; else half as many.
# Longer rows are read where they are, half as many at a time.
MOST_STEPS = 16
MOST_LAYERS = 32  # of a kernel: a longer one takes minutes to compile
MOST_STAGES = 4
FLIGHT_BYTES = 48 << 10  # rows on their way to a multiprocessor: enough to hide the latency of memory
COLUMNS = {"ByWgmma": 64, "ByMma": 32}  # of a layer whose sums are in registers at once; twice that for long rows
# Warps a multiprocessor -> registers for fragments and sums that leave the compiler enough beside them: found by
# compiling random networks. Two blocks of rows share much of what is beside, so they may have more together.
REGISTERS = {"ByWgmma": {32: 32, 24: 48, 16: 72, 12: 112, 8: 200}, "ByMma": {16: 76, 12: 92, 8: 180}}
PAIRS = {"ByWgmma": (56, 20), "ByMma": (104, 12)}  # registers of two blocks, and warps
SPLIT_REGISTERS = 156  # with 8 warps, for fp32: parts of fragments and of sums come beside
PACKING_REGISTERS = 28
ACTIVATION_REGISTERS = 20  # for one that is more than a comparison
WIDE, WIDE_RATE = 256, 0.5  # a layer from which on so little of the device's rate is reached: few warps find room


@dataclass(frozen=True)
class Tiling:
    """How a block of mlp_tensor is cut."""

    by: str  # ByWgmma or ByMma
    blocks: int  # of 16 rows, a warp at a time
    warps: int  # a multiprocessor
    stages: int  # tiles of rows in flight a warp; 0: rows are read where they are

    @property
    def team(self) -> int:
        """Warps that work on one tile."""
        return 4 if self.by == "ByWgmma" else 1

    @property
    def tile_rows(self) -> int:
        return 16 * self.blocks * self.team


@dataclass(frozen=True)
class TensorLowering:
    """A claimed chain as one launch."""

    chain: Chain
    precision: Precision
    dtypes: tuple[str, str]  # of x and y
    tiling: Tiling
    units: int  # multiprocessors: at most one block each

    @property
    def program(self) -> Program:
        layers = (
            f"Dense<{a.D_in}, {a.D_out}, {cpp_name(a.activation)}, {'true' if a.bias is not None else 'false'}>"
            for a in self.chain.layers
        )
        cut = self.tiling
        head = f"{self.precision.name}, {cut.by}, {NUMBERS[self.dtypes[0]]}, {NUMBERS[self.dtypes[1]]}"
        sizes = f"{cut.blocks}, {cut.warps}, {cut.stages}, {weight_bytes(self.chain, self.precision)}"
        normaliser = self.chain.normaliser or "NoNormaliser"
        return Program(SOURCE, f"mlp_tensor<{head}, {sizes}, {normaliser}, {', '.join(layers)}>")

    @property
    def budget(self) -> Budget:
        """A block has a multiprocessor's 65,536 registers for itself; they come in eights, at most 255 a thread."""
        registers = min(255, 65536 // (32 * self.tiling.warps) // 8 * 8)
        # By mma.sync the compiler keeps many weights on their way and may set a few words aside. With 8 warps there are
        # no more registers to give: the widest networks set some aside rather than run as two launches.
        few = 0 if self.tiling.by == "ByWgmma" else 32
        return Budget(registers, spill_bytes=256 if self.tiling.warps == 8 else few)

    @property
    def order(self) -> str:
        """Of whatever tiling: it decides only which rows go together. Of x its dtype says in which order k is read."""
        how = "wgmma" if self.tiling.by == "ByWgmma" else "mma"
        parts = ", in three products, four steps at a time" if self.precision.parts > 1 else ""
        softmax = "; softmax in lanes" if self.chain.normaliser else ""
        return f"steps of {self.precision.step} by {how}{parts}, k as {self.dtypes[0]} is read{softmax}"

    def count(self, B: int) -> int:
        return B * self.chain.vectors

    def launch_config(self, B: int) -> LaunchConfig:
        """One block a multiprocessor, fewer where there are fewer tiles, and no more teams in it than have work."""
        cut = self.tiling
        tiles = -(-self.count(B) // cut.tile_rows)
        grid = max(1, min(self.units, tiles))
        warps = min(cut.warps, cut.team * -(-tiles // grid))
        shared = shared_bytes(self.chain, self.precision, self.dtypes[0], cut, warps)
        return LaunchConfig((grid, 1, 1), (32 * warps, 1, 1), shared, overlaps=cut.by == "ByWgmma")

    def rate(self, B: int) -> float:
        """Share of the device's rate: tiles that are not full, multiprocessors without one, layers that are wide."""
        count, height = max(1, self.count(B)), self.tiling.tile_rows
        tiles = -(-count // height)
        widest = max(layer.D_out for layer in self.chain.layers[:-1] or self.chain.layers)
        return (WIDE_RATE if widest >= WIDE else 1.0) * min(1.0, tiles / self.units) * count / (tiles * height)

    def at(self, B: int) -> Steps:
        arguments = (Input(0), Weight("weights"), Output(0), Int64(self.count(B)))
        return Steps((KernelLaunch(self.program, self.launch_config(B), arguments, self.budget),))


class MlpTensor:
    name = "mlp_tensor"
    device_kind = "cuda"
    precisions = tuple(PRECISIONS)

    def claims(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """The longest part of the chain that fits; the planner asks again behind it."""
        chain = find_chain(net, start, ACTIVATIONS, casts=True, most=MOST_LAYERS)
        if chain is None:
            return
        refused = why_not(net, chain, device, job)
        if refused and len(chain.layers) > 1:  # perhaps because of a later layer
            chain = chain.first(1)
            refused = why_not(net, chain, device, job)
        most = fitting_layers(chain, PRECISIONS[job.precision], device.fast_bytes)
        for count in (len(chain.layers), *range(min(most, len(chain.layers) - 1), 0, -1)) if not refused else ():
            part = chain.first(count)
            launch = make_lowering(net, part, device, job)
            if isinstance(launch, TensorLowering):
                yield _claim(net, part, device, job, launch)
                return
            refused = refused or launch  # of all layers together
        yield Refusal(self.name, net.nodes[start].name, refused)


def make_lowering(net: Network, chain: Chain, device: Device, job: Job) -> TensorLowering | str:
    """How to launch a chain, or why not."""
    computed, dtypes = PRECISIONS[job.precision], end_dtypes(net, chain)
    tiling = choose_tiling(chain, computed, dtypes[0], device, job.batch)
    return tiling if isinstance(tiling, str) else TensorLowering(chain, computed, dtypes, tiling, device.units)


def _claim(net: Network, chain: Chain, device: Device, job: Job, launch: TensorLowering) -> Claim:
    used = launch.launch_config(1 << 40).shared_bytes
    rows = " to ".join(dict.fromkeys(short_name(dtype) for dtype in launch.dtypes))
    weights = pack_recipe(chain, launch.precision, launch.dtypes[0])
    price = forward_price(net, chain)
    flop, computed = (3 * price.row_flop, "tf32") if launch.precision.parts > 1 else (price.row_flop, "")
    price = Price(  # three products of tf32 for one of fp32; every block reads all weights
        flop, price.row_bytes, weights.nbytes, precision=computed, rate=launch.rate(job.batch),
        least_us=device.unit_read_us(weights.nbytes),
    )  # fmt: skip
    return Claim(
        kernel=MlpTensor.name,
        label=f"{MlpTensor.name}<{chain.label}>",
        nodes=chain.nodes,
        price=price,
        why=f"fits: {used / 1024:.0f} of {device.fast_bytes / 1024:.0f} KiB, rows in {rows}",
        recipes={"weights": weights},
        fast_bytes=used,
        order=launch.order,
        facts=launch,
    )


# -- how the work is cut -------------------------------------------------------------------------------------


def choose_tiling(chain: Chain, precision: Precision, x_dtype: str, device: Device, B: int) -> Tiling | str:
    """The tiling for a chip and batches of some B rows, or why there is none.

    Most warps first; then rows in flight, as many as hide the latency of memory and find room beside the weights.
    """
    by, row_bytes = product(device.arch), DTYPE_BYTES[x_dtype] * chain.layers[0].D_in
    weights, steps = weight_bytes(chain, precision), first_steps(chain.layers[0].D_in, precision)
    room = device.fast_bytes - weights
    if room < 0:
        return f"does not fit: weights take {weights:,} B, a block has {device.fast_bytes:,} B of shared memory"
    for staged in (True, False) if steps <= MOST_STEPS else (False,):
        need, most = registers(chain, precision, by, staged), dict(REGISTERS[by])
        if precision.parts > 1:
            most[8] = SPLIT_REGISTERS
        # A warp that multiplies by itself reads every weight from shared memory: two blocks of rows halve that. By
        # wgmma they halve what a small network takes beside its products, if there is such a tile for every warp.
        pair_registers, pair_warps = PAIRS[by]
        many = B * chain.vectors >= device.units * 32 * pair_warps
        blocks = 2 if 2 * need <= pair_registers and (many or by == "ByMma") else 1
        widest = max(layer.D_out for layer in chain.layers)
        fits = (count for count, room in most.items() if need <= room and (count <= 16 or widest <= COLUMNS[by]))
        warps = pair_warps if blocks == 2 else next(fits, 0)
        slot = 16 * blocks * row_bytes
        for count in range(warps, 7, -4) if staged else ():
            if stages := min(MOST_STAGES, room // (count * slot), -(-FLIGHT_BYTES // (count * slot))):
                return Tiling(by, blocks, count, stages)
        if warps and not staged:
            return Tiling(by, blocks, warps, 0)
    return f"does not fit: its widest layer takes {need} registers a thread, there are {most[8]}"


def product(arch: str) -> str:
    """How the tensor cores multiply: by four warps on Hopper, by one on every other chip."""
    return "ByWgmma" if arch == "sm_90a" else "ByMma"


def registers(chain: Chain, precision: Precision, by: str, staged: bool) -> int:
    """Of a thread, for the fragments that a layer reads and makes and the sums in between: the most of any layer."""
    most, reads, columns = 0, 4 * first_steps(chain.layers[0].D_in, precision), COLUMNS[by]
    if not staged and reads > 2 * MOST_STEPS:
        # Half as many steps, numbers that are no fragments yet, and more columns for each time that rows are read.
        reads, columns = 4 * MOST_STEPS, columns if precision.parts > 1 else 2 * columns
    split = 8 if precision.parts > 1 else 0  # four steps in two parts, less what is read by then
    for layer in chain.layers:
        N, is_last = round_up(layer.D_out, 8), layer is chain.layers[-1]
        # A normaliser takes the sums of a row twice, and the compiler those of a last layer's next piece ahead.
        sums = N if is_last and chain.normaliser else min(N, 2 * columns if is_last else columns) // 2
        sums *= precision.parts  # sums of four steps, and of these
        makes = 0 if is_last else 4 * (round_up(N, precision.step) // precision.step)
        compares = layer.activation is None or layer.activation.flop_each <= 2
        function = 0 if compares else ACTIVATION_REGISTERS
        most, reads, columns = max(most, reads + split + sums + makes + function), makes, COLUMNS[by]
    # Numbers of 16 bits are packed on the way, two to a register, and before that they are not: others need less.
    if precision.per_word == 2 or not staged or most <= REGISTERS[by][16]:
        return most
    return max(REGISTERS[by][16], most - PACKING_REGISTERS)


def shared_bytes(chain: Chain, precision: Precision, x_dtype: str, tiling: Tiling, warps: int) -> int:
    """Dynamic shared memory of a block of so many warps: the weights and every warp's rows in flight."""
    slot = 16 * tiling.blocks * DTYPE_BYTES[x_dtype] * chain.layers[0].D_in
    return weight_bytes(chain, precision) + warps * tiling.stages * slot


# -- reasons and examples ------------------------------------------------------------------------------------


def why_not(net: Network, chain: Chain, device: Device, job: Job) -> str:
    """What no kernel of a chain does, or "" if there is nothing."""
    if job.is_training:
        return "runs forward only: it keeps no activations for a backward pass"
    if device.arch not in ARCHITECTURES:
        return f"compiles for {', '.join(ARCHITECTURES)}, not {device.arch}"
    for dtype in end_dtypes(net, chain):
        if dtype not in NUMBERS:
            return f"reads and writes {', '.join(NUMBERS)}, not {dtype}"
    for layer in chain.layers:
        for name in filter(None, (layer.weight, layer.bias)):
            if (dtype := net.weight_type(name).dtype) not in NUMBERS:
                return f"keeps weights of {', '.join(NUMBERS)}, and {name} is {dtype}"
    return ""


def _instance(
    name: str, *widths: int, precision: str, io: str = "float32", B: int = Job.batch, **options: object
) -> Instance:
    def launch(device: Device) -> KernelLaunch:
        net = with_io(mlp(*widths, **options), io)  # type: ignore[arg-type]
        chain = find_chain(net, 0, ACTIVATIONS, casts=True)
        assert chain is not None
        made = make_lowering(net, chain, device, Job(precision, B))
        if isinstance(made, str):
            raise PlanError(f"{MlpTensor.name} does not take {name} on {device.arch}", got=made)
        return made.at(1 << 20).launches[0]

    return Instance(name, launch)


INSTANCES = (
    _instance("decode fp16", 72, 64, 64, 4, precision="fp16", io="float16", bias=False),
    _instance("decode fp16, rows in fp32", 72, 64, 64, 4, precision="fp16", bias=False),
    _instance("decode fp32", 72, 64, 64, 4, precision="fp32", bias=False),
    _instance("decode tf32", 72, 64, 64, 4, precision="tf32", bias=False),
    _instance("decode bf16", 72, 64, 64, 4, precision="bf16", io="bfloat16", bias=False),
    _instance("one output", 16, 32, 1, precision="fp16", io="float16", activation="Tanh"),
    _instance("one output, many rows", 16, 32, 1, precision="fp16", io="float16", B=262_144),
    _instance("odd widths", 7, 13, 5, 3, precision="bf16", io="float16", output="LogSoftmax"),
    _instance("128 wide", 48, 128, 128, 128, 3, precision="fp16", io="float16"),
    _instance("128 wide tf32", 48, 128, 128, 3, precision="tf32"),
    _instance("200 wide", 100, 200, 200, 10, precision="fp16", io="float16", output="Softmax"),
    _instance("256 wide", 20, 256, 256, 3, precision="bf16", io="bfloat16"),
    _instance("ten layers", 128, *(64,) * 9, 3, precision="fp16", io="float16"),
    _instance("long rows", 784, 100, 10, precision="fp16", output="Softmax"),
    _instance("wide rows", 256, 64, 3, precision="fp16"),
    _instance("long rows fp32", 300, 64, 10, precision="fp32"),
    _instance("one layer fp32", 211, 108, precision="fp32"),
    _instance("one layer bf16", 24, 122, precision="bf16", io="bfloat16"),
    _instance("middling fp32", 53, 123, 89, precision="fp32"),
    _instance("many outputs", 32, 64, 1000, precision="fp16"),
)
