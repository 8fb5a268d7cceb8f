"""Where metrics go: the console, metrics.jsonl, TensorBoard, Weights & Biases, or a class of your own.

A backend is made once per run by the main process, `BACKENDS[name](target)`, and has the methods of `Backend`. Names in
`config.log.backends` choose among them; a class added to BACKENDS before `training.train` is called can be named too.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

FIRST = ("loss", "steps_per_second", "minutes_left")  # what a console line begins with


class Target(NamedTuple):
    """What a backend is made from: the run's folder, its config (None without a run), a printer of console lines."""

    workdir: Path
    config: ConfigDict | None
    say: Callable[[str], None]


class Backend:
    """A destination of metrics; each method does nothing unless a backend has its own."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of one step, by name."""

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """A grid of samples, uint8 [h w 3]."""

    def event(self, record: Mapping[str, object]) -> None:
        """Something that happened, such as a resumption."""

    def close(self) -> None:
        """The run has ended."""


class Stdout(Backend):
    """One line per step: loss, speed and time left first."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        order = [name for name in FIRST if name in values] + [name for name in values if name not in FIRST]
        self.target.say(f"step {step}: " + ", ".join(shown(name, values[name]) for name in order))


def shown(name: str, value: float) -> str:
    """A metric as a console line has it."""
    if name == "steps_per_second":
        return f"{value:.3g} steps/s"
    if name == "minutes_left":
        return f"{duration(60 * value)} left"
    if name in ("mfu", "data_wait"):
        return f"{name} {100 * value:.3g} %"
    return f"{name} {value:.4g}"


def duration(seconds: float) -> str:
    """Seconds as the two largest of days, hours, minutes and seconds."""
    days, rest = divmod(round(seconds), 86400)
    hours, rest = divmod(rest, 3600)
    parts = [(days, "d"), (hours, "h"), (rest // 60, "min"), (rest % 60, "s")]
    first = next((i for i, (count, _) in enumerate(parts) if count), 3)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count or first == 3)


class JsonLines(Backend):
    """WORKDIR/metrics.jsonl: a line per step or event, with its time."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._file = open(target.workdir / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.event({"step": step, **values})

    def event(self, record: Mapping[str, object]) -> None:
        try:
            self._file.write(json.dumps({"time": round(time.time(), 3), **record}, default=str) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(f"cannot write {self._file.name}: {error}. Rerun the command to resume") from error

    def close(self) -> None:
        with suppress(OSError):  # lines are flushed when written, so a full disk has already been reported
            self._file.close()


class TensorBoard(Backend):
    """WORKDIR/tensorboard, for `tensorboard --logdir=WORKDIR`."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._writer = summary_writer(target.workdir / "tensorboard")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        error = self._writer.file_writer.event_writer._ev_writer.error
        if error is not None:
            raise OSError(f"cannot write {self.target.workdir / 'tensorboard'}: {error}. Rerun the command to resume")
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def close(self) -> None:
        with suppress(OSError):
            self._writer.close()


def summary_writer(folder: Path) -> Any:
    """A TensorBoard writer. tensorboardX imports torch if it is installed, unless the import is blocked."""
    blocked = "torch" not in sys.modules
    if blocked:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from tensorboardX import SummaryWriter
    finally:
        if blocked:
            del sys.modules["torch"]
    made = SummaryWriter(str(folder))
    writer = made.file_writer.event_writer
    writer._ev_writer = writer._worker._record_writer = Events(writer._ev_writer)
    return made


class Events:
    """A writer of TensorBoard records that keeps its first error, as of a full disk, and then writes nothing.

    Raised in the thread that writes, it would end the thread, and the queue in front of it would block for ever.
    """

    def __init__(self, writer: Any) -> None:
        self.writer = writer
        self.error: OSError | None = None

    def _attempt(self, name: str, *values: object) -> object:
        if self.error is None:
            try:
                return getattr(self.writer, name)(*values)
            except OSError as error:
                self.error = error
        return None

    def write_event(self, event: object) -> object:
        return self._attempt("write_event", event)

    def flush(self) -> object:
        return self._attempt("flush")

    def close(self) -> object:
        return self._attempt("close")


class WeightsAndBiases(Backend):
    """A run of Weights & Biases; files in WORKDIR/wandb. A resumed run continues the same one.

    `config.log.wandb` has the arguments of `wandb.init`: project, name, entity, mode ("offline" sends nothing).
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                'log.backends has "wandb", which is not installed: pip install "jaxdiff[wandb]", or leave it out'
            ) from error
        self._wandb = wandb
        options = target.config.log.wandb.to_dict() if target.config is not None else {}
        self._run = wandb.init(
            dir=str(target.workdir),
            id=self._identity(),
            resume="allow",
            config=target.config.to_dict() if target.config is not None else {},
            **options,
        )

    def _identity(self) -> str:
        """The id of this workdir's run, made once."""
        path = self.target.workdir / "wandb_id.txt"
        if not path.is_file():
            path.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
        return path.read_text(encoding="utf-8").strip()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._run.log({name: self._wandb.Image(pixels)}, step=step)

    def close(self) -> None:
        self._run.finish()


BACKENDS: dict[str, Callable[[Target], Backend]] = {
    "stdout": Stdout,
    "jsonl": JsonLines,
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
DEFAULT = ("stdout", "jsonl", "tensorboard")
