"""The config of a run: one tree of frozen dataclasses, written to files and read back."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from torchrum.cells.rum import RELU_OPTIONS, TANH_OPTIONS
from torchrum.lab.tasks.base import Task
from torchrum.lab.training.errors import ConfigError
from torchrum.lab.training.files import Reader, check_fields

DECAYS = ("linear", "cosine")
ALLOWED = (
    "it must be constant, linear, cosine, steps in rising order with factors (1000:0.3,2000:0.1) "
    "or plateau/FACTOR/PATIENCE"
)


def plateau(schedule: str) -> tuple[float, int] | None:
    """Factor and patience of ``plateau/0.25/5``; None for any other schedule."""
    if not schedule.startswith("plateau"):
        return None
    try:
        _, factor, patience = schedule.split("/")
        if 0 < float(factor) < 1 and int(patience) >= 1:
            return float(factor), int(patience)
    except ValueError:
        pass
    raise ConfigError(
        f"optimizer: schedule is {schedule!r}; a plateau is plateau/FACTOR/PATIENCE, with a factor between 0 and 1 "
        "and a number of validations, such as plateau/0.25/5."
    )


def milestones(schedule: str) -> list[tuple[int, float]]:
    """Steps and the factor that holds from each of them on; none for a schedule that is a word."""
    if schedule in ("constant", *DECAYS) or plateau(schedule) is not None:
        return []
    try:
        pairs = [(int(step), float(factor)) for step, factor in (part.split(":") for part in schedule.split(","))]
    except ValueError:
        pairs = []
    steps = [step for step, _ in pairs]
    if not pairs or steps != sorted({*steps}) or steps[0] < 0 or not all(0 <= f < math.inf for _, f in pairs):
        raise ConfigError(f"optimizer: schedule is {schedule!r}, but {ALLOWED}.")
    return pairs


def rate_factors(groups: str) -> dict[str, float]:
    """Parts of names and the factors of lr for parameters that have them in their names."""
    try:
        pairs = (part.rpartition(":") for part in groups.split(",") if part)
        factors = {name.strip(): float(factor) for name, _, factor in pairs}
        if all(name and 0 <= factor < math.inf for name, factor in factors.items()):
            return factors
    except ValueError:
        pass
    raise ConfigError(
        f"optimizer: groups is {groups!r}; write parts of names with factors of lr, such as "
        "weight_hh:0.1,embedding:0.5."
    )


FSDP_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
MOST_LAYERS, MOST_STEPS, MOST = 1000, 10**15, 10**9
"""Beyond these a layer, a step or a number of a model makes no sense, and some would never end."""


def _positive(owner: str, most: float = math.inf, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{owner}: {name} is {value!r}, but it must be greater than 0, and finite.")
        if value is not None and value > most:
            raise ConfigError(f"{owner}: {name} is {value!r}, but it must be at most {most:,}.")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A recurrent layer by its name, and its sizes."""

    layer: str = "rum"
    """Name of the layer in the registry."""
    hidden_size: int = 100
    """Width of the hidden state, H."""
    num_layers: int = 1
    """Number of stacked layers."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the layer, such as lam and eta."""
    window: int = 1
    """One-hot symbols that the layer reads per step: the current one and those before it."""
    embedding_size: int | None = None
    """Width of a trained embedding of the symbols; None: one-hot vectors."""
    original_embedding: bool = False
    """Start the embedding of a story reader as the original implementation of RUM does, not from N(0, 1)."""
    embedding_std: float | None = None
    """Deviation with which the embedding of a story reader starts; None: 1."""
    input_dropout: float = 0.0
    """Chance that a number of the embedding is zeroed."""
    output_dropout: float = 0.0
    """Chance that a number of the layer's output is zeroed before the softmax."""
    locked_dropout: bool = False
    """Draw the two masks once per segment instead of in each step."""
    weight_drop: float = 0.0
    """Chance that a recurrent weight is zeroed for a segment."""
    tied: bool = False
    """The softmax uses the matrix of the embedding."""
    calibrated: bool = False
    """Divide the logits of a trained model by a temperature that is fitted to the validation set."""

    def __post_init__(self) -> None:
        check_fields("model", self)
        _positive("model", hidden_size=self.hidden_size, window=self.window)
        _positive("model", embedding_size=self.embedding_size, embedding_std=self.embedding_std)
        _positive("model", most=MOST_LAYERS, num_layers=self.num_layers)
        for name, value in self.options.items():
            if isinstance(value, int | float) and not abs(value) <= MOST:
                raise ConfigError(f"model: {name} is {value!r:.60}, but it must be between -{MOST:,} and {MOST:,}.")
        if self.embedding_std is not None and self.original_embedding:
            raise ConfigError(
                f"model: embedding_std is {self.embedding_std}, but original_embedding sets how the embedding starts; "
                "set embedding_std to none, or original_embedding to false."
            )
        for name in ("input_dropout", "output_dropout", "weight_drop"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"model: {name} is {getattr(self, name)!r}, but it must be at least 0 and below 1.")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its learning rate over the steps."""

    name: Literal["adam", "rmsprop", "rmsprop_tf"] = "adam"
    """adam and rmsprop are torch's; rmsprop_tf starts and rounds as TensorFlow's does."""
    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of adam's two moving averages."""
    decay: float = 0.9
    """Decay rate of the moving average of rmsprop and rmsprop_tf."""
    eps: float | None = None
    """Added to the denominator; None: 1e-8, or 1e-10 for rmsprop_tf."""
    weight_decay: float = 0.0
    """Decoupled weight decay of all matrices (adam only)."""
    clip: float | None = None
    """Largest norm of the gradient of all parameters; a gradient that is not finite is dropped. None: no limit."""
    groups: str = ""
    """Learning rates of some parameters, as factors of lr, by part of their name: weight_hh:0.1,embedding:0.5."""
    warmup: int = 0
    """Steps in which the learning rate rises linearly to lr."""
    schedule: str = "constant"
    """constant; linear or cosine, down to zero; STEP:FACTOR,..., as 1000:0.3,2000:0.1; or plateau/FACTOR/PATIENCE."""

    def __post_init__(self) -> None:
        check_fields("optimizer", self)
        _positive("optimizer", lr=self.lr, clip=self.clip)
        if not all(0 <= value < 1 for value in (*self.betas, self.decay)):
            raise ConfigError(f"optimizer: betas {self.betas} and decay {self.decay} must be at least 0 and below 1.")
        for name in ("eps", "weight_decay", "warmup"):
            if not 0 <= (getattr(self, name) or 0) < math.inf:
                raise ConfigError(
                    f"optimizer: {name} is {getattr(self, name)!r}, but it must be at least 0, and finite."
                )
        if self.weight_decay and self.name != "adam":
            raise ConfigError(f"optimizer: weight_decay works with 'adam' only, not with {self.name!r}.")
        milestones(self.schedule)
        rate_factors(self.groups)


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A published number to compare ours with."""

    text: str
    """The number as it is printed, with its unit."""
    where: str
    """The table, figure or section that has it."""
    value: float | None = None
    """The number itself, in units of the task's metric, where there is one."""

    def __post_init__(self) -> None:
        check_fields("paper", self)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of a run: equal configs give equal numbers on the same machine."""

    name: str
    """Name of the recipe, and of the run folder."""
    task: Task
    """Problem to learn."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Model that learns it."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer and learning rate."""
    batch_size: int = 128
    """Examples per step, over all processes together."""
    steps: int = 10_000
    """Number of optimizer steps."""
    seed: int = 0
    """Random seed of the initial weights and the data."""
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"] = "32-true"
    """Precision of weights and activations; -mixed keeps the weights in 32 bits."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto takes CUDA if there is one."""
    devices: int = 1
    """Processes on each machine, each with its own share of the batch."""
    nodes: int = 1
    """Machines, when started by SLURM or torchrun."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """Share of each process: a copy of the model (ddp), or a part of its weights and optimizer state (fsdp)."""
    graph: bool = True
    """Record the training step as a CUDA graph where one process trains on CUDA."""
    compile: bool = False
    """Compile the steps of cells that have no kernels of their own: takes minutes at the start, then fewer launches."""
    log_every: int = 50
    """Steps between two lines of training loss."""
    eval_every: int = 500
    """Steps between two scores on the validation set."""
    checkpoint_every: int = 500
    """Steps between two checkpoints: the most that a crash can lose."""
    average: float | None = None
    """Decay of a moving average of the weights, such as 0.999; it is validated, saved and tested instead of them."""
    stop_at: float | None = None
    """Stop early once the task's metric on the validation set is this good."""
    stop_after: int = 2
    """Validations in a row that must reach stop_at."""
    logger: Literal["none", "tensorboard", "wandb"] = "none"
    """A tracker to write to, besides metrics.jsonl."""
    paper: Paper | None = None
    """The published number that this recipe repeats."""
    about: str = ""
    """One line for the list of recipes."""

    @property
    def label(self) -> str:
        """The name, with the sizes that task and model have.

        ``copying-rum-t200`` with a delay of 20 is ``copying-rum-t20``, and ``char-ptb-rum-2000`` with 100 units
        ``char-ptb-rum-100``.
        """
        layers = f"{self.model.num_layers}x" if self.model.num_layers > 1 else ""
        name = re.sub(r"-rum-(\d+x)?\d{3,}(?=-|$)", f"-rum-{layers}{self.model.hidden_size}", self.name)
        size = self.task.size_name()
        kind = size.rstrip("0123456789")
        return re.sub(rf"-{kind}\d+$", f"-{size}", name) if size else name

    def __post_init__(self) -> None:
        check_fields("config", self)
        if not re.fullmatch(r"[^/\\\x00-\x1f]{1,200}", self.name) or self.name.strip(" .") == "":
            raise ConfigError(f"config: name is {self.name!r:.80}, but it must be the name of a folder, not a path.")
        _positive("config", batch_size=self.batch_size, devices=self.devices, nodes=self.nodes)
        _positive("config", most=MOST_STEPS, steps=self.steps, checkpoint_every=self.checkpoint_every)
        if self.stop_at is not None and not math.isfinite(self.stop_at):
            raise ConfigError(f"config: stop_at is {self.stop_at}, but it must be a finite number, or none.")
        _positive("config", log_every=self.log_every, eval_every=self.eval_every, stop_after=self.stop_after)
        if self.batch_size % (self.devices * self.nodes):
            raise ConfigError(
                f"config: batch_size {self.batch_size} cannot be divided among {self.devices * self.nodes} processes; "
                "choose a multiple of devices * nodes."
            )
        self._check_fsdp()
        if self.average is not None and not 0 < self.average < 1:
            raise ConfigError(f"config: average is {self.average}, but it must be above 0 and below 1, or none.")
        try:
            self.task.check_batch_size(self.batch_size)
        except ValueError as error:
            raise ConfigError(f"config: {error}") from error
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"config: seed is {self.seed}, but it must be at least 0 and below 2**31.")

    def _check_fsdp(self) -> None:
        if self.strategy != "fsdp":
            return
        reason = None
        if self.devices * self.nodes == 1:
            reason = "it needs several processes: pass --devices 2 or more"
        elif self.precision not in FSDP_PRECISIONS:
            reason = f"precision is {self.precision!r}, but it must be one of {', '.join(FSDP_PRECISIONS)}"
        elif self.average is not None:
            reason = "it keeps no average of the weights: set average to none"
        elif self.compile:
            reason = "it compiles no steps: set compile to false"
        if reason:
            raise ConfigError(f"config: strategy is 'fsdp', but {reason}, or take strategy ddp.")


