"""A job: what to train, on what, by which method. Its tables are those of the job file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Unpack

from pydantic import AfterValidator, Field, SerializeAsAny, ValidationError, field_validator, model_validator

from fedstrata.errors import UserError, did_you_mean
from fedstrata.job.adapter_table import Adapter
from fedstrata.job.base import Names, Table
from fedstrata.job.data_tables import Clients, Data
from fedstrata.job.engine_table import Engine
from fedstrata.job.head_table import Head, misfit
from fedstrata.job.paths import Place
from fedstrata.job.privacy_table import Privacy
from fedstrata.job.sentences import sentence
from fedstrata.job.task_kinds import TASK_KINDS, named
from fedstrata.job.track_table import Track
from fedstrata.job.train_table import Train as Train  # its users know it from here
from fedstrata.job.wire_table import Wire
from fedstrata.methods import METHODS
from fedstrata.plan.kinds import Payload
from fedstrata.plan.plan import Method, options_of

if TYPE_CHECKING:
    from fedstrata.job.given import Given


class Model(Table):
    """``[model]``: what the clients start from."""

    name: Place | None = None
    """Hub id, folder, or ``demo:minilm``."""
    config: dict[str, Any] | None = None
    """In place of ``name``: a new model of this Hugging Face config, the keys over those of its ``preset``."""
    tokenizer: Place | None = None
    """Of a model from ``config``: folder or hub id; trained on the training rows when absent."""

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        if (self.name is None) == (self.config is None):
            found = "neither" if self.name is None else "both"
            raise ValueError(f"name: found {found} of name and [model.config]; expected one of them")
        if self.tokenizer is not None and self.config is None:
            raise ValueError("tokenizer: goes with [model.config] and only with it; a model by name has its own")
        return self


class Task(Table):
    """``[task]``: what is learned."""

    kind: str
    """``mlm``, ``clm``, ``classify``, ``pair``, ``regress`` or ``tag``."""
    labels: Names | None = None
    """Class names in their order; read from the training and test rows (sorted) when absent."""
    metric: str | None = None
    """The headline metric; by default the first of the task's."""
    positive: Annotated[Names, Field(min_length=1)] | None = None
    """``f1`` is the mean F1 of these classes; for two classes the second one is the default."""
    mask_probability: Annotated[float, Field(gt=0, lt=1)] = 0.15

    @model_validator(mode="after")
    def _metric_fits(self) -> Self:
        if self.kind not in TASK_KINDS:
            raise ValueError(f"kind: {self.kind!r} is invalid; {did_you_mean(self.kind, TASK_KINDS)}")
        metrics = TASK_KINDS[self.kind].metrics
        if self.metric is not None and self.metric not in metrics:
            raise ValueError(
                f"metric: {self.metric!r} is not a metric of {self.kind!r}; {did_you_mean(self.metric, metrics)}"
            )
        if self.labels is not None and len(set(self.labels)) < max(2, len(self.labels)):
            raise ValueError(f"labels: needs two or more different names, found {self.labels}")
        return self

    @property
    def headline(self) -> str:
        """The metric that stands for the run in tables and plots."""
        return self.metric or next(iter(TASK_KINDS[self.kind].metrics))


class Server(Table):
    """``[server]``: how the clients' replies become the next model."""

    aggregate: str = "mean"
    """How the replies of a round become one: ``mean``, weighted by examples, or a robust rule of
    :mod:`fedstrata.server.robust`."""
    malicious: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Bad clients that ``trimmed_mean``, ``krum`` and ``multi_krum`` are to bear; 1 when absent."""
    clip_radius: Annotated[float, Field(gt=0)] | None = None
    """Of ``centered_clip``; absent: the median distance from the center."""
    clip_steps: Annotated[int, Field(ge=1, le=100)] | None = None
    """Of ``centered_clip``; 3 when absent."""
    max_norm: Annotated[float, Field(gt=0)] | None = None
    """To which the change of every client is shortened, over all that it sends; absent: never."""
    optimizer: str = "sgd"
    """What is done with the aggregate; ``sgd`` at learning rate 1 takes it as it is (FedAvg)."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """By default 1 for sgd and momentum, 0.01 for adam and yogi, 0.003 for adagrad."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Of ``momentum``; beta 1 of the adaptive optimizers (adagrad: 0, as in its paper)."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    tau: Annotated[float, Field(gt=0, le=1e6)] = 1e-3
    evaluate: Literal["rounds", "end"] = "rounds"
    """Score the model after every round, or once at the end."""


