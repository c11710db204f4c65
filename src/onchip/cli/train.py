"""onchip train: train a new network, or continue with an existing one."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from typer import Context

from onchip.cli import train_options as opt
from onchip.cli.options import Json, Threads, Verbose
from onchip.cli.output import Update, print_device, print_json, print_message, progress, rate, resumable
from onchip.cli.profiled import ShowTrainingProfile, TrainingTrace, profiled
from onchip.cli.ranks import start_ranks
from onchip.cli.train_faces import MODEL, ONLY_HERE, check_no_faces, refuse_others, train_faces
from onchip.network.text import plural, size_text

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from onchip.cli.train_config import Settings
    from onchip.runtime.distributed.ranks import Ranks
    from onchip.train.training_run import Progress
    from onchip.workloads.classify import Trained
    from onchip.workloads.train_job import TrainJob


_NOT_SETTINGS = ("context", "config", "profile", "trace", "as_json", "verbose", "ranks")  # not allowed in a config file


def train(
    context: Context,
    model: opt.Model = None,
    output: opt.Output = None,
    config: opt.Config = None,
    data: opt.Data = None,
    labels: opt.Labels = None,
    test_data: opt.TestData = None,
    test_labels: opt.TestLabels = None,
    test_share: opt.TestShare = None,
    column: opt.Column = None,
    skip_bad: opt.SkipBad = None,
    folds: opt.Folds = None,
    network: opt.Network = None,
    drop: opt.Drop = None,
    missing: opt.Missing = None,
    hidden: opt.Hidden = None,
    activation: opt.Activation = None,
    scale: opt.Scale = None,
    loss: opt.Loss = None,
    label_smoothing: opt.LabelSmoothing = None,
    class_weight: opt.ClassWeight = None,
    optimiser: opt.Optimiser = None,
    lr: opt.Lr = None,
    momentum: opt.Momentum = None,
    nesterov: opt.Nesterov = None,
    weight_decay: opt.WeightDecay = None,
    clip_norm: opt.ClipNorm = None,
    ema: opt.Ema = None,
    schedule: opt.Schedule = None,
    warmup: opt.Warmup = None,
    step_every: opt.StepEvery = None,
    step_factor: opt.StepFactor = None,
    frozen: opt.Frozen = None,
    batch_size: opt.BatchSize = None,
    epochs: opt.Epochs = None,
    validation: opt.Validation = None,
    patience: opt.Patience = None,
    shuffle: opt.Shuffle = None,
    seed: opt.Seed = None,
    seeds: opt.Seeds = None,
    ranks: opt.Ranks = None,
    precision: opt.Precision = None,
    checkpoint: opt.Checkpoint = None,
    checkpoint_every: opt.CheckpointEvery = None,
    resume: opt.Resume = None,
    debug: opt.Debug = None,
    log: opt.Log = None,
    plot: opt.Plot = None,
    device: opt.Device = None,
    threads: Threads = None,
    width: opt.Width = None,
    samples: opt.Samples = None,
    augment: opt.Augment = None,
    flip: opt.Flip = None,
    profile: ShowTrainingProfile = False,
    trace: TrainingTrace = None,
    as_json: Json = False,
    verbose: Verbose = 0,
) -> None:
    """Train a network and test it.

    \b
    Example:
      onchip train digits --data sklearn --epochs 5 -o digits.onnx
      onchip train digits --data sklearn --network lenet
      onchip train digits --data sklearn --optimiser adam --lr 0.001 --epochs 5
      onchip train digits --data sklearn --schedule cosine --warmup 1 --epochs 5
      onchip train digits --data sklearn --momentum 0.9 --nesterov --epochs 5
      onchip train digits.onnx --data sklearn --frozen 'fc1.*' --ema 0.99
      onchip train digits --data sklearn --epochs 5 --seeds 8
      onchip train digits.onnx --data sklearn --epochs 2 -o further.onnx

    \b
    As MPI ranks, which share the seeds or the rows of large batches:
      onchip train digits --data sklearn --epochs 5 --seeds 8 --ranks 2
      mpiexec -n 16 onchip train digits --data sklearn --epochs 5 --seeds 64
      mpiexec -n 4 onchip train backprop --device cpu

    \b
    On texts: a network that onchip run applies to texts:
      onchip train sentiment --data reviews.csv --labels label -o texts.onnx
      onchip train sentiment --data FOLDER --folds 10 --json
      onchip train texts.onnx --data more.csv --labels label -o texts.onnx

    \b
    With your own data, and with the options in a file:
      onchip train mlp --data table.csv --labels last -o net.onnx
      onchip train mlp --data t.parquet --labels y --drop id --missing mean
      onchip train mlp --data images.npy --labels labels.npy --plot curve.png
      onchip train cnn.onnx --data images.npy --labels labels.npy -o net.onnx
      onchip train --config run.toml --lr 0.1

    \b
    A generator of pictures: of a folder of .png and .jpg, of an .npz, or mnist:
      onchip train faces --data photos/ --width 16 --samples s.png -o net.onnx

    A file can hold any network with one input and one output; its weights are the initial ones. Its input decides how
    rows are read: they are reshaped to one row of it, and ids stay integers.
    Same seed, same kind of machine: same bits. The output is written after the last epoch, complete or not at all.
    Omitted options are the workload's; the defaults below are those of mlp. Tables and compressed files are converted
    once and cached in $ONCHIP_CACHE, else in ~/.cache/onchip.
    """
    # The parameters above, by name. None: not given; a config file may set it.
    # Not context.params: with Typer 0.28 and earlier, its paths are still text.
    arguments = {name: value for name, value in locals().items() if name not in _NOT_SETTINGS}

    if (model or "").lower() == MODEL:
        train_faces({**arguments, "config": config}, as_json, verbose)
        return
    refuse_others(model or "the model of the config file", arguments)
    arguments = {name: value for name, value in arguments.items() if name not in ONLY_HERE}

    from onchip.cli.curve import check_plot, draw_curve
    from onchip.cli.train_config import settings
    from onchip.cli.train_folds import check_seeds, check_text_options, train_folds
    from onchip.cli.train_log import TrainLog, log_head
    from onchip.errors import InputError
    from onchip.files import check_outputs, check_writable
    from onchip.formats.load import save
    from onchip.workloads import WORKLOADS, model_name
    from onchip.workloads.classify import check_folder, check_model_path, train_and_test, with_meaning
    from onchip.workloads.table_data import Source
    from onchip.workloads.text_job import KIM, TEXTS, text_job, text_network
    from onchip.workloads.train_job import NEW, TRAINED, files_read, train_job

    chosen, options = settings(config, arguments)
    chosen = replace(chosen, model=model_name(chosen.model, (*TRAINED, NEW, *WORKLOADS)))
    check_no_faces(chosen.model)
    found = start_ranks(ranks, context.obj)
    source = Source(**{name: getattr(chosen, name) for name in Source.__dataclass_fields__})
    states = [] if chosen.checkpoint is None else [chosen.checkpoint, *chosen.checkpoint.glob("checkpoint-*")]
    check_outputs(
        {"--config": config, **files_read(chosen.model, source)},
        {"--output": chosen.output, "--log": chosen.log, "--plot": chosen.plot, "--trace": trace,
         **{f"--checkpoint ({path})": path for path in states}},
    )  # fmt: skip
    for check, path in ((check_model_path, chosen.output), (check_writable, chosen.log), (check_plot, chosen.plot),
                        (check_writable, trace), (check_folder, chosen.checkpoint)):  # fmt: skip
        if path is not None:
            check(path)
    if chosen.checkpoint is None and chosen.checkpoint_every is not None:
        got, expected = "--checkpoint-every without --checkpoint", "--checkpoint too"
        raise InputError("no folder for checkpoints", got=got, expected=expected, hint="--checkpoint FOLDER")
    trained_on_texts = text_network(chosen.model, source.data)
    check_text_options(chosen, trained_on_texts)
    if chosen.folds is not None:
        train_folds(chosen, source, options, as_json, found.size)
        return
    layers: dict[str, Any] = {"hidden": chosen.hidden, "activation": chosen.activation}
    if chosen.model == TEXTS or trained_on_texts is not None:
        job = text_job(source, options, chosen.network or KIM, trained_on_texts)
        check_seeds(chosen.seeds, job)
    else:
        job = train_job(chosen.model, source, options, network=chosen.network, scale=chosen.scale, **layers)
    rows, test_rows = len(job.data.x_train), len(job.data.x_test)
    print_message(f"data: {job.data.name}, {rows:,} training rows, {test_rows:,} test rows ({job.data.where})")
    for note in (*job.data.notes, *job.notes):
        print_message(note)
    requested = {**asdict(chosen), **asdict(job.options), **asdict(job.source), "data": job.data.name,
             "layers": job.widths, "classes": job.data.words, "scale": job.standard.rows is not None,
             "scale_targets": job.standard.targets is not None}  # fmt: skip
    # Only rank 0 prints.
    recording = profiled(profile and not found.rank, None if found.rank else trace)
    if chosen.seeds > 1:
        train_all(job, chosen, requested, as_json, verbose, found, recording)
        return
    how = {name: value for name in ("device", "threads", "checkpoint", "checkpoint_every", "resume", "debug")
           if (value := getattr(chosen, name)) is not None}  # fmt: skip
    how |= {"spread": found.size > 1, "standard": job.standard, "validation_data": job.validation}
    started = time.perf_counter()
    with (
        resumable(f"onchip train {chosen.model}", chosen.checkpoint),
        recording,
        TrainLog(None if found.rank else chosen.log, log_head(requested)) as log_file,
        progress(f"train {job.net.name}", job.options.epochs) as update,
    ):

        def on_progress(p: Progress) -> None:
            log_file.begin()
            show_epoch(p, update)

        trained = train_and_test(
            job.net, job.data, job.options, on_progress=on_progress, on_epoch=log_file.epoch, **how
        )
    if found.rank:
        return
    result = trained.fit
    print_device(result.chosen, result.plan, verbose, time.perf_counter() - started - result.seconds)
    if chosen.output is not None:
        save(with_meaning(trained.network, job.data), chosen.output)
        print_message(f"wrote {chosen.output}")
    if chosen.plot is not None:
        draw_curve(chosen.plot, job.title, job.options.loss, result.history, result.best_epoch, tested(trained))
        print_message(f"wrote {chosen.plot}")
    warn_of_baseline(trained, job)
    samples_per_s = sum(epoch.samples_per_s * epoch.seconds for epoch in result.history) / result.seconds
    if as_json:
        print_json({
            **requested, "device": result.chosen, "history": [asdict(epoch) for epoch in result.history],
            "epoch_losses": result.epoch_losses, "best_epoch": result.best_epoch, **scores(trained),
            "test_rows": test_rows, "seconds": result.seconds,
            "ms_per_epoch": trained.ms_per_epoch, "samples_per_s": samples_per_s, "gpu_bytes": result.gpu_bytes,
            "gpu_busy": result.gpu_busy, "process_bytes": result.process_bytes,
            "plan": result.plan.to_dict(),
        })  # fmt: skip
        return
    print(", ".join(filter(None, [tested(trained), f"training loss {result.epoch_losses[-1]:.4f}"])))
    best = result.history[result.best_epoch - 1]
    if best.validation_loss is not None:
        accuracy = "" if best.validation_accuracy is None else f", accuracy {best.validation_accuracy:.2%}"
        print(f"validation loss {best.validation_loss:.4f}{accuracy} in epoch {best.epoch}, whose weights are saved")
    done = f"{plural(len(result.history), 'epoch')}, {trained.ms_per_epoch:.1f} ms/epoch"
    print(f"{done}, {rate(samples_per_s, 'samples')}")
    gpu = (
        "" if result.gpu_busy is None else f"{size_text(result.gpu_bytes)} of GPU memory, busy {result.gpu_busy:.0%}; "
    )
    print(f"memory: {gpu}{size_text(result.process_bytes)} at most in this process, libraries and data included")


def train_all(
    job: TrainJob, chosen: Settings, requested: dict[str, Any], as_json: bool, verbose: int, ranks: Ranks,
    recording: AbstractContextManager[object],
) -> None:  # fmt: skip
    """Train one network per seed; rank 0 writes the one with the lowest loss."""
    from onchip.formats.load import save
    from onchip.workloads.classify import with_meaning
    from onchip.workloads.seeds import spread, train_seeds

    count, started = chosen.seeds, time.perf_counter()
    with recording, progress(f"train {count} x {job.net.name}", count) as update:
        results = train_seeds(
            job, count, device=chosen.device, threads=chosen.threads,
            on_progress=lambda done: update(done, f"{int(done)} of {count} networks"), spread=True,
        )  # fmt: skip
    ranks.leave()
    if ranks.rank:
        return
    seconds, best = time.perf_counter() - started, results.done[results.best_seed]
    print_device(best.fit.chosen, best.fit.plan, verbose, seconds - best.fit.seconds)
    if chosen.output is not None:
        save(with_meaning(best.network, job.data), chosen.output)
        print_message(f"wrote {chosen.output}, of seed {results.best_seed}")
    warn_of_baseline(best, job)
    if as_json:
        each = [
            {"seed": seed, "epoch_losses": trained.fit.epoch_losses, "best_epoch": trained.fit.best_epoch,
             **scores(trained)}
            for seed, trained in results.done.items()
        ]  # fmt: skip
        diverged = [seed for seed in results.seeds if seed not in results.done]
        print_json({**requested, "device": best.fit.chosen, "results": each, "diverged": diverged,
                    "best_seed": results.best_seed, "seconds": seconds})  # fmt: skip
        return
    print(results)
    if test_scores := results.scores():
        mean, deviation = spread(test_scores)
        summary = f"{mean:.2%} +- {deviation:.2%}" if best.accuracy is not None else f"{mean:.6g} +- {deviation:.2g}"
        print(f"{'accuracy' if best.accuracy is not None else 'test error'} {summary} over {len(test_scores)} seeds")
        print(f"seed {results.best_seed}: {tested(best)}")
    print(f"{count} networks in {seconds:.2f} s; seed {results.best_seed} has the lowest loss")


def tested(trained: Trained) -> str:
    """The test result and the baseline, as text; "" without test rows."""
    parts = []
    if trained.accuracy is not None:
        parts.append(f"accuracy {trained.accuracy:.2%} (most common class: {trained.baseline_accuracy:.2%})")
        parts.append(f"macro F1 {trained.f1:.4f}")
    if trained.test_mse is not None:
        parts.append(f"mean squared error {trained.test_mse:.6g} (mean of the targets: {trained.baseline_mse:.6g})")
    if trained.r2 is not None:
        parts.append(f"R2 {trained.r2:.4f}")
    return f"{', '.join(parts)} on {len(trained.predictions):,} test rows" if parts else ""


def scores(trained: Trained) -> dict[str, Any]:
    names = ("accuracy", "f1", "baseline_accuracy", "test_mse", "r2", "baseline_mse", "beats_baseline")
    return {name: getattr(trained, name) for name in names}


def warn_of_baseline(trained: Trained, job: TrainJob) -> None:
    """Warn if the network is no better on the test rows than a constant prediction."""
    if trained.beats_baseline is False:
        what = "the mean of the targets" if trained.accuracy is None else "the most common class"
        hint = "more --epochs, another --lr" + " or --hidden" * (not job.has_own_layers)
        hint += ", or omit --no-scale" if job.standard.rows is None and job.data.is_table else ""
        print_message(f"warning: on the test rows the network is no better than {what} for every row\n  try: {hint}")


def show_epoch(p: Progress, update: Update) -> None:
    accuracy = "" if p.accuracy is None else f"  accuracy {p.accuracy:.1%}"
    text = f"epoch {p.epoch}/{p.epochs}  loss {p.loss:.4f}{accuracy}  {rate(p.samples_per_s, 'samples')}"
    update(p.epoch - 1 + p.step / p.steps, text)
