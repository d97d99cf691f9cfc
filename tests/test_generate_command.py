"""``python -m hetjax.generate``: text by the checkpoints of runs, and what it refuses."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from cluster_files import TWO_AND_TWO
from compilations import counted_compilations
from tokenizers import models, pre_tokenizers

from hetjax.commands.generating import TextModel
from hetjax.configuration import read_configuration
from hetjax.configuration.make import make_ingredients
from hetjax.generate import main
from hetjax.mesh import Cluster
from hetjax.models import LanguageModel, generate
from hetjax.planner import PlanOptions, plan
from hetjax.runtime import CheckpointFolder, Trainer
from hetjax.runtime.checkpoints import checkpoint_files
from hetjax.runtime.checkpoints.manifest import Manifest

SHAPES = {
    "gpt": """
model.recipe = "gpt-quickstart"
model.blocks = 2
model.width = 16
model.heads = 2
model.dropout = 0.1
""",
    "experts": """
model.recipe = "moe-quickstart"
model.blocks = 2
model.width = 16
model.heads = 2
model.experts = 2
""",
    "llama": """
model.recipe = "llama-tiny"
model.scan_blocks = True
model.blocks = 4
model.width = 16
model.heads = 2
model.key_value_heads = 1
model.ffn_width = 32
""",
}
SETTINGS = """
cluster.file = "cluster.yaml"
model.sequence = 16
data.kind = "text"
data.paths = ["text.txt"]
train.steps = 2
train.batch_size = 4
train.microbatches = 2
optimizer.learning_rate = 1e-2
"""
TEXT = "all the cats and all the dogs and all the birds. " * 40


def write_run(folder: Path, settings: str) -> Path:
    folder.mkdir()
    (folder / "cluster.yaml").write_text(TWO_AND_TWO)
    (folder / "text.txt").write_text(TEXT)
    (folder / "config.gin").write_text(settings)
    return folder


def train(folder: Path) -> dict[int, object]:
    """Train in this process, in two stages; the trainer's parameters after each step."""
    ingredients = make_ingredients(read_configuration(folder / "config.gin"))
    model = ingredients.model
    made = plan(
        model.loss,
        ingredients.parameter_shapes,
        ingredients.batch,
        cluster=Cluster.from_file(folder / "cluster.yaml"),
        optimizer=ingredients.optimizer,
        num_microbatches=2,
        options=PlanOptions(min_stages=2, max_pipelines=1),
    )
    assert len(made.pipeline.stages) == 2
    parameters = {}
    with Trainer(
        made,
        model.loss,
        ingredients.parameters,
        ingredients.optimizer,
        ingredients.batch,
        workdir=folder,
    ) as trainer:
        for step in (1, 2):
            trainer.train_step(ingredients.dataset.batch(step, 4))
            trainer.save(wait=True)
            parameters[step] = jax.tree.map(jnp.asarray, trainer.parameters())
    return parameters


@pytest.fixture(scope="module", params=SHAPES)
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / request.param
    write_run(folder, SETTINGS + SHAPES[request.param])
    return folder, train(folder)


def model_of_run(folder: Path) -> LanguageModel:
    model = make_ingredients(read_configuration(folder / "config.gin")).model
    assert isinstance(model, LanguageModel)
    return model


def likeliest(model: LanguageModel, parameters, prompt: Sequence[int], length: int) -> list[int]:
    """The argmax of the model's own logits, one token after another.

    Experts have as many seats as the whole window needs, so theirs is filled up: with other tokens
    than the command's, which no token before them may see.
    """
    tokens, filled = list(prompt), "router" in str(jax.tree.structure(parameters))
    for _ in range(length):
        last = tokens[-model.sequence :]
        after = [77] * (model.sequence - len(last)) if filled else []
        logits = model.logits(parameters, jnp.array([last + after], jnp.int32))
        tokens.append(int(np.argmax(logits[0, len(last) - 1])))
    return tokens[len(prompt) :]


def output(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.count("\n") == 1
    return found.err


def test_at_temperature_0_it_is_the_argmax_of_the_trainers_parameters(run, capsys):
    folder, parameters = run
    model, prompt = model_of_run(folder), "all the "
    loaded, (told,) = TextModel(read_configuration(folder / "config.gin")).load(folder)
    jax.tree.map(np.testing.assert_array_equal, loaded, parameters[2])
    assert "at step 2" in told
    assert all(len(leaf.devices()) == 1 for leaf in jax.tree.leaves(loaded))
    for step in (1, 2):
        made = bytes(likeliest(model, parameters[step], prompt.encode(), 24))
        found = output(
            capsys, "--workdir", folder, "--prompt", prompt, "--length", 24,
            "--temperature", 0, "--step", step,
        )  # fmt: skip
        shown = "".join(
            c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1]
            for c in (prompt.encode() + made).decode(errors="replace")
        )
        assert found == shown + "\n"


