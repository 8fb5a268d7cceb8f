"""Loads a run from its workdir: `jaxdiff.load("runs/a")`.

It reads config.json, data.json and export.safetensors; the training data, the teacher and the training mesh are not
needed. Runs of format 1 have no data.json, so their data are loaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxdiff.data import Dataset, DataSpec, spec
from jaxdiff.denoisers import Denoiser
from jaxdiff.methods import TrainState, exported
from jaxdiff.training import autoguidance, bucket, components, export, parameters, snapshots, state
from jaxdiff.training.build import Run, build, check_sampling, load_data
from jaxdiff.training.evaluate import main_metric
from jaxdiff.training.sampling import Sampler, Texts, from_prompts, mesh_of
from jaxdiff.training.sharding import Devices, state_shardings, with_shardings
from jaxdiff.trees import Params


def load(
    workdir: str | os.PathLike, config: ConfigDict | None = None, devices: Devices = None, step: int | str = ""
) -> SavedRun:
    """The run in a workdir, for sampling.

    Args:
        workdir: its folder, or a URL such as gs://bucket/run or hf://owner/repo; config.json, data.json and
            export.safetensors are read.
        config: its own config with changes, for example to `config.sample`.
        devices: those to use; by default all.
        step: a kept checkpoint instead of the exported parameters: its number, or "best", the least by
            checkpoint.metric.

    Returns:
        A `SavedRun`: `.sample(...)`, `.denoiser`, `.params`, `.model`, `.config`.

    Raises:
        FileNotFoundError: there is no run in the folder.
        ValueError: the config changes how a student was trained, or the step is not kept.
    """
    folder = bucket.reading(workdir, checkpoints=step != "")
    trained = export.read_config(folder)
    config = trained if config is None else config
    check_sampling(config, trained)
    chosen = None
    if step != "":
        chosen = state.kept_step(folder, str(step), trained.checkpoint.metric or main_metric(trained))
    return opened(folder, config, data_of(folder, config), mesh_of(config, devices), chosen)


def opened(folder: Path, config: ConfigDict, data: DataSpec, mesh: Mesh, checkpoint: int | None = None) -> SavedRun:
    """The run of `config` with the parameters in `folder`, guided by the network of `sample.weak` if there is one."""
    if checkpoint is not None and config.sample.average:
        raise ValueError("sample.average and a step exclude each other: a combined average is of one step; unset one")
    run = build(config, data)
    if not config.sample.weak:
        return SavedRun(folder, run, mesh, checkpoint)
    source = bucket.reading(config.sample.weak)
    weak = SavedRun(source, autoguidance.weak_run(source, run, data), mesh)
    return SavedRun(folder, autoguidance.guided_run(run, weak.run), mesh, checkpoint, weak)


def data_of(workdir: Path, config: ConfigDict) -> DataSpec:
    """The description of the data in the workdir, or the data themselves if there is none."""
    return spec.read(workdir) or load_data(config)


class SavedRun:
    """A trained run: its config, network and parameters, and how to sample it."""

    def __init__(
        self, workdir: Path, run: Run, mesh: Mesh, checkpoint: int | None = None, weak: SavedRun | None = None
    ) -> None:
        self.workdir, self.run, self.mesh, self.checkpoint, self.weak = workdir, run, mesh, checkpoint, weak

    @property
    def step(self) -> int | None:
        """The training step of the parameters; None if their file does not say."""
        return export.read_step(self.workdir) if self.checkpoint is None else self.checkpoint

    @property
    def config(self) -> ConfigDict:
        """The config of the run."""
        return self.run.config

    @property
    def model(self) -> nn.Module:
        """The network."""
        return self.run.model

    @cached_property
    def params(self) -> Params:
        """The exported parameters, sharded by the run's rules on this mesh.

        Or those of the chosen checkpoint, or the average of `sample.average`; with a weaker network they are
        {"main": ..., "weak": ...}.
        """
        if self.checkpoint is None:
            return self.read(self._source())
        own = exported(self.state())
        return own if self.weak is None else {"main": own, "weak": self.weak.params}

    def _source(self) -> Path:
        width = self.config.sample.average
        if not width or not self.workdir.is_dir():
            return self.workdir
        path = snapshots.combined_path(self.workdir, width)
        if not path.is_file():
            raise FileNotFoundError(
                f"no average of width {width:g} at {path}; make it with: jaxdiff ema --workdir={self.workdir} "
                f"--widths={width:g}"
            )
        return path

    def read(self, source: Path) -> Params:
        """The parameters in a workdir or exported file, as `params` has them."""
        shapes = parameters.shapes_of(self.run.model, self.run.conditions, self.run.data.shape)
        declared = with_shardings(shapes, state_shardings(shapes, self.mesh, self.config.mesh.min_size))
        loaded = parameters.read(source, "run", self.run.model)
        own = parameters.place(parameters.fitted(loaded, shapes), declared)
        return own if self.weak is None else {"main": own, "weak": self.weak.params}

    @property
    def denoiser(self) -> Denoiser:
        """The network as a denoiser `(x, sigma, cond) -> x0`."""
        return self.run.method.denoiser(self.params)

    def state(self) -> TrainState:
        """The full training state of the chosen checkpoint, else of the newest one."""
        return state.at(self.workdir, state.declare(self.run, self.mesh), self.checkpoint)

    def with_data(self) -> SavedRun:
        """The same run with its data loaded, for evaluation against them."""
        if isinstance(self.run.data, Dataset):
            return self
        return self.rebuilt(self.config, load_data(self.config))

    def rebuilt(self, config: ConfigDict, data: DataSpec) -> SavedRun:
        """The same parameters in the run of another config or of other data."""
        return opened(self.workdir, config, data, self.mesh, self.checkpoint)

    def with_nfe(self, nfe: int) -> SavedRun:
        """The same run with as many timestamps as `nfe` network evaluations per trajectory allow."""
        changed = self.rebuilt(components.with_nfe(self.config, nfe), self.run.data)
        changed.__dict__["params"] = self.params
        return changed

    def sampler(self, labels: str | int = "random", prompts: Sequence[str] = ()) -> Sampler:
        """A reusable sampler for these labels or prompts."""
        texts: Texts | None = from_prompts(self.run.data, prompts) if prompts else None
        return Sampler(self.run, self.mesh, labels, texts)

    def sample(
        self,
        key: int | jax.Array = 0,
        n: int = 16,
        *,
        label: str | int = "random",
        prompt: str | list[str] = "",
        nfe: int = 0,
    ) -> np.ndarray:
        """n images [n h w c] in [-1, 1], or points, drawn as configured in `config.sample`.

        Image i depends only on (key, i).

        Args:
            key: a seed or a key.
            n: number of images.
            label: a class, "random" or "cycle" (all classes in turn).
            prompt: one prompt or a list to cycle through.
            nfe: network evaluations per image; 0: as configured.
        """
        if nfe:
            return self.with_nfe(nfe).sample(key, n, label=label, prompt=prompt)
        prompts = [prompt] if isinstance(prompt, str) and prompt else list(prompt)
        return self.sampler(label, prompts).sample(self.params, n, key)[0]
