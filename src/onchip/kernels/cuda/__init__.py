"""CUDA's kernels, in the order in which the planner asks them. Nothing here needs a GPU."""

from onchip.kernels.cuda.cast import CastAlone
from onchip.kernels.cuda.conv import ConvAlone
from onchip.kernels.cuda.mlp_fused import MlpFused
from onchip.kernels.cuda.mlp_tensor import MlpTensor
from onchip.kernels.cuda.permute import PermuteAlone
from onchip.kernels.cuda.scan import ScanAlone
from onchip.kernels.cuda.weave import WeaveAlone
from onchip.plan.kernel import Kernel

KERNELS: tuple[Kernel, ...] = (
    MlpTensor(), MlpFused(), CastAlone(), ConvAlone(), PermuteAlone(), WeaveAlone(), ScanAlone(),
)  # fmt: skip
