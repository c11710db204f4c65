"""The vocabulary. A new layer goes into a file here and into this list; nothing else in spec/ changes."""

from onchip.spec.layers.activation import GELU, Clip, LeakyReLU, LogSoftmax, ReLU, Sigmoid, SiLU, Softmax, Tanh
from onchip.spec.layers.base import LAYERS, Elementwise, Layer
from onchip.spec.layers.cast import Cast
from onchip.spec.layers.combine import Add, Concat, Interleave, Mul
from onchip.spec.layers.conv import (
    Conv1d,
    Conv2d,
    Convolution,
    ConvTranspose1d,
    ConvTranspose2d,
    TransposedConvolution,
)
from onchip.spec.layers.embedding import Embedding, TokenConv
from onchip.spec.layers.linear import Linear
from onchip.spec.layers.norm import BatchNorm1d, BatchNorm2d, GroupNorm, LayerNorm, RMSNorm, RowNorm
from onchip.spec.layers.pixels import ToPixels
from onchip.spec.layers.pool import AvgPool1d, AvgPool2d, GlobalMax, GlobalMean, MaxPool1d, MaxPool2d, SequenceMax
from onchip.spec.layers.resize import LinearResize, NearestResize
from onchip.spec.layers.scan import CumSum
from onchip.spec.layers.select import Gather, Pad, Selection, Slice, Tile
from onchip.spec.layers.shape import Dropout, Identity, Permute, Reshape

__all__ = [
    "GELU", "LAYERS", "Add", "AvgPool1d", "AvgPool2d", "BatchNorm1d", "BatchNorm2d", "Cast", "Clip", "Concat", "Conv1d",
    "Conv2d", "ConvTranspose1d", "ConvTranspose2d", "Convolution", "CumSum", "Dropout", "Elementwise", "Embedding",
    "Gather", "GlobalMax", "GlobalMean", "GroupNorm", "Identity", "Interleave", "Layer", "LayerNorm", "LeakyReLU",
    "Linear", "LinearResize", "LogSoftmax", "MaxPool1d", "MaxPool2d", "Mul", "NearestResize", "Pad", "Permute",
    "RMSNorm", "ReLU", "Reshape", "RowNorm", "Selection", "SequenceMax", "SiLU", "Sigmoid", "Slice", "Softmax", "Tanh",
    "Tile", "ToPixels", "TokenConv", "TransposedConvolution",
]  # fmt: skip
