"""Prefetching gives the same batches, shows errors with their origin, and leaves no thread behind."""

import gc
import subprocess
import sys
import threading
import time
import traceback

import numpy as np
import pytest
from image_makers import make_folder, same

from jaxdiff import data


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("photos"), [f"{i}.png" for i in range(7)])


@pytest.fixture(autouse=True)
def no_leaked_threads():
    yield
    assert not running()


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("jaxdiff")]


def digits() -> data.Dataset:
    return data.load("digits")


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("workers", [0, 3, None])
def test_equals_batches_by_step(photos, depth, workers):
    dataset = data.load("folder", path=photos, image_size=6, crop="global", flip=True, control=("crop", "flip"))
    with data.prefetch(dataset, 3, 4, 1, 2, depth=depth, workers=workers) as batches:
        for step, batch in zip(range(3, 9), batches, strict=False):
            assert same(batch, dataset.batch(step, 4, 1, 2))


def test_stops_at_the_step_given():
    batches = data.prefetch(digits(), 10, 64, stop_step=13)
    assert len(list(batches)) == 3
    assert list(batches) == []
    assert list(data.prefetch(digits(), 5, 64, stop_step=5)) == []


def test_stays_at_most_depth_ahead():
    asked = []
    dataset = digits()

    def fetch(positions, executor):
        asked.append(positions.start)
        return dataset.fetch(positions, executor)

    counted = data.Dataset("counted", (1,), 10, "", fetch=fetch)
    with data.prefetch(counted, 0, 1, depth=3, workers=0) as batches:
        next(batches)
        wait_until(lambda: len(asked) == 5)  # one taken, three in the queue, one waiting to be put there
        time.sleep(0.1)
        assert asked == [0, 1, 2, 3, 4]


def test_close_wakes_a_waiting_thread_and_may_be_repeated():
    batches = data.prefetch(digits(), 0, 8, depth=1)
    next(batches)
    batches.close()
    batches.close()
    assert list(batches) == []


def test_close_does_not_finish_the_batch_in_progress():
    asked, futures = [], []
    started, release = threading.Event(), threading.Event()

    def slow(position):
        asked.append(position)
        started.set()
        release.wait()

    def fetch(positions, executor):
        futures.extend(executor.submit(slow, position) for position in positions)
        return [future.result() for future in futures]

    batches = data.prefetch(data.Dataset("slow", (1,), 10, "", fetch=fetch), 0, 1000, workers=2)
    started.wait()
    wait_until(lambda: len(futures) == 1000)
    closing = threading.Thread(target=batches.close)
    closing.start()
    wait_until(lambda: futures[-1].cancelled())
    release.set()
    closing.join()
    assert len(asked) <= 2  # one per worker


def test_forgotten_iterators_end_with_their_last_reference():
    batches = data.prefetch(digits(), 0, 8)
    next(batches)
    (thread,) = running()
    del batches
    gc.collect()
    assert not thread.is_alive()


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_of_the_thread_keep_their_traceback(workers):
    def deep_inside(position):
        if position >= 8:
            raise LookupError("position eight is cursed")
        return position

    def fetch(positions, executor):
        return {"image": np.asarray(list((executor.map if executor else map)(deep_inside, positions)))}

    with data.prefetch(data.Dataset("cursed", (1,), 10, "", fetch=fetch), 0, 4, workers=workers) as batches:
        assert next(batches)["image"].tolist() == [0, 1, 2, 3]
        assert next(batches)["image"].tolist() == [4, 5, 6, 7]
        with pytest.raises(LookupError, match="cursed") as caught:
            next(batches)
        assert "deep_inside" in "".join(traceback.format_tb(caught.tb))
        with pytest.raises(LookupError, match="cursed"):  # not a silent end of data
            next(batches)


def test_corrupt_file_stops_the_consumer(photos, tmp_path):
    make_folder(tmp_path, ["0.png", "1.png"])
    (tmp_path / "1.png").write_bytes(b"?")
    dataset = data.load("folder", path=tmp_path, on_corrupt="stop")
    with data.prefetch(dataset, 0, 2) as batches, pytest.raises(data.CorruptImage, match=r"1\.png"):
        next(batches)


def test_wrong_arguments_fail_at_once():
    with pytest.raises(ValueError, match="depth"):
        data.prefetch(digits(), 0, 8, depth=0)
    with pytest.raises(ValueError, match=r"9.*2"):
        data.prefetch(digits(), 0, 9, 0, 2)


def test_a_script_may_end_without_closing(photos):
    code = f"from jaxdiff import data\nb = data.prefetch(data.load('folder', path={str(photos)!r}), 0, 4)\nprint(next(b)['image'].shape)"
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "(4, 12, 16, 3)\n", "")


def wait_until(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()
