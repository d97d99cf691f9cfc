"""Where tokens come from: text files, the standard library's source, a synthetic stream.

A corpus is a small picklable description; reading happens in `Corpus.tokens`.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from hetjax.data.checks import check_seed, check_whole
from hetjax.data.hashing import hash64
from hetjax.data.tokenizer import load_tokenizer
from hetjax.errors import InputError, shown
from hetjax.limits import MAX_MADE_EXAMPLES, MAX_TEXT_BYTES, MAX_VOCABULARY
from hetjax.reading import read_bytes

BYTES = 256
"""The vocabulary when bytes are the tokens."""


class Corpus(Protocol):
    """A stream of tokens, described."""

    @property
    def name(self) -> str:
        """What to call it in a message."""
        ...

    @property
    def vocabulary(self) -> int:
        """Every token is in [0, vocabulary)."""
        ...

    def tokens(self) -> np.ndarray:
        """The whole stream, [n] integers."""
        ...

    def files(self) -> list[Path]:
        """The files that it reads; none where it makes its tokens."""
        ...


@dataclass(frozen=True)
class TextFiles:
    """UTF-8 text files, one after another.

    Args:
        paths: files, and folders of which every file is read that is not hidden, subfolders
            included, in order of its path. A file that is named twice is read once.
        tokenizer: path of a Hugging Face ``tokenizer.json``; ``None`` for bytes.

    Raises:
        InputError: if a path is not there, a folder holds no file, or the tokenizer cannot be used.
    """

    paths: tuple[str, ...]
    tokenizer: str | None = None

    def __post_init__(self):
        self.files()
        _check_tokenizer(self.tokenizer)

    @property
    def name(self) -> str:
        """The paths."""
        return ", ".join(self.paths)

    @property
    def vocabulary(self) -> int:
        """That of the tokenizer."""
        return text_vocabulary(self.tokenizer)

    def files(self) -> list[Path]:
        """The files in the order in which they are read."""
        if not self.paths:
            raise InputError("paths is empty; name at least one text file or folder")
        files = (file for path in self.paths for file in _files_at(path))
        return list({file_identity(file): file for file in files}.values())

    def tokens(self) -> np.ndarray:
        """Read, check and tokenize the files.

        Raises:
            InputError: if a file is not UTF-8, naming it and the offset of the first wrong byte.
        """
        documents = []
        for file in self.files():
            document = _read(file)
            if (wrong := _first_wrong_byte(document)) is not None:
                raise InputError(
                    f"{file} is not UTF-8 text: byte {wrong} (0x{document[wrong]:02x}) is wrong; "
                    "convert the file to UTF-8 or leave it out"
                )
            documents.append(document)
        return _tokenize(documents, self.tokenizer)


@dataclass(frozen=True)
class StandardLibrary:
    """The source of the top-level modules of Python's own standard library, sorted by name.

    About 4.7 MB of real text that every machine has. The few modules that are not UTF-8 are left
    out.

    Args:
        tokenizer: path of a Hugging Face ``tokenizer.json``; ``None`` for bytes.
    """

    tokenizer: str | None = None

    def __post_init__(self):
        _check_tokenizer(self.tokenizer)

    @property
    def name(self) -> str:
        """What it is."""
        return "the standard library's source"

    @property
    def vocabulary(self) -> int:
        """That of the tokenizer."""
        return text_vocabulary(self.tokenizer)

    def tokens(self) -> np.ndarray:
        """Read and tokenize the modules.

        Raises:
            InputError: if this Python came without the source of its standard library.
        """
        documents = [_read(file) for file in self.files()]
        utf8 = [document for document in documents if _first_wrong_byte(document) is None]
        return _tokenize(utf8, self.tokenizer)

    def files(self) -> list[Path]:
        """The modules' files, by name."""
        folder = Path(sysconfig.get_path("stdlib"))
        found = sorted(folder.glob("*.py"))
        if not found:
            raise InputError(f"{folder} holds no *.py files; give text files of your own")
        return found


