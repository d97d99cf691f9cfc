"""A text as the tokens of a corpus, and tokens as text: bytes, or those of a tokenizer."""

from __future__ import annotations

import numpy as np

from hetjax.data.tokenizer import load_tokenizer
from hetjax.errors import InputError, shown


def encode(text: str, tokenizer: str | None = None) -> np.ndarray:
    """The tokens of a text, every piece of which must be known.

    Args:
        text: the text.
        tokenizer: path of a Hugging Face ``tokenizer.json``; None for its UTF-8 bytes.

    Returns:
        [n] int32.

    Raises:
        InputError: the text has what UTF-8 has no bytes for, or the tokenizer no token for.

    Example:
        >>> encode("né").tolist()
        [110, 195, 169]
    """
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        wrong = text[error.start]
        raise InputError(f"{shown(wrong)} is no character that UTF-8 has bytes for") from None
    if tokenizer is None:
        return np.frombuffer(encoded, np.uint8).astype(np.int32)
    loaded = load_tokenizer(tokenizer)
    loaded.check_known(text)
    return loaded.encode([text])


def decode(tokens: np.ndarray, tokenizer: str | None = None) -> str:
    """The text of tokens.

    Args:
        tokens: [n] integers below the vocabulary.
        tokenizer: path of a Hugging Face ``tokenizer.json``; None where they are bytes.

    Returns:
        The text. Bytes that are not UTF-8, such as those of a character that was cut, are
        replaced by U+FFFD.

    Raises:
        InputError: the tokenizer cannot decode them.

    Example:
        >>> decode(np.array([110, 195, 169]))
        'né'
    """
    if tokenizer is None:
        return tokens.astype(np.uint8).tobytes().decode(errors="replace")
    return load_tokenizer(tokenizer).decode(tokens)
