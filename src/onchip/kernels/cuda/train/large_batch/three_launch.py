"""Host side of pixels.cu and cluster.cu: three launches per training step of some hundred rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from onchip.kernels.chain import Chain
from onchip.kernels.cuda.common.arguments import State, Struct, UInt32
from onchip.kernels.cuda.common.costs import costs_of
from onchip.kernels.cuda.common.precision import round_up
from onchip.kernels.cuda.common.program import Budget, Instance, KernelLaunch, LaunchConfig, Program, Steps
from onchip.kernels.cuda.train.kernel import TrainKernel, step_instance
from onchip.kernels.cuda.train.large_batch.bytes import ByteRows
from onchip.kernels.cuda.train.large_batch.launches import DIGITS, THREADS, LargeBatchLowering
from onchip.kernels.cuda.train.large_batch.rows import MAX_OUTPUTS, MAX_WIDTHS
from onchip.kernels.cuda.train.large_batch.structs import TALLY, SplitWeights
from onchip.kernels.cuda.train.layer import find_layers, layer_specs
from onchip.network.training import LOSSES, OPTIMISERS, TrainingStep
from onchip.plan.device import Device
from onchip.plan.kernel import Job

ARCHITECTURES = ("sm_90a",)
PIXELS_SOURCE = Path(__file__).parent / "pixels.cu"
CLUSTER_SOURCE = Path(__file__).parent / "cluster.cu"
CLUSTER, CLUSTER_ROWS = 8, 16  # blocks per cluster; rows per tile
MAX_CLUSTERS = 32  # per launch: two blocks per SM
STAGE_K = 64  # K elements per stage of split weights
MAX_ROW_TILES, FORWARD_UNITS = 4, 16  # of a forward block: tiles of 16 rows; columns
MAX_FORWARD_BYTES = 112 << 10  # shared memory: two blocks per SM
UNITS, BYTE_FEATURES, FLOAT_FEATURES = 32, 64, 32  # of a dW tile
MIN_BATCH, MAX_BATCH = 65, 512  # rows: measured with 128, 256 and 512; mlp_train was faster with 1,024
_TILE_BYTES = UNITS * BYTE_FEATURES * 4
_BUDGET = Budget(registers=128, spill_bytes=8)
_UPDATE_BUDGET = Budget(registers=128, spill_bytes=96)  # accumulators, while the next rows load


@dataclass(frozen=True)
class ThreeLaunchLowering(LargeBatchLowering):
    """Launches of a step: pixels_forward, train_cluster, pixels_update. Memory as for mlp_train, and in addition:

    split_weights (SPLITS, N, stride) bf16: of the first layer
    """

    @cached_property
    def byte_rows(self) -> ByteRows:
        layer = self.layers[0]
        return ByteRows(layer.terms, layer.N, self.training.byte_scale, self.precision, self.device.units)

    @property
    def rows_pass(self) -> None:
        return None

    def slices(self, layer: int) -> int:
        return 0

    @property
    def order(self) -> str:
        return (
            f"{self.byte_rows.splits} bf16 splits, K steps of 16 (first layer: {STAGE_K}), split-K over warps; "
            "gradients over rows in steps of 16, split-K over 8 warps"
        )

    @property
    def why(self) -> str:
        rows = f"{CLUSTER} blocks run {CLUSTER_ROWS} rows through all layers after the first; uint8 rows"
        return f"{self.launches_per_step} launches per step, many steps per graph; {rows}"

    @property
    def launches_per_step(self) -> int:
        return 3

    def _us(self, launches: int, first: int, others: int) -> float:
        costs, precision = costs_of(self.device).three_launch, self.precision
        us = first * costs.first_us_per_gflop[precision] + others * costs.other_us_per_gflop[precision]
        return costs.step_us[precision] * launches / self.launches_per_step + 1e-9 * self.batch * us

    @property
    def fast_bytes(self) -> int:
        return self.cluster_bytes

    @property
    def split_stride(self) -> int:
        return round_up(self.layers[0].terms, STAGE_K)

    def extra_memory(self) -> Mapping[str, int]:
        return {"split_weights": 2 * self.byte_rows.splits * self.layers[0].N * self.split_stride}

    # -- launches --------------------------------------------------------------------------------------------------

    def steps(self, count: int) -> Steps:
        """`count` training steps, after the split of the first weights, and the step counter."""
        launches = [launch for number in range(count) for launch in self._step(number)]
        return Steps((self._pixels_split(), *launches, self._advance(count)))

    def _step(self, number: int) -> list[KernelLaunch]:
        step = self._step_struct(number, self.batch)
        return [self._pixels_forward(step), self._cluster(step), self._pixels_update(step)]

    def _pixels(self) -> Struct:
        layer, rows = self.layers[0], self.byte_rows
        return SplitWeights.of(
            x=State("bytes"), splits=State("split_weights"), x_stride=rows.stride, stride=self.split_stride, N=layer.N,
            K=layer.terms, scale=rows.scale,
        )  # fmt: skip

    def _pixels_split(self) -> KernelLaunch:
        layer = self.layers[0]
        program = Program(PIXELS_SOURCE, f"pixels_split<{self.byte_rows.splits}>")
        blocks = -(-layer.N * -(-layer.terms // 4) // THREADS)
        arguments = self._step_struct(0, self.batch), State("w0"), self._pixels(), UInt32(layer.stride)
        return self._launch(program, blocks, _BUDGET, 0, *arguments)

    @cached_property
    def row_tiles(self) -> int:
        """Tiles of 16 rows per forward block: as few waves as possible, then few rows."""
        across, start = -(-self.layers[0].N // FORWARD_UNITS), costs_of(self.device).three_launch.forward_tiles

        def clocks(tiles: int) -> tuple[int, int]:
            blocks = -(-self.batch // (16 * tiles)) * across
            return -(-blocks // self.device.units) * (tiles + start), -tiles

        return min((n for n in range(1, MAX_ROW_TILES + 1) if self.forward_bytes(n) <= MAX_FORWARD_BYTES), key=clocks)

    def forward_bytes(self, tiles: int) -> int:
        """Shared memory: rows, padded by 64 B if they would start in the same bank, or the warps' sums."""
        pitch = self.split_stride + (0 if self.split_stride % 128 else 64)
        return 16 * tiles * max(pitch, 8 * FORWARD_UNITS * 4)

    def _pixels_forward(self, step: Struct) -> KernelLaunch:
        layer, tiles = self.layers[0], self.row_tiles
        code, slope = layer.activation
        program = Program(PIXELS_SOURCE, f"pixels_forward<{self.byte_rows.splits}, {tiles}, {code}>")
        blocks = -(-self.batch // (16 * tiles)) * -(-layer.N // FORWARD_UNITS)
        sizes = UInt32(self.width(0)), UInt32(slope)
        arguments, shared = (step, self._pixels(), State("a0"), *sizes), self.forward_bytes(tiles)
        return self._launch(program, blocks, _BUDGET, shared, *arguments, row_flop=self._flop(1, [0]))

    @cached_property
    def cluster_bytes(self) -> int:
        """SharedLayout::bytes of train/large_batch/cluster.cu."""
        widths = [layer.N for layer in self.layers]
        last = len(widths) - 1
        pitches = [_pitch(width + (at < last)) for at, width in enumerate(widths)]
        owned = [-(-_tiles(width) // CLUSTER) for width in widths[:-1]] + [_tiles(widths[-1])]
        floats, most = CLUSTER_ROWS * sum(pitches), 0
        for at in range(1, last + 1):
            back_tiles = _tiles(widths[at - 1]) if at == last > 1 else owned[at - 1]
            floats += (round_up(widths[last], 16) if at == last else 8 * owned[at]) * pitches[at - 1]
            if at < last:
                floats += round_up(widths[at], 16) * _tile_pitch(owned[at - 1])
            most = max(most, _partial_floats(widths[at - 1] + 1, owned[at]), _partial_floats(widths[at], back_tiles))
        return 4 * (floats + most)

    def _cluster(self, step: Struct) -> KernelLaunch:
        program = Program(
            CLUSTER_SOURCE,
            f"train_cluster<{self.byte_rows.splits}, {LOSSES.index(self.training.loss)}, {layer_specs(self.layers)}>",
        )
        clusters = min(-(-self.batch // CLUSTER_ROWS), MAX_CLUSTERS)
        config = LaunchConfig(
            (clusters * CLUSTER, self.networks, 1), (THREADS, 1, 1), self.cluster_bytes, overlaps=True, cluster=CLUSTER
        )
        flop = self._flop(2, range(1, len(self.layers)))
        return KernelLaunch(program, config, (step, self._row_layers()), _BUDGET, row_flop=flop)

    def _pixels_update(self, step: Struct) -> KernelLaunch:
        indices = range(len(self.layers))
        across = [-(-layer.terms // (FLOAT_FEATURES if i else BYTE_FEATURES)) for i, layer in enumerate(self.layers)]
        blocks = [count * -(-layer.N // UNITS) for count, layer in zip(across, self.layers, strict=True)]
        layers = self._layers(indices, blocks, across)
        moments = OPTIMISERS[self.training.optimiser]
        program = Program(PIXELS_SOURCE, f"pixels_update<{self.byte_rows.splits}, {moments}>")
        shared = _TILE_BYTES * (8 + 1 + moments)  # sums of 8 warps; weights and moments
        arguments, flop = (step, layers, self._pixels(), TALLY), self._flop(1, indices)
        return self._launch(program, 1 + sum(blocks), _UPDATE_BUDGET, shared, *arguments, row_flop=flop)


def _tiles(width: int) -> int:
    return -(-width // 8)


def _pitch(width: int) -> int:
    """pitch_of of train/large_batch/cluster.cu; the next two: its tile_pitch and ClusterGemm::FLOATS."""
    return round_up(width, 16) + 4


def _tile_pitch(tiles: int) -> int:
    return round_up(8 * tiles - 8, 16) + 8


def _partial_floats(K: int, tiles: int) -> int:
    steps = -(-K // 16)
    return (8 if steps >= 16 and tiles <= 2 else 4 if steps >= 4 else steps) * CLUSTER_ROWS * _tile_pitch(tiles)


def make_lowering(
    chain: Chain, training: TrainingStep, precision: str, batch: int, device: Device
) -> ThreeLaunchLowering | str:
    """Returns the lowering, or the reason for a refusal."""
    layers = find_layers(chain)
    if not training.byte_scale:
        return "only uint8 rows: integers below 256 times a scale"
    if training.clip_norm:
        return "no gradient clipping"
    if not 2 <= len(layers) <= MAX_WIDTHS:
        return f"2 to {MAX_WIDTHS} layers, got {len(layers)}"
    if layers[-1].N > MAX_OUTPUTS:
        return f"at most {MAX_OUTPUTS} outputs, got {layers[-1].N}"
    if not MIN_BATCH <= batch <= MAX_BATCH:
        return f"batches of {MIN_BATCH:,} to {MAX_BATCH:,} rows, got {batch:,}"
    lowering = ThreeLaunchLowering(layers, training, precision, batch, device)
    if lowering.forward_bytes(1) > MAX_FORWARD_BYTES:
        return f"rows of at most {MAX_FORWARD_BYTES // 16:,} bytes, got {layers[0].terms:,}"
    if lowering.cluster_bytes > device.fast_bytes:
        return f"does not fit: {lowering.cluster_bytes:,} B of shared memory, a block has {device.fast_bytes:,} B"
    return lowering


class MlpTrainThreeLaunchKernel(TrainKernel):
    name = "mlp_train_three_launch"
    architectures = ARCHITECTURES
    make_lowering = staticmethod(make_lowering)


def _instance(kernel: str, precision: str, batch: int, *widths: int) -> Instance:
    step = TrainingStep("cross_entropy", byte_scale=1 / 255), Job(precision, batch)
    return step_instance(f"{kernel} {precision}, {batch:,} rows", make_lowering, step, widths, kernel=kernel)


INSTANCES = (
    *(
        _instance(kernel, precision, 256, *DIGITS)
        for precision in ("fp32", "tf32", "bf16")
        for kernel in ("pixels_forward", "train_cluster", "pixels_update")
    ),
    _instance("pixels_split", "fp32", 256, *DIGITS),
    _instance("pixels_forward", "fp32", 144, *DIGITS),
    _instance("train_cluster", "fp32", 150, 20, 53, 29, 17, 5),
)
