"""Classifier and Regressor: scikit-learn estimators.

    clf = onchip.Classifier(hidden=(320, 160), lr=0.03, epochs=30).fit(X, y)
    clf.score(X_test, y_test)
    onchip.save(clf, "digits.onnx")  # onchip.load_estimator reads it

They train an MLP, or with `network=` any network with one input and one output. They follow scikit-learn's conventions
and work in Pipeline, GridSearchCV and cross_val_score, with any n_jobs.
`onchip.fit_many` trains a whole grid in one call and one process.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from onchip.errors import InputError, ShapeError
from onchip.kernels.training import AVERAGE
from onchip.network.build import mlp
from onchip.network.graph import Network
from onchip.network.names import known_name
from onchip.network.recipe import Array
from onchip.runtime.engine import Engine, compile
from onchip.train.given_network import check_row_size, flatten_rows, load_given, shape_rows, shape_targets
from onchip.train.loop import fit
from onchip.train.options import ACTIVATIONS, TrainOptions
from onchip.train.order import epoch_order
from onchip.train.row_weights import check_sample_weight
from onchip.train.spellings import KnownSpellings
from onchip.train.standardise import Standard, columns_of, why_rows_not_foldable, why_targets_not_foldable
from onchip.train.training_run import FitResult

_SHOWN_CLASSES = 10
MAX_APART = 1e3  # warn if the largest values of two columns differ by this factor


@dataclass(kw_only=True, eq=False, repr=False)
class Estimator(KnownSpellings, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Base of both estimators. As scikit-learn requires, parameters are stored as given and checked by fit."""

    network: Any = None  # a Network or the path of its file, to train from its weights; None: an MLP with `hidden`
    hidden: Sequence[int] = (100,)  # widths of the hidden layers; (): a linear model
    activation: str = "ReLU"  # between the layers; one of ACTIVATIONS
    scale: bool = False  # standardise columns, and a regressor's targets; network_ reads raw rows
    # The following are documented in TrainOptions.
    optimiser: str = "sgd"
    lr: float = 0.03
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: Any = 0.0
    clip_norm: float = 0.0
    ema: float = 0.0
    schedule: str = "constant"
    warmup: float = 0.0
    step_every: int = 10
    step_factor: float = 0.1
    frozen: Any = ()
    batch_size: int = 64
    epochs: int = 30
    validation: float = 0.0
    patience: int = 0
    early_stopping: bool = False  # as in scikit-learn: defaults to validation=0.1 and patience=10
    shuffle: bool = True
    seed: int = 0  # also seeds the initial weights
    precision: str = "fp32"
    device: str = "auto"  # for training and prediction
    threads: int | None = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train a new network, or a copy of `network`, on rows X (n, D_in) and targets y.

        X is converted to float32, or to the ids that `network` reads; it may also have the shape (n, ...) of its input.
        sample_weight  (n,): weight of each row in the loss, as in onchip.fit
        """
        self.__dict__.pop("network_", None)  # if this fit fails, the old network would not match the new classes
        x, targets = self._prepare(X, y)
        self._warn_of_scales(x, targets)
        return self._train(x, targets, sample_weight)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "network_")

    def __getstate__(self) -> dict[str, Any]:
        """All but the engine, which belongs to this process; the next prediction compiles a new one."""
        return {name: value for name, value in super().__getstate__().items() if name != "_compiled"}

    # -- training, shared with fit_many ---------------------------------------------------------------------

    def _prepare(self, X: Any, y: Any, reset: bool = True) -> tuple[Array, Array]:
        """Check X and y and convert them for `train.fit`; reset: record their features and classes."""
        raise NotImplementedError

    def _outputs(self, targets: Array) -> int:
        raise NotImplementedError

    def _options(self) -> TrainOptions:
        names = {field.name for field in fields(TrainOptions)}
        chosen = {name: value for name, value in self.get_params(deep=False).items() if name in names}
        if self.early_stopping:
            chosen |= {"validation": chosen["validation"] or 0.1, "patience": chosen["patience"] or 10}
        return TrainOptions(**chosen)

    def _given(self) -> Network | None:
        """The network to train; None: a new MLP."""
        if self.network is None:
            return None
        changed = [] if np.array_equal(self.hidden, Estimator.hidden) else ["hidden"]
        changed += ["activation"] if self.activation != Estimator.activation else []
        if changed:
            got, hint = f"network and {' and '.join(changed)}", f"omit {' and '.join(changed)}"
            raise InputError("two kinds of layers", got=got, expected="one of them", hint=hint)
        return load_given(self.network)

    def _validate(self, X: Any, y: Any = "no_validation", *, reset: bool, **how: Any) -> Any:
        """X (n, D_in), and y if given, as scikit-learn checks them.

        reset  record the features of X; else they must be those of the first fit
        """
        net = self._given() if reset else self.network_
        dtype: Any = np.float32
        if net is not None:
            X = flatten_rows(X, net.input)
            dtype = "numeric" if "int" in net.input.dtype else np.float32
        found = validate_data(self, X, y, dtype=dtype, order="C", reset=reset, **how)
        if net is not None:
            check_row_size(found[0] if isinstance(found, tuple) else found, net)
        return found

    def _new_network(self, targets: Array) -> Network:
        if (net := self._given()) is not None:
            self._check_outputs(net, targets)
            if self.scale and (why_not := self._why_not_scalable(net, targets)):
                hint = "scale=False, and a scaler before it"
                raise InputError("the network cannot be scaled", got=why_not, expected="Linears at the ends", hint=hint)
            return net
        activation = known_name(self.activation, ACTIVATIONS, "activation", "activation='ReLU'")
        try:
            hidden = [operator.index(width) for width in self.hidden]
        except TypeError:
            expected = "a tuple of whole numbers"
            raise InputError("bad hidden", got=repr(self.hidden), expected=expected, hint="hidden=(100,)") from None
        widths = (self.n_features_in_, *hidden, self._outputs(targets))
        return mlp(*widths, activation=activation, seed=self._options().seed, name=type(self).__name__.lower())

    def _check_outputs(self, net: Network, targets: Array) -> None:
        """ShapeError unless the network has one output per class or target."""
        wanted, of = self._outputs(targets), self._outputs_text()
        if net.output.row_size != wanted:
            raise ShapeError(
                f"the outputs of network '{net.name}' do not fit y", got=f"{net.output.row_size}: {net.output}",
                expected=f"{wanted}: {of}", hint=f"a network with {wanted} outputs",
            )  # fmt: skip

    def _outputs_text(self) -> str:
        raise NotImplementedError

    @staticmethod
    def _why_not_scalable(net: Network, targets: Array) -> str:
        return why_rows_not_foldable(net) or (why_targets_not_foldable(net) if targets.ndim == 2 else "")

    @staticmethod
    def _kind(options: TrainOptions) -> str:
        return f"{options.optimiser} with momentum" if options.momentum else options.optimiser

    def _train(self, x: Array, targets: Array, sample_weight: Any = None) -> Self:
        options, (net, standard) = self._options(), self._begin(x, targets)
        x, targets = shape_data(*standard.apply(x, targets), net)
        where: dict[str, Any] = {"sample_weight": sample_weight, "device": self.device, "threads": self.threads}
        return self._keep(fit(net, x, targets, **where, **asdict(options)), standard)

    def _begin(self, x: Array, targets: Array) -> tuple[Network, Standard]:
        """The network before its first step, and the scaling of its rows and targets."""
        net, standard = self._new_network(targets), self._new_standard(x, targets)
        return net if standard.raw is None else standard.unfold(), standard

    def _new_standard(self, x: Array, targets: Array) -> Standard:
        """The scaling of these rows and targets, if `scale` is set."""
        if not isinstance(self.scale, bool | np.bool_):
            raise InputError("bad scale", got=repr(self.scale), expected="True or False", hint="scale=True")
        if not self.scale:
            return Standard()
        of_targets = columns_of(targets, what="target") if targets.ndim == 2 else None
        return Standard(columns_of(x), of_targets, self._given())

    def _warn_of_scales(self, x: Array, targets: Array, stacklevel: int = 3) -> None:
        """Warn if the scales of columns (and a regressor's targets) differ widely and `scale`, if possible, is off."""
        if (net := self._given()) is not None and self._why_not_scalable(net, targets):
            return
        sizes = np.concatenate([_sizes(each) for each in (x, targets) if each.ndim == 2])
        least, most = float(min(sizes[sizes > 0], default=1.0)), float(sizes.max())
        if not self.scale and most >= MAX_APART * least:
            what = "columns" if targets.ndim == 1 else "columns and targets"
            warnings.warn(
                f"the largest values of {what} range from {least:.3g} to {most:.3g}, which hurts training; "
                f"try {type(self).__name__}(scale=True), or a StandardScaler before it", UserWarning, stacklevel,
            )  # fmt: skip

    def _keep(self, result: FitResult, standard: Standard) -> Self:
        self._trained, self._standard = result.network, standard  # partial_fit continues from these
        self.network_ = standard.fold(result.network)
        self.history_ = result.history
        self.loss_curve_ = list(result.epoch_losses)
        self.n_iter_ = len(self.loss_curve_)
        self._state = {name: array for name, array in result.state.items() if not name.startswith(f"{AVERAGE}:")}
        self._trained_as = self._kind(self._options())
        self._compiled = self._compile()  # not on first use: scikit-learn requires that predict changes no attribute
        return self

    def _train_pass(self, x: Array, targets: Array, sample_weight: Any = None) -> Self:
        """Train one epoch from the current weights, with the row order of the same epoch in `fit`."""
        done = self.n_iter_ if hasattr(self, "network_") else 0
        history, losses = (self.history_, self.loss_curve_) if done else ((), [])
        if not done:
            self._warn_of_scales(x, targets, stacklevel=4)
        # All passes use the scaling of the first.
        net, standard = (self._trained, self._standard) if done else self._begin(x, targets)
        x, targets = shape_data(*standard.apply(x, targets), net)
        options, weights = self._options(), check_sample_weight(sample_weight, len(x))
        if options.shuffle:
            order = epoch_order(len(x), options.seed, done)
            x, targets, weights = x[order], targets[order], None if weights is None else weights[order]
        alone: dict[str, Any] = {"schedule": "constant", "warmup": 0.0, "ema": 0.0, "validation": 0.0}
        one = replace(options, epochs=1, patience=0, shuffle=False, **alone)
        state = self._state if done else None
        if state is not None and self._kind(options) != self._trained_as:
            raise InputError(
                "the optimiser has changed since the last pass", got=self._kind(options), expected=self._trained_as,
                hint="fit again, or restore the optimiser",
            )  # fmt: skip
        where: dict[str, Any] = {"sample_weight": weights, "device": self.device, "threads": self.threads}
        self._keep(fit(net, x, targets, state=state, **where, **asdict(one)), standard)
        self.history_ = (*history, *(replace(epoch, epoch=done + 1) for epoch in self.history_))
        self.loss_curve_ = [*losses, *self.loss_curve_]
        self.n_iter_ = done + 1
        return self

    # -- prediction --------------------------------------------------------------------------------------

    def _compile(self) -> Engine:
        return compile(self.network_, self.device, threads=self.threads)

    def _forward(self, X: Any) -> Array:
        """Run the compiled network on X: (n, D_out) float32."""
        check_is_fitted(self)
        is_encoded = self.network_.meaning.table and hasattr(X, "columns")  # the engine encodes a data frame
        x = X if is_encoded else shape_rows(self._validate(X, reset=False), self.network_.input)
        if not hasattr(self, "_compiled"):  # after unpickling or loading
            self._compiled = self._compile()
        out = self._compiled(x)
        return out.reshape(len(out), self.network_.output.row_size)  # type: ignore[no-any-return]


def shape_data(x: Array, targets: Array, net: Network) -> tuple[Array, Array]:
    """Rows (n, D_in) and targets, classes (n,) or values (n, D_out), in the shapes of the network."""
    return shape_rows(x, net.input), shape_targets(targets, net)


def _sizes(x: Array) -> Array:
    """(D,): the largest absolute value of each column."""
    return np.maximum(x.max(axis=0), -x.min(axis=0))  # type: ignore[no-any-return]


@dataclass(kw_only=True, eq=False, repr=False)
class Classifier(ClassifierMixin, Estimator):  # type: ignore[misc]
    """An MLP or another network, trained with the mean cross-entropy.

    Parameters: `network`, or `hidden` and `activation`; `device`, `threads`, and the options of `onchip.fit` by name.
    Labels may be of any sortable type. If all rows have one class, that class is always predicted.

    network                 a Network, or the path of a .onnx or .safetensors file: trained from its weights, in place
                            of an MLP. It returns one logit per label, in the order of classes_; X is (n, row size)
                            or (n, ...) of its input. `seed` chooses row order, held-out rows and dropouts
    scale                   standardise columns by the rows of `fit` or of the first `partial_fit`. The scaling is
                            folded into network_, which reads raw rows. Without it, a warning is issued if the scales of
                            columns differ by a factor of 1,000
    class_weight            "balanced", {label: weight}, or one weight per class in the order of classes_
    classes_                the labels, sorted; the network has one output per label
    network_                the trained Network: float32 rows to logits; onchip.save writes it, or the whole estimator
    n_features_in_, feature_names_in_    of X; the names only if X is a data frame with all columns named
    n_iter_, loss_curve_, history_       number of epochs, mean loss per epoch, an Epoch record per epoch
    """

    label_smoothing: float = 0.0
    class_weight: Any = None

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Train one pass over these rows at rate `lr`, from the weights and optimiser state of the last call.

        The first call needs `classes`: all labels that later calls may contain. k passes over the same rows equal `fit`
        with epochs=k. `schedule`, `warmup`, `ema`, `validation` and `patience` apply to `fit` only.
        """
        is_first = not hasattr(self, "network_")
        if is_first and classes is None:
            expected = "all labels of this and later calls"
            raise InputError("the first partial_fit needs classes", expected=expected, hint="classes=np.unique(y)")
        if classes is not None:
            labels = np.unique(np.asarray(classes))
            if not is_first and not np.array_equal(labels, self.classes_):
                raise InputError("classes have changed", got=str(labels), expected=str(self.classes_))
            self.classes_: Array = labels
        return self._train_pass(*self._prepare(X, y, reset=is_first, known=True), sample_weight)

    def predict(self, X: Any) -> Array:
        """(n,) labels: the class with the largest output per row."""
        best = self._forward(X).argmax(axis=1)
        return self.classes_[best]  # type: ignore[no-any-return]

    def predict_proba(self, X: Any) -> Array:
        """(n, classes) float64: the softmax of the network's outputs; columns in the order of `classes_`."""
        logits = self._forward(X).astype(np.float64)
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        return shares / shares.sum(axis=1, keepdims=True)  # type: ignore[no-any-return]

    def _prepare(self, X: Any, y: Any, reset: bool = True, known: bool = False) -> tuple[Array, Array]:
        x, y = self._validate(X, y, reset=reset)
        check_classification_targets(y)
        if not known:
            self.classes_ = np.unique(y)
        targets = np.searchsorted(self.classes_, y)
        unknown = np.flatnonzero(self.classes_[np.minimum(targets, len(self.classes_) - 1)] != y)
        if unknown.size:
            got = f"{y[unknown[0]]!r} in row {unknown[0]}"
            expected, hint = ", ".join(map(str, self.classes_)), "a first call with classes= all labels, or fit"
            raise InputError("a label is not one of the classes", got=got, expected=expected, hint=hint)
        return x, targets

    def _outputs(self, targets: Array) -> int:
        return len(self.classes_)

    def _outputs_text(self) -> str:
        shown = ", ".join(map(str, self.classes_[:_SHOWN_CLASSES]))
        return f"one per class, {shown}{', ...' if len(self.classes_) > _SHOWN_CLASSES else ''}"

    def _options(self) -> TrainOptions:
        if not isinstance(self.class_weight, Mapping):
            return super()._options()
        indices = {label: i for i, label in enumerate(self.classes_.tolist())}
        if unknown := [label for label in self.class_weight if label not in indices]:
            expected = ", ".join(map(str, indices))
            hint = "{label: weight}, of labels in y"
            raise InputError("class_weight names an unknown class", got=repr(unknown[0]), expected=expected, hint=hint)
        by_index = {indices[label]: weight for label, weight in self.class_weight.items()}
        others: TrainOptions = copy(self).set_params(class_weight=None)._options()
        return replace(others, class_weight=by_index)


@dataclass(kw_only=True, eq=False, repr=False)
class Regressor(RegressorMixin, Estimator):  # type: ignore[misc]
    """An MLP or another network, trained with squared or absolute errors. y is (n,), or (n, D_out) for several
    targets per row.

    Inputs and targets far from mean 0 and deviation 1 train slowly or diverge. A warning is issued if their scales
    differ by a factor of 1,000. Use scale=True, or a StandardScaler for X and a TransformedTargetRegressor for y.

    network     a Network, or the path of a .onnx or .safetensors file: trained from its weights, in place of an MLP; it
                returns D_out values per row. X is (n, row size) or (n, ...) of its input
    scale       standardise columns and targets by the rows of `fit` or of the first `partial_fit`. The scaling is
                folded into network_, which reads raw rows and returns raw targets; losses are of standardised targets
    loss        "mse": the mean of the squared errors; "half_sse": half their sum over the batch; "mae": the mean of the
                absolute errors; "huber", with delta 1
    Other parameters: `hidden` and `activation` of an MLP, `device`, `threads`, and the options of `onchip.fit` by name.
    network_    the trained Network: float32 rows to float32 predictions; onchip.save writes it, or the whole estimator
    n_features_in_, feature_names_in_    of X; the names only if X is a data frame with all columns named
    n_iter_, loss_curve_, history_       number of epochs, mean loss per epoch, an Epoch record per epoch
    """

    loss: str = "mse"
    optimiser: str = "adam"
    lr: float = 0.01

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train one pass over these rows at rate `lr`, from the weights and optimiser state of the last call.

        k passes over the same rows equal `fit` with epochs=k. `schedule`, `warmup`, `ema`, `validation` and `patience`
        are for `fit`.
        """
        return self._train_pass(*self._prepare(X, y, reset=not hasattr(self, "network_")), sample_weight)

    def predict(self, X: Any) -> Array:
        """(n,) or, if y was 2-d, (n, D_out): the network's float32 outputs as float64, as scikit-learn requires."""
        out = self._forward(X).astype(np.float64)
        return out.ravel() if self._y_is_flat else out

    def _prepare(self, X: Any, y: Any, reset: bool = True) -> tuple[Array, Array]:
        known_name(self.loss, ("mse", "half_sse", "mae", "huber"), "loss of a regressor", "loss='mse'")
        x, y = self._validate(X, y, reset=reset, multi_output=True, y_numeric=True)
        y = check_array(y, dtype=np.float32, order="C", ensure_2d=False, input_name="y")
        if reset:
            self._y_is_flat = y.ndim == 1
        return x, y.reshape(len(y), -1)

    def _outputs(self, targets: Array) -> int:
        return int(targets.shape[1])

    def _outputs_text(self) -> str:
        return "one per target"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
