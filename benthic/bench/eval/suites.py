"""The suites by name. Bars are those of the minnow specification, section 4, for the model that ships."""

from functools import partial

from benthic.bench.eval import inside, prose, tasks
from benthic.bench.eval.prepared import Suite
from benthic.skills.base import SKILLS

_ROWS = (
    Suite("bits", "bits per byte and perplexity of held-out responses", prose.bits),
    Suite("stories", "stories that fall into a loop, sampled at T = 0.8 and greedy", prose.stories),
    *(Suite(name, f"share right; guards {row.guards}", partial(tasks.skill, name)) for name, row in SKILLS.items()),
    Suite("ladder", "needles by length and depth; in this process beside dense and random visibility", tasks.ladder),
    Suite("depth", "perplexity of responses by their position in long texts", prose.depth),
    Suite("experts", "how evenly experts are used, layer by layer", inside.experts, inside=True),
    Suite("engram", "bits per byte with the n-gram tables switched off", prose.engram, inside=True),
    Suite("drafts", "tokens a round of speculation, by temperature and slot; calibration", inside.drafter, inside=True),
    Suite(
        "quantisation", "bits per byte and perplexity of each profile against float", prose.quantisation, inside=True
    ),
)
SUITES: dict[str, Suite] = {row.name: row for row in _ROWS}
