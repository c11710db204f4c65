"""The folds of texts in torch: the same network, and the same epochs as onchip without dropout."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from onchip.kernels import reference
from onchip.workloads import text_job
from onchip.workloads.classify import train_and_test
from onchip.workloads.folds import fold_job, folds_of
from onchip.workloads.table_data import Source
from text_data import write_csv

torch = pytest.importorskip("torch")


@pytest.fixture
def job(tmp_path):
    source = Source(str(write_csv(tmp_path / "reviews.csv", 120)), "label", column="review")
    options = text_job.text_options({"lr": 0.01, "epochs": 6})
    return fold_job(text_job.read_texts(source), folds_of(120, 3, 0)[0], options, "small")


def test_it_is_the_same_network(job):
    from onchip.bench.peers.frameworks.torch_folds import TextCnn

    ids = job.data.x_test[:7]
    with torch.no_grad():
        got = TextCnn(job.net).eval()(torch.from_numpy(ids).long()).numpy()
    np.testing.assert_allclose(got, reference.forward(job.net, ids, "float64"), atol=1e-5)


def test_it_trains_like_onchip(job, monkeypatch):
    """Without dropout, whose random numbers differ: as many epochs, the same best one, the same predictions."""
    from onchip.bench.peers.frameworks import torch_folds

    monkeypatch.setattr(torch_folds, "DROPOUT", 0.0)
    nodes = [node for node in job.net.nodes if node.name != "dropout"]
    last = dataclasses.replace(nodes[-1], inputs=("concat",))
    job = dataclasses.replace(job, net=job.net.replace(nodes=[*nodes[:-1], last]))
    theirs = torch_folds.train_fold(job, job.options)
    ours = train_and_test(job.net, job.data, job.options, device="cpu")
    assert theirs["accuracy"] == ours.accuracy
    assert (theirs["epochs"], theirs["best_epoch"]) == (len(ours.fit.history), ours.fit.best_epoch)
    assert theirs["test_rows"] == 40
