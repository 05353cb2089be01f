"""What a checkpoint's own drafter is worth: tokens a round, acceptance by slot, how well its confidence is calibrated.

Needs the local engine. The target writes to each prompt at each temperature; texts that loop are easy to draft and are
counted apart. How rounds are replayed over a text: `testing/acceptance.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from benthic.bench.report import Measure
from benthic.engine.llm import LLM
from benthic.skills.loops import loops
from benthic.testing import acceptance
from benthic.testing.acceptance import Rounds, Text

BARS = {0.0: 3.0, 1.0: 2.4}  # acceptance length that the small checkpoint shall reach, by temperature
Progress = Callable[[str, int, int], None]


def drafts(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    *,
    temperatures: Sequence[float] = (0.0, 1.0),
    max_tokens: int = 300,
    seed: int = 0,
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Everything about the drafter over completions of these prompts, token ids each.

    progress  called with a stage and how much of it is done: "write at T = 0" counts texts, "replay at T = 0" tokens.
    returns   {"texts", "max_tokens", "seed", "temperatures": [{"temperature", "looping", "all", "looping_texts",
              "other_texts", "calibration"}, ...]}; the three in the middle as `acceptance.acceptance` has them.
    Raises    BadConfigKey when the checkpoint has no drafter.
    """
    drafter = acceptance.own_drafter(llm)
    sure = drafter.config.dspark_confidence_temperatures or (1.0,) * drafter.config.dspark_block_size
    found: list[dict[str, Any]] = []
    for temperature in temperatures:

        def stage(name: str, temperature: float = temperature) -> acceptance.Progress:
            return lambda done, total: progress(f"{name} at T = {temperature:g}", done, total)

        texts, rounds = acceptance.measure(
            llm,
            prompts,
            temperature,
            max_tokens,
            seed,
            drafter=drafter,
            written=stage("write"),
            replayed=stage("replay"),
        )
        found.append({"temperature": temperature, **_apart(texts, rounds, sure)})
    return {"texts": len(prompts), "max_tokens": max_tokens, "seed": seed, "temperatures": found}


def _apart(texts: Sequence[Text], rounds: Rounds, temperatures: Sequence[float]) -> dict[str, Any]:
    looping = [i for i, text in enumerate(texts) if loops(text.written)]
    others = sorted(set(range(len(texts))) - set(looping))
    return {
        "looping": len(looping),
        "all": acceptance.acceptance(rounds),
        "looping_texts": acceptance.acceptance(rounds.of(looping)),
        "other_texts": acceptance.acceptance(rounds.of(others)),
        "calibration": acceptance.calibration(rounds, temperatures),
    }


def measures(found: dict[str, Any]) -> list[Measure]:
    """The numbers that count, of a dictionary made by `drafts`: texts that loop are left out."""
    out: list[Measure] = []
    for part in found["temperatures"]:
        at = f"T = {part['temperature']:g}"
        length = part["other_texts"]["acceptance_length"]
        if length is not None:
            bar = BARS.get(part["temperature"])
            name = f"acceptance length, {at}"
            out.append({"name": name, "value": length, "unit": "tokens/round", "target": bar, "better": "more"})
        out.append(
            {"name": f"texts that loop, {at}", "value": part["looping"] / max(found["texts"], 1), "unit": "share"}
        )
        errors = [slot["ece"] for slot in part["calibration"] if slot["ece"] is not None]
        if errors:
            error = sum(errors) / len(errors)
            out.append({"name": f"calibration error, {at}", "value": error, "unit": "mean over slots"})
    return out


def table(found: dict[str, Any]) -> str:
    """Acceptance by slot, for a terminal."""
    lines: list[str] = []
    for part in found["temperatures"]:
        lines.append(f"T = {part['temperature']:g}, {found['texts']} texts, {part['looping']} of them loop")
        lines.append(f"{'':<12}{'length':>8}{'slot':>6}{'conditional':>13}{'all before':>12}{'analytic':>10}{'ECE':>8}")
        for name, key in (("not looping", "other_texts"), ("looping", "looping_texts")):
            group = part[key]
            if group["acceptance_length"] is None:
                continue
            for i, slot in enumerate(group["slots"]):
                head = f"{name:<12}{group['acceptance_length']:>8.2f}" if i == 0 else f"{'':<20}"
                error = part["calibration"][i]["ece"] if key == "other_texts" else None
                shares = (slot["conditional"], slot["unconditional"], slot["analytic"], error)
                cells = ["" if share is None else f"{share:.3f}" for share in shares]
                lines.append(f"{head}{slot['slot']:>6}{cells[0]:>13}{cells[1]:>12}{cells[2]:>10}{cells[3]:>8}")
    return "\n".join(lines)
