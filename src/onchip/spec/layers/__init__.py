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
from onchip.spec.layers.norm import BatchNorm1d, BatchNorm2d
from onchip.spec.layers.pixels import ToPixels
from onchip.spec.layers.pool import AvgPool1d, AvgPool2d, GlobalMax, GlobalMean, MaxPool1d, MaxPool2d, SequenceMax
from onchip.spec.layers.recurrent import GRU, LSTM, RNN, Recurrent
from onchip.spec.layers.scan import CumSum
from onchip.spec.layers.shape import Dropout, Identity, Permute, Reshape

__all__ = [
    "GELU", "GRU", "LAYERS", "LSTM", "RNN",
    "Add", "AvgPool1d", "AvgPool2d", "BatchNorm1d", "BatchNorm2d", "Cast", "Clip", "Concat",
    "Conv1d", "Conv2d", "ConvTranspose1d", "ConvTranspose2d", "Convolution", "CumSum", "Dropout", "Elementwise",
    "Embedding", "GlobalMax", "GlobalMean", "Identity", "Interleave", "Layer", "LeakyReLU", "Linear", "LogSoftmax",
    "MaxPool1d", "MaxPool2d", "Mul", "Permute", "ReLU", "Recurrent", "Reshape", "SequenceMax", "SiLU", "Sigmoid",
    "Softmax", "Tanh", "ToPixels", "TokenConv", "TransposedConvolution",
]  # fmt: skip
