"""Sampling from a trained state and measuring what comes out.

Image i depends on (seed, i) only: its noise, its label and its solver noise come from keys folded with i, so neither
the batch size nor the number of devices changes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdiff import evaluation
from jaxdiff.evaluation import Protocol, clip
from jaxdiff.models import conditioning
from jaxdiff.training.build import IMAGELESS, Job, reference_data
from jaxdiff.training.sharding import BATCH


def conditions(job: Job, seed: Any, index: Any, labels: str | int = "random") -> dict[str, Any] | None:
    """The labels of images `index`: uniform draws, the classes in turn ("cycle"), or one class (an int)."""
    classes = job.dataset.num_classes
    if "label" not in (job.null or {}):
        return None
    if labels == "cycle":
        return {"label": index % classes}
    if labels == "random":
        draw = lambda i: jax.random.randint(_key(seed, i, 1), (), 0, classes)  # noqa: E731
        return {"label": jax.vmap(draw)(index)}
    if not 0 <= int(labels) <= classes:
        raise ValueError(f"a label must be in 0..{classes - 1} (or {classes} for none), got {labels}")
    return {"label": jnp.full(index.shape, int(labels), jnp.int32)}


def controls(job: Job, count: int) -> dict[str, Any]:
    """The condition `control` of samples, for a model that takes it: all are told the same."""
    told = {key: jnp.tile(value, (count, 1)) for key, value in _told(job).items()}
    return {"control": told} if told else {}


def _told(job: Job) -> dict[str, np.ndarray]:
    """What a sample's control is by the config."""
    control = getattr(job.model, "control", None)
    if control is None:
        return {}
    return conditioning.default_control(control, job.dataset.image_shape, **job.config.sample.control)


def _key(seed: Any, index: Any, purpose: int) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), index), purpose)


def sampler(job: Job, labels: str | int = "random", prompts: Sequence[str] = ()) -> Callable[..., tuple[Any, Any]]:
    """A program `(state, seed, index [b]) -> (images [b ...], labels or None)`, sharded over the mesh.

    Text conditions are those of `prompts` in turn, or of the data's examples.
    """
    if prompts and job.dataset.encode is None:
        raise ValueError(f"prompts need a model of captioned data; {job.dataset.name} and this model know no texts")

    def make(state: Any, unit: Any, cond: Any, seed: Any, index: Any) -> Any:
        keys = jax.vmap(lambda i: _key(seed, i, 2))(index) if job.solver.stochastic else None
        return job.method.sample(state, unit, cond, keys)

    return _program(job, labels, make, prompts)


def _program(
    job: Job, labels: str | int, make: Callable[..., Any], prompts: Sequence[str] = ()
) -> Callable[..., tuple[Any, Any]]:
    """`make(state, unit noise, cond, seed, index)` jitted, with everything but the state made from (seed, index)."""

    def run(state: Any, seed: Any, index: Any, texts: Any) -> tuple[Any, Any]:
        shape = job.dataset.image_shape
        unit = jax.vmap(lambda i: jax.random.normal(_key(seed, i, 0), shape))(index)
        cond = {**(conditions(job, seed, index, labels) or {}), **controls(job, len(index)), **texts} or None
        return make(state, unit, cond, seed, index), (cond or {}).get("label")

    everywhere, along = NamedSharding(job.mesh, PartitionSpec()), NamedSharding(job.mesh, BATCH)
    program = jax.jit(run, in_shardings=(None, None, along, along), out_shardings=everywhere)
    return lambda state, seed, index: program(state, seed, index, _texts(job, index, prompts))


def _texts(job: Job, index: Any, prompts: Sequence[str]) -> dict[str, Any]:
    """The text conditions of images `index`: those of `prompts`, or of the data's examples, in turn."""
    if not job.dataset.null:
        return {}
    if prompts and job.dataset.encode is not None:
        embedded = job.dataset.encode([prompts[int(i) % len(prompts)] for i in np.asarray(index)])
        return {name: embedded[name] for name in job.dataset.null}
    rows = [job.dataset.take(int(i), int(i) + 1) for i in np.asarray(index)]
    return {name: np.concatenate([row[name] for row in rows]) for name in job.dataset.null}


