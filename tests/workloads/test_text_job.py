"""A training job from texts, and cross-validation: what is trained on what, and what the network stores."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from onchip.errors import InputError
from onchip.text.vocabulary import TOKENISER, Vocabulary
from onchip.train.order import hold_out
from onchip.workloads import folds, text_job
from onchip.workloads.classify import train_and_test
from onchip.workloads.table_data import Source
from onchip.workloads.text_job import TRAIN
from text_data import labelled, write_csv, write_folder

QUICK = {"epochs": 8, "lr": 0.01, "validation": 0, "patience": 0}


@pytest.fixture
def source(tmp_path):
    return Source(str(write_csv(tmp_path / "reviews.csv", 100)), "label", column="review")


def test_the_vocabulary_is_that_of_the_training_texts(source):
    job = text_job.text_job(source, {"seed": 3}, "small")
    train, test = hold_out(100, 0.2, 3)
    texts, labels = labelled(100)
    expected = Vocabulary.of([texts[i] for i in train], 10_000, min_count=2)
    meaning, length = job.net.meaning, job.net.input.row_size
    assert meaning.words == expected.words
    assert (meaning.tokeniser, meaning.classes) == (TOKENISER, ("negative", "positive"))
    np.testing.assert_array_equal(job.data.x_test, expected.encode([texts[i] for i in test], length))
    assert job.data.y_test.tolist() == [["negative", "positive"].index(labels[i]) for i in test]
    assert job.net.weights["embedding.weight"].shape == (len(expected), 32)
    assert job.options == dataclasses.replace(TRAIN, seed=3)
    assert job.source == source
    assert job.seeded(4).net.meaning == meaning
    assert any("chosen by seed 3" in note for note in job.data.notes)


def test_it_learns_and_keeps_its_words(source):
    job = text_job.text_job(source, QUICK, "small")
    trained = train_and_test(job.net, job.data, job.options, device="cpu")
    assert trained.accuracy == 1
    assert trained.network.meaning == job.net.meaning


def test_the_network_of_the_report_is_one_of_them(source, monkeypatch):
    small = {"embedding": 8, "channels": 4, "hidden": (8,)}
    monkeypatch.setitem(
        text_job.NETWORKS, "report",
        dataclasses.replace(
            text_job.NETWORKS["report"], make=lambda **sizes: text_job.sentiment.network(**sizes, **small)
        ),
    )  # fmt: skip
    net = text_job.text_job(source, {}, "report").net
    assert [node.name for node in net.nodes if node.name.startswith("conv")] == ["conv3", "conv5", "conv7", "conv9"]
    assert net.input.row_size == 16
    assert net.output.row_size == 2


def test_a_folder_may_have_its_own_sets(tmp_path):
    for name, n in (("train", 60), ("dev", 10), ("test", 20)):
        pairs = zip(*labelled(n, seed=n), strict=True)
        (tmp_path / f"stsa.binary.{name}").write_text("".join(f"{int(y == 'positive')} {x}\n" for x, y in pairs))
    job = text_job.text_job(Source(str(tmp_path)), QUICK, "small")
    assert (len(job.data.x_train), len(job.data.x_test), len(job.validation[0])) == (60, 20, 10)
    assert job.data.words == ("negative", "positive")
    trained = train_and_test(job.net, job.data, job.options, device="cpu", validation_data=job.validation)
    assert trained.fit.history[-1].validation_accuracy == 1
    with pytest.raises(InputError, match="two sources of test rows"):
        text_job.text_job(Source(str(tmp_path), test_share=0.5), {}, "small")
    with pytest.raises(InputError, match="two sources of test rows"):
        text_job.text_job(Source(str(tmp_path), test_data=str(tmp_path / "stsa.binary.dev")), {}, "small")
    with pytest.raises(InputError, match="own test rows"):
        folds.cross_validate(Source(str(tmp_path)), {}, 3)


def test_test_texts_of_their_own(tmp_path, source):
    test = write_csv(tmp_path / "test.csv", 30, seed=9)
    job = text_job.text_job(dataclasses.replace(source, test_data=str(test)), {}, "small")
    assert (len(job.data.x_train), len(job.data.x_test)) == (100, 30)
    test.write_text("review,label\nx,neutral\n")
    with pytest.raises(InputError, match="a class that no training text has"):
        text_job.text_job(dataclasses.replace(source, test_data=str(test)), {}, "small")


def test_what_cannot_be_trained_on(tmp_path, source):
    with pytest.raises(InputError, match="no data to train on"):
        text_job.text_job(Source(), {})
    with pytest.raises(InputError, match="did you mean kim"):
        text_job.text_job(source, {}, "kin")
    with pytest.raises(InputError, match="bad test share"):
        text_job.text_job(dataclasses.replace(source, test_share=1.5), {})
    (tmp_path / "one.csv").write_text("text,label\na,pos\nb,pos\n")
    with pytest.raises(InputError, match="nothing to tell apart") as caught:
        text_job.text_job(Source(str(tmp_path / "one.csv")), {})
    assert "'pos' for all 2 texts" in str(caught.value)


def test_skipped_lines_are_counted(tmp_path):
    folder = write_folder(tmp_path / "mr", 40)
    with (folder / "rt-polarity.neg").open("ab") as file:
        file.write(b"caf\xe9\n\n")
    job = text_job.text_job(Source(str(folder), skip_bad=True), {}, "small")
    assert any("2 lines skipped" in note and "rt-polarity.neg, line 21" in note for note in job.data.notes)
    assert len(job.data.x_train) + len(job.data.x_test) == 40


# -- folds --------------------------------------------------------------------------------------------------


def test_every_text_is_tested_once(source):
    parts = folds.folds_of(103, 10, 0)
    assert sorted(np.concatenate(parts).tolist()) == list(range(103))
    assert {len(part) for part in parts} == {10, 11}
    data = text_job.read_texts(source)
    job = folds.fold_job(data, parts[0][parts[0] < 100], text_job.text_options({}), "small")
    texts = labelled(100)[0]
    rest = [text for i, text in enumerate(texts) if i not in parts[0]]
    assert job.net.meaning.words == Vocabulary.of(rest, 10_000, min_count=2).words
    assert len(job.data.x_train) == len(rest)


@pytest.mark.parametrize("count", [1, 0, 101, True, "3"])
def test_bad_numbers_of_folds(source, count):
    with pytest.raises(InputError, match="number of folds"):
        folds.cross_validate(source, {}, count)


def test_cross_validation(source):
    found, progress = [], []
    results = folds.cross_validate(
        source, QUICK, 3, "small", device="cpu", on_fold=found.append, on_progress=lambda done, p: progress.append(done)
    )
    assert [fold.fold for fold in results.folds] == [1, 2, 3]
    assert sum(fold.test_rows for fold in results.folds) == 100
    assert list(results.folds) == found
    assert set(progress) == {0, 1, 2}
    mean, deviation = results.accuracy
    accuracies = [fold.accuracy for fold in results.folds]
    assert (mean, deviation) == (np.mean(accuracies), np.std(accuracies))
    assert mean > 0.9
    assert folds.results_document(results)["folds"][0]["accuracy"] == accuracies[0]
