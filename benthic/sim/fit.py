"""The machine this process runs on, as a simulation sees it: an engine's cost model after a while of real steps."""

import random

from benthic.config import Config
from benthic.engine.cost import CostModel
from benthic.engine.llm import LLM
from benthic.errors import BenchError
from benthic.sim.engine import Machine
from benthic.types import SamplingParams


def fit(config: Config, seed: int, requests: int = 24) -> Machine:
    """Serve a few requests of mixed lengths, and keep what the engine learned of its steps."""
    rng = random.Random(seed)
    with LLM(config=config) as llm:
        cost = llm.loop.scheduler.cost
        if not cost.ready:
            raise BenchError("what steps cost", "scheduler.itl_stretch and scheduler.itl_target_ms are both 0")
        words = [token for token in range(3, llm.model.vocab_size) if token != llm.model.image_token_id]
        longest = llm.loop.scheduler.max_context_tokens
        prompts = [rng.choices(words, k=min(16 << rng.randrange(7), longest // 2)) for _ in range(requests)]
        params = [SamplingParams(max_tokens=16 + 2 * i, ignore_eos=True) for i in range(requests)]
        llm.generate(prompts, params, progress=False)
        return Machine(f"{config.model} on {llm.device.type}", CostModel(cost.now), noise=1.25 * cost.error)
