"""Training memory: block-sparse attention against the masked one, selections against serving, the index loss."""

import pytest
import torch

from benthic.kernels import indexer
from benthic.models.deepseek_v41_config import ModelConfig, layer_plan
from benthic.testing.checkpoints import tiny_config
from benthic.train import memory
from benthic.train.kernels import TrainingKernels
from benthic.types import NUMERICS


def shapes(rows: int, length: int) -> memory.RowShapes:
    config = ModelConfig.from_json(tiny_config())
    cpu = torch.device("cpu")
    return memory.RowShapes(config, layer_plan(config), rows, length, cpu, TrainingKernels(cpu, rows))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("ratio", "source"), [(0, None), (2, None), (1, None), (2, 2), (1, 6)])
def test_block_sparse_attention_equals_masked(ratio: int, source: int | None):
    made = shapes(2, 128)
    torch.manual_seed(0)
    keys = torch.randn(2, 128 + made.groups.get(ratio, 0), 32)
    q = torch.randn(2, 1, 128 * made.heads, 32)
    if source is not None:
        visible = torch.arange(made.groups[ratio]) < made.visible[ratio][:, None]
        made.chosen(source).copy_((torch.rand(2, 128, made.groups[ratio]) < 0.3) & visible)
    want, want_lse = memory.masked(made, q, keys, ratio, source)
    got, lse = memory.block_sparse(made, q, keys, ratio, source)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)


def test_tiles_cover_all_that_is_visible():
    made = shapes(1, 256)
    for ratio, source in ((0, None), (2, None), (1, None), (2, 2)):
        tiles = made.block_mask(ratio, source).to_dense()[0, 0].bool()
        mask = made.window_mask(ratio).repeat_interleave(made.heads, dim=0)
        padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % memory.TILE, 0, -mask.shape[0] % memory.TILE))
        want = padded.unflatten(0, (-1, memory.TILE)).unflatten(2, (-1, memory.TILE)).any(3).any(1)
        assert torch.equal(tiles[: want.shape[0], : want.shape[1]], want)


@pytest.mark.parametrize("n", [1, 7, 64, 65, 200])
def test_top_mask_takes_what_serving_takes(n: int):
    torch.manual_seed(n)
    scores = torch.randn(50, n)
    scores[10:20] = scores[10:20].round()  # many equal ones
    scores[20:25] = 0.0
    scores[25:30] *= 1e30
    visible = torch.randint(0, n + 1, (50,))
    masked = scores.masked_fill(torch.arange(n) >= visible[:, None], -torch.inf)
    got = memory.top_mask(masked, 64)
    entries = indexer.select_entries(scores, visible, 64, None, 8)
    want = torch.zeros(50, n + 1, dtype=torch.bool).scatter_(1, torch.where(entries < 0, n, entries).long(), True)
    assert torch.equal(got, want[:, :n])


