"""Image networks in idiomatic torch; imported only if torch is installed."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn


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
    """Three convolutions with batch norm; the last has a residual connection."""

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


def conv_norm(C_in: int, C_out: int, kernel: int | tuple[int, int], **options: Any) -> nn.Sequential:
    """A convolution, its batch norm and a ReLU."""
    conv = nn.Conv2d(C_in, C_out, kernel, bias=False, **options)
    return nn.Sequential(conv, nn.BatchNorm2d(C_out), nn.ReLU())


class UNet(nn.Module):  # type: ignore[misc]
    """Downsamples by two per further width, then upsamples, with a skip connection at each size."""

    def __init__(self, C_in: int, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(self._double_conv(*pair) for pair in itertools.pairwise((C_in, *widths)))
        self.up = nn.ModuleList(self._double_conv(low + high, high) for high, low in itertools.pairwise(widths))
        self.pool, self.resize = nn.MaxPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear")
        self.last = nn.Conv2d(widths[0], classes, 1)

    @staticmethod
    def _double_conv(C_in: int, C_out: int) -> nn.Sequential:
        return nn.Sequential(conv_norm(C_in, C_out, 3, padding=1), conv_norm(C_out, C_out, 3, padding=1))

    def forward(self, x: Any) -> Any:
        skips: list[Any] = []
        for block in self.down:
            skips.append(block(self.pool(skips[-1]) if skips else x))
        x = skips.pop()
        for block in reversed(self.up):
            x = block(torch.cat([skips.pop(), self.resize(x)], dim=1))
        return self.last(x)


# -- MLPerf Tiny ---------------------------------------------------------------------------------------------
# Three networks of the benchmark for microcontrollers, in their published sizes; the fourth, for audio, is in
# torch_tables. Padding is symmetric, whereas TensorFlow's "same" may pad one more at the end.


def separable(C_in: int, C_out: int, stride: int = 1) -> nn.Sequential:
    """Depthwise 3x3, then pointwise 1x1."""
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
    """MobileNetV1 at a quarter of its width: person detection on 96x96 pixels."""
    widths = (8, 16, 32, 32, 64, 64, *[128] * 6, 256, 256)
    strides = (1, 2, 1, 2, 1, 2, *[1] * 5, 2, 1)
    blocks = [separable(*pair, s) for pair, s in zip(itertools.pairwise(widths), strides, strict=True)]
    head = (nn.AvgPool2d(3), nn.Flatten(), nn.Linear(256, 2), nn.Softmax(dim=1))
    return nn.Sequential(conv_norm(3, 8, 3, stride=2, padding=1), *blocks, *head)


class ResidualBlock(nn.Module):  # type: ignore[misc]
    """Two convolutions with a residual connection, by a 1x1 convolution if the shape changes."""

    def __init__(self, C_in: int, C_out: int, stride: int) -> None:
        super().__init__()
        conv2 = nn.Conv2d(C_out, C_out, 3, padding=1, bias=False), nn.BatchNorm2d(C_out)
        self.body = nn.Sequential(conv_norm(C_in, C_out, 3, stride=stride, padding=1), *conv2)
        self.skip = nn.Conv2d(C_in, C_out, 1, stride) if C_in != C_out else nn.Identity()

    def forward(self, x: Any) -> Any:
        return torch.relu(self.body(x) + self.skip(x))


def resnet8() -> nn.Module:
    """ResNet-8: 32x32 images to ten classes."""
    blocks = (ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2), ResidualBlock(32, 64, 2))
    head = (nn.AvgPool2d(8), nn.Flatten(), nn.Linear(64, 10), nn.Softmax(dim=1))
    return nn.Sequential(conv_norm(3, 16, 3, padding=1), *blocks, *head)
