"""Files that are complete or absent, and that are checked when they are read.

`replacing` writes a file beside its final name and renames it. JSON records carry a checksum of their own. .npz files
are read without pickle, and only as much as their size allows; zip archives have a CRC per array already.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

CHECKSUM = "checksum"  # of a record, among its fields
UNREADABLE = (zipfile.BadZipFile, zlib.error, ValueError, EOFError, KeyError, RuntimeError, MemoryError)  # as .npz
EXPANSION, FREE = 100, 2**28  # a .npz may hold this many times its own size, and this many bytes whatever its size


class DamagedFile(ValueError):
    """A file that is not what was written; the message names it and says what to do."""


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """A name to write to, which becomes `path` at the end or is removed if that fails; permissions follow the umask."""
    path = Path(path)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        partial.write_bytes(b"")
        mode = partial.stat().st_mode
        yield partial
        with open(partial, "rb") as written:
            os.fsync(written.fileno())
        partial.chmod(mode)  # writers that create a file of their own make it private
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(f"cannot write {path}: {error.strerror or error}; {_remedy(error)}") from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _remedy(error: OSError) -> str:
    return "free some space" if is_full(error) else "check the folder and its permissions"


def is_full(error: BaseException) -> bool:
    """Whether there is no room: on the disk, in a quota, or below a limit on the size of files."""
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return getattr(error, "errno", None) in numbers or any(os.strerror(number) in str(error) for number in numbers)


# ------------------------------------------------------------------------------------------ records


def write_json(path: str | os.PathLike, record: Mapping[str, Any], default: Callable[[Any], Any] | None = None) -> None:
    """Write a record with its checksum, atomically."""
    plain = json.loads(json.dumps(record, default=default))
    with replacing(path) as partial:
        text = json.dumps({**plain, CHECKSUM: _record_sum(plain)}, indent=2)
        partial.write_text(text + "\n", encoding="utf-8")


def read_json(path: str | os.PathLike, purpose: str) -> dict[str, Any]:
    """The record in a file, without its checksum; a record without one, as earlier versions wrote them, is not checked.

    `purpose` says in messages what the file is.
    """
    path = Path(path)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also of bytes that are not UTF-8
        raise DamagedFile(f"{path}, {purpose}, is damaged or truncated: {error}; restore it from a copy") from error
    if not isinstance(record, dict):
        raise DamagedFile(
            f"{path}, {purpose}, must hold a JSON object, got {type(record).__name__}; restore it from a copy"
        )
    known = record.pop(CHECKSUM, None)
    if known is not None and known != _record_sum(record):
        raise DamagedFile(
            f"{path}, {purpose}, does not match its checksum: it is damaged, or was edited. Restore it from a copy; "
            f'after an edit that is meant, remove the line "{CHECKSUM}"'
        )
    return record


def _record_sum(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:32]


# ------------------------------------------------------------------------------------------ arrays


def read_npz(source: str | os.PathLike, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, or those of `names` that it has. Sizes are checked before anything is unpacked."""
    path = Path(source)
    try:
        with zipfile.ZipFile(path) as archive:
            _check_sizes(path, archive.infolist())
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files if names is None or name in names}
    except DamagedFile:
        raise
    except UNREADABLE as error:
        what = "holds Python objects, which are not read" if "allow_pickle" in str(error) else f"is damaged: {error}"
        raise DamagedFile(f"{path} {what}; write it again with numpy.savez, from arrays of numbers or text") from error


def _check_sizes(path: Path, members: list[zipfile.ZipInfo]) -> None:
    """An archive may not expand to much more than it is: its arrays would fill the memory."""
    held, size = sum(member.file_size for member in members), path.stat().st_size
    if held > max(FREE, EXPANSION * size):
        raise DamagedFile(
            f"{path} has {size:,} bytes and would expand to {held:,}, more than {EXPANSION} times as many; if that is "
            "meant, store it uncompressed with numpy.savez"
        )
