"""Named model sizes: the quick start's, the benchmarks', and those that papers measure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hetjax.errors import InputError, unknown_name
from hetjax.models.gpt import GPTConfig
from hetjax.models.llama import LlamaConfig
from hetjax.models.model import ModelConfig
from hetjax.models.resnet import ResNetConfig
from hetjax.models.vgg import VGGConfig
from hetjax.models.vit import ViTConfig

_IMAGENET: dict[str, Any] = {"classes": 1000, "image_size": 224}


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


def _vit(patch_size: int, blocks: int, width: int, heads: int) -> ViTConfig:
    """Source: ViT (Dosovitskiy et al., 2021, arXiv:2010.11929), table 1."""
    return ViTConfig(
        **_IMAGENET,
        patch_size=patch_size,
        blocks=blocks,
        width=width,
        heads=heads,
        ffn_width=4 * width,
    )


def _vgg(*groups: int) -> VGGConfig:
    """Source: VGG (Simonyan and Zisserman, 2015, arXiv:1409.1556), table 1."""
    return VGGConfig(**_IMAGENET, groups=groups)


def _resnet(*groups: int) -> ResNetConfig:
    """Source: ResNet (He et al., 2016, arXiv:1512.03385), table 1."""
    return ResNetConfig(**_IMAGENET, groups=groups)


RECIPES: Mapping[str, ModelConfig] = MappingProxyType(
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
        "vit-quickstart": ViTConfig(
            classes=8, image_size=32, patch_size=8, blocks=4, width=64, heads=4, ffn_width=256
        ),
        "resnet-quickstart": ResNetConfig(classes=8, image_size=32, groups=(2, 2), width=16),
        "vit-base": _vit(16, 12, 768, 12),
        "vit-large": _vit(16, 24, 1024, 16),
        "vit-huge": _vit(14, 32, 1280, 16),
        "vgg-16": _vgg(2, 2, 3, 3, 3),
        "vgg-19": _vgg(2, 2, 4, 4, 4),
        "resnet-50": _resnet(3, 4, 6, 3),
        "resnet-101": _resnet(3, 4, 23, 3),
        "resnet-152": _resnet(3, 8, 36, 3),
    }
)
"""Every recipe by name. Language models of a billion parameters and more compute in bfloat16."""


def recipe(name: str, **overrides: Any) -> ModelConfig:
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
