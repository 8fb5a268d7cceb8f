"""`convolution.loop_conv` against XLA's own convolution: values, gradients, transformations, platforms."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdiff import models
from jaxdiff.models import UNet, convolution

LAYOUT = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
SAME = ((1, 1), (1, 1))
SHAPES = {
    "1x1": ((1, 1), ((0, 0), (0, 0))),
    "3x3": ((3, 3), SAME),
    "3x3_valid": ((3, 3), ((0, 0), (0, 0))),
    "asymmetric": ((3, 3), ((0, 1), (2, 0))),
    "oblong": ((1, 3), ((0, 0), (1, 1))),
    "more_room_than_kernel": ((3, 3), ((3, 0), (0, 4))),
    "even": ((2, 4), ((0, 1), (1, 2))),
}


def arrays(size=(3, 3), batch=2, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(batch, 6, 5, 3)), rng.normal(size=(*size, 3, 4))
    return jnp.asarray(x, dtype), jnp.asarray(kernel, dtype)


def reference(x, kernel, padding=SAME):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), padding, **LAYOUT)


def ours(x, kernel, padding=SAME):
    return convolution.loop_conv(x, kernel, (1, 1), padding, **LAYOUT)


def loss(conv, padding=SAME):
    """Its gradient with respect to the output differs everywhere."""
    return lambda x, kernel: jnp.sin(conv(x, kernel, padding)).sum()


def close(found, wanted):
    """Sums of at most 2 * 6 * 5 * 9 products of size 1: float32 rounding stays below 1e-5 of the largest."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and jnp.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients(name):
    size, padding = SHAPES[name]
    x, kernel = arrays(size)
    np.testing.assert_array_equal(ours(x, kernel, padding), reference(x, kernel, padding))
    gradients = [jax.jit(jax.grad(loss(conv, padding), (0, 1)))(x, kernel) for conv in (ours, reference)]
    close(*gradients)


def through_vmap(conv, x, kernel):
    xs, kernels = jnp.stack([x, x + 1, -x]), jnp.stack([kernel, -kernel, 2 * kernel])
    return jax.vmap(jax.grad(loss(conv), (0, 1)))(xs, kernels), jax.vmap(jax.grad(loss(conv)), (0, None))(xs, kernel)


def through_scan(conv, x, kernel):
    """The gradient inside the loop, and of the loop."""

    def step(carry, scale):
        return carry - 0.01 * jax.grad(loss(conv), 1)(scale * x, carry), None

    def walk(x, kernel):
        return loss(conv)(jax.lax.scan(lambda h, k: (h + conv(h, k)[..., :3], None), x, kernel[None] * 0.1)[0], kernel)

    return jax.lax.scan(step, kernel, jnp.array([1.0, 0.5, 2.0]))[0], jax.grad(walk, (0, 1))(x, kernel)


def through_cond(conv, x, kernel):
    def take(way):
        return jax.lax.cond(way, jax.grad(loss(conv), (0, 1)), lambda x, kernel: (x, kernel), x, kernel)

    def branch(x, kernel, way):
        return jax.lax.cond(way, lambda: loss(conv)(x, kernel), lambda: x.sum())

    return take(x[0, 0, 0, 0] > -9), jax.grad(branch, (0, 1))(x, kernel, x[0, 0, 0, 0] > -9)


def through_checkpoint(conv, x, kernel):
    return jax.grad(jax.checkpoint(loss(conv)), (0, 1))(x, kernel)


def through_a_second_gradient(conv, x, kernel):
    def norm(x, kernel):
        return sum(jnp.square(g).sum() for g in jax.grad(loss(conv), (0, 1))(x, kernel))

    return jax.grad(norm, (0, 1))(x, kernel)


@pytest.mark.parametrize(
    "way", [through_vmap, through_scan, through_cond, through_checkpoint, through_a_second_gradient]
)
def test_transformations(way):
    close(*(jax.jit(lambda x, k, conv=conv: way(conv, x, k))(*arrays()) for conv in (ours, reference)))


def test_a_batch_split_over_eight_devices():
    x, kernel = arrays(batch=8)
    wanted = jax.grad(loss(reference), (0, 1))(x, kernel)
    mesh = Mesh(jax.devices(), ("data",))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    run = jax.jit(jax.grad(loss(ours), (0, 1)), out_shardings=(split, whole))
    found = run(jax.device_put(x, split), jax.device_put(kernel, whole))
    assert {shard.data.shape for shard in found[0].addressable_shards} == {(1, 6, 5, 3)}
    close(found, wanted)


def test_bfloat16():
    """8 bits of mantissa in, sums in float32 or not: within 2% of the largest float32 gradient."""
    with jax.numpy_dtype_promotion("standard"):
        found = jax.jit(jax.grad(loss(ours), (0, 1)))(*arrays(dtype=jnp.bfloat16))
    rounded = [a.astype(jnp.float32) for a in arrays(dtype=jnp.bfloat16)]
    for a, b in zip(found, jax.grad(loss(reference), (0, 1))(*rounded), strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0, atol=0.02 * float(jnp.abs(b).max()))


@pytest.mark.parametrize(
    ("strides", "options"),
    [
        ((2, 2), {}),
        ((1, 2), {}),
        ((1, 1), {"rhs_dilation": (2, 1)}),
        ((1, 1), {"lhs_dilation": (2, 2)}),
        ((1, 1), {"feature_group_count": 3}),
    ],
)
def test_other_convolutions_are_passed_on(strides, options):
    """Unchanged to the bit, and forward mode is XLA's own."""
    x, kernel = arrays()
    kernel = kernel[:, :, :1].repeat(3, 3)[..., :6] if "feature_group_count" in options else kernel
    convs = [partial(conv, **LAYOUT, **options) for conv in (convolution.loop_conv, jax.lax.conv_general_dilated)]
    both = [jax.jvp(lambda x, k, conv=conv: conv(x, k, strides, SAME), (x, kernel), (x, kernel)) for conv in convs]
    for a, b in zip(*both, strict=True):
        np.testing.assert_array_equal(a, b)


def test_forward_mode_is_refused():
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(ours, arrays(), arrays())


@pytest.mark.parametrize(("platform", "ordered"), [("cpu", 3), ("tpu", 1), ("cuda", 1)])
def test_which_platform_gets_which_gradient(platform, ordered):
    """Convolutions for the value and each gradient; on CPU all in the order of the value, elsewhere as XLA has them."""
    program = jax.jit(jax.value_and_grad(loss(ours), (0, 1)))
    text = jax.export.export(program, platforms=[platform])(*arrays()).mlir_module()
    assert text.count("stablehlo.convolution") == 3
    assert text.count("dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]") == ordered


def test_a_unet_has_the_same_gradients_either_way():
    model = UNet(resolution=4, width=8, channel_mult=(1,), blocks=1, attention=())
    x = jax.random.normal(jax.random.key(0), (2, 4, 4, 3))
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), x, jnp.ones(2)))["params"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: jnp.asarray(0.2 * rng.normal(size=s.shape), jnp.float32), shapes)

    def slopes(loop):
        network = model.clone(loop=loop)
        mean = lambda p: jnp.square(models.bind(network, p)(x, jnp.ones(2)) - x).mean()  # noqa: E731
        return jax.jit(jax.value_and_grad(mean))(params)

    (value, found), (wanted_value, wanted) = slopes(True), slopes(False)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-6)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * largest, err_msg=jax.tree_util.keystr(path))
