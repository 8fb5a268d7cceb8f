"""Logging: console lines, metrics.jsonl, TensorBoard, image grids; a progress bar on a terminal."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

LETTER, LINE = 6, 12  # pixels of Pillow's default font


class Logger:
    """Only the main process writes."""

    def __init__(self, workdir: Path, total: int = 0, start: int = 0, quiet: bool = False) -> None:
        self.active = jax.process_index() == 0
        self.workdir, self.quiet = Path(workdir), quiet
        self._bar: Any = None
        if not self.active:
            return
        self._board = board(self.workdir / "tensorboard")
        self._file = open(self.workdir / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
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

    def scalars(self, step: int, values: dict[str, float], show: bool = True) -> None:
        """Log the metrics of one step to metrics.jsonl, TensorBoard and, with `show`, the console."""
        if not self.active:
            return
        self.event({"step": step, **values})
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._board.add_scalar(name, value, step)
        if show:
            shown = (f"{name} {value:.4g}" for name, value in values.items() if isinstance(value, (int, float)))
            self.say(f"step {step}: " + ", ".join(shown))

    def event(self, record: Mapping[str, object]) -> None:
        """Append a line to metrics.jsonl."""
        if not self.active:
            return
        try:
            self._file.write(json.dumps({"time": round(time.time(), 3), **record}, default=str) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(f"cannot write {self._file.name}: {error}. Rerun the command to resume") from error

    def images(self, step: int, images: ArrayLike, name: str = "samples", captions: Sequence[str] = ()) -> Path | None:
        """Write an image grid to samples/{name}_{step}.png and to TensorBoard."""
        if not self.active:
            return None
        grid = captioned_grid(images, captions) if captions else image_grid(images)
        path = self.workdir / "samples" / f"{name}_{step:08d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_png(path, grid)
        self._board.add_image(name, grid, step, dataformats="HWC")
        return path

    def close(self) -> None:
        if self.active:
            if self._bar is not None:
                self._bar.close()
            with suppress(OSError):  # lines are flushed when written, so a full disk has already been reported
                self._board.close()
                self._file.close()


def board(folder: Path) -> Any:
    """A TensorBoard writer. tensorboardX imports torch if it is installed, unless the import is blocked."""
    blocked = "torch" not in sys.modules
    if blocked:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from tensorboardX import SummaryWriter
    finally:
        if blocked:
            del sys.modules["torch"]
    return SummaryWriter(str(folder))


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