FORMAT = 6
"""Version of the layout; it rises with a change of the defaults of a layer, too."""

FORMER_OPTIONS: dict[str, dict[int, Mapping[str, Any]]] = {
    "rum": {4: RELU_OPTIONS, 6: TANH_OPTIONS},
    "fast_weights": {5: {"decay": 0.95, "start_norm": False, "bias": True}},
    "ntm": {5: {"style": "graves"}},
}
"""Layer to the formats in which its defaults changed, in order, and what they were before."""

FORMER_FIELDS: dict[str, dict[str, Any]] = {
    "torchrum.lab.tasks.babi:Babi": {"blanks": 0, "authors_readout": False},
    "torchrum.lab.tasks.char_lm:CharLM": {"shifted": False},
}
"""Task to the fields that it had once, and the only values that recorded runs have in them."""

_LENGTH = ("steps", "log_every", "eval_every", "checkpoint_every", "stop_at", "stop_after")
_PLACE = ("device", "devices", "nodes", "strategy", "graph", "compile", "logger")
CHANGEABLE = frozenset((*_LENGTH, *_PLACE, "paper", "about"))
"""Fields that a resumed run may change; any other one would make it a different run."""
STUDY_CHANGEABLE = frozenset((*_PLACE, "paper", "about"))
"""Fields in which the processes of one search may differ."""


