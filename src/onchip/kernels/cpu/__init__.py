"""The CPU's kernels, in the order in which the planner queries them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from onchip.kernels.cpu.conv.fused import ConvFusedKernel
from onchip.kernels.cpu.conv.match import conv_begins
from onchip.kernels.cpu.conv.weight_grad import ConvWeightGradKernel
from onchip.kernels.cpu.elementwise.pointwise import PointwiseKernel
from onchip.kernels.cpu.elementwise.rowwise import RowwiseKernel
from onchip.kernels.cpu.embedding.lookup import LookUpKernel
from onchip.kernels.cpu.embedding.token_max import TokenMaxKernel
from onchip.kernels.cpu.gemm.matmul import MatMulKernel
from onchip.kernels.cpu.gemm.weight_grad import WeightGradKernel
from onchip.kernels.cpu.gradient.batch_norm_grad import BatchNormGradKernel
from onchip.kernels.cpu.gradient.dropout import DropoutKernel
from onchip.kernels.cpu.gradient.embedding_grad import EmbeddingGradKernel
from onchip.kernels.cpu.gradient.extreme_grad import ExtremeGradKernel
from onchip.kernels.cpu.gradient.loss import LossKernel
from onchip.kernels.cpu.gradient.norm_grad import NormGradKernel
from onchip.kernels.cpu.gradient.pool_grad import PoolGradKernel
from onchip.kernels.cpu.gradient.softmax_grad import SoftmaxGradKernel
from onchip.kernels.cpu.gradient.step_counters import StepCountersKernel
from onchip.kernels.cpu.gradient.step_rows import StepRowsKernel
from onchip.kernels.cpu.gradient.update import UpdateKernel
from onchip.kernels.cpu.kernel import CpuKernel
from onchip.kernels.cpu.layout.move import MoveKernel
from onchip.kernels.cpu.layout.resize import ResizeKernel
from onchip.kernels.cpu.layout.select import SelectKernel
from onchip.kernels.cpu.layout.taps import TapsKernel
from onchip.kernels.cpu.mlp.fused import MlpFusedKernel
from onchip.kernels.cpu.plain import PlainKernel
from onchip.kernels.cpu.recurrent.gradient import RecurrentGradKernel
from onchip.kernels.cpu.recurrent.recurrent import RecurrentKernel
from onchip.kernels.cpu.reduction.batch_sums import BatchSumsKernel
from onchip.kernels.cpu.reduction.norm import NormKernel
from onchip.kernels.cpu.reduction.reduce import ReduceKernel
from onchip.kernels.cpu.reduction.sequence_max import SequenceMaxKernel
from onchip.kernels.cpu.reduction.top_k import TopKKernel
from onchip.kernels.cpu.scan.scan import ScanKernel
from onchip.kernels.cpu.scan.short_scan import ShortScanKernel
from onchip.kernels.cpu.threading.launches import Launch
from onchip.kernels.cpu.train.mlp import MlpTrainKernel
from onchip.kernels.training import BatchRanks, Epochs, LaunchTime, Trained
from onchip.kernels.view import ViewKernel
from onchip.network.recipe import Array
from onchip.network.training import TrainingStep
from onchip.plan.kernel import Claim, Kernel


class InferenceKernel(Kernel, Protocol):
    def bind(self, claim: Claim, weights: dict[str, Array]) -> Launch:
        """The function that runs a claim; `weights` are the claim's recipes, evaluated.

        In a network with state, the elements of a weight that changes (Network.changes) change between launches.
        """
        ...


class TrainingSteps(Protocol):
    """Whole training steps of one network over rows: its weights and its optimiser state."""

    def train(self, epochs: Epochs) -> Trained: ...
    def evaluate(self, order: Array) -> tuple[float, int]:
        """The loss of the rows `order` of x as one batch, and the number of correct predictions."""
        ...

    def weights(self) -> dict[str, Array]:
        """The weights, with the network's names and shapes."""
        ...

    def moments(self) -> dict[str, Array]:
        """The optimiser state as '<kind>:<weight>'."""
        ...

    def write(self, weights: Mapping[str, Array], state: Mapping[str, Array]) -> None: ...
    def time_steps(self) -> None:
        """Record the phases of some of the next steps."""
        ...

    def launch_times(self, name: str) -> tuple[LaunchTime, ...]:
        """The recorded steps, as a kernel of this name."""
        ...


class TrainingKernel(Kernel, Protocol):
    def queue_steps(self) -> None:
        """Queue the functions that all kinds of steps call."""
        ...

    def bind_steps(
        self, claim: Claim, training: TrainingStep, batch: int, weights: dict[str, Array], x: Array, y: Array,
        row_weights: Array | None, threads: int | None, ranks: BatchRanks | None = None,
    ) -> TrainingSteps:  # fmt: skip
        """Steps over rows x (n, D_in) with targets y; `weights` are the claim's recipes, evaluated: trained in place.

        threads  None: the calling thread, so that several runs can train concurrently
        ranks    those that share every batch
        """
        ...


INFERENCE: tuple[InferenceKernel, ...] = (
    MlpFusedKernel(), ConvFusedKernel(), TokenMaxKernel(), RecurrentKernel(), RecurrentGradKernel(),
    PointwiseKernel(ends_before=conv_begins), RowwiseKernel(), ReduceKernel(), TopKKernel(), NormKernel(),
    SelectKernel(), ResizeKernel(), TapsKernel(), LookUpKernel(), MatMulKernel(), MoveKernel(), SequenceMaxKernel(),
    ShortScanKernel(), ScanKernel(), WeightGradKernel(), ConvWeightGradKernel(), BatchNormGradKernel(),
    BatchSumsKernel(), PoolGradKernel(), ExtremeGradKernel(), NormGradKernel(), SoftmaxGradKernel(),
    EmbeddingGradKernel(), DropoutKernel(), LossKernel(), UpdateKernel(), StepRowsKernel(), StepCountersKernel(),
    PlainKernel(),
)  # fmt: skip
TRAINING: tuple[TrainingKernel, ...] = (MlpTrainKernel(),)
KERNELS: tuple[Kernel, ...] = (*TRAINING, ViewKernel("cpu", CpuKernel.precisions), *INFERENCE)
