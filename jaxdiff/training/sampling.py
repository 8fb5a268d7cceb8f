"""Sampling from a run's parameters.

Image i depends only on (key, i): its noise, label and solver noise come from keys folded with i, so neither the batch
size nor the number of devices affects it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from ml_collections import ConfigDict

from jaxdiff import compilation
from jaxdiff.conditions import Cond
from jaxdiff.data import Dataset, DataSpec
from jaxdiff.placement import BATCH, ways
from jaxdiff.training.build import Run
from jaxdiff.training.sharding import Devices, config_mesh, make_mesh
from jaxdiff.trees import Tree

Samples = tuple[np.ndarray, np.ndarray | None]  # images, labels
Texts = Callable[[np.ndarray], Mapping[str, np.ndarray]]  # sample indices -> text conditioning, one row each
NOISE, LABEL, SOLVER, CORRECTION = range(4)  # purposes folded into a key


def mesh_of(config: ConfigDict, devices: Devices = None) -> Mesh:
    """The run's mesh if it fits the available devices, else a mesh that shards only the batch."""
    try:
        return config_mesh(config, devices)
    except ValueError:
        return make_mesh(devices=devices)


# ------------------------------------------------------------------------------------------ conditioning of samples


def labels_of(run: Run, key: Array, index: Array, labels: str | int) -> dict[str, Array]:
    """The labels of images `index`: uniform draws ("random"), all classes in turn ("cycle"), or one class (an int)."""
    classes = run.conditions.num_classes
    if not classes:
        return {}
    if labels == "cycle":
        return {"label": index % classes}
    if labels == "random":
        return {"label": jax.vmap(lambda i: jax.random.randint(_folded(key, i, LABEL), (), 0, classes))(index)}
    if not 0 <= int(labels) <= classes:
        raise ValueError(f"a label must be in 0..{classes - 1} (or {classes} for none), got {labels}")
    return {"label": jnp.full(index.shape, int(labels), jnp.int32)}


def from_prompts(data: DataSpec, prompts: Sequence[str]) -> Texts:
    """Cycle through the prompts."""
    if data.text is None:
        raise ValueError(
            f"prompts need a text encoder, which the run on {data.name} does not have; sample by label instead"
        )
    rows = data.text(list(prompts))
    return lambda index: {name: table[index % len(prompts)] for name, table in rows.items()}


def from_examples(data: DataSpec) -> Texts:
    """Cycle through the text of the dataset's first examples, which a run stores."""
    rows = data.example_text
    return lambda index: {name: table[index % len(table)] for name, table in rows.items()}


def from_dataset(dataset: Dataset) -> Texts:
    """The text of example i of the dataset for sample i."""

    def texts(index: np.ndarray) -> dict[str, np.ndarray]:
        rows = [dataset.take(int(i), int(i) + 1) for i in index]
        return {name: np.concatenate([row[name] for row in rows]) for name in dataset.example_text}

    return texts


def captions_of(data: DataSpec, count: int, labels: ArrayLike | None = None) -> list[str]:
    """The captions of the first `count` samples: names of their labels, else those of the first examples in turn."""
    if labels is not None:
        return [(*data.class_names, "")[int(label)] for label in np.asarray(labels)] if data.class_names else []
    return [data.example_captions[i % len(data.example_captions)] for i in range(count) if data.example_captions]


def all_captions(dataset: Dataset, count: int) -> list[str]:
    """The captions of the dataset's first `count` examples, matching `from_dataset`."""
    ids = np.concatenate([dataset.take(i, min(i + 256, count))["caption_id"] for i in range(0, count, 256)])
    return [dataset.captions[i] for i in ids]


def _folded(key: Array, index: Array, purpose: int) -> Array:
    return jax.random.fold_in(jax.random.fold_in(key, index), purpose)


def as_key(key: int | Array) -> Array:
    """A key, or the key of an integer seed."""
    return jax.random.key(key) if isinstance(key, (int, np.integer)) else key


# ------------------------------------------------------------------------------------------ the sampler


