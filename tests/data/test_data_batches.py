"""The batch of a step is a pure function of (seed, step): order, epochs, processes, resumption, corrupt files."""

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from image_makers import joined, make_folder, random_image, same

from jaxdiff import data
from jaxdiff.conditions import CONTROLS
from jaxdiff.data.order import order, random_flips

ALL_CONTROL = tuple(CONTROLS)


def numbered(size: int, **options) -> data.Dataset:
    """In memory; label i is example i."""
    images = np.stack([random_image(i, 4, 6, 1) for i in range(size)])
    return data.load("arrays", images=images, labels=np.arange(size), **options)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("photos"), [f"{'ab'[i % 2]}/{i:02}.png" for i in range(11)])


def by_kind(kind: str, photos, seed: int = 0) -> data.Dataset:
    if kind == "memory":
        return numbered(11, flip=True, control=ALL_CONTROL, seed=seed)
    return data.load("folder", path=photos, image_size=8, crop="mixed", flip=True, control=ALL_CONTROL, seed=seed)


# ---------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_each_epoch_is_a_permutation_whatever_the_batch_size(size):
    dataset = numbered(size)
    labels = np.concatenate([dataset.batch(step, 3)["label"] for step in range(size * 2)])
    for epoch in labels[: 5 * size].reshape(-1, size):
        assert sorted(epoch) == list(range(size))


def test_batch_larger_than_the_set_wraps_epochs():
    dataset = numbered(5)
    labels = dataset.batch(0, 15)["label"].reshape(3, 5)
    assert [sorted(epoch) for epoch in labels.tolist()] == [list(range(5))] * 3
    assert np.array_equal(labels.ravel(), joined([dataset.batch(step, 5) for step in range(3)])["label"])


def test_epochs_and_seeds_shuffle_differently_and_evenly():
    epochs = order(6, seed=3)(np.arange(6 * 600)).reshape(600, 6)
    assert (epochs != np.arange(6)).any(axis=1).mean() > 0.99  # 1/720 stay in place
    share = np.stack([(epochs == i).mean(axis=0) for i in range(6)])
    assert np.abs(share - 1 / 6).max() < 4 * np.sqrt(1 / 6 * 5 / 6 / 600)
    # epoch 1 of a seed must not be epoch 0 of the next one
    assert not np.array_equal(order(50, 3)(np.arange(50, 100)), order(50, 4)(np.arange(50)))


def test_order_is_pinned():
    """A stored value on purpose: another order after an upgrade would break the resumption of running jobs."""
    assert order(10, seed=0)(np.arange(12)).tolist() == PINNED
    assert order(10, seed=0, shuffle=False)(np.arange(8, 12)).tolist() == [8, 9, 0, 1]


PINNED = [6, 1, 0, 5, 3, 8, 7, 9, 2, 4, 7, 3]


def test_coins_are_fair_independent_and_fixed_by_position():
    flips = random_flips(0, np.arange(40_000))
    assert abs(flips.mean() - 0.5) < 0.01
    assert abs((flips[1:] == flips[:-1]).mean() - 0.5) < 0.01
    assert abs((flips == random_flips(1, np.arange(40_000))).mean() - 0.5) < 0.01
    assert np.array_equal(flips[123:456], random_flips(0, np.arange(123, 456)))


# ---------------------------------------------------------------------------------------------- purity


