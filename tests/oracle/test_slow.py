"""The slow model against the numbers that the specification states, so that an oracle's own slip is seen."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.oracle import slow_v41
from tests.oracle.random_checkpoint import CONFIGS

V41_MULTIPLIERS = {
    1: [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    14: [67716810739261, 51510806800915, 30921347202721, 82619226485591],
}


@pytest.mark.parametrize("layer", [1, 14])
def test_engram_multipliers_of_the_release(layer: int) -> None:
    assert slow_v41.engram_multipliers(layer, 99092, 4).tolist() == V41_MULTIPLIERS[layer]


def test_engram_primes_of_the_release() -> None:
    primes = slow_v41.engram_primes(2, 3, 8, 16000000)
    assert primes.reshape(-1)[:3].tolist() == [16000057, 16000079, 16000081]
    assert primes.reshape(-1)[-3:].tolist() == [16000877, 16000879, 16000889]
    assert primes.sum((1, 2)).tolist() == [384006168, 384016682]


@pytest.mark.parametrize("name", ["tiny", "tiny_512"])
def test_engram_primes_of_the_tiny_configs(name: str) -> None:
    text = json.loads((Path(CONFIGS) / f"{name}.json").read_text())["text_config"]
    primes = slow_v41.engram_primes(2, 3, text["engram_n_heads"], text["engram_vocab_size"])
    assert primes.sum((1, 2)).tolist() == text["engram_num_embeddings"] == [6568, 7464]


def test_e2m1_rounds_ties_to_the_even_code() -> None:
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert slow_v41.to_e2m1(ties).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert slow_v41.to_e2m1(-ties).tolist() == [0, -1, -1, -2, -2, -4, -4]


def test_e4m3_range() -> None:
    assert slow_v41.E4M3[0x7E] == 448
    assert slow_v41.E4M3[1] == 2.0**-9
    assert np.isnan(slow_v41.E4M3[0x7F])
    assert slow_v41.to_e4m3(np.array([500.0, 17.0, 19.0, -1e-9])).tolist() == [448, 16, 20, 0]


def test_bfloat16_rounds_to_even() -> None:
    x = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 1e-20, 3e38])
    assert slow_v41.bf16(x)[:3].tolist() == [1.0, 1 + 2.0**-6, 1 + 2.0**-7]
    assert slow_v41.bf16(x)[3] == pytest.approx(1e-20, rel=4e-3)


def test_quantisers_by_hand() -> None:
    x = np.zeros(32)
    x[0], x[1], x[2] = 449.0, 3.0, -0.4
    assert slow_v41.q8(x)[:3].tolist() == [448.0, 3.0, -0.40625]  # scale 2: 224.5, 1.5, -0.2 on the E4M3 grid
    x[0] = 6.0
    assert slow_v41.q4m(x)[:3].tolist() == [6.0, 3.0, -0.5]  # scale 1
    x[0] = 6.1
    assert slow_v41.q4m(x)[:3].tolist() == [6.0, 3.0, 0.0]  # scale 2: 3.05, 1.5, -0.2
    assert slow_v41.q4n(x)[:3].tolist() == [6.0, 3.0, -0.5]  # scale E4M3(1.0167) = 1
    assert (slow_v41.q8(np.zeros(32)) == 0).all()
    assert (slow_v41.q4m(np.zeros(32)) == 0).all()
    assert (slow_v41.q4n(np.zeros(32)) == 0).all()


def test_yarn_range_of_the_release() -> None:
    yarn = {"factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536}
    far, plain = slow_v41.frequencies(64, 160000, yarn), slow_v41.frequencies(64, 160000, None)
    assert (far[:16] == plain[:16]).all()  # pairs 0 to 15 turn as before, from 25 on they are 16 times slower
    assert (far[16:25] < plain[16:25]).all()
    assert far[25:] == pytest.approx(plain[25:] / 16, rel=1e-6)


def test_sinkhorn_ends_on_columns() -> None:
    random = np.random.default_rng(3)
    hc = slow_v41.Hyper(random.standard_normal((24, 256)), random.standard_normal(24), np.ones(3))
    _, _, comb = slow_v41.mixes(random.standard_normal((4, 64)), hc, 1e-20, 1e-6, 20)
    assert np.abs(comb.sum(0) - 1).max() < 2e-6


def test_rounded_attention_of_one_group_is_the_definition() -> None:
    random = np.random.default_rng(4)
    q, rows, sink = random.standard_normal((2, 32)), random.standard_normal((64, 32)), np.array([0.3, -0.2])
    logit = q @ rows.T * 32**-0.5
    p = np.exp(logit)
    want = (p @ rows) / (p.sum(1) + np.exp(sink))[:, None]
    live = np.ones(64, dtype=bool)
    assert slow_v41.sink_attention(q, rows, live, sink, 32**-0.5, False) == pytest.approx(want, rel=1e-9)
    rounded = slow_v41.sink_attention(q, rows, live, sink, 32**-0.5, True)
    assert 0 < np.abs(rounded - want).max() < 5e-3
