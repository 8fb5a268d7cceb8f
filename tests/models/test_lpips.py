"""LPIPS against a PyTorch program with the same seeded weights, its gradient, and its public names."""

import ast
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdiff import weights
from jaxdiff.models.lpips import LPIPS, unit

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = np.load(FOLDER / "lpips.npz")
CASES = {name: ast.literal_eval(case) for name, case in zip(GOLDEN["names"].tolist(), GOLDEN["cases"], strict=True)}
seeded = runpy.run_path(str(FOLDER / "seeded.py"))
PLACES = {  # slice of the lpips package, place in torchvision's list, outputs, kernel
    "alex": [(1, 0, 64, 11), (2, 3, 192, 5), (3, 6, 384, 3), (4, 8, 256, 3), (5, 10, 256, 3)],
    "vgg": [(1, 0, 64, 3), (1, 2, 64, 3), (2, 5, 128, 3), (2, 7, 128, 3), (3, 10, 256, 3), (3, 12, 256, 3), (3, 14, 256, 3), (4, 17, 512, 3), (4, 19, 512, 3), (4, 21, 512, 3), (5, 24, 512, 3), (5, 26, 512, 3), (5, 28, 512, 3)],
}  # fmt: skip


def shapes(net):
    """Names and shapes of the lpips package's state dict."""
    out, inputs = {}, 3
    for part, place, outputs, kernel in PLACES[net]:
        out[f"net.slice{part}.{place}.weight"] = (outputs, inputs, kernel, kernel)
        out[f"net.slice{part}.{place}.bias"] = (outputs,)
        inputs = outputs
    widths = {part: outputs for part, _, outputs, _ in PLACES[net]}
    return out | {f"lin{part - 1}.model.1.weight": (1, width, 1, 1) for part, width in widths.items()}


def draw(net):
    """Seeded weights; those of the heads are not negative."""
    arrays = {name: seeded["draw"](name, shape) for name, shape in shapes(net).items()}
    return {name: np.abs(value) if name.startswith("lin") else value for name, value in arrays.items()}


@pytest.fixture(scope="module")
def arrays():
    return {net: draw(net) for net in PLACES}


@pytest.fixture(scope="module")
def alex(arrays):
    return weights.load(arrays["alex"], "lpips")[1]


@jax.jit
def distance(params, a, b):
    return LPIPS().apply({"params": params}, a, b)


@jax.jit
def gradient(params, a, b):
    return jax.grad(lambda *images: distance(params, *images).sum(), argnums=(0, 1))(a, b)


def pair(shape):
    return seeded["images"](1, shape), seeded["images"](2, shape)


def noisy(x, level):
    return x + level * np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)


@pytest.mark.parametrize("name", CASES)
def test_distances_agree_with_torch(arrays, name):
    net, pool, side, shape = CASES[name]
    model, params = weights.load(arrays[net], "lpips", pool=pool, resize=side)
    assert model == LPIPS(net, pool, side)
    ours = jax.jit(lambda params, a, b: model.apply({"params": params}, a, b))(params, *pair(shape))
    np.testing.assert_allclose(ours, GOLDEN[name], rtol=1e-5)


def test_gradient_agrees_with_torch(alex):
    a, b = (x / np.float32(127.5) - 1 for x in pair(CASES["alex"][3]))
    ours = gradient(alex, a, b)[0][:, ::6, ::6]
    assert np.abs(ours - GOLDEN["gradient"]).max() <= 1e-4 * np.abs(GOLDEN["gradient"]).max()


def test_a_distance_is_zero_for_equal_images_symmetric_and_positive(alex):
    a, b = (x / np.float32(127.5) - 1 for x in pair((2, 32, 32, 3)))
    assert (distance(alex, a, a) == 0).all()
    assert (distance(alex, a, b) > 0.01).all()
    np.testing.assert_allclose(distance(alex, a, b), distance(alex, b, a), rtol=1e-6)


