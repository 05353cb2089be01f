"""Held-out measures of a backbone in training: bits per byte of responses, and exact answers of the skills.

Every document stands in a row of its own. An answer counts when the best token is right at each of its positions given
the right ones before, which is when greedy decoding writes it exactly. The numbers that count are those of the packed
checkpoint through the serving engine; these are taken with the same weights on the training graph.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benthic.text.tokenizer import Tokenizer
from benthic.train import data
from benthic.train.loop import Phase, Trainer
from benthic.train.loss import head_scores, response_weights, targets
from benthic.train.memory import Mode


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

    def score(self, part: str, *, topk: bool, limit: int | None = None) -> Score:
        """One held-out part in the numerics now in force; the first `limit` documents."""
        trainer, ids = self.trainer, data.read_part(self.folder, self.manifest, part)
        settings = trainer.settings
        starts = data.document_starts(ids, trainer.ids.bos)[: None if limit is None else limit + 1]
        rows = torch.from_numpy(data.one_per_row(ids, starts, settings.length, trainer.ids.pad).astype("int64"))
        nats = bytes_ = tokens = exact = 0.0
        for begin in range(0, len(rows), settings.rows):
            batch = rows[begin : begin + settings.rows]
            count = len(batch)
            if count < settings.rows:  # the shapes of training, so that nothing is compiled anew
                batch = torch.cat([batch, batch[:1].expand(settings.rows - count, -1)])
            row = self._batch(batch.to(trainer.device), topk)[:, :count].sum(-1).tolist()
            nats, bytes_, tokens, exact = (a + b for a, b in zip((nats, bytes_, tokens, exact), row, strict=True))
        return Score(len(rows), nats, round(tokens), round(bytes_), exact / max(len(rows), 1))

    def _batch(self, ids: Tensor, topk: bool) -> Tensor:
        """ids [B, L] -> f64 [4, B]: nats, response bytes, response tokens, all answers right."""
        trainer = self.trainer
        # gradients stay on, though unused: without them every piece would be compiled a second time
        hidden, _ = trainer.hidden(ids, Mode(topk, 0))
        with torch.no_grad():
            wanted = targets(ids)
            inside = response_weights(ids, trainer.ids.think_close, trainer.ids.eos)
            score = trainer.kernels.piece(head_scores)
            nats, right = score(hidden.detach(), trainer.model.head.weight.detach(), wanted)
            lengths = self.byte_lengths[wanted].view_as(inside) * inside
            wrong = ((~right).view_as(inside) & (inside > 0)).any(1) | (inside.sum(1) == 0)  # cut before its answer
            per_row = ((nats.view_as(inside) * inside).sum(1), lengths.sum(1), inside.sum(1), (~wrong).double())
            return torch.stack([value.double() for value in per_row])


def report(trainer: Trainer, evaluator: Evaluator, *, documents: int | None = None) -> dict[str, float]:
    """All measures, packed (quantisers in force, top-k) and float (neither quantised), as flat numbers.

    documents  how many of each part, from its beginning; None: all
    """
    out: dict[str, float] = {}
    ladder = [part for part in evaluator.manifest.parts if part.startswith("needle-")]
    for name, phase in (("packed", Phase(True, True)), ("float", Phase(True, False))):
        trainer.enter(phase)
        valid = evaluator.score("prose.valid", topk=True, limit=documents)
        out[f"{name}_bits_per_byte"] = valid.bits_per_byte
        out[f"{name}_nats_per_token"] = valid.nats_per_token
    out["packed_over_float_perplexity"] = math.exp(out["packed_nats_per_token"] - out["float_nats_per_token"])
    trainer.enter(Phase(True, True))
    for part in (*ladder, "copy.valid"):
        out[f"packed_exact_{part}"] = evaluator.score(part, topk=True, limit=documents).exact
        out[f"packed_exact_{part}_dense"] = evaluator.score(part, topk=False, limit=documents).exact
    return out