def to_json(config: TrainConfig) -> dict[str, Any]:
    """The config as plain data; ``from_json`` is its inverse."""
    return {"format": FORMAT, **_plain(config)}


def field_names(value: Any) -> list[str]:
    """Names of the fields of a dataclass that a user may set."""
    return [item.name for item in fields(value) if item.init]


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        plain = {name: _plain(getattr(value, name)) for name in field_names(value)}
        return {"type": task_name(type(value)), **plain} if isinstance(value, Task) else plain
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def task_name(kind: type[Task]) -> str:
    """Name a class of tasks in a file: ``module:class``."""
    return f"{kind.__module__}:{kind.__qualname__}"


def from_json(data: Any, source: object = "the config", error: type[Exception] = ConfigError) -> TrainConfig:
    """Rebuild a config from ``to_json``'s data; unknown fields, wrong types and foreign classes are refused.

    Args:
        data: what a file held.
        source: that file, for errors.
        error: what to raise.
    """
    reader = Reader(source, error)
    if not isinstance(data, Mapping):
        raise reader.wrong("it", data, "an object")
    task = reader.value(dict[str, Any], data.get("task"), "task")
    try:
        kind, parts = _task_class(task.get("type")), upgraded(data)
    except ConfigError as failure:
        raise reader.fail(str(failure)) from failure
    del parts["format"]
    task = {name: value for name, value in parts["task"].items() if name != "type"}
    return reader.build(TrainConfig, {**parts, "task": reader.build(kind, task, "task")})


