"""CUDA kernels, in the order in which the planner queries them. Nothing here needs a GPU."""

from onchip.kernels.cuda.attention.fused import AttentionFused
from onchip.kernels.cuda.conv.depthwise import DepthwiseAlone
from onchip.kernels.cuda.conv.direct import ConvAlone
from onchip.kernels.cuda.conv.first_layer import ConvFirst
from onchip.kernels.cuda.conv.gather import ProductGather
from onchip.kernels.cuda.conv.implicit_gemm import ProductWindows
from onchip.kernels.cuda.conv.last_layer.mma import ConvLast
from onchip.kernels.cuda.conv.last_layer.sm90 import ConvLastWgmma
from onchip.kernels.cuda.conv.sm90 import ConvWgmma
from onchip.kernels.cuda.elementwise.pointwise import Pointwise
from onchip.kernels.cuda.embedding.gather import Gather
from onchip.kernels.cuda.embedding.lookups import Lookups
from onchip.kernels.cuda.embedding.token_max import TokenMax
from onchip.kernels.cuda.gemm.batched import MatMulAlone
from onchip.kernels.cuda.gemm.batched_mma import MatMulMma
from onchip.kernels.cuda.gemm.gemv import ProductFew
from onchip.kernels.cuda.gemm.mma import ProductMma
from onchip.kernels.cuda.gemm.simt import ProductAlone
from onchip.kernels.cuda.gemm.sm90 import ProductWgmma
from onchip.kernels.cuda.layout.concat import WeaveAlone
from onchip.kernels.cuda.layout.permute import PermuteAlone
from onchip.kernels.cuda.layout.select import SelectAlone
from onchip.kernels.cuda.mlp.fused import MlpFused
from onchip.kernels.cuda.mlp.pair import MlpPair
from onchip.kernels.cuda.mlp.tensor_core import MlpTensor
from onchip.kernels.cuda.pool.pool import PoolAlone
from onchip.kernels.cuda.pool.resize import ResizeAlone
from onchip.kernels.cuda.recurrent.mma import RecurrentMma
from onchip.kernels.cuda.recurrent.register_resident import RecurrentHeld
from onchip.kernels.cuda.recurrent.simt import RecurrentAlone
from onchip.kernels.cuda.reduction.arg_reduce import ArgumentAlone
from onchip.kernels.cuda.reduction.norm import NormAlone
from onchip.kernels.cuda.reduction.reduce import ReduceAlone
from onchip.kernels.cuda.reduction.sequence_max import SequenceMaxAlone
from onchip.kernels.cuda.reduction.top_k import TopKAlone
from onchip.kernels.cuda.scan.scan import ScanAlone
from onchip.kernels.cuda.train.large_batch.launches import MlpTrain
from onchip.kernels.cuda.train.large_batch.three_launch import MlpTrainThree
from onchip.kernels.cuda.train.layer_parallel.layer_parallel import MlpByLayers
from onchip.kernels.cuda.train.resident.resident import MlpResident
from onchip.kernels.view import View
from onchip.plan.kernel import Kernel

KERNELS: tuple[Kernel, ...] = (
    MlpByLayers(), MlpResident(), MlpTrainThree(), MlpTrain(),
    View("cuda"), MlpTensor(), MlpFused(), MlpPair(), ProductWgmma(), ProductFew(), ProductMma(), ProductAlone(),
    DepthwiseAlone(), ConvWgmma(), ProductWindows(), ConvFirst(), ConvLast(), ConvLastWgmma(), ConvAlone(),
    Pointwise(), PermuteAlone(), WeaveAlone(), PoolAlone(), ReduceAlone(), ScanAlone(), SequenceMaxAlone(), TokenMax(),
    ProductGather(), Lookups(), Gather(), RecurrentHeld(), RecurrentMma(), RecurrentAlone(), AttentionFused(),
    MatMulMma(), MatMulAlone(), ArgumentAlone(), TopKAlone(), NormAlone(), SelectAlone(), ResizeAlone(),
)  # fmt: skip