def test_a_work_folder_may_be_named_from_where_one_is(run, capsys, monkeypatch):
    arguments = ["--prompt", "all", "--length", 3, "--temperature", 0]
    absolute = output(capsys, "--workdir", run[0], *arguments)
    monkeypatch.chdir(run[0].parent)
    assert output(capsys, "--workdir", run[0].name, *arguments) == absolute


def test_the_seed_decides_what_is_drawn(run, capsys):
    arguments = ["--workdir", run[0], "--prompt", "all", "--length", 30, "--temperature", 1]
    first = output(capsys, *arguments, "--seed", 4)
    assert output(capsys, *arguments, "--seed", 4) == first
    assert output(capsys, *arguments, "--seed", 5) != first


def test_one_program_does_for_prompts_of_any_length(run):
    folder, parameters = run
    model = model_of_run(folder)
    generate(model, parameters[2], [1], 1)
    with counted_compilations() as compilations:
        generate(model, parameters[2], np.arange(40), 30, temperature=0.5, seed=9)
    assert compilations.seen == []


def test_draws_follow_the_models_probabilities(run):
    folder, parameters = run
    model, prompt = model_of_run(folder), list(b"all the")
    seen = jnp.array([prompt], jnp.int32)
    for temperature in (1.0, 0.5):
        logits = np.asarray(model.logits(parameters[2], seen))[0, -1, :128] / temperature
        wanted = np.exp(logits - logits.max())
        wanted /= wanted.sum()
        drawn = [
            generate(
                model, parameters[2], prompt, 1, temperature=temperature, seed=seed, vocabulary=128
            )[0]
            for seed in range(500)
        ]
        counted = np.bincount(drawn, minlength=128) / len(drawn)
        spread = np.sqrt(wanted * (1 - wanted) / len(drawn))
        assert (np.abs(counted - wanted) <= 5 * spread + 1 / len(drawn)).all()


def test_a_prompt_beyond_the_window_is_cut_and_that_is_said(run, capsys):
    folder, parameters = run
    prompt = "x" * 30 + "all the cats and"
    made = likeliest(model_of_run(folder), parameters[2], prompt.encode(), 3)
    assert main(["--workdir", str(folder), "--prompt", prompt, "--length", "3",
                 "--temperature", "0"]) == 0  # fmt: skip
    found = capsys.readouterr()
    assert "the prompt has 46 tokens, and the model sees the last 16" in found.err
    assert found.out.startswith(prompt)
    assert made == likeliest(model_of_run(folder), parameters[2], prompt[-16:].encode(), 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-0.1"], "--temperature is -0.1; it must be 0 to 100"),
        (["--temperature", "nan"], "--temperature is nan"),
        (["--temperature", "inf"], "--temperature is inf"),
        (["--temperature", "warm"], "--temperature"),
        (["--length", "0"], "--length is 0; it must be 1 to 1000000"),
        (["--length", "-3"], "--length is -3"),
        (["--seed", "-1"], "--seed is -1; it must be at least 0"),
        (["--seed", str(2**32)], "below 2**32"),
        (["--prompt", ""], "--prompt is missing or empty"),
        (["--prompt", "a\udcff"], r"--prompt: '\udcff' is no character"),
        (["--step", "7"], "there is no checkpoint of step 7"),
        (["--step", "7"], "there are: 1, 2"),
        (["--workdir", "nowhere"], "--workdir 'nowhere': there is no such folder"),
        (["--workdir", "a\0b"], "is no possible path"),
        (["--workdir", "n" * 300], "is no possible path"),
        (["--workdir", ""], "--workdir is missing or empty"),
        (["--gin", "train.steps = 3"], "unrecognized arguments"),
    ],
)
def test_wrong_input_is_one_sentence(run, capsys, arguments, message):
    assert message in refused(capsys, "--workdir", run[0], "--prompt", "all", *arguments)


