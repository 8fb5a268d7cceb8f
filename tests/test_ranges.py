"""Every number of a config has a range beside its comment; values outside it and of another kind are refused."""

from functools import reduce

import numpy as np
import pytest

from jaxdiff import models, ranges
from jaxdiff.configs import default
from jaxdiff.errors import check_images, check_number, check_positive
from jaxdiff.training.build import check_values, comments, flat

NUMBERS = {key: value for key, value in flat(default.get_config()).items() if isinstance(value, (int, float, tuple))}
NUMBERS = {key: value for key, value in NUMBERS.items() if not isinstance(value, bool)}
del NUMBERS["log.backends"]  # a tuple of names


NOTED = comments()


def test_every_number_of_the_default_config_declares_its_range():
    missing = [key for key in NUMBERS if ranges.interval_of(NOTED[key]) is None]
    assert not missing
    check_values(default.get_config())


def outside(interval):
    """Values that an interval does not hold: beyond its bounds, at the open ones, and no numbers."""
    found = [float("nan"), float("inf"), float("-inf"), "1", None, True]
    for bound, beyond, bracket in ((interval.low, -1, interval.text[0]), (interval.high, 1, interval.text[-1])):
        if np.isfinite(bound):
            found += [bound + beyond] + [bound] * (bracket in "()")
    return found


@pytest.mark.parametrize("key", NUMBERS)
def test_values_outside_their_range(key):
    interval = ranges.interval_of(NOTED[key])
    assert not [value for value in outside(interval) if value in interval]
    for bound, bracket in ((interval.low, interval.text[0]), (interval.high, interval.text[-1])):
        assert (bound in interval) == (bracket in "[]" and np.isfinite(bound))
    config = default.get_config()
    *sections, name = key.split(".")
    holder = reduce(lambda part, section: part[section], sections, config)
    whole = isinstance(NUMBERS[key], int)
    for value in outside(interval)[: 1 if whole else None]:
        with holder.ignore_type():
            holder[name] = (value,) if isinstance(NUMBERS[key], tuple) else value
        with pytest.raises(ValueError, match=key.replace(".", r"\.")):
            check_values(config)


@pytest.mark.parametrize(
    ("comment", "text"),
    [
        ("[0, 1) probability", "[0, 1)"),
        ("(-inf, inf)", "(-inf, inf)"),
        ("[0, 2**32) of a seed", "[0, 2**32)"),
        ("(0.5, 1.5] x", "(0.5, 1.5]"),
        ("(the first two), or", None),
        ("[b h w c] images", None),
        ("", None),
    ],
)
def test_comments_that_begin_with_an_interval(comment, text):
    found = ranges.interval_of(comment)
    assert (found and found.text) == text
    if text == "[0, 2**32)":
        assert found.high == 2**32 and 2**32 - 1 in found and 2**32 not in found


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train.steps", 2.5, "train.steps must be a whole number, got 2.5"),
        ("sample.afs", "no", "sample.afs is True or False, got 'no'"),
        ("sample.guidance", "2", "sample.guidance must be a number, got '2'"),
        ("sample.solver", 3, "sample.solver must be text such as 'heun', got 3"),
        ("ema.widths", 0.1, r"ema.widths must be a tuple such as \(1, 2\), got 0.1"),
    ],
)
def test_values_of_another_kind(key, value, message):
    """As an edited config.json may have them."""
    config = default.get_config()
    section, _, name = key.rpartition(".")
    with config[section].ignore_type():
        config[section][name] = value
    with pytest.raises(ValueError, match=message):
        check_values(config)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("dit", {"patch": 0}, r"model.fields.patch must be in \[1, 1024\], got 0 \(pixels along a side\)"),
        ("dit", {"width": 30, "heads": 4}, r"width=30 must be divisible by heads=4 and by 4.*nearest that is, is 32"),
        ("unet", {"channel_mult": ()}, "channel_mult is empty: give one number per resolution"),
        ("unet", {"channel_mult": (1, 0)}, r"got 0 in \(1, 0\)"),
        ("edm2", {"channels_per_head": 0}, "channels_per_head must be in"),
        ("mlp", {"width": 0}, "model.fields.width must be in"),
    ],
)
def test_fields_that_no_network_can_have(name, fields, message):
    with pytest.raises(ValueError, match=message):
        models.build(name, **fields)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, 2.1, 1j, "1"])
def test_numbers_given_to_functions(value):
    with pytest.raises(ValueError, match=r"eta must be in \[0, 2\], got"):
        check_number("eta", value, 0, 2)
    check_number("eta", 2, 0, 2)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), [1.0, 0.0]])
def test_positive_numbers(value):
    with pytest.raises(ValueError, match="x must be positive"):
        check_positive("x", value)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, bool, np.complex64])
def test_images_are_floats(dtype):
    with pytest.raises(ValueError, match=f"x must be floats, got {np.dtype(dtype)}"):
        check_images("x", np.ones((2, 2), dtype))
