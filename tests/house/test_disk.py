"""What is executed from disk: whose directory it is, and whether it is what was written."""

import errno
import os
import stat
import warnings

import pytest

from numba_flash.files import disk

DATA = bytes(range(256)) * 3


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch):
    """Warnings that came before do not count."""
    monkeypatch.setattr(disk, "_named", set())


def damages(sealed: bytes) -> dict[str, bytes]:
    """Ways in which a file is found after a crash, a full disk, or a bad sector."""
    flipped = {f"bit of byte {at}": sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :] for at in (0, 31, 32, len(sealed) - 1)}
    cut = {f"cut after {size}": sealed[:size] for size in (0, 1, 31, 32, 33, len(sealed) - 1)}
    return flipped | cut | {"zeros": bytes(len(sealed)), "longer": sealed + b"\0", "other bytes": DATA}


def test_a_seal_finds_every_damage():
    assert disk.unseal(disk.seal(DATA)) == DATA
    assert disk.unseal(disk.seal(b"")) == b""
    for damage, found in damages(disk.seal(DATA)).items():
        assert disk.unseal(found) is None, damage


def test_what_a_directory_holds_is_counted(tmp_path):
    """Files that are being written, or are folders, are none; nor are any where there is no directory."""
    assert disk.held(tmp_path / "missing") == (0, 0)
    for name in ("a", "b"):
        disk.store(tmp_path / "there" / name, DATA)
    (tmp_path / "there" / ".a.part").write_bytes(DATA)
    (tmp_path / "there" / "folder").mkdir()
    assert disk.held(tmp_path / "there") == (2, 2 * (len(DATA) + disk.CHECKSUM_BYTES))


def test_what_is_stored_is_loaded(tmp_path):
    path = tmp_path / "new" / "folder" / "file"
    assert disk.load(path) is None
    disk.store(path, DATA)
    assert disk.load(path) == DATA
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["file"]
    for damage, found in damages(path.read_bytes()).items():
        path.write_bytes(found)
        assert disk.load(path) is None, damage


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_directory_that_others_may_write_is_not_used(tmp_path, mode):
    directory = tmp_path / "shared"
    disk.store(directory / "file", DATA)
    directory.chmod(mode)
    with pytest.warns(RuntimeWarning, match=rf"{directory}: others may write to it \(mode {mode:04o}\)"):
        assert not disk.trusted(directory)
    assert disk.load(directory / "file") is None
    disk.store(directory / "another", DATA)  # without a second warning
    assert [each.name for each in directory.iterdir()] == ["file"]


def test_a_directory_of_somebody_else_is_not_used(tmp_path, monkeypatch):
    disk.store(tmp_path / "mine" / "file", DATA)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.warns(RuntimeWarning, match=f"it belongs to user {me}, this process to {me + 1}"):
        assert disk.load(tmp_path / "mine" / "file") is None


def test_a_file_that_others_may_write_is_not_read(tmp_path):
    """Whoever swaps the directory after it was looked at has to bring the user's own files."""
    disk.store(tmp_path / "mine" / "file", DATA)
    (tmp_path / "mine" / "file").chmod(0o666)
    assert disk.load(tmp_path / "mine" / "file") is None


def test_systems_without_owners_trust(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    monkeypatch.delattr(os, "geteuid")
    assert disk.trusted(tmp_path)


def test_no_place_is_said_once_and_is_no_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    directory = tmp_path / "file" / "folder"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        disk.store(directory / "a", DATA)
        disk.store(directory / "b", DATA)
        assert disk.load(directory / "a") is None
    assert [str(each.message) for each in caught] == [
        f"compiled kernels are not kept in {directory}: Not a directory; every process compiles anew"
    ]


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "mine" / "file"
    disk.store(path, DATA)

    def full(*names):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        disk.store(path, b"something else")
    assert disk.load(path) == DATA
    assert [each.name for each in path.parent.iterdir()] == ["file"]
