"""Signals and conditions: which pairs of data and network match, and what is dropped, null and given as an example."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdiff import data, models
from jaxdiff.conditions import CONTROL, METHOD, SEMANTIC, Conditions, Signal, label_signal
from jaxdiff.conventions import EDM
from jaxdiff.models import MLP, DiT, LatentUNet, MMDiT, PixArt, UNet
from jaxdiff.models.conditioning import Control

TEXT = {
    "text": Signal((5, 6), "float32", np.full((5, 6), 0.5, np.float32)),
    "text_mask": Signal((5,), "bool", np.arange(5) < 1),
    "pooled": Signal((3,), "float32", np.full(3, -2.0, np.float32)),
}
LABELS = {"label": label_signal(10)}
SIZES = {"crop": Signal((2,), group=CONTROL), "original_size": Signal((2,), group=CONTROL)}
CONTROLLED = Control(EDM(), ("crop", "original_size"))
PROMPTED = MMDiT(text_dim=6, pooled_dim=3)


class Toy:
    """A network that is no module, conditioned on what it is given."""

    def __init__(self, **signals):
        self.signals = lambda: signals


def match(model, available):
    return Conditions.match(model, available, "the data")


# ------------------------------------------------------------------------------------------ match


def test_a_network_gets_the_signals_it_takes_and_no_others():
    found = match(PROMPTED, {**LABELS, **TEXT, **SIZES})
    assert list(found) == ["text", "text_mask", "pooled"]
    assert {name: signal.shape for name, signal in found.items()} == {"text": (5, 6), "text_mask": (5,), "pooled": (3,)}
    for name, signal in found.items():
        assert signal.null is TEXT[name].null and signal.group == SEMANTIC
    assert match(UNet(), {**LABELS, **TEXT}) == {}
    assert match(object(), LABELS) == {}  # a network that declares nothing


def test_null_values_of_the_network_stand_where_the_data_have_none():
    found = match(DiT(num_classes=10, control=CONTROLLED), {**LABELS, **SIZES})
    assert {name: (signal.null, signal.group) for name, signal in found.items()} == {
        "label": (10, SEMANTIC),
        "crop": (-1.0, CONTROL),
        "original_size": (-1.0, CONTROL),
    }


@pytest.mark.parametrize(("ours", "theirs"), [(10, 10), (20, 10)])
def test_classes_of_the_network_suffice_for_the_data(ours, theirs):
    found = match(DiT(num_classes=ours), {"label": label_signal(theirs)})
    assert found.num_classes == found["label"].null == ours
    assert match(DiT(num_classes=0), LABELS).num_classes == 0


def test_optional_signals_may_be_missing():
    unmasked = {name: TEXT[name] for name in ("text", "pooled")}
    assert list(match(PROMPTED, unmasked)) == ["text", "pooled"]  # a mask of any length: nothing to assume
    assert list(match(PROMPTED.clone(step_embed="zero"), unmasked)) == ["text", "pooled", "step"]
    sized = PixArt(text_dim=6, size_embed=True)
    assert list(match(sized, TEXT)) == ["text", "text_mask", "original_size", "aspect_ratio"]
    assert match(LatentUNet(text_dim=6, sizes=6), TEXT)["sizes"].shape == (6,)


@pytest.mark.parametrize(
    ("model", "available", "message"),
    [
        (DiT(num_classes=5), LABELS, r"DiT.*num_classes=5, the data.*10 classes"),
        (DiT(num_classes=5), {}, r"DiT.*num_classes=5, the data.*model.fields.num_classes=0"),
        (PROMPTED, LABELS, r"MMDiT.*'text'.*the data.*label.*caption_text"),
        (PROMPTED, {"text": TEXT["text"]}, r"MMDiT.*'pooled'.*the data.*text"),
        (PROMPTED.clone(text_dim=7), TEXT, r"MMDiT.*'text'.*\[b, any, 7\].*the data.*\[b, 5, 6\]"),
        (PROMPTED.clone(pooled_dim=4), TEXT, r"'pooled'.*\[b, 4\].*\[b, 3\]"),
        (PROMPTED, {**TEXT, "text": Signal((6,))}, r"'text'.*\[b, any, 6\].*\[b, 6\]"),
        (DiT(num_classes=10, control=CONTROLLED), LABELS, r"'crop'.*data.options.control.*model.fields.control.keys"),
        (Toy(depth=Signal((4, 4))), LABELS, r"Toy.*'depth'.*the data.*label"),
        (Toy(depth=Signal((4, 4))), {}, r"'depth'.*no signals"),
    ],
)
def test_pairs_that_do_not_match_are_refused(model, available, message):
    with pytest.raises(ValueError, match=message):
        match(model, available)


def test_signals_of_a_kind_of_ones_own_are_matched_by_name():
    depth = Signal((4, 4), "float32", 0.0, "geometry")
    found = match(Toy(depth=Signal((None, 4), null=0.0, group="geometry")), {"depth": depth, **LABELS})
    assert list(found) == ["depth"] and found["depth"].shape == (4, 4) and found["depth"].group == "geometry"
    assert found.null("geometry") == {"depth": 0.0} and found.null(SEMANTIC) is None


@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_every_network_declares_what_it_takes(name):
    model = models.MODELS[name]()
    for signal in model.signals().values():
        assert isinstance(signal, Signal)
    assert all(None not in signal.shape for signal in Conditions.of_model(model).values())
    assert set(Conditions.of_model(model)) <= set(model.signals())


def test_real_data_match_real_networks():
    digits = data.load("digits")
    assert Conditions.match(UNet(num_classes=10), digits.signals, digits.name).num_classes == 10
    shapes = data.load("shapes", count=4, size=8, caption_text=(12, 16), control=("crop",))
    found = Conditions.match(MMDiT(text_dim=16, pooled_dim=0), shapes.signals, shapes.name)
    assert set(found) == {"text", "text_mask"}
    with pytest.raises(ValueError, match=r"MLP.*num_classes=3, digits"):
        Conditions.match(MLP(num_classes=3), digits.signals, digits.name)


# ------------------------------------------------------------------------------------------ values


def test_the_condition_of_a_batch_has_what_the_batch_has():
    found = match(PROMPTED.clone(step_embed="zero"), TEXT)
    batch = {"image": 0, "text": 1, "pooled": 2, "label": 3}
    assert found.of(batch) == {"text": 1, "pooled": 2}
    assert found.of({"image": 0}) is None and Conditions().of(batch) is None


def test_examples_have_the_shapes_that_initialisation_needs():
    found = match(PROMPTED.clone(depth=1, width=8, heads=2, step_embed="zero", control=CONTROLLED), {**TEXT, **SIZES})
    example = found.example(3)
    assert {name: (value.shape, str(value.dtype)) for name, value in example.items()} == {
        "text": ((3, 5, 6), "float32"),
        "text_mask": ((3, 5), "bool"),
        "pooled": ((3, 3), "float32"),
        "crop": ((3, 2), "float32"),
        "original_size": ((3, 2), "float32"),
        "step": ((3,), "float32"),
    }
    model = PROMPTED.clone(depth=1, width=8, heads=2, step_embed="zero", control=CONTROLLED)
    jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((3, 4, 4, 4)), jnp.ones(3), example))
    assert match(DiT(num_classes=10), LABELS).example(2)["label"].dtype == jnp.int32
    assert Conditions().example(2) is None


def test_null_values_are_given_by_group():
    model = DiT(num_classes=10, control=CONTROLLED, step_embed="zero")
    found = match(model, {**LABELS, **SIZES})
    assert found.null(SEMANTIC) == {"label": 10}
    assert found.null(CONTROL) == {"crop": -1.0, "original_size": -1.0}
    assert found.null(SEMANTIC, CONTROL) == {"label": 10, "crop": -1.0, "original_size": -1.0}
    assert found.null(METHOD) is None and found.null() is None
    assert found.has(SEMANTIC) and found.has(CONTROL) and not found.has(METHOD)
    sized = match(PixArt(text_dim=6, size_embed=True), TEXT)
    assert sized.null(CONTROL) is None and not sized.has(CONTROL)  # sizes are never dropped


# ------------------------------------------------------------------------------------------ dropout

COUNT = 4000


@pytest.fixture(scope="module")
def dropped():
    """Text and control of many examples, each group dropped at a rate of its own: (which are gone, by name)."""
    found = match(PROMPTED.clone(control=CONTROLLED), {**TEXT, **SIZES})
    rng = np.random.default_rng(0)
    cond = {
        "text": rng.normal(size=(COUNT, 5, 6)).astype(np.float32),
        "text_mask": np.ones((COUNT, 5), bool),
        "pooled": rng.normal(size=(COUNT, 3)).astype(np.float32),
        "crop": np.ones((COUNT, 2), np.float32),
        "original_size": np.full((COUNT, 2), 8.0, np.float32),
        "step": np.ones(COUNT, np.float32),
    }
    out = found.dropout(jax.random.key(0), cond, {SEMANTIC: 0.3, CONTROL: 0.2})
    gone = {}
    for name, value in out.items():
        axes = tuple(range(1, np.ndim(value)))
        null = found[name].null if name in found else np.nan
        gone[name] = np.asarray(value == jnp.asarray(null, value.dtype)).all(axes)
        kept = np.asarray(value == cond[name]).all(axes)
        assert (gone[name] ^ kept).all(), name  # an example is dropped whole or left alone
        assert value.dtype == cond[name].dtype
    return gone


def test_each_group_is_dropped_at_its_rate(dropped):
    spread = lambda rate: 4 * np.sqrt(rate * (1 - rate) / COUNT)  # noqa: E731
    assert abs(dropped["text"].mean() - 0.3) < spread(0.3)
    assert abs(dropped["crop"].mean() - 0.2) < spread(0.2)
    assert not dropped["step"].any()


def test_signals_of_a_group_are_dropped_together(dropped):
    for name in ("text_mask", "pooled"):
        np.testing.assert_array_equal(dropped[name], dropped["text"])
    np.testing.assert_array_equal(dropped["original_size"], dropped["crop"])


def test_groups_are_dropped_apart(dropped):
    both = (dropped["text"] & dropped["crop"]).mean()
    assert abs(both - 0.3 * 0.2) < 4 * np.sqrt(0.06 * 0.94 / COUNT)


def test_nothing_is_dropped_without_a_rate_or_a_null_value():
    labelled, sized = match(DiT(num_classes=10), LABELS), match(PixArt(text_dim=6, size_embed=True), TEXT)
    label = {"label": jnp.arange(5) % 10}
    np.testing.assert_array_equal(labelled.dropout(jax.random.key(0), label, {SEMANTIC: 0.0})["label"], label["label"])
    np.testing.assert_array_equal(labelled.dropout(jax.random.key(0), label, {CONTROL: 0.9})["label"], label["label"])
    sizes = {"original_size": jnp.ones((5, 2)), "aspect_ratio": jnp.ones((5, 1))}
    after = sized.dropout(jax.random.key(0), sizes, {CONTROL: 0.9, SEMANTIC: 0.9})
    jax.tree.map(np.testing.assert_array_equal, after, sizes)


def test_a_group_of_ones_own_has_a_stream_of_its_own():
    found = Conditions({"a": Signal((), null=-1.0), "b": Signal((), null=-1.0, group="b")})
    ones = {"a": jnp.ones(COUNT), "b": jnp.ones(COUNT)}
    out = found.dropout(jax.random.key(0), ones, {SEMANTIC: 0.5, "b": 0.5})
    a, b = (np.asarray(out[name]) < 0 for name in "ab")
    assert abs((a & b).mean() - 0.25) < 4 * np.sqrt(0.25 * 0.75 / COUNT)
    again = found.dropout(jax.random.key(0), ones, {"b": 0.5})
    np.testing.assert_array_equal(np.asarray(again["b"]) < 0, b)  # whatever else is dropped
    np.testing.assert_array_equal(again["a"], ones["a"])
