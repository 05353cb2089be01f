"""Receipts: what is needed to produce an answer again, and what shows that it is the same one. No torch.

A receipt names the weights, the number formats, the versions and the device, the prompt, the settings and the seed, and
holds the tokens and a digest over the logits that each was drawn from. With `deterministic` the digest is the same
alone and in any batch, cold and from a cached prefix, so `benthic replay` must find it again on the same kind of
machine; elsewhere it says what differs.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benthic.errors import BadReceipt
from benthic.types import SamplingParams

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """Everything outside the request that decides the bits of an answer."""

    model: str  # digest of the checkpoint
    numerics: str
    deterministic: bool
    cache: str  # mode and truncation
    device: str
    benthic: str
    torch: str
    kernels: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    made_by: Maker
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    tokens: tuple[int, ...]
    digest: str  # hex, over the digests of the logits of each token in turn

    def to_json(self) -> dict[str, Any]:
        body = asdict(self)
        body["params"] = {
            f.name: value for f in fields(self.params) if (value := getattr(self.params, f.name)) != f.default
        }
        return {"receipt": FORMAT, **body}

    @classmethod
    def from_json(cls, body: Any, where: str) -> "Receipt":
        """Raises BadReceipt naming what is missing or not of its kind."""
        if not isinstance(body, Mapping) or body.get("receipt") != FORMAT:
            raise BadReceipt(where, f"it is no object with receipt: {FORMAT}")
        try:
            settings = dict(body["params"])
            for name in ("stop", "stop_ids", "allowed_ids", "banned_ids"):
                if name in settings:
                    settings[name] = tuple(settings[name])
            if "logit_bias" in settings:
                settings["logit_bias"] = tuple((int(token), float(bias)) for token, bias in settings["logit_bias"])
            params = SamplingParams(**settings)
            params.validate()
            return cls(
                made_by=Maker(**body["made_by"]),
                prompt=tuple(int(token) for token in body["prompt"]),
                params=params,
                seed=int(body["seed"]),
                tokens=tuple(int(token) for token in body["tokens"]),
                digest=str(body["digest"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadReceipt(where, f"{type(error).__name__}: {error}") from error


def read(path: Path) -> Receipt:
    """Raises BadReceipt."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise BadReceipt(str(path), str(error)) from error
    return Receipt.from_json(body, str(path))


def digest_of(rows: Iterable[bytes]) -> str:
    """One digest over those of the rows."""
    whole = hashlib.sha256(b"benthic.receipt.1")
    for row in rows:
        whole.update(row)
    return whole.hexdigest()


def differences(want: Receipt, got: Receipt) -> list[tuple[str, str, str]]:
    """(what, in the receipt, now), the makers first: what explains the rest. Empty: the same answer, bit for bit."""
    found = [
        (f.name, str(a), str(b))
        for f in fields(Maker)
        if (a := getattr(want.made_by, f.name)) != (b := getattr(got.made_by, f.name))
    ]
    if want.tokens != got.tokens:
        at = next((i for i, (a, b) in enumerate(zip(want.tokens, got.tokens, strict=False)) if a != b), None)
        if at is None:
            found.append(("tokens", f"{len(want.tokens)} of them", f"{len(got.tokens)} of them"))
        else:
            found.append((f"token {at}", str(want.tokens[at]), str(got.tokens[at])))
    if want.digest != got.digest:
        found.append(("digest of the logits", want.digest[:16], got.digest[:16]))
    return found


def same_answer(found: list[tuple[str, str, str]]) -> bool:
    """Do the differences leave tokens and logits alone?"""
    return not any(what.startswith(("token", "digest")) for what, _, _ in found)