def captions(job: Job, count: int, labels: Any = None) -> list[str]:
    """What images 0 .. count were asked to show: the data's captions, the names of the labels, or nothing."""
    data = job.dataset
    if data.encode is not None:
        ids = np.concatenate([data.take(i, min(i + 256, count))["caption_id"] for i in range(0, count, 256)])
        return [data.captions[i] for i in ids]
    if labels is None or not data.class_names:
        return []
    return [(*data.class_names, "")[int(label)] for label in labels]


def corrector(job: Job, steps: int, labels: str | int = "random") -> Callable[..., tuple[Any, Any]]:
    """Like `sampler`, of a whole state: images [b 2 ...], a generator's and after `steps` joint Langevin steps."""
    correct = job.method.correct
    if correct is None:
        raise ValueError(
            f"--mcmc_steps corrects the samples of an EMD generator, whose run holds a teacher and a student score; "
            f"this run's method is {job.config.method.name!r}"
        )

    def make(state: Any, unit: Any, cond: Any, seed: Any, index: Any) -> Any:
        keys = jax.vmap(lambda i: _key(seed, i, 3))(index)
        pair = correct(state, unit, cond, keys, sigma=job.config.emd.mcmc_sigma, steps=steps)
        return jnp.stack(pair, 1)

    return _program(job, labels, make)