def upgraded(data: Mapping[str, Any]) -> dict[str, Any]:
    """A config as plain data of any version, in the layout of today."""
    found, model = data.get("format", 1), data.get("model")
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= FORMAT:
        raise ConfigError(f"the format is {found!r:.60}, written by a newer torchrum; this one reads up to {FORMAT}.")
    task = data.get("task")
    if isinstance(task, Mapping) and isinstance(kind := task.get("type"), str):
        gone = FORMER_FIELDS.get(kind, {}).items()
        data = {**data, "task": {name: value for name, value in task.items() if (name, value) not in gone}}
    if isinstance(model, Mapping) and isinstance(layer := model.get("layer"), str):
        changes = FORMER_OPTIONS.get(layer, {})
        former = next((former for changed, former in changes.items() if found < changed), None)
        if former is not None and isinstance(options := model.get("options"), Mapping):
            return {**data, "format": FORMAT, "model": {**model, "options": {**former, **options}}}
    return {**data, "format": FORMAT}


def _task_class(path: object) -> type[Task]:
    """The task of this name among those that are loaded: a file must not choose what is imported."""
    kinds = Task.__subclasses__()
    for kind in kinds:  # grows as it is walked
        kinds += kind.__subclasses__()
    found = {task_name(kind): kind for kind in kinds}
    if not isinstance(path, str) or path not in found:
        raise ConfigError(
            f"the task {path!r:.60} is not part of torchrum; name its recipe too: torchrum train MODULE:FUNCTION "
            "--resume RUN, or --recipe MODULE:FUNCTION with eval, figure and report. Such a run cannot be "
            "recorded in the ledger."
        )
    return found[path]


def without(left_out: Collection[str], plain: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """Leave out some fields, and those of the task that are valid on one machine only."""
    kept = {name: value for name, value in plain.items() if name not in left_out}
    return {**kept, "task": {name: value for name, value in plain["task"].items() if name not in task.local}}


def differences(
    old: TrainConfig | Mapping[str, Any], new: TrainConfig, left_out: Collection[str] | None = CHANGEABLE
) -> list[str]:
    """Describe where two configs differ; by default nothing if they describe the same run.

    Args:
        old: a config, or the plain data of one in a checkpoint or a study.
        new: the other one.
        left_out: fields that may differ; None: the fields that ``old`` lacks.
    """
    before, now = to_json(old) if isinstance(old, TrainConfig) else upgraded(old), to_json(new)
    left_out = now.keys() - before.keys() if left_out is None else {*left_out, *({"name"} - before.keys())}
    return plain_differences(without(left_out, before, new.task), without(left_out, now, new.task))


def first_of(changed: list[str]) -> str:
    """The first difference and how many more there are: another text, for one, differs in every fact about it."""
    return changed[0] + (f" and {len(changed) - 1} more" if changed[1:] else "")


def plain_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Describe where two plain trees differ; what the old one lacks, as an older version does, counts as off."""
    before, now = flat(old), flat(new)
    gone = [f"{name} is missing" for name in before if name not in now]  # None is a value too
    shared = [name for name in now if name in before or now[name]]
    changed = [name for name in shared if before.get(name) != now[name]]
    return gone + [f"{name} {before.get(name)!r} -> {now[name]!r}" for name in changed]


def flat(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a plain tree by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in plain.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
