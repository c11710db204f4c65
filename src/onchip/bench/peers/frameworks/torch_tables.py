"""Networks over vectors and table rows, written in torch in the usual way; imported only if torch is installed."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn


def mlp_relu() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))


def mlp_gelu() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))


def fc_autoencoder() -> nn.Module:
    """MLPerf Tiny, anomaly detection in audio: five frames of 128 bands, through 8 values and back."""
    widths = (640, *[128] * 4, 8, *[128] * 4)
    layers: list[nn.Module] = []
    for D_in, D_out in itertools.pairwise(widths):
        layers += [nn.Linear(D_in, D_out), nn.BatchNorm1d(D_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, 640))


class WideAndDeep(nn.Module):  # type: ignore[misc]
    """Categorical columns, each with its own table, and numeric ones: the sum of a Linear over the numeric columns, one
    weight per id, and an MLP over all.
    """

    def __init__(self, columns: int, vocabulary: int, embedding: int, numeric: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(vocabulary, embedding) for _ in range(columns))
        self.weights = nn.ModuleList(nn.Embedding(vocabulary, 1) for _ in range(columns))
        self.wide = nn.Linear(numeric, 1)
        self.deep = nn.Sequential(
            nn.Linear(columns * embedding + numeric, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, ids: Any, numeric: Any) -> Any:
        looked_up = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        weights = [weight(ids[:, i]) for i, weight in enumerate(self.weights)]
        wide = self.wide(numeric) + torch.cat(weights, dim=1).sum(dim=1, keepdim=True)
        return torch.sigmoid(wide + self.deep(torch.cat([*looked_up, numeric], dim=1)))


class TabularBlock(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Any) -> Any:
        return x + self.second(self.dropout(torch.relu(self.first(self.norm(x)))))


def tabular_resnet() -> nn.Module:
    """Residual MLPs over the 54 columns of a table, to 7 classes."""
    blocks = (TabularBlock(128, 256) for _ in range(3))
    return nn.Sequential(nn.Linear(54, 128), *blocks, nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 7))
