"""The reports' two networks, sentiment and faces, at small sizes."""

from __future__ import annotations

import functools

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
