"""Small networks as people write them in torch; imported only where torch is."""

from __future__ import annotations

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
                if isinstance(part, nn.BatchNorm2d):
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


MODELS = (
    Model("MLP 784-512-256-10", mlp_relu, (784,)),
    Model("MLP 256-1024-256, GELU", mlp_gelu, (256,)),
    Model("TextCNN", lambda: TextCNN(5_000, 128, (3, 4, 5), 100, 2), (50,), vocabulary=5_000),
    Model("LeNet-5", LeNet5, (1, 28, 28)),
    Model("residual CNN", ResidualCNN, (3, 32, 32), (1, 32, 256)),
    Model("autoencoder", autoencoder, (1, 28, 28)),
    Model("DCGAN", dcgan, (100, 1, 1), (1, 32, 256)),
)
