"""Fused attention against the plain form: kernels interpreted, their arguments, and where each is chosen."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxdiff import flops
from jaxdiff.models import attention, fused_attention
from jaxdiff.training.sharding import make_mesh


def arrays(n, m, d, dtype=jnp.float32, batch=2, heads=2):
    """Queries, keys, values, an output's gradient, and a mask: scattered keys, and in the last example none."""
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, g = (
        jax.random.normal(key, (batch, length, heads, d), dtype)
        for key, length in zip(keys, (n, m, m, n), strict=False)
    )
    mask = jax.random.bernoulli(keys[4], 0.6, (batch, m)).at[-1].set(False)
    return q, k, v, g, mask


def plain(q, k, v, mask):
    shown = None if mask is None else mask[:, None, None]
    return jax.nn.dot_product_attention(q, k, v, mask=shown, implementation="xla")


def all_of(function, q, k, v, g, mask):
    """The output and the gradients of q, k and v."""

    def run(q, k, v):
        out, back = jax.vjp(lambda *heads: function(*heads, mask), q, k, v)
        return out, *back(g)

    with jax.numpy_dtype_promotion("standard"):  # in the plain form of JAX
        return jax.jit(run)(q, k, v)


interpreted = partial(fused_attention.splash, interpret=True)


def assert_equal(found, wanted, tolerance):
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max())


@pytest.mark.parametrize(
    ("dtype", "masked", "tolerance"), [(jnp.float32, True, 1e-5), (jnp.bfloat16, False, 2e-2)], ids=["mask", "bfloat16"]
)
def test_splash_attention_is_the_plain_form(monkeypatch, dtype, masked, tolerance):
    """300 queries and 520 keys are padded to 384 and 768; the keys are held in three blocks."""
    monkeypatch.setattr(fused_attention, "MEMORY", 0)
    monkeypatch.setattr(fused_attention, "BLOCKS", (384, 256))
    q, k, v, g, mask = arrays(300, 520, 24, dtype)
    mask = mask if masked else None
    assert_equal(all_of(interpreted, q, k, v, g, mask), all_of(plain, q, k, v, g, mask), tolerance)


def test_devices_attend_to_their_own_part():
    mesh = make_mesh(2, 2, 2)
    q, k, v, g, mask = arrays(40, 40, 8, batch=4)
    place = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    q, k, v, g, mask = jax.device_put((q, k, v, g, mask), place)

    def meshed(q, k, v, mask):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return interpreted(q, k, v, mask)

    assert_equal(all_of(meshed, q, k, v, g, mask), all_of(plain, q, k, v, g, mask), 1e-5)


@pytest.mark.parametrize(("n", "m", "masked"), [(5, 7, True), (5, 7, False), (6, 8, True), (6, 8, False)])
def test_keys_are_given_to_cudnn_as_a_length(monkeypatch, n, m, masked):
    original = jax.nn.dot_product_attention

    def stand_in(q, k, v, *, implementation, **given):
        assert implementation == "cudnn" and "mask" not in given and q.shape[1] % 2 == k.shape[1] % 2 == 0
        return original(q, k, v, implementation="xla", **given)

    q, k, v, g, mask = arrays(n, m, 8)
    mask = mask if masked else None
    wanted = all_of(plain, q, k, v, g, mask)
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    assert_equal(all_of(fused_attention.cudnn, q, k, v, g, mask), wanted, 1e-5)


def test_the_padding_is_least_and_the_block_large():
    lengths = {64: (128, 128), 256: (256, 256), 300: (384, 384), 1024: (1024, 512), 1101: (1152, 384)}
    assert {length: fused_attention.blocks(length) for length in lengths} == lengths
    for length in range(1, 5000, 37):
        padded, block = fused_attention.blocks(length)
        assert padded % block == 0 and block % fused_attention.LANES == 0 and 0 <= padded - length < 256


def test_as_many_keys_are_held_as_fit():
    assert fused_attention.resident(8, 512, 72, 2) == 8  # 4,096 keys in bfloat16: 8 MiB
    assert fused_attention.resident(9, 512, 128, 2) == 3  # 4,608 keys: all nine blocks do not fit beside a batch
    assert fused_attention.resident(8, 512, 72, 4) == 4  # float32: 12 MiB
    assert fused_attention.resident(8, 512, 160, 2) == 4
    assert fused_attention.resident(11, 512, 128, 2) == 1  # 11 is prime


def test_work_of_the_kernel_is_counted():
    q, k, v, g, _ = arrays(512, 512, 64)
    product = 2 * 2 * 2 * 512 * 512 * 64  # one matrix product of two examples with two heads
    forward = jax.make_jaxpr(lambda *a: fused_attention.splash(*a))(q, k, v)
    assert flops.total(forward.jaxpr) == 2 * product
    both = jax.make_jaxpr(lambda *a: jax.vjp(fused_attention.splash, *a)[1](g))(q, k, v)
    assert 7 * product <= flops.total(both.jaxpr) < 7.1 * product


@pytest.fixture
def promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


WIDE, LONG = (4, 1101, 16, 72), 1101


