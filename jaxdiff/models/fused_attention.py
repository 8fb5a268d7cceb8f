"""Attention that never writes its weights to memory: the kernels that JAX ships for TPUs and NVIDIA GPUs.

    out = softmax(q k' / sqrt(d), keys hidden where mask is false) v

Both kernels take less than this and are given more: lengths are padded to whole blocks, and the mask of keys [b, m]
becomes segment ids (TPU) or a length per example, with the visible keys moved to the front (GPU). An example without a
visible key averages all values, as in the plain form: its queries are set to zero and its mask is dropped.
Neither kernel has forward mode.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxdiff import placement

LANES = 128  # of a TPU register: lengths are multiples of it
BLOCKS = (512, 384, 256)  # queries per step of the TPU kernel
MEMORY = 8 * 2**20  # bytes of a TPU core's own memory for keys, values and their gradients
SMALL = {"TPU v4": 3 * 2**20}

Queries = Float[Array, "b n h d"]
Keys = Float[Array, "b m h d"]


def splash(q: Queries, k: Keys, v: Keys, mask: Bool[Array, "b m"] | None = None, interpret: bool = False) -> Queries:
    """Splash attention, each device on its own examples and heads; `interpret` runs the kernel on any platform."""
    spec = placement.heads_spec()
    if spec is None:
        return _splash(q, k, v, mask, interpret)
    keys = None if mask is None else jax.sharding.PartitionSpec(spec[0])
    local = partial(_splash, interpret=interpret)
    return jax.shard_map(local, in_specs=(spec, spec, spec, keys), out_specs=spec, check_vma=False)(q, k, v, mask)


def _splash(q: Queries, k: Keys, v: Keys, mask: Array | None, interpret: bool) -> Array:
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels  # slow to import, and for TPUs alone

    q, mask = visible(q, mask)
    (n, block_q), (m, block_k) = blocks(q.shape[1]), blocks(k.shape[1])
    held = block_k * resident(m // block_k, block_k, q.shape[3], q.dtype.itemsize)
    sizes = kernels.BlockSizes(
        block_q=block_q,
        block_kv=held,
        block_kv_compute=block_k,
        block_q_dkv=block_q,
        block_kv_dkv=held,
        block_kv_dkv_compute=block_k,
        use_fused_bwd_kernel=True,
    )
    every = kernels.MultiHeadMask([kernels.FullMask((n, m))] * q.shape[2])
    kernel = kernels.make_splash_mha_single_device(every, block_sizes=sizes, interpret=interpret)
    scaled = q * np.asarray(q.shape[-1] ** -0.5, q.dtype)
    heads = [_padded(x, length).transpose(0, 2, 1, 3) for x, length in ((scaled, n), (k, m), (v, m))]
    ids = None
    if mask is not None or m > k.shape[1]:
        keys = jnp.ones(k.shape[:2], bool) if mask is None else mask
        ids = kernels.SegmentIds(jnp.ones((len(q), n), jnp.int32), _padded(keys, m).astype(jnp.int32))
    return jax.vmap(kernel)(*heads, ids).transpose(0, 2, 1, 3)[:, : q.shape[1]]


def resident(count: int, block: int, d: int, itemsize: int) -> int:
    """How many of `count` blocks of keys a TPU core holds at a time: the largest divisor that fits in MEMORY."""
    lanes = -(-d // LANES) * LANES
    each = block * lanes * (4 * itemsize + 2 * 4)  # k, v and their gradients, which are summed in float32
    most = SMALL.get(placement.device_kind(), MEMORY) // each
    return max(parts for parts in range(1, count + 1) if count % parts == 0 and parts <= max(most, 1))


def cudnn(q: Queries, k: Keys, v: Keys, mask: Bool[Array, "b m"] | None = None) -> Queries:
    """cuDNN's attention; the visible keys come first, in their order, and their number is the length.

    Gradients of odd lengths are refused, so those are padded by one.
    """
    q, mask = visible(q, mask)
    n, m = q.shape[1], k.shape[1]
    lengths = jnp.full(len(k), m, jnp.int32) if m % 2 else None
    if mask is not None:
        order = jnp.argsort(~mask, axis=1, stable=True)
        k, v, lengths = permuted(k, order), permuted(v, order), mask.sum(1, dtype=jnp.int32)
    q, k, v = _padded(q, n + n % 2), _padded(k, m + m % 2), _padded(v, m + m % 2)
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, implementation="cudnn")[:, :n]


def visible(q: Queries, mask: Bool[Array, "b m"] | None) -> tuple[Queries, Bool[Array, "b m"] | None]:
    """Queries and mask of which every example has a visible key; zero queries attend to all keys alike."""
    if mask is None:
        return q, None
    some = mask.any(1, keepdims=True)
    return jnp.where(some[:, :, None, None], q, 0), mask | ~some


def blocks(length: int) -> tuple[int, int]:
    """The padded length, and the block that divides it: the least padding, then the largest block."""
    if length <= BLOCKS[0]:
        short = -(-length // LANES) * LANES
        return short, short
    found = [(-(-length // block) * block, block) for block in BLOCKS]
    return min(found, key=lambda one: (one[0], -one[1]))


@jax.custom_vjp
def permuted(x: Keys, order: Int[Array, "b m"]) -> Keys:
    """x in the order of a permutation; its gradient is gathered by the inverse one, not scattered."""
    return jnp.take_along_axis(x, order[:, :, None, None], axis=1)


def _permuted_forward(x: Array, order: Array) -> tuple[Array, Array]:
    return permuted(x, order), order


def _permuted_backward(order: Array, gradient: Array) -> tuple[Array, None]:
    return permuted(gradient, jnp.argsort(order, axis=1)), None


permuted.defvjp(_permuted_forward, _permuted_backward)


def _padded(x: Array, length: int) -> Array:
    """x [b n ...] with zeros up to a length."""
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])