def test_grey_and_8_bit_images_are_brought_to_one_form(alex):
    a, b = (x.repeat(3, -1) / np.float32(127.5) - 1 for x in pair((2, 32, 32, 1)))
    np.testing.assert_allclose(distance(alex, a, b), GOLDEN["alex_grey"], rtol=1e-5)
    mixed = distance(alex, pair((2, 32, 32, 1))[0], b)
    np.testing.assert_allclose(mixed, GOLDEN["alex_grey"], rtol=1e-5)


def test_gradients_are_finite_for_equal_and_for_black_images(alex):
    photo, black = noisy(np.zeros((1, 32, 32, 3), np.float32), 0.5), np.full((1, 32, 32, 3), -1, np.float32)
    a, b = np.concatenate([photo, black, photo]), np.concatenate([photo, black, black])
    kernels = {name: leaf for name, leaf in alex.items() if name.startswith("conv")}
    silent = alex | jax.tree.map(jnp.zeros_like, kernels)  # every feature is zero
    dark = alex | {name: {**leaf, "bias": 0 * leaf["bias"] - 100} for name, leaf in kernels.items()}  # below zero
    for params in (alex, silent, dark):
        for part in gradient(params, a, b):
            assert np.isfinite(part).all()
            assert (abs(part) > 1e-6).any((1, 2, 3)).tolist() == [False, False, params is alex]


def test_unit_vectors():
    x = jnp.array([[3.0, 4.0], [0.0, 0.0], [1e-10, 0.0], [1e-30, 0.0]])
    np.testing.assert_allclose(unit(x), [[0.6, 0.8], [0, 0], [0.5, 0], [0, 0]], rtol=1e-5, atol=1e-19)
    assert np.isfinite(jax.jacobian(unit)(x)).all()


def test_half_precision_runs_and_returns_float32(arrays):
    model, params = weights.load(arrays["alex"], "lpips", dtype=jnp.bfloat16)
    half = jax.jit(model.apply)({"params": params}, *pair(CASES["alex_grey"][3]))
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, GOLDEN["alex_grey"], rtol=0.03)


def run(a, b, **fields):
    return jax.eval_shape(LPIPS(**fields).init, jax.random.key(0), np.zeros(a, np.float32), np.zeros(b, np.float32))


@pytest.mark.parametrize(
    ("fields", "a", "b", "message"),
    [
        ({}, (1, 30, 40, 3), (1, 30, 40, 3), r"net='alex'.*31x31, got 30x40.*resize to 31"),
        ({"net": "vgg"}, (1, 8, 8, 1), (1, 8, 8, 1), r"net='vgg'.*16x16, got 8x8.*resize"),
        ({"resize": 24}, (1, 64, 64, 3), (1, 64, 64, 3), r"24x24.*resiz"),
        ({"resize": -1}, (1, 64, 64, 3), (1, 64, 64, 3), r"got -1"),
        ({}, (2, 32, 32, 3), (1, 32, 32, 3), r"\(2, 32, 32, 3\) and \(1, 32, 32, 3\)"),
        ({}, (1, 32, 32, 4), (1, 32, 32, 4), r"channels, got 4"),
        ({}, (32, 32, 3), (32, 32, 3), r"NHWC.*\(32, 32, 3\)"),
        ({"net": "vgg16"}, (1, 32, 32, 3), (1, 32, 32, 3), r"'vgg16'.*did you mean 'vgg'"),
        ({"pool": "mean"}, (1, 32, 32, 3), (1, 32, 32, 3), r"'mean'.*max, avg"),
    ],
)  # fmt: skip
def test_bad_input_says_what_to_do(fields, a, b, message):
    with pytest.raises(ValueError, match=message):
        run(a, b, **fields)


def test_the_smallest_images_pass():
    for net, side in {"alex": 31, "vgg": 16}.items():
        assert set(run((1, side, side, 3), (1, side, side, 3), net=net)["params"]) >= {"conv0", "lin4"}


