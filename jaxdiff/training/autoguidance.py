"""Autoguidance (Karras et al. 2024, arXiv 2406.02507): samples are led away from those of a weaker network.

    D = D_weak + sample.guidance (D_main - D_weak)

`sample.weak` is the workdir of a smaller or less trained run, or an exported file: an average of another width of any
run (averages/ema_0.15.safetensors), or of the same network at an earlier step. Both networks are conditioned alike.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jax import Array

from jaxdiff import denoisers
from jaxdiff.conditions import Cond
from jaxdiff.data import DataSpec
from jaxdiff.denoisers import Denoiser
from jaxdiff.training import components, export
from jaxdiff.training.build import Run, build
from jaxdiff.trees import Params


def guided_run(main: Run, weak: Run) -> Run:
    """The run `main`, guided by `weak`; its parameters are {"main": ..., "weak": ...}."""
    _check(main, weak)
    config = main.config
    sampling = components.sampling_of(config, main.convention, main.solver, None, None)
    assert sampling.solve is not None
    solve = sampling.solve

    def denoiser(params: Params) -> Denoiser:
        strong, poor = main.method.denoiser(params["main"]), weak.method.denoiser(params["weak"])
        return denoisers.guided(strong, config.sample.guidance, weak=poor)

    def sample(params: Params, noise: Array, cond: Cond = None, key: Array | None = None) -> Array:
        return solve(denoiser(params), noise, cond, key)

    method = main.method._replace(sample=sample, denoiser=denoiser, correct=None)
    return dataclasses.replace(main, method=method, guided=True)


def weak_run(source: Path, main: Run, data: DataSpec) -> Run:
    """The run that `source` belongs to: a workdir, a file in one or in its folder of averages, else the main one."""
    if not source.exists():
        raise FileNotFoundError(
            f"no weaker network at {source.absolute()}: sample.weak is the workdir of a run, or an exported file such "
            "as WORKDIR/averages/ema_0.15.safetensors (made by `jaxdiff ema`)"
        )
    for folder in (source, source.parent, source.parent.parent):
        if (folder / "config.json").is_file():
            return build(export.read_config(folder), data)
    return main


def _check(main: Run, weak: Run) -> None:
    if main.config.method.name != "diffusion" or weak.config.method.name != "diffusion":
        raise ValueError(
            f"sample.weak guides denoisers; the methods of these runs are {main.config.method.name!r} and "
            f"{weak.config.method.name!r}"
        )
    if main.config.sample.guidance == 1.0:
        raise ValueError("sample.weak has no effect with sample.guidance=1; set a scale above 1")
    if set(main.conditions) != set(weak.conditions):
        raise ValueError(
            f"sample.weak is conditioned on {sorted(weak.conditions)}, this run on {sorted(main.conditions)}; use "
            "networks with the same conditions"
        )
