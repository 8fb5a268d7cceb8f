"""Evaluation of a run's samples: distances to the data, each with its protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxdiff import evaluation
from jaxdiff.data import Dataset
from jaxdiff.errors import choose
from jaxdiff.evaluation import Protocol, clip
from jaxdiff.evaluation.features import Extracted, FeatureNet
from jaxdiff.evaluation.presets import resolved
from jaxdiff.training import reference as references
from jaxdiff.training import subset
from jaxdiff.training.build import IMAGELESS, Run, reference_data
from jaxdiff.training.sampling import Sampler, Samples, all_captions, captions_of, from_dataset, joined
from jaxdiff.trees import Params

SLICED, PIXELS = "sliced_wasserstein", "pixels"


def main_metric(config: ConfigDict) -> str:
    """The name of the metric that ranks evaluations."""
    net = resolved(config.eval).net
    return evaluation.metric_name(net) if net else SLICED


def eval_sampler(run: Run, mesh: Mesh) -> Sampler:
    """The sampler for evaluation: random labels, and text from the dataset."""
    texts = None
    if isinstance(run.data, Dataset) and run.data.captions and "text" in run.conditions:
        texts = from_dataset(run.data)
    return Sampler(run, mesh, "random", texts)


def protocol(run: Run, net: FeatureNet | None, samples: int, reference: int, seed: int) -> Protocol:
    """Everything needed to reproduce the measurement; without a network, of pixels."""
    c = run.config.sample
    control = {key: value.tolist() for key, value in run.control.items()}
    notes = [f"control guidance {c.control_guidance}, samples conditioned on {control}"] if control else []
    guidance, learnt = c.guidance, run.config[run.config.method.name].get("guidance", 1.0)
    if learnt != 1.0:  # then sample.guidance is 1
        guidance = learnt
        notes.append("guidance is the teacher's, which the student has learnt")
    return Protocol(
        feature_net=net.name if net else PIXELS,
        feature_sha256=net.sha256 if net else "",
        resize=net.resize if net else "none",
        samples=samples,
        uint8=net is not None,
        reference=run.data.name,
        reference_sha256=run.data.fingerprint,
        reference_samples=reference,
        solver=c.solver,
        steps=c.timestamps,
        nfe=run.nfe,
        guidance=guidance,
        seed=seed,
        ema=run.config.ema.kind if run.averaged else "none",
        notes="; ".join(notes),
    )


def evaluate(
    run: Run,
    params: Params,
    mesh: Mesh,
    *,
    stop: Callable[[], bool] = lambda: False,
    samples: Samples | None = None,
    sampler: Sampler | None = None,
    reference_stats: str = "",
    repeats: int = 1,
) -> dict[str, Any] | None:
    """Distances between fresh samples and the data, with their protocol; None if interrupted.

    `samples` (images, labels) replaces the fresh samples, for example with data as a check; reusing a `sampler` avoids
    recompilation. `reference_stats` is a file of feature moments (`evaluation.save_moments`) to use instead of the
    data. With `repeats`, metrics are means over samples of the seeds eval.seed, eval.seed + 1, ..., `spread` has their
    standard deviations and `repeats` each measurement.
    """
    c = resolved(run.config.eval)
    if repeats < 1 or (repeats > 1 and samples is not None):
        raise ValueError(f"repeats is a number of sets of fresh samples, at least 1, got {repeats}")
    judge = Judge(run, mesh, reference_stats or c.reference_stats)  # reads all it needs before anything is sampled
    if samples is not None:
        return judge(samples, c.seed)
    sampler = sampler or eval_sampler(run, mesh)
    records = []
    for seed in range(c.seed, c.seed + repeats):
        parts = list(sampler.batches(params, c.samples, seed, stop=stop, decode=bool(c.net)))
        if sum(len(images) for images, _ in parts) < c.samples:
            return None
        records.append(judge(joined(parts), seed))
    return records[0] if repeats == 1 else summary(records)


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means of the metrics of several records, their standard deviations, and the metrics of each with its seed."""
    names = [name for name, value in records[0].items() if isinstance(value, float)]
    values = {name: np.array([record[name] for record in records]) for name in names}
    each = [{"seed": record["protocol"]["seed"], **{name: record[name] for name in names}} for record in records]
    means = {name: float(column.mean()) for name, column in values.items()}
    spread = {name: float(column.std(ddof=1)) for name, column in values.items()}
    return {**records[0], **means, "spread": spread, "repeats": each}


