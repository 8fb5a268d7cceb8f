"""What a run tells: readable lines, metrics.jsonl, TensorBoard, picture grids; a progress bar only on a terminal."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

LETTER, LINE = 6, 12  # pixels of Pillow's own font


class Logger:
    """The main process writes; the others stay silent."""

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
        """A line for people."""
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
        """Metrics of one step, to all three places."""
        if not self.active:
            return
        self.event({"step": step, **values})
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._board.add_scalar(name, value, step)
        if show:
            shown = (f"{name} {value:.4g}" for name, value in values.items() if isinstance(value, (int, float)))
            self.say(f"step {step}: " + ", ".join(shown))

    def event(self, record: dict[str, Any]) -> None:
        """One line of metrics.jsonl."""
        if not self.active:
            return
        try:
            self._file.write(json.dumps({"time": round(time.time(), 3), **record}, default=str) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(f"cannot write {self._file.name}: {error}. Run the same command again to go on") from error

    def images(self, step: int, images: Any, name: str = "samples", captions: Sequence[str] = ()) -> Path | None:
        """A grid as samples/{name}_{step}.png and in TensorBoard."""
        if not self.active:
            return None
        picture = captioned_grid(images, captions) if captions else image_grid(images)
        path = self.workdir / "samples" / f"{name}_{step:08d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_png(path, picture)
        self._board.add_image(name, picture, step, dataformats="HWC")
        return path

    def close(self) -> None:
        if self.active:
            if self._bar is not None:
                self._bar.close()
            with suppress(OSError):  # every line was flushed when it was written; a full disk has been told of then
                self._board.close()
                self._file.close()


def board(folder: Path) -> Any:
    """A TensorBoard writer. tensorboardX imports torch wherever that is installed, unless it finds it barred."""
    barred = "torch" not in sys.modules
    if barred:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from tensorboardX import SummaryWriter
    finally:
        if barred:
            del sys.modules["torch"]
    return SummaryWriter(str(folder))


def image_grid(images: Any, columns: int | None = None, gap: int = 1, scale: int | None = None) -> np.ndarray:
    """Images [n h w c] in [-1, 1] as one uint8 RGB picture; small ones are enlarged by repeating pixels."""
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


def captioned_grid(images: Any, captions: Sequence[str], columns: int | None = None, side: int = 128) -> np.ndarray:
    """Images [n h w c] in [-1, 1], enlarged to `side` pixels or more, with their captions below them."""
    from PIL import Image, ImageDraw

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


def save_png(path: Path, picture: np.ndarray) -> None:
    from PIL import Image

    Image.fromarray(picture).save(path)
