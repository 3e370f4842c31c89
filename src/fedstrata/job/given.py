"""The tables of a job as Python may give them, for type checkers and editors alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Required, TypedDict

if TYPE_CHECKING:
    from fedstrata.job.adapter_table import Adapter
    from fedstrata.job.data_tables import Clients, Data
    from fedstrata.job.engine_table import Engine
    from fedstrata.job.head_table import Head
    from fedstrata.job.privacy_table import Privacy
    from fedstrata.job.tables import Client, Model, Output, Server, Task
    from fedstrata.job.track_table import Track
    from fedstrata.job.train_table import Train
    from fedstrata.job.wire_table import Wire
    from fedstrata.plan.plan import Method

Content = Mapping[str, Any]
"""A table as in a job file."""


class Given(TypedDict, total=False):
    """The fields of :class:`fedstrata.job.tables.Job`, each as an object or as in a job file."""

    stage: str
    start: str
    model: Model | Content | None
    task: Required[Task | Content]
    data: Required[Data | Content]
    clients: Clients | Content
    method: Required[Method | Content]
    train: Train | Content
    head: Head | Content
    adapter: Adapter | Content
    server: Server | Content
    wire: Wire | Content
    client: Client | Content
    privacy: Privacy | Content
    engine: Engine | Content
    track: Track | Content
    output: Output | Content
