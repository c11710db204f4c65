"""CUDA kernels, in the order in which the planner queries them. Nothing here needs a GPU."""

from onchip.kernels.cuda.attention.fused import AttentionFused
from onchip.kernels.cuda.common.kernel import CudaKernel
from onchip.kernels.cuda.conv.depthwise import DepthwiseKernel
from onchip.kernels.cuda.conv.direct import ConvDirect
from onchip.kernels.cuda.conv.first_layer import ConvFirstLayer
from onchip.kernels.cuda.conv.gather import ConvGather
from onchip.kernels.cuda.conv.implicit_gemm import ConvImplicitGemm
from onchip.kernels.cuda.conv.last_layer.mma import ConvLastLayer
from onchip.kernels.cuda.conv.last_layer.sm90 import ConvLastLayerSm90
from onchip.kernels.cuda.conv.sm90 import ConvSm90
from onchip.kernels.cuda.elementwise.pointwise import PointwiseKernel
from onchip.kernels.cuda.embedding.gather import GatherKernel
from onchip.kernels.cuda.embedding.lookups import LookupsKernel
from onchip.kernels.cuda.embedding.token_max import TokenMaxKernel
from onchip.kernels.cuda.gemm.batched import MatMulKernel
from onchip.kernels.cuda.gemm.batched_mma import MatMulMma
from onchip.kernels.cuda.gemm.gemv import GemvKernel
from onchip.kernels.cuda.gemm.mma import GemmMma
from onchip.kernels.cuda.gemm.simt import GemmSimt
from onchip.kernels.cuda.gemm.sm90 import GemmSm90
from onchip.kernels.cuda.layout.concat import ConcatKernel
from onchip.kernels.cuda.layout.permute import PermuteKernel
from onchip.kernels.cuda.layout.select import SelectKernel
from onchip.kernels.cuda.mlp.fused import MlpFused
from onchip.kernels.cuda.mlp.pair import MlpPair
from onchip.kernels.cuda.mlp.tensor_core import MlpTensorCore, fits_in_block
from onchip.kernels.cuda.pool.pool import PoolKernel
from onchip.kernels.cuda.pool.resize import ResizeKernel
from onchip.kernels.cuda.recipes.recipes import RecipeKernels
from onchip.kernels.cuda.recurrent.mma import RecurrentMma
from onchip.kernels.cuda.recurrent.register_resident import RecurrentRegisterResident
from onchip.kernels.cuda.recurrent.simt import RecurrentKernel
from onchip.kernels.cuda.reduction.arg_reduce import ArgReduceKernel
from onchip.kernels.cuda.reduction.norm import NormKernel
from onchip.kernels.cuda.reduction.reduce import ReduceKernel
from onchip.kernels.cuda.reduction.sequence_max import SequenceMaxKernel
from onchip.kernels.cuda.reduction.top_k import TopKKernel
from onchip.kernels.cuda.scan.scan import ScanKernel
from onchip.kernels.cuda.train.large_batch.launches import MlpTrainKernel
from onchip.kernels.cuda.train.large_batch.three_launch import MlpTrainThreeLaunchKernel
from onchip.kernels.cuda.train.layer_parallel.layer_parallel import MlpTrainLayerParallelKernel
from onchip.kernels.cuda.train.resident.resident import MlpTrainResidentKernel
from onchip.kernels.view import View
from onchip.plan.kernel import Kernel

KERNELS: tuple[Kernel, ...] = (
    MlpTrainLayerParallelKernel(), MlpTrainResidentKernel(), MlpTrainThreeLaunchKernel(), MlpTrainKernel(),
    View("cuda", CudaKernel.precisions),
    MlpTensorCore(), MlpFused(), MlpPair(),
    GemmSm90(fits_in_block), GemvKernel(), GemmMma(fits_in_block), GemmSimt(fits_in_block),
    DepthwiseKernel(), ConvSm90(), ConvImplicitGemm(), ConvFirstLayer(), ConvLastLayer(),
    ConvLastLayerSm90(), ConvDirect(),
    PointwiseKernel(), PermuteKernel(), ConcatKernel(), PoolKernel(), ReduceKernel(), ScanKernel(), SequenceMaxKernel(),
    TokenMaxKernel(), ConvGather(), LookupsKernel(), GatherKernel(),
    RecurrentRegisterResident(), RecurrentMma(), RecurrentKernel(),
    AttentionFused(), MatMulMma(), MatMulKernel(),
    ArgReduceKernel(), TopKKernel(), NormKernel(), SelectKernel(), ResizeKernel(), RecipeKernels(),
)  # fmt: skip
