"""A target that knows a small language by construction, without training: a drafter learns it in seconds.

The language has 24 symbols; each is followed by one of three others, or by the end. The backbone's layers write
nothing, so its last hidden row is the token's embedding, and the head is solved for the logits of the language.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benthic.models.deepseek_v41_config import ModelConfig
from benthic.models.weights import Checkpoint, write_checkpoint
from benthic.text.tokenizer import FILE_NAME, Tokenizer
from benthic.train import loop, pack
from benthic.train.loss import Ids
from benthic.types import NUMERICS
from tests.train.small import IDS, only_prose, small_json

SYMBOLS, FIRST = 24, 10


def opening(ids: Ids = IDS) -> tuple[int, ...]:
    """A prompt."""
    return (ids.bos, 9, ids.assistant, ids.think_close)


def config_json(**overrides: Any) -> dict[str, Any]:
    """For a checkpoint without a tokenizer."""
    return small_json(engram_compressed_vocab_size=512, **overrides)


def next_logits(ids: Ids = IDS, end: float = -1.0) -> Tensor:
    """[V, V] by the token before; whatever is no symbol leads to any symbol."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.full((512, 512), -12.0)
    logits[:, FIRST : FIRST + SYMBOLS] = 0.0
    symbols = torch.arange(SYMBOLS)
    inner = torch.full((SYMBOLS, 512), -12.0)
    for strength in (4.0, 2.5, 1.0):
        inner[symbols, FIRST + torch.randperm(SYMBOLS, generator=generator)] = strength
    inner[:, ids.eos] = end
    logits[FIRST : FIRST + SYMBOLS] = inner
    return logits


def write_target(folder: Path, tokenizer: Tokenizer | None = None) -> Checkpoint:
    """The checkpoint of the target, its drafter untrained; with a tokenizer the special ids are its own."""
    data, ids = (config_json(), IDS) if tokenizer is None else (small_json(), Ids.of(tokenizer))
    config = ModelConfig.from_json(data)
    made = loop.Trainer(
        config, torch.arange(512), ids, only_prose(rows=1, length=32), torch.device("cpu"), NUMERICS["float"]
    )
    known = [ids.think_close, *range(FIRST, FIRST + SYMBOLS)]
    with torch.no_grad():
        rows = made.model.embed.weight[known].bfloat16().float()
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True))
        made.model.head.weight.copy_(torch.linalg.lstsq(rows, next_logits(ids)[known]).solution.t())
    made.optimiser = type(made.optimiser)(made.optimiser.leaves)
    masters = made.optimiser.masters() | made.biases()
    extra = {} if tokenizer is None else {FILE_NAME: tokenizer.path.read_bytes()}
    return Checkpoint.open(write_checkpoint(folder, data, pack.official(config, masters, 0), extra=extra))


def rows_of(count: int, length: int, seed: int, ids: Ids = IDS) -> Tensor:
    """[count, length] ids: documents of the language one after another, as a batch has them."""
    generator = torch.Generator().manual_seed(seed)
    chances, start = torch.softmax(next_logits(ids), -1), opening(ids)
    out = torch.zeros(count, length, dtype=torch.int64)
    for row in out:
        at = 0
        while at < length:
            if at == 0 or row[at - 1] == ids.eos:
                row[at : at + len(start)] = torch.tensor(start)[: length - at]
                at += len(start)
            else:
                row[at] = torch.multinomial(chances[row[at - 1]], 1, generator=generator)
                at += 1
    return out
