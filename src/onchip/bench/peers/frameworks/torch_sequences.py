"""Networks over text and audio, written in torch in the usual way; imported only if torch is installed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn


class TextCNN(nn.Module):  # type: ignore[misc]
    """Convolutions of several widths over embedded tokens, max over time, a Linear."""

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


class FastText(nn.Module):  # type: ignore[misc]
    """The mean of embedded tokens, a Linear."""

    def __init__(self, vocabulary: int, embedding: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocabulary, embedding, mode="mean")
        self.fc = nn.Linear(embedding, classes)

    def forward(self, ids: Any) -> Any:
        return self.fc(self.embedding(ids))


class KeywordLSTM(nn.Module):  # type: ignore[misc]
    """Keyword spotting: an LSTM over audio frames, then a Linear on the last step."""

    def __init__(self, features: int, units: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, units, batch_first=True)
        self.fc = nn.Linear(units, classes)

    def forward(self, x: Any) -> Any:
        steps, _ = self.lstm(x)
        return self.fc(steps[:, -1])


class TextTransformer(nn.Module):  # type: ignore[misc]
    """Two layers of torch's encoder over token and position embeddings, the mean over time, a Linear."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) / math.sqrt(width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.fc = nn.Linear(width, classes)

    def forward(self, ids: Any) -> Any:
        return self.fc(self.encoder(self.embedding(ids) + self.positions).mean(dim=1))


class AttentionBlock(nn.Module):  # type: ignore[misc]
    """Pre-norm attention and MLP with residual connections: an encoder layer written by hand."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Any) -> Any:
        B, S, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, S, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(B, S, D))
        return x + self.mlp(self.norm2(x))


class FrameTransformer(nn.Module):  # type: ignore[misc]
    """Two blocks over feature frames with position embeddings; the mean over time, a Linear."""

    def __init__(self, features: int, length: int, width: int, heads: int, classes: int) -> None:
        super().__init__()
        self.project = nn.Linear(features, width)
        self.positions = nn.Parameter(torch.randn(length, width) / math.sqrt(width))
        self.blocks = nn.Sequential(AttentionBlock(width, heads), AttentionBlock(width, heads))
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Any) -> Any:
        x = self.blocks(self.project(x) + self.positions)
        return self.fc(self.norm(x).mean(dim=1))
