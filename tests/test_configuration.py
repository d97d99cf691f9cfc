import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from hetjax.configuration import (
    Configuration,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    PlannerSettings,
    TrainSettings,
    changes,
    make_configuration,
    read_configuration,
    settings,
    settings_help,
    write_configuration,
)
from hetjax.configuration.make import (
    learning_rates,
    make_data,
    make_ingredients,
    make_model,
    make_optimizer,
    optimizer_factories,
)
from hetjax.data import DataSet
from hetjax.errors import InputError
from hetjax.models import (
    GPTConfig,
    LanguageModel,
    LlamaConfig,
    ResNetConfig,
    VGGConfig,
    ViTConfig,
)
from hetjax.pipeline.schedules.schedule import SCHEDULES

CONFIGS = Path(__file__).parent.parent / "configs"
TINY = ModelSettings(blocks=1, width=8, heads=2, sequence=4)


def test_later_bindings_win_and_macros_are_filled_in(tmp_path: Path) -> None:
    (tmp_path / "base.gin").write_text("train.steps = 5\ntrain.seed = 3\n")
    (tmp_path / "run.gin").write_text(
        'include "base.gin"\nRATE = 1e-2  # a macro\ntrain:\n  steps = 7\n'
        "optimizer.learning_rate = %RATE\n"
    )
    read = read_configuration(tmp_path / "run.gin", ["train.batch_size = 8"])
    assert (read.train.steps, read.train.seed, read.train.batch_size) == (7, 3, 8)
    assert read.optimizer.learning_rate == 1e-2
    overridden = read_configuration(tmp_path / "run.gin", ["RATE = 0.5", "train.steps = 9"])
    assert (overridden.train.steps, overridden.optimizer.learning_rate) == (9, 0.5)


