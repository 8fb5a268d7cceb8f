"""URLs where paths are read: copied once per version, in fsspec's file system in memory."""

import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

from jaxdiff import data, evaluation, remote
from jaxdiff.weights import files

MEMORY = fsspec.filesystem("memory")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXDIFF_CACHE", str(tmp_path / "cache"))
    yield
    if MEMORY.exists("/bucket"):
        MEMORY.rm("/bucket", recursive=True)


@pytest.mark.parametrize("path", ["gs://bucket/a", "s3://bucket", "hf://owner/repo", Path("gs://bucket/a"), "S3://b/x"])
def test_urls_are_recognised_also_as_paths(path):
    assert remote.is_remote(path)
    assert "://" in remote.url_of(path)


@pytest.mark.parametrize("path", ["runs/a", "/runs/a", "runs/a:b", "C:/runs", "", Path("a")])
def test_paths_are_not_urls(path):
    assert not remote.is_remote(path)
    assert remote.local(path) == Path(path)


def test_a_file_is_copied_once_per_version(monkeypatch):
    MEMORY.pipe_file("/bucket/a.txt", b"one")
    copies = []
    get = type(MEMORY).get
    monkeypatch.setattr(type(MEMORY), "get", lambda *given, **how: (copies.append(given), get(*given, **how))[1])
    first = remote.local("memory://bucket/a.txt")
    assert (first.name, first.read_bytes()) == ("a.txt", b"one")
    assert remote.local(Path("memory://bucket/a.txt")) == first and len(copies) == 1
    MEMORY.pipe_file("/bucket/a.txt", b"another")
    assert remote.local("memory://bucket/a.txt").read_bytes() == b"another"
    assert first.read_bytes() == b"one"


def test_folders_are_copied_without_what_is_not_read():
    for name in ("run/config.json", "run/code/net.py", "run/samples/a.png"):
        MEMORY.pipe_file(f"/bucket/{name}", name.encode())
    folder = remote.local("memory://bucket/run/", skip=("samples",))
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*")) == [
        "code",
        "code/net.py",
        "config.json",
    ]
    assert not list(folder.parent.glob(".part-*"))


def test_a_copy_that_fails_leaves_nothing(monkeypatch, tmp_path):
    MEMORY.pipe_file("/bucket/a.txt", b"one")

    def fails(*_, **__):
        raise RuntimeError("no credentials\nlong text")

    monkeypatch.setattr(type(MEMORY), "get", fails)
    with pytest.raises(OSError, match=r"cannot read memory://bucket/a.txt: RuntimeError: no credentials\. Check"):
        remote.local("memory://bucket/a.txt")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() or path.name.startswith(".part")]


def test_what_is_not_there_and_what_cannot_be_opened(monkeypatch):
    with pytest.raises(FileNotFoundError, match="memory://bucket/none"):
        remote.local("memory://bucket/none")
    with pytest.raises(ValueError, match="gs://, s3://"):
        remote.local("nosuch://bucket/none")
    with pytest.raises(ValueError, match="without file://"):
        remote.local("file:///tmp/none")
    for scheme, module, extra in (("gs", "gcsfs", "gcs"), ("s3", "s3fs", "s3")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ModuleNotFoundError, match=rf'pip install "jaxdiff\[{extra}\]"'):
            remote.local(f"{scheme}://bucket/none")


def test_weights_statistics_and_images_are_read_from_a_bucket(tmp_path):
    arrays = {"a": np.arange(3, dtype=np.float32)}
    files.write(tmp_path / "w.safetensors", arrays, {"step": "7"})
    evaluation.save_moments(tmp_path / "stats.npz", evaluation.Moments(5, np.zeros(2), np.eye(2)))
    for i, name in enumerate(("cat", "dog")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4), (i, 2, 3)).save(tmp_path / "photos" / name / "0.png")
    MEMORY.put(str(tmp_path), "/bucket/here", recursive=True)
    there = "memory://bucket/here"
    np.testing.assert_array_equal(files.read(f"{there}/w.safetensors")["a"], arrays["a"])
    assert files.metadata(f"{there}/w.safetensors")["step"] == "7"
    assert evaluation.load_moments(f"{there}/stats.npz").count == 5
    here, copied = (data.load("folder", path=f"{base}/photos") for base in (tmp_path, there))
    assert (copied.fingerprint, copied.class_names, copied.name) == (here.fingerprint, ("cat", "dog"), here.name)
