"""A file is replaced whole or left as it was."""

import errno
import os
import stat
from pathlib import Path

import pytest

from hetjax import InputError
from hetjax.files import check_folder, check_writable, replacing


def test_replaces_and_makes_the_folder(tmp_path: Path):
    path = tmp_path / "new" / "file.txt"
    for text in ("one", "two"):
        with replacing(path) as temporary:
            temporary.write_text(text)
        assert path.read_text() == text
    assert list(path.parent.iterdir()) == [path]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_of_a_full_disk_names_the_file(tmp_path: Path):
    path = tmp_path / "file.txt"
    with pytest.raises(OSError, match="No space left") as raised, replacing(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert raised.value.filename == str(path)


def test_the_file_is_as_readable_as_any_other(tmp_path: Path):
    plain, replaced = tmp_path / "plain", tmp_path / "replaced"
    plain.touch()
    with replacing(replaced) as temporary:
        temporary.touch()
    assert replaced.stat().st_mode == plain.stat().st_mode


def test_a_folder_that_takes_no_files_is_refused(tmp_path: Path):
    check_folder(tmp_path / "new" / "folder", "--workdir")
    assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="--workdir /proc/x: /proc cannot be written to"):
        check_folder("/proc/x", "--workdir")


def test_a_device_is_not_replaced_by_a_file(tmp_path: Path):
    device = tmp_path / "null"
    os.mkfifo(device)
    link = tmp_path / "link"
    link.symlink_to(device)
    for path in (device, link):
        with pytest.raises(InputError, match=r"--out .* cannot be written: it is no regular file"):
            check_writable(path, "--out")
        with pytest.raises(OSError, match="no regular file"), replacing(path):
            pass
    assert stat.S_ISFIFO(device.stat().st_mode)
    assert link.is_symlink()


def test_of_a_link_the_file_is_written_that_it_leads_to(tmp_path: Path):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    with replacing(link) as temporary:
        temporary.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_name_as_long_as_the_file_system_has_them(tmp_path: Path):
    path = tmp_path / f"{'n' * 250}.json"
    check_writable(path, "--out")
    with replacing(path) as temporary:
        temporary.write_text("whole")
    assert path.read_text() == "whole"
