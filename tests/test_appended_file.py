"""Records that are appended: none is lost, nor half written, whatever others do to the file."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetjax.appended_file import AppendedFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder" / "records"


@pytest.fixture
def file(path: Path) -> Iterator[AppendedFile]:
    opened = AppendedFile(path, ending=b"\n")
    opened.append(b"one\n")
    yield opened
    opened.close()


def rewrite(path: Path, text: str) -> None:
    """What an editor does that writes a new file and renames it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


@pytest.mark.parametrize(
    ("change", "before"),
    [
        (lambda path: os.truncate(path, 0), ""),
        (lambda path: os.truncate(path, 2), "on\n"),
        (lambda path: path.write_text("one\nmore\n"), "one\nmore\n"),
        (lambda path: rewrite(path, "one\nmore"), "one\nmore\n"),
        (lambda path: rewrite(path, ""), ""),
        (lambda path: path.unlink(), ""),
    ],
)
def test_what_another_program_makes_of_it_is_gone_on_from(
    file: AppendedFile, path: Path, change: Callable[[Path], None], before: str
):
    change(path)
    for record in (b"two\n", b"three\n"):
        file.append(record)
        assert file.failure is None
    assert path.read_text() == before + "two\nthree\n"


def test_records_wait_while_there_is_no_folder(file: AppendedFile, path: Path):
    shutil.rmtree(path.parent)
    file.append(b"two\n")
    assert str(file.failure).startswith("No such file or directory")
    path.parent.mkdir()
    file.append(b"three\n")
    assert file.failure is None
    assert path.read_text() == "two\nthree\n"


def test_a_pipe_in_its_place_is_not_waited_for(file: AppendedFile, path: Path):
    path.unlink()
    os.mkfifo(path)
    file.append(b"two\n")
    assert file.failure is not None


def test_a_half_record_that_cannot_be_taken_back_is_written_over(
    file: AppendedFile, path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(handle: int, *arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def filling(handle: int, content: bytes, place: int) -> int:
        return write(handle, content[:2], place) if content == b"two\n" else full(handle)

    write = os.pwrite
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", filling)
        patched.setattr(os, "ftruncate", full)
        file.append(b"two\n")
        assert file.failure == "No space left on device"
        assert path.read_text() == "one\ntw"
    file.append(b"three\n")
    assert file.failure is None
    assert path.read_text() == "one\ntwo\nthree\n"
