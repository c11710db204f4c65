"""The CPU's kernels, in the order in which the planner asks them."""

from onchip.kernels.cpu.mlp_fused import MlpFused
from onchip.kernels.cpu.mlp_train import MlpTrain
from onchip.kernels.cpu.rowwise import Rowwise

KERNELS = (MlpTrain(), MlpFused(), Rowwise())
