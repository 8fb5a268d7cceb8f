"""Workdirs at URLs, in fsspec's file system in memory: resumed, read, locked, and kept when a copy fails."""

import json
import shutil
import threading
import uuid

import fsspec
import jax
import numpy as np
import pytest
from training_runs import assert_same_bits, config_of, lines, losses, saved_state, saved_steps

import jaxdiff
from jaxdiff import remote, training
from jaxdiff.cli import main
from jaxdiff.training import bucket, lock
from jaxdiff.training.lock import Locked, this_process

MEMORY = fsspec.filesystem("memory")
RUN = {"train.steps": 6, "checkpoint.keep": 2}
DEVICE = jax.devices()[:1]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXDIFF_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def url():
    """A place in a bucket that nothing has used."""
    name = uuid.uuid4().hex
    yield f"memory://{name}/run"
    if MEMORY.exists(f"/{name}"):
        MEMORY.rm(f"/{name}", recursive=True)


def inside(url):
    """The names below a URL."""
    place = remote.place_of(url)
    return sorted(path.removeprefix(place.path + "/") for path in MEMORY.find(place.path))


def steps_in(url):
    return sorted(
        {int(name.split("/")[1]) for name in inside(url) if name.count("/") > 1 and name[:11] == bucket.STEPS}
    )


def train(url, **changes):
    return training.train(config_of(changes=RUN | changes), url, quiet=True, devices=DEVICE)


def copied(url, folder):
    MEMORY.get(remote.place_of(url).path, str(folder), recursive=True)
    return folder


def test_a_run_in_a_bucket_is_resumed_and_sampled_like_one_on_disk(url, tmp_path):
    on_disk = tmp_path / "disk"
    train(on_disk)
    train(url, **{"train.steps": 3})
    assert steps_in(url) == [3] and lock.FILE not in inside(url)
    train(url)
    here = copied(url, tmp_path / "here")
    assert steps_in(url) == saved_steps(on_disk) == [3, 6]
    assert_same_bits(saved_state(here, 6), saved_state(on_disk, 6))
    assert losses(here) == losses(on_disk) and {"event": "resume"}.items() <= next(
        {"event": line["event"]}.items() for line in lines(here) if "event" in line
    )
    run = jaxdiff.load(url, devices=DEVICE)
    assert run.step == 6
    np.testing.assert_array_equal(run.sample(0, 4), jaxdiff.load(on_disk, devices=DEVICE).sample(0, 4))
    assert_same_bits(
        jaxdiff.load(url, devices=DEVICE, step=3).params, jaxdiff.load(on_disk, devices=DEVICE, step=3).params
    )
    assert main(["evaluate", f"--workdir={url}", "--config.eval.samples=64"]) == 0
    assert main(["evaluate", f"--workdir={url}", "--config.eval.samples=64"]) == 0
    table = MEMORY.cat_file(f"{remote.place_of(url).path}/evaluations.jsonl").decode().splitlines()
    assert len(table) == 2 and json.loads(table[0]) == json.loads(table[1])


def test_checkpoints_without_their_marker_do_not_count_and_old_ones_are_removed(url, tmp_path):
    root, again = tmp_path / "root", tmp_path / "again"
    place = remote.place_of(url)
    mirror = bucket.Mirror(place, root)
    for step in (3, 6):
        (root / bucket.STEPS / str(step) / "a").mkdir(parents=True)
        (root / bucket.STEPS / str(step) / "a" / "array").write_text(f"of {step}")
    (root / bucket.STEPS / "9.orbax-checkpoint-tmp").mkdir()
    (root / bucket.STEPS / "9.orbax-checkpoint-tmp" / "array").write_text("unfinished")
    (root / ".config.1.part.json").write_text("unfinished")
    (root / "config.json").write_text("{}")
    mirror.copy()
    wanted = [f"checkpoints/{step}{end}" for step in (3, 6) for end in (".complete", "/a/array")]
    assert inside(url) == [*wanted, "config.json"]
    MEMORY.rm_file(f"{place.path}/checkpoints/6.complete")
    other = bucket.Mirror(place, again)
    other.fetch()
    assert inside(url) == ["checkpoints/3.complete", "checkpoints/3/a/array", "config.json"]
    assert sorted(path.relative_to(again).as_posix() for path in again.rglob("*") if path.is_file()) == [
        "checkpoints/3/a/array",
        "config.json",
    ]
    shutil.rmtree(root / bucket.STEPS / "3")
    mirror.copy()
    assert bucket.has_checkpoint(url) is False  # 6 has lost its marker here, and 3 is gone
    assert not [name for name in inside(url) if name.startswith("checkpoints/3")]


