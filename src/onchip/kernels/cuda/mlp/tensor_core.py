"""Host side of mlp/tensor_core.cu. Pure Python: it plans for a GPU that is not present.

The host packs the weights in fragment order and passes their size as a template argument; the kernel does not compile
if the two sides disagree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from onchip.errors import PlanError
from onchip.kernels.chain import Chain, end_dtypes, find_chain, forward_cost
from onchip.kernels.cuda.common.activation import cpp_name
from onchip.kernels.cuda.common.arguments import Input, Int64, Output, Weight
from onchip.kernels.cuda.common.chain import ChainKernel, supported_part
from onchip.kernels.cuda.common.costs import H200, MlpTensorCoreCosts, costs_of
from onchip.kernels.cuda.common.dtypes import ELEMENT_TYPES
from onchip.kernels.cuda.common.precision import PRECISIONS, Precision, round_up, tensor_core_cost
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.cuda.mlp.packing import first_steps, fitting_layers, pack_recipe, weight_bytes
from onchip.network.build import mlp
from onchip.network.graph import Network, changing_weights
from onchip.network.io import short_name, with_io
from onchip.network.layers import Activation
from onchip.network.types import DTYPE_BYTES
from onchip.plan.device import Device
from onchip.plan.kernel import Claim, Job, Refusal

SOURCE = Path(__file__).with_suffix(".cu")

# Most k steps of the first layer whose rows fit in registers; half as many if not staged through shared memory. Longer
# rows are read from global memory, MAX_STEPS / 2 steps at a time.
MAX_STEPS = 16
MAX_LAYERS = 32  # per kernel: more take minutes to compile
MAX_STAGES = 4
FLIGHT_BYTES = 48 << 10  # rows in flight per SM: enough to hide memory latency
COLUMNS = {"ByWgmma": 64, "ByMma": 32}  # columns whose accumulators are live at once; twice that for long rows
# Warps per SM -> most registers for fragments and accumulators without spills, found by compiling random networks. The
# other registers are mostly shared by two blocks of rows, so a pair may use more.
REGISTERS = {"ByWgmma": {32: 32, 24: 48, 16: 72, 12: 112, 8: 200}, "ByMma": {16: 76, 12: 92, 8: 180}}
PAIRS = {"ByWgmma": (56, 20), "ByMma": (104, 12)}  # most registers of two blocks of rows, and warps per SM
SPLIT_REGISTERS = 156  # with 8 warps, for 3xTF32: split fragments and partial sums need registers, too
PACKING_REGISTERS = 28
ACTIVATION_REGISTERS = 20  # for activations beyond a comparison
WIDE = 256  # width from which on few warps fit


@dataclass(frozen=True)
class Tiling:
    """Tile sizes of a block of mlp_tensor_core."""

    by: str  # ByWgmma or ByMma
    blocks: int  # blocks of 16 rows per warp tile
    warps: int  # warps per SM
    stages: int  # row tiles in flight per warp; 0: rows are read from global memory

    @property
    def warps_per_tile(self) -> int:
        """Warps that share one tile."""
        return 4 if self.by == "ByWgmma" else 1

    @property
    def tile_rows(self) -> int:
        return 16 * self.blocks * self.warps_per_tile


@dataclass(frozen=True)
class MlpTensorCoreLowering:
    """A claimed chain, lowered to one launch."""

    chain: Chain
    precision: Precision
    dtypes: tuple[str, str]  # dtypes of x and y
    tiling: Tiling
    units: int  # number of SMs; at most one block each
    costs: MlpTensorCoreCosts = field(default=H200.mlp_tensor_core, kw_only=True, repr=False)

    @property
    def program(self) -> Program:
        layers = (
            f"Dense<{a.D_in}, {a.D_out}, {cpp_name(a.activation)}, {'true' if a.bias is not None else 'false'}>"
            for a in self.chain.layers
        )
        tiling = self.tiling
        head = f"{self.precision.name}, {tiling.by}, {ELEMENT_TYPES[self.dtypes[0]]}, {ELEMENT_TYPES[self.dtypes[1]]}"
        sizes = f"{tiling.blocks}, {tiling.warps}, {tiling.stages}, {weight_bytes(self.chain, self.precision)}"
        normaliser = self.chain.normaliser or "NoNormaliser"
        return Program(SOURCE, f"mlp_tensor_core<{head}, {sizes}, {normaliser}, {', '.join(layers)}>")

    @property
    def budget(self) -> Budget:
        """One block per SM owns all 65,536 registers; allocated in multiples of 8, at most 255 per thread."""
        registers = min(255, 65536 // (32 * self.tiling.warps) // 8 * 8)
        # With mma.sync the compiler keeps many weights in flight and may spill a few words. With 8 warps there are no
        # registers left: the widest networks spill rather than run as two launches.
        few = 0 if self.tiling.by == "ByWgmma" else 32
        return Budget(registers, spill_bytes=256 if self.tiling.warps == 8 else few)

    @property
    def order(self) -> str:
        """Reduction order. Independent of the tiling; the dtype of x determines the order of k."""
        how = "wgmma" if self.tiling.by == "ByWgmma" else "mma"
        split = ", 3xTF32, four steps at a time" if self.precision.splits > 1 else ""
        softmax = "; softmax in lanes" if self.chain.normaliser else ""
        return f"steps of {self.precision.step} by {how}{split}, k in the load order of {self.dtypes[0]}{softmax}"

    def count(self, B: int) -> int:
        return B * self.chain.vectors

    def launch_config(self, B: int) -> LaunchConfig:
        """One persistent block per SM, fewer if there are fewer tiles, and only as many warps as have work."""
        tiling = self.tiling
        tiles = -(-self.count(B) // tiling.tile_rows)
        grid = max(1, min(self.units, tiles))
        warps = min(tiling.warps, tiling.warps_per_tile * -(-tiles // grid))
        shared = shared_bytes(self.chain, self.precision, self.dtypes[0], tiling, warps)
        return LaunchConfig((grid, 1, 1), (32 * warps, 1, 1), shared, overlaps=tiling.by == "ByWgmma")

    def rate(self, B: int) -> float:
        """Share of the device's rate: counts padding rows, idle SMs and wide layers."""
        count, height = max(1, self.count(B)), self.tiling.tile_rows
        tiles = -(-count // height)
        widest = max(layer.D_out for layer in self.chain.layers[:-1] or self.chain.layers)
        share = self.costs.wide_share if widest >= WIDE else 1.0
        return share * min(1.0, tiles / self.units) * count / (tiles * height)

    def at(self, B: int) -> Steps:
        arguments = (Input(0), Weight("weights"), Output(0), Int64(self.count(B)))
        return Steps((KernelLaunch(self.program, self.launch_config(B), arguments, self.budget),))


class MlpTensorCoreKernel(ChainKernel):
    name = "mlp_tensor_core"

    def offers(self, net: Network, start: int, device: Device, job: Job) -> Iterator[Claim | Refusal]:
        """Claim the longest prefix of the chain that fits; the planner queries again after it."""
        chain = find_chain(net, start, (Activation,), casts=True, most=MAX_LAYERS)
        assert chain is not None
        chain, refused = supported_part(net, chain)
        most = fitting_layers(chain, PRECISIONS[job.precision], device.fast_bytes)
        for count in (len(chain.layers), *range(min(most, len(chain.layers) - 1), 0, -1)) if not refused else ():
            prefix = chain.first(count)
            lowering = make_lowering(net, prefix, device, job)
            if isinstance(lowering, MlpTensorCoreLowering):
                yield self._claim(net, prefix, device, job, lowering)
                return
            refused = refused or lowering  # reason for the whole chain
        yield Refusal(self.name, net.nodes[start].name, refused)

    def _claim(self, net: Network, chain: Chain, device: Device, job: Job, lowering: MlpTensorCoreLowering) -> Claim:
        used, cost = lowering.launch_config(1 << 40).shared_bytes, forward_cost(net, chain)
        rows = " to ".join(dict.fromkeys(short_name(dtype) for dtype in lowering.dtypes))
        weights = pack_recipe(chain, lowering.precision, lowering.dtypes[0])
        return self.claim_chain(
            net, chain, lowering, recipes={"weights": weights}, fast_bytes=used, order=lowering.order,
            cost=tensor_core_cost(
                job.precision, cost.row_flop, cost.row_bytes, weights.nbytes, rate=lowering.rate(job.batch),
                min_us=device.unit_read_us(weights.nbytes),  # every block reads all weights
            ),
            why=f"fits: {used / 1024:.0f} of {device.fast_bytes / 1024:.0f} KiB, rows in {rows}",
        )  # fmt: skip


def fits_in_block(net: Network, chain: Chain, device: Device, job: Job) -> bool:
    """Whether a block can keep the weights of the chain in shared memory. Those that change are not packed for it."""
    weights = [name for layer in chain.layers for name in (layer.weight, layer.bias) if name]
    changes = any(name in net.state for name in weights) or bool(changing_weights(weights, net))
    return not changes and isinstance(make_lowering(net, chain, device, job), MlpTensorCoreLowering)


def make_lowering(net: Network, chain: Chain, device: Device, job: Job) -> MlpTensorCoreLowering | str:
    """The lowering of a chain, or the reason for refusing it."""
    computed, dtypes = PRECISIONS[job.precision], end_dtypes(net, chain)
    tiling = choose_tiling(chain, computed, dtypes[0], device, job.batch)
    if isinstance(tiling, str):
        return tiling
    costs = costs_of(device).mlp_tensor_core
    return MlpTensorCoreLowering(chain, computed, dtypes, tiling, device.units, costs=costs)


# -- tiling --------------------------------------------------------------------------------------------------


def choose_tiling(chain: Chain, precision: Precision, x_dtype: str, device: Device, B: int) -> Tiling | str:
    """The tiling for a device and batches of about B rows, or the reason why none fits.

    Most warps first; then as many row tiles in flight as hide memory latency and fit next to the weights.
    """
    by, row_bytes = instruction(device.arch), DTYPE_BYTES[x_dtype] * chain.layers[0].D_in
    weights, steps = weight_bytes(chain, precision), first_steps(chain.layers[0].D_in, precision)
    free_bytes = device.fast_bytes - weights
    if free_bytes < 0:
        return f"does not fit: weights take {weights:,} B, a block has {device.fast_bytes:,} B of shared memory"
    for staged in (True, False) if steps <= MAX_STEPS else (False,):
        need, limits = registers(chain, precision, by, staged), dict(REGISTERS[by])
        if precision.splits > 1:
            limits[8] = SPLIT_REGISTERS
        # With mma.sync every warp reads all weights from shared memory: two blocks of rows halve that traffic. With
        # wgmma they halve the overhead of a small network, if there are enough tiles for every warp.
        pair_registers, pair_warps = PAIRS[by]
        many = B * chain.vectors >= device.units * 32 * pair_warps
        blocks = 2 if 2 * need <= pair_registers and (many or by == "ByMma") else 1
        widest = max(layer.D_out for layer in chain.layers)
        fits = (count for count, limit in limits.items() if need <= limit and (count <= 16 or widest <= COLUMNS[by]))
        warps = pair_warps if blocks == 2 else next(fits, 0)
        slot = 16 * blocks * row_bytes
        for count in range(warps, 7, -4) if staged else ():
            if stages := min(MAX_STAGES, free_bytes // (count * slot), -(-FLIGHT_BYTES // (count * slot))):
                return Tiling(by, blocks, count, stages)
        if warps and not staged:
            return Tiling(by, blocks, warps, 0)
    return f"does not fit: its widest layer takes {need} registers per thread, the limit is {limits[8]}"


def instruction(arch: str) -> str:
    """Which instruction multiplies: wgmma (four warps) on sm_90a, mma.sync (one warp) elsewhere."""
    return "ByWgmma" if arch == "sm_90a" else "ByMma"


def registers(chain: Chain, precision: Precision, by: str, staged: bool) -> int:
    """Registers per thread for fragments (input, output) and accumulators: the maximum over layers."""
    most, inputs, columns = 0, 4 * first_steps(chain.layers[0].D_in, precision), COLUMNS[by]
    if not staged and inputs > 2 * MAX_STEPS:
        # Half as many steps, elements not yet packed into fragments, and more columns per pass over the rows.
        inputs, columns = 4 * MAX_STEPS, columns if precision.splits > 1 else 2 * columns
    split = 8 if precision.splits > 1 else 0  # 3xTF32: both splits of four steps, minus those already consumed
    for layer in chain.layers:
        N, is_last = round_up(layer.D_out, 8), layer is chain.layers[-1]
        # A normaliser needs the accumulators twice; the compiler prefetches the next chunk of a last layer.
        sums = N if is_last and chain.normaliser else min(N, 2 * columns if is_last else columns) // 2
        sums *= precision.splits  # 3xTF32: partial sums of four steps, and totals
        outputs = 0 if is_last else 4 * (round_up(N, precision.step) // precision.step)
        compares = layer.activation is None or layer.activation.flop_each <= 2
        function = 0 if compares else ACTIVATION_REGISTERS
        most, inputs, columns = max(most, inputs + split + sums + outputs + function), outputs, COLUMNS[by]
    # 16-bit elements stay unpacked until they are joined two per register; other types need fewer registers.
    if precision.per_word == 2 or not staged or most <= REGISTERS[by][16]:
        return most
    return max(REGISTERS[by][16], most - PACKING_REGISTERS)


def shared_bytes(chain: Chain, precision: Precision, x_dtype: str, tiling: Tiling, warps: int) -> int:
    """Dynamic shared memory of a block of `warps` warps: the weights and every warp's rows in flight."""
    slot = 16 * tiling.blocks * DTYPE_BYTES[x_dtype] * chain.layers[0].D_in
    return weight_bytes(chain, precision) + warps * tiling.stages * slot


# -- instances ----------------------------------------------------------------------------------


def _instance(
    name: str, *widths: int, precision: str, io: str = "float32", B: int = Job.batch, **options: object
) -> Instance:
    def launch(device: Device) -> KernelLaunch:
        net = with_io(mlp(*widths, **options), io)  # type: ignore[arg-type]
        chain = find_chain(net, 0, (Activation,), casts=True)
        assert chain is not None
        lowering = make_lowering(net, chain, device, Job(precision, B))
        if isinstance(lowering, str):
            raise PlanError(f"{MlpTensorCoreKernel.name} does not support {name} on {device.arch}", got=lowering)
        return lowering.at(1 << 20).launches[0]

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
