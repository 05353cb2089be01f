"""The arithmetic of measured ceilings, and what a trace covers, without a GPU."""

from collections.abc import Callable

import pytest
import torch

from benthic.bench import timing
from benthic.bench.timing import Ceilings, Run, Timed, Timer, measure_ceilings

CPU = torch.device("cpu")


class Told(Timer):
    """A timer that runs what it is given once and says what `seconds` says of the tensors that run wrote."""

    def __init__(self, seconds: Callable[[object, bool], float]):
        super().__init__(CPU)
        self.seconds = seconds
        self.heard: list[bool] = []

    def time(self, run: Run, graph: bool = True) -> Timed:
        self.heard.append(graph)
        took = self.seconds(run(), graph)
        return Timed(took, took, graph)


def test_rates_are_bytes_and_operations_over_seconds() -> None:
    """Everything takes a quarter of a second."""
    found = measure_ceilings(Told(lambda result, graph: 0.25))
    size, n = 16 << 20, 256
    assert found.read_bytes == 4 * size
    assert found.copy_bytes == 4 * 2 * size, "a copy reads and writes"
    assert found.link_bytes == 4 * size / 4
    assert found.bf16_flops == found.fp8_flops == 4 * 2 * n**3
    assert found.launch_seconds == 0.25


@pytest.mark.parametrize(("plain", "kernels"), [(3.0, 2.0), (1.0, 2.0)])
def test_the_fastest_way_to_copy_counts(plain: float, kernels: float) -> None:
    timer = Told(lambda result, graph: kernels if graph else plain)
    source, target = torch.arange(64), torch.zeros(64, dtype=torch.int64)
    assert timing.copy_seconds(source, target, timer) == min(plain, kernels)
    assert timer.heard.count(False) == 1, "a plain copy is no node of a graph"


def test_every_way_to_copy_writes_all_of_it() -> None:
    source, target = torch.arange(64), torch.zeros(64, dtype=torch.int64)

    def whole(result: object, graph: bool) -> float:
        assert torch.equal(target, ~source if graph else source)
        target.zero_()
        return 1.0

    timing.copy_seconds(source, target, Told(whole))


def test_a_floor_is_the_slowest_of_its_parts() -> None:
    ceilings = Ceilings(4e12, 5e12, 7e14, 1.2e15, 5e10, 1e-6)
    assert ceilings.floor(4e12, 0.0) == 1.0
    assert ceilings.floor(4e12, 1.4e15) == 2.0
    assert ceilings.floor(4e12, 2.4e15, "fp8") == 2.0
    assert ceilings.floor(4e12, 1.4e15, over_link=2e11) == 4.0