@dataclass(frozen=True)
class Synthetic:
    """A noisy cycle: each token is followed by its own successor, or now and then by any token.

    A model that learns the successors reaches the entropy of the noise, 0.33 + 0.1 ln(vocabulary)
    nats a token for a large vocabulary.

    Args:
        vocabulary: number of tokens, at least 2.
        size: length of the stream, in tokens.
        seed: which cycle and which noise.

    Raises:
        InputError: naming the field, its value and what is allowed.
    """

    vocabulary: int
    size: int
    seed: int = 0

    NOISE = 0.1
    """Probability that a token is drawn at random."""

    def __post_init__(self):
        check_whole("vocabulary", self.vocabulary, 2, MAX_VOCABULARY)
        check_whole("size", self.size, 1, MAX_MADE_EXAMPLES)
        check_seed(self.seed)

    @property
    def name(self) -> str:
        """What it is."""
        return f"a synthetic stream of {self.size} tokens"

    def tokens(self) -> np.ndarray:
        """Compute the stream, [size] int32."""
        cycle = np.argsort(hash64(self.seed, 2, np.arange(self.vocabulary)))
        places = np.arange(self.size)
        drawn = hash64(self.seed, 3, places) < np.uint64(round(self.NOISE * 2**64))
        any_token = hash64(self.seed, 4, places) % np.uint64(self.vocabulary)
        last_drawn = np.maximum.accumulate(np.where(drawn, places, 0))
        steps = any_token.astype(np.int64)[last_drawn] + places - last_drawn
        return cycle[steps % self.vocabulary].astype(np.int32)

    def files(self) -> list[Path]:
        """None."""
        return []


def file_identity(file: Path) -> object:
    """What two names of one file have in common, be they links or not.

    Args:
        file: a path.

    Returns:
        Equal things for names of one file; the path itself where nothing is there.
    """
    try:
        found = os.stat(file)
    except OSError:
        return file
    return found.st_dev, found.st_ino


def _files_at(path: str) -> Iterable[Path]:
    # Unlike those of `Path`, these are False where there can be no such file.
    if not os.path.exists(path):
        raise InputError(f"paths names {shown(path, 200)}, and there is no such file or folder")
    if not os.path.isdir(path):
        return [Path(path)]
    found = sorted(_files_below(Path(path), set()))
    if not found:
        raise InputError(f"paths names the folder {path!r}, which holds no files")
    return found


def _files_below(folder: Path, above: Set[object]) -> Iterator[Path]:
    """The files of a folder and of those in it, whether links lead there or not."""
    above = {*above, file_identity(folder)}
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise InputError(f"paths: {folder} cannot be read: {error.strerror}") from None
    for each in (folder / name for name in names if name[0] != "."):
        if os.path.isfile(each):
            yield each
        elif os.path.isdir(each) and file_identity(each) not in above:
            yield from _files_below(each, above)


def _read(file: Path) -> bytes:
    return read_bytes(file, str(file), MAX_TEXT_BYTES)


def _first_wrong_byte(document: bytes) -> int | None:
    try:
        document.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    return None


def _tokenize(documents: Sequence[bytes], tokenizer: str | None) -> np.ndarray:
    if tokenizer is None:
        return np.frombuffer(b"".join(documents), np.uint8)
    return load_tokenizer(tokenizer).encode([document.decode("utf-8") for document in documents])


def text_vocabulary(tokenizer: str | None) -> int:
    """How many tokens text has.

    Args:
        tokenizer: path of a ``tokenizer.json``; None for bytes.

    Returns:
        One more than the largest token.

    Raises:
        InputError: the tokenizer cannot be used.
    """
    _check_tokenizer(tokenizer)
    return BYTES if tokenizer is None else load_tokenizer(tokenizer).vocabulary


def _check_tokenizer(tokenizer: str | None) -> None:
    if tokenizer is None:
        return
    if importlib.util.find_spec("tokenizers") is None:
        raise InputError(
            f"tokenizer is {tokenizer!r}, which needs the tokenizers package: "
            'pip install -e ".[tokenizers]"'
        )
    if not os.path.isfile(tokenizer):
        raise InputError(f"tokenizer is {shown(tokenizer, 200)}, and there is no such file")
