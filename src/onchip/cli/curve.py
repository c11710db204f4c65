"""--plot: the learning curve, loss and, for classifiers, accuracy per epoch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onchip.errors import InputError, MissingPackageError
from onchip.files import atomic_write, check_writable

if TYPE_CHECKING:
    from onchip.train.training_run import Epoch

SUFFIXES = (".png", ".svg", ".pdf")
_DECADE = 10.0  # a logarithmic axis from this ratio of losses on
_TRAINING, _VALIDATION, _BEST = "#1f5fa8", "#e07b00", "#777777"


def check_plot(path: Path) -> None:
    """Raise before training the errors that drawing would raise after it."""
    if path.suffix.lower() not in SUFFIXES and not path.is_dir():
        got = f"suffix '{path.suffix}'" if path.suffix else "no suffix"
        hint = f"--plot {path.with_suffix('.png')}"
        raise InputError(f"cannot draw {path}: unknown format", got=got, expected=", ".join(SUFFIXES), hint=hint)
    check_writable(path)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingPackageError("--plot", "matplotlib", "plot") from None


def draw_curve(path: Path, title: str, loss: str, history: Sequence[Epoch], best_epoch: int, test: str) -> None:
    """Draw a training run; the file is written atomically.

    loss  name of the loss
    test  the test result as text; "" if there was no test
    """
    from matplotlib.figure import Figure  # not pyplot: needs no window system
    from matplotlib.ticker import LogLocator, MaxNLocator, PercentFormatter

    has_classes = history[0].accuracy is not None
    figure = Figure(figsize=(10.5 if has_classes else 6.4, 4.2), layout="constrained")
    axes = figure.subplots(1, 2 if has_classes else 1, squeeze=False)[0]
    figure.suptitle(f"{title}\n{test}" if test else title, fontsize=11, parse_math=False)  # names may contain "$"
    epochs = [epoch.epoch for epoch in history]
    _curves(axes[0], epochs, [e.loss for e in history], [e.validation_loss for e in history])
    axes[0].set(ylabel=f"loss ({loss.replace('_', ' ')})")
    losses = [loss for e in history for loss in (e.loss, e.validation_loss) if loss is not None]
    if min(losses) > 0 and max(losses) >= _DECADE * min(losses):  # a narrower range has no logarithmic ticks
        axes[0].set_yscale("log")
        axes[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes[0].minorticks_off()
    axes[0].yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    if has_classes:
        _curves(axes[1], epochs, [e.accuracy for e in history], [e.validation_accuracy for e in history])
        axes[1].set(ylabel="accuracy")
        axes[1].yaxis.set_major_formatter(PercentFormatter(1.0))
    for axis in axes:
        axis.set(xlabel="epoch", xlim=(min(0.5, epochs[0]), epochs[-1] + 0.5))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        if best_epoch != epochs[-1]:
            axis.axvline(best_epoch, color=_BEST, linestyle=":", label=f"best: epoch {best_epoch:,}")
        axis.grid(color="#e6e6e6")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)  # above the lines
    with atomic_write(path) as file:
        figure.savefig(file, format=path.suffix.lower()[1:], dpi=130)


def _curves(axis: Any, epochs: list[int], training: list[Any], validation: list[Any]) -> None:
    dot = "o" if len(epochs) <= 40 else ""  # markers only for few epochs
    axis.plot(epochs, training, color=_TRAINING, marker=dot, markersize=3, label="training")
    if validation[0] is not None:
        axis.plot(epochs, validation, color=_VALIDATION, marker=dot, markersize=3, label="validation")
