"""The options of `onchip train`. None has a default here: an omitted value comes from the config file or the
workload.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from onchip.cli.options import DEVICES, completes
from onchip.train.options import ACTIVATIONS, OPTIMISERS, SCHEDULES, TrainOptions


def _training(name: str, text: str, *declarations: str) -> Any:
    default = getattr(TrainOptions, name)
    return Option(*declarations, help=f"{text} [default: {default}]", show_default=False)


Model = Annotated[
    str | None,
    Argument(
        metavar="MODEL",
        show_default=False,
        help="digits; backprop; sentiment: a new network for your texts; faces: a generator of pictures; mlp: a new "
        "network for your table; or the file of any network (.onnx, .safetensors), to train it further.",
        autocompletion=completes(("digits", "backprop", "sentiment", "faces", "mlp"), ".onnx", ".safetensors"),
    ),
]
Config = Annotated[
    Path | None, Option(metavar="FILE", help="A .toml file with options (lr = 0.1). The command line overrides it.")
]
Data = Annotated[
    str | None,
    Option(
        help="mnist, sklearn (8x8 digits), auto; or a file: .csv, .tsv, .csv.gz, .parquet, .arrow, .npy, idx, idx.gz. "
        "Several tables: a folder, a pattern ('data/*.csv') or names with commas. Texts: .csv or .tsv, or a folder "
        "with a file per class, one text per line."
    ),
]
Labels = Annotated[
    str | None, Option(help="A column of the table (first, last or its name), or a file: .npy, idx or idx.gz.")
]
TestData = Annotated[str | None, Option(metavar="FILE", help="Your rows to test on.")]
TestLabels = Annotated[str | None, Option(help="Labels of --test-data; for a table the default is --labels.")]
TestShare = Annotated[
    float | None,
    Option(help="Without --test-data: share of your rows to test on, chosen by the seed; 0.2 if not given."),
]
Column = Annotated[
    str | None, Option(metavar="NAME", help="The column of texts; default: text, or the only one besides the labels.")
]
SkipBad = Annotated[
    bool | None,
    Option(
        "--skip-bad",
        help="Skip and count lines that are empty, too long or not UTF-8; of faces, files that are damaged or of "
        "another size.",
    ),
]
Folds = Annotated[
    int | None, Option(metavar="N", help="Texts: cross-validate; train N networks, each tested on another N-th.")
]
Drop = Annotated[str | None, Option(metavar="NAME,NAME", help="Columns of the table that are not read, such as ids.")]
Missing = Annotated[
    str | None,
    Option(
        metavar="HOW",
        help="Missing values of a table: mean or median of the training rows (of text: the most common one), drop the "
        "row, or error. Stored in the .onnx, which then reads such tables. [default: error]",
    ),
]
Network = Annotated[
    str | None,
    Option(
        help="digits: mlp or lenet, a convolutional network. sentiment: kim, small (a file below 2 MB) or report "
        "(4,096 dimensions per word). [default: the first]"
    ),
]
Hidden = Annotated[str | None, Option(metavar="W,W", help="Hidden widths of a new network; default: the model's.")]
Activation = Annotated[
    str | None, Option(help=f"{', '.join(ACTIVATIONS)}: activation of a new network; default: the model's.")
]
Scale = Annotated[
    bool | None,
    Option(
        "--scale/--no-scale",
        help="Standardise columns and regression targets (mean 0, deviation 1). The scaling is folded into the saved "
        "network, which reads raw rows. [default: scale for your own tables]",
    ),
]
Output = Annotated[Path | None, Option("--output", "-o", help="The .onnx or .safetensors to write.")]

Loss = Annotated[
    str | None,
    _training(
        "loss",
        "cross_entropy for classes; bce_with_logits for outputs that are each true or false; mse, half_sse (half the "
        "sum), mae or huber for regression.",
    ),
]
LabelSmoothing = Annotated[
    float | None, _training("label_smoothing", "For cross_entropy: share of the target spread over all classes.")
]
ClassWeight = Annotated[
    str | None,
    Option(metavar="W,W", help="For cross_entropy: balanced, or one weight per class. [default: 1 each]"),
]
Optimiser = Annotated[str | None, _training("optimiser", f"{', '.join(OPTIMISERS)}.", "--optimiser", "--optimizer")]
Lr = Annotated[float | None, _training("lr", "Learning rate.", "--lr", "--learning-rate")]
Momentum = Annotated[float | None, _training("momentum", "For sgd.")]
Nesterov = Annotated[
    bool | None,
    Option("--nesterov/--no-nesterov", help="With --momentum: Nesterov's, as in torch. [default: no-nesterov]"),
]
WeightDecay = Annotated[
    str | None,
    _training(
        "weight_decay",
        "Added to the gradient, times the weight; adamw: decoupled. By patterns of names: '*.bias=0,*=1e-4'.",
    ),
]
ClipNorm = Annotated[float | None, _training("clip_norm", "Largest norm of a batch's gradient; 0: no limit.")]
Ema = Annotated[
    float | None, _training("ema", "Decay of a moving average of the weights, such as 0.999, which is saved; 0: none.")
]
Schedule = Annotated[str | None, _training("schedule", f"Learning rate schedule: {', '.join(SCHEDULES)}.")]
Warmup = Annotated[
    float | None, _training("warmup", "Epochs, or a part of one, in which the learning rate first grows.")
]
StepEvery = Annotated[int | None, _training("step_every", "For step: epochs between drops.")]
StepFactor = Annotated[float | None, _training("step_factor", "For step: factor of a drop.")]
Frozen = Annotated[
    str | None, Option(metavar="NAME,NAME", help="Weights that stay as they are, by patterns: embedding.*,conv1.*")
]
BatchSize = Annotated[int | None, _training("batch_size", "Rows per update.")]
Epochs = Annotated[int | None, _training("epochs", "Passes over the data.")]
Validation = Annotated[
    float | None, _training("validation", "Share of the training rows held out and evaluated every epoch.")
]
Patience = Annotated[
    int | None, _training("patience", "Stop after N epochs without a better validation loss; 0: never.")
]
Shuffle = Annotated[
    bool | None, Option("--shuffle/--no-shuffle", help="Use a new row order every epoch. [default: shuffle]")
]
Precision = Annotated[str | None, _training("precision", "Of matmul inputs: fp32; on a GPU also tf32, bf16, fp16.")]
Seed = Annotated[int | None, _training("seed", "Of initial weights, row order and held-out rows.")]
Seeds = Annotated[
    int | None, Option(metavar="N", help="Train N networks in parallel, with seeds from --seed on; keep the best.")
]

Ranks = Annotated[
    int | None,
    Option(metavar="N", help="Run as N MPI ranks here; they share the seeds, or the rows of large batches."),
]

Checkpoint = Annotated[
    Path | None, Option(metavar="DIR", help="Folder for checkpoints; --resume continues from the newest.")
]
CheckpointEvery = Annotated[
    float | None, Option(metavar="SECONDS", help="Least time between checkpoints; 10 if not given.")
]
Resume = Annotated[bool | None, Option("--resume", help="Continue from the newest checkpoint in --checkpoint, if any.")]
Debug = Annotated[
    bool | None,
    Option(
        "--debug",
        help="Stop at the first NaN or infinity and report where it appears; on a GPU also wait after each kernel and "
        "name the one that fails.",
    ),
]
Log = Annotated[Path | None, Option(metavar="FILE", help="Write a .jsonl: the options, then one line per epoch.")]
Plot = Annotated[Path | None, Option(metavar="FILE", help="Draw the learning curve: .png, .svg or .pdf.")]
Device = Annotated[
    str | None,
    Option(help="auto, cpu, cuda or cuda:N. [default: auto]", show_default=False, autocompletion=completes(DEVICES)),
]

Width = Annotated[
    int | None,
    Option(
        metavar="N",
        help="For faces: channels of the generator's last hidden layer; 16 for a CPU. [default: 64, the workload's]",
    ),
]
Samples = Annotated[
    Path | None,
    Option(
        metavar="FILE", help="For faces: draw 64 samples after each epoch (.png), at the end also the .gif of them."
    ),
]
Augment = Annotated[
    bool | None,
    Option(
        "--augment/--no-augment",
        help="For faces: shift, cut and brighten all pictures at random. [default: if there are fewer than 10,000]",
    ),
]
Flip = Annotated[
    bool | None, Option("--flip/--no-flip", help="For faces: mirror half of the pictures. [default: if in colour]")
]
