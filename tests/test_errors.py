"""Names that are chosen from a table or a list, and every registry that they are chosen from."""

import re

import pytest

from jaxdiff import conventions, data, denoisers, methods, models, noise, schedules, solvers, training, weights
from jaxdiff.configs import digits
from jaxdiff.errors import choose, closest, nearest, pick
from jaxdiff.methods import averaging
from jaxdiff.training import optim


def test_a_known_name_is_returned_and_its_value_picked():
    assert choose("heun", iter(["euler", "heun"]), "solver") == "heun"
    assert pick({"euler": 1, "heun": 2}, "heun", "solver") == 2
    assert pick({"none": None}, "none", "thing") is None


@pytest.mark.parametrize("find", [choose, lambda name, options, what: pick(dict.fromkeys(options, 0), name, what)])
def test_an_unknown_name_is_answered_with_the_nearest_and_all(find):
    with pytest.raises(ValueError, match=r"solver 'huen'.*did you mean 'heun'.*euler, heun"):
        find("huen", ("euler", "heun"), "solver")
    with pytest.raises(ValueError, match=r"solver 'xyz'.*euler, heun") as error:
        find("xyz", ("euler", "heun"), "solver")
    assert "did you mean" not in str(error.value)
    with pytest.raises(ValueError, match=r"solver ''.*euler"):
        find("", ("euler",), "solver")


def test_names_of_other_libraries_lead_to_ours_before_spelling_does():
    assert closest("lr", ["clip", "learning_rate"])[0] == "learning_rate"
    assert nearest("ddim", ["euler", "heun"]) == " (did you mean 'euler'?)"
    assert nearest("DPM++ 2M", ["dpmpp2m"]) == " (did you mean 'dpmpp2m'?)"
    assert nearest("ddim", ["heun"]) == "" == nearest("xyz", [])


def configured(**changes):
    config = digits.get_config("tiny")
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    return training.build(config, data.load("digits"))


REGISTRIES = {
    "models": (models.MODELS, models.build),
    "solvers": (solvers.SOLVERS, solvers.make),
    "grids": (solvers.GRIDS, lambda name: solvers.grid(4, 0.1, 10.0, name)),
    "sources": (data.SOURCES, data.load),
    "crops": (data.CROPS, lambda name: data.load("digits", image_size=8, crop=name)),
    "weights": (weights.KINDS, lambda name: weights.load({}, name)),
    "sigma samplers": (noise.LEVELS, noise.make_levels),
    "loss weights": (noise.LOSS_WEIGHTS, lambda name: configured(diffusion__weight=name)),
    "predictions": (denoisers.PREDICTIONS, lambda name: conventions.DDPM(prediction=name)),
    "schedules": (schedules.SCHEDULES, conventions.DDPM),
    "conventions": (conventions.CONVENTIONS, lambda name: configured(denoiser__kind=name)),
    "methods": (methods.METHODS, lambda name: configured(method__name=name)),
    "optimizers": (optim.OPTIMIZERS, lambda name: optim.make(name, 1e-3, 8)),
    "averages": (averaging.DECAYS, averaging.make),
    "dtypes": (models.DTYPES, lambda name: configured(model__dtype=name)),
}


@pytest.mark.parametrize("name", REGISTRIES)
def test_every_registry_answers_an_unknown_name_with_the_nearest_and_all(name):
    table, make = REGISTRIES[name]
    known = next(reversed(table))
    wrong = f"{known}_"
    listed = ".*".join(re.escape(option) for option in table)
    with pytest.raises(ValueError, match=rf"'{re.escape(wrong)}'.*did you mean '{re.escape(known)}'.*{listed}"):
        make(wrong)
