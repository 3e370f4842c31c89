"""A job: what to train, on what, by which method. Its tables are those of the job file."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, model_validator

from fedstrata.errors import did_you_mean
from fedstrata.job.label_tables import TABLES
from fedstrata.methods import METHODS
from fedstrata.plan.kinds import LANGUAGE
from fedstrata.plan.plan import Method

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]


def _words(names: Any) -> Any:
    if not isinstance(names, list):
        return names
    return [str(name) if isinstance(name, int) and not isinstance(name, bool) else name for name in names]


Names = Annotated[list[str], BeforeValidator(_words)]
"""Names that may also be written as whole numbers, as class labels often are."""
Source = str | list[str] | dict[Annotated[str, Field(pattern=r"^[\w-]+$")], str | list[str]]
"""A file, folder or data set id; several; or several by name, whose test rows are scored apart as well."""


class Table(BaseModel):
    """A table of the job file: unknown keys and wrong types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Model(Table):
    """``[model]``: what the clients start from."""

    name: Annotated[str, Field(min_length=1)] | None = None
    """Hub id, folder, or ``demo:minilm``."""
    config: dict[str, Any] | None = None
    """In place of ``name``: a new model of this Hugging Face config, the keys over those of its ``preset``."""
    tokenizer: Annotated[str, Field(min_length=1)] | None = None
    """Of a new model: folder or hub id; trained on the training rows when absent."""

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        if (self.name is None) == (self.config is None):
            found = "neither" if self.name is None else "both"
            raise ValueError(f"name: found {found} of name and [model.config]; legal: one of them")
        if self.tokenizer is not None and self.config is None:
            raise ValueError("tokenizer: goes with [model.config] and only with it; a model by name has its own")
        return self


METRICS = {
    "mlm": ("loss", "perplexity", "accuracy"),
    "clm": ("loss", "perplexity", "accuracy"),
    "classify": ("accuracy", "macro_f1", "f1", "matthews"),
    "pair": ("accuracy", "macro_f1", "f1", "matthews"),
    "regress": ("pearson", "spearman", "loss"),
    "tag": ("f1", "precision", "recall", "accuracy"),
}
"""Task kind -> the metrics it scores; the first is its default headline."""


class Task(Table):
    """``[task]``: what is learnt."""

    kind: Literal["mlm", "clm", "classify", "pair", "regress", "tag"]
    labels: Names | None = None
    """Class names in their order; read from the training rows (sorted) when absent."""
    metric: str | None = None
    """The headline score."""
    positive: Annotated[Names, Field(min_length=1)] | None = None
    """``f1`` is the mean F1 of these classes; for two classes the second one is the default."""
    mask_probability: Annotated[float, Field(gt=0, lt=1)] = 0.15

    @model_validator(mode="after")
    def _metric_fits(self) -> Self:
        if self.metric is not None and self.metric not in METRICS[self.kind]:
            raise ValueError(
                f"metric: {self.metric!r} is not a score of {self.kind!r}; "
                f"{did_you_mean(self.metric, METRICS[self.kind])}"
            )
        if self.labels is not None and len(set(self.labels)) < max(2, len(self.labels)):
            raise ValueError(f"labels: needs two or more different names, found {self.labels}")
        return self

    @property
    def headline(self) -> str:
        """The metric that stands for the run."""
        return self.metric or METRICS[self.kind][0]


