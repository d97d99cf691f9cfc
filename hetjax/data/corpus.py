"""Where tokens come from: text files, the standard library's source, a synthetic stream.

A corpus is a small picklable description; reading happens in `Corpus.tokens`.
"""

from __future__ import annotations

import functools
import importlib.util
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hetjax.data.hashing import hash64
from hetjax.errors import InputError

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
        return _vocabulary(self.tokenizer)

    def files(self) -> list[Path]:
        """The files in the order in which they are read."""
        if not self.paths:
            raise InputError("paths is empty; name at least one text file or folder")
        files = (file for path in self.paths for file in _files_at(path))
        return list({file.resolve(): file for file in files}.values())

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
        return _vocabulary(self.tokenizer)

    def tokens(self) -> np.ndarray:
        """Read and tokenize the modules.

        Raises:
            InputError: if this Python came without the source of its standard library.
        """
        folder = Path(sysconfig.get_path("stdlib"))
        documents = [_read(file) for file in sorted(folder.glob("*.py"))]
        if not documents:
            raise InputError(f"{folder} holds no *.py files; give text files of your own")
        utf8 = [document for document in documents if _first_wrong_byte(document) is None]
        return _tokenize(utf8, self.tokenizer)


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
        InputError: if the vocabulary or the size is too small.
    """

    vocabulary: int
    size: int
    seed: int = 0

    NOISE = 0.1
    """Probability that a token is drawn at random."""

    def __post_init__(self):
        if self.vocabulary < 2:
            raise InputError(f"vocabulary is {self.vocabulary}; a stream needs at least 2 tokens")
        if self.size < 1:
            raise InputError(f"size is {self.size}; it must be above 0")

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


def _files_at(path: str) -> Iterable[Path]:
    here = Path(path)
    if not path or not here.exists():
        raise InputError(f"paths names {path!r}, and there is no such file or folder")
    if not here.is_dir():
        return [here]
    found = sorted(
        file
        for file in here.rglob("*")
        if file.is_file() and not any(part[0] == "." for part in file.relative_to(here).parts)
    )
    if not found:
        raise InputError(f"paths names the folder {path!r}, which holds no files")
    return found


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from error


def _first_wrong_byte(document: bytes) -> int | None:
    try:
        document.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    return None


def _tokenize(documents: Sequence[bytes], tokenizer: str | None) -> np.ndarray:
    if tokenizer is None:
        return np.frombuffer(b"".join(documents), np.uint8)
    texts = [document.decode("utf-8") for document in documents]
    encoded = _load_tokenizer(tokenizer).encode_batch(texts, add_special_tokens=False)
    return np.concatenate([np.array(one.ids, np.int32) for one in encoded])


def _vocabulary(tokenizer: str | None) -> int:
    return BYTES if tokenizer is None else _load_tokenizer(tokenizer).get_vocab_size()


def _check_tokenizer(tokenizer: str | None) -> None:
    if tokenizer is None:
        return
    if importlib.util.find_spec("tokenizers") is None:
        raise InputError(
            f"tokenizer is {tokenizer!r}, which needs the tokenizers package: "
            'pip install -e ".[tokenizers]"'
        )
    if not Path(tokenizer).is_file():
        raise InputError(f"tokenizer is {tokenizer!r}, and there is no such file")


@functools.lru_cache(maxsize=4)
def _load_tokenizer(path: str) -> Any:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # The package raises bare exceptions.
        raise InputError(f"tokenizer {path!r} is not a tokenizer.json: {error}") from error
