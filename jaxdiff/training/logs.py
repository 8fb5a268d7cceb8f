"""The log of a run: console lines, a progress bar on a terminal, image grids, metrics for the backends, profiles."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike
from ml_collections import ConfigDict

from jaxdiff.errors import choose
from jaxdiff.training.backends import BACKENDS, DEFAULT, Target
from jaxdiff.trees import Tree

LETTER, LINE = 6, 12  # pixels of Pillow's default font
OnMetrics = Callable[[int, Mapping[str, float]], object]  # (step, metrics by name)


class Logger:
    """Only the main process writes, and calls `on_metrics`; every process profiles itself."""

    def __init__(
        self,
        workdir: Path,
        total: int = 0,
        start: int = 0,
        quiet: bool = False,
        config: ConfigDict | None = None,
        on_metrics: OnMetrics | None = None,
    ) -> None:
        self.active = jax.process_index() == 0
        self.workdir, self.quiet, self.on_metrics = Path(workdir), quiet, on_metrics
        self.flops = 0  # of a training step, over all devices; known when the step is compiled
        self._span = () if config is None else tuple(config.train.profile_steps)
        self._profiling = False
        self._bar: Any = None
        self._backends = []
        if not self.active:
            return
        names = DEFAULT if config is None else tuple(config.log.backends)
        target = Target(self.workdir, config, self.say)
        self._backends = [BACKENDS[name](target) for name in names]
        if total and sys.stderr.isatty() and not quiet:
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=start, unit="step", dynamic_ncols=True)

    def say(self, text: str) -> None:
        """Print a line to the console."""
        if not self.active or self.quiet:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    def progress(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def scalars(self, step: int, values: Mapping[str, object]) -> None:
        """Send the numbers of one step to the backends and to `on_metrics`."""
        if not self.active:
            return
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
        for backend in self._backends:
            backend.scalars(step, numbers)
        if self.on_metrics is not None:
            self.on_metrics(step, numbers)

    def event(self, record: Mapping[str, object]) -> None:
        """Send a record of something that happened to the backends."""
        for backend in self._backends:
            backend.event(record)

    def images(self, step: int, images: ArrayLike, name: str = "samples", captions: Sequence[str] = ()) -> Path | None:
        """Write an image grid to samples/{name}_{step}.png and send it to the backends."""
        if not self.active:
            return None
        grid = captioned_grid(images, captions) if captions else image_grid(images)
        path = self.workdir / "samples" / f"{name}_{step:08d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_png(path, grid)
        for backend in self._backends:
            backend.image(step, name, grid)
        return path

    def profile(self, step: int, state: Tree) -> None:
        """Before each step: start or stop the trace of `train.profile_steps`, when `state` has been computed."""
        if self._span and step == self._span[0]:
            jax.block_until_ready(state)
            jax.profiler.start_trace(str(self.workdir / "profile"))
            self._profiling = True
        elif self._profiling and step == self._span[1]:
            jax.block_until_ready(state)
            self._stop_profile()

    def _stop_profile(self) -> None:
        jax.profiler.stop_trace()
        self._profiling = False
        self.say(f"wrote the profile of steps {self._span[0] + 1} to {self._span[1]} to {self.workdir / 'profile'}")

    def close(self) -> None:
        if self._profiling:
            self._stop_profile()
        if self._bar is not None:
            self._bar.close()
        for backend in self._backends:
            backend.close()


def check(config: ConfigDict) -> None:
    """Check `log.backends` and `train.profile_steps`."""
    for name in config.log.backends:
        choose(name, BACKENDS, "log backend")
    span = tuple(config.train.profile_steps)
    if span and not (len(span) == 2 and 0 <= span[0] < span[1]):
        raise ValueError(f"train.profile_steps is (first, last) with 0 <= first < last, or (), got {span}")


def image_grid(images: ArrayLike, columns: int | None = None, gap: int = 1, scale: int | None = None) -> np.ndarray:
    """Images [n h w c] in [-1, 1] as one uint8 RGB image; small images are enlarged by repeating pixels."""
    from jaxdiff.evaluation.report import to_uint8

    pixels = to_uint8(np.asarray(images, np.float32))
    n, h, w, c = pixels.shape
    pixels = pixels.repeat(3, -1) if c == 1 else pixels[..., :3]
    columns = columns or int(np.ceil(np.sqrt(n)))
    rows = -(-n // columns)
    canvas = np.full((rows * (h + gap) + gap, columns * (w + gap) + gap, 3), 255, np.uint8)
    for i, image in enumerate(pixels):
        top, left = gap + i // columns * (h + gap), gap + i % columns * (w + gap)
        canvas[top : top + h, left : left + w] = image
    scale = scale or max(1, 32 // h)
    return canvas.repeat(scale, 0).repeat(scale, 1)


def captioned_grid(
    images: ArrayLike, captions: Sequence[str], columns: int | None = None, side: int = 128
) -> np.ndarray:
    """Images [n h w c] in [-1, 1], enlarged towards `side` pixels, with captions below."""
    from PIL import Image, ImageDraw

    images = np.asarray(images)
    scale = max(1, side // images.shape[2])
    cells = [image_grid(image[None], 1, 0, scale) for image in images]
    width = cells[0].shape[1]
    lines = ["\n".join(textwrap.wrap(caption, max(1, width // LETTER))) for caption in captions]
    room = LINE * max(text.count("\n") + 1 for text in lines) + 4
    for i, text in enumerate(lines):
        label = Image.new("RGB", (width, room), "white")
        ImageDraw.Draw(label).multiline_text((2, 1), text, fill="black", spacing=1)
        cells[i] = np.concatenate([cells[i], np.asarray(label)])
    columns = columns or int(np.ceil(np.sqrt(len(cells))))
    blank = np.full_like(cells[0], 255)
    cells += [blank] * (-len(cells) % columns)
    gapped = [np.pad(cell, ((2, 2), (2, 2), (0, 0)), constant_values=255) for cell in cells]
    return np.concatenate([np.concatenate(gapped[i : i + columns], 1) for i in range(0, len(cells), columns)])


def save_png(path: Path, pixels: np.ndarray) -> None:
    from PIL import Image

    Image.fromarray(pixels).save(path)