class Data(Table):
    """``[data]``: whose rows, from where."""

    train: Source = ""
    """May be absent between sites, which have rows of their own."""
    test: Source | None = None
    holdout: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the training rows held out as test rows where ``test`` is absent."""
    text: str | list[str] = "text"
    """Column of the text, for ``tag`` of the words; two columns for ``pair``, one or two for ``regress``."""
    label: str = "label"
    columns: list[str] | None = None
    """Names of the columns of files that have no header line."""
    limit: Positive | None = None
    """Read at most so many rows of each of train and test (of each named source of them): a quick try."""
    long_text: Literal["chunk", "truncate", "pack"] | None = None
    """Text beyond ``train.max_tokens``: ``chunk`` makes further examples of it (default of ``mlm``, ``clm`` and
    ``tag``), ``truncate`` drops it; ``pack``, of ``mlm`` and ``clm``, joins a client's texts and cuts them into
    blocks of that many tokens."""
    documents: Literal["lines", "blank", "headings"] = "lines"
    """A row of a plain txt file: a line, lines up to a blank one, or an article under a heading ``= Title =``."""


class Clients(Table):
    """``[clients]``: who holds which rows."""

    count: Positive | None = None
    """Number of clients; by default what ``sizes``, ``table`` or ``column`` give, else 6."""
    partition: Literal["iid", "dirichlet", "sizes", "quantity_skew", "label_sorted", "label_table", "column"] = (
        "iid"
    )
    alpha: Annotated[float, Field(gt=0)] = 1.0
    """Concentration of ``dirichlet``: small is uneven."""
    min_examples: Annotated[int, Field(ge=0)] = 1
    """No client gets fewer rows; 0 allows empty ones, which are left out of the run."""
    sizes: list[float] | None = None
    """For ``sizes``: rows per client (integers) or shares of all rows (adding up to at most 1)."""
    table: str | list[dict[str, Annotated[float, Field(ge=0)]]] | None = None
    """For ``label_table``: per client the share of each label, or the name of a table that is shipped."""
    column: str | None = None
    """For ``column``: the column whose values are the clients."""
    test: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of its own rows that each client keeps to test on; models are then scored there, client by client."""
    fraction: Share = 1.0
    """Share of the clients asked in each round, at least one."""

    @model_validator(mode="after")
    def _partition_has_its_key(self) -> Self:
        companions = {"sizes": "sizes", "table": "label_table", "column": "column"}
        for key, partition in companions.items():
            if (self.partition == partition) != (getattr(self, key) is not None):
                raise ValueError(f"{key}: goes with partition = {partition!r} and only with it")
        if self.sizes is not None and self.count not in (None, len(self.sizes)):
            raise ValueError(f"count: is {self.count}, but sizes names {len(self.sizes)} clients")
        if isinstance(self.table, str) and self.table not in TABLES:
            raise ValueError(f"table: {self.table!r} is not shipped; {did_you_mean(self.table, TABLES)}")
        if self.table is not None:
            rows = len(TABLES[self.table] if isinstance(self.table, str) else self.table)
            if self.count not in (None, rows) or not rows:
                raise ValueError(f"count: is {self.count}, but table has {rows} clients")
        return self


class Train(Table):
    """``[train]``: one client's work in one round."""

    epochs: Positive = 1
    steps: Positive | None = None
    """Stop a client's round after so many steps."""
    batch_size: Positive = 32
    learning_rate: Annotated[float, Field(gt=0)] = 5e-5
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The learning rate is multiplied by it after every local epoch; each round starts anew."""
    lr_schedule: Literal["constant", "polynomial"] = "constant"
    """Over the whole run: after the warm-up the learning rate stays, or falls to 0."""
    lr_power: Annotated[float, Field(gt=0)] = 1.0
    """Exponent of the polynomial; 1 is a straight line."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the run over which the learning rate rises from 0."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    optimizer_state: Literal["reset", "persist"] = "reset"
    """The optimizer's state is reset in every round, or persists from the client's last one."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """AdamW's, on everything but biases and norms."""
    max_tokens: Annotated[int, Field(ge=8)] = 128
    dropout: bool = True
    """False sets every dropout of the model to 0."""
    seed: Annotated[int, Field(ge=0)] = 0
    proximal_mu: Annotated[float, Field(ge=0)] = 0.0
    """FedProx: adds mu/2 times the squared distance to the received weights to the loss."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the forward and backward pass; weights stay fp32. ``auto`` is bf16 where the processor has it."""
    mlm_head: Literal["masked", "full"] = "masked"
    """Compute the MLM head at masked positions only, or everywhere as the papers do."""
    group_by_length: bool = True
    """Make batches of texts of similar length, which pads less; else as they are drawn."""
    padding: Literal["batch", "max"] = "batch"
    """Pad to the longest text of a batch, or to ``max_tokens``."""
    feature_cache_gb: Annotated[float, Field(ge=0)] = 8.0
    """Disk space per client, in GB, for caching a frozen encoder's hidden states; 0 turns the cache off."""
    keep_feature_cache: bool = False
    """Keep the cache when the run has ended."""

    @property
    def width(self) -> int | None:
        """Tokens that every batch is padded to; None pads to the longest text of a batch."""
        return self.max_tokens if self.padding == "max" else None

    @property
    def feature_cache_bytes(self) -> int:
        """Bytes of disk for a client's feature cache."""
        return int(self.feature_cache_gb * 1e9)


class Head(Table):
    """``[head]``: what stands over the encoder in classification and regression, under any method."""

    kind: Literal["cls", "mean", "psum", "hsum"] | None = None
    """Absent: what the checkpoint has, or the architecture's own."""
    classifier: Literal["branch", "shared"] = "branch"
    """Of psum and hsum: one for each of the four branches, or one for all."""
    pooler: bool = False
    """The encoder's pooler stands between token 0 and the classifier."""
    average: Literal["logits", "probabilities"] = "logits"
    """What is averaged over the branches to predict."""
    tokens: Literal["text", "inner", "all"] = "text"
    """Of ``mean``: the tokens of the text, those without the first and the last, or all with the padding."""


