"""The demo's picture, as SVG: browsers show it, and writing it needs no package."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from onchip.network.recipe import Array
from onchip.workloads.classify import Trained
from onchip.workloads.dataset import Dataset

_COLUMNS, _LINES, _SCALE = 10, 5, 5  # images shown; picture units per image pixel
_CELL_X, _CELL_Y, _TOP = 54, 66, 44  # grid pitch, and offset of the first image
_LEFT, _RIGHT, _BOTTOM = 640, 980, 350  # of the loss curve


def draw_digits(data: Dataset, trained: Trained) -> str:
    """Test images with their predicted class, wrong ones first and in red, next to the loss curve."""
    is_wrong = trained.predictions != data.y_test
    shown = np.argsort(~is_wrong, kind="stable")[: _COLUMNS * _LINES]
    title = f"{trained.accuracy:.1%} of {len(data.y_test):,} test digits right, the {is_wrong.sum():,} wrong ones first"
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 390" font-family="system-ui, sans-serif" '
        'font-size="12" fill="#1f2328">',
        '<rect width="1000" height="390" fill="white"/>',
        f'<text x="20" y="20" font-size="14">{title}</text>',
    ]
    side = data.side or 0
    for at, i in enumerate(shown):
        x, y = 20 + at % _COLUMNS * _CELL_X, _TOP + at // _COLUMNS * _CELL_Y
        size, colour, answer = 12, "#1f2328", f"{trained.predictions[i]}"
        if is_wrong[i]:
            size, colour, answer = 9, "#cf222e", f"said {answer}, is {data.y_test[i]}"
        middle, below = x + side * _SCALE / 2, y + side * _SCALE + 14
        lines += [
            f'<g transform="translate({x} {y}) scale({_SCALE})">{_pixels(data.x_test[i].reshape(side, side))}</g>',
            f'<text x="{middle:g}" y="{below}" text-anchor="middle" font-size="{size}" fill="{colour}">{answer}</text>',
        ]
    return "\n".join([*lines, *_curve(trained.fit.losses.tolist(), trained.fit.epoch_losses), "</svg>", ""])


def _pixels(image: Array) -> str:
    """One path per gray level; 0 is white."""
    paths = []
    for level in np.unique(image[image > 0]):
        squares = "".join(f"M{x} {y}h1v1h-1z" for y, x in np.argwhere(image == level))
        paths.append(f'<path fill-opacity="{level:.3g}" d="{squares}"/>')
    return "".join(paths)


def _curve(losses: Sequence[float], epoch_losses: Sequence[float]) -> list[str]:
    """The loss per step and the mean per epoch, on a logarithmic scale."""
    seen = [loss for loss in (*losses, *epoch_losses) if 0 < loss < math.inf]
    low, high = (math.floor(math.log10(min(seen))), math.ceil(math.log10(max(seen)))) if seen else (-1, 0)
    high = max(high, low + 1)
    epochs = len(epoch_losses)

    def height(loss: float) -> float:
        return _BOTTOM - (math.log10(loss) - low) / (high - low) * (_BOTTOM - _TOP)

    def points(values: Sequence[float], first: float, step: float) -> str:
        positions = ((first + i * step, loss) for i, loss in enumerate(values))
        width = (_RIGHT - _LEFT) / epochs
        return " ".join(f"{_LEFT + at * width:.1f},{height(v):.1f}" for at, v in positions if 0 < v < math.inf)

    lines = [f'<text x="{_LEFT}" y="20" font-size="14">training: loss (cross entropy)</text>']
    for power in range(low, high + 1):
        y = height(10.0**power)
        lines += [
            f'<path stroke="#d1d9e0" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>',
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>',
        ]
    of_steps, of_epochs = points(losses, epochs / len(losses), epochs / len(losses)), points(epoch_losses, 0.5, 1)
    return [
        *lines,
        f'<polyline fill="none" stroke="#b6d4fe" stroke-width=".8" points="{of_steps}"/>',
        f'<polyline fill="none" stroke="#0969da" stroke-width="1.6" points="{of_epochs}"/>',
        f'<text x="{_RIGHT}" y="{_BOTTOM + 20}" text-anchor="end">{epochs:,} epochs</text>',
        f'<text x="{_LEFT}" y="{_BOTTOM + 20}">light: each step, dark: mean of an epoch</text>',
    ]