class Judge:
    """Measures samples: `judge((images, labels), seed)` is a record. Networks are loaded when it is made."""

    def __init__(self, run: Run, mesh: Mesh, reference_stats: str) -> None:
        self.options = resolved(run.config.eval)
        self.run, self.mesh, self.reference_stats = run, mesh, reference_stats
        self.reference = _reference(run, reference_stats)
        self.score = _clip_score(run)
        self.net = references.network(run.config) if self.options.net else None

    @cached_property
    def found(self) -> Extracted:
        """Features of the reference, or their moments alone."""
        assert self.net is not None
        if isinstance(self.reference, Extracted):
            return self.reference
        return reference_features(self.run, self.net, self.mesh)

    def __call__(self, samples: Samples, seed: int) -> dict[str, Any]:
        return self.record(samples, features(self.net, samples[0]) if self.net else None, seed)

    def record(self, samples: Samples, fake: Extracted | None, seed: int) -> dict[str, Any]:
        """The record of samples whose features are `fake`; None without a feature network."""
        run = self.run
        images, labels = samples
        follows = _captioned(run, images, labels, self.score)
        if fake is None:
            return {**_pixel_record(run, images, seed), **follows}
        assert fake.features is not None
        how = self._protocol(len(images), seed)
        real = self.found.moments if self.found.features is None else self.found.features
        spatial = None
        if self.options.sfid and fake.spatial and self.found.spatial:
            spatial = fake.spatial, self.found.spatial
        record = evaluation.evaluate_features(
            fake.features, real, how, probabilities=fake.probabilities, spatial=spatial, k=self.options.neighbours
        )
        classes = run.data.num_classes
        if labels is not None and fake.probabilities is not None and fake.probabilities.shape[1] == classes:
            record["accuracy"] = float((fake.probabilities.argmax(1) == labels).mean())
        return {**record, **follows}

    def _protocol(self, samples: int, seed: int) -> Protocol:
        moments = self.found.moments
        how = protocol(self.run, self.net, samples, moments.count, seed)
        if self.reference_stats:
            name, sha256 = Path(self.reference_stats).name, evaluation.digest(self.reference_stats)
            how = dataclasses.replace(how, reference=name, reference_sha256=sha256)
        else:
            how = _noted(how, _part_of(self.run, moments.count))
        few, features = min(samples, moments.count), len(moments.mean)
        if few <= features:
            how = _noted(
                how,
                f"{few} images for {features} features: a covariance is singular, so this Fréchet distance is too "
                "large, and comparable at equal numbers only",
            )
        return how


def features(net: FeatureNet, images: np.ndarray) -> Extracted:
    """The features of samples, rounded to 8 bits."""
    return evaluation.extract(net, _chunks(evaluation.to_uint8(images)), batch_size=256, keep=True)


def _part_of(run: Run, count: int) -> str:
    """Which examples are the reference, if not all."""
    return f"reference: {count} of {run.data.size} examples, by a fixed permutation" * (count < run.data.size)


def _noted(how: Protocol, note: str) -> Protocol:
    return dataclasses.replace(how, notes="; ".join(filter(None, (how.notes, note))))


def _pixel_record(run: Run, images: np.ndarray, seed: int) -> dict[str, Any]:
    """The distance that does not need a feature network, to as many of the data."""
    real = reference_pixels(run.config, len(images))
    how = _noted(protocol(run, None, len(images), len(real), seed), _part_of(run, len(real)))
    return {**_pixel_distance(images, real), "protocol": dataclasses.asdict(how)}


def reference_pixels(config: ConfigDict, count: int) -> np.ndarray:
    """At most `count` examples of the data, chosen as `eval` says."""
    data = reference_data(config)
    wanted = min(count, config.eval.reference or data.size, data.size)
    return np.concatenate(list(subset.images(data, subset.chosen(data.size, wanted))))


def _reference(run: Run, reference_stats: str) -> Dataset | Extracted:
    """What samples are compared with: stored moments, or the run's data."""
    c = run.config
    if reference_stats:
        if not resolved(c.eval).net:
            raise ValueError(
                "--reference_stats contains feature moments: set eval.net to the network they were computed with"
            )
        return references.read_stats(reference_stats, c)
    if c.data.source in IMAGELESS:
        raise ValueError(
            f"data.source={c.data.source!r} has no images to compare samples with; use the dataset's config, or pass "
            "--reference_stats=FILE of feature moments"
        )
    if not isinstance(run.data, Dataset):
        raise ValueError(
            f"the data of this run, {run.data.name}, are not loaded; pass --reference_stats=FILE of feature moments, "
            "or --config.data.options.path of a copy"
        )
    return run.data