def test_paths_are_looked_up_beside_their_file_then_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("configs/here.yaml", "work/there.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    file = tmp_path / "configs" / "run.gin"
    file.write_text(
        'cluster.file = "here.yaml"\ndata.kind = "text"\n'
        'data.paths = ["there.txt", "nowhere.txt"]\n'
    )
    monkeypatch.chdir(tmp_path / "work")
    read = read_configuration(file)
    assert read.cluster.file == str(tmp_path / "configs" / "here.yaml")
    assert read.data.paths == (str(tmp_path / "work" / "there.txt"), "nowhere.txt")


@pytest.mark.parametrize(
    ("binding", "pieces"),
    [
        ("train.stepz = 1", ["'train.stepz'", "did you mean 'train.steps'?"]),
        ("steps = 1", ["there is no setting 'steps'", "'train.steps'"]),
        ("flying.circus = 1", ["no setting 'flying.circus'", "--help"]),
        ("train.steps = 0", ["train.steps is 0", "greater than or equal to 1"]),
        ("train.steps = 2.5", ["train.steps is 2.5", "integer"]),
        ("train.steps = True", ["train.steps is True", "integer"]),
        ("train.steps = '3'", ["train.steps is '3'", "integer"]),
        ("train.microbatches = 5", ["train.batch_size is 16", "train.microbatches = 5", "1, 2, 4"]),
        ("runtime.name = 'rai'", ["runtime.name 'rai'", "did you mean 'ray'?", "local, ray"]),
        ("runtime.name = ray", ["'runtime.name = ray'", "in quotes"]),
        ("runtime.name", ["name = value"]),
        ("planner.schedule = '1fb1'", ["planner.schedule '1fb1'", "did you mean '1f1b'?"]),
        ("train.beside = '1fb1'", ["train.beside '1fb1'", "did you mean '1f1b'?"]),
        ("runtime.carrier = 'world'", ["runtime.carrier 'world'", "Allowed: host, stream, wire"]),
        ("data.kind = 'text'", ["data.paths is empty"]),
        ("data.paths = 'a.txt'", ["data.kind", "'text'"]),
        ("data.paths = ['a.txt', 3]", ["data.paths[1] is 3"]),
        ("data.kind = 'images'", ["data.paths has 0 entries", "one folder"]),
        ("model.groups = (3, 'a')", ["model.groups[1] is 'a'"]),
        ("data.held_out_fraction = 1.0", ["data.held_out_fraction is 1.0", "less than 1"]),
        ("optimizer.options = [1]", ["optimizer.options is [1]"]),
        ("optimizer.options = {1: 2}", ["optimizer.options has the key 1; keys must be texts"]),
        ("train.steps = (1,", ["multi-line"]),
        ("train.steps = %MANY", ["%MANY has no value"]),
        ("train.steps = @many", ["@many is not allowed"]),
        ("scope/train.steps = 1", ["no scopes"]),
        ("import os", ["import is not allowed"]),
        ("include 'nowhere.gin'", ["nowhere.gin", "cannot be read"]),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(binding: str, pieces: list[str]) -> None:
    with pytest.raises(InputError) as error:
        read_configuration(None, [binding])
    assert all(piece in str(error.value) for piece in pieces), str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_offered_is_allowed() -> None:
    with pytest.raises(InputError, match=r"does not divide; allowed for this batch: 1$"):
        read_configuration(None, ["train.batch_size = 999983", "train.microbatches = 7"])


def test_a_wrong_writer_is_refused_before_anything_heavy_is_imported() -> None:
    program = (
        "import sys; from hetjax.configuration.settings import make_configuration\n"
        "try: make_configuration({'train': {'writers': ['wandbs']}})\n"
        "except ValueError as error: print(error)\n"
        "print([name for name in ('jax', 'matplotlib', 'rich') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
    assert "did you mean 'wandb'?" in printed
    assert printed.endswith("[]\n")


def test_a_cluster_is_measured_or_written() -> None:
    with pytest.raises(InputError, match=r"cluster\.measure is True and cluster\.file is 'a"):
        read_configuration(None, ["cluster.measure = True", "cluster.file = 'a.yaml'"])
    assert read_configuration(None, ["cluster.measure = True"]).cluster.measure


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train.steps = 20\n\ntrain.steps = 30", "line 3: train.steps is given twice"),
        ("train:\n  steps = 20\n  steps = 30\n", "line 3: train.steps is given twice"),
        ("few = 2\nfew = 3\ntrain.steps = %few", "line 2: few is given twice"),
        ("optimizer.options = {'b2': 0.9,\n'b' \"2\": 0.5}", "line 2: the key 'b2' is given twice"),
        ("optimizer.options = {'a': [{'b': 1, 'b': 2}]}", "line 1: the key 'b' is given twice"),
    ],
)
def test_what_is_given_twice_in_one_file_is_refused(
    text: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "twice.gin"
    file.write_text(text)
    with pytest.raises(InputError) as error:
        read_configuration(file)
    assert str(error.value) == f"{file}, {message}"


def test_a_key_may_be_a_value_and_a_key_of_another_mapping() -> None:
    options = {"b1": {"b2": 1, "b1": "b2"}, "b2": [{"b2": "b1"}, {"b2": "b1"}]}
    found = read_configuration(bindings=[f"optimizer.options = {options!r}"])
    assert found.optimizer.options == options


def test_errors_name_the_file_and_the_line(tmp_path: Path) -> None:
    file = tmp_path / "run.gin"
    file.write_text("train.steps = 5\n\ntrain.sed = 1\n")
    with pytest.raises(InputError, match=r"run\.gin, line 3: .* did you mean 'train\.seed'"):
        read_configuration(file)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_configuration(tmp_path / "nowhere.gin")
    file.write_bytes(b"# \xff\n")
    with pytest.raises(InputError, match="not UTF-8"):
        read_configuration(file)
    file.write_text('include "run.gin"\n')
    with pytest.raises(InputError, match="includes itself"):
        read_configuration(file)


@given(
    steps=st.integers(1, 10**6),
    rate=st.floats(0, 10),
    options=st.dictionaries(st.text(max_size=5), st.floats(0, 1) | st.booleans() | st.none()),
    recipe=st.text(max_size=20),
    weights=st.lists(st.floats(0, 1), min_size=2, max_size=2),
)
def test_a_written_configuration_reads_back_equal(
    steps: int, rate: float, options: dict[str, object], recipe: str, weights: list[float]
) -> None:
    configuration = make_configuration(
        {
            "train": {"steps": steps},
            "optimizer": {"learning_rate": rate, "options": options},
            "model": {"recipe": recipe},
            "data": {"kind": "text", "paths": ["/no/a 'b'", '/no/"c"'], "weights": weights},
        }
    )
    assert read_configuration(None, [write_configuration(configuration)]) == configuration


def test_a_configuration_that_could_not_be_read_back_is_not_written() -> None:
    paths = [f"/a/long/folder/{number:045}" for number in range(4500)]
    message = r"the settings have \d{6} bytes .* at most 262144 .* shorten data.paths, the longest"
    with pytest.raises(InputError, match=message):
        write_configuration(make_configuration({"data": {"kind": "text", "paths": paths}}))


def test_changes_name_old_and_new() -> None:
    old, new = Configuration(), make_configuration({"train": {"steps": 7}})
    assert list(changes(old, new)) == ["train.steps = 7 (was 300)"]


def test_help_has_every_setting_with_its_default() -> None:
    text = settings_help()
    for name, value in settings(Configuration()):
        assert f"  {name} = {value!r}" in text


def test_names_agree_with_what_they_configure() -> None:
    configs = (GPTConfig, LlamaConfig, ViTConfig, VGGConfig, ResNetConfig)
    fields = {f.name for config in configs for f in dataclasses.fields(config)}
    assert {"recipe", *fields} == set(ModelSettings.model_fields)
    assert get_args(PlannerSettings.model_fields["schedule"].annotation) == SCHEDULES


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.gin")), ids=lambda file: file.stem)
def test_the_recipes_that_come_along_can_be_read(file: Path) -> None:
    configuration = read_configuration(file)
    assert configuration.cluster.file is None or Path(configuration.cluster.file).is_absolute()
    make_model(configuration.model)
    make_optimizer(configuration.optimizer, configuration.train.steps)


def test_the_model_is_the_recipe_with_its_overrides() -> None:
    model = make_model(ModelSettings(recipe="llama-tiny", blocks=2, sequence=16))
    assert isinstance(model, LanguageModel)
    assert (model.name, model.sequence) == ("llama-2x192", 16)
    with pytest.raises(InputError, match="dropout"):
        make_model(ModelSettings(recipe="llama-tiny", dropout=0.1))


def test_data_has_keys_where_the_model_drops_out() -> None:
    configuration = make_configuration(
        {"model": {**TINY.overrides(), "dropout": 0.1}, "data": {"kind": "synthetic", "size": 100}}
    )
    ingredients = make_ingredients(configuration)
    batch = ingredients.dataset.batch(0, configuration.train.batch_size)
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in batch.items()} == {
        name: (leaf.shape, leaf.dtype) for name, leaf in ingredients.batch.items()
    }
    assert set(batch) == {"tokens", "keys"}


def test_data_is_checked_before_the_run(tmp_path: Path) -> None:
    model, train = make_model(TINY), TrainSettings(evaluate_every=1)
    with pytest.raises(InputError, match=r"model\.vocabulary is 100.*256"):
        make_data(DataSettings(), train, make_model(ModelSettings(vocabulary=100)))
    synthetic = DataSettings(kind="synthetic", size=100, held_out_fraction=0.0)
    with pytest.raises(InputError, match="held_out_fraction"):
        make_data(synthetic, train, model)
    (tmp_path / "a.txt").write_text("words " * 50)
    (tmp_path / "b.txt").write_text("and more " * 50)
    paths = (str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))
    data = make_data(DataSettings(kind="text", paths=paths, weights=(0.5, 1.5)), train, model)
    assert isinstance(data, DataSet)
    assert [part.weight for part in data.parts] == [0.5, 1.5]


def test_images_are_for_image_models(tmp_path: Path) -> None:
    train = TrainSettings(evaluate_every=1)
    text, images = make_model(TINY), make_model(ModelSettings(recipe="resnet-quickstart"))
    with pytest.raises(InputError, match=r"data\.kind is 'standard_library', and resnet-14 reads"):
        make_data(DataSettings(), train, images)
    with pytest.raises(InputError, match=r"data\.kind is 'shapes', and gpt-1x8 reads text"):
        make_data(DataSettings(kind="shapes"), train, text)
    few = make_model(ModelSettings(recipe="resnet-quickstart", classes=7, groups=(1, 1)))
    with pytest.raises(InputError, match=r"model\.classes is 7; .* which is 8"):
        make_data(DataSettings(kind="shapes", size=100), train, few)
    with pytest.raises(InputError, match=r"images\.npy cannot be read"):
        make_data(DataSettings(kind="images", paths=(str(tmp_path),)), train, images)
    np.save(tmp_path / "images.npy", np.zeros((40, 32, 32, 3), np.uint8))
    np.save(tmp_path / "labels.npy", np.arange(40) % 8)
    data = make_data(DataSettings(kind="images", paths=(str(tmp_path),)), train, images)
    assert (data.num_examples, data.num_held_out_examples) == (38, 2)


@pytest.mark.parametrize(
    "setting",
    [{"tokenizer": "tokenizer.json"}, {"kind": "images", "paths": ("a",), "weights": (1.0,)}],
    ids=["tokenizer", "weights"],
)
def test_settings_of_other_data_are_refused(setting: dict[str, Any]) -> None:
    given_settings = {"kind": "synthetic", **setting}
    with pytest.raises(InputError, match=r"data\.(tokenizer|weights) is given, and data\.kind is"):
        make_configuration({"data": given_settings})


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_learning_rates_rise_then_follow_their_schedule(schedule: str) -> None:
    given_settings = make_configuration(
        {"optimizer": {"learning_rate": 2.0, "warmup_steps": 4, "schedule": schedule}}
    ).optimizer
    rates = learning_rates(given_settings, steps=20)
    assert callable(rates)
    values = [float(jnp.asarray(rates(step))) for step in range(21)]
    assert values[0] > 0
    assert values[4] == pytest.approx(2.0)
    assert values[:5] == sorted(values[:5])
    assert values[20] == pytest.approx(2.0 if schedule == "constant" else 0.2)


def test_a_warm_up_longer_than_the_run_is_no_error() -> None:
    cosine = OptimizerSettings(schedule="cosine", warmup_steps=20)
    assert callable(learning_rates(cosine, steps=5))


def test_optimizers_are_those_of_optax() -> None:
    assert {"adamw", "sgd", "lion"} <= set(optimizer_factories())
    sgd = make_optimizer(OptimizerSettings(name="sgd", learning_rate=0.5, clip_norm=1.0), 10)
    updates, _ = sgd.update(jnp.full(4, 3.0), sgd.init(jnp.zeros(4)))
    np.testing.assert_allclose(jnp.asarray(updates), -0.25 * np.ones(4), rtol=1e-6)
    with pytest.raises(InputError, match=r"optimizer\.name 'adamx'; did you mean"):
        make_optimizer(OptimizerSettings(name="adamx"), 10)
    with pytest.raises(InputError, match=r"'rprop', whose learning rate is always the same"):
        make_optimizer(OptimizerSettings(name="rprop", schedule="cosine"), 10)
    make_optimizer(OptimizerSettings(name="rprop", schedule="constant", warmup_steps=0), 10)
    with pytest.raises(InputError, match=r"option of optimizer sgd 'weight_decay'"):
        make_optimizer(OptimizerSettings(name="sgd", weight_decay=0.1), 10)


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("optimizer.learning_rate = 1e999", r"optimizer\.learning_rate is inf; .* finite"),
        ("optimizer.clip_norm = 1e999", r"optimizer\.clip_norm is inf; .* finite"),
        ("data.weights = [1e999]", r"data\.weights\[0\] is inf; .* finite"),
        ("optimizer.options = {'b1': 1e999}", r"optimizer\.options\['b1'\] is inf; .* finite"),
        ("model.rope_base = 1e999", r"model\.rope_base is inf; .* finite"),
        ("train.batch_size = 10000000000", r"train\.batch_size is 10000000000; .* 1048576"),
        ("model.blocks = 1000000000", r"model\.blocks is 1000000000; .* 4096"),
        ("data.size = 1000000000000", r"data\.size is 1000000000000; .* 100000000"),
        ("runtime.deadline = 1e300", r"runtime\.deadline is 1e\+300; .* 10000000"),
        ("runtime.cores = [-1]", r"runtime\.cores\[0\] is -1"),
    ],
)
def test_what_has_no_end_is_refused(binding: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_configuration(None, [binding])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": "1"}, r"optimizer\.options\['eps'\] is '1'; it must be a number, such as 1e-08"),
        ({"nesterov": 1}, r"optimizer\.options\['nesterov'\] is 1; it must be True or False"),
        ({"b1": True}, r"optimizer\.options\['b1'\] is True; it must be a number"),
        ({"mu_dtype": "float33"}, r"optimizer\.options\['mu_dtype'\] is 'float33'; .*'bfloat16'"),
        ({"mask": [1]}, r"optimizer\.options\['mask'\] is \[1\]; it must be a number or None"),
    ],
)
def test_options_are_of_the_kind_of_their_defaults(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_optimizer(OptimizerSettings(options=options), 10)


def test_the_vocabulary_follows_the_data_where_it_is_not_said(tmp_path: Path) -> None:
    words = tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "import": 9}, unk_token="[UNK]")
    path = tmp_path / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))

    def vocabulary(**data: Any) -> int:
        model = {"recipe": "gpt-bench", **TINY.overrides()}
        made = make_ingredients(make_configuration({"model": model, "data": data})).model
        assert isinstance(made, LanguageModel)
        return made.vocabulary

    assert vocabulary() == 256
    assert vocabulary(tokenizer=str(path)) == 10
    assert vocabulary(kind="synthetic", size=1000) == 1024
    configuration = make_configuration(
        {"model": {**TINY.overrides(), "vocabulary": 9}, "data": {"tokenizer": str(path)}}
    )
    with pytest.raises(InputError, match=r"model\.vocabulary is 9; .* that of the data, .* is 10"):
        make_ingredients(configuration)


def test_options_may_be_what_optax_allows() -> None:
    sgd = {"momentum": None, "nesterov": True, "accumulator_dtype": "bfloat16"}
    make_optimizer(OptimizerSettings(name="sgd", options=sgd), 10)
    make_optimizer(OptimizerSettings(options={"mu_dtype": "bfloat16", "b2": 0.95}), 10)
