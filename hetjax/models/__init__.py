"""The reference models, in Flax NNX: GPT and Llama at any size, with named recipes."""

from hetjax.models.gpt import GPT, GPTConfig
from hetjax.models.language_model import Batch, LanguageModel, language_model
from hetjax.models.llama import Llama, LlamaConfig
from hetjax.models.recipes import RECIPES, recipe

__all__ = [
    "GPT",
    "RECIPES",
    "Batch",
    "GPTConfig",
    "LanguageModel",
    "Llama",
    "LlamaConfig",
    "language_model",
    "recipe",
]
