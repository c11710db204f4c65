"""The networks of the benchmark `imported` and their random rows; imported only if torch is installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from onchip.bench.peers.frameworks.torch_images import (
    LeNet5,
    ResidualCNN,
    UNet,
    autoencoder,
    dcgan,
    ds_cnn,
    mobilenet,
    resnet8,
)
from onchip.bench.peers.frameworks.torch_sequences import (
    FastText,
    FrameTransformer,
    KeywordLSTM,
    TextCNN,
    TextTransformer,
)
from onchip.bench.peers.frameworks.torch_tables import WideAndDeep, fc_autoencoder, mlp_gelu, mlp_relu, tabular_resnet
from onchip.network.recipe import Array


@dataclass(frozen=True)
class Input:
    row_shape: tuple[int, ...]
    vocabulary: int = 0  # rows are ids below this; 0: rows are floats


def floats(*row_shape: int) -> Input:
    return Input(row_shape)


def ids(length: int, vocabulary: int) -> Input:
    return Input((length,), vocabulary)


@dataclass(frozen=True)
class Model:
    name: str
    make: Callable[[], nn.Module]
    row_inputs: tuple[Input, ...]

    @property
    def is_image(self) -> bool:
        return len(self.row_inputs[0].row_shape) == 3

    def module(self) -> nn.Module:
        """With weights from a fixed seed and batch norms with nontrivial statistics, in eval mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = self.make().eval()
            for layer in module.modules():
                if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
                    layer.running_mean.normal_(0, 0.1)
                    layer.running_var.uniform_(0.5, 1.5)
                if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.LayerNorm):
                    nn.init.uniform_(layer.weight, 0.5, 1.5)
                    nn.init.normal_(layer.bias, 0, 0.1)
                if isinstance(layer, nn.MultiheadAttention):  # torch initialises these to zero
                    nn.init.normal_(layer.in_proj_bias, 0, 0.1)
                    nn.init.normal_(layer.out_proj.bias, 0, 0.1)
        return module.requires_grad_(False)

    def inputs(self, B: int) -> tuple[Array, ...]:
        """B rows per input."""
        rng = np.random.default_rng(1)
        return tuple(
            rng.integers(0, spec.vocabulary, (B, *spec.row_shape)) if spec.vocabulary
            else rng.standard_normal((B, *spec.row_shape), dtype=np.float32)
            for spec in self.row_inputs
        )  # fmt: skip


MODELS = (
    Model("MLP 784-512-256-10", mlp_relu, (floats(784),)),
    Model("MLP 256-1024-256, GELU", mlp_gelu, (floats(256),)),
    Model("TextCNN", lambda: TextCNN(5_000, 128, (3, 4, 5), 100, 2), (ids(50, 5_000),)),
    Model("LeNet-5", LeNet5, (floats(1, 28, 28),)),
    Model("residual CNN", ResidualCNN, (floats(3, 32, 32),)),
    Model("autoencoder", autoencoder, (floats(1, 28, 28),)),
    Model("DCGAN", dcgan, (floats(100, 1, 1),)),
    Model("DS-CNN", ds_cnn, (floats(1, 49, 10),)),
    Model("MobileNetV1 0.25", mobilenet, (floats(3, 96, 96),)),
    Model("ResNet-8", resnet8, (floats(3, 32, 32),)),
    Model("FC autoencoder", fc_autoencoder, (floats(640),)),
    Model("keyword LSTM", lambda: KeywordLSTM(10, 128, 12), (floats(49, 10),)),
    Model("text transformer", lambda: TextTransformer(5_000, 32, 64, 4, 2), (ids(32, 5_000),)),
    Model("frame transformer", lambda: FrameTransformer(40, 32, 64, 4, 12), (floats(32, 40),)),
    Model("fastText", lambda: FastText(10_000, 64, 4), (ids(50, 10_000),)),
    Model("wide and deep", lambda: WideAndDeep(8, 1_000, 16, 13), (ids(8, 1_000), floats(13))),
    Model("tabular ResNet", tabular_resnet, (floats(54),)),
    Model("U-Net", lambda: UNet(3, (16, 32, 64, 128), 2), (floats(3, 64, 64),)),
)