def reference_features(run: Run, net: FeatureNet, mesh: Mesh | None = None, *, keep: bool = True) -> Extracted:
    """Features of the dataset's images, or of eval.reference of them; not flipped, 8 bits like samples."""
    data = reference_data(run.config)
    decode = run.decode or (lambda images: images)
    indices = subset.chosen(data.size, run.config.eval.reference)
    found = (
        images
        for start, stop in references.shares(len(indices), mesh)
        for images in subset.images(data, indices[start:stop])
    )
    batches = (evaluation.to_uint8(decode(images)) for images in found)
    return references.features(run.config, net, batches, mesh, keep=keep)


def save_reference_stats(run: Run, path: str, mesh: Mesh | None = None) -> int:
    """Write the feature moments of the run's data, with their protocol; returns the number of images."""
    if not resolved(run.config.eval).net:
        raise ValueError("reference statistics are moments of features: set eval.net to a feature network")
    net = references.network(run.config)
    found = reference_features(run, net, mesh, keep=False)
    count = found.moments.count
    how = _without_samples(protocol(run, net, count, count, run.config.eval.seed), _part_of(run, count))
    references.write_stats(path, found, how)
    return count


def _captioned(
    run: Run, images: np.ndarray, labels: np.ndarray | None, score: Callable[..., float] | None
) -> dict[str, float]:
    """How well samples match their captions or labels, where that can be measured."""
    data = run.data
    judge = data.judge if isinstance(data, Dataset) else None
    if judge is None and score is None:
        return {}
    wanted: list[str] = []
    if isinstance(data, Dataset) and data.captions and "text" in run.conditions:
        wanted = all_captions(data, len(images))
    elif "text" in run.conditions or labels is not None:
        wanted = captions_of(data, len(images), labels)
    found = dict(judge(images, wanted)) if judge and wanted else {}
    if score:
        if run.decode and not resolved(run.config.eval).net:
            images = run.decode(images)
        found[f"clip_{run.config.eval.clip_formula}"] = score(images, wanted)
    return found


def _clip_score(run: Run) -> Callable[[np.ndarray, Sequence[str]], float] | None:
    """The CLIP score, if configured."""
    c = run.config.eval
    if not c.clip:
        return None
    captioned = "text" in run.conditions and run.data.example_captions
    if not captioned and not (run.conditions.num_classes and run.data.class_names):
        raise ValueError(
            f"eval.clip compares samples with captions or class names; this run on {run.data.name} is conditioned on "
            "neither, so unset it"
        )
    choose(c.clip_formula, clip.FORMULAS, "eval.clip_formula")
    if not c.tokenizer:
        raise ValueError("eval.clip needs eval.tokenizer, the tokenizer.json published with the model")
    return clip.scorer(c.clip, c.tokenizer, c.clip_formula)


def compare_halves(run: Run) -> dict[str, Any]:
    """Evaluate one half of the data against the other: the score of perfect samples."""
    c, dataset = resolved(run.config.eval), reference_data(run.config)
    half = min(dataset.size // 2, c.samples)
    order = subset.permuted(dataset.size)
    halves = [np.sort(order[half * i : half * (i + 1)]) for i in (0, 1)]
    net = references.network(run.config) if c.net else None
    how = _without_samples(protocol(run, net, half, half, c.seed), "random halves of the data")
    data = [np.concatenate(list(subset.images(dataset, indices))) for indices in halves]
    if net is None:
        return {**_pixel_distance(*data), "protocol": dataclasses.asdict(how)}
    if run.decode:
        data = [run.decode(images) for images in data]
    fake, real = (features(net, a) for a in data)
    assert fake.features is not None and real.features is not None
    return evaluation.evaluate_features(
        fake.features, real.features, how, probabilities=fake.probabilities, k=c.neighbours
    )


def _without_samples(how: Protocol, notes: str) -> Protocol:
    """The protocol of a measurement of data alone."""
    return dataclasses.replace(how, solver=None, steps=None, nfe=None, guidance=None, seed=None, ema=None, notes=notes)


def _pixel_distance(a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """The distance that does not need a feature network."""
    a, b = (x.reshape(len(x), -1).astype(np.float64) for x in (a, b))
    return {SLICED: evaluation.sliced_wasserstein(a, b)}


def _chunks(images: np.ndarray, size: int = 256) -> list[np.ndarray]:
    return [images[i : i + size] for i in range(0, len(images), size)]
