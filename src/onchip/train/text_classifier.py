"""TextClassifier: a scikit-learn estimator on strings.

clf = onchip.TextClassifier(epochs=3).fit(texts, labels)
clf.predict(["a waste of time"])
onchip.save(clf.network_, "sentiment.onnx")        # with its vocabulary and labels
onchip.TextClassifier.load("sentiment.onnx").predict_proba(texts)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from sklearn.utils import check_consistent_length
from sklearn.utils.validation import column_or_1d

from onchip.errors import InputError, ShapeError
from onchip.formats.load import load_file
from onchip.network.graph import Network, check_network
from onchip.network.meaning import Meaning
from onchip.network.reading import show
from onchip.network.recipe import Array
from onchip.network.text_cnn import CHANNELS, DROPOUT, EMBEDDING, KERNELS, text_cnn
from onchip.text.shipped import SHIPPED
from onchip.text.text_rows import text_vocabulary
from onchip.text.vocabulary import TOKENISER, Vocabulary, fitting_length
from onchip.train.estimators import Classifier


@dataclass(kw_only=True, eq=False, repr=False)
class TextClassifier(Classifier):
    """Kim's TextCNN on sentences: a list, array or column of strings.

    Parameters: the following; `device`, `threads`, and the options of `onchip.fit` by name, as for `Classifier`.

    vocabulary, min_count   ids, at most; occurrences of a word, at least. Other words share the id of unknown words
    length                  tokens of a text that are read; None: as many as 99 % of the texts have, at most 256
    embedding, channels, kernels, dropout    as for onchip.network.text_cnn
    classes_                the labels, sorted
    network_                the trained Network: ids to logits. onchip.save writes it with its vocabulary and labels;
                            `load` and onchip run read them
    n_iter_, loss_curve_, history_           number of epochs, mean loss per epoch, an Epoch record per epoch
    """

    vocabulary: int = 50_000
    min_count: int = 2
    length: int | None = None
    embedding: int = EMBEDDING
    channels: int = CHANNELS
    kernels: Sequence[int] = KERNELS
    dropout: float = DROPOUT
    optimiser: str = "adam"
    lr: float = 1e-3
    batch_size: int = 50
    epochs: int = 6
    validation: float = 0.1
    patience: int = 1
    # No parameters of a classifier of texts.
    network: Any = field(default=None, init=False)
    hidden: Sequence[int] = field(default=Classifier.hidden, init=False)
    activation: str = field(default=Classifier.activation, init=False)
    scale: bool = field(default=False, init=False)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Build a vocabulary of the texts X (n,) and train a new network on them and their labels y (n,)."""
        return super().fit(X, y, sample_weight)

    @property
    def partial_fit(self) -> Any:
        raise AttributeError("TextClassifier has no partial_fit: its vocabulary needs all texts")

    @classmethod
    def load(cls, model: str | os.PathLike[str] | Network, **options: Any) -> Self:
        """A fitted classifier from a Network, an .onnx file, or "sentiment": the model that ships with onchip.

        options  parameters: device, threads. Labels are strings
        """
        net = model if isinstance(model, Network) else load_file(SHIPPED.get(str(model), model))
        check_network(net)
        words = text_vocabulary(net)
        if not net.meaning.classes:
            hint = "a file that onchip train sentiment or onchip.save wrote"
            raise InputError("the network has no labels", got=str(net.output), expected="names of classes", hint=hint)
        found = cls(**options)
        found.network_, found.classes_, found._words = net, np.array(net.meaning.classes), words
        found._compiled = found._compile()
        return found

    def _validate(self, X: Any, y: Any = "no_validation", *, reset: bool, **how: Any) -> Any:
        """Ids (n, length) of the texts X, and y if given; reset: by a vocabulary of these texts."""
        texts = _as_texts(X)
        if reset:
            if not texts:
                raise ValueError("0 texts, while a minimum of 1 is required.")
            self._words = Vocabulary.of(texts, self.vocabulary, self.min_count)
            least = max(self.kernels, default=1)
            self._tokens = fitting_length(texts, least) if self.length is None else self.length
            ids = self._words.encode(texts, self._tokens)
        else:
            ids = self._words.encode(texts, self.network_.input.row_size)
        if isinstance(y, str) and y == "no_validation":
            return ids
        y = column_or_1d(y, warn=True)
        check_consistent_length(texts, y)
        return ids, y

    def _new_network(self, targets: Array) -> Network:
        net = text_cnn(
            len(self._words), self._tokens, self._outputs(targets), embedding=self.embedding, channels=self.channels,
            kernels=tuple(self.kernels), dropout=self.dropout, seed=self._options().seed, name="text_classifier",
        )  # fmt: skip
        labels = tuple(str(label) for label in self.classes_.tolist())
        return net.replace(meaning=Meaning(classes=labels, words=self._words.words, tokeniser=TOKENISER))

    def _warn_of_scales(self, x: Array, targets: Array, stacklevel: int = 3) -> None:
        """Ids have no scale."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string, tags.input_tags.two_d_array = True, False
        return tags


def _as_texts(X: Any) -> list[str]:
    """A list of the strings in a list, array or column."""
    if isinstance(X, str) or not (hasattr(X, "__iter__") or hasattr(X, "__array__")):
        raise ShapeError("not a list of texts", got=f"{type(X).__name__} {show(X)}", expected="a list, an array or a "
                         "column of strings", hint="[text]")  # fmt: skip
    texts = X.tolist() if hasattr(X, "tolist") else list(X)
    if texts and isinstance(texts[0], list) and len(texts[0]) == 1:  # (n, 1)
        texts = [row[0] for row in texts]
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            got = f"{type(text).__name__} {show(text)}, number {i}"
            raise InputError("not a text", got=got, expected="str", hint="X = list of sentences")
    return texts