class Sampler:
    """A compiled, sharded function `(parameters, key, index [b]) -> (images [b ...], labels or None)`.

    With `correct_steps` it takes a full training state instead of parameters and returns images [b 2 ...]: the
    generator's samples, and those after that many joint Langevin steps.
    """

    def __init__(
        self, run: Run, mesh: Mesh, labels: str | int = "random", texts: Texts | None = None, correct_steps: int = 0
    ) -> None:
        self.run, self.mesh, self.labels, self.correct_steps = run, mesh, labels, correct_steps
        self.has_text = "text" in run.conditions
        self.texts = texts or from_examples(run.data)
        if correct_steps and run.method.correct is None:
            raise ValueError(
                f"--mcmc_steps corrects samples of an EMD generator, using its teacher and student score; this run's "
                f"method is {run.config.method.name!r}"
            )

    @cached_property
    def _program(self) -> Callable[..., tuple[Array, Array | None]]:
        run = self.run

        def draw(source: Tree, key: Array, index: Array, texts: Mapping[str, Array]) -> tuple[Array, Array | None]:
            unit = jax.vmap(lambda i: jax.random.normal(_folded(key, i, NOISE), run.data.shape))(index)
            control = {name: jnp.tile(value, (len(index), 1)) for name, value in run.control.items()}
            cond: Cond = {**labels_of(run, key, index, self.labels), **control, **texts} or None
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):  # for placement.along_batch
                images = self._images(source, unit, cond, key, index)
            return images, (cond or {}).get("label")

        everywhere, along = NamedSharding(self.mesh, PartitionSpec()), NamedSharding(self.mesh, BATCH)
        options = compilation.options(self.mesh.devices.flat[0].platform)
        inputs = (None, None, along, along)
        return jax.jit(draw, in_shardings=inputs, out_shardings=everywhere, compiler_options=options)

    def _images(self, source: Tree, unit: Array, cond: Cond, key: Array, index: Array) -> Array:
        method = self.run.method
        if self.correct_steps:
            assert method.correct is not None
            keys = jax.vmap(lambda i: _folded(key, i, CORRECTION))(index)
            sigma = self.run.config.emd.mcmc_sigma
            return jnp.stack(method.correct(source, unit, cond, keys, sigma=sigma, steps=self.correct_steps), 1)
        if not self.run.solver.stochastic:
            return method.sample(source, unit, cond, None)
        return method.sample(source, unit, cond, jax.vmap(lambda i: _folded(key, i, SOLVER))(index))

    def __call__(self, source: Tree, key: int | Array, index: np.ndarray) -> tuple[Array, Array | None]:
        texts = {}
        if self.has_text:
            rows = self.texts(np.asarray(index))
            texts = {name: self._spread(rows[name]) for name in rows if name in self.run.inputs}
        return self._program(source, as_key(key), self._spread(index), texts)

    def _spread(self, rows: np.ndarray) -> np.ndarray | Array:
        """Rows along the batch; with several processes, each hands over those of its own devices."""
        if jax.process_count() == 1:
            return rows
        return jax.make_array_from_callback(rows.shape, NamedSharding(self.mesh, BATCH), lambda where: rows[where])

    def batches(
        self,
        source: Tree,
        count: int,
        key: int | Array,
        *,
        stop: Callable[[], bool] = lambda: False,
        decode: bool = True,
    ) -> Iterator[Samples]:
        """Batches of images and labels, `count` in total; the last is padded and cut, so one program serves all.

        Latents are decoded to images if the config has an autoencoder, unless `decode` is False.
        """
        shares = ways(self.mesh)
        size = -(-min(self.run.config.sample.batch_size, max(count, 1)) // shares) * shares
        for start in range(0, count, size):
            if stop():
                return
            images, labels = self(source, key, np.arange(start, start + size))
            kept = min(size, count - start)
            found = np.asarray(images)[:kept]
            if decode and self.run.decode:
                found = self.run.decode(found)
            yield found, None if labels is None else np.asarray(labels)[:kept]

    def sample(self, source: Tree, count: int, key: int | Array, **how: Any) -> Samples:
        """`count` images and their labels."""
        return joined(list(self.batches(source, count, key, **how)))


def joined(batches: Sequence[Samples]) -> Samples:
    """Batches of samples as one."""
    images = np.concatenate([images for images, _ in batches])
    if batches[0][1] is None:
        return images, None
    return images, np.concatenate([labels for _, labels in batches if labels is not None])
