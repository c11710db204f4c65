"""All layers. A new layer goes into a file here and into this list; nothing else in network/ changes."""

from onchip.network.layers.activation import (
    ELU,
    GELU,
    SELU,
    Clip,
    HardSigmoid,
    HardSwish,
    LeakyReLU,
    LogSoftmax,
    Mish,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Softsign,
    Tanh,
)
from onchip.network.layers.argument import ArgMax, ArgMin, ArgTopK, TopK
from onchip.network.layers.base import LAYERS, STEP_LAYERS, Activation, Elementwise, Layer, StepLayer
from onchip.network.layers.batch import BatchMean, BatchNormGrad, BatchVariance, DropoutMask
from onchip.network.layers.cast import Cast, ToInts
from onchip.network.layers.combine import (
    Add,
    Broadcast,
    Comparison,
    Concat,
    Div,
    Equal,
    Greater,
    GreaterOrEqual,
    Interleave,
    Mask,
    Max,
    Min,
    Mod,
    Mul,
    Ordered,
    Pow,
    PReLU,
    Sub,
)
from onchip.network.layers.conv import (
    Conv1d,
    Conv2d,
    Convolution,
    ConvTranspose1d,
    ConvTranspose2d,
    TransposedConvolution,
)
from onchip.network.layers.dataset import Counted, DataRows, Logged, RowIds, StepRow
from onchip.network.layers.embedding import Embedding, TokenConv
from onchip.network.layers.function import (
    Abs,
    Atan,
    Ceil,
    Cos,
    Erf,
    Exp,
    Floor,
    Log,
    Reciprocal,
    Round,
    Sign,
    Sin,
    Sqrt,
)
from onchip.network.layers.linear import Linear
from onchip.network.layers.matmul import MatMul
from onchip.network.layers.norm import BatchNorm1d, BatchNorm2d, GroupNorm, LayerNorm, RMSNorm, RowNorm
from onchip.network.layers.optimiser import (
    AdamStep,
    ClipScale,
    Decayed,
    Descent,
    FirstMoment,
    NesterovDescent,
    RunningAverage,
    SecondMoment,
    Velocity,
)
from onchip.network.layers.pixels import ToPixels
from onchip.network.layers.pool import (
    AvgPool1d,
    AvgPool2d,
    GlobalMax,
    GlobalMean,
    GlobalMin,
    GlobalNorm,
    GlobalSum,
    MaxPool1d,
    MaxPool2d,
    SequenceMax,
)
from onchip.network.layers.recurrent import GRU, LSTM, RNN, Recurrent, RecurrentGrad
from onchip.network.layers.resize import LinearResize, NearestResize
from onchip.network.layers.scan import CumSum
from onchip.network.layers.select import Gather, Pad, Selection, Slice, Tile
from onchip.network.layers.shape import Dropout, Identity, Permute, Reshape
from onchip.network.layers.training import (
    AbsoluteError,
    BatchSum,
    BinaryCrossEntropy,
    Correct,
    CrossEntropy,
    ElementwiseGrad,
    HuberLoss,
    InputGrad,
    SquaredError,
    WeightGrad,
)

__all__ = [
    "ELU", "GELU", "GRU", "LAYERS", "LSTM", "RNN", "SELU", "STEP_LAYERS", "Abs", "AbsoluteError", "Activation",
    "AdamStep", "Add", "ArgMax", "ArgMin", "ArgTopK", "Atan", "AvgPool1d", "AvgPool2d", "BatchMean", "BatchNorm1d",
    "BatchNorm2d", "BatchNormGrad", "BatchSum", "BatchVariance", "BinaryCrossEntropy", "Broadcast", "Cast", "Ceil",
    "Clip", "ClipScale", "Comparison", "Concat", "Conv1d", "Conv2d", "ConvTranspose1d", "ConvTranspose2d",
    "Convolution", "Correct", "Cos", "Counted", "CrossEntropy", "CumSum", "DataRows", "Decayed", "Descent", "Div",
    "Dropout", "DropoutMask", "Elementwise", "ElementwiseGrad", "Embedding", "Equal", "Erf", "Exp", "FirstMoment",
    "Floor", "Gather", "GlobalMax", "GlobalMean", "GlobalMin", "GlobalNorm", "GlobalSum", "Greater", "GreaterOrEqual",
    "GroupNorm", "HardSigmoid", "HardSwish", "HuberLoss", "Identity", "InputGrad", "Interleave", "Layer", "LayerNorm",
    "LeakyReLU", "Linear", "LinearResize", "Log", "LogSoftmax", "Logged", "Mask", "MatMul", "Max", "MaxPool1d",
    "MaxPool2d", "Min", "Mish", "Mod", "Mul", "NearestResize", "NesterovDescent", "Ordered", "PReLU", "Pad", "Permute",
    "Pow", "RMSNorm", "ReLU", "Reciprocal", "Recurrent", "RecurrentGrad", "Reshape", "Round", "RowIds", "RowNorm",
    "RunningAverage", "SecondMoment", "Selection", "SequenceMax", "SiLU", "Sigmoid", "Sign", "Sin", "Slice", "Softmax",
    "Softplus", "Softsign", "Sqrt", "SquaredError", "StepLayer", "StepRow", "Sub", "Tanh", "Tile", "ToInts", "ToPixels",
    "TokenConv", "TopK", "TransposedConvolution", "Velocity", "WeightGrad",
]  # fmt: skip

BUILT_IN = tuple(LAYERS.values())  # in the order of their declaration; layers of a user follow in LAYERS
