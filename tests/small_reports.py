"""The reports' two networks, sentiment and faces, at small sizes; the latter in place of the shipped generator, too."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from onchip.workloads import faces, sentiment

WORDS = {"vocabulary": 50, "embedding": 12, "channels": 8, "kernels": (3, 5), "length": 16, "hidden": (20, 10)}
PICTURES = {"latent": 100, "channels": (8, 6, 5, 3), "start": 3}  # 24x24x3
small_sentiment = functools.partial(sentiment.network, **WORDS)
small_faces = functools.partial(faces.network, **PICTURES)


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put them under the workloads' names."""
    monkeypatch.setattr(sentiment, "network", small_sentiment)
    monkeypatch.setattr(faces, "network", small_faces)
    monkeypatch.setattr(faces, "shipped", small_faces)


def write_words(folder: Path, N: int = 90) -> np.ndarray:
    """params.bin of the small sentiment, and inputs.bin: the ids of N sentences."""
    widths = (WORDS["channels"] * 2, *WORDS["hidden"], 2)
    layout = sentiment.layout(WORDS["vocabulary"], WORDS["embedding"], WORDS["channels"], WORDS["kernels"], widths)
    rng = np.random.default_rng(0)
    numbers = sum(tensor.size for tensor in layout)
    (rng.standard_normal(numbers) / 4).astype("<f4").tofile(folder / "params.bin")
    ids = rng.integers(0, WORDS["vocabulary"], (N, 16)).astype("<i4")
    ids.tofile(folder / "inputs.bin")
    return ids
