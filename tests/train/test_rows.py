"""Batches: which documents stand in which rows, epoch after epoch, and a place to go on from."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benthic.errors import BadTrainingData
from benthic.models.deepseek_v41_config import ModelConfig
from benthic.train import data
from benthic.train.rows import RowBatch, RowLoader, spans_of
from benthic.train.settings import Form, Settings
from tests.train.small import COUNTS, IDS, IMAGE, SMALL, small_json, write_folder

CPU = torch.device("cpu")
VISION = ModelConfig.from_json(small_json()).vision
FORMS = (Form(), Form(images=True), Form(True, True))
PARTS = list(COUNTS)
Folder = tuple[Path, data.Manifest]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return write_folder(tmp_path)


def loader_of(folder: Folder, settings: Settings = SMALL) -> RowLoader:
    return RowLoader(*folder, settings, IDS, CPU, VISION)


def documents_in(rows: Tensor) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = []
    for row in rows.tolist():
        row = row[: len(row) - next(i for i, id in enumerate(reversed(row)) if id != IDS.pad)]
        starts = [i for i, id in enumerate(row) if id == IDS.bos]
        out += [tuple(row[a:b]) for a, b in zip(starts, [*starts[1:], len(row)], strict=True)]
    return out


def parts_in(batch: RowBatch) -> list[set[str]]:
    """Of each short row, long ones left out."""
    pieces = batch.ids.view(-1, SMALL.length)[2 if batch.ids.shape[1] > SMALL.length else 0 :]  # behind a long row
    return [{PARTS[document[1] - 10] for document in documents_in(piece[None])} for piece in pieces]


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_is_laid_out_as_the_settings_say(folder: Folder, form: Form) -> None:
    loader = loader_of(folder)
    shape = (3, 64) if form.long else (6, 32)
    want = [{run.part} for run in SMALL.layout(form) for _ in range(run.rows) if run.length == 32]
    for _ in range(12):
        batch = loader.next(form)
        assert batch.ids.shape == shape
        assert batch.ids.dtype == torch.int64
        assert batch.parts == SMALL.layout(form)
        assert parts_in(batch) == want
        assert (batch.pictures is not None) == form.images
        if form.long:  # a needle that does not fit a piece goes over its border
            assert {document[1] for document in documents_in(batch.ids[:1])} == {10}


def test_what_does_not_fit_into_a_short_row_stands_in_long_ones_alone(folder: Folder) -> None:
    ids = data.read_part(*folder, "needle")
    lengths = np.diff(data.document_starts(ids, IDS.bos))
    assert (lengths > 32).any()
    assert (lengths <= 32).any()
    loader = loader_of(folder)
    short = [len(d) for _ in range(10) for d in documents_in(loader.next().ids[:1])]
    long = [len(d) for _ in range(10) for d in documents_in(loader.next(Form(True)).ids[:1])]
    assert set(short) == {n for n in lengths.tolist() if n <= 32}
    assert set(long) == set(lengths.tolist())


def test_an_epoch_has_every_document_once(folder: Folder) -> None:
    ids = data.read_part(*folder, "prose")
    starts = data.document_starts(ids, IDS.bos)
    want = sorted(tuple(ids[a:b].tolist()) for a, b in pairwise(starts))
    loader = loader_of(folder, replace(SMALL, rows=3, long_from=1.0, images_from=1.0))  # one row of prose in a batch
    stream = loader.streams["prose 32"]
    orders = []
    for epoch in range(2):
        rows = []
        while True:
            rows.append(loader.next().ids[1:2])
            if stream.epoch != epoch or stream.row == len(stream._packed[epoch].result()[0]):
                break
        assert sorted(documents_in(torch.cat(rows))) == want
        orders.append(documents_in(torch.cat(rows)))
    assert orders[0] != orders[1]


def test_a_seek_goes_on_with_the_same_batches(folder: Folder) -> None:
    loader = loader_of(folder)
    forms = [FORMS[i % 3] for i in range(40)]
    batches, places = [], []
    for form in forms:  # several epochs of every part
        places.append(loader.at)
        batches.append(loader.next(form))
    assert min(epoch for epoch, _ in loader.at.values()) >= 2
    for start in (0, 1, 13, 30):
        other = loader_of(folder)
        other.seek(places[start])
        assert other.at == places[start]
        for form, want in list(zip(forms, batches, strict=True))[start : start + 8]:
            got = other.next(form)
            assert torch.equal(got.ids, want.ids)
            assert (got.pictures is None) == (want.pictures is None)
            if got.pictures is not None and want.pictures is not None:
                assert all(map(torch.equal, got.pictures, want.pictures))


def test_a_sample_is_the_next_batch_and_moves_nothing(folder: Folder) -> None:
    loader = loader_of(folder)
    for i in range(30):
        at = loader.at
        samples = [loader.sample(form) for form in FORMS]
        assert loader.at == at
        assert torch.equal(loader.next(FORMS[i % 3]).ids, samples[i % 3].ids)


def test_the_seed_changes_the_order(folder: Folder) -> None:
    first, other = (loader_of(folder, replace(SMALL, seed=seed)).next() for seed in (0, 1))
    assert not torch.equal(first.ids, other.ids)


def test_more_rows_than_an_epoch_has(folder: Folder) -> None:
    batch = loader_of(folder, replace(SMALL, rows=60, parts="needle=20,prose,copy=1")).next()
    assert batch.ids.shape == (60, 32)
    assert {d[1] for d in documents_in(batch.ids[:20])} == {10}


def test_parts_without_rows_are_not_read(folder: Folder) -> None:
    (folder[0] / "needle.ids.xz").unlink()
    settings = replace(SMALL, parts="prose,copy=1", long_parts="", weights="")
    assert parts_in(loader_of(folder, settings).next()) == [{"prose"}] * 5 + [{"copy"}]
    with pytest.raises(BadTrainingData, match="needle"):
        loader_of(folder)
    (folder[0] / "shapes.ids.xz").unlink()
    loader_of(folder, replace(settings, images_from=1.0)).next()
    with pytest.raises(BadTrainingData, match="shapes"):
        loader_of(folder, settings)


def test_large_ids_come_through(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, vocab_size=65536)
    loader = loader_of(folder)
    seen = torch.cat([loader.next(Form(images=True)).ids for _ in range(20)])
    assert int(seen.min()) == 0
    assert int(seen.max()) > 60_000
    known = {id for part in PARTS for id in data.read_part(*folder, part).tolist()}
    assert set(seen.flatten().tolist()) <= known | {IDS.pad}


def test_a_part_without_documents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrainingData, match="part copy"):
        loader_of(write_folder(tmp_path, copy=0))
    folder = write_folder(tmp_path)
    data.write_ids(tmp_path / "copy.ids.xz", np.array([7] * folder[1].tokens["copy"], dtype=np.uint16))
    with pytest.raises(BadTrainingData, match="part copy"):
        loader_of(folder)
    with pytest.raises(BadTrainingData, match=r"part copy .* no document fits into a row of 4 tokens"):
        loader_of(write_folder(tmp_path), replace(SMALL, length=4, long_length=64, rows=32, index_rows=0))


# Pictures


def test_every_image_token_knows_its_picture(folder: Folder) -> None:
    """Against a walk along the rows."""
    ids = data.read_part(*folder, "shapes")
    packed = data.pack_rows(ids, data.document_starts(ids, IDS.bos), 40, IDS.pad, np.random.default_rng(0))
    spans = spans_of(packed.ids, packed.documents, IDS)
    assert spans.numbers.shape == spans.offsets.shape == packed.ids.shape
    left = list(packed.documents)
    for row, numbers, offsets in zip(packed.ids.tolist(), spans.numbers.tolist(), spans.offsets.tolist(), strict=True):
        document, place = -1, 0
        for id, number, offset in zip(row, numbers, offsets, strict=True):
            if id == IDS.bos:
                document, place = left.pop(0), 0
            assert (number, offset) == ((document, place) if id == IMAGE else (-1, 0))
            place += id == IMAGE
    assert not left


def test_pictures_that_do_not_fit_the_documents_are_refused(folder: Folder) -> None:
    path, manifest = folder
    with pytest.raises(BadTrainingData, match="needs a model with a vision tower"):
        RowLoader(path, manifest, SMALL, IDS, CPU)
    file = data.pictures_file(path, "shapes")
    whole = file.read_bytes()
    (path / "else").mkdir()
    file.write_bytes(data.pictures_file(write_folder(path / "else", seed=5)[0], "shapes").read_bytes())
    with pytest.raises(BadTrainingData, match=r"part shapes: document \d has \d+ image tokens, its picture \d+"):
        loader_of(folder)
    file.unlink()
    with pytest.raises(BadTrainingData, match="part shapes has no pictures"):
        loader_of(folder)
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadTrainingData, match=r"shapes\.pictures\.jsonl\.xz"):
        loader_of(folder)
