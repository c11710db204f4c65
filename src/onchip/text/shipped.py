"""The trained models that ship with onchip, by name. Their cards are in docs/models/."""

from __future__ import annotations

from pathlib import Path

SHIPPED = {"sentiment": Path(__file__).with_name("sentiment.onnx")}
