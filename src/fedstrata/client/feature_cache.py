"""The feature cache: a frozen encoder's hidden states as its head takes them, computed once and kept on disk.

Heads over a frozen encoder are trained for many epochs; only the first needs the encoder. Texts of
the same length go through it together, without padding, and so do those that the cache has no room for: up to
rounding the numbers do not depend on what is cached.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

from fedstrata.client.working_model import WorkingModel
from fedstrata.data.tokens import Tokens
from fedstrata.models.heads import HeadedModel
from fedstrata.plan.kinds import Index
from fedstrata.tasks import Examples, Task
from fedstrata.wire.files import checksum_of, reserve, write_bytes

if TYPE_CHECKING:
    from fedstrata.job.tables import Train

Array = npt.NDArray[np.float32]
FEATURES = "features"
"""Folder of a client's cache, in the folder of what it keeps."""
ROWS = 32
"""Texts that go through the encoder together, at most."""
CHUNK = 8 * ROWS
"""Texts computed before they are written, so that memory does not grow with the client."""


def layout(lengths: Index, branches: int, width: int) -> tuple[Index, Index]:
    """Positions T of each text that the head takes, and the elements that they are: ``n * T * H``.

    Args:
        lengths: tokens of each text, ``[m]``.
        branches: n, of the head: one takes a vector, several take every token's state.
        width: H.
    """
    tokens = lengths if branches > 1 else np.ones_like(lengths)
    return tokens, branches * tokens * width


def fitting(elements: Index, limit: int) -> npt.NDArray[np.bool_]:
    """Which texts are cached: the first ones, as far as ``limit`` bytes reach."""
    cached: npt.NDArray[np.bool_] = np.cumsum(4 * elements) <= limit
    return cached


