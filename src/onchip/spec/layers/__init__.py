"""The vocabulary. A new layer goes into a file here and into this list; nothing else in spec/ changes."""

from onchip.spec.layers.activation import LogSoftmax, ReLU, Sigmoid, Softmax, Tanh
from onchip.spec.layers.base import LAYERS, Elementwise, Layer
from onchip.spec.layers.linear import Linear
from onchip.spec.layers.shape import Reshape

__all__ = ["LAYERS", "Elementwise", "Layer", "Linear", "LogSoftmax", "ReLU", "Reshape", "Sigmoid", "Softmax", "Tanh"]
