"""Conventions: values that compare, print and wrap networks as the functions of `denoisers` do."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdiff import denoisers, models, schedules
from jaxdiff.conventions import CONVENTIONS, DDPM, EDM, Flow

X = jnp.linspace(-2, 2, 24).reshape(2, 3, 4)
SIGMAS = (0.01, 0.7, jnp.array([0.3, 20.0]))


def network(x, noise_label, cond):
    """A known mix of what it is given."""
    label = jnp.reshape(noise_label, (-1, 1, 1))
    return 0.5 * x + 0.01 * label + (0.0 if cond is None else cond["shift"])


@pytest.mark.parametrize(
    ("convention", "function"),
    [
        (EDM(), denoisers.edm(network)),
        (EDM(1.7), denoisers.edm(network, 1.7)),
        (Flow(), denoisers.flow(network)),
        (Flow(1.0), denoisers.flow(network, 1.0)),
        *(
            (DDPM(schedule, prediction), denoisers.ddpm(network, table(), prediction))
            for schedule, table in schedules.SCHEDULES.items()
            for prediction in denoisers.PREDICTIONS
        ),
    ],
)
def test_they_wrap_networks_as_the_functions_do(convention, function):
    for sigma in SIGMAS:
        for cond in (None, {"shift": 0.25}):
            np.testing.assert_array_equal(convention(network)(X, sigma, cond), function(X, sigma, cond))


def test_equal_settings_are_equal_conventions():
    different = [EDM(), EDM(1.0), DDPM(), DDPM("cosine"), DDPM(prediction="v"), DDPM(shift=2.0), Flow(), Flow(1.0)]
    for i, one in enumerate(different):
        for j, other in enumerate(different):
            assert (one == other) == (i == j)
        assert one == dataclasses.replace(one) and hash(one) == hash(dataclasses.replace(one))
    assert EDM(1) == EDM(1.0)
    assert len({*different, EDM(0.5)}) == len(different)


def test_they_print_as_they_are_written():
    for convention in (EDM(0.5), DDPM("cosine", "v", 2.0), Flow()):
        assert eval(repr(convention)) == convention
    assert repr(DDPM("cosine", "v")) == "DDPM(schedule='cosine', prediction='v', shift=1.0)"
    assert list(CONVENTIONS.items()) == [("edm", EDM), ("ddpm", DDPM), ("flow", Flow)]


@pytest.mark.parametrize("convention", [EDM(0.5), EDM(2.0), DDPM(), DDPM(shift=2.0), Flow(), Flow(1.0)])
def test_progress_of_the_label_rises_from_clean_data_to_pure_noise(convention):
    seen = []

    def look(x, noise_label, cond):
        seen.append(noise_label)
        return x

    convention(look)(jnp.zeros((5, 1)), jnp.array([1e-5, 0.01, 0.5, 10.0, 1e6]))
    progress = np.asarray(convention.progress(seen[0]))
    assert progress.dtype == np.float32 and (np.diff(progress) >= 0).all()
    np.testing.assert_allclose(progress[[0, -1]], [0, 1], atol=1e-4)
    assert 0.05 < progress[2] < 0.9


def test_progress_in_closed_form():
    np.testing.assert_allclose(EDM(0.5).progress(jnp.log(jnp.array([0.5])) / 4), 0.5, rtol=1e-6)  # sigma = sigma_data
    np.testing.assert_allclose(Flow().progress(jnp.array([250.0])), 0.25)
    np.testing.assert_allclose(DDPM().progress(jnp.array([0.0, 333.0, 999.0])), [0, 1 / 3, 1], rtol=1e-6)


@pytest.mark.parametrize("shift", [0.5, 2.0])
def test_a_shift_scales_the_noise_levels_and_keeps_the_timesteps(shift):
    plain, shifted = DDPM("cosine"), DDPM("cosine", shift=shift)
    np.testing.assert_allclose(shifted.sigmas, shift * plain.sigmas, rtol=1e-9)
    np.testing.assert_allclose(plain.sigmas, schedules.sigma_table(schedules.cosine_alpha_bar()))
    seen = []

    def look(x, noise_label, cond):
        seen.append(noise_label)
        return x

    for convention, scale in ((plain, 1.0), (shifted, shift)):
        convention(look)(X, jnp.asarray(scale * plain.sigmas[[100, 700]], jnp.float32))
    np.testing.assert_allclose(seen[0], [100, 700], rtol=1e-4)
    np.testing.assert_allclose(seen[1], seen[0], rtol=1e-4)
    np.testing.assert_allclose(shifted.progress(seen[1]), plain.progress(seen[0]), rtol=1e-4)


def test_continuous_conventions_have_no_table():
    assert EDM().sigmas is None and Flow().sigmas is None
    assert len(DDPM().sigmas) == 1000 and (np.diff(DDPM().sigmas) > 0).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EDM(0.0), r"sigma_data.*got 0.0"),
        (lambda: EDM(-1.0), r"sigma_data.*got -1.0"),
        (lambda: EDM(float("nan")), r"sigma_data.*got nan"),
        (lambda: EDM(float("inf")), r"sigma_data.*got inf"),
        (lambda: DDPM("linaer"), r"'linaer'.*did you mean 'linear'.*linear, sqrt_linear, cosine"),
        (lambda: DDPM(prediction="epsilon"), r"'epsilon'.*did you mean 'eps'.*eps, v, x0"),
        (lambda: DDPM(shift=0.0), r"ratio.*got 0.0"),
        (lambda: DDPM(shift=-2.0), r"ratio.*got -2.0"),
        (lambda: Flow(0.0), r"time_scale.*got 0.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_networks_know_the_convention_they_were_published_in():
    published = {name: model().published for name, model in models.MODELS.items() if name != "mlp"}
    assert published == {
        "unet": EDM(),
        "edm2": EDM(),
        "flux": Flow(),
        "dit": DDPM(),
        "mdt": DDPM(),
        "pixart": DDPM(),
        "latent_unet": DDPM("sqrt_linear"),
        "mmdit": Flow(),
    }
    np.testing.assert_array_equal(models.DiT().published(network)(X, 0.7), DDPM()(network)(X, 0.7))