def sample(
    job: Job,
    state: Any,
    count: int,
    seed: int,
    labels: str | int = "random",
    stop: Callable[[], bool] = lambda: False,
    run: Callable[..., Any] | None = None,
    decode: bool = True,
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Batches of images and labels until `count`; the last is filled up and cut, so one program serves all.

    Latents become images where the config has an autoencoder, unless told not to `decode`.
    """
    ways = job.mesh.shape["data"] * job.mesh.shape["fsdp"]
    size = -(-min(job.config.sample.batch_size, max(count, 1)) // ways) * ways
    run = run or sampler(job, labels)
    for start in range(0, count, size):
        if stop():
            return
        images, drawn = run(state, seed, jnp.arange(start, start + size))
        kept = min(size, count - start)
        pictures = np.asarray(images)[:kept]
        pictures = job.decode(pictures) if decode and job.decode else pictures
        yield pictures, None if drawn is None else np.asarray(drawn)[:kept]


def reference_features(job: Job, net: Any) -> Any:
    """Features of the data set's own images, in stored order and not mirrored."""
    data = reference_data(job.config)
    total = min(job.config.eval.reference or data.size, data.size)
    decode = job.decode or (lambda images: images)
    batches = (decode(data.take(i, min(i + 256, total))["image"]) for i in range(0, total, 256))
    return evaluation.extract(net, batches, batch_size=256, keep=True)


def protocol(job: Job, net: Any, samples: int, reference: int, seed: int) -> Protocol:
    """What another person needs to measure the same number."""
    c = job.config.sample
    told = {key: value.tolist() for key, value in _told(job).items()}
    notes = f"control guidance {c.control_guidance}, samples told {told}" if told else ""
    return Protocol(
        feature_net=net.name,
        feature_sha256=net.sha256,
        resize=net.resize,
        samples=samples,
        uint8=True,
        reference=job.dataset.name,
        reference_sha256=job.dataset.fingerprint,
        reference_samples=reference,
        solver=c.solver,
        steps=c.steps,
        nfe=job.nfe,
        guidance=c.guidance,
        seed=seed,
        ema=job.config.ema.kind if job.method.averages else "none",
        notes=notes,
    )


def evaluate(
    job: Job,
    state: Any,
    *,
    stop: Callable[[], bool] = lambda: False,
    samples: Any = None,
    run: Callable[..., Any] | None = None,
) -> dict[str, Any] | None:
    """Distances between fresh samples and the data, with their protocol; None when stopped on the way.

    `samples` (images, labels) replaces the fresh ones, for example the data themselves as a check; `run` is a
    `sampler(job)` from before, so that the next evaluation need not compile it again.
    """
    c = job.config.eval
    if job.config.data.source in IMAGELESS:
        raise ValueError(
            f"data.source={job.config.data.source!r} has nothing to compare samples with; evaluate with the data set's "
            "config"
        )
    fit = _clip_score(job)
    if samples is None:
        parts = list(sample(job, state, c.samples, c.seed, stop=stop, run=run, decode=bool(c.net)))
        if sum(len(images) for images, _ in parts) < c.samples:
            return None
        samples = tuple(None if p[0] is None else np.concatenate(p) for p in zip(*parts, strict=True))
    images, labels = samples
    asked = captions(job, len(images), labels) if job.dataset.judge or fit else []
    follows = job.dataset.judge(images, asked) if job.dataset.judge and asked else {}
    if fit:
        follows["clip_score"] = fit(images if c.net or not job.decode else job.decode(images), asked)
    if not c.net:
        real = job.dataset.take(0, min(len(images), job.dataset.size))["image"]
        return {**_pixel_distance(images, real), **follows}
    net = evaluation.feature_net(c.net, c.weights or None)
    real = reference_features(job, net)
    fake = evaluation.extract(net, _chunks(evaluation.to_uint8(images)), batch_size=256, keep=True)
    how = protocol(job, net, len(images), len(real.features), c.seed)
    record = evaluation.evaluate_features(fake.features, real.features, how, probabilities=fake.probabilities)
    if labels is not None and fake.probabilities is not None and fake.probabilities.shape[1] == job.dataset.num_classes:
        record["accuracy"] = float((fake.probabilities.argmax(1) == labels).mean())
    return {**record, **follows}


def _clip_score(job: Job) -> Callable[[Any, Sequence[str]], float] | None:
    """The CLIP score, where the config has one."""
    c = job.config.eval
    if not c.clip:
        return None
    if job.dataset.encode is None and not job.dataset.class_names:
        raise ValueError(f"eval.clip compares samples with their captions, and {job.dataset.name} has none; unset it")
    if not c.tokenizer:
        raise ValueError("eval.clip needs eval.tokenizer, the tokenizer.json that is published with it")
    return clip.scorer(c.clip, c.tokenizer)


def compare_halves(job: Job) -> dict[str, Any]:
    """The evaluation with one half of the data as samples and the other as reference: what perfection would score."""
    c = job.config.eval
    half = min(job.dataset.size // 2, c.samples)
    data = [job.dataset.take(half * i, half * (i + 1))["image"] for i in (0, 1)]
    if not c.net:
        return _pixel_distance(*data)
    data = [job.decode(images) for images in data] if job.decode else data
    net = evaluation.feature_net(c.net, c.weights or None)
    fake, real = (evaluation.extract(net, _chunks(evaluation.to_uint8(a)), batch_size=256, keep=True) for a in data)
    how = protocol(job, net, half, half, c.seed)
    how = dataclasses.replace(
        how, solver=None, steps=None, nfe=None, guidance=None, ema=None, notes="halves of the data"
    )
    return evaluation.evaluate_features(fake.features, real.features, how, probabilities=fake.probabilities)


def _pixel_distance(a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """The distance that needs no feature network."""
    a, b = (x.reshape(len(x), -1).astype(np.float64) for x in (a, b))
    return {"sliced_wasserstein": evaluation.sliced_wasserstein(a, b)}


def _chunks(images: np.ndarray, size: int = 256) -> list[np.ndarray]:
    return [images[i : i + size] for i in range(0, len(images), size)]
