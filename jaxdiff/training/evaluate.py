"""Evaluation of a run's samples: distances to the data, each with its protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxdiff import evaluation
from jaxdiff.data import Dataset
from jaxdiff.evaluation import Protocol, clip
from jaxdiff.evaluation.features import Extracted, FeatureNet
from jaxdiff.evaluation.presets import resolved
from jaxdiff.training import reference as references
from jaxdiff.training.build import IMAGELESS, Run, reference_data
from jaxdiff.training.sampling import Sampler, Samples, all_captions, captions_of, from_dataset, joined
from jaxdiff.trees import Params

SLICED = "sliced_wasserstein"


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


def protocol(run: Run, net: FeatureNet, samples: int, reference: int, seed: int) -> Protocol:
    """Everything needed to reproduce the measurement."""
    c = run.config.sample
    control = {key: value.tolist() for key, value in run.control.items()}
    notes = f"control guidance {c.control_guidance}, samples conditioned on {control}" if control else ""
    return Protocol(
        feature_net=net.name,
        feature_sha256=net.sha256,
        resize=net.resize,
        samples=samples,
        uint8=True,
        reference=run.data.name,
        reference_sha256=run.data.fingerprint,
        reference_samples=reference,
        solver=c.solver,
        steps=c.timestamps,
        nfe=run.nfe,
        guidance=c.guidance,
        seed=seed,
        ema=run.config.ema.kind if run.averaged else "none",
        notes=notes,
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
) -> dict[str, Any] | None:
    """Distances between fresh samples and the data, with their protocol; None if interrupted.

    `samples` (images, labels) replaces the fresh samples, for example with data as a check; reusing a `sampler` avoids
    recompilation. `reference_stats` is a file of feature moments (`evaluation.save_moments`) to use instead of the
    data.
    """
    c = resolved(run.config.eval)
    reference_stats = reference_stats or c.reference_stats
    reference = _reference(run, reference_stats)
    score = _clip_score(run)
    if samples is None:
        sampler = sampler or eval_sampler(run, mesh)
        parts = list(sampler.batches(params, c.samples, c.seed, stop=stop, decode=bool(c.net)))
        if sum(len(images) for images, _ in parts) < c.samples:
            return None
        samples = joined(parts)
    images, labels = samples
    follows = _captioned(run, images, labels, score)
    if not c.net:
        assert isinstance(reference, Dataset)
        real: Any = reference.take(0, min(len(images), reference.size))["image"]
        return {**_pixel_distance(images, real), **follows}
    net = references.network(run.config)
    fake = evaluation.extract(net, _chunks(evaluation.to_uint8(images)), batch_size=256, keep=True)
    if isinstance(reference, Extracted):
        real, size = reference.moments, reference.moments.count
        found = reference
    else:
        found = reference_features(run, net, mesh)
        real, size = found.features, found.moments.count
    spatial = (fake.spatial, found.spatial) if c.sfid and fake.spatial and found.spatial else None
    how = protocol(run, net, len(images), size, c.seed)
    if isinstance(reference, Extracted):
        how = dataclasses.replace(how, reference=Path(reference_stats).name)
        how = dataclasses.replace(how, reference_sha256=evaluation.digest(reference_stats))
    record = evaluation.evaluate_features(
        fake.features, real, how, probabilities=fake.probabilities, spatial=spatial, k=c.neighbours
    )
    if labels is not None and fake.probabilities is not None and fake.probabilities.shape[1] == run.data.num_classes:
        record["accuracy"] = float((fake.probabilities.argmax(1) == labels).mean())
    return {**record, **follows}


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
    """Features of the dataset's images, in stored order and not flipped."""
    data = reference_data(run.config)
    total = min(run.config.eval.reference or data.size, data.size)
    decode = run.decode or (lambda images: images)
    batches = (decode(data.take(start, stop)["image"]) for start, stop in references.shares(total, mesh))
    return references.features(run.config, net, batches, mesh, keep=keep)


def save_reference_stats(run: Run, path: str, mesh: Mesh | None = None) -> int:
    """Write the feature moments of the run's data, with their protocol; returns the number of images."""
    if not resolved(run.config.eval).net:
        raise ValueError("reference statistics are moments of features: set eval.net to a feature network")
    net = references.network(run.config)
    found = reference_features(run, net, mesh, keep=False)
    count = found.moments.count
    references.write_stats(path, found, _without_samples(protocol(run, net, count, count, run.config.eval.seed)))
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
        if run.decode and not run.config.eval.net:
            images = run.decode(images)
        found["clip_score"] = score(images, wanted)
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
    if not c.tokenizer:
        raise ValueError("eval.clip needs eval.tokenizer, the tokenizer.json published with the model")
    return clip.scorer(c.clip, c.tokenizer)


def compare_halves(run: Run) -> dict[str, Any]:
    """Evaluate one half of the data against the other: the score of perfect samples."""
    c, dataset = resolved(run.config.eval), run.data
    assert isinstance(dataset, Dataset)
    half = min(dataset.size // 2, c.samples)
    data = [dataset.take(half * i, half * (i + 1))["image"] for i in (0, 1)]
    if not c.net:
        return _pixel_distance(*data)
    if run.decode:
        data = [run.decode(images) for images in data]
    net = references.network(run.config)
    fake, real = (evaluation.extract(net, _chunks(evaluation.to_uint8(a)), batch_size=256, keep=True) for a in data)
    how = _without_samples(protocol(run, net, half, half, c.seed), "halves of the data")
    return evaluation.evaluate_features(
        fake.features, real.features, how, probabilities=fake.probabilities, k=c.neighbours
    )


def _without_samples(how: Protocol, notes: str = "") -> Protocol:
    """The protocol of a measurement of data alone."""
    return dataclasses.replace(how, solver=None, steps=None, nfe=None, guidance=None, ema=None, notes=notes)


def _pixel_distance(a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """The distance that does not need a feature network."""
    a, b = (x.reshape(len(x), -1).astype(np.float64) for x in (a, b))
    return {SLICED: evaluation.sliced_wasserstein(a, b)}


def _chunks(images: np.ndarray, size: int = 256) -> list[np.ndarray]:
    return [images[i : i + size] for i in range(0, len(images), size)]