class Server(Table):
    """``[server]``: how the answers become the next model."""

    optimizer: Literal["sgd", "momentum", "adam", "yogi", "adagrad"] = "sgd"
    """What is done with the round's mean; ``sgd`` at learning rate 1 takes it as it is (FedAvg)."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """The server's step; by default 1 for sgd and momentum, 0.01 for the adaptive optimizers."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Of ``momentum``; beta 1 of the adaptive optimizers (adagrad: 0, as in its paper)."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    tau: Annotated[float, Field(gt=0)] = 1e-3
    evaluate: Literal["rounds", "end"] = "rounds"
    """Score the model after every round, or once at the end."""


class Wire(Table):
    """``[wire]``: the form of tensors on their way."""

    dtype: Literal["fp32", "fp16", "bf16", "int8"] = "fp32"
    """Both ways; ``int8`` has a scale per row and adds what a message leaves out to the next."""


class Client(Table):
    """``[client]``: payloads that clients allow to leave (simulation only; real sites say so in site.toml)."""

    may_send: list[Literal["weights", "hidden_states", "activations"]] = ["weights", "activations"]
    """``weights``: parts of the model; ``hidden_states``: the encoder's output for every text, with the labels;
    ``activations``: hidden states of every batch and their gradients (split learning)."""


class Engine(Table):
    """``[engine]``: what carries the exchanges."""

    name: Literal["inprocess", "flower"] = "inprocess"
    federation: str | None = None
    """Of flower: the folder that ``fedstrata federation init`` made, or its server.toml."""
    deadline: Annotated[float, Field(gt=0)] = 3600.0
    """Of flower: seconds to wait for a site to connect, and for its answer to a request."""
    quorum: Share = 0.5
    """Of flower: share of the sites asked that must answer; with fewer the run stops."""
    insecure: bool = False
    """Of flower: without TLS and keys, on this machine alone."""

    @model_validator(mode="after")
    def _federation_fits(self) -> Self:
        if (self.name == "flower") != (self.federation is not None):
            raise ValueError("federation: goes with name = 'flower' and only with it")
        return self


class Output(Table):
    """``[output]``: where the run is written, and what is told of it."""

    dir: str = "runs/try"
    client_models: bool = False
    """Also save each client's own model where clients keep parts."""
    target: float | None = None
    """A value of the headline metric: rounds and bytes until it is first reached are told."""


class Job(Table):
    """Everything one stage needs, checked and complete."""

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
    server: Server = Server()
    wire: Wire = Wire()
    client: Client = Client()
    engine: Engine = Engine()
    output: Output = Output()

    @model_validator(mode="after")
    def _rows_are_somewhere(self) -> Self:
        if not self.data.train and not self.between_sites:
            raise ValueError("[data] train: is missing")
        return self

    @model_validator(mode="after")
    def _one_test(self) -> Self:
        if self.clients.test is not None and self.data.test is not None:
            raise ValueError("[clients] test: the clients' own rows are the test rows, so [data] test must go")
        return self

    @model_validator(mode="after")
    def _wire_fits(self) -> Self:
        if self.method.exchange == "activations" and self.wire.dtype == "int8":
            raise ValueError(
                "[wire] dtype: 'int8' is for weights; hidden states and gradients travel in fp32, fp16 or bf16"
            )
        return self

    @model_validator(mode="after")
    def _packing_fits(self) -> Self:
        if self.data.long_text == "pack" and self.task.kind not in LANGUAGE:
            raise ValueError(f"[data] long_text: 'pack' goes with mlm and clm, not with {self.task.kind!r}")
        return self

    @model_validator(mode="after")
    def _head_fits(self) -> Self:
        head = self.head
        if head.kind is None and head != Head():
            raise ValueError("[head] kind: is missing; legal: cls, mean, psum, hsum")
        if head.kind is not None and self.task.kind not in ("classify", "pair", "regress"):
            raise ValueError(f"[head] kind: goes with classify, pair and regress, not with {self.task.kind!r}")
        if head.average == "probabilities" and self.task.kind == "regress":
            raise ValueError("[head] average: 'regress' has no probabilities; legal: logits")
        if head.tokens == "all" and self.train.padding != "max":
            raise ValueError(
                "[head] tokens: 'all' needs train.padding = 'max', else the mean depends on the batch"
            )
        wanted = getattr(self.method, "head", None)
        if wanted not in (None, head.kind):
            raise ValueError(f"[method] head: is {wanted!r}, but [head] kind is {head.kind!r}; say it once")
        if head.pooler and head.kind == "mean":
            raise ValueError("[head] pooler: takes token 0, so it does not go with 'mean'")
        return self

    def dump(self) -> dict[str, Any]:
        """The resolved job as plain data, with the method's name."""
        data = self.model_dump(mode="json")
        data["method"] = {"name": method_name(self.method), **data["method"]}
        return data

    @property
    def between_sites(self) -> bool:
        """Whether the clients are sites, with rows of their own."""
        return self.engine.name == "flower"


def method_name(method: Method) -> str:
    """The name under which a method stands in the menu."""
    return next(name for name, kind in METHODS.items() if kind is type(method))