@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 3), (64, 64), (100, 16), (128, 32), (1030, 128)])
def test_the_kernel_takes_what_the_reference_takes(n: int, k: int):
    """In Triton's interpreter, or on a GPU where there is one."""
    select = pytest.importorskip("benthic.train.select")
    scores = torch.randn(6, 4, n).bfloat16()
    scores[1] = scores[1].round()  # many equal ones
    scores[2, 0] = 0.0
    scores[2, 1, ::2] = -0.0
    scores[2, 2] *= 1e30
    scores[2, 3] = -torch.inf
    visible = torch.randint(0, n + 1, (6, 4))
    visible[5] = torch.tensor([0, 1, n, n])
    scores = scores.masked_fill(torch.arange(n) >= visible[..., None], -torch.inf)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    got = select.top_mask(scores.to(device), k).cpu()
    assert torch.equal(got, memory.top_mask(scores.float(), k))
    assert torch.equal(got.sum(-1), torch.isfinite(scores).sum(-1).clamp(max=k))
    strided = torch.randn(3, 2 * n).bfloat16()[:, ::2]
    assert torch.equal(select.top_mask(strided.to(device), k).cpu(), memory.top_mask(strided.float(), k))
    assert select.top_mask(scores[:0].to(device), k).shape == (0, 4, n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_are_chosen_alike_in_chunks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """All rows at once, one at a time, and each row on its own."""
    config = ModelConfig.from_json(tiny_config())
    plan, length = layer_plan(config), 200
    width, heads = config.text.index_head_dim, config.text.index_n_heads
    queries = {p.index: torch.randn(4 * length, heads, width).to(dtype) for p in plan if p.topk_from == p.index}
    weights = torch.randn(4 * length, heads).to(dtype)
    keys = {p.index: torch.randn(4, length // p.ratio, width).to(dtype) for p in plan if p.keys_from == p.index}

    def selected(rows: int, first: int) -> dict[int, torch.Tensor]:
        made = shapes(rows, length)
        held = memory.RowMemory(made, NUMERICS["float"], memory.Mode(True, 0))
        tokens, selection = slice(first * length, (first + rows) * length), None
        for index, q in queries.items():
            held.keys = {i: k[first : first + rows] for i, k in keys.items()}
            selection = held.layer(index).select(q[tokens], weights[tokens], selection)
        return {index: made.chosen(index).clone() for index in queries}

    want = selected(4, 0)
    blocks = config.text.candidate_topk_blocks  # the last source chooses among those of the one before
    used = torch.nn.functional.pad(want[8], (0, -length % 8)).unflatten(-1, (-1, 8)).any(-1)
    assert blocks >= used.sum(-1).max() > blocks // 2
    monkeypatch.setattr(memory, "CHUNK", 1)
    for index, chosen in selected(4, 0).items():
        assert torch.equal(chosen, want[index])
        assert chosen.sum(-1).max() == config.text.index_topk
    for row in range(4):
        for index, chosen in selected(1, row).items():
            assert torch.equal(chosen[0], want[index][row])


@pytest.mark.parametrize("pick", ["all", "random"])
def test_selections_for_measures(pick: memory.Pick):
    config = ModelConfig.from_json(tiny_config())
    made = shapes(2, 200)
    q, weights = torch.randn(400, 8, 128), torch.randn(400, 8)
    picked: list[torch.Tensor] = []
    for _ in range(2):
        held = memory.RowMemory(made, NUMERICS["float"], memory.Mode(True, 0, pick))
        held.keys = {6: torch.randn(2, 200, 128)}
        first = held.layer(6).select(q, weights, None)
        held.layer(8).select(q, weights, first)
        picked += [made.chosen(6).clone(), made.chosen(8).clone()]
    visible = torch.arange(200) < torch.arange(1, 201)[:, None]
    count = torch.arange(1, 201).clamp(max=config.text.index_topk)
    for chosen in picked:
        if pick == "all":
            assert torch.equal(chosen, visible.expand(2, -1, -1))
        else:
            assert torch.equal(chosen.sum(-1), count.expand(2, -1))
            assert not (chosen & ~visible).any()
            early = chosen[:, 150:, :50].float().mean()  # as often as any other
            assert 0.25 < early < 0.5
    if pick == "random":
        assert not any(torch.equal(a, b) for i, a in enumerate(picked) for b in picked[:i])


def test_candidates_restrict_as_in_serving():
    torch.manual_seed(0)
    length, heads, width, blocks, size, topk = 300, 4, 16, 16, 8, 64
    q, weights = torch.randn(1, length, heads, width), torch.randn(1, length, heads)
    keys, visible = torch.randn(1, length, width), torch.arange(length) + 1
    made = TrainingKernels(torch.device("cpu"), 1)
    scores = indexer.index_scores(q[0], weights[0], keys[0], False)
    candidates = indexer.candidate_blocks(scores, visible, blocks, size)
    seen = memory.visible_scores(q, weights, keys, visible)
    _, emitted = memory.choose(made, seen, visible, topk, None, blocks, size)
    number = -(-length // size)
    want = torch.zeros(length, number + 1, dtype=torch.bool)
    want.scatter_(1, torch.where(candidates < 0, number, candidates).long(), True)
    begun = torch.arange(number) * size < visible[:, None]
    assert torch.equal(emitted[0] & begun, want[:, :number])
    other = torch.randn_like(q)
    seen = memory.visible_scores(other, weights, keys, visible)
    chosen, _ = memory.choose(made, seen, visible, topk, emitted, 0, size)
    scores = indexer.index_scores(other[0], weights[0], keys[0], False)
    entries = indexer.select_entries(scores, visible, topk, candidates, size)
    want = torch.zeros(length, length + 1, dtype=torch.bool)
    want.scatter_(1, torch.where(entries < 0, length, entries).long(), True)
    assert torch.equal(chosen[0], want[:, :length])


def test_index_loss_is_a_divergence():
    """Zero when the scores' softmax is the attention mass, positive otherwise."""
    made = shapes(1, 40)
    torch.manual_seed(0)
    visible = made.visible[1]
    target = torch.rand(1, 40, 40).masked_fill(torch.arange(40) >= visible[:, None], 0.0)
    target = target / target.sum(-1, keepdim=True)
    entropy = -(target * target.clamp(min=1e-30).log()).sum(-1).mean()
    # one-hot queries against one-hot keys score any matrix: with a single head the score is relu(q_t . k_j)
    wanted = (target.clamp(min=1e-6).log() + 20.0)[0][None, :, None]
    keys, ones = torch.eye(40)[None], torch.ones(1, 40, 1)
    exact = memory.index_cross_entropy(wanted, ones, keys, target, visible, None) - entropy
    other = memory.index_cross_entropy(torch.rand_like(wanted), ones, keys, target, visible, None) - entropy
    assert abs(float(exact)) < 1e-4
    assert float(other) > 0.1


def test_attention_mass_counts_window_and_sink():
    """The target is the share among compressed entries of what full attention gives them, heads summed."""
    torch.manual_seed(0)
    length, heads, width = 12, 3, 8
    made = shapes(1, length)
    made.heads = heads
    q, keys, sink = torch.randn(1, 1, length * heads, width), torch.randn(1, 2 * length, width), torch.randn(heads)
    _, lse = memory.masked(made, q, keys, 1, None)
    share, _ = memory.attention_mass(q[:, 0], keys[:, length:], lse.view(1, length, heads), sink, made.visible[1], None)
    logits = (q[0, 0].view(length, heads, width) @ keys[0].T) * width**-0.5
    logits = logits.masked_fill(~made.window_mask(1)[:, None], -torch.inf)
    full = torch.softmax(torch.cat([logits, sink.expand(length, heads)[..., None]], -1), -1)
    mass = full[..., length : 2 * length].sum(1)
    torch.testing.assert_close(share[0], mass / mass.sum(-1, keepdim=True))
