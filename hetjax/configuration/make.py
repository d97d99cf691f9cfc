"""What the settings describe: the model, its data, the optimizer, the first parameters."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import jax
import optax
from jaxtyping import PyTree

from hetjax.configuration.frozen import with_frozen
from hetjax.configuration.settings import (
    Configuration,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    TrainSettings,
)
from hetjax.data import (
    DataSet,
    ImageSet,
    images,
    mixture,
    shapes,
    standard_library_text,
    synthetic,
    text,
)
from hetjax.data.corpus import text_vocabulary
from hetjax.errors import InputError, shown, unknown_name
from hetjax.models import (
    GPTConfig,
    ImageModel,
    LanguageModel,
    LlamaConfig,
    Model,
    model_of,
    recipe,
)
from hetjax.models.checks import COMPUTE_DTYPES

Factory = Callable[..., optax.GradientTransformation]


@dataclass(frozen=True)
class Ingredients:
    """What a run is made of, besides devices and a plan for them.

    Args:
        configuration: its settings.
        model: the model.
        dataset: the data.
        optimizer: the optimizer.
    """

    configuration: Configuration
    model: Model
    dataset: DataSet | ImageSet
    optimizer: optax.GradientTransformation

    @property
    def parameters(self) -> Callable[[], PyTree]:
        """A function that makes the first parameters; other processes can have it."""
        return functools.partial(_first_parameters, self.model.init, self.configuration.train.seed)

    @property
    def parameter_shapes(self) -> PyTree:
        """Their shapes."""
        return self.model.parameter_shapes()

    @property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of a step's batch."""
        return self.model.batch_shapes(self.configuration.train.batch_size)

    @property
    def units_per_step(self) -> int:
        """How many tokens, or images, a step learns from."""
        return self.configuration.train.batch_size * self.model.units_per_example


def make_ingredients(configuration: Configuration) -> Ingredients:
    """Make what a configuration describes; no device is used.

    Args:
        configuration: the settings.

    Returns:
        The model, the data, and the optimizer, which leaves alone what is frozen.

    Raises:
        InputError: a setting cannot be met.
    """
    model = make_model(configuration.model, configuration.data)
    train = configuration.train
    optimizer = make_optimizer(configuration.optimizer, train.steps)
    if train.frozen:
        optimizer = with_frozen(optimizer, model.parameter_shapes(), train.frozen)
    dataset = make_data(configuration.data, train, model)
    return Ingredients(configuration, model, dataset, optimizer)


def make_model(settings: ModelSettings, data: DataSettings | None = None) -> Model:
    """The configured model.

    Args:
        settings: the recipe and what to change of it.
        data: whose vocabulary a language model has where it says none of its own; None for that of
            the recipe, which it also has for data that are made to its measure.

    Returns:
        The model's program.

    Raises:
        InputError: there is no such recipe, or its configuration does not allow a value.
    """
    config = recipe(settings.recipe, **settings.overrides())
    follows = isinstance(config, GPTConfig | LlamaConfig) and settings.vocabulary is None
    if follows and data is not None and data.kind in ("text", "standard_library"):
        config = dataclasses.replace(config, vocabulary=text_vocabulary(data.tokenizer))
    return model_of(config)


def make_data(settings: DataSettings, train: TrainSettings, model: Model) -> DataSet | ImageSet:
    """The configured data, read and checked.

    Args:
        settings: where the text or the images come from.
        train: the seed, the batch size, and whether held-out examples are needed.
        model: the model that reads it.

    Returns:
        The data set, with keys where the model drops out.

    Raises:
        InputError: the model reads other data, a file is not there or not as it must be, there is
            too little of it, or its tokens or labels are not among the model's.
    """
    if isinstance(model, ImageModel):
        dataset = _labelled_images(settings, train.seed, model)
    else:
        dataset = _packed_text(settings, train.seed, model)
    # Both read the data, and check it.
    _ = dataset.num_examples
    if train.evaluate_every is not None:
        dataset.held_out_batches(train.batch_size)
    return dataset


_IMAGE_KINDS = ("images", "shapes")


def _labelled_images(settings: DataSettings, seed: int, model: ImageModel) -> ImageSet:
    held_out, size = settings.held_out_fraction, model.image_size
    if settings.kind == "images":
        return images(settings.paths[0], size, model.classes, seed, held_out)
    if settings.kind != "shapes":
        raise InputError(
            f"data.kind is {settings.kind!r}, and {model.name} reads images; allowed: "
            + ", ".join(map(repr, _IMAGE_KINDS))
        )
    dataset = shapes(settings.size, size, seed, held_out)
    if dataset.source.classes > model.classes:
        raise InputError(
            f"model.classes is {model.classes}; it must be at least that of the data, which is "
            f"{dataset.source.classes}"
        )
    return dataset


def _packed_text(settings: DataSettings, seed: int, model: LanguageModel) -> DataSet:
    if settings.kind in _IMAGE_KINDS:
        raise InputError(
            f"data.kind is {settings.kind!r}, and {model.name} reads text; allowed: "
            f"'standard_library', 'text', 'synthetic'"
        )
    dataset = dataclasses.replace(_described(settings, seed, model), keys=model.needs_keys)
    if dataset.vocabulary > model.vocabulary:
        raise InputError(
            f"model.vocabulary is {model.vocabulary}; it must be at least that of the data, which "
            f"is {dataset.vocabulary}"
        )
    return dataset