@pytest.mark.parametrize("kind", ["memory", "folder"])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_slices_of_processes_make_the_global_batch(kind, processes, photos):
    dataset = by_kind(kind, photos)
    for step in (0, 3):
        parts = [by_kind(kind, photos).batch(step, 8, p, processes) for p in range(processes)]
        assert all(len(part["label"]) == 8 // processes for part in parts)
        assert same(joined(parts), dataset.batch(step, 8))


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_resuming_at_any_step_continues_the_same_order(kind, photos):
    straight = [by_kind(kind, photos).batch(step, 4) for step in range(7)]
    for start in (6, 2, 5):  # fresh objects, out of order: nothing but the step matters
        resumed = by_kind(kind, photos)
        for step in range(start, 7):
            assert same(resumed.batch(step, 4), straight[step])


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_seed_changes_order_and_augmentation(kind, photos):
    one, other = by_kind(kind, photos, 0).batch(0, 22), by_kind(kind, photos, 1).batch(0, 22)
    assert not np.array_equal(one["label"], other["label"])
    assert not np.array_equal(one["flip"], other["flip"])


def test_an_example_is_augmented_anew_in_each_epoch(photos):
    dataset = data.load("folder", path=photos, image_size=8, crop="global", shuffle=False, control=("crop",))
    crops = np.stack([dataset.batch(epoch, 11)["crop"] for epoch in range(3)])
    assert not np.array_equal(crops[0], crops[1])
    assert not np.array_equal(crops[1], crops[2])


def test_threads_change_nothing(photos):
    dataset = by_kind("folder", photos)
    with ThreadPoolExecutor(4) as executor:
        assert same(dataset.batch(2, 8, executor=executor), dataset.batch(2, 8))


def test_both_ways_of_fetching_agree():
    """The same images whole from memory and one by one (a colour change forces that) in the same order."""
    images = np.stack([random_image(i, 5, 5, 1) for i in range(9)])
    labels = np.arange(9)
    gathered = data.load("arrays", images=images, labels=labels)
    single = data.load("arrays", images=images, labels=labels, channels=3)
    assert (gathered.in_memory, single.in_memory) == (True, False)
    one, other = gathered.batch(1, 6), single.batch(1, 6)
    assert np.array_equal(np.repeat(one["image"], 3, -1), other["image"])
    assert np.array_equal(one["label"], other["label"])


def test_batch_contract(photos):
    dataset = by_kind("folder", photos)
    batch = dataset.batch(0, 4)
    assert {key: (value.dtype, value.shape) for key, value in batch.items()} == {
        "image": (np.float32, (4, 8, 8, 3)),
        "label": (np.int32, (4,)),
        **{key: (np.float32, (4, width)) for key, width in CONTROLS.items()},
    }
    assert dataset.shape == (8, 8, 3)
    declared = {name: (signal.dtype, signal.shape) for name, signal in dataset.signals.items()}
    assert declared == {name: (str(value.dtype), value.shape[1:]) for name, value in batch.items() if name != "image"}
    assert batch["image"].min() >= -1
    assert batch["image"].max() <= 1


def test_taking_one_epoch_in_order_sees_every_example_once(photos):
    dataset = data.load("folder", path=photos, shuffle=False)
    batches = [dataset.take(start, min(start + 4, dataset.size)) for start in range(0, dataset.size, 4)]
    expected = np.stack([random_image(i) for i in [*range(0, 11, 2), *range(1, 11, 2)]]) / np.float32(127.5) - 1
    assert np.array_equal(joined(batches)["image"], expected)


# ---------------------------------------------------------------------------------------------- corrupt files


@pytest.fixture
def damaged(tmp_path):
    """Eight images, of which 3 is cut short and 5 is text."""
    make_folder(tmp_path, [f"{i}.png" for i in range(8)])
    (tmp_path / "3.png").write_bytes((tmp_path / "3.png").read_bytes()[:200])
    (tmp_path / "5.png").write_text("not an image")
    return tmp_path


def test_corrupt_files_are_replaced_counted_and_named_once(damaged):
    messages = []
    dataset = data.load("folder", path=damaged, flip=True, log=messages.append)
    clean = {random_image(i).tobytes(): i for i in range(8)}

    def numbers(batch):
        pixels = np.rint((batch["image"] + 1) * 127.5).astype(np.uint8)
        return [clean.get(p.tobytes(), clean.get(np.ascontiguousarray(p[:, ::-1]).tobytes())) for p in pixels]

    order_of = order(8, 0)
    for epoch in range(3):
        expected = order_of(np.arange(8) + 8 * epoch).tolist()
        seen = numbers(dataset.batch(epoch, 8))
        readable = [
            next(expected[(slot + k) % 8] for k in range(8) if expected[(slot + k) % 8] not in (3, 5))
            for slot in range(8)
        ]
        assert seen == readable
    assert set(dataset.corrupt) == {str(damaged / "3.png"), str(damaged / "5.png")}
    assert all(count >= 3 for count in dataset.corrupt.values())
    assert sorted(message.split(" ")[2] for message in messages) == sorted(dataset.corrupt)
    assert all("skipped" in message for message in messages)


def test_replacements_do_not_depend_on_processes_or_on_what_was_read_before(damaged):
    def fresh():
        return data.load(
            "folder",
            path=damaged,
            image_size=6,
            crop="global",
            flip=True,
            control=ALL_CONTROL,
            log=lambda message: None,
        )

    straight = [fresh().batch(step, 4) for step in range(6)]
    assert same(joined([fresh().batch(5, 4, p, 4) for p in range(4)]), straight[5])


def test_a_replacement_has_randomness_of_its_own(damaged):
    """The image that stands in for a corrupt one is not cut like the neighbour it was taken from."""
    dataset = data.load(
        "folder", path=damaged, image_size=4, crop="local", control=("crop",), shuffle=False, log=lambda message: None
    )
    crops = np.concatenate([dataset.batch(epoch, 8)["crop"][[3, 4]] for epoch in range(6)]).reshape(6, 2, 2)
    assert (crops[:, 0] != crops[:, 1]).any()


def test_skipping_logs_a_warning_by_default(damaged, caplog):
    with caplog.at_level(logging.WARNING, "jaxdiff.data"):
        data.load("folder", path=damaged).batch(0, 8)
    assert sum("5.png" in record.getMessage() for record in caplog.records) == 1


def test_stop_policy_names_the_file(damaged):
    dataset = data.load("folder", path=damaged, shuffle=False, on_corrupt="stop")
    dataset.batch(0, 3)
    with pytest.raises(data.CorruptImage, match=r"3\.png.*on_corrupt='skip'"):
        dataset.batch(1, 3)


def test_a_wholly_corrupt_set_is_an_error_not_a_loop(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.jpg").write_bytes(b"")
    with pytest.raises(data.CorruptImage, match=r"none of 3 examples .*0\.jpg"):
        data.load("folder", path=tmp_path, log=lambda message: None)
