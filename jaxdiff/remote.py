"""Files at URLs: gs://, s3:// and the other file systems of fsspec, and hf:// for the Hugging Face hub.

Weights, records and archives are read from files of the operating system, so what a URL names is copied to a local
cache first (`local`), once per version of it. The cache is $JAXDIFF_CACHE, by default ~/.cache/jaxdiff; it can be
deleted at any time. `training.bucket` keeps workdirs at URLs.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from jaxdiff.errors import optional_import

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

FilePath: TypeAlias = str | os.PathLike
EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}  # of jaxdiff, by scheme
HUB = "hf"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)  # a Path has one slash where the URL had two


class Place(NamedTuple):
    """A file system and a path in it."""

    files: AbstractFileSystem
    path: str
    url: str


def is_remote(path: FilePath) -> bool:
    """Whether a path is a URL."""
    return _URL.fullmatch(os.fspath(path)) is not None


def url_of(path: FilePath, *parts: str) -> str:
    """A URL in its usual form, with parts appended; also of a Path that was made from it."""
    match = _URL.fullmatch(os.fspath(path))
    if match is None:
        raise ValueError(f"{path} is no URL")
    return "/".join([f"{match[1].lower()}://{match[2].rstrip('/')}", *parts])


def place_of(path: FilePath) -> Place:
    """The file system of a URL; an error names the extra to install if it is missing."""
    import fsspec

    url = url_of(path)
    scheme = url.partition(":")[0]
    if scheme in ("file", "local"):
        raise ValueError(f"{url} is a file of this machine: give its path, without {scheme}://")
    try:
        files, inside = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        how = f'pip install "jaxdiff[{extra}]"' if extra else f"fsspec says: {error}"
        raise ModuleNotFoundError(f"{url}: the file system {scheme}:// is not installed; {how}") from error
    except ValueError as error:
        raise ValueError(f"{url}: {error}; known are gs://, s3://, hf:// and those of fsspec") from error
    return Place(files, inside, url)


@contextmanager
def naming(url: str, action: str) -> Iterator[None]:
    """Errors of a file system become an OSError that names the URL; what is not there stays FileNotFoundError."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"cannot {action} {url}: nothing is there") from error
    except Exception as error:  # each file system has errors of its own
        cause = (str(error).splitlines() or [""])[0][:300]
        raise OSError(
            f"cannot {action} {url}: {type(error).__name__}: {cause}. Check the name, the network and the credentials"
        ) from error


def exists(path: FilePath, *parts: str) -> bool:
    """Whether there is a file, here or at a URL."""
    if not is_remote(path):
        return Path(path, *parts).is_file()
    if url_of(path).startswith(f"{HUB}://"):
        return True  # asked when it is read
    place = place_of(url_of(path, *parts))
    with naming(place.url, "read"):
        return bool(place.files.exists(place.path))


def cache_folder() -> Path:
    """Where copies are kept."""
    return Path(os.environ.get("JAXDIFF_CACHE") or "~/.cache/jaxdiff").expanduser()


def local(path: FilePath, skip: Collection[str] = ()) -> Path:
    """A path to read from: `path` itself, or the local copy of what is at a URL.

    Args:
        path: a local path, or the URL of a file or folder.
        skip: names of sub-folders that are left out.

    Returns:
        A local path with the name that the URL ends in.

    Raises:
        FileNotFoundError: there is nothing at the URL.
        OSError: it cannot be read.
    """
    if not is_remote(path):
        return Path(path).expanduser()
    url = url_of(path)
    if url.startswith(f"{HUB}://"):
        return _from_hub(url, skip)
    place = place_of(url)
    with naming(url, "read"):
        found = listing(place, skip)
    if not found:
        raise FileNotFoundError(f"cannot read {url}: nothing is there")
    version = hashlib.sha256("\n".join([url, *(f"{name} {found[name]}" for name in sorted(found))]).encode())
    target = cache_folder() / version.hexdigest()[:24] / (Path(place.path).name or "root")
    if not target.exists():
        _copy(place, [*found], target)
    return target


def listing(place: Place, skip: Collection[str] = ()) -> dict[str, str]:
    """The version of each file, by its path below the place; the path of a single file is ""."""
    details: Mapping[str, Mapping[str, object]] = place.files.find(place.path, detail=True)
    found = {}
    for path, info in details.items():
        name = path.removeprefix(place.path).strip("/")
        if info.get("type") != "directory" and not path.endswith("/") and name.split("/")[0] not in skip:
            found[name] = _version(info)
    return found


def _version(info: Mapping[str, object]) -> str:
    """What changes when a file is written again."""
    marks = ("size", "etag", "ETag", "generation", "md5Hash", "mtime", "created", "LastModified")
    return " ".join(f"{mark}={info[mark]}" for mark in marks if mark in info)


def _copy(place: Place, names: list[str], target: Path) -> None:
    """Copy files to `target`, which appears complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".part-", dir=target.parent))
    try:
        made = partial / target.name
        for name in names:
            (made / name).parent.mkdir(parents=True, exist_ok=True)
        with naming(place.url, "read"):
            sources = [f"{place.path}/{name}".rstrip("/") for name in names]
            place.files.get(sources, [str(made / name) for name in names])
        try:
            made.rename(target)
        except OSError:
            if not target.exists():  # another process copied it at the same time
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def put(source: Path, path: FilePath) -> None:
    """Copy a local file to a URL, where it appears complete."""
    place = place_of(path)
    with naming(place.url, "write"):
        place.files.put_file(str(source), place.path)


# ------------------------------------------------------------------------------------------ Hugging Face


class HubPath(NamedTuple):
    """hf://[datasets/]owner/repo[@revision][/path]."""

    repo: str
    path: str
    revision: str | None
    kind: str

    @classmethod
    def read(cls, url: str) -> HubPath:
        parts = url_of(url).removeprefix(f"{HUB}://").split("/")
        kind = "model"
        if parts[0] == "datasets":
            kind, parts = "dataset", parts[1:]
        if len(parts) < 2 or not all(parts[:2]):
            raise ValueError(f"{url}: write hf://owner/repo/file, hf://datasets/owner/repo/file or hf://owner/repo")
        name, _, revision = parts[1].partition("@")
        return cls(f"{parts[0]}/{name}", "/".join(parts[2:]), revision or None, kind)


def _from_hub(url: str, skip: Collection[str]) -> Path:
    """A file, a folder or all of a repository of the hub, in the hub's own cache; but no Python code."""
    hub = optional_import("huggingface_hub", url, "hub")
    where = HubPath.read(url)
    if where.path.endswith(".py"):
        raise ValueError(f"{url}: code of the hub is not run; download the file, read it, and give its path")
    place = {"repo_id": where.repo, "revision": where.revision, "repo_type": where.kind}
    with naming(url, "read"):
        if Path(where.path).suffix:
            return Path(hub.hf_hub_download(filename=where.path, **place))
        wanted = [f"{where.path}/*"] if where.path else None
        ignored = ["*.py", *(f"{where.path}/{name}/*".lstrip("/") for name in skip)]
        return Path(hub.snapshot_download(allow_patterns=wanted, ignore_patterns=ignored, **place)) / where.path
