"""The models that ship: what their cards say is so."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from onchip.formats.load import load_file
from onchip.runtime.engine import compile
from onchip.text.shipped import SHIPPED
from onchip.text.text_rows import encode_texts, text_vocabulary
from onchip.text.vocabulary import FIRST
from onchip.train.order import hold_out
from onchip.workloads.table_data import Source
from onchip.workloads.text_job import read_texts

ROOT = Path(__file__).parent.parent
CARD, TRAINING = (ROOT / "docs/models" / name for name in ("sentiment.md", "sentiment.json"))


def test_the_card_has_the_figures_of_the_training():
    card, training = CARD.read_text(), json.loads(TRAINING.read_text())
    assert f"{100 * training['accuracy']:.2f} %" in card
    assert f"macro F1 {training['f1']:.4f}" in card
    assert f"{training['test_rows']:,} to test" in card
    assert training["date"] in card
    assert training["command"] in card
    net = load_file(SHIPPED["sentiment"])
    V, E = net.weights["embedding.weight"].shape
    assert f"{V:,} ids x {E}" in card
    assert f"first {net.input.row_size} tokens" in card
    assert SHIPPED["sentiment"].stat().st_size < 2_000_000
    assert f"{SHIPPED['sentiment'].stat().st_size / 1e6:.1f} MB" in card


def test_the_model_reads_texts():
    net = load_file(SHIPPED["sentiment"])
    assert len(text_vocabulary(net).words) == net.weights["embedding.weight"].shape[0] - FIRST
    assert net.meaning.classes == ("negative", "positive")


def test_the_wheel_has_the_model():
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'"onchip.text" = \["sentiment.onnx"\]', project)


@pytest.mark.skipif("ONCHIP_DATA" not in os.environ, reason="no real data: ONCHIP_DATA is not set")
def test_the_accuracy_is_that_of_the_card():
    training, net = json.loads(TRAINING.read_text()), load_file(SHIPPED["sentiment"])
    data = read_texts(Source(str(Path(os.environ["ONCHIP_DATA"]) / "sentiment-mr")))
    test = data.train.rows(hold_out(len(data.train.texts), training["test_share"], training["seed"])[1])
    predictions = compile(net, "cpu")(encode_texts(test.texts, net)).argmax(axis=1)
    assert (predictions == test.classes).mean() == training["accuracy"]


def test_the_tutorial_has_the_figures_of_the_folds():
    """One line per run of sentiment_folds.json; a run of fewer folds is compared on those folds."""
    page = (ROOT / "docs/tutorials/sentiment.md").read_text()
    shown = page.partition("<!-- accuracy:begin -->\n")[2].partition("<!-- accuracy:end -->")[0]
    *runs, sst2 = json.loads((ROOT / "docs/models/sentiment_folds.json").read_text())["runs"]
    lines = ["| network | trained by | folds | accuracy |", "| --- | --- | --- | --- |"]
    for run in runs:
        accuracies = [fold["accuracy"] for fold in run["folds"]]
        assert (np.mean(accuracies), np.std(accuracies)) == (run["accuracy"], run["deviation"])
        score = f"{100 * run['accuracy']:.1f} ± {100 * run['deviation']:.1f} %"
        if len(accuracies) < 10:
            ours = next(other for other in runs if other["network"] == run["network"])
            same = np.mean([fold["accuracy"] for fold in ours["folds"][: len(accuracies)]])
            score = f"{100 * run['accuracy']:.1f} % (onchip on these folds: {100 * same:.1f} %)"
        lines.append(f"| {run['network']} | {run['library']} | {len(accuracies)} | {score} |")
    assert shown.strip().splitlines() == lines
    small = next(run for run in runs if run["network"] == "small")
    score = f"{100 * small['accuracy']:.1f} ± {100 * small['deviation']:.1f} %"
    assert f"| ten folds | {score}" in CARD.read_text()
    sentence = f"{100 * sst2['accuracy']:.1f} % of {sst2['test_rows']:,} test sentences"
    assert sentence in " ".join(page.split())
