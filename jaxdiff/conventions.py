"""Conventions: how a network's input is scaled, its noise level encoded and its output interpreted, as one value.

    convention(network) -> Denoiser

Two networks are interchangeable (a teacher and its student, a checkpoint and the run initialised from it) only if their
conventions compare equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxdiff import denoisers, schedules
from jaxdiff.denoisers import Denoiser, Network
from jaxdiff.errors import check_positive, check_ratio, choose, pick


class _Wrapper:
    """What all conventions share. Flax takes a callable attribute of a module, such as `published`, for a method."""

    nowrap = True  # and leaves it alone with this mark


@dataclass(frozen=True)
class EDM(_Wrapper):
    """Karras et al. 2022: unit-variance inputs and outputs for data of standard deviation `sigma_data`."""

    sigma_data: float = 0.5

    def __post_init__(self) -> None:
        check_positive("sigma_data, the standard deviation of the data,", self.sigma_data)

    def __call__(self, network: Network) -> Denoiser:
        return denoisers.edm(network, self.sigma_data)

    def progress(self, noise_label: Array) -> Array:
        """Where a noise label lies between clean data (0) and pure noise (1)."""
        return 2 / np.pi * jnp.arctan(jnp.exp(4 * noise_label) / self.sigma_data)

    @property
    def sigmas(self) -> None:
        """A continuous convention has no table of noise levels."""
        return None


@dataclass(frozen=True)
class DDPM(_Wrapper):
    """A discrete-time variance-preserving network that predicts eps, v or x0.

    `shift` rescales the schedule for images that many times larger; a timestep keeps its meaning to the network.
    """

    schedule: str = "linear"
    prediction: str = "eps"
    shift: float = 1.0

    def __post_init__(self) -> None:
        choose(self.schedule, schedules.SCHEDULES, "ddpm schedule")
        choose(self.prediction, denoisers.PREDICTIONS, "prediction")
        check_ratio(self.shift)

    def __call__(self, network: Network) -> Denoiser:
        return denoisers.ddpm(network, self.alpha_bar, self.prediction)

    def progress(self, noise_label: Array) -> Array:
        """Where a timestep lies between clean data (0) and pure noise (1), whatever the shift."""
        return noise_label / 999

    @property
    def alpha_bar(self) -> np.ndarray:
        """The fraction of signal variance at each timestep."""
        return schedules.rescaled_alpha_bar(pick(schedules.SCHEDULES, self.schedule, "ddpm schedule")(), self.shift)

    @property
    def sigmas(self) -> np.ndarray:
        """The noise levels of the timesteps, ascending."""
        return schedules.sigma_table(self.alpha_bar)


@dataclass(frozen=True)
class Flow(_Wrapper):
    """Rectified flow: the network sees (1 - t) x0 + t eps and `time_scale * t`, and predicts eps - x0.

    With `to_data`, as in SiT, its time runs from noise to data: it sees `time_scale * (1 - t)` and predicts x0 - eps.
    """

    time_scale: float = 1000.0
    to_data: bool = False

    def __post_init__(self) -> None:
        check_positive("time_scale, the noise label of pure noise,", self.time_scale)

    def __call__(self, network: Network) -> Denoiser:
        return denoisers.flow(network, self.time_scale, self.to_data)

    def progress(self, noise_label: Array) -> Array:
        """Where a noise label lies between clean data (0) and pure noise (1)."""
        return 1 - noise_label / self.time_scale if self.to_data else noise_label / self.time_scale

    @property
    def sigmas(self) -> None:
        """A continuous convention has no table of noise levels."""
        return None


Convention = EDM | DDPM | Flow
CONVENTIONS: dict[str, type[Convention]] = {"edm": EDM, "ddpm": DDPM, "flow": Flow}
