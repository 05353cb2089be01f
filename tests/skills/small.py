"""A little prose to build tasks from."""

import random

from benthic.skills.base import Material, Split
from tests.train.small import DEEDS, THINGS, story

SPLITS: tuple[Split, ...] = ("train", "held_out")
MATERIAL = Material.of([(" ".join([*THINGS, *DEEDS, "short", "story", "with"]), story(random.Random(5), 200))])
