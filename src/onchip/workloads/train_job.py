"""A training job from user input: its network, data and options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from onchip.errors import InputError, ShapeError
from onchip.kernels.chain import find_chain
from onchip.kernels.training import bytes_of
from onchip.network.build import mlp
from onchip.network.graph import Network
from onchip.network.names import known_name
from onchip.network.recipe import Array
from onchip.train.given_network import check_trainable
from onchip.train.options import ACTIVATIONS, TrainOptions
from onchip.train.standardise import (
    Standard,
    columns_of,
    why_rows_not_foldable,
    why_targets_not_foldable,
    without_centre,
)
from onchip.workloads import WORKLOADS, backprop, digits, lenet, load
from onchip.workloads.classify import fit_rows
from onchip.workloads.dataset import Dataset
from onchip.workloads.table_data import TEST_SHARE, Source, is_file, load_table

NEW = "mlp"  # a new MLP for the user's data
HIDDEN = (100,)  # its hidden widths, as in the estimators


class TrainingCase(Protocol):
    """The interface of workload modules whose network can be trained."""

    TRAIN: TrainOptions
    network: Callable[..., Network]  # (number of inputs, seed=, and optionally hidden=, activation=)
    load_data: Callable[..., Dataset]  # (the name of a data set, if given)


TRAINED: dict[str, TrainingCase] = {"digits": digits, "backprop": backprop}
NETWORKS: dict[str, dict[str, TrainingCase]] = {"digits": {"mlp": digits, "lenet": lenet}}  # where there are several


@dataclass(frozen=True, eq=False)
class TrainJob:
    net: Network
    data: Dataset
    options: TrainOptions
    source: Source
    make_net: Callable[..., Network]  # (seed=)
    standard: Standard = Standard()  # noqa: RUF009 - frozen
    has_own_layers: bool = False  # those of a file; else `hidden` and `activation` choose them
    notes: tuple[str, ...] = ()  # on the initial weights, and on preprocessing of rows and targets
    validation: tuple[Array, Array] | None = None  # rows and targets; None: a share of the training rows

    def seeded(self, seed: int) -> TrainJob:
        """The same job and data with another seed."""
        return replace(self, net=self.make_net(seed=seed), options=replace(self.options, seed=seed))

    @property
    def widths(self) -> tuple[int, ...] | None:
        """Widths of the input and of each layer of an MLP; None: another network."""
        net, _ = without_centre(self.net)
        chain = find_chain(net, 0)
        return chain.widths if chain is not None and len(chain.nodes) == len(net.nodes) else None

    @property
    def title(self) -> str:
        """Network, data and the most important options."""
        o, parameters = self.options, f"({self.net.parameters:,} parameters)"
        layers = parameters if self.widths is None else "-".join(map(str, self.widths))
        words = [o.optimiser, f"lr {o.lr:g}", f"batch {o.batch_size}"]
        words += [f"{'Nesterov ' * o.nesterov}momentum {o.momentum:g}"] if o.momentum else []
        groups = o.weight_decay if o.has_decay_groups else [("", o.weight_decay)] * (o.weight_decay > 0)
        words += [f"weight decay {value:g} {pattern}".strip() for pattern, value in groups]
        words += [f"clip norm {o.clip_norm:g}"] if o.clip_norm else []
        words += [f"ema {o.ema:g}"] if o.ema else []
        words += [f"label smoothing {o.label_smoothing:g}"] if o.label_smoothing else []
        words += [f"class weight {o.class_weight}"] if o.class_weight is not None else []
        words += [f"frozen {','.join(o.frozen)}"] if o.frozen else []
        words += [o.schedule] if o.schedule != "constant" else []
        words += [f"warmup {o.warmup:g}"] if o.warmup else []
        return f"{self.net.name} {layers} on {self.data.name}: {', '.join(words)}"


def train_job(
    model: str,
    source: Source,
    given: Mapping[str, Any],
    *,
    network: str | None = None,
    hidden: Sequence[int] | None = None,
    activation: str | None = None,
    scale: bool | None = None,
) -> TrainJob:
    """Collect everything that `fit` needs.

    model   a name of TRAINED, NEW, or a network by its file or workload name, whose weights are the initial ones
    source  the data: the name of a set, or the user's files
    given   options by name; defaults are the workload's
    network one of the workload's NETWORKS; None: the first
    scale   standardise the user's rows and targets; None: targets, and columns unless rows are images or similar
    """
    workload = _workload(model, network)
    base = TrainOptions() if workload is None else workload.TRAIN
    options = TrainOptions.of({**asdict(base), **given})
    chosen = _chosen_layers(model, workload, hidden=hidden, activation=activation)
    standard, notes = Standard(), list[str]()
    is_named = source.data is None or not is_file(source.data)
    if source.test_data is None and source.test_share is None and not is_named:
        source = replace(source, test_share=TEST_SHARE)
    if scale and (workload is not None or is_named):
        got, hint = f"--scale with {source.data or model}", f"onchip train {NEW} --data table.csv --labels last"
        raise InputError("--scale is for your own data", got=got, expected="no --scale", hint=hint)
    if workload is not None:
        data = _named_data(model, workload, source)
        make_net: Callable[..., Network] = partial(workload.network, data.inputs, **chosen)
    elif model == NEW:
        data = _users_data(source, options)
        make_net = partial(mlp, data.inputs, *chosen.pop("hidden", HIDDEN), data.outputs, **chosen)
        standard, notes = _standard(data, options, scale)
    else:
        net = load(model)  # before the data: a wrong name fails at once
        check_trainable(net)
        has_set = is_named and (source.data is not None or source.labels is None)
        data = _named_data(model, digits, source) if has_set else _users_data(source, options, net)
        data, notes = _for_network(data, net, model)
        if not is_named:
            standard, more = _standard(data, options, scale, net)
            notes += more
            net = net if standard.raw is None else standard.unfold()

        def make_net(seed: int) -> Network:
            return net

    has_own_layers = workload is None and model != NEW
    return TrainJob(
        make_net(seed=options.seed), data, options, source, make_net, standard, has_own_layers, tuple(notes)
    )  # fmt: skip


def files_read(model: str, source: Source) -> dict[str, str | Path]:
    """Every file that `train_job` will read, by its command-line name."""
    found: dict[str, str | Path] = {f"--{name.replace('_', '-')}": path for name, path in source.files().items()}
    if model not in (*TRAINED, *WORKLOADS, NEW):
        found["MODEL"] = model
    if "--data" not in found and (folder := digits.find_mnist()) is not None:  # a data set by name, or the default one
        found |= {f"MNIST's {path.name}": path for path in digits.mnist_files(folder)}
    return found


def _workload(model: str, network: str | None) -> TrainingCase | None:
    """The workload with this network; None if the model is none of TRAINED."""
    if network is None:
        return TRAINED.get(model)
    if model not in NETWORKS:
        names, got = ", ".join(NETWORKS), f"--network {network} with {model}"
        hint = f"onchip train {names} --network {network}"
        raise InputError(f"--network is for {names}", got=got, expected="no --network", hint=hint)
    return NETWORKS[model][known_name(network, NETWORKS[model], "network", f"--network {next(iter(NETWORKS[model]))}")]


def _chosen_layers(model: str, workload: TrainingCase | None, **choices: Any) -> dict[str, Any]:
    chosen = {name: value for name, value in choices.items() if value is not None}
    accepted: Collection[str] = choices if model == NEW else ()
    if workload is not None:
        accepted = inspect.signature(workload.network).parameters
    if refused := [name for name in chosen if name not in accepted]:
        raise InputError(
            f"--{refused[0]} is for a new network", got=f"--{refused[0]} with {model}, whose layers are fixed",
            expected=f"no --{refused[0]}", hint=f"onchip train {NEW} --{refused[0]} ...",
        )  # fmt: skip
    if "activation" in chosen:
        hint = f"--activation {ACTIVATIONS[0]}"
        chosen["activation"] = known_name(chosen["activation"], ACTIVATIONS, "activation", hint)
    return chosen


def _standard(
    data: Dataset, options: TrainOptions, scale: bool | None, raw: Network | None = None
) -> tuple[Standard, list[str]]:
    """The scaling of rows and targets, from the training rows only, and messages for the user.

    raw  the network to train further; None: a new one
    """
    if scale is False:
        return Standard(), ["columns are not scaled (--no-scale)"]
    why_no_rows = "" if raw is None else why_rows_not_foldable(raw)
    why_no_targets = "" if raw is None else why_targets_not_foldable(raw)
    if why_no_rows and scale:
        raise InputError(
            "columns cannot be scaled", got=why_no_rows, expected="rows whose first reader is a Linear with a bias",
            hint="omit --scale, or train a new network: onchip train mlp",
        )  # fmt: skip
    rows = targets = None
    notes = []
    found = bytes_of(data.x_train) if scale is None and data.is_table and not why_no_rows else None
    if why_no_rows:
        notes.append(f"columns are not scaled, as that cannot be folded into the network: {why_no_rows}")
    elif scale is None and not data.is_table:
        notes.append("rows are images, series or bytes: not scaled; --scale standardises their columns")
    elif found is not None and found[1] < 1:
        notes.append("all values are bytes / 255, like pixels: not scaled; --scale standardises their columns")
    else:
        rows = columns_of(data.x_train, data.columns)
        notes.append("columns standardised; folded into the first layer; --no-scale turns it off")
    if data.y_train.ndim == 2 and options.loss != "bce_with_logits":  # its targets are shares, from 0 to 1
        if why_no_targets:
            notes.append(f"targets are not scaled, as that cannot be folded into the network: {why_no_targets}")
        else:
            targets = columns_of(data.y_train, what="target")
            notes.append("targets standardised: losses refer to these; folded into the last layer")
    return Standard(rows, targets, raw), notes


def _for_network(data: Dataset, net: Network, model: str) -> tuple[Dataset, list[str]]:
    """The data for a given network, with its numbering of the classes, and messages for the user.

    ShapeError if rows or classes do not fit.
    """
    fit_rows(data.x_train[:0], net, data)
    initial = f"random, from seed 0: {model} is a workload" if model in WORKLOADS else f"those of {model}"
    notes, row_shape = [f"initial weights: {initial}"], net.input.row_shape
    if len(data.row_shape) > 1 and _without_ones(data.row_shape) != _without_ones(row_shape):
        notes.append(f"rows {data.row_shape} are reshaped to {row_shape}, not transposed")
    classes = net.meaning.classes
    if data.words and data.words != classes and set(data.words) <= set(classes):
        index = np.array([classes.index(word) for word in data.words])
        data = replace(data, y_train=index[data.y_train], y_test=index[data.y_test], words=classes)
        notes.append(f"classes are numbered as in {model}")
    if data.y_train.ndim == 1 and data.outputs > net.output.row_size:
        raise ShapeError(
            f"the classes of {data.name} do not fit network '{net.name}'", got=f"classes 0 to {data.outputs - 1}",
            expected=f"0 to {net.output.row_size - 1}, as it returns {net.output}",
            hint=f"a network with {data.outputs} outputs, or --loss mse if these are values",
        )  # fmt: skip
    return data, notes


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _named_data(model: str, workload: TrainingCase, source: Source) -> Dataset:
    """Load a data set by name; it has its own labels and test rows."""
    extra = {name: value for name, value in asdict(source).items() if name != "data" and value is not None}
    if source.data is not None and is_file(source.data):
        extra = {"data": source.data, **extra}
    if extra:
        name, value = next(iter(extra.items()))
        raise InputError(
            f"{model} has its own data", got=f"--{name.replace('_', '-')} {value}", expected="the name of a set",
            hint=f"onchip train {NEW} --data FILE --labels ... for your own files",
        )  # fmt: skip
    return workload.load_data() if source.data is None else workload.load_data(source.data)


def _users_data(source: Source, options: TrainOptions, net: Network | None = None) -> Dataset:
    """net  the network to train further, whose input may be ids"""
    if source.data is None or not is_file(source.data):
        got = "no --data" if source.data is None else f"--data {source.data}: there is no such file"
        hint = "--data table.csv --labels last"
        raise InputError("no data to train on", got=got, expected="a .csv, .npy or idx file", hint=hint)
    dtype = net.input.dtype if net is not None and "int" in net.input.dtype else "float32"
    return load_table(source, options.loss == "cross_entropy", options.seed, dtype)