@pytest.mark.parametrize(
    ("platform", "dtype", "shape", "keys", "simple", "kernel"),
    [
        ("cuda", jnp.bfloat16, WIDE, LONG, True, "cudnn"),
        ("cuda", jnp.bfloat16, (4, 5, 2, 8), 3, True, "cudnn"),
        ("cuda", jnp.float32, WIDE, LONG, True, "xla"),
        ("cuda", jnp.bfloat16, (4, 64, 2, 20), 64, True, "xla"),
        ("cuda", jnp.bfloat16, (4, 64, 2, 256), 64, True, "xla"),
        ("cuda", jnp.bfloat16, WIDE, LONG, False, "xla"),
        ("tpu", jnp.bfloat16, WIDE, LONG, True, "splash"),
        ("tpu", jnp.float32, WIDE, LONG, True, "splash"),
        ("tpu", jnp.float16, WIDE, LONG, True, "xla"),
        ("tpu", jnp.bfloat16, WIDE, 77, True, "xla"),
        ("tpu", jnp.bfloat16, WIDE, LONG, False, "xla"),
        ("tpu", jnp.bfloat16, (3, *WIDE[1:]), LONG, True, "xla"),  # 4 ways do not divide 3 examples
        ("rocm", jnp.bfloat16, WIDE, LONG, True, "xla"),
        ("cpu", jnp.float32, WIDE, LONG, True, "xla"),
    ],
)
def test_the_platform_and_the_arguments_choose_the_kernel(platform, dtype, shape, keys, simple, kernel):
    with jax.sharding.use_abstract_mesh(make_mesh(2, 2, 2).abstract_mesh):
        assert attention.fused(platform, dtype, shape, keys, simple) == kernel
        with attention.forward_mode():
            assert attention.fused(platform, dtype, shape, keys, simple) == "xla"


def test_without_a_mesh_several_devices_take_the_plain_form():
    assert jax.device_count() > 1
    assert attention.fused("tpu", jnp.bfloat16, WIDE, LONG, True) == "xla"


@pytest.mark.usefixtures("promotion")
def test_attention_asks_for_the_kernel_of_its_platform(monkeypatch):
    """A mask of keys goes to the kernel, any other to the plain form."""
    q, k, v, _, mask = arrays(6, 6, 8, jnp.bfloat16)
    asked = []

    def stand_in(q, k, v, mask):
        asked.append(None if mask is None else mask.shape)
        return plain(q, k, v, mask)

    monkeypatch.setattr(fused_attention, "cudnn", stand_in)
    here = attention.attend(q, k, v, mask=mask[:, None, None])
    monkeypatch.setattr(attention.placement, "platform", lambda: "cuda")
    there = attention.attend(q, k, v, mask=mask[:, None, None])
    attention.attend(q, k, v)
    attention.attend(q, k, v, mask=jnp.ones((2, 1, 6, 6), bool))
    assert asked == [mask.shape, None]
    np.testing.assert_array_equal(here, there)


@pytest.mark.usefixtures("promotion")
def test_forward_mode_takes_the_plain_form_by_name(monkeypatch):
    monkeypatch.setattr(attention.placement, "platform", lambda: "tpu")
    monkeypatch.setattr(attention.placement, "divides", lambda shape: True)
    monkeypatch.setattr(attention, "MIN_TOKENS", 1)
    monkeypatch.setattr(fused_attention, "splash", interpreted)
    q, k, v, g, _ = arrays(8, 8, 8)

    def tangent(q, g):
        return jax.jvp(lambda q: attention.attend(q, k, v), (q,), (g,))[1]

    with attention.forward_mode():
        found = tangent(q, g)
    step = 1e-2
    wanted = (plain(q + step * g, k, v, None) - plain(q - step * g, k, v, None)) / (2 * step)
    np.testing.assert_allclose(found, wanted, atol=5e-4)
    with pytest.raises(TypeError, match="forward-mode"):
        tangent(q, g)


@pytest.mark.parametrize("masked", [False, True])
def test_blocks_of_queries_are_the_plain_form(masked):
    """On CPU, where a head has many weights: values, gradients and forward mode."""
    n, m = 256, 4096
    q, k, v = (jax.random.normal(jax.random.key(i), (1, size, 2, 8)) for i, size in enumerate((n, m, m)))
    mask = jnp.arange(m)[None, None, None] < 3000 if masked else None
    assert attention.fused("cpu", q.dtype, q.shape, m, True) == "blocks"
    assert attention.fused("cpu", q.dtype, (1, 255, 2, 8), 2 * m, True) == "xla"

    def plain(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="xla")

    def ours(q, k, v):
        return attention.attend(q, k, v, mask=mask)

    made, pull = jax.vjp(ours, q, k, v)
    wanted, pull_plain = jax.vjp(plain, q, k, v)
    np.testing.assert_allclose(made, wanted, atol=1e-6)
    for one, other in zip(pull(q), pull_plain(q), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    np.testing.assert_allclose(
        jax.jvp(ours, (q, k, v), (q, k, v))[1], jax.jvp(plain, (q, k, v), (q, k, v))[1], atol=1e-5
    )
    program = jax.jit(ours).lower(q, k, v).compile()
    assert (
        program.memory_analysis().temp_size_in_bytes
        < 0.7 * jax.jit(plain).lower(q, k, v).compile().memory_analysis().temp_size_in_bytes
    )