def test_a_run_that_was_copied_by_hand_is_kept_and_its_owner_told(url, tmp_path, capsys):
    place = remote.place_of(url)
    MEMORY.pipe_file(f"{place.path}/checkpoints/6/array", b"of 6")
    bucket.Mirror(place, tmp_path).fetch()
    assert "checkpoints/6 without a marker .complete" in capsys.readouterr().out
    assert inside(url) == ["checkpoints/6/array"] and not list(tmp_path.iterdir())


def test_a_file_is_copied_again_only_when_it_has_changed(url, tmp_path, monkeypatch):
    (tmp_path / "a").write_text("one")
    (tmp_path / "b").write_text("one")
    mirror = bucket.Mirror(remote.place_of(url), tmp_path)
    put, seen = type(MEMORY).put_file, []
    monkeypatch.setattr(
        type(MEMORY),
        "put_file",
        lambda self, source, path, **how: (seen.append(path[-1]), put(self, source, path, **how)),
    )
    mirror.copy()
    (tmp_path / "b").write_text("three")
    mirror.copy()
    mirror.copy()
    assert sorted(seen) == ["a", "b", "b"]


def test_a_copy_that_fails_at_the_end_keeps_the_run(url, monkeypatch):
    monkeypatch.setattr(type(MEMORY), "put_file", fails)
    with pytest.raises(OSError, match=r"no credentials.* The run is kept in") as caught, bucket.opened(url) as root:
        (root / "config.json").write_text("{}")
    assert url in str(caught.value) and str(root) in str(caught.value)
    assert (root / "config.json").read_text() == "{}"
    shutil.rmtree(root)


def fails(*_, **__):
    raise RuntimeError("no credentials")


def test_a_failing_copy_in_the_background_is_said_and_tried_again(url, monkeypatch, capsys):
    monkeypatch.setattr(bucket, "INTERVAL", 0.01)
    put, calls, copied_again = type(MEMORY).put_file, [], threading.Event()

    def once(*given, **how):
        calls.append(given)
        if len(calls) == 1:
            fails()
        put(*given, **how)
        copied_again.set()

    monkeypatch.setattr(type(MEMORY), "put_file", once)
    with bucket.opened(url) as root:
        (root / "config.json").write_text("{}")
        assert copied_again.wait(60)
    assert inside(url) == ["config.json"] and not root.exists() and len(calls) == 2
    assert "warning: cannot write memory://" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ the lock


def hold(url, **changes):
    """A lock in the bucket, of another machine unless said otherwise."""
    record = this_process()._replace(**{"machine": "another", "nonce": "n"} | changes)._asdict()
    MEMORY.pipe_file(f"{remote.place_of(url).path}/{lock.FILE}", json.dumps(record).encode())


def test_a_second_run_in_a_bucket_is_refused(url):
    with bucket.opened(url), pytest.raises(Locked, match="another run is training in memory://"), bucket.opened(url):
        pass
    assert inside(url) == []


def test_a_lock_that_beats_holds_and_a_silent_one_is_stale(url, monkeypatch, capsys):
    monkeypatch.setattr(lock, "PATIENCE", 0.2)
    hold(url)
    beats = iter(range(100))
    read = bucket.BucketLock._read

    def beating(self):
        hold(url, nonce=str(next(beats)))
        return read(self)

    with monkeypatch.context() as alive:
        alive.setattr(bucket.BucketLock, "_read", beating)
        with pytest.raises(Locked), bucket.opened(url):
            pass
    with bucket.opened(url):
        assert inside(url) == [lock.FILE]
    assert "removed the lock of a run that has ended" in capsys.readouterr().out
    assert inside(url) == []


def test_the_lock_of_a_dead_process_here_is_taken_over_at_once(url):
    hold(url, machine=this_process().machine, started="1")
    with bucket.opened(url):
        pass


def test_the_hub_is_not_trained_in():
    with pytest.raises(ValueError, match="jaxdiff push"), bucket.opened("hf://owner/repo"):
        pass


def test_a_copy_to_sample_from_is_not_made_again_for_new_log_lines(url):
    with bucket.opened(url) as root:
        (root / "config.json").write_text("{}")
        (root / "metrics.jsonl").write_text("{}")
    first = bucket.reading(url)
    assert [path.name for path in first.iterdir()] == ["config.json"]
    bucket.append_line(url, "metrics.jsonl", lambda path: path.write_text(path.read_text() + "more"))
    assert bucket.reading(url) == first
    assert (bucket.reading(url, logs=True) / "metrics.jsonl").read_text() == "{}more"


def test_several_processes_need_a_mounted_bucket(url, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="mount the bucket"), bucket.opened(url):
        pass