class FeatureCache:
    """One client's hidden states of a frozen encoder, on its disk as far as ``train.feature_cache_gb`` reaches.

    Args:
        working: the model, one of :mod:`fedstrata.models.heads`; its encoder must not change any more.
        task: makes batches.
        train: the job's ``[train]``.
        examples: all examples.
        index: the client's, ``[m]``.
        folder: where the cache is, or will be.
        on_encoded: called as texts are encoded to be cached: how many are, and of how many.
        encoder: its :func:`encoder_digest`, where it is known.
        rows: most texts that go through the encoder together.
    """

    def __init__(  # noqa: PLR0913  # all that the cached numbers depend on
        self,
        working: WorkingModel,
        task: Task,
        train: Train,
        examples: Examples,
        index: Index,
        folder: Path,
        on_encoded: Callable[[int, int], None] = lambda done, total: None,
        encoder: str | None = None,
        rows: int = ROWS,
    ) -> None:
        self.working, self.task, self.train, self.examples = working, task, train, examples
        self.rows = rows
        self.model: HeadedModel = working.model
        lengths = examples.tokens.lengths[index]
        count, width = self.model.branches, self.model.config.hidden_size
        tokens, sizes = layout(lengths, count, width)
        cached = fitting(sizes, train.feature_cache_bytes)
        self.encoder = [part.name for part in working.parts.each if part.kind not in ("pooler", "head")]
        self.lengths = dict(zip(index.tolist(), lengths.tolist(), strict=True))
        self.stored = self._computed(lengths[cached])
        starts = np.cumsum(sizes) - sizes
        self.places = {
            int(example): (int(start), (count, int(n), width))
            for example, start, n in zip(index[cached], starts[cached], tokens[cached], strict=True)
        }
        if self.places:
            self.digest = encoder or encoder_digest(self.model)
            self.disk = self._made(folder, index[cached], int(sizes[cached].sum()), on_encoded)

    def inputs(self, chosen: Index) -> dict[str, torch.Tensor]:
        """The model's inputs for some examples: ``encoded`` ``[B, n, T, H]`` and their ``attention_mask``."""
        return collate(self.of(chosen), self.train.width)

    def missing(self, chosen: Index) -> Index:
        """Tokens computed for those of the examples that are not cached."""
        absent = [self.lengths[i] for i in chosen.tolist() if i not in self.places]
        return self._computed(np.asarray(absent, np.int64))

    def _computed(self, lengths: Index) -> Index:
        """Tokens that texts of these lengths take in the encoder."""
        return lengths if self.train.width is None else np.full_like(lengths, self.train.width)

    def of(self, chosen: Index) -> list[Array]:
        """What the head takes of each of some examples, ``[n, T, H]``: from the disk, or computed."""
        absent = np.asarray([i for i in chosen.tolist() if i not in self.places], np.int64)
        found = dict(zip(absent.tolist(), self._compute(absent), strict=True))
        if there := set(chosen.tolist()) - found.keys():
            found |= self._read(there)
        return [found[i] for i in chosen.tolist()]

    def _read(self, chosen: Iterable[int]) -> dict[int, Array]:
        """From the disk; the file is open no longer, as there may be more clients than files that may be open."""
        found = {}
        with self.disk.open("rb", buffering=0) as file:
            for i in chosen:
                start, shape = self.places[i]
                file.seek(4 * start)
                found[i] = np.empty(shape, np.float32)
                file.readinto(found[i].data)
        return found

    def _compute(self, chosen: Index) -> list[Array]:
        lengths = np.asarray([self.lengths[i] for i in chosen.tolist()], np.int64)
        states: list[Array] = [np.empty(0, np.float32)] * len(chosen)
        for length in np.unique(lengths):
            places = np.flatnonzero(lengths == length)
            for some in (places[start : start + self.rows] for start in range(0, len(places), self.rows)):
                for place, state in zip(some, self._encode(chosen[some]), strict=True):
                    states[place] = state
        return states

    def _encode(self, chosen: Index) -> Array:
        """What the head takes of texts of one length, ``[B, n, T, H]``."""
        device = self.model.device
        batch = self.task.batch(self.examples, chosen, np.random.default_rng(0), self.train.width).to(device)
        encoder = getattr(self.model, self.model.base_model_prefix)
        learning = encoder.training
        encoder.eval()
        with (
            torch.no_grad(),
            torch.autocast(device.type, torch.bfloat16, enabled=self.train.precision == "bf16"),
            self.working.frozen_in_bf16(self.encoder),
        ):
            states: Array = self.model.encode(**batch.inputs).float().cpu().numpy()
        encoder.train(learning)
        return states[:, :, : self.lengths[int(chosen[0])]]

    def _made(self, folder: Path, index: Index, total: int, on_encoded: Callable[[int, int], None]) -> Path:
        """The cache's file, which is made if it is not there as it must be."""
        path, note = folder / "features.f32", folder / "features.json"
        wanted = {"key": self._key(index), "elements": total}
        if not (note.exists() and _read(note) == {**wanted, "checksum": checksum_of(path)}):
            folder.mkdir(parents=True, exist_ok=True)
            for old in (note, path):  # also a link, in a folder from somebody else
                old.unlink(missing_ok=True)
            with path.open("w+b") as file:
                reserve(file, path, 4 * total)
                disk = np.memmap(file, np.float32, "r+", shape=(total,))
            order = index[np.argsort([self.lengths[i] for i in index.tolist()], kind="stable")]
            for start in range(0, len(order), CHUNK):
                some = order[start : start + CHUNK]
                for i, state in zip(some.tolist(), self._compute(some), strict=True):
                    disk[self.places[i][0] : self.places[i][0] + state.size] = state.ravel()
                on_encoded(start + len(some), len(order))
            disk.flush()
            del disk
            wanted["checksum"] = checksum_of(path)
            write_bytes(note, json.dumps(wanted).encode())  # last: half a file counts as none
        return path

    def _key(self, index: Index) -> str:
        """A hash of all that the cached numbers depend on."""
        how = (self.digest, self.model.settings, self.train.precision == "bf16", self.train.width, self.rows)
        digest = hashlib.sha256(repr(how).encode())
        tokens = self.examples.tokens
        first, lengths = tokens.offsets[index], tokens.lengths[index]
        places = np.repeat(first - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
        types = tokens.types[places] if len(tokens.types) else tokens.types
        for array in (index, lengths, tokens.ids[places], types):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def encoder_digest(model: HeadedModel) -> str:
    """A hash of the encoder's weights."""
    digest = hashlib.sha256()
    encoder: torch.nn.Module = getattr(model, model.base_model_prefix)
    for name, parameter in encoder.named_parameters():
        if not name.startswith("pooler."):
            digest.update(np.ascontiguousarray(parameter.detach().cpu().numpy()).data)
    return digest.hexdigest()


def _read(note: Path) -> Any:
    """What a cache's note says; None if it is damaged."""
    try:
        return json.loads(note.read_bytes())
    except ValueError:
        return None


class CollectedFeatures:
    """The hidden states that clients sent, on the server's disk.

    Args:
        files: one message of each client, as :mod:`fedstrata.exchanges.hidden_states` decodes them.
        train: the job's ``[train]``.
    """

    def __init__(self, files: Sequence[Path], train: Train) -> None:
        self.train = train
        self.files: list[Any] = [safe_open(path, "pt") for path in files]
        each = [(file.get_tensor("tokens"), file.get_tensor("labels")) for file in self.files]
        self.tokens = torch.cat([tokens for tokens, _ in each])
        self.labels = torch.cat([labels for _, labels in each])
        self.home = np.repeat(np.arange(len(each)), [len(tokens) for tokens, _ in each])
        self.starts = torch.cat([tokens.cumsum(0) - tokens for tokens, _ in each]).numpy()
        self.stored = np.empty(0, np.int64)
        self.index = np.arange(len(self.tokens))

    def inputs(self, chosen: Index) -> dict[str, torch.Tensor]:
        """As :meth:`FeatureCache.inputs`."""
        made = []
        for i in chosen.tolist():
            rows = slice(int(self.starts[i]), int(self.starts[i]) + int(self.tokens[i]))
            made.append(self.files[self.home[i]].get_slice("features")[rows].transpose(0, 1).numpy())
        return collate(made, self.train.width)

    def missing(self, chosen: Index) -> Index:
        """Nothing: the server has no encoder to run."""
        return self.stored

    def examples(self) -> Examples:
        """Their lengths and labels; the ids of the tokens stayed with the clients."""
        ends = np.concatenate([[0], np.cumsum(self.tokens.numpy())]).astype(np.int64)
        tokens = Tokens(np.zeros(int(ends[-1]), np.int32), ends, self.index)
        labels = self.labels.double() if self.labels.is_floating_point() else self.labels.long()
        return Examples(tokens, labels.numpy())


def collate(made: Sequence[Array], columns: int | None) -> dict[str, torch.Tensor]:
    """Features ``[n, T, H]`` of some texts as the model's inputs, filled up with zeros on the right."""
    count, _, width = made[0].shape
    lengths = torch.tensor([one.shape[1] for one in made])
    columns = columns if columns and count > 1 else int(lengths.max())
    features = torch.zeros(len(made), count, columns, width)
    for row, one in zip(features, made, strict=True):
        row[:, : one.shape[1]] = torch.from_numpy(one)
    return {"encoded": features, "attention_mask": (torch.arange(columns) < lengths[:, None]).long()}
