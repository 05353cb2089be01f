"""Bytes of records, blocks and slots: the release's figures, and laws that hold for any layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benthic.cache.spec import (
    FORMATS,
    AppendEntry,
    BlockLayout,
    CacheSpec,
    CarryEntry,
    RingEntry,
    block_layout,
    blocks_for,
    padded,
    slot_layout,
    total_bytes,
)
from benthic.models.deepseek_v41_config import ModelConfig, cache_spec, kv_bytes_per_token
from benthic.testing.checkpoints import config_path, tiny_config

RELEASE = ModelConfig.from_json(config_path("v41_flash"))


def test_records_of_the_release() -> None:
    assert FORMATS["fp8"].record_bytes(512) == 528
    assert FORMATS["nvfp4"].record_bytes(512) == 288
    assert FORMATS["mxfp4"].record_bytes(128) == 68
    assert FORMATS["f32"].record_bytes(512) == 2048


def test_a_token_of_the_release_costs_890_bytes() -> None:
    assert kv_bytes_per_token(RELEASE) == 890
    spec = cache_spec(RELEASE)
    per_layer = {
        layer: sum(e.record_bytes / e.ratio for e in spec.append if e.layer == layer) for layer in (2, 8, 14, 20)
    }
    assert per_layer == {2: 178, 8: 178, 14: 178, 20: 356}
    assert {e.layer for e in spec.append} == {2, 8, 14, 20}


def test_fp8_compressed_kv_costs_1490_bytes() -> None:
    data = tiny_config("tiny_512", use_fp4_sparse_kv=False)
    small = ModelConfig.from_json(data)
    assert {e.format for e in cache_spec(small).append if e.part == "main"} == {"fp8"}
    main = sum(528 / r for r in (2, 2, 2, 1))  # the release's four sources
    assert main + 170 == 1490
    assert kv_bytes_per_token(small) == 2 * (528 + 68) / 2 + (528 + 68)


def test_the_block_of_the_release() -> None:
    block = block_layout(cache_spec(RELEASE).append)
    assert block.block_bytes == 113_920 == 128 * 890
    assert total_bytes(block.parts) == block.block_bytes, "no padding at release sizes"
    assert [(p.layer, p.part) for p in block.parts] == [(n, part) for n in (2, 8, 14, 20) for part in ("index", "main")]
    index, main = block.part(2, "index"), block.part(2, "main")
    assert (index.data_offset, index.data_stride, index.scale_offset, index.scale_stride) == (0, 64, 64 * 64, 4)
    assert (main.data_offset, main.data_stride, main.scale_offset, main.scale_stride) == (4352, 288, 4352 + 256, 288)
    index = block.part(20, "index")
    assert (index.entries, index.data_offset) == (128, 3 * (64 * 68 + 64 * 288))
    with pytest.raises(KeyError):
        block.part(3, "main")


def test_the_slot_of_the_release() -> None:
    slot = slot_layout(cache_spec(RELEASE, drafter=False))
    assert sum(r.ring_bytes for r in slot.rings) == 40 * 128 * 528 == 2_703_360
    assert sum(c.carry_bytes for c in slot.carries) == 24_576
    assert [c.layer for c in slot.carries] == [2, 8, 14], "ratio 1 has no state"
    assert slot.history_ids == 3
    drafter = slot_layout(cache_spec(RELEASE))
    assert sum(r.ring_bytes for r in drafter.rings[40:]) == 202_752
    assert [r.layer for r in drafter.rings[40:]] == [40, 41, 42]
    assert sum(r.ring_bytes for r in slot_layout(cache_spec(RELEASE), rollback=6).rings) == 43 * 134 * 528
    assert {c.rows for c in slot_layout(cache_spec(RELEASE), rollback=6).carries} == {8}


def test_float_mode_stores_float32() -> None:
    spec = cache_spec(RELEASE, packed=False)
    assert {e.format for e in (*spec.append, *spec.rings)} == {"f32"}
    block = block_layout(spec.append)
    assert block.block_bytes == 128 * 4 * (512 + 128) * 5 // 2
    main = block.part(20, "main")
    assert (main.data_stride, main.scale_stride) == (2048, 0)


entries = st.lists(
    st.builds(
        AppendEntry,
        layer=st.integers(0, 50),
        part=st.sampled_from(["main", "index"]),
        channels=st.sampled_from([32, 64, 96, 128, 512]),
        format=st.sampled_from(sorted(FORMATS)),
        ratio=st.sampled_from([1, 2]),
    ),
    max_size=8,
    unique_by=lambda e: (e.layer, e.part),
)


def _spans(block: BlockLayout) -> list[tuple[int, int, str]]:
    """Every data and scale field of a block as (begin, end, what)."""
    out: list[tuple[int, int, str]] = []
    for p in block.parts:
        form = FORMATS[p.format]
        data, scale = form.data_bytes(p.channels), form.scale_bytes(p.channels)
        for i in range(p.entries):
            at = p.data_offset + i * p.data_stride
            out.append((at, at + data, "data"))
            if scale:
                at = p.scale_offset + i * p.scale_stride
                out.append((at, at + scale, "scale"))
    return sorted(out)


@given(entries)
def test_fields_never_overlap_and_stay_inside_the_block(append: list[AppendEntry]) -> None:
    block = block_layout(append, tokens=2)
    end = 0
    for begin, stop, _ in _spans(block):
        assert begin >= end
        end = stop
    assert end <= block.block_bytes
    assert block.block_bytes % 32 == 0
    assert all(p.data_offset % 32 == 0 for p in block.parts)
    assert all(p.scale_offset % 32 == 0 for p in block.parts if p.format == "mxfp4")
    assert total_bytes(block.parts) <= block.block_bytes < total_bytes(block.parts) + 64 * len(append) + 1
    assert block == block_layout(list(reversed(append)), tokens=2), "the order of the list does not matter"


@given(st.integers(0, 9), st.integers(1, 5))
def test_slot_fields_follow_each_other(rollback: int, window: int) -> None:
    spec = CacheSpec(
        append=(),
        rings=tuple(RingEntry(i, 64, "fp8", window) for i in range(3)),
        carries=(CarryEntry(1, 64, 2),),
        history_ids=3,
    )
    slot = slot_layout(spec, rollback)
    end = 0
    for field, size in [(r.offset, r.ring_bytes) for r in slot.rings] + [
        (c.offset, c.carry_bytes) for c in slot.carries
    ]:
        assert field == padded(end)
        end = field + size
    assert slot.history_offset == padded(end)
    assert slot.slot_bytes == slot.history_offset + 32
    assert slot.rings[0].rows == window + rollback
    assert slot.carries[0].rows == 2 + rollback


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (128, 1), (129, 2), (1 << 20, 8192)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens) == blocks
