"""Checksums: against their definition in Python integers, over parts, over devices."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdiff import checksums
from jaxdiff.training.verify import state_digest

DTYPES = (np.float32, np.float16, np.int8, np.uint32, np.float64, bool)
SHAPES = ((), (1,), (0, 3), (5,), (3, 4, 5), (70_001,), (3, 70_000))


def by_definition(array):
    """S and T as the module states them, with Python's unbounded integers."""
    bits = [int.from_bytes(element.tobytes(), "little") for element in np.asarray(array).reshape(-1)]
    return [sum(bits) % 2**64, sum(b * (2 * i + 1) for i, b in enumerate(bits)) % 2**64]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES[:1] + DTYPES[4:5])
def test_sums_by_definition(shape, dtype):
    array = np.asarray(np.random.default_rng(0).normal(size=shape)).astype(dtype)
    assert checksums.sums(array).tolist() == by_definition(array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_every_dtype(dtype):
    array = np.random.default_rng(1).integers(0, 100, (4, 3)).astype(dtype)
    assert checksums.sums(array).tolist() == by_definition(array)


@pytest.mark.parametrize("part", list(itertools.product((3, 6), (2, 8), (5, 10))))
def test_sums_of_parts_add_up(part):
    array = np.random.default_rng(2).normal(size=(6, 8, 10)).astype(np.float32)
    starts = itertools.product(*(range(0, n, step) for n, step in zip(array.shape, part, strict=True)))
    found = []
    for start in starts:
        where = tuple(slice(a, a + n) for a, n in zip(start, part, strict=True))
        found.append(checksums.sums(array[where], array.shape, start))
    np.testing.assert_array_equal(checksums.add(np.stack(found)), checksums.sums(array))


def test_every_flipped_bit_and_every_swap_shows():
    array = np.random.default_rng(3).normal(size=(4, 5)).astype(np.float32)
    known = checksums.sums(array).tolist()
    for byte, bit in itertools.product(range(array.nbytes), range(8)):
        changed = array.copy()
        changed.view(np.uint8).reshape(-1)[byte] ^= 1 << bit
        assert checksums.sums(changed).tolist() != known
    for i, j in itertools.combinations(range(array.size), 2):
        changed = array.copy()
        changed.flat[[i, j]] = changed.flat[[j, i]]
        assert checksums.sums(changed).tolist() != known
        signs = array.copy()
        signs.flat[[i, j]] *= -1  # two bits of the highest order
        assert checksums.sums(signs).tolist() != known


def test_a_digest_covers_names_dtypes_shapes_and_fields():
    one = np.arange(6, dtype=np.float32)
    known = checksums.digest_of({"a": one, "b": one + 1}, {"step": "3"})
    assert known == checksums.digest_of({"b": one + 1, "a": one}, {"step": "3"})
    for arrays, fields in (
        ({"a": one, "c": one + 1}, {"step": "3"}),
        ({"a": one + 1, "b": one}, {"step": "3"}),
        ({"a": one.reshape(2, 3), "b": one + 1}, {"step": "3"}),
        ({"a": one.view(np.int32), "b": one + 1}, {"step": "3"}),
        ({"a": one, "b": one + 1}, {"step": "4"}),
        ({"a": one, "b": one + 1}, {}),
    ):
        assert checksums.digest_of(arrays, fields) != known


def test_a_state_has_one_digest_on_any_mesh():
    rng = np.random.default_rng(4)
    arrays = {"kernel": rng.normal(size=(8, 16)).astype(np.float32), "step": np.int32(7)}
    known = checksums.digest_of({name: np.asarray(a) for name, a in arrays.items()})
    for sizes in ((1, 1), (8, 1), (4, 2), (2, 4)):
        mesh = Mesh(np.array(jax.devices()[: sizes[0] * sizes[1]]).reshape(sizes), ("a", "b"))
        for spec in (("a", "b"), ("b", "a"), (None, "a"), (("a", "b"),), ()):
            shardings = {
                "kernel": NamedSharding(mesh, PartitionSpec(*spec)),
                "step": NamedSharding(mesh, PartitionSpec()),
            }
            assert state_digest(jax.device_put(arrays, shardings)) == known
