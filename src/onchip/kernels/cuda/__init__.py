"""CUDA kernels, in the order in which the planner queries them. Nothing here needs a GPU."""

from onchip.kernels.cuda.attention.fused import AttentionFusedKernel
from onchip.kernels.cuda.common.kernel import CudaKernel
from onchip.kernels.cuda.conv.depthwise import DepthwiseKernel
from onchip.kernels.cuda.conv.direct import ConvDirectKernel
from onchip.kernels.cuda.conv.first_layer import ConvFirstLayerKernel
from onchip.kernels.cuda.conv.gather import ConvGatherKernel
from onchip.kernels.cuda.conv.implicit_gemm import ConvImplicitGemmKernel
from onchip.kernels.cuda.conv.last_layer.mma import ConvLastLayerKernel
from onchip.kernels.cuda.conv.last_layer.sm90 import ConvLastLayerSm90Kernel
from onchip.kernels.cuda.conv.sm90 import ConvSm90Kernel
from onchip.kernels.cuda.elementwise.pointwise import PointwiseKernel
from onchip.kernels.cuda.embedding.gather import GatherKernel
from onchip.kernels.cuda.embedding.lookups import LookupsKernel
from onchip.kernels.cuda.embedding.token_max import TokenMaxKernel
from onchip.kernels.cuda.gemm.batched import MatMulKernel
from onchip.kernels.cuda.gemm.batched_mma import MatMulMmaKernel
from onchip.kernels.cuda.gemm.gemv import GemvKernel
from onchip.kernels.cuda.gemm.mma import GemmMmaKernel
from onchip.kernels.cuda.gemm.simt import GemmSimtKernel
from onchip.kernels.cuda.gemm.sm90 import GemmSm90Kernel
from onchip.kernels.cuda.gradient.batch_norm import BatchNormKernel
from onchip.kernels.cuda.gradient.batch_norm_grad import BatchNormGradKernel
from onchip.kernels.cuda.gradient.batch_sum import BatchSumKernel
from onchip.kernels.cuda.gradient.clip import ClipKernel
from onchip.kernels.cuda.gradient.dropout import DropoutKernel
from onchip.kernels.cuda.gradient.embedding import EmbeddingGradKernel
from onchip.kernels.cuda.gradient.extreme_grad import ExtremeGradKernel
from onchip.kernels.cuda.gradient.loss import LossKernel
from onchip.kernels.cuda.gradient.norm_grad import NormGradKernel
from onchip.kernels.cuda.gradient.pool_grad import PoolGradKernel
from onchip.kernels.cuda.gradient.select_grad import SelectGradKernel
from onchip.kernels.cuda.gradient.softmax_grad import SoftmaxGradKernel
from onchip.kernels.cuda.gradient.step_counters import StepCountersKernel
from onchip.kernels.cuda.gradient.step_rows import StepRowsKernel
from onchip.kernels.cuda.gradient.update import UpdateKernel
from onchip.kernels.cuda.gradient.weight_grad import WeightGradKernel
from onchip.kernels.cuda.gradient.weight_grad_mma import WeightGradMmaKernel
from onchip.kernels.cuda.layout.concat import ConcatKernel
from onchip.kernels.cuda.layout.permute import PermuteKernel
from onchip.kernels.cuda.layout.select import SelectKernel
from onchip.kernels.cuda.mlp.fused import MlpFusedKernel
from onchip.kernels.cuda.mlp.pair import MlpPairKernel
from onchip.kernels.cuda.mlp.tensor_core import MlpTensorCoreKernel, fits_in_block
from onchip.kernels.cuda.pool.pool import PoolKernel
from onchip.kernels.cuda.pool.resize import ResizeKernel
from onchip.kernels.cuda.recipes.recipes import RecipeKernel
from onchip.kernels.cuda.recurrent.gradient import RecurrentGradKernel
from onchip.kernels.cuda.recurrent.gradient_resident import RecurrentGradResidentKernel
from onchip.kernels.cuda.recurrent.mma import RecurrentMmaKernel
from onchip.kernels.cuda.recurrent.register_resident import RecurrentRegisterResidentKernel
from onchip.kernels.cuda.recurrent.simt import RecurrentKernel
from onchip.kernels.cuda.reduction.arg_reduce import ArgReduceKernel
from onchip.kernels.cuda.reduction.norm import NormKernel
from onchip.kernels.cuda.reduction.reduce import ReduceKernel
from onchip.kernels.cuda.reduction.sequence_max import SequenceMaxKernel
from onchip.kernels.cuda.reduction.top_k import TopKKernel
from onchip.kernels.cuda.reduction.top_k_grad import TopKGradKernel
from onchip.kernels.cuda.scan.scan import ScanKernel
from onchip.kernels.cuda.train.large_batch.launches import MlpTrainKernel
from onchip.kernels.cuda.train.large_batch.three_launch import MlpTrainThreeLaunchKernel
from onchip.kernels.cuda.train.layer_parallel.layer_parallel import MlpTrainLayerParallelKernel
from onchip.kernels.cuda.train.resident.resident import MlpTrainResidentKernel
from onchip.kernels.view import ViewKernel
from onchip.plan.kernel import Kernel

KERNELS: tuple[Kernel, ...] = (
    MlpTrainLayerParallelKernel(), MlpTrainResidentKernel(), MlpTrainThreeLaunchKernel(), MlpTrainKernel(),
    ViewKernel("cuda", CudaKernel.precisions),
    MlpTensorCoreKernel(), MlpFusedKernel(), MlpPairKernel(),
    GemmSm90Kernel(fits_in_block), GemvKernel(), GemmMmaKernel(fits_in_block), GemmSimtKernel(fits_in_block),
    DepthwiseKernel(), ConvSm90Kernel(), ConvImplicitGemmKernel(), ConvFirstLayerKernel(), ConvLastLayerKernel(),
    ConvLastLayerSm90Kernel(), ConvDirectKernel(),
    PointwiseKernel(), PermuteKernel(), ConcatKernel(), PoolKernel(), ReduceKernel(), ScanKernel(), SequenceMaxKernel(),
    TokenMaxKernel(), ConvGatherKernel(), LookupsKernel(), GatherKernel(),
    RecurrentRegisterResidentKernel(), RecurrentMmaKernel(), RecurrentKernel(),
    RecurrentGradResidentKernel(), RecurrentGradKernel(),
    AttentionFusedKernel(), MatMulMmaKernel(), MatMulKernel(),
    ClipKernel(), LossKernel(), WeightGradMmaKernel(), WeightGradKernel(), BatchSumKernel(), UpdateKernel(),
    ArgReduceKernel(), TopKKernel(), NormKernel(), SelectKernel(), ResizeKernel(), RecipeKernel(),
    EmbeddingGradKernel(),
    BatchNormKernel(), BatchNormGradKernel(), PoolGradKernel(), DropoutKernel(),
    NormGradKernel(), SoftmaxGradKernel(), ExtremeGradKernel(), SelectGradKernel(), TopKGradKernel(),
    StepRowsKernel(), StepCountersKernel(),
)  # fmt: skip
