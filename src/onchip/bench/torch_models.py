"""Small networks as people write them in torch; imported only where torch is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from onchip.spec.recipe import Array


class TextCNN(nn.Module):  # type: ignore[misc]
    """Convolutions of several widths over embedded tokens, the largest over time, a Linear."""

    def __init__(self, vocabulary: int, embedding: int, kernels: tuple[int, ...], channels: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.convs = nn.ModuleList(nn.Conv1d(embedding, channels, kernel) for kernel in kernels)
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(channels * len(kernels), classes)

    def forward(self, ids: Any) -> Any:
        embedded = self.embedding(ids).permute(0, 2, 1)
        features = [torch.relu(conv(embedded)).amax(dim=2) for conv in self.convs]
        return self.fc(self.dropout(torch.cat(features, dim=1)))


class LeNet5(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
        )

    def forward(self, x: Any) -> Any:
        return self.classifier(self.features(x))


class ResidualCNN(nn.Module):  # type: ignore[misc]
    """Three convolutions with batch norm; the last adds to what it read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.conv2, self.bn2 = nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
        self.conv3, self.bn3 = nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        x = torch.relu(x + self.bn3(self.conv3(x)))
        return self.fc(x.mean(dim=(2, 3)))


def mlp_relu() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))


def mlp_gelu() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))


def autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 3, stride=2, padding=1, output_padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 3, stride=2, padding=1, output_padding=1),
        nn.Sigmoid(),
    )


def dcgan() -> nn.Module:
    layers: list[nn.Module] = [nn.ConvTranspose2d(100, 512, 4, bias=False), nn.BatchNorm2d(512), nn.ReLU()]
    for C_in, C_out in ((512, 256), (256, 128), (128, 64)):
        layers += [nn.ConvTranspose2d(C_in, C_out, 4, 2, 1, bias=False), nn.BatchNorm2d(C_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False), nn.Tanh())


# -- MLPerf Tiny ---------------------------------------------------------------------------------------------
# The four networks of the benchmark for microcontrollers, as one writes them in torch: with as many zeros on either
# side of an image where TensorFlow's "same" puts one more behind than in front; every size is the published one.


def conv_norm(C_in: int, C_out: int, kernel: int | tuple[int, int], **options: Any) -> nn.Sequential:
    """A convolution, its batch norm and a ReLU."""
    conv = nn.Conv2d(C_in, C_out, kernel, bias=False, **options)
    return nn.Sequential(conv, nn.BatchNorm2d(C_out), nn.ReLU())


def separable(C_in: int, C_out: int, stride: int = 1) -> nn.Sequential:
    """3x3 within each channel, then 1x1 across them."""
    return nn.Sequential(conv_norm(C_in, C_in, 3, stride=stride, padding=1, groups=C_in), conv_norm(C_in, C_out, 1))


def ds_cnn() -> nn.Module:
    """Keyword spotting: 49 frames of 10 coefficients to 12 words."""
    return nn.Sequential(
        conv_norm(1, 64, (10, 4), stride=2, padding=(5, 1)),  # to 25x5
        nn.Dropout(0.2),
        *(separable(64, 64) for _ in range(4)),
        nn.Dropout(0.4),
        nn.AvgPool2d((25, 5)),
        nn.Flatten(),
        nn.Linear(64, 12),
        nn.Softmax(dim=1),
    )


def mobilenet() -> nn.Module:
    """MobileNetV1 at a quarter of its width: is there a person on 96x96 pixels."""
    widths = (8, 16, 32, 32, 64, 64, *[128] * 6, 256, 256)
    strides = (1, 2, 1, 2, 1, 2, *[1] * 5, 2, 1)
    blocks = [separable(*pair, s) for pair, s in zip(itertools.pairwise(widths), strides, strict=True)]
    head = (nn.AvgPool2d(3), nn.Flatten(), nn.Linear(256, 2), nn.Softmax(dim=1))
    return nn.Sequential(conv_norm(3, 8, 3, stride=2, padding=1), *blocks, *head)


class ResidualBlock(nn.Module):  # type: ignore[misc]
    """Two convolutions, added to what they read; where that is of another size, to a 1x1 convolution of it."""

    def __init__(self, C_in: int, C_out: int, stride: int) -> None:
        super().__init__()
        second = nn.Conv2d(C_out, C_out, 3, padding=1, bias=False), nn.BatchNorm2d(C_out)
        self.body = nn.Sequential(conv_norm(C_in, C_out, 3, stride=stride, padding=1), *second)
        self.skip = nn.Conv2d(C_in, C_out, 1, stride) if C_in != C_out else nn.Identity()

    def forward(self, x: Any) -> Any:
        return torch.relu(self.body(x) + self.skip(x))


def resnet8() -> nn.Module:
    """Ten classes of 32x32 pixels."""
    blocks = (ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2), ResidualBlock(32, 64, 2))
    head = (nn.AvgPool2d(8), nn.Flatten(), nn.Linear(64, 10), nn.Softmax(dim=1))
    return nn.Sequential(conv_norm(3, 16, 3, padding=1), *blocks, *head)


def fc_autoencoder() -> nn.Module:
    """Anomalies in sounds: five frames of 128 bands, through 8 numbers and back."""
    widths = (640, *[128] * 4, 8, *[128] * 4)
    layers: list[nn.Module] = []
    for D_in, D_out in itertools.pairwise(widths):
        layers += [nn.Linear(D_in, D_out), nn.BatchNorm1d(D_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, 640))


@dataclass(frozen=True)
class Model:
    name: str
    make: Callable[[], nn.Module]
    row_shape: tuple[int, ...]
    batches: tuple[int, ...] = (1, 32, 1_024)
    vocabulary: int = 0  # rows are ids below this; 0: they are floats

    def module(self) -> nn.Module:
        """With weights from a fixed seed and batch norms that have seen data, in eval mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = self.make().eval()
            for part in module.modules():
                if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
                    part.running_mean.normal_(0, 0.1)
                    part.running_var.uniform_(0.5, 1.5)
                    nn.init.uniform_(part.weight, 0.5, 1.5)
                    nn.init.normal_(part.bias, 0, 0.1)
        return module.requires_grad_(False)

    def inputs(self, B: int) -> Array:
        rng = np.random.default_rng(1)
        if self.vocabulary:
            return rng.integers(0, self.vocabulary, (B, *self.row_shape))
        return rng.standard_normal((B, *self.row_shape), dtype=np.float32)


TINY_ROWS = (1, 64, 256)  # of images: on two cores 4,096 take half a minute a run; --rows asks for them
MODELS = (
    Model("MLP 784-512-256-10", mlp_relu, (784,)),
    Model("MLP 256-1024-256, GELU", mlp_gelu, (256,)),
    Model("TextCNN", lambda: TextCNN(5_000, 128, (3, 4, 5), 100, 2), (50,), vocabulary=5_000),
    Model("LeNet-5", LeNet5, (1, 28, 28)),
    Model("residual CNN", ResidualCNN, (3, 32, 32), (1, 32, 256)),
    Model("autoencoder", autoencoder, (1, 28, 28)),
    Model("DCGAN", dcgan, (100, 1, 1), (1, 32, 256)),
    Model("DS-CNN", ds_cnn, (1, 49, 10), TINY_ROWS),
    Model("MobileNetV1 0.25", mobilenet, (3, 96, 96), TINY_ROWS),
    Model("ResNet-8", resnet8, (3, 32, 32), TINY_ROWS),
    Model("FC autoencoder", fc_autoencoder, (640,), (1, 64, 4_096)),
)
