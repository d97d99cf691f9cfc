"""The reference models, in Flax NNX: GPT, Llama, ViT, VGG and ResNet, with named recipes."""

from hetjax.models.generation import generate
from hetjax.models.gpt import GPT, GPTConfig
from hetjax.models.image_model import ImageConfig, ImageModel, image_model
from hetjax.models.language_model import Batch, LanguageModel, language_model
from hetjax.models.llama import Llama, LlamaConfig
from hetjax.models.model import Model, ModelConfig, model_of
from hetjax.models.recipes import RECIPES, recipe
from hetjax.models.resnet import ResNet, ResNetConfig
from hetjax.models.vgg import VGG, VGGConfig
from hetjax.models.vit import ViT, ViTConfig

__all__ = [
    "GPT",
    "RECIPES",
    "VGG",
    "Batch",
    "GPTConfig",
    "ImageConfig",
    "ImageModel",
    "LanguageModel",
    "Llama",
    "LlamaConfig",
    "Model",
    "ModelConfig",
    "ResNet",
    "ResNetConfig",
    "VGGConfig",
    "ViT",
    "ViTConfig",
    "generate",
    "image_model",
    "language_model",
    "model_of",
    "recipe",
]
