"""The settings of a run: one frozen class a section, every field with its check and its meaning."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from hetjax.checked_files import Record
from hetjax.errors import InputError, shown, unknown_name
from hetjax.limits import (
    MAX_BATCH,
    MAX_BLOCKS,
    MAX_COUNT,
    MAX_MADE_EXAMPLES,
    MAX_MICROBATCHES,
    MAX_PASSES,
    MAX_SECONDS,
    MAX_SEQUENCE,
    MAX_VOCABULARY,
    MAX_WIDTH,
)


def _as_tuple(value: object) -> object:
    """Lists are what people write; one text stands for a list of one."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
Numbers = Annotated[tuple[float, ...], BeforeValidator(_as_tuple)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Microbatches = Annotated[int, Field(ge=1, le=MAX_MICROBATCHES)]
Width = Annotated[int, Field(le=MAX_WIDTH)]
BlockCount = Annotated[int, Field(le=MAX_BLOCKS)]
BlockCounts = Annotated[tuple[BlockCount, ...], BeforeValidator(_as_tuple)]
Core = Annotated[int, Field(ge=0, lt=2**16)]
Cores = Annotated[tuple[Core, ...], BeforeValidator(_as_tuple)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
ScheduleName = Literal[
    "gpipe", "1f1b", "eager_1f1b", "h_1f1b", "h_1f1b_split", "zb_h1", "zb_h2", "search"
]


class SettingsSection(Record):
    """What all sections share."""


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Checks that options hold what a gin file can say of an optimizer, and finite numbers."""
    for name, value in options.items():
        if not _is_plain(value):
            raise InputError(
                f"optimizer.options[{name!r}] is {shown(value)}; it must be a finite number, a "
                f"text, True, False or None, or several of them"
            )
    return options


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, int | float):
        return abs(value) < 2**63 and math.isfinite(value)
    return value is None or isinstance(value, str)


def _known_writers(names: tuple[str, ...]) -> tuple[str, ...]:
    """Checks names alone: a configuration can be read where the packages are not installed."""
    if names:
        from hetjax.report.writers import check_writer_names

        check_writer_names(names, "train.writers")
    return names


class TrainSettings(SettingsSection):
    """The training itself."""

    steps: Count = Field(default=300, description="training steps of the whole run")
    batch_size: int = Field(default=16, ge=1, le=MAX_BATCH, description="examples in one step")
    microbatches: Microbatches | None = Field(
        default=None,
        description="microbatches into which a step's batch is divided; None for the fastest, or "
        "for as few as fit where another number is another loss",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**32,
        description="of the parameters, of the order of the examples and of dropout",
    )
    frozen: Texts = Field(
        default=(),
        description="patterns of parameters that stay as they are, such as ('embed*', 'blocks/0'): "
        "they have no gradient and no optimizer state, and what is clipped is the norm of the rest",
    )
    tune: bool = Field(
        default=False,
        description="measure tasks and transfers in the first steps, and make the schedule again "
        "of what was measured",
    )
    beside: ScheduleName | None = Field(
        default=None,
        description="another schedule: five early steps run by it, and its step time stands beside "
        "that of planner.schedule at the end; None for none",
    )
    evaluate_every: Count | None = Field(
        default=None, description="steps from one evaluation to the next; None for none"
    )
    evaluation_batches: Count | None = Field(
        default=8, description="held-out batches of one evaluation; None for all"
    )
    checkpoint_every: Count | None = Field(
        default=None,
        description="steps from one checkpoint to the next; None for one at the end only",
    )
    keep_last: Count = Field(default=3, description="how many of the newest checkpoints to keep")
    keep_every: Count | None = Field(
        default=None, description="keep also the checkpoints of every so many steps"
    )
    max_nonfinite: Count = Field(
        default=10,
        description="how many steps in a row may have a loss or gradient that is not finite, which "
        "are not applied, before the run ends with an error",
    )
    writers: Annotated[Texts, AfterValidator(_known_writers)] = Field(
        default=(),
        description="'wandb', 'mlflow' or both: what gets the figures of every step beside "
        "metrics.jsonl and TensorBoard; needs --workdir",
    )

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.microbatches is not None and self.batch_size % self.microbatches:
            most = min(self.batch_size, MAX_MICROBATCHES)
            allowed = [n for n in range(1, most + 1) if self.batch_size % n == 0]
            raise InputError(
                f"train.batch_size is {self.batch_size}, which train.microbatches = "
                f"{self.microbatches} does not divide; allowed for this batch: "
                + ", ".join(map(str, allowed))
            )
        return self


class ClusterSettings(SettingsSection):
    """The devices."""

    file: str | None = Field(
        default=None,
        description="cluster file; None to take this process's devices, or Ray's nodes "
        "where the runtime is 'ray'",
    )
    measure: bool = Field(
        default=False,
        description="whether to measure Ray's nodes and the links between them, where there is "
        "no cluster file",
    )
    play: bool = Field(
        default=False,
        description="whether the local runtime plays the cluster: tasks and transfers are held "
        "back to what is predicted of them, and times are told in the cluster's seconds; on Ray "
        "without effect",
    )
    play_scale: Seconds | None = Field(
        default=None,
        description="seconds of this machine for one second of the cluster that is played; None "
        "for as few as it can compute in",
    )

    @model_validator(mode="after")
    def _scale_of_what_is_played(self) -> Self:
        if self.play_scale is not None and not self.play:
            raise InputError(
                f"cluster.play_scale is {self.play_scale} and cluster.play is False; nothing is "
                f"played: set cluster.play = True, or leave the scale out"
            )
        return self

    @model_validator(mode="after")
    def _measured_or_written(self) -> Self:
        if self.measure and self.file is not None:
            raise InputError(
                f"cluster.measure is True and cluster.file is {self.file!r}; a cluster is measured "
                f"or written in a file: leave one of them out"
            )
        return self


class ModelSettings(SettingsSection):
    """The model: a named recipe, and what to change of it (None: as the recipe has it)."""

    recipe: str = Field(default="gpt-quickstart", description="name in hetjax.models.RECIPES")
    vocabulary: Annotated[int, Field(le=MAX_VOCABULARY)] | None = Field(
        default=None, description="number of tokens; None for as many as the data has"
    )
    blocks: BlockCount | None = Field(default=None, description="number of Transformer blocks")
    width: Width | None = Field(
        default=None,
        description="size of the residual stream; channels of the first group (VGG, ResNet)",
    )
    heads: Width | None = Field(default=None, description="attention heads")
    sequence: Annotated[int, Field(le=MAX_SEQUENCE)] | None = Field(
        default=None, description="predicted tokens an example"
    )
    tied_embeddings: bool | None = Field(
        default=None, description="whether the embedding is the output layer too"
    )
    scan_blocks: bool | None = Field(
        default=None, description="whether the blocks are stacked and scanned over"
    )
    compute_dtype: str | None = Field(
        default=None, description="'float32', 'bfloat16' or 'float16'; parameters are float32"
    )
    dropout: float | None = Field(default=None, description="share dropped (GPT)")
    experts: Width | None = Field(
        default=None, description="experts in every second block; 0 for none (GPT)"
    )
    expert_capacity: float | None = Field(
        default=None, description="tokens that an expert takes, over an even share (GPT)"
    )
    expert_balance: float | None = Field(
        default=None, description="weight of the experts' loss of balance (GPT)"
    )
    logit_chunk: Annotated[int, Field(le=MAX_SEQUENCE)] | None = Field(
        default=None,
        description="tokens of each example whose logits are in memory at a time; 0 for all "
        "(language models)",
    )
    key_value_heads: Width | None = Field(default=None, description="key and value heads (Llama)")
    ffn_width: Width | None = Field(default=None, description="inner width (Llama, ViT)")
    rope_base: float | None = Field(default=None, description="rotary base (Llama)")
    image_size: Width | None = Field(
        default=None, description="height and width in pixels (image models)"
    )
    classes: Width | None = Field(default=None, description="number of classes (image models)")
    patch_size: Width | None = Field(default=None, description="height and width of a patch (ViT)")
    groups: BlockCounts | None = Field(
        default=None, description="convolutions (VGG) or blocks (ResNet) of each group"
    )
    dense_width: Width | None = Field(default=None, description="of hidden dense layers (VGG)")

    def overrides(self) -> dict[str, Any]:
        """The fields of the recipe that are given here, and their values."""
        given = dict(self)
        del given["recipe"]
        return {name: value for name, value in given.items() if value is not None}


_OF_KINDS = {
    "tokenizer": ("standard_library", "text"),
    "weights": ("text",),
}
"""The kinds of data that some settings are of."""


class DataSettings(SettingsSection):
    """Text, packed to the model's sequence, or labelled images."""

    kind: Literal["standard_library", "text", "synthetic", "images", "shapes"] = Field(
        default="standard_library",
        description="the source of Python's standard library, text files of one's own, or a "
        "stream made from nothing; for image models 'images' of one's own, or 'shapes' made from "
        "nothing",
    )
    paths: Texts = Field(
        default=(),
        description="files and folders of UTF-8 text ('text'); a folder with images.npy, uint8 "
        "[N, height, width, 3], and labels.npy, integers [N] ('images')",
    )
    weights: Numbers | None = Field(
        default=None, description="each path's share of the examples; None to read them as one"
    )
    tokenizer: str | None = Field(
        default=None, description="a Hugging Face tokenizer.json; None for bytes"
    )
    held_out_fraction: float = Field(
        default=0.05, ge=0, lt=1, description="share that is kept for evaluation: of text the end"
    )
    size: int = Field(
        default=1_000_000,
        ge=1,
        le=MAX_MADE_EXAMPLES,
        description="tokens of the stream ('synthetic'), images ('shapes')",
    )

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        if self.kind == "text" and not self.paths:
            raise InputError("data.paths is empty; data.kind = 'text' needs files or folders")
        if self.kind == "images" and len(self.paths) != 1:
            raise InputError(
                f"data.paths has {len(self.paths)} entries; data.kind = 'images' needs one folder"
            )
        if self.kind not in ("text", "images") and self.paths:
            raise InputError(
                f"data.paths is given, and data.kind is {self.kind!r}; it must be 'text' or "
                f"'images' to read them"
            )
        for name, kinds in _OF_KINDS.items():
            if getattr(self, name) is not None and self.kind not in kinds:
                raise InputError(
                    f"data.{name} is given, and data.kind is {self.kind!r}, which has none; "
                    f"allowed with {' or '.join(map(repr, kinds))}"
                )
        if self.weights is not None and len(self.weights) != len(self.paths):
            raise InputError(
                f"data.weights has {len(self.weights)} numbers; it must have one for each of the "
                f"{len(self.paths)} data.paths"
            )
        return self


class OptimizerSettings(SettingsSection):
    """The optimizer: an Optax one, its learning rate over the steps, and clipping."""

    name: str = Field(default="adamw", description="an Optax optimizer: adamw, sgd, lion, ...")
    learning_rate: float = Field(default=1e-3, ge=0, description="the highest learning rate")
    schedule: Literal["constant", "cosine", "linear"] = Field(
        default="constant", description="how the learning rate goes on after the warm-up"
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        le=MAX_COUNT,
        description="steps over which the learning rate rises from near 0",
    )
    final_fraction: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="share of the learning rate to which it falls by the end of the last step "
        "('cosine' and 'linear')",
    )
    weight_decay: float | None = Field(
        default=None, ge=0, description="None for the optimizer's own default"
    )
    clip_norm: float | None = Field(
        default=None, gt=0, description="the gradient's largest global norm; None for any"
    )
    options: Annotated[dict[str, Any], AfterValidator(_plain)] = Field(
        default={}, description="further arguments of the optimizer, e.g. {'b2': 0.95}"
    )


class PlannerSettings(SettingsSection):
    """What the planner may do."""

    name: Literal["harp", "hap", "heteroauto", "hexiseq"] = Field(
        default="harp",
        description="'harp' for stages on submeshes and schedules, 'hap' for one stage over all "
        "devices, whose tensors are divided among unlike nodes as is fastest, 'heteroauto' for "
        "stages that are alike within each kind of devices (H2), or 'hexiseq' for one stage, or "
        "a pipeline of such, whose devices share the tokens and attention heads of long sequences",
    )
    context: Literal["hexiseq", "ring", "ulysses", "usp"] = Field(
        default="hexiseq",
        description="how planner.name = 'hexiseq' shares sequences: 'hexiseq' for as many tokens "
        "and heads on each device as is fastest; 'ring', 'ulysses' or 'usp' for as many on each, "
        "at the best settings of that system, to compare with",
    )
    schedule: ScheduleName = Field(
        default="h_1f1b",
        description="'gpipe', '1f1b', 'eager_1f1b', 'h_1f1b', 'h_1f1b_split', 'zb_h1', 'zb_h2' "
        "or 'search'",
    )
    num_layers: Count | None = Field(
        default=None,
        description="layers of similar cost at most; None for layers by the model's structure",
    )
    allow_recompute: bool = Field(
        default=True, description="whether stages may recompute to save memory"
    )
    min_stages: Count = Field(default=1, description="stages at least")
    max_stages: Count | None = Field(default=None, description="stages at most; None for any")
    profile: str | None = Field(
        default=None,
        description="folder of measurements that `hetjax.profile` made, to plan with; or a JSON "
        "file of another tool, by which `hetjax.plan` plans without the model; None to plan by the "
        "analytic model",
    )
    max_pipelines: Count | None = Field(
        default=None,
        description="pipelines at most; several share the batch by their speed. None for 4, or 1 "
        "where train.tune or train.beside ask for another schedule",
    )
    union_stages: bool = Field(
        default=True,
        description="whether a stage may have unlike devices that share its examples unevenly; no "
        "plan has one where train.tune or train.beside ask for another schedule, or a cluster is "
        "played",
    )
    synthesised_stages: bool = Field(
        default=False,
        description="whether the last stage of a pipeline may be a program over unlike devices, "
        "synthesised as planner.name = 'hap' does it for the whole model; that takes some seconds "
        "more. No plan has one where none has a union",
    )
    max_passes: int = Field(
        default=MAX_PASSES,
        ge=1,
        le=MAX_PASSES,
        description="how often a pipeline may pass its submeshes; more than once where the "
        "schedule is 'search' and that is predicted to be faster, but not where train.tune or "
        "train.beside ask for another schedule. 1 for once",
    )
    objective: Literal["step_time", "cost"] = Field(
        default="step_time",
        description="what the plan makes least: 'step_time', or 'cost' by the prices of the "
        "cluster file",
    )
    published: str | None = Field(
        default=None, description="plan file whose predicted step time `hetjax.plan` shows beside"
    )

    @property
    def shares_context(self) -> bool:
        """Whether plans are asked for whose devices share sequences."""
        return self.name == "hexiseq"

    @model_validator(mode="after")
    def _of_its_planner(self) -> Self:
        if self.context != "hexiseq" and not self.shares_context:
            raise InputError(
                f"planner.context is {self.context!r}, and planner.name is {self.name!r}, which "
                f"shares no sequences; set planner.name = 'hexiseq', or leave it out"
            )
        return self


class RuntimeSettings(SettingsSection):
    """Where the stages run."""

    name: Literal["local", "ray"] = Field(
        default="local", description="in this process, or in Ray actors"
    )
    ray_address: str | None = Field(
        default=None,
        description="host:port of a Ray cluster, 'auto' for one that runs here, 'local' for a new "
        "one; None for what RAY_ADDRESS says, else one that runs here, else a new one",
    )
    cores: Cores = Field(
        default=(), description="for each stage the CPU core that its Ray workers stay on"
    )
    deadline: Seconds = Field(
        default=300.0, description="seconds after which waiting for another stage is an error"
    )
    carrier: Literal["wire", "stream", "host"] | None = Field(
        default=None,
        description="what takes arrays from one Ray worker to another: 'wire', JAX's transfer "
        "server, 'stream', TCP connections, or 'host', calls from worker to worker; None for the "
        "fastest one for each message, as it is measured when the run begins",
    )


class Configuration(SettingsSection):
    """A whole configuration.

    Example:
        >>> configuration = Configuration()
        >>> configuration.train.steps, configuration.model.recipe
        (300, 'gpt-quickstart')
    """

    train: TrainSettings = TrainSettings()
    cluster: ClusterSettings = ClusterSettings()
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    planner: PlannerSettings = PlannerSettings()
    runtime: RuntimeSettings = RuntimeSettings()


def sections() -> dict[str, type[SettingsSection]]:
    """Every section's name and class, in the order of `Configuration`."""
    classes = {name: field.annotation for name, field in Configuration.model_fields.items()}
    return {
        name: cls
        for name, cls in classes.items()
        if isinstance(cls, type) and issubclass(cls, SettingsSection)
    }


def settings(configuration: Configuration) -> Iterator[tuple[str, Any]]:
    """Every setting's dotted name and value, in order."""
    for section, values in configuration:
        for field, value in values:
            yield f"{section}.{field}", value


def make_configuration(values: Mapping[str, Mapping[str, Any]]) -> Configuration:
    """Checks settings and puts them together.

    Args:
        values: by section and field; what is not given has its default.

    Returns:
        The configuration.

    Raises:
        InputError: a name is unknown or a value wrong; one sentence names the field, the value and
            what is allowed.

    Example:
        >>> make_configuration({"train": {"steps": 20}}).train.steps
        20
    """
    known = sections()
    checked: dict[str, SettingsSection] = {}
    for section, fields in values.items():
        for field in fields:
            check_name(f"{section}.{field}")
        try:
            checked[section] = known[section].model_validate(dict(fields))
        except ValidationError as error:
            raise InputError(_sentence(error, section)) from None
    try:
        return Configuration.model_validate(checked)
    except ValidationError as error:
        raise InputError(_sentence(error)) from None


def check_name(name: str) -> None:
    """Checks that a dotted name is one that can be configured.

    Raises:
        InputError: it is not; the message has the nearest name that is.

    Example:
        >>> check_name("train.stepps")
        Traceback (most recent call last):
        hetjax.errors.InputError: there is no setting 'train.stepps'; did you mean 'train.steps'?
    """
    known = [
        f"{section}.{field}" for section, cls in sections().items() for field in cls.model_fields
    ]
    if name not in known:
        # Only the nearest: all of them would fill a page, which --help does.
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else "--help lists what can be configured"
        raise InputError(f"there is no setting {shown(name)}; {hint}")


def _sentence(error: ValidationError, section: str = "") -> str:
    """The first thing that is wrong, as one sentence."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InputError):
        return str(cause)
    field, *inner = first["loc"]
    if inner and inner[-1] == "[key]":
        return f"{section}.{field} has the key {shown(first['input'])}; keys must be texts"
    name = f"{section}.{field}" + "".join(f"[{shown(place)}]" for place in inner)
    if first["type"] == "literal_error" and isinstance(first["input"], str):
        hint = sections()[section].model_fields[str(field)].annotation
        return unknown_name(name, first["input"], _texts_of(hint))
    message = first["msg"].replace("Input should be", "it must be")
    return f"{name} is {shown(first['input'])}; {message}"


def _texts_of(hint: object) -> list[str]:
    """The texts that a hint allows, alone or beside None."""
    return [
        text
        for each in get_args(hint)
        for text in ([each] if isinstance(each, str) else _texts_of(each))
    ]
