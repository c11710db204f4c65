"""What the kernels' estimates are computed from: times, clocks and shares of a rate, fitted to an H200.

One table per kernel. A share is of the device's sustained rate (plan/device.py); a factor multiplies a time or a rate.
us and clocks are of one block or SM unless the text says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onchip.plan.device import Device
from onchip.plan.fitted import fitted

_ESTIMATED = "estimated"
_COUNTED = "counted in the compiled code"

# -- tiles of the gemms ----------------------------------------------------------------------------------------

_GEMM_4096 = "H200: 4,096 cubed takes 353 us in fp16, 736 in tf32, 2,050 in fp32"
_FEW_ROWS = "H200: M up to 256, N and K from 128 to 4,096, in graphs of 40 launches"


@dataclass(frozen=True, eq=False)
class MmaTileCosts:
    """mma/mma_tile.py; gemm_mma, conv_implicit_gemm and conv_gather use it."""

    tile_shares: Mapping[tuple[int, int], float] = fitted(
        {(128, 128): 0.6, (128, 64): 0.52, (128, 32): 0.36, (32, 64): 0.31},
        "of an H200's fp16 rate, by rows and columns of a full tile", _GEMM_4096,
    )  # fmt: skip
    max_share: float = fitted(0.75, "the largest share of any device's rate", _ESTIMATED)
    overhead_elements: int = fitted(100, "prologue and epilogue of a tile, as extra elements of k", "H200")
    narrow_factor: float = fitted(0.62, "of the rate, rows copied in chunks of less than 16 bytes", "H200")
    rounded_factor: float = fitted(0.85, "of the rate in tf32: fragments are rounded when they are read", "H200")
    hopper_factors: Mapping[int, float] = fitted(
        {1: 0.6, 2: 1.0}, "of gemm_mma's rate on sm_90a, by tf32 splits: where it competes with gemm_sm90", _FEW_ROWS
    )


@dataclass(frozen=True, eq=False)
class WgmmaTileCosts:
    """mma/wgmma_tile.py; gemm_sm90, conv_sm90 and the recipes use it.

    For few rows a block's sequential work counts: prologue and epilogue overlap adjacent launches.
    """

    tile_shares: Mapping[tuple[int, int], float] = fitted(
        {(128, 256): 1.0, (128, 128): 0.85, (128, 64): 0.5, (128, 32): 0.3, (64, 128): 0.5, (64, 64): 0.43,
         (64, 32): 0.35, (256, 64): 0.85},
        "by rows and columns of a full tile", "h200/product.json",
    )  # fmt: skip
    through_registers_factors: Mapping[str, float] = fitted(
        {"fp32": 1.3, "bf16": 0.85, "fp16": 0.85},
        "of the rate, float32 rows that go through registers: in 3xTF32 three wgmma share the cost of a split", "H200",
    )  # fmt: skip
    overhead_fmas: Mapping[str, float] = fitted(
        {"fp16": 3.0e6, "bf16": 3.0e6, "tf32": 1.5e6, "fp32": 0.5e6},
        "of an SM in 0.8 us, the prologue and epilogue of a tile",
        "H200: 64 x 32 tiles took 1.1 us with one slice of k, 3.4 us with nine",
    )
    block_us: float = fitted(1.0, "fixed, of a launch with one block per SM", _FEW_ROWS)
    slice_us: float = fitted(0.106, "of a slice of k", _FEW_ROWS)
    column_us: float = fitted(0.00085, "per slice and column of the tile", _FEW_ROWS)
    bytes_per_us: float = fitted(98_000, "loaded per block: the least time of a slice", _FEW_ROWS)
    reduce_column_us: float = fitted(0.025, "of the cluster reduction, per column", _FEW_ROWS)
    reduce_block_us: float = fitted(0.2, "of the cluster reduction, per block", _FEW_ROWS)
    shared_sm_factor: float = fitted(1.4, "time of a slice with two blocks per SM", _FEW_ROWS)
    slow_slice_factors: Mapping[int, float] = fitted(
        {1: 1.4, 2: 2.2}, "time of a slice whose rows go through registers, by tf32 splits of w", _ESTIMATED
    )
    stored_bytes_per_us: float = fitted(2.9e6, "of y, over all SMs", "H200: L2 takes 23 lines of 128 B per ns")
    activation_instructions: float = fitted(0.75, "per flop of an activation", "H200: 3.1 us for GELU of 128 x 256")
    instructions_per_us: float = fitted(128 * 1755, "issued per SM", "H200: 1,755 MHz under load")


# -- gemm/ -----------------------------------------------------------------------------------------------------

_SKINNY = "H200: M from 1 to 64, N and K from 128 to 4,096"


@dataclass(frozen=True, eq=False)
class GemvCosts:
    rows_us: float = fitted(0.3, "mma: latency of loading 16 rows of x", _SKINNY)
    cache_share: float = fitted(0.29, "mma: of L2's peak bandwidth, all blocks together", _SKINNY)
    fma_row_us: float = fitted(0.0013, "fma: per row of a block, averaged over all SMs", _SKINNY)
    fma_hidden_us: float = fitted(1.2, "fma: part of the total that overlaps adjacent launches", _SKINNY)
    mma_share: float = fitted(0.3, "of the peak rate", _ESTIMATED)
    fma_share: float = fitted(0.4, "of the peak rate", _ESTIMATED)


@dataclass(frozen=True, eq=False)
class GemmSimtCosts:
    tile_shares: Mapping[tuple[int, int], float] = fitted(
        {(128, 128): 0.75, (64, 64): 0.5, (16, 64): 0.17, (256, 16): 0.35},
        "by rows and columns of a full tile", "H200",
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class MatMulCosts:
    simt_share: float = fitted(0.3, "of the CUDA cores' rate", _ESTIMATED)
    mma_shares: Mapping[str, float] = fitted(
        {"fp32": 0.3, "tf32": 0.2, "fp16": 0.12, "bf16": 0.12},
        "of the tensor cores' rate, full tiles; 16-bit values are packed when fragments are read", _ESTIMATED,
    )  # fmt: skip


# -- gradient/ -------------------------------------------------------------------------------------------------


_STEPS = "H200: the 87 gradients of weights in bf16 steps of bench training, each alone; mean error 1.16x"


@dataclass(frozen=True, eq=False)
class WeightGradCosts:
    simt_share: float = fitted(0.4, "of the CUDA cores' rate, full tiles", _ESTIMATED)
    mma_share: float = fitted(0.15, "of the tensor cores' rate, full tiles, without loads", _STEPS)
    row_instructions: float = fitted(3.0, "per element that a block loads of a Linear", _STEPS)
    pixel_instructions: float = fitted(40.0, "the same of a convolution, index arithmetic included", _STEPS)


# -- mlp/ ------------------------------------------------------------------------------------------------------

_PAIR = "H200: 256-1024-256 over 64 to 65,536 rows for the total; the split between the three is estimated"


@dataclass(frozen=True, eq=False)
class MlpFusedCosts:
    one_warp_share: float = fitted(
        0.43, "of a scheduler's rate, by a single warp: load latency", "H200: one row of 784-512-256-10"
    )


@dataclass(frozen=True, eq=False)
class MlpTensorCoreCosts:
    wide_share: float = fitted(0.5, "layers at least 256 wide: few warps fit", "H200")


@dataclass(frozen=True, eq=False)
class MlpPairCosts:
    block_us: float = fitted(2.5, "fixed", _PAIR)
    slice_us: float = fitted(0.35, "per chunk of H and slice of k", _PAIR)
    column_us: float = fitted(0.004, "per chunk of H and column of y", _PAIR)


# -- conv/ -----------------------------------------------------------------------------------------------------

_LAST_LAYER = "H200: last layer of `faces` in fp16, tf32 and fp32 with 4 to 24 warps, within a quarter"
_LAST_LAYER_SM90 = "H200: last layer of `faces`, cells of one or two pixels, patches of one to four tiles, within 10 %"


@dataclass(frozen=True, eq=False)
class ConvDirectCosts:
    tile_shares: Mapping[tuple[int, int], float] = fitted(
        {(128, 64): 0.57, (64, 32): 0.45, (128, 16): 0.4, (1024, 4): 0.2, (256, 1): 0.07},
        "of the fp32 rate, by positions and channels of a full tile",
        "H200: 8 -> 16 channels, 1x1: 594 us (fp16) and 523; 3 -> 16, 3x3: 1,259; 1 -> 64, 10x4: 145",
    )
    overhead_elements: int = fitted(
        18, "fixed work of a tile, as elements of k", "H200: the same; estimates for K of 8 to 40 are within 20 %"
    )
    k_us: float = fitted(0.06, "per k of a serial loop", "H200, one image: 17 us for K = 256, 203 us for K = 3,200")
    tap_us: float = fitted(0.25, "one output per thread: position of a tap", "H200: 10 us for 25 taps of one channel")
    depthwise_share: float = fitted(0.0085, "one output per thread, few channels: index arithmetic", "H200")


@dataclass(frozen=True, eq=False)
class DepthwiseCosts:
    share: float = fitted(0.3, "of the fp32 rate, unrolled", "H200: 5x5, NCHW, float32: 15.5 of 50.9 Tflop/s")
    loop_share: float = fitted(0.2, "of the fp32 rate; a loop reloads its weights", _ESTIMATED)
    tap_us: float = fitted(0.03, "per tap, serial in a thread", "H200, one image: 3x3 took 0.3 us")
    loop_tap_us: float = fitted(0.14, "the same in a loop", "H200, one image: 7x7 took 6 to 8 us")


@dataclass(frozen=True, eq=False)
class WarpMmaCosts:
    """conv/warp_mma.py: what an SM does in the time of an mma.sync, at a sustained 0.68 mma per clock."""

    instructions_per_mma: float = fitted(
        2.3, "issued, 1.6 per clock", "H200: with 2.4 per clock, layers of 1 to 64 channels took 1.3 to 2.1 times this"
    )


@dataclass(frozen=True, eq=False)
class FirstLayerCosts:
    warp_tile_instructions: int = fitted(120, "per warp tile", _COUNTED)
    tile_instructions: int = fitted(40, "per warp tile and 8 channels", _COUNTED)
    step_instructions: int = fitted(24, "per step", _COUNTED)
    mma_instructions: int = fitted(6, "per step and 8 channels", _COUNTED)
    launch_us: float = fitted(2.0, "more than an empty kernel", "H200: a layer with few weights")
    weight_us: Mapping[int, float] = fitted(
        {1: 0.00045, 2: 0.0013},
        "per weight and launch, by tf32 splits",
        "H200: 2,400 weights: 3.1 us (fp16), 5.9",
    )


@dataclass(frozen=True, eq=False)
class ImplicitGemmCosts:
    window_factor: float = fitted(
        0.6, "of a 16-bit gemm's rate: pixels are gathered one by one",
        "H200: 64 -> 64 channels 3x3 and others took 1.5 to 1.8 times as long as with contiguous rows",
    )  # fmt: skip
    float32_factor: float = fitted(0.42, "the same with float32 pixels", "H200: 2.2 to 2.6 times")
    launch_us: float = fitted(1.6, "more than an empty kernel", "H200: one slice of k took 0.8 to 2.2 us more")


@dataclass(frozen=True, eq=False)
class ConvSm90Costs:
    window_factor: float = fitted(
        0.8, "of a 16-bit gemm's rate", "H200: 0.70 to 0.86 for six 3x3 of 16 to 96 channels, 4,096 images"
    )
    unit_clocks: float = fitted(256 / 0.75, "images: 128 x 64 by 64 of k, at the sustained wgmma rate", "H200")
    tile_clocks: float = fitted(1500, "images: epilogue of a tile", "H200")
    l2_bytes_per_clock: float = fitted(34, "images: loaded by an SM", "H200")


@dataclass(frozen=True, eq=False)
class LastLayerCosts:
    """conv/last_layer/mma.py. Clocks of an SM; those of a step are of a warp."""

    rows_clocks: float = fitted(4, "to read a fragment of 16 rows", "128 B of shared memory per clock")
    weights_clocks: float = fitted(2, "to read a fragment of 8 columns", "128 B of shared memory per clock")
    mma_clocks: float = fitted(1.5, "of an mma", _LAST_LAYER)
    epilogue_clocks: float = fitted(50, "of 16 cells and 8 columns", _LAST_LAYER)
    issue_clocks: float = fitted(10, "of a step, twice for fp32", _LAST_LAYER)
    group_clocks: float = fitted(4, "of a step, per 8 columns, twice for fp32", _LAST_LAYER)
    step_clocks: float = fitted(280, "latency of a step", _LAST_LAYER)
    split_clocks: float = fitted(220, "more latency for fp32", _LAST_LAYER)
    global_clocks: float = fitted(200, "more latency with weights in global memory", _LAST_LAYER)
    bytes_per_clock: float = fitted(64, "pixels loaded into shared memory", _LAST_LAYER)
    launch_us: float = fitted(1.2, "per launch", "H200: one image took 4 us for 36 steps (fp16), 18 for 54 (fp32)")
    step_us: Mapping[int, float] = fitted({1: 0.08, 2: 0.22}, "of a warp's step, by tf32 splits", "H200: the same")
    partial_factor: float = fitted(1.2, "time of storing partial rows; whole ones are stored together", _ESTIMATED)


@dataclass(frozen=True, eq=False)
class LastLayerSm90Costs:
    """conv/last_layer/sm90.py. Clocks of an SM."""

    rows_clocks: float = fitted(16, "to read 64 rows", "128 B of shared memory per clock")
    weights_clocks: float = fitted(2, "to read 8 columns", "128 B of shared memory per clock")
    wgmma_clocks: float = fitted(4, "of 64 rows and 8 columns", _LAST_LAYER_SM90)
    steady_clocks: float = fitted(6, "the same, at the device's sustained rate", _LAST_LAYER_SM90)
    epilogue_clocks: float = fitted(50, "per 8 columns, not hidden by other warpgroups", _LAST_LAYER_SM90)
    tile_instructions: int = fitted(60, "per tile and scheduler; they dominate with few channels", _LAST_LAYER_SM90)
    step_instructions: int = fitted(9, "per step and scheduler", _LAST_LAYER_SM90)
    group_instructions: int = fitted(100, "per 8 columns and scheduler", _LAST_LAYER_SM90)
    busy_tiles: int = fitted(4, "resident next to a patch in flight: with fewer, tensor cores stall", _LAST_LAYER_SM90)
    bytes_per_clock: float = fitted(64, "pixels loaded into shared memory", _LAST_LAYER_SM90)
    launch_clocks: float = fitted(
        3_500, "prologue and last epilogue", "H200: one image took 1.9 us, 100 of `faces` 9.3 instead of 5.3"
    )


# -- recurrent/, attention/, embedding/, pool/, recipes/ -------------------------------------------------------

_LSTM = "H200: LSTM of 128 units, 1 to 16,384 sequences"


@dataclass(frozen=True, eq=False)
class RecurrentMmaCosts:
    step_us: float = fitted(0.5, "fixed, per step", _LSTM)
    shares: Mapping[int, float] = fitted({16: 0.6, 8: 0.33}, "of the tensor cores, gates included, by K per mma", _LSTM)


@dataclass(frozen=True, eq=False)
class RecurrentResidentCosts:
    step_us: Mapping[int, float] = fitted({256: 0.75, 512: 1.1}, "of a step, by threads per block", _LSTM)
    sequence_us: float = fitted(0.23, "per step and sequence of a cluster", _LSTM)


@dataclass(frozen=True, eq=False)
class RecurrentGradResidentCosts(RecurrentResidentCosts):
    """As many FFMAs per step as in the forward kernel, but blocks exchange G values per unit: its times and 0.05 us."""

    step_us: Mapping[int, float] = fitted({256: 0.8, 512: 1.15}, "of a step, by threads per block", _ESTIMATED)
    sequence_us: float = fitted(0.23, "per step and sequence of a cluster", _ESTIMATED)
    cell_us: float = fitted(0.1, "per step, to compute the cells of an LSTM first", _ESTIMATED)


@dataclass(frozen=True, eq=False)
class RecurrentSimtCosts:
    step_us: float = fitted(1.0, "fixed, per step", "H200: LSTM of 128 units, few sequences: 16 us per step")
    bytes_per_us: float = fitted(1.7e4, "recurrent weights read in a step", "H200: the same")
    share: float = fitted(0.57, "of the fp32 rate", "H200: LSTM of 128 units, 4,096 sequences")


@dataclass(frozen=True, eq=False)
class AttentionCosts:
    share: float = fitted(
        0.15, "of the tensor cores' rate, operands from L1", "H200: 4,096 rows of 4 heads of 32 x 16, fp32"
    )


@dataclass(frozen=True, eq=False)
class TokenMaxCosts:
    l2_share: float = fitted(0.25, "of L2's peak bandwidth: table rows at 8.5 TB/s", "h200/sentiment.json")


@dataclass(frozen=True, eq=False)
class ResizeCosts:
    """Shares of the fp32 rate, index arithmetic included. Measured: 4,096 images of 32 channels, 32x32 to 64x64."""

    rows_share: float = fitted(0.04, "NCHW", "H200: 1,040 to 1,407 us")
    channels_last_share: float = fitted(0.1, "NHWC", "H200: 491 to 780 us")


@dataclass(frozen=True, eq=False)
class RecipeCosts:
    """Factors on the fp32 rate. Tables run on the tensor cores of sm_90a, whose rates are 12 times that in 16 bits and
    2.3 times in 3xTF32; the factors are lower."""

    token_tables_factor: float = fitted(0.75, "token_tables", "H200")
    narrow_tables_factor: float = fitted(10.0, "narrow_tables", _ESTIMATED)
    split_tables_factor: float = fitted(2.0, "split_tables", _ESTIMATED)
    merged_weight_factor: float = fitted(0.2, "merged_weight: float64 sums, half where there are fp64 units", "H200")


# -- train/ ----------------------------------------------------------------------------------------------------

_STREAM = "H200: 784-320-160-10, 16 and 32 rows per block, bf16 and fp32, within 10 %"


@dataclass(frozen=True, eq=False)
class TrainTilingCosts:
    """large_batch/tiling.py: a simple model of a Hopper SM, good enough to rank tilings."""

    mma_clocks: float = fitted(1.7, "of an mma", _ESTIMATED)
    chunk_clocks: float = fitted(300, "latency of a warp's next operands", _ESTIMATED)
    launch_clocks: float = fitted(1500, "first loads, split-K sums, last stores", _ESTIMATED)
    block_clocks: float = fitted(300, "per further block", _ESTIMATED)
    split_k_clocks: float = fitted(60, "per block and warp along K", _ESTIMATED)
    l2_bytes_per_clock: float = fitted(48, "from L2, per SM", _ESTIMATED)
    l1_bytes_per_clock: float = fitted(32, "in partial rows", _ESTIMATED)
    shared_bytes_per_clock: float = fitted(128, "from shared memory", _ESTIMATED)
    stage_clocks: float = fitted(120, "barrier and first loads of a stage", _ESTIMATED)
    slice_clocks: float = fitted(60, "per slice in the launch that adds them up, eight at a time", _ESTIMATED)


@dataclass(frozen=True, eq=False)
class TrainStreamCosts:
    bytes_per_clock: float = fitted(28, "weights from L2", _STREAM)
    mma_clocks: float = fitted(4.0, "of an mma of 16 x 8 x 16", _STREAM)
    tile_clocks: float = fitted(8_000, "fixed, per row tile", _STREAM)
    separate_clocks: float = fitted(
        30_000, "without train_stream: train_head, the split of its dz and two more launches", "H200: 1,024 rows"
    )


_LARGE_BATCHES = "h200/digits.json, 1,024 and 4,096 rows; h200/backprop.json"
_HUNDREDS = (
    "h200/digits.json, 256 rows; H200, us per step of fit() on MNIST: 784-1024-10 fp32 29.7 and 52.4 with 200 and 400 "
    "rows, tf32 20.4 and 52.2 with 100 and 512; 784-128-10 fp32 19.8 with 400; 784-512-256-10 fp16 44.3 with 400; "
    "784-56-28-10 bf16 7.9 and 8.5 with 65 and 128; all within 20 %"
)
_BELOW_512 = (
    "H200, us per step of fit() on MNIST: 784-320-160-10 fp32 24 and 38 with 64 and 256 rows, bf16 19 and 29; "
    "784-1024-10 fp32 50.8 and 94.9 with 200 and 400, tf32 27.4 with 100, bf16 25.0 with 128; "
    "784-512-256-10 fp16 49.3 with 400; within 20 %, except 1.3x of bf16 with 64 rows"
)


@dataclass(frozen=True, eq=False)
class TrainLaunchCosts:
    """mlp_train: a step takes the latency of its launches and the time of its flop, in sequence."""

    few_rows_us: float = fitted(2.6, "latency per launch below 512 rows", _BELOW_512)
    us_per_gflop: Mapping[str, float] = fitted(
        {"fp32": 56.0, "tf32": 38.0, "bf16": 25.0, "fp16": 28.0}, "below 512 rows", _BELOW_512
    )
    many_rows_us: Mapping[str, float] = fitted(
        {"fp32": 7.2, "tf32": 4.6, "bf16": 3.8, "fp16": 7.2}, "latency per launch from 512 rows on",
        _LARGE_BATCHES + "; fp16: 784-1024-10 with 512 rows, 67.2 us per step",
    )  # fmt: skip
    shares: Mapping[str, float] = fitted(
        {"fp32": 0.26, "tf32": 0.4, "bf16": 0.26, "fp16": 0.23},
        "of the tensor cores' rate (fp32: of tf32's, 3xTF32 included) from 512 rows on: operands come from L2",
        _LARGE_BATCHES + "; fp16: estimated",
    )  # fmt: skip
    float_us_per_gflop: float = fitted(16.6, "of the first layer of float rows, in addition", _LARGE_BATCHES)


@dataclass(frozen=True, eq=False)
class ThreeLaunchCosts:
    """mlp_train_three_launch. fp16: as tf32, with as many splits."""

    step_us: Mapping[str, float] = fitted(
        {"fp32": 9.3, "tf32": 6.6, "bf16": 3.0, "fp16": 6.6}, "fixed, per step", _HUNDREDS
    )
    first_us_per_gflop: Mapping[str, float] = fitted(
        {"fp32": 28.0, "tf32": 24.0, "bf16": 23.0, "fp16": 24.0}, "of the first layer's flop", _HUNDREDS
    )
    other_us_per_gflop: Mapping[str, float] = fitted(
        {"fp32": 70.0, "tf32": 45.0, "bf16": 55.0, "fp16": 45.0}, "of the other layers' flop, in clusters", _HUNDREDS
    )
    forward_tiles: int = fitted(4, "row tiles that fit in the load latency of the weights", "H200")


@dataclass(frozen=True, eq=False)
class LayerParallelCosts:
    """Steps of 784-320-160-10."""

    layer_us: float = fitted(1.37, "latency, per layer", "h200/digits.json")
    split_us: float = fitted(0.95, "latency, per bf16 split after the first", "h200/digits.json")
    element_us: float = fitted(2.7e-5, "per element that a block receives", "h200/digits.json")
    tile_us: float = fitted(
        0.7, "per further tile of a block and squared splits: register spills",
        "H200, 64 rows, bf16, tf32, fp32: four networks 7.7, 9.5, 16.7 ms per epoch, eight networks 8.8 in bf16",
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class ResidentCosts:
    """Steps of 784-320-160-10."""

    step_us: float = fitted(1.0, "fixed", "H200: 10.2 to 11 us per step with 16 rows, 20 to 23 with 64")
    layer_us: float = fitted(2.1, "per layer", "H200: the same")
    group_us: float = fitted(4.5, "per further group", "H200: 17.7 to 19.6 us per step with two groups of 32 rows")
    element_us: Mapping[str, float] = fitted(
        {"fp32": 8.3e-5, "tf32": 7e-5, "bf16": 6.6e-5, "fp16": 6.6e-5},
        "per element of a row that a block loads", "h200/digits.json",
    )  # fmt: skip


# -- the table of a device -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CudaCosts:
    mma_tile: MmaTileCosts = field(default_factory=MmaTileCosts)
    wgmma_tile: WgmmaTileCosts = field(default_factory=WgmmaTileCosts)
    gemv: GemvCosts = field(default_factory=GemvCosts)
    gemm_simt: GemmSimtCosts = field(default_factory=GemmSimtCosts)
    matmul: MatMulCosts = field(default_factory=MatMulCosts)
    weight_grad: WeightGradCosts = field(default_factory=WeightGradCosts)
    mlp_fused: MlpFusedCosts = field(default_factory=MlpFusedCosts)
    mlp_tensor_core: MlpTensorCoreCosts = field(default_factory=MlpTensorCoreCosts)
    mlp_pair: MlpPairCosts = field(default_factory=MlpPairCosts)
    conv_direct: ConvDirectCosts = field(default_factory=ConvDirectCosts)
    depthwise: DepthwiseCosts = field(default_factory=DepthwiseCosts)
    warp_mma: WarpMmaCosts = field(default_factory=WarpMmaCosts)
    first_layer: FirstLayerCosts = field(default_factory=FirstLayerCosts)
    implicit_gemm: ImplicitGemmCosts = field(default_factory=ImplicitGemmCosts)
    conv_sm90: ConvSm90Costs = field(default_factory=ConvSm90Costs)
    last_layer: LastLayerCosts = field(default_factory=LastLayerCosts)
    last_layer_sm90: LastLayerSm90Costs = field(default_factory=LastLayerSm90Costs)
    recurrent_mma: RecurrentMmaCosts = field(default_factory=RecurrentMmaCosts)
    recurrent_resident: RecurrentResidentCosts = field(default_factory=RecurrentResidentCosts)
    recurrent_grad_resident: RecurrentGradResidentCosts = field(default_factory=RecurrentGradResidentCosts)
    recurrent_simt: RecurrentSimtCosts = field(default_factory=RecurrentSimtCosts)
    attention: AttentionCosts = field(default_factory=AttentionCosts)
    token_max: TokenMaxCosts = field(default_factory=TokenMaxCosts)
    resize: ResizeCosts = field(default_factory=ResizeCosts)
    recipes: RecipeCosts = field(default_factory=RecipeCosts)
    train_tiling: TrainTilingCosts = field(default_factory=TrainTilingCosts)
    train_stream: TrainStreamCosts = field(default_factory=TrainStreamCosts)
    train_launches: TrainLaunchCosts = field(default_factory=TrainLaunchCosts)
    three_launch: ThreeLaunchCosts = field(default_factory=ThreeLaunchCosts)
    layer_parallel: LayerParallelCosts = field(default_factory=LayerParallelCosts)
    resident: ResidentCosts = field(default_factory=ResidentCosts)


H200 = CudaCosts()


def costs_of(device: Device) -> CudaCosts:
    """The table of a device: the H200's for all GPUs, until another is measured."""
    return H200
