"""Held-out measures of a backbone in training, taken on the training graph: they need no serving engine and no network.

Every document stands in a row of its own. An answer counts when the best token is right at each of its positions given
the right ones before, which is when greedy decoding writes it exactly. The numbers that count are those of the packed
checkpoint through the serving engine; these are taken with the same weights, quantisers in force unless said.
"""

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benthic.text.tokenizer import Tokenizer
from benthic.train import data
from benthic.train.loop import Trainer
from benthic.train.loss import head_scores, response_weights, targets
from benthic.train.memory import Mode, Pick
from benthic.train.pictures import Pictures, Shown
from benthic.train.rows import spans_of
from benthic.train.settings import PROSE, SHAPES, Phase

log = logging.getLogger(__name__)

VISIBILITY: dict[str, Pick] = {"topk": "index", "dense": "all", "random": "random"}
PACKED, FLOAT = Phase(True, True), Phase(True, False)


class Score(NamedTuple):
    documents: int
    nats: float  # of response tokens, end token included
    tokens: int
    response_bytes: int
    exact: float  # share of documents whose answers are exactly right

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / max(self.response_bytes, 1)

    @property
    def nats_per_token(self) -> float:
        return self.nats / max(self.tokens, 1)


class Evaluator:
    def __init__(self, trainer: Trainer, folder: Path, manifest: data.Manifest, tokenizer: Tokenizer):
        self.trainer, self.folder, self.manifest = trainer, folder, manifest
        lengths = [len(tokenizer.token_bytes(id)) for id in range(len(tokenizer))]
        lengths[trainer.ids.eos] = 0
        self.byte_lengths = torch.tensor(lengths, device=trainer.device)
        self.image_loads = torch.zeros(0)  # [layers, E] of the last part scored

    def score(self, part: str, *, pick: Pick = "index", limit: int | None = None) -> Score:
        """One held-out part in the numerics now in force; the first `limit` documents.

        In short rows when every document fits, else in long ones: the shapes of training, so that nothing is compiled
        anew.
        """
        trainer, ids = self.trainer, data.read_part(self.folder, self.manifest, part)
        settings = trainer.settings
        starts = data.document_starts(ids, trainer.ids.bos)[: None if limit is None else limit + 1]
        long = settings.goes_long and int(np.diff(starts).max(initial=0)) > settings.length
        length = settings.long_length if long else settings.length
        in_batch = settings.rows * settings.length // length
        rows = data.one_per_row(ids, starts, length, trainer.ids.pad)
        records = data.read_pictures(self.folder, self.manifest, part) if trainer.config.vision is not None else []
        pictures: Pictures | None = None
        if records and trainer.config.vision is not None:
            pictures = Pictures(records, trainer.config.vision, trainer.device)
        nats = bytes_ = tokens = exact = 0.0
        self.image_loads = torch.zeros(0)
        for begin in range(0, len(rows), in_batch):
            numbers = np.arange(begin, min(begin + in_batch, len(rows)))
            count = len(numbers)
            numbers = np.append(numbers, np.repeat(numbers[:1], in_batch - count))  # full batches only
            shown: Shown | None = None
            if pictures is not None:
                spans = spans_of(rows[numbers], numbers, trainer.ids)
                shown = pictures.show(spans.numbers.ravel(), spans.offsets.ravel(), in_batch)
            batch = torch.from_numpy(rows[numbers].astype(np.int64)).to(trainer.device)
            row = self._batch(batch, pick, shown)[:, :count].sum(-1).tolist()
            nats, bytes_, tokens, exact = (a + b for a, b in zip((nats, bytes_, tokens, exact), row, strict=True))
        return Score(len(rows), nats, round(tokens), round(bytes_), exact / max(len(rows), 1))

    def _batch(self, ids: Tensor, pick: Pick, shown: Shown | None) -> Tensor:
        """ids [B, L] -> f64 [4, B]: nats, response bytes, response tokens, all answers right."""
        trainer = self.trainer
        embeds = None
        if shown is not None:
            assert trainer.tower is not None, "a part has pictures and the model no vision tower"
            embeds = shown.embeds(trainer.tower, ids.numel())
        # gradients stay on, though unused: without them every piece would be compiled a second time
        hidden, _ = trainer.hidden(ids, Mode(True, 0, pick), embeds)
        with torch.no_grad():
            loads = torch.stack(trainer.kernels.loads)[:, 1]
            self.image_loads = loads + self.image_loads if len(self.image_loads) else loads
            wanted = targets(ids)
            inside = response_weights(ids, trainer.ids)
            score = trainer.kernels.piece(head_scores)
            nats, right = score(hidden.detach(), trainer.model.head.weight.detach(), wanted)
            lengths = self.byte_lengths[wanted].view_as(inside) * inside
            wrong = ((~right).view_as(inside) & (inside > 0)).any(1) | (inside.sum(1) == 0)  # cut before its answer
            per_row = ((nats.view_as(inside) * inside).sum(1), lengths.sum(1), inside.sum(1), (~wrong).double())
            return torch.stack([value.double() for value in per_row])

    def text_loads(self, part: str) -> Tensor:
        """[layers, E] tokens per expert on packed rows of a part."""
        trainer, ids = self.trainer, data.read_part(self.folder, self.manifest, part)
        settings = trainer.settings
        starts = data.document_starts(ids, trainer.ids.bos)
        rows = data.pack_rows(ids, starts, settings.length, trainer.ids.pad, np.random.default_rng(0)).ids
        full = -(-len(rows) // settings.rows) * settings.rows
        rows = np.resize(rows, (full, settings.length))  # from the beginning again, where the last batch is not full
        total = torch.zeros(0)
        for batch in np.split(rows.astype(np.int64), len(rows) // settings.rows):
            trainer.hidden(torch.from_numpy(batch).to(trainer.device), Mode(True, 0))
            loads = torch.stack(trainer.kernels.loads)[:, 0].detach()
            total = loads + total if len(total) else loads
        return total


def report(
    trainer: Trainer, evaluator: Evaluator, *, documents: int | None = None, deadline: float = math.inf
) -> dict[str, Any]:
    """All measures: bits per byte packed and float, answers, needles by length and visibility, load of experts.

    documents  how many of each part, from its beginning; None: all
    deadline   monotonic seconds after which nothing new is begun; what is left out is named under "skipped"
    """
    manifest = evaluator.manifest
    out: dict[str, Any] = {"exact": {}, "needle": {}, "experts": {}}
    torch.manual_seed(trainer.settings.seed)  # of the random selections

    def perplexity() -> None:
        for name, phase in (("float", FLOAT), ("packed", PACKED)):
            trainer.enter(phase)
            valid = evaluator.score(f"{PROSE}.valid", limit=documents)
            out[f"{name}_bits_per_byte"] = valid.bits_per_byte
            out[f"{name}_nats_per_token"] = valid.nats_per_token
        out["packed_over_float_perplexity"] = math.exp(out["packed_nats_per_token"] - out["float_nats_per_token"])

    def answers(part: str) -> None:
        out["exact"][part.removesuffix(".valid")] = evaluator.score(part, limit=documents).exact
        if part.startswith(SHAPES):
            out["experts"]["images"] = spread(evaluator.image_loads)

    def retrieval(part: str) -> None:
        tokens = part.removesuffix(".valid").partition("-")[2]
        out["needle"][tokens] = {
            name: evaluator.score(part, pick=pick, limit=documents).exact for name, pick in VISIBILITY.items()
        }

    def loads() -> None:
        out["experts"]["text"] = spread(evaluator.text_loads(f"{PROSE}.valid"))

    held_out = [part for part in manifest.parts if part.endswith(".valid") and not part.startswith(PROSE)]
    ladder = [part for part in held_out if part.startswith("needle-")]
    measures: list[tuple[str, Callable[[], None]]] = [("perplexity", perplexity)]
    measures += [(part, lambda part=part: retrieval(part)) for part in ladder]
    measures += [(part, lambda part=part: answers(part)) for part in held_out if part not in ladder]
    measures.append(("experts", loads))
    skipped: list[str] = []
    trainer.enter(PACKED)
    for name, measure in measures:
        if time.monotonic() > deadline:
            skipped.append(name)
            continue
        begin = time.monotonic()
        measure()
        log.info("measured", extra={"what": name, "seconds": round(time.monotonic() - begin, 1)})
    if skipped:
        out["skipped"] = skipped
        log.warning("time ran out before all was measured", extra={"skipped": ", ".join(skipped)})
    return out


def spread(loads: Tensor) -> list[dict[str, float]]:
    """[layers, E] -> of each layer, entropy of the load over the greatest there is, and largest load over the mean."""
    share = loads.double() / loads.sum(-1, keepdim=True).clamp(min=1)
    entropy = -(share * share.clamp(min=1e-30).log()).sum(-1) / math.log(loads.shape[-1])
    largest = share.amax(-1) * loads.shape[-1]
    return [
        {"entropy": round(e, 4), "largest": round(m, 4)}
        for e, m in zip(entropy.tolist(), largest.tolist(), strict=True)
    ]
