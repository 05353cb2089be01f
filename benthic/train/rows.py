"""Batches of training rows: every part packed epoch after epoch, the next epoch ahead in a thread.

B rows of L tokens. Which rows stand in a batch is `Settings.layout`.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benthic.errors import BadTrainingData
from benthic.models.deepseek_v41_config import VisionConfig
from benthic.train import data
from benthic.train.loss import Ids
from benthic.train.pictures import Pictures, Shown
from benthic.train.settings import PROSE, SHAPES, Form, Run, Settings

Places = dict[str, tuple[int, int]]  # of each stream: (epoch, next row)


class RowBatch(NamedTuple):
    ids: Tensor  # [B, L] int64, on the device
    parts: tuple[Run, ...]  # in the order of the tokens
    pictures: Shown | None = None  # of the last tokens


class Spans(NamedTuple):
    """Which picture each token of some rows [n, L] belongs to, -1: none; and its place in the span."""

    numbers: NDArray[np.int64]
    offsets: NDArray[np.int64]


class Part:
    """All documents of one part, and the pictures in them."""

    def __init__(self, folder: Path, manifest: data.Manifest, name: str, ids: Ids):
        self.name = name
        self.ids = data.read_part(folder, manifest, name)
        if not len(self.ids) or self.ids[0] != ids.bos:
            raise BadTrainingData(folder, f"part {name} does not begin with a document of one token or more")
        self.starts = data.document_starts(self.ids, ids.bos)
        self.pictures: Pictures | None = None

    def read_pictures(
        self, folder: Path, manifest: data.Manifest, ids: Ids, vision: VisionConfig, device: torch.device
    ) -> Pictures:
        """Begin to draw them. Raises BadTrainingData."""
        records = data.read_pictures(folder, manifest, self.name)
        if not records:
            raise BadTrainingData(folder, f"part {self.name} has no pictures")
        self.pictures = Pictures(records, vision, device)
        tokens = np.add.reduceat(self.ids == ids.image, self.starts[:-1], dtype=np.int64)
        if len(tokens) != len(records) or (tokens != self.pictures.tokens).any():
            wrong = int(np.argmax(tokens != self.pictures.tokens)) if len(tokens) == len(records) else -1
            what = f"document {wrong} has {tokens[wrong]} image tokens, its picture {self.pictures.tokens[wrong]}"
            raise BadTrainingData(folder, f"part {self.name}: {what}; make the folder again for this model config")
        return self.pictures


def spans_of(rows: NDArray[np.uint16], documents: NDArray[np.int64], ids: Ids) -> Spans:
    """rows [n, L]; documents: numbers of those that begin in the rows, in order."""
    flat = rows.ravel()
    begins, image = flat == ids.bos, flat == ids.image
    numbers = np.where(image, documents[np.cumsum(begins) - 1], -1)
    seen = np.cumsum(image)
    before = np.maximum.accumulate(np.where(begins, seen, 0))  # image tokens before the document
    return Spans(numbers.reshape(rows.shape), np.where(image, seen - before - 1, 0).reshape(rows.shape))


class Stream:
    """Rows of one part at one length, without end."""

    def __init__(self, part: Part, length: int, seed: list[int], ids: Ids, device: torch.device):
        self.part, self.length, self._seed, self._ids, self._device = part, length, seed, ids, device
        sizes = np.diff(part.starts)
        # the answers of a skill stand at the end: what does not fit teaches nothing
        self.documents = np.flatnonzero(sizes <= length) if part.name != PROSE else np.arange(len(sizes))
        if not len(self.documents):
            raise BadTrainingData(f"part {part.name}", f"no document fits into a row of {length} tokens")
        self.most = length // int(sizes[self.documents].min())  # documents in a row
        self._pool = ThreadPoolExecutor(1)
        self._packed: dict[int, Future[tuple[Tensor, Spans | None]]] = {}
        self.seek(0, 0)

    def seek(self, epoch: int, row: int) -> None:
        self.epoch, self.row = epoch, row
        for other in [e for e in self._packed if e not in (epoch, epoch + 1)]:
            self._packed.pop(other).cancel()
        for wanted in (epoch, epoch + 1):
            if wanted not in self._packed:
                self._packed[wanted] = self._pool.submit(self._pack, wanted)

    def _pack(self, epoch: int) -> tuple[Tensor, Spans | None]:
        rng = np.random.default_rng([*self._seed, epoch])
        rows = data.pack_rows(self.part.ids, self.part.starts, self.length, self._ids.pad, rng, self.documents)
        spans = None if self.part.pictures is None else spans_of(rows.ids, rows.documents, self._ids)
        # two bytes an id, whatever their sign
        return torch.from_numpy(rows.ids.view(np.int16)).to(self._device), spans

    def take(self, count: int) -> tuple[Tensor, Spans | None]:
        """The next rows [count, length], int16, and their spans when the part has pictures."""
        rows: list[Tensor] = []
        spans: list[Spans] = []
        while count:
            packed, where = self._packed[self.epoch].result()
            end = min(self.row + count, len(packed))
            rows.append(packed[self.row : end])
            if where is not None:
                spans.append(Spans(*(values[self.row : end] for values in where)))
            count -= end - self.row
            self.row = end
            if count:
                self.seek(self.epoch + 1, 0)
        return torch.cat(rows), Spans(*(np.concatenate(v) for v in zip(*spans, strict=True))) if spans else None


class RowLoader:
    """Batches of every form that a run has. What is not in its settings is not read."""

    def __init__(
        self,
        folder: Path,
        manifest: data.Manifest,
        settings: Settings,
        ids: Ids,
        device: torch.device,
        vision: VisionConfig | None = None,
    ):
        """vision  of the model config, when there are rows of pictures. Raises BadTrainingData."""
        settings.check()
        self.settings, self.ids, self.device = settings, ids, device
        forms = {
            Form(),
            Form(settings.goes_long),
            Form(images=settings.shows),
            Form(settings.goes_long, settings.shows),
        }
        runs = sorted({(run.part, run.length) for form in forms for run in settings.layout(form) if run.rows})
        names = sorted({name for name, _ in runs})
        with ThreadPoolExecutor() as pool:
            parts = dict(zip(names, pool.map(lambda name: Part(folder, manifest, name, ids), names), strict=True))
        if SHAPES in parts:
            if vision is None:
                raise BadTrainingData(folder, f"part {SHAPES} needs a model with a vision tower")
            parts[SHAPES].read_pictures(folder, manifest, ids, vision, device)
        self.streams = {
            _key(name, length): Stream(
                parts[name], length, [settings.seed, settings.names.index(name), length], ids, device
            )
            for name, length in runs
        }

    @property
    def at(self) -> Places:
        return {key: (stream.epoch, stream.row) for key, stream in self.streams.items()}

    def seek(self, at: Places) -> None:
        """Go on where another loader had this `at`; a stream that it did not have stays at its beginning."""
        for key, stream in self.streams.items():
            if key in at:
                stream.seek(*at[key])

    def next(self, form: Form = Form()) -> RowBatch:  # noqa: B008 (an immutable record)
        settings = self.settings
        runs = settings.layout(form)
        taken = [self.streams[_key(run.part, run.length)].take(run.rows) for run in runs]
        ids = torch.cat([rows.flatten() for rows, _ in taken]).long() & 0xFFFF
        length = settings.long_length if form.long else settings.length
        shown: Shown | None = None
        part, spans = self.streams[_key(runs[-1].part, runs[-1].length)], taken[-1][1]
        if spans is not None and part.part.pictures is not None:
            room = part.most * runs[-1].rows
            shown = part.part.pictures.show(spans.numbers.ravel(), spans.offsets.ravel(), room)
        return RowBatch(ids.view(-1, length), runs, shown)

    def sample(self, form: Form) -> RowBatch:
        """The batch that `next` would give; the loader stays where it is."""
        at = self.at
        batch = self.next(form)
        self.seek(at)
        return batch


def _key(part: str, length: int) -> str:
    return f"{part} {length}"
