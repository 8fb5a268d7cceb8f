"""One protocol for every sampler: the same noise and labels, the same features, data and teacher's samples.

quality      the distance of samples to the data: Fréchet in features, or sliced Wasserstein of points and pixels
to_teacher   the same distance to the teacher's own samples, from other noise
"""

from __future__ import annotations

import copy
import time
from functools import cached_property

import numpy as np
from ml_collections import ConfigDict

from jaxdiff import evaluation
from jaxdiff.compare.settings import Record, Settings
from jaxdiff.evaluation.presets import resolved
from jaxdiff.training import Sampler, SavedRun
from jaxdiff.training import reference as references
from jaxdiff.training.build import IMAGELESS
from jaxdiff.training.evaluate import Judge, features, main_metric, reference_pixels
from jaxdiff.trees import Params

OTHER = 1000  # added to the seed of samples that are compared with, or that choose a learning rate


class Meter:
    """Measures samplers against the teacher's data and samples; what they are compared with is computed once."""

    def __init__(self, teacher: SavedRun, settings: Settings) -> None:
        self.teacher, self.settings = teacher, settings
        options = resolved(teacher.config.eval)
        self.seed, self.neighbours = int(options.seed), int(options.neighbours)
        self.net = references.network(teacher.config) if options.net else None
        stats = options.reference_stats
        self.has_data = bool(stats) or teacher.config.data.source not in IMAGELESS
        self.judge = Judge(teacher.run, teacher.mesh, stats) if self.has_data else None

    @property
    def metric(self) -> str:
        """The name of the distance."""
        return main_metric(self.teacher.config)

    def points(self, images: np.ndarray) -> np.ndarray:
        """Pixels as they are, where there is no feature network."""
        return images.reshape(len(images), -1).astype(np.float64)

    def distance(self, a: np.ndarray, b: np.ndarray) -> float:
        if self.net is None:
            return evaluation.sliced_wasserstein(a, b)
        return evaluation.frechet_distance(evaluation.moments_of(a), evaluation.moments_of(b))

    @cached_property
    def teachers(self) -> np.ndarray:
        """Features of the teacher's samples, as its config draws them."""
        teacher = self.teacher
        images, _ = teacher.sampler().sample(teacher.params, self.settings.samples, self.seed + OTHER)
        if self.net is None:
            return self.points(images)
        found = features(self.net, images).features
        assert found is not None
        return found

    @cached_property
    def pixels(self) -> np.ndarray:
        """The data as points, where there is no feature network."""
        real = reference_pixels(self.teacher.config, self.settings.samples)
        return self.points(real)

    def __call__(self, sampler: Sampler, params: Params, *, seed: int | None = None) -> tuple[Record, np.ndarray]:
        """One row: distances, precision, recall, accuracy, images per second and the protocol; and samples to show.

        With a `seed` of its own a row only ranks, so its speed is not measured.
        """
        run, count = sampler.run, self.settings.samples
        if seed is None:
            sampler.sample(params, min(count, run.config.sample.batch_size), self.seed)  # compiles
        begun = time.monotonic()
        images, labels = sampler.sample(params, count, self.seed if seed is None else seed)
        seconds = time.monotonic() - begun
        if not np.isfinite(images).all():
            raise FloatingPointError("samples are not finite")
        row: Record = {"nfe": run.nfe, "images_per_second": count / seconds}
        extracted = features(self.net, images) if self.net else None
        found = self.points(images) if extracted is None else extracted.features
        assert found is not None
        row["quality"] = row["to_teacher"] = self.distance(found, self.teachers)
        if self.judge is not None:
            judge = copy.copy(self.judge)
            judge.run = run
            record = judge.record((images, labels), extracted, self.seed if seed is None else seed)
            row["quality"] = record[self.metric]
            if extracted is None and seed is None:
                record |= evaluation.prdc(self.pixels, found, self.neighbours)
            row |= {name: record[name] for name in ("precision", "recall", "accuracy") if name in record}
            row["protocol"] = record["protocol"]
        return row, images[: max(self.settings.shown, 400 if images.ndim == 2 else 0)]


def with_samples(config: ConfigDict, settings: Settings) -> ConfigDict:
    """The config with as many samples as the comparison takes."""
    changed = ConfigDict(config.to_dict())
    changed.eval.samples = settings.samples
    changed.sample.batch_size = min(changed.sample.batch_size, settings.samples)
    return changed
