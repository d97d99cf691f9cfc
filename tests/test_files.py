"""A file is replaced whole or left as it was."""

from pathlib import Path

import pytest

from hetjax import InputError
from hetjax.files import check_folder, replacing


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
