"""A training job from texts: read them, build a vocabulary from the training texts alone, and a network that fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from onchip.errors import InputError, printable
from onchip.files import check_memory
from onchip.network.graph import Network
from onchip.network.meaning import Meaning
from onchip.network.names import known_name
from onchip.network.recipe import Array
from onchip.network.text import plural
from onchip.network.text_cnn import KERNELS, text_cnn
from onchip.text.labelled import LabelledTexts, find_sets, read_labelled
from onchip.text.text_rows import text_vocabulary
from onchip.text.vocabulary import TOKENISER, UNKNOWN, Vocabulary, fitting_length
from onchip.train.options import TrainOptions
from onchip.train.order import hold_out
from onchip.workloads import load, sentiment
from onchip.workloads.dataset import Dataset
from onchip.workloads.table_data import TEST_SHARE, Source
from onchip.workloads.train_job import TrainJob

TEXTS, KIM = "sentiment", "kim"  # the name of these jobs, and of the default network
# On MR the validation loss is lowest in epoch 2 or 3.
TRAIN = TrainOptions(optimiser="adam", lr=1e-3, batch_size=50, epochs=6, validation=0.1, patience=1)
IDS = (".npy", ".gz", ".idx")  # suffixes of files of ids
VOCABULARY, MIN_COUNT = 50_000, 2  # words that occur once share the id of unknown words, which is trained that way


@dataclass(frozen=True)
class TextShape:
    """A kind of network for texts."""

    what: str
    make: Callable[..., Network]  # (vocabulary=, length=, classes=, seed=)
    vocabulary: int = VOCABULARY
    least_length: int = max(KERNELS)


NETWORKS = {
    KIM: TextShape("300 dimensions per word, 3 x 100 channels (Kim 2014)", text_cnn),
    "small": TextShape(
        "32 dimensions per word, 3 x 64 channels: a file below 2 MB",
        partial(text_cnn, embedding=32, channels=64), vocabulary=10_000,
    ),
    "report": TextShape(
        "4,096 dimensions per word, 4 x 1,024 channels, four Linears: the network of the workload",
        sentiment.network, least_length=sentiment.LENGTH,
    ),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts with the indices of their classes."""

    texts: Sequence[str]
    classes: Array  # (n,) int64

    def rows(self, index: Array) -> Texts:
        return Texts([self.texts[i] for i in index.tolist()], self.classes[index])


@dataclass(frozen=True, eq=False)
class TextData:
    """The texts of a source, all for training unless it has sets of its own."""

    name: str
    where: str
    words: tuple[str, ...]  # names of the classes
    train: Texts
    validation: Texts | None
    test: Texts | None
    notes: tuple[str, ...]


def read_texts(source: Source) -> TextData:
    """Read the texts of --data and --test-data; a folder with .train, .dev and .test files has its own sets."""
    if source.data is None:
        raise InputError(
            "no data to train on", got="no --data", hint="--data reviews.csv --column text --labels label",
            expected="a .csv or .tsv with columns of texts and labels, or a folder with a file or folder per class",
        )  # fmt: skip
    if source.test_labels is not None:
        got = f"--test-labels {source.test_labels}"
        raise InputError("labels of texts are in their file", got=got, expected="--labels, for both files")
    path, skip_bad = Path(source.data), bool(source.skip_bad)
    read = partial(read_labelled, column=source.column, label=source.labels, skip_bad=skip_bad)
    sets = find_sets(path)
    if sets and source.test_data is not None:
        got = f"{sets['train'].name} and --test-data {source.test_data}"
        raise InputError("two sources of test rows", got=got, expected="one", hint=f"--data {sets['train']}")
    files: dict[str, Path] = {"train": sets.get("train", path)} | sets
    if source.test_data is not None:
        files["test"] = Path(source.test_data)
    found = {name: read(file) for name, file in files.items()}
    words = _classes(found["train"], path)
    indexed = {name: _indexed(each, words, files[name]) for name, each in found.items()}
    notes = [f"{name}: {plural(each.skipped, 'line')} skipped; the first: {printable(each.first_skipped)}"
             for name, each in found.items() if each.skipped]  # fmt: skip
    return TextData(
        printable(path.name), printable(str(path.absolute().parent)), words,
        indexed["train"], indexed.get("dev"), indexed.get("test"), tuple(notes),
    )  # fmt: skip


def _classes(found: LabelledTexts, path: Path) -> tuple[str, ...]:
    words = tuple(sorted(set(found.labels)))
    if len(words) < 2:
        got = f"'{printable(words[0])}' for all {plural(len(found.texts), 'text')}" if words else "no texts"
        raise InputError(f"{path}: nothing to tell apart", got=got, expected="texts of two or more classes",
                         hint="--labels COLUMN, or a folder with a file per class")  # fmt: skip
    return words


def _indexed(found: LabelledTexts, words: Sequence[str], path: Path) -> Texts:
    index = {word: i for i, word in enumerate(words)}
    if unknown := sorted(set(found.labels) - set(index)):
        got, expected = printable(unknown[0]), ", ".join(map(printable, words[:10]))
        hint = "the same names of classes in all files"
        raise InputError(f"{path}: a class that no training text has", got=got, expected=expected, hint=hint)
    return Texts(found.texts, np.array([index[label] for label in found.labels], np.int64))


