"""Features on disk by image content: computed once, resumed, complete after a crash, the same as without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdiff.evaluation import FeatureCache, FeatureNet, extract, extract_cached

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (40, 4, 4, 3)).astype(np.uint8)


def network(seen, name="net", sha256="a", spatial=True):
    matrix = jnp.asarray(np.random.default_rng(1).normal(size=(48, 5)), jnp.float32)

    def apply(matrix, images):
        jax.debug.callback(lambda n: seen.append(int(n)), len(images))
        flat = images.reshape(len(images), -1).astype(jnp.float32)
        return {"features": flat @ matrix, **({"spatial": flat[:, :3]} if spatial else {})}

    return FeatureNet(name, sha256, "none", jax.tree_util.Partial(apply, matrix))


def test_each_image_passes_the_network_once_whatever_the_order(tmp_path):
    seen = []
    net = network(seen)
    plain = extract(net, [IMAGES], keep=True)
    seen.clear()
    first = extract_cached(
        FeatureCache(tmp_path, net, spatial=True), [IMAGES[:24], IMAGES[:8]], batch_size=8, keep=True
    )
    jax.effects_barrier()
    assert seen == [8, 8, 8]
    order = RNG.permutation(40)
    again = FeatureCache(tmp_path, net, spatial=True)  # as another process would open it
    got = extract_cached(again, [IMAGES[order]], batch_size=8, keep=True)
    jax.effects_barrier()
    assert seen == [8, 8, 8, 8, 8]  # 16 new images
    np.testing.assert_allclose(first.features, plain.features[[*range(24), *range(8)]], rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(got.features, plain.features[order], rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(got.moments.scatter, plain.moments.scatter, rtol=1e-5)
    np.testing.assert_allclose(got.spatial.scatter, plain.spatial.scatter, rtol=1e-5)
    assert extract_cached(FeatureCache(tmp_path, net), [IMAGES]).spatial is None


def test_other_weights_and_other_pixels_are_other_entries(tmp_path):
    seen = []
    extract_cached(FeatureCache(tmp_path, network(seen)), [IMAGES])
    extract_cached(FeatureCache(tmp_path, network(seen, sha256="b")), [IMAGES])
    extract_cached(FeatureCache(tmp_path, network(seen)), [IMAGES.astype(np.float32) / 255])
    jax.effects_barrier()
    assert seen == [40, 40, 40]


def test_a_truncated_write_is_computed_again(tmp_path):
    seen = []
    cache = FeatureCache(tmp_path, network(seen))
    extract_cached(cache, [IMAGES])
    (path,) = cache.folder.glob("features/*.f32")
    path.write_bytes(path.read_bytes()[: 25 * 5 * 4 + 6])  # 25 rows and a part of one
    got = extract_cached(FeatureCache(tmp_path, network(seen)), [IMAGES], batch_size=5, keep=True)
    jax.effects_barrier()
    assert seen == [40, 5, 5, 5]
    np.testing.assert_allclose(got.features, extract(network([]), [IMAGES], keep=True).features, rtol=1e-5, atol=1e-3)


def test_errors_say_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="'net' has no spatial features"):
        extract_cached(FeatureCache(tmp_path, network([], spatial=False), spatial=True), [IMAGES])
    with pytest.raises(ValueError, match="empty"):
        extract_cached(FeatureCache(tmp_path, network([])), [])
