"""A Hugging Face tokenizer, checked: every id that it gives is below its vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hetjax.checked_files import parse_json
from hetjax.errors import InputError, shown
from hetjax.limits import MAX_VOCABULARY
from hetjax.reading import MAX_MADE_BYTES, read_text

if TYPE_CHECKING:
    import tokenizers  # An extra, which not every installation has.

T = TypeVar("T")

_NO_TOKEN = "hetjax: no token"
"""What models are told that their unknown token is called which have none."""


@dataclass(frozen=True)
class CheckedTokenizer:
    """A tokenizer and its vocabulary.

    Args:
        path: its file.
        vocabulary: one more than its largest id. Where ids have holes, that is more than it has
            tokens.
        unknown: the id of all that it does not know; None where it has none, and refuses it.
    """

    path: str
    vocabulary: int
    unknown: int | None
    _tokenizer: tokenizers.Tokenizer

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """The tokens of texts, one text after another; none is cut, padded or marked.

        Args:
            texts: the texts.

        Returns:
            [n] int32, each below the vocabulary.

        Raises:
            InputError: it cannot encode a text, or has no token for a piece and none for the
                unknown.
        """
        found = [np.array(one.ids, np.int64) for one in self._encoded(texts)]
        tokens = np.concatenate([np.zeros(0, np.int64), *found])
        if len(tokens) and tokens.max() >= self.vocabulary:
            raise InputError(
                f"tokenizer {self.path!r} gives the id {tokens.max()}, which is none of its "
                f"vocabulary's; its largest is {self.vocabulary - 1}"
            )
        return tokens.astype(np.int32)

    def check_known(self, text: str) -> None:
        """Check that every piece of a text has a token of its own.

        Args:
            text: the text.

        Raises:
            InputError: a piece has none; it is named.
        """
        (encoded,) = self._encoded([text])
        for token, (start, stop) in zip(encoded.ids, encoded.offsets, strict=True):
            if token == self.unknown:
                raise InputError(
                    f"tokenizer {self.path!r} does not know {shown(text[start:stop])}, of which "
                    f"it makes {self._tokenizer.id_to_token(token)!r}"
                )

    def decode(self, tokens: np.ndarray) -> str:
        """The text of tokens.

        Args:
            tokens: [n] integers below the vocabulary.

        Returns:
            The text; ids that are no token's have none.

        Raises:
            InputError: it cannot decode them.
        """
        return _asked(
            lambda: self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False),
            f"tokenizer {self.path!r} cannot decode tokens",
        )

    def _encoded(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        try:
            return _asked(
                lambda: self._tokenizer.encode_batch(list(texts), add_special_tokens=False),
                f"tokenizer {self.path!r} cannot encode the text",
            )
        except InputError as error:
            if _NO_TOKEN not in str(error):
                raise
        lost = shown(self._shortest_lost(next(filter(self._loses, texts))))
        raise InputError(
            f"tokenizer {self.path!r} has no token for {lost}, and none for what it does not know, "
            f"so it would leave that out; it must have been made of such text, or of bytes"
        )

    def _loses(self, text: str) -> bool:
        """Whether the model has no tokens for all of a text."""
        try:
            self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:
            return _NO_TOKEN in str(error)
        return False

    def _shortest_lost(self, text: str) -> str:
        """A piece of a text that the model has no token for."""
        while len(text) > 1:
            halves = text[: len(text) // 2], text[len(text) // 2 :]
            shorter = next(filter(self._loses, halves), None)
            if shorter is None:
                break
            text = shorter
        return text


@functools.lru_cache(maxsize=4)
def load_tokenizer(path: str) -> CheckedTokenizer:
    """Reads a tokenizer.

    Args:
        path: a ``tokenizer.json``.

    Returns:
        The tokenizer.

    Raises:
        InputError: the file cannot be read, is no ``tokenizer.json``, has no tokens, or ids that
            are too large.
    """
    import tokenizers

    subject = f"tokenizer {path!r}"
    text = read_text(path, subject, MAX_MADE_BYTES)
    content = parse_json(text, f"{subject} is not a tokenizer.json: the file")
    tokenizer = _asked(
        lambda: tokenizers.Tokenizer.from_str(text), f"{subject} is not a tokenizer.json"
    )
    # A file may say how its model was fed; here it would cut each document, or fill it up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = tokenizer.get_vocab(with_added_tokens=True)
    if not ids:
        raise InputError(f"{subject} has no tokens")
    last = max(ids, key=lambda token: ids[token])
    if ids[last] >= MAX_VOCABULARY:
        raise InputError(
            f"{subject} has the id {ids[last]} for the token {shown(last)}; ids must be below "
            f"{MAX_VOCABULARY}"
        )
    return CheckedTokenizer(path, ids[last] + 1, _unknown(tokenizer, content), tokenizer)


def _unknown(tokenizer: tokenizers.Tokenizer, content: Any) -> int | None:
    """The id of a model's unknown token. One that leaves out what it does not know gets none."""
    import tokenizers

    model = tokenizer.model
    if isinstance(model, tokenizers.models.Unigram):
        return content["model"].get("unk_id")
    if isinstance(model, tokenizers.models.BPE) and model.unk_token is None:
        model.unk_token = _NO_TOKEN  # Not in the vocabulary: what would be left out is an error.
    return model.token_to_id(model.unk_token)


def _asked(question: Callable[[], T], subject: str) -> T:
    """What the package answers; whatever it raises is a sentence."""
    try:
        return question()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # Bare exceptions, and panics, which are not even these.
        raise InputError(f"{subject}: {' '.join(str(error).split())}") from None