def test_what_generates_no_text_is_refused(tmp_path, capsys):
    image = 'model.recipe = "resnet-quickstart"\ndata.kind = "shapes"\n'
    made = 'data.kind = "synthetic"\n'
    for name, settings, message in (
        ("image", image, "which is of images"),
        ("made", made, "data.kind is 'synthetic', whose tokens stand for no text"),
        ("early", SETTINGS, "there is no checkpoint in"),
        ("wrong", "model.recipe = 'gpt4'", "unknown model recipe 'gpt4'"),
    ):
        folder = write_run(tmp_path / name, settings)
        assert message in refused(capsys, "--workdir", folder, "--prompt", "a")
    assert "config.gin is missing" in refused(capsys, "--workdir", tmp_path, "--prompt", "a")


def test_checkpoints_that_are_damaged_or_of_another_model(run, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(run[0], folder)
    newest = CheckpointFolder(folder / "checkpoints").whole(2).path
    (newest / "manifest.json").unlink()
    assert main(["--workdir", str(folder), "--prompt", "a", "--length", "1"]) == 0
    told = capsys.readouterr().err
    assert "checkpoint 2 is not whole: manifest.json is missing; using 1" in told
    assert "is not whole" in refused(capsys, "--workdir", folder, "--prompt", "a", "--step", "2")
    configuration = folder / "config.gin"
    tied = "head" not in model_of_run(folder).parameter_shapes()
    text = configuration.read_text()
    configuration.write_text(f"{text}\nmodel.tied_embeddings = {not tied}\n")
    assert "is of another model" in refused(capsys, "--workdir", folder, "--prompt", "a")


def test_a_run_that_replaces_a_checkpoint_is_not_disturbed(run, tmp_path, capsys):
    folder = tmp_path / "copy"
    shutil.copytree(run[0], folder)
    newest = CheckpointFolder(folder / "checkpoints").whole(2).path
    replaced = newest.with_name(f".old-{newest.name}")
    newest.rename(replaced)
    assert main(["--workdir", str(folder), "--prompt", "a", "--length", "1"]) == 0
    assert "at step 1" in capsys.readouterr().err
    assert replaced.is_dir()
    assert not newest.exists()


@pytest.mark.parametrize("pruned", [False, True])
def test_a_checkpoint_that_goes_away_while_it_is_read(run, tmp_path, capsys, monkeypatch, pruned):
    """Where a run has removed it, there is another newest one; elsewhere a file is missing."""
    folder = tmp_path / "copy"
    shutil.copytree(run[0], folder)
    verify = checkpoint_files.verify_files

    def verify_and_remove(path: Path, manifest: Manifest) -> None:
        verify(path, manifest)
        if manifest.step == 2 and pruned:
            shutil.rmtree(path)
        elif manifest.step == 2:
            for file in path.glob("stage_0/d/*"):
                file.unlink()

    monkeypatch.setattr(checkpoint_files, "verify_files", verify_and_remove)
    given = ["--workdir", str(folder), "--prompt", "a", "--length", "1"]
    if pruned:
        assert main(given) == 0
        assert "at step 1" in capsys.readouterr().err
    else:
        assert "00000002 cannot be read: No such file" in refused(capsys, *given)


def test_a_tokenizers_words(tmp_path, capsys):
    words = sorted(set(TEXT.replace(".", " .").split()))
    vocabulary = {word: index for index, word in enumerate(["[UNK]", *words])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = write_run(
        tmp_path / "run",
        SETTINGS + SHAPES["llama"] + 'data.tokenizer = "tokenizer.json"\nmodel.vocabulary = 64\n',
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    parameters = train(folder)
    made = likeliest(model_of_run(folder), parameters[2], tokenizer.encode("all the").ids, 5)
    arguments = ["--workdir", folder, "--length", 5, "--temperature", 0, "--prompt"]
    assert output(capsys, *arguments, "all the").startswith("all the ")
    if max(made) < len(vocabulary):
        assert output(capsys, *arguments, "all the") == f"all the {tokenizer.decode(made)}\n"
    spread = ["--workdir", folder, "--length", 200, "--temperature", 100, "--prompt", "all"]
    assert set(output(capsys, *spread).split()) <= set(vocabulary)
    assert "does not know 'zebras'" in refused(capsys, *arguments, "all zebras")
    assert "has no token" in refused(capsys, *arguments, "  ")


@pytest.mark.parametrize("option", ["--length=0", "--temperature=nan", "--seed=-1"])
def test_numbers_are_looked_at_before_the_run_is(option: str, capsys):
    name, _, value = option.partition("=")
    line = refused(capsys, "--workdir", "/nowhere", "--prompt", "all", option)
    assert f"{name} is {value}; it must be" in line