def text_options(given: Mapping[str, Any]) -> TrainOptions:
    return TrainOptions.of({**asdict(TRAIN), **given})


def text_network(model: str, data: str | None) -> Network | None:
    """The network of a file that reads texts, to train it further; None for another model, or rows of ids."""
    has_ids = data is not None and Path(data).suffix.lower() in IDS
    net = load(model) if Path(model).suffix.lower() == ".onnx" and not has_ids else None
    return net if net is not None and net.meaning.words and net.meaning.classes else None


def text_job(
    source: Source, given: Mapping[str, Any], network: str = KIM, trained: Network | None = None
) -> TrainJob:  # fmt: skip
    """Collect everything that `fit` needs.

    given    training options by name; defaults are TRAIN
    network  one of NETWORKS
    trained  a network that reads texts, to train it further with its vocabulary and classes
    """
    options, shape = text_options(given), shape_named(network)
    data = read_texts(source)
    if trained is not None:
        data = _renumbered(data, trained.meaning.classes)
    notes = list(data.notes)
    if data.test is None:
        share = TEST_SHARE if source.test_share is None else source.test_share
        if not 0 <= share < 1:
            raise InputError("bad test share", got=str(share), expected="at least 0, below 1", hint="--test-share 0.2")
        train, test = hold_out(len(data.train.texts), share, options.seed)
        if not len(train):
            got, expected = f"{len(test)} texts, --test-share {share}", "at least one to train on"
            raise InputError("nothing to train on", got=got, expected=expected, hint="--test-share 0")
        notes.append(f"test: {len(test):,} of {len(data.train.texts):,} texts, chosen by seed {options.seed}")
        data = replace(data, train=data.train.rows(train), test=data.train.rows(test), notes=tuple(notes))
    elif source.test_share is not None:
        got = f"a test set, and --test-share {source.test_share}"
        raise InputError("two sources of test rows", got=got, expected="one of them", hint="omit --test-share")
    return replace(job_of(data, options, shape, trained), source=source)


def _renumbered(data: TextData, words: tuple[str, ...]) -> TextData:
    """The same texts, with these classes."""
    if unknown := [word for word in data.words if word not in words]:
        got, expected = printable(unknown[0]), ", ".join(map(printable, words[:10]))
        raise InputError(
            "a class that the network does not have", got=got, expected=expected, hint="train a new network"
        )
    index = np.array([words.index(word) for word in data.words])
    sets = (None if each is None else Texts(each.texts, index[each.classes]) for each in (data.validation, data.test))
    train = Texts(data.train.texts, index[data.train.classes])
    return replace(data, words=words, train=train, validation=next(sets), test=next(sets))


def shape_named(network: str) -> TextShape:
    return NETWORKS[known_name(network, NETWORKS, "network", f"--network {KIM}")]


def job_of(data: TextData, options: TrainOptions, shape: TextShape, trained: Network | None = None) -> TrainJob:
    """The job of these sets, with a vocabulary of the training texts alone, or that of a trained network."""
    if trained is not None:
        vocabulary, length, of = text_vocabulary(trained), trained.input.row_size, "the network's"
    else:
        vocabulary = Vocabulary.of(data.train.texts, shape.vocabulary, MIN_COUNT)
        length, of = fitting_length(data.train.texts, shape.least_length), f"those that occur {MIN_COUNT} times or more"
    sets = [each or Texts([], np.zeros(0, np.int64)) for each in (data.train, data.test, data.validation)]
    check_memory(4 * length * sum(len(each.texts) for each in sets), "the rows of ids")
    x_train, x_test, x_validation = (vocabulary.encode(each.texts, length) for each in sets)
    unknown = (x_train == UNKNOWN).sum() / max(1, (x_train != 0).sum())
    notes = (
        *data.notes, f"classes: {', '.join(map(printable, data.words[:10]))}{', ...' * (len(data.words) > 10)}",
        f"vocabulary: {len(vocabulary.words):,} words, {of} ({unknown:.1%} of the training words are others); "
        f"the first {length} tokens of each text are read",
    )  # fmt: skip
    dataset = Dataset(
        data.name, data.where, None, x_train, sets[0].classes, x_test, sets[1].classes, data.words, notes
    )  # fmt: skip
    meaning = Meaning(classes=data.words, words=vocabulary.words, tokeniser=TOKENISER)

    def make_net(seed: int) -> Network:
        if trained is not None:
            return trained
        net = shape.make(vocabulary=len(vocabulary), length=length, classes=len(data.words), seed=seed)
        return net.replace(meaning=meaning, name=TEXTS)

    validation = None if data.validation is None else (x_validation, sets[2].classes)
    if validation is not None:
        options = replace(options, validation=len(x_validation) / (len(x_train) + len(x_validation)))
    return TrainJob(
        make_net(options.seed), dataset, options, Source(), make_net, has_own_layers=True, validation=validation
    )  # fmt: skip
