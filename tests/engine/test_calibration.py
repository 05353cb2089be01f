"""The steps at start on a real model, in every form a runner has: they are computed, and leave nothing that matters."""

import pytest

from benthic.engine.cost import CostModel
from benthic.engine.first_steps import Limits, calibrate
from benthic.models.deepseek_v41 import DeepseekV41, from_checkpoint
from benthic.models.weights import Checkpoint
from benthic.testing.checkpoints import make_tiny
from benthic.types import NUMERICS, StepPlan, StepResult
from tests.engine.test_waits import BLOCK, REQUESTS, answers, loop_of


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV41:
    folder = make_tiny(tmp_path_factory.mktemp("calibration") / "tiny")
    return from_checkpoint(Checkpoint.open(folder), NUMERICS["float"])


@pytest.mark.parametrize("record", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
def test_answers_after_the_steps_at_start_are_the_same(tiny: DeepseekV41, ahead: bool, record: bool):
    usual = answers(loop_of(tiny, ahead=ahead, record=record), REQUESTS)
    loop, model = loop_of(tiny, ahead=ahead, record=record), CostModel()
    loop.runner.storage.poison()  # type: ignore[attr-defined]
    found: list[StepResult] = []

    def run(plan: StepPlan) -> None:
        result = loop.runner.start(plan)()
        assert len(result.tokens) == len(plan.draws)
        found.append(result)

    calibrate(model, run, Limits(6, 40, BLOCK, 64, tiny.max_positions), limit_seconds=20.0)
    assert model.ready
    assert min(model.now) >= 0.0 < max(model.now)
    assert {len(result.tokens) for result in found} >= {0, 1, 6}
    assert answers(loop, REQUESTS) == usual
