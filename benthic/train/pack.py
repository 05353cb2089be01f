"""Trained masters -> a checkpoint in the official format: names, dtypes and bytes. Model specification, section 5."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benthic.errors import CheckpointError
from benthic.kernels import quant
from benthic.models.deepseek_v41_config import ModelConfig, TensorSpec, read_json, tensors
from benthic.models.weights import write_checkpoint
from benthic.text.tokenizer import FILE_NAME
from benthic.train import backbone

MAX_BYTES = 40_000_000  # of the shipped folder
NAME_BYTES = 300  # a tensor's entries in header and index, at most


def stored(name: str, value: Tensor, spec: TensorSpec) -> Iterator[tuple[str, Tensor]]:
    """One f32 tensor -> what the file holds under its name, and its scales."""
    scale = name.removesuffix(".weight") + ".scale"
    if spec.dtype == "F8_E4M3":
        rows = name.endswith("engram.embed.weight")  # one scale per 32 channels of a row; else 32x32 blocks
        codes, scales = quant.quantise_fp8(value) if rows else quant.quantise_weight_fp8(value)
        yield name, codes
        yield scale, scales
    elif spec.dtype == "I8":
        codes, scales = quant.quantise_weight_fp4(value)
        yield name, codes
        yield scale, scales
    else:
        yield name, value.to(torch.bfloat16 if spec.dtype == "BF16" else torch.float32)


def official(config: ModelConfig, masters: dict[str, Tensor], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint: what was trained, and the rest as it would begin.

    masters  f32 by name, router biases included: parameters of the model, of the tower (`backbone.TOWER`), or official
             names of any other part
    seed     of the values of what `masters` has nothing of
    """
    specs, given = tensors(config), set[str]()
    for name, master in masters.items():
        for official_name, part in backbone.official_parts(name, master.detach().float().cpu()):
            given.add(official_name)
            yield from stored(official_name, part.contiguous(), specs[official_name])
    for name, value in backbone.untrained(config, seed):
        if name not in given:
            yield from stored(name, value, specs[name])


def averaged(masters: dict[str, Tensor], other: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """Masters of a run with a share, in (0, 1), of another's in their text model; the vision tower stays.

    The other is the same run when it had ended before, and went on at a higher rate. Two ends of one run lie in one
    valley of the loss, and what each of them knows of its texts by heart counts less in the mean of both.
    """
    return {
        name: value if name.startswith(backbone.TOWER) else value.float() * (1 - share) + other[name].float() * share
        for name, value in masters.items()
    }


def write(
    out: Path, data_folder: Path, config_json: dict[str, Any], masters: dict[str, Tensor], seed: int, *, replace: bool
) -> int:
    """Write the checkpoint folder, tokenizer included. Returns its bytes; see `check_size`."""
    config = ModelConfig.from_json(config_json)
    check_size(config, data_folder)
    extra = {FILE_NAME: (data_folder / FILE_NAME).read_bytes()}
    write_checkpoint(out, config_json, official(config, masters, seed), extra=extra, replace=replace)
    return sum(path.stat().st_size for path in out.iterdir())


def check_size(config: ModelConfig, data_folder: Path) -> None:
    """CheckpointError when the checkpoint would be too large to ship. Nothing is written."""
    specs = tensors(config)
    size = sum(spec.nbytes + NAME_BYTES for spec in specs.values()) + (data_folder / FILE_NAME).stat().st_size
    if size > MAX_BYTES:
        raise CheckpointError(
            f"the checkpoint would hold {size} bytes, {size - MAX_BYTES} over the limit of {MAX_BYTES}; use a smaller "
            "model config"
        )


def read_config(data_folder: Path) -> dict[str, Any]:
    """The completed model config of a data folder, parsed. Raises MissingCheckpointFile, BadConfigJSON."""
    return dict(read_json(data_folder / "config.json"))