# ------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("net", PLACES)
def test_round_trip_under_the_names_of_the_package(arrays, net, tmp_path):
    model, params = weights.load(arrays[net], "lpips", resize=64)
    saved = weights.save(model, params, "lpips", tmp_path / "lpips.safetensors")
    scaling = {"scaling_layer.shift": (1, 3, 1, 1), "scaling_layer.scale": (1, 3, 1, 1)}
    assert {name: value.shape for name, value in saved.items()} == {**shapes(net), **scaling}
    assert all((saved[name] == value).all() for name, value in arrays[net].items())
    again, same = weights.load(tmp_path / "lpips.safetensors", "lpips")
    assert again == LPIPS(net)
    jax.tree.map(np.testing.assert_array_equal, same, params)


@pytest.mark.parametrize("net", PLACES)
def test_three_sets_of_names_give_the_same_parameters(arrays, net):
    model, params = weights.load({**arrays[net], "lins.0.model.1.weight": arrays[net]["lin0.model.1.weight"]}, "lpips")
    vision = {
        f"features.{name.split('.', 2)[2]}" if name.startswith("net.") else name: value
        for name, value in arrays[net].items()
    }
    vision["classifier.6.bias"] = np.zeros(1000)
    flat = {f"lin{i}": arrays[net][f"lin{i}.model.1.weight"].ravel() for i in range(5)}
    for i, (part, place, *_) in enumerate(PLACES[net]):
        flat[f"conv{i}.kernel"] = arrays[net][f"net.slice{part}.{place}.weight"].transpose(2, 3, 1, 0)
        flat[f"conv{i}.bias"] = arrays[net][f"net.slice{part}.{place}.bias"]
    flat |= {"shift": np.float32([-0.030, -0.088, -0.188]), "scale": np.float32([0.458, 0.448, 0.450])}
    for other in (vision, flat):
        also, same = weights.load(other, "lpips")
        assert also == model == LPIPS(net)
        jax.tree.map(np.testing.assert_array_equal, same, params)


def blank(net):
    return {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes(net).items()}


def test_every_misfit_is_named():
    wrong = {**blank("vgg"), "lin2.model.1.weight": np.zeros((1, 7, 1, 1)), "lins.5.model.1.weight": np.zeros(1)}
    del wrong["net.slice3.14.bias"]
    with pytest.raises(weights.WeightsError) as error:
        weights.load(wrong, "lpips")
    for part in (
        "1 missing (net.slice3.14.bias)",
        "1 unexpected (lins.5.model.1.weight)",
        "lin2.model.1.weight is (1, 7, 1, 1), expected (1, 256, 1, 1)",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"x": np.zeros(1)}, r"'lpips'.*'net\.slice1\.0\.weight'.*\(x\)"),
        ({"lin0.model.1.weight": np.zeros((1, 64, 1, 1))}, r"without its network"),
        ({"features.0.weight": np.zeros((96, 3, 7, 7))}, r"\(96, 3, 7, 7\).*11x11.*AlexNet"),
        ({"conv0.kernel": np.zeros((11, 11, 3, 64))}, r"missing \(conv0.bias, "),
        ({**blank("alex"), "scaling_layer.scale": np.ones((1, 3, 1, 1))}, r"constants.*\(scaling_layer.scale\)"),
    ],
)  # fmt: skip
def test_bad_files_say_what_is_wrong(source, message):
    with pytest.raises(weights.WeightsError, match=message):
        weights.load(source, "lpips")


def test_distances_grow_with_noise_and_blur(alex):
    x = seeded["images"](3, (2, 32, 32, 3)) / np.float32(127.5) - 1
    levels = [distance(alex, x, noisy(x, level)) for level in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)]
    assert (levels[0] == 0).all() and (np.diff(levels, axis=0) > 0).all()
    rough = noisy(x, 0.3)
    blurred = [distance(alex, rough, sum(np.roll(rough, k, 2) for k in range(n)) / np.float32(n)) for n in (1, 2, 3, 5)]
    assert (np.diff(blurred, axis=0) > 0).all()