def _sendable() -> list[Payload]:
    return ["weights", "activations"]


class Client(Table):
    """``[client]``: payloads that clients allow to leave (simulation only; real sites say so in site.toml)."""

    may_send: list[Payload] = Field(default_factory=_sendable)
    """``weights``: parts of the model; ``hidden_states``: the encoder's output for every text, with the labels;
    ``activations``: hidden states of every batch and their gradients (split learning)."""


class Output(Table):
    """``[output]``: where the run is written, and what is reported."""

    dir: Annotated[Place, AfterValidator(os.path.expanduser)] = "runs/try"
    client_models: bool | None = None
    """Save each client's own model where clients keep parts; done unless it is false."""
    predictions: bool = False
    """Write what the final model predicts for each test example, with its label, to ``predictions.jsonl``."""
    keep_state: bool = False
    """Keep what resuming needs when the run has ended, so that it can be given more rounds."""
    target: float | None = None
    """A value of the headline metric: rounds and bytes until it is first reached are reported."""


class JobError(UserError):
    """A job's tables are not valid; ``sentence`` says what is wrong without saying where the job is from."""

    def __init__(self, sentence: str) -> None:
        super().__init__(f"job: {sentence}")
        self.sentence = sentence


class Job(Table):
    """All tables of one stage, checked."""

    stage: str = ""
    start: str = ""
    """The stage whose model this one starts from."""
    model: Model | None = None
    """None: the model of stage ``start``."""
    task: Task
    data: Data
    clients: Clients = Clients()
    method: SerializeAsAny[Method]
    train: Train = Train()
    head: Head = Head()
    adapter: Adapter = Adapter()
    server: Server = Server()
    wire: Wire = Wire()
    client: Client = Client()
    privacy: Privacy = Privacy()
    engine: Engine = Engine()
    track: Track = Track()
    output: Output = Output()

    @model_validator(mode="after")
    def _rows_are_somewhere(self) -> Self:
        if not self.data.train and not self.between_sites:
            raise ValueError("[data] train: is missing")
        if self.clients.test is not None and self.data.test is not None:
            raise ValueError("[clients] test: the clients' own rows are the test rows, so [data] test must go")
        return self

    @model_validator(mode="after")
    def _wire_fits(self) -> Self:
        if self.method.exchange == "activations" and self.wire.dtype == "int8" and not self.wire.activations:
            raise ValueError(
                "[wire] dtype: 'int8' is for weights; hidden states and gradients travel in fp32, fp16 or bf16, "
                "or as [wire] activations says"
            )
        return self

    @model_validator(mode="after")
    def _steps_fit(self) -> Self:
        sends, train = self.method.exchange, self.train
        if sends != "weights" and train.tokens_per_batch is not None:
            raise ValueError(
                "[train] tokens_per_batch: goes with methods that send weights, not with "
                f"{method_name(self.method)!r} as set here, which sends {sends}; expected: batch_size"
            )
        for key, default in (("gradient_accumulation", 1), ("max_grad_norm", None)):
            if sends == "activations" and getattr(train, key) != default:
                raise ValueError(
                    f"[train] {key}: goes with clients that hold the whole model; with "
                    f"{method_name(self.method)!r} client and server each step with every batch, by their own "
                    "gradients alone"
                )
        return self

    @model_validator(mode="after")
    def _frozen_layers_fit(self) -> Self:
        if not self.train.cache_frozen_layers:
            return self
        if TASK_KINDS[self.task.kind].masks:
            raise ValueError(
                "[train] cache_frozen_layers: goes with inputs that are the same in every epoch; "
                f"{self.task.kind!r} draws new masks each time"
            )
        if self.method.exchange != "weights":
            raise ValueError(
                f"[train] cache_frozen_layers: goes with methods that send weights, not with "
                f"{method_name(self.method)!r} as set here, which sends {self.method.exchange}"
            )
        if self.head.kind in ("psum", "hsum"):
            raise ValueError(
                f"[train] cache_frozen_layers: [head] kind {self.head.kind!r} takes the states of four layers, "
                "and only those that enter the lowest trained layer are kept; expected one of: cls, mean"
            )
        return self

    @model_validator(mode="after")
    def _packing_fits(self) -> Self:
        if self.data.long_text == "pack" and TASK_KINDS[self.task.kind].labeled:
            unlabeled = named(lambda kind: not kind.labeled)
            raise ValueError(f"[data] long_text: 'pack' goes with {unlabeled}, not with {self.task.kind!r}")
        return self

    @model_validator(mode="after")
    def _head_fits(self) -> Self:
        if self.head.kind is None:
            if self.head != Head():
                raise ValueError("[head] kind: is missing; expected one of: cls, mean, psum, hsum")
        elif not TASK_KINDS[self.task.kind].heads:
            headed = named(lambda kind: kind.heads)
            whose = f"[method] name: {method_name(self.method)!r} trains a head over whole texts, which"
            what = whose if "head" in self.method.presets() else "[head] kind:"
            raise ValueError(f"{what} goes with {headed}, not with {self.task.kind!r}")
        wanted = getattr(self.method, "head", None)
        if wanted not in (None, self.head.kind):
            raise ValueError(f"[method] head: is {wanted!r}, but [head] kind is {self.head.kind!r}; say it once")
        return self

    @model_validator(mode="after")
    def _head_options_fit(self) -> Self:
        if why := misfit(self.head.average, self.head.tokens, self.task.kind, self.train.padding):
            raise ValueError(why)
        if self.head.pooler and self.head.kind == "mean":
            raise ValueError("[head] pooler: takes token 0, so it does not go with 'mean'")
        return self

    @field_validator("method", mode="before")
    @classmethod
    def _method_by_name(cls, found: Any) -> Any:
        """A method may be written as in a job file: a mapping with its ``name`` and options."""
        if not isinstance(found, Mapping):
            return found
        options = dict(found)
        name = options.pop("name", None)
        if name not in METHODS:
            raise ValueError(f"{name!r} is not a method; {did_you_mean(str(name), METHODS)}")
        return METHODS[name](**options)

    if TYPE_CHECKING:  # so that an editor completes the tables, and a mistake is one sentence from Python, too

        def __init__(self, **tables: Unpack[Given]) -> None: ...
    else:

        def __init__(self, **tables: Any) -> None:
            try:
                super().__init__(**tables)
            except ValidationError as error:
                raise JobError(sentence(error, type(self))) from None

    def given(self) -> dict[str, Any]:
        """What was set, as the content of a job file of one stage; a method of the caller's own as it is."""
        tables = {name: getattr(self, name) for name in self.model_fields_set - {"stage", "start", "method"}}
        data = {name: table.model_dump(exclude_unset=True) for name, table in tables.items() if table is not None}
        name = method_name(self.method)
        if name in METHODS:
            return {**data, "method": {"name": name, **self.method.model_dump(exclude_unset=True)}}
        return {**data, "method": self.method}

    def dump(self) -> dict[str, Any]:
        """The resolved job as plain data, with the method's name."""
        data = self.model_dump(mode="json", fallback=str)
        data["method"] = {"name": method_name(self.method), **options_of(self.method)}
        return data

    @property
    def between_sites(self) -> bool:
        """Whether the clients are sites, with rows of their own."""
        return self.engine.name == "flower"


def method_name(method: Method) -> str:
    """The name of a method in a job file; of one that is not registered the name of its class."""
    return next((name for name, kind in METHODS.items() if kind is type(method)), type(method).__name__)
