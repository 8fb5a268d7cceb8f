"""Programs compiled ahead of time for a TPU topology, with the TPU's compiler and no TPU."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdiff.noise import assign

pytest.importorskip("libtpu", reason="the TPU's compiler is not installed on this platform")


@pytest.fixture(scope="module")
def mesh(tpu_compiler):
    return Mesh(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices, ("data",))


@pytest.mark.parametrize(("groups", "gathers"), [(1, 1), (4, 0)], ids=["global", "per device"])
def test_noise_is_assigned_over_four_chips_with_one_gather_or_none(mesh, groups, gathers):
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((64, 8, 8, 3), jnp.float32, sharding=sharding)

    def draw(x0, key):
        return assign(x0, jax.random.normal(key, x0.shape), groups=groups, sharding=sharding)

    key = jax.eval_shape(partial(jax.random.key, 0))
    text = jax.jit(draw, out_shardings=sharding).lower(x, key).compile().as_text()
    found = re.findall(r"= (\S+) all-gather(?:-start)?\(", text)
    assert len(found) == gathers and all("64,64" in shape for shape in found), found
    assert not re.search(r"(all-to-all|collective-permute)(-start)?\(|all-reduce(-start)?\([^)]*\), .*f32\[64,8", text)
