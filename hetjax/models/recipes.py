"""Named model sizes: the quick start's, the benchmarks', and those that papers measure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hetjax.errors import InputError, unknown_name
from hetjax.models.gpt import GPTConfig
from hetjax.models.llama import LlamaConfig


def _gpt2(blocks: int, width: int, heads: int) -> GPTConfig:
    """Source: GPT-2 (Radford et al., 2019), table 2."""
    return GPTConfig(vocabulary=50257, blocks=blocks, width=width, heads=heads, sequence=1024)


def _alpa(blocks: int, width: int, heads: int) -> GPTConfig:
    """Source: Alpa (Zheng et al., 2022, arXiv:2201.12023), table 5; Harp, section 6.1."""
    return GPTConfig(
        vocabulary=51200,
        blocks=blocks,
        width=width,
        heads=heads,
        sequence=1024,
        tied_embeddings=False,
        compute_dtype="bfloat16",
    )


def _llama(
    blocks: int,
    width: int,
    heads: int,
    ffn_width: int,
    *,
    key_value_heads: int | None = None,
    vocabulary: int = 32000,
) -> LlamaConfig:
    """Source: Llama 2 (Touvron et al., 2023, arXiv:2307.09288), section 2.2."""
    return LlamaConfig(
        vocabulary=vocabulary,
        blocks=blocks,
        width=width,
        heads=heads,
        key_value_heads=key_value_heads or heads,
        ffn_width=ffn_width,
        sequence=4096,
        compute_dtype="bfloat16",
    )


RECIPES: Mapping[str, GPTConfig | LlamaConfig] = MappingProxyType(
    {
        "gpt-quickstart": GPTConfig(vocabulary=256, blocks=4, width=192, heads=6, sequence=128),
        "moe-quickstart": GPTConfig(
            vocabulary=256, blocks=4, width=128, heads=4, sequence=128, experts=4
        ),
        "gpt-bench": GPTConfig(
            vocabulary=1024, blocks=8, width=256, heads=4, sequence=128, tied_embeddings=False
        ),
        "gpt2-small": _gpt2(12, 768, 12),
        "gpt2-medium": _gpt2(24, 1024, 16),
        "gpt2-large": _gpt2(36, 1280, 20),
        "gpt2-xl": _gpt2(48, 1600, 25),
        "gpt-1.3b": _alpa(24, 2048, 32),
        "gpt-2.6b": _alpa(32, 2560, 32),
        "gpt-6.7b": _alpa(32, 4096, 32),
        "gpt-15b": _alpa(48, 5120, 40),
        "gpt-26b": _alpa(48, 6656, 52),
        "gpt-39b": _alpa(48, 8192, 64),
        "llama-tiny": LlamaConfig(
            vocabulary=256,
            blocks=4,
            width=192,
            heads=6,
            key_value_heads=2,
            ffn_width=512,
            sequence=128,
        ),
        "llama-7b": _llama(32, 4096, 32, 11008),
        "llama-13b": _llama(40, 5120, 40, 13824),
        # Hetu's 32B model, which is no published Llama.
        "llama-32b": _llama(60, 6656, 64, 17920, vocabulary=30592),
        "llama-70b": _llama(80, 8192, 64, 28672, key_value_heads=8),
    }
)
"""Every recipe by name. From a billion parameters up they compute in bfloat16."""


def recipe(name: str, **overrides: Any) -> GPTConfig | LlamaConfig:
    """A named configuration, with some of its fields changed.

    Args:
        name: one of `RECIPES`.
        overrides: fields of the configuration and their values.

    Returns:
        The configuration.

    Raises:
        InputError: if there is no such recipe or field, or a value is not allowed.

    Example:
        >>> recipe("gpt-quickstart", blocks=2).blocks
        2
    """
    if name not in RECIPES:
        raise InputError(unknown_name("model recipe", name, RECIPES))
    config = RECIPES[name]
    fields = [field.name for field in dataclasses.fields(config)]
    for override in overrides:
        if override not in fields:
            raise InputError(unknown_name(f"field of {type(config).__name__}", override, fields))
    return dataclasses.replace(config, **overrides)
