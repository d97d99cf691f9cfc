"""Text as tokens and back: nothing is lost without a word."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from hetjax.data import text
from hetjax.data.encoding import decode, encode
from hetjax.errors import InputError

WORDS = ["alpha ", "beta ", "gamma "]


def made_of(folder: Path, tokenizer: tokenizers.Tokenizer, **options: Any) -> str:
    """A file of pairs of characters, learned of a text without capitals or accents."""
    trainer = trainers.BpeTrainer(vocab_size=40, show_progress=False, **options)
    tokenizer.train_from_iterator(WORDS, trainer)
    path = str(folder / "tokenizer.json")
    tokenizer.save(path)
    return path


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    return made_of(tmp_path, tokenizers.Tokenizer(models.BPE()))


def test_what_has_no_token_is_refused_where_none_stands_for_it(pairs: str, tmp_path: Path):
    assert decode(encode("beta alpha", pairs), pairs).replace(" ", "") == "betaalpha"
    with pytest.raises(InputError, match=r"tokenizer\.json' has no token for 'Z', and none for"):
        encode("alpha ZÉ beta", pairs)
    (tmp_path / "a.txt").write_text("".join(WORDS * 20))
    (tmp_path / "b.txt").write_text("é".join(WORDS * 20))
    assert text(tmp_path / "a.txt", 8, tokenizer=pairs).num_examples > 0
    with pytest.raises(InputError, match="has no token for 'é'"):
        _ = text([tmp_path / "a.txt", tmp_path / "b.txt"], 8, tokenizer=pairs).num_examples


def test_half_a_character_is_not_left_out(tmp_path: Path):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = made_of(tmp_path, tokenizer, initial_alphabet=["Ã"])  # The first byte of É.
    assert decode(encode("alpha", path), path) == "alpha"
    with pytest.raises(InputError, match="has no token for 'É'"):
        encode("beta É", path)


def test_bytes_stand_for_what_has_no_token(tmp_path: Path):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    path = made_of(tmp_path, tokenizer, initial_alphabet=alphabet)
    assert decode(encode("alpha ZÉ \U0001f600", path), path) == "alpha ZÉ \U0001f600"


def test_what_is_taken_out_by_design_is_no_loss(tmp_path: Path):
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = made_of(tmp_path, tokenizer)
    assert encode("bétä  alpha", path).tolist() == encode("beta alpha", path).tolist()


def test_unknown_pieces_of_a_text_are_named(tmp_path: Path):
    path = str(tmp_path / "tokenizer.json")
    pieces = [("?", -9.0), ("a", -1.0), ("b", -2.0)]
    tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0)).save(path)
    assert encode("ab", path).tolist() == [1, 2]
    with pytest.raises(InputError, match=r"does not know 'Z', of which it makes '\?'"):
        encode("abZ", path)