def _described(settings: DataSettings, seed: int, model: LanguageModel) -> DataSet:
    held_out, tokenizer = settings.held_out_fraction, settings.tokenizer
    if settings.kind == "synthetic":
        return synthetic(model.vocabulary, model.sequence, settings.size, seed, held_out)
    if settings.kind == "standard_library":
        return standard_library_text(model.sequence, seed, held_out, tokenizer)
    if settings.weights is None:
        return text(settings.paths, model.sequence, seed, held_out, tokenizer)
    _check_paths(settings.paths)
    parts = [text(path, model.sequence, seed, held_out, tokenizer) for path in settings.paths]
    return mixture(dict(zip(parts, settings.weights, strict=True)), seed)


def _check_paths(paths: Sequence[str]) -> None:
    """Refuses a path that is named twice: each of them would have a weight of its own."""
    twice = [path for path, count in Counter(paths).items() if count > 1]
    if twice:
        raise InputError(f"data.paths names {twice[0]!r} twice; with data.weights each stands once")


def _first_parameters(init: Callable[[jax.Array], PyTree], seed: int) -> PyTree:
    return init(jax.random.key(seed))


def make_optimizer(settings: OptimizerSettings, steps: int) -> optax.GradientTransformation:
    """The configured optimizer.

    Args:
        settings: its name, learning rate and options.
        steps: training steps of the whole run, over which the learning rate falls.

    Returns:
        The Optax transformation: clipping, where it is asked for, then the optimizer.

    Raises:
        InputError: Optax has no such optimizer, or the optimizer no such option.

    Example:
        >>> import jax.numpy as jnp
        >>> sgd = make_optimizer(OptimizerSettings(name="sgd", learning_rate=0.5), steps=10)
        >>> updates, _ = sgd.update(jnp.ones(2), sgd.init(jnp.ones(2)))
        >>> updates.tolist()
        [-0.5, -0.5]
    """
    factories = optimizer_factories()
    if settings.name not in factories:
        raise InputError(unknown_name("optimizer.name", settings.name, factories))
    factory = factories[settings.name]
    options = dict(settings.options)
    if settings.weight_decay is not None:
        options["weight_decay"] = settings.weight_decay
    parameters = inspect.signature(factory).parameters
    known = [name for name in parameters if name != "learning_rate"]
    for option, value in options.items():
        if option not in known:
            raise InputError(unknown_name(f"option of optimizer {settings.name}", option, known))
        _check_option(value, parameters[option])
    rates = learning_rates(settings, steps)
    if callable(rates) and "Callable" not in str(parameters["learning_rate"].annotation):
        raise InputError(
            f"optimizer.name is {settings.name!r}, whose learning rate is always the same, and "
            f"optimizer.schedule is {settings.schedule!r} with optimizer.warmup_steps = "
            f"{settings.warmup_steps}; allowed: 'constant' with 0"
        )
    try:
        optimizer = factory(learning_rate=rates, **options)
    except Exception as error:  # Optax raises what its arithmetic does.
        problem = shown(" ".join(str(error).split()), 200)
        raise InputError(f"optimizer.options is {shown(settings.options)}: {problem}") from None
    if settings.clip_norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(settings.clip_norm), optimizer)


def _check_option(value: object, parameter: inspect.Parameter) -> None:
    """Checks that an option is of the kind of its default; Optax finds out in the first step."""
    default, may_lack = parameter.default, re.search("None|Optional", str(parameter.annotation))
    if value is None and (may_lack or default is None):
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if "dtype" in parameter.name:
        fits, what = value in COMPUTE_DTYPES, ", ".join(map(repr, COMPUTE_DTYPES))
    elif isinstance(default, bool):
        fits, what = isinstance(value, bool), "True or False"
    elif isinstance(default, int | float):
        fits, what = is_number, f"a number, such as {default!r}"
    elif default is None:
        fits, what = is_number or isinstance(value, bool), "a number or None"
    else:
        fits = isinstance(value, list | tuple | type(default))
        what = f"like its default, {default!r}"
    if not fits:
        name = f"optimizer.options[{parameter.name!r}]"
        raise InputError(f"{name} is {shown(value)}; it must be {what}")


@functools.cache
def optimizer_factories() -> Mapping[str, Factory]:
    """Optax's optimizers that need no more than a learning rate, by name."""
    found: dict[str, Factory] = {}
    for name in dir(optax):
        member = getattr(optax, name)
        if inspect.isfunction(member) and not name.startswith("scale_by_"):
            needed = [
                each.name
                for each in inspect.signature(member).parameters.values()
                if each.default is each.empty and each.kind is not each.VAR_KEYWORD
            ]
            if needed == ["learning_rate"]:
                found[name] = member
    return MappingProxyType(found)


def learning_rates(settings: OptimizerSettings, steps: int) -> float | optax.Schedule:
    """The learning rate, by the step where it changes.

    Args:
        settings: the highest rate, the warm-up steps and how it goes on.
        steps: training steps of the whole run.

    Returns:
        A number where it is always the same, else an Optax schedule.
    """
    peak, warmup = settings.learning_rate, settings.warmup_steps
    final = peak * settings.final_fraction
    # A run may be cut short by fewer steps than its warm-up has.
    left = max(1, steps - warmup)
    if settings.schedule == "constant":
        after: optax.Schedule = optax.constant_schedule(peak)
    elif settings.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, left, settings.final_fraction)
    else:
        after = optax.linear_schedule(peak, final, left)
    if warmup:
        # Not from 0: the first step should count.
        rising = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
        return optax.join_schedules([rising, after], [warmup])
    return peak if settings.schedule == "constant" else after
