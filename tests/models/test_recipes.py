import dataclasses

import pytest

from hetjax.errors import InputError
from hetjax.models import RECIPES, GPTConfig, LlamaConfig, language_model, model_of, recipe


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-quickstart", 0.00185),
        ("moe-quickstart", 0.00164),
        ("gpt-bench", 0.0069),
        ("gpt2-small", 0.124),
        ("gpt2-medium", 0.355),
        ("gpt2-large", 0.774),
        ("gpt2-xl", 1.558),
        ("gpt-1.3b", 1.42),
        ("gpt-2.6b", 2.78),
        ("gpt-6.7b", 6.87),
        ("gpt-15b", 15.6),
        ("gpt-26b", 26.2),
        ("gpt-39b", 39.5),
        ("llama-tiny", 0.00167),
        ("llama-7b", 6.74),
        ("llama-13b", 13.0),
        ("llama-32b", 32.5),
        ("llama-70b", 69.0),
    ],
)
def test_a_recipe_has_the_size_in_its_name(name, billions):
    stacks = not getattr(RECIPES[name], "experts", 0)
    scanned = recipe(name, scan_blocks=stacks)  # The same parameters, traced in less time.
    assert isinstance(scanned, GPTConfig | LlamaConfig)
    assert language_model(scanned).num_parameters() / 1e9 == pytest.approx(billions, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("vit-base", 86_567_656),
        ("vit-large", 304_326_632),
        ("vgg-16", 138_357_544),
        ("vgg-19", 143_667_240),
        ("resnet-50", 25_557_032),
        ("resnet-101", 44_549_160),
        ("resnet-152", 60_192_808),
    ],
)
def test_image_models_have_the_published_number_of_parameters(name, parameters):
    assert model_of(RECIPES[name]).num_parameters() == parameters


def test_an_override_changes_one_field():
    assert recipe("gpt-bench", blocks=2) == dataclasses.replace(RECIPES["gpt-bench"], blocks=2)


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(InputError, match=r"'gpt-quikstart'; did you mean 'gpt-quickstart'\?"):
        recipe("gpt-quikstart")


def test_an_unknown_field_names_the_nearest():
    with pytest.raises(InputError, match=r"field of GPTConfig 'block'; did you mean 'blocks'\?"):
        recipe("gpt-bench", block=2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"blocks": 0}, r"GPTConfig\.blocks is 0; it must be an integer above 0"),
        ({"width": 19.2}, r"GPTConfig\.width is 19\.2"),
        ({"heads": True}, r"GPTConfig\.heads is True"),
        ({"heads": 5}, r"GPTConfig\.heads is 5; it must divide width, which is 192"),
        ({"dropout": 1.0}, r"GPTConfig\.dropout is 1\.0; it must be at least 0 and below 1"),
        ({"dropout": "no"}, r"GPTConfig\.dropout is 'no'"),
        ({"compute_dtype": "float64"}, r"compute_dtype is 'float64'; allowed: 'float32'"),
    ],
)
def test_a_bad_gpt_is_refused(override, message):
    with pytest.raises(InputError, match=message):
        recipe("gpt-quickstart", **override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"key_value_heads": 4}, r"LlamaConfig\.key_value_heads is 4; it must divide heads"),
        ({"rope_base": 0.5}, r"LlamaConfig\.rope_base is 0\.5"),
        ({"width": 18, "heads": 6}, r"LlamaConfig\.heads is 6; .* size 3, .* even"),
    ],
)
def test_a_bad_llama_is_refused(override, message):
    with pytest.raises(InputError, match=message):
        recipe("llama-tiny", **override)


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("vit-base", {"patch_size": 15}, r"ViTConfig\.patch_size is 15; it must divide image_size"),
        ("vgg-19", {"image_size": 40}, r"VGGConfig\.image_size is 40; .* a multiple of 32"),
        ("vgg-19", {"groups": ()}, r"VGGConfig\.groups is \(\); .* a tuple of integers above 0"),
        ("resnet-50", {"groups": (3, 0)}, r"ResNetConfig\.groups is \(3, 0\)"),
        ("resnet-50", {"classes": 0}, r"ResNetConfig\.classes is 0"),
        ("resnet-50", {"heads": 2}, r"unknown field of ResNetConfig 'heads'"),
    ],
)
def test_a_bad_image_model_is_refused(name, override, message):
    with pytest.raises(InputError, match=message):
        recipe(name, **override)
