"""Any model: its configuration, and the program that the trainer takes."""

from __future__ import annotations

from hetjax.models.gpt import GPTConfig
from hetjax.models.image_model import ImageConfig, ImageModel, image_model
from hetjax.models.language_model import LanguageModel, language_model
from hetjax.models.llama import LlamaConfig

ModelConfig = GPTConfig | LlamaConfig | ImageConfig
"""The shape of any model."""

Model = LanguageModel | ImageModel
"""The program of any model; both kinds have what a run needs of them under the same names."""


def model_of(config: ModelConfig) -> Model:
    """The program of a configured model.

    Args:
        config: of any model.

    Returns:
        The model's program. It can be sent to other processes.

    Example:
        >>> from hetjax.models import recipe
        >>> model_of(recipe("resnet-50")).num_parameters()
        25557032
    """
    if isinstance(config, GPTConfig | LlamaConfig):
        return language_model(config)
    return image_model(config)
