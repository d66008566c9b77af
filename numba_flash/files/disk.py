"""Files that are executed once they are read: only out of a directory that nobody else can write, only as they were written.

Compiled kernels are kept in such files, each with a checksum in front of its data. A file that fails a test counts as missing, and a
directory that fails one is not used, which is said once. So damage, a full disk or a hostile neighbour cost time, and nothing else.
"""

import hashlib
import logging
import os
import stat
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

CHECKSUM_BYTES = hashlib.sha256().digest_size
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_named: set[Path] = set()
_log = logging.getLogger("numba_flash")


def trusted(directory: Path) -> bool:
    """True if `directory` belongs to this user and nobody else may write to it; made (mode 0700) if it is missing.

    Else False, and one warning that names it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        wrong = _wrong(directory.stat())
    except OSError as error:
        wrong = error.strerror or str(error)
    if wrong:
        give_up(directory, wrong)
    return not wrong


def give_up(directory: Path, reason: str) -> None:
    """Warn that kernels are not kept in `directory`: once for each directory."""
    if directory not in _named:
        _named.add(directory)
        warnings.warn(f"compiled kernels are not kept in {directory}: {reason}; every process compiles anew", RuntimeWarning, stacklevel=2)


def given_up() -> bool:
    """True if this process had to warn that something is not kept."""
    return bool(_named)


def _wrong(status: os.stat_result) -> str:
    """Why a file or directory cannot be trusted; empty if it can. Systems without owners of files trust everything."""
    if not hasattr(os, "geteuid"):
        return ""
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, this process to {os.geteuid()}"
    return f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o})" if status.st_mode & _OTHERS_WRITE else ""


def seal(data: bytes) -> bytes:
    """The data with its SHA-256 checksum in front."""
    return hashlib.sha256(data).digest() + data


def unseal(data: bytes) -> bytes | None:
    """What was sealed, None unless it is complete and unchanged."""
    checksum, data = data[:CHECKSUM_BYTES], data[CHECKSUM_BYTES:]
    return data if hashlib.sha256(data).digest() == checksum else None


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file `path`, which only this user may read or write then. Nobody ever sees a part of it; OSError leaves the old one."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class Usage(NamedTuple):
    """What a directory holds: how many files, and their bytes."""

    files: int
    size: int


def held(directory: Path) -> Usage:
    """Of those that are there, and stay there meanwhile; temporary ones of `write_atomically` are none."""
    sizes = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if entry.is_file() and not entry.name.startswith("."):
                        sizes.append(entry.stat().st_size)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    return Usage(len(sizes), sum(sizes))


def load(path: Path) -> bytes | None:
    """The data that `store` wrote there; None if there is none, it is damaged (the log says so), or somebody else may have written it."""
    if not trusted(path.parent):
        return None
    try:
        with path.open("rb") as file:
            wrong = _wrong(os.fstat(file.fileno()))
            data = None if wrong else unseal(file.read())
    except FileNotFoundError:
        return None
    except OSError as error:
        data, wrong = None, error.strerror
    if data is None:
        _log.warning("%s counts as missing: %s", path, wrong or "it is damaged")
    return data


def store(path: Path, data: bytes) -> None:
    """Keep the data under its checksum, if that is possible; a warning names the directory where it is not."""
    if not trusted(path.parent):
        return
    try:
        write_atomically(path, seal(data))
    except OSError as error:
        give_up(path.parent, error.strerror or str(error))
