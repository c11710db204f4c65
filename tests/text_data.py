"""Texts that are easy to tell apart, in the files that onchip reads."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

GOOD, BAD = ("fine", "moving", "a delight"), ("awful", "dull", "a waste of time")
FILLERS = ("the film", "this story", "it", "the second half", "her part")


def labelled(n: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """n texts, and their classes: "negative" and "positive"."""
    rng, texts, labels = np.random.default_rng(seed), [], []
    for i in range(n):
        filler, end = rng.choice(FILLERS), rng.choice(FILLERS)
        texts.append(f"{filler} is {rng.choice((BAD, GOOD)[i % 2])} , and {end} n't {i}")
        labels.append(("negative", "positive")[i % 2])
    return texts, labels


def write_folder(folder: Path, n: int, seed: int = 0) -> Path:
    """A folder with a file per class, as MR's."""
    folder.mkdir()
    texts, labels = labelled(n, seed)
    for name, suffix in (("negative", "neg"), ("positive", "pos")):
        own = [text for text, label in zip(texts, labels, strict=True) if label == name]
        (folder / f"rt-polarity.{suffix}").write_text("".join(f"{text}\n" for text in own))
    return folder


def write_csv(path: Path, n: int, seed: int = 0) -> Path:
    with path.open("w", newline="") as file:
        rows = zip(range(n), *labelled(n, seed), strict=True)
        csv.writer(file).writerows([("id", "review", "label"), *rows])
    return path
