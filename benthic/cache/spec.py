"""What each layer stores, in bytes: record formats, lifetimes, the layout of a block and of a state slot. No torch.

Three lifetimes. Append: compressed KV and index keys, kept for the whole request in 128-token blocks. Ring: window KV,
overwritten by position. State: the open group of a compressor. Source: the model specification, sections 4.1 and 4.2;
the service specification, K-10 (order of the parts of a block).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

BLOCK_TOKENS = 128  # positions per block; a multiple of every compression ratio
PART_ALIGN_BYTES = 32  # each part of a block starts at a multiple of this

Part = Literal["main", "index"]


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """How one stored vector lies in bytes.

    data_bits      bits of one channel
    scale_group    channels that share one scale byte; 0: no scales
    interleaved    True: scales follow the data of each record; False: all data of a block, then all scales
    """

    name: str
    data_bits: int
    scale_group: int
    interleaved: bool

    def data_bytes(self, channels: int) -> int:
        """Bytes of the values of one record. channels must fill whole bytes and whole scale groups."""
        assert channels * self.data_bits % 8 == 0, f"{self.name}: {channels} channels do not fill whole bytes"
        return channels * self.data_bits // 8

    def scale_bytes(self, channels: int) -> int:
        """Bytes of the scales of one record."""
        if not self.scale_group:
            return 0
        assert channels % self.scale_group == 0, f"{self.name}: {channels} channels, want a multiple of group size"
        return channels // self.scale_group

    def record_bytes(self, channels: int) -> int:
        return self.data_bytes(channels) + self.scale_bytes(channels)


FORMATS = {
    "fp8": RecordFormat("fp8", 8, 32, interleaved=True),  # E4M3, UE8M0 per 32: window KV, 528 at 512 channels
    "nvfp4": RecordFormat("nvfp4", 4, 16, interleaved=True),  # E2M1, E4M3 per 16: compressed KV, 288 at 512
    "mxfp4": RecordFormat("mxfp4", 4, 32, interleaved=False),  # E2M1, UE8M0 per 32: index keys, 68 at 128
    "f32": RecordFormat("f32", 32, 0, interleaved=True),  # float mode, any of the three
}


@dataclass(frozen=True, slots=True)
class AppendEntry:
    """One vector per `ratio` tokens, kept as long as the request."""

    layer: int
    part: Part  # "main": compressed KV; "index": index key
    channels: int
    format: str  # key of FORMATS
    ratio: int

    @property
    def record_bytes(self) -> int:
        return FORMATS[self.format].record_bytes(self.channels)


@dataclass(frozen=True, slots=True)
class RingEntry:
    """One vector per token for the last `window` tokens."""

    layer: int
    channels: int
    format: str
    window: int

    @property
    def record_bytes(self) -> int:
        return FORMATS[self.format].record_bytes(self.channels)


@dataclass(frozen=True, slots=True)
class CarryEntry:
    """The float32 rows (a, b) of a compressor's open group."""

    layer: int
    channels: int
    ratio: int


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """All a model stores per request. Built by the model's config; read by storage, manager and plan."""

    append: tuple[AppendEntry, ...]  # by layer
    rings: tuple[RingEntry, ...]
    carries: tuple[CarryEntry, ...]
    history_ids: int  # past token ids the model looks at, int64 each

    def bytes_per_token(self) -> Fraction:
        """Long-lived bytes of one token over all layers, before padding."""
        return sum((Fraction(e.record_bytes, e.ratio) for e in self.append), Fraction(0))


@dataclass(frozen=True, slots=True)
class BlockPart:
    """One layer's main KV or index keys inside a block: `entries` records.

    Record i has its data at data_offset + i * data_stride and its scales at scale_offset + i * scale_stride, bytes from
    the start of the block. A format without scales has scale_stride 0.
    """

    layer: int
    part: Part
    format: str
    channels: int
    ratio: int
    entries: int
    record_bytes: int  # data and scales of one record
    data_offset: int
    data_stride: int
    scale_offset: int
    scale_stride: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The canonical block: `[layer][index data | index scale | main data+scale]`, each part padded to 32 bytes."""

    tokens: int
    parts: tuple[BlockPart, ...]
    block_bytes: int

    def part(self, layer: int, part: Part) -> BlockPart:
        """KeyError if the layer stores no such part."""
        for p in self.parts:
            if p.layer == layer and p.part == part:
                return p
        raise KeyError((layer, part))


def padded(size: int, align: int = PART_ALIGN_BYTES) -> int:
    """size rounded up to a multiple of align."""
    return -(-size // align) * align


def block_layout(append: Sequence[AppendEntry], tokens: int = BLOCK_TOKENS) -> BlockLayout:
    """Place every append entry in a block of `tokens` positions. Order: by layer, index before main."""
    parts: list[BlockPart] = []
    offset = 0
    for e in sorted(append, key=lambda e: (e.layer, e.part)):  # "index" < "main"
        assert tokens % e.ratio == 0, f"layer {e.layer}: ratio {e.ratio} does not divide a block of {tokens} tokens"
        form, entries = FORMATS[e.format], tokens // e.ratio
        data, scale = form.data_bytes(e.channels), form.scale_bytes(e.channels)
        start = offset
        if form.interleaved:
            data_stride, scale_offset = data + scale, start + data
            scale_stride = data_stride if scale else 0
            offset = start + padded(entries * (data + scale))
        else:
            data_stride, scale_stride = data, scale
            scale_offset = start + padded(entries * data)
            offset = scale_offset + padded(entries * scale)
        parts.append(
            BlockPart(
                layer=e.layer,
                part=e.part,
                format=e.format,
                channels=e.channels,
                ratio=e.ratio,
                entries=entries,
                record_bytes=data + scale,
                data_offset=start,
                data_stride=data_stride,
                scale_offset=scale_offset,
                scale_stride=scale_stride,
            )
        )
    return BlockLayout(tokens=tokens, parts=tuple(parts), block_bytes=offset)


@dataclass(frozen=True, slots=True)
class RingLayout:
    """One layer's window ring in a slot: position p lies in row p mod rows."""

    layer: int
    format: str
    channels: int
    window: int
    rows: int  # window + rollback
    record_bytes: int
    offset: int  # bytes from the start of the slot

    @property
    def ring_bytes(self) -> int:
        return self.rows * self.record_bytes


@dataclass(frozen=True, slots=True)
class CarryLayout:
    """One compressor's open rows in a slot: float32 [rows, 2, channels], row p mod rows holds (a, b) of position p."""

    layer: int
    channels: int
    ratio: int
    rows: int  # ratio + rollback
    offset: int

    @property
    def carry_bytes(self) -> int:
        return self.rows * 2 * self.channels * 4


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The fixed state of one running request: rings, carries, token history, in this order."""

    rollback: int  # tokens that may be taken back after a step
    rings: tuple[RingLayout, ...]
    carries: tuple[CarryLayout, ...]
    history_offset: int
    history_ids: int
    slot_bytes: int


def slot_layout(spec: CacheSpec, rollback: int = 0) -> SlotLayout:
    """Place the state of one request. rollback >= 0: the most draft tokens that a step may reject."""
    assert rollback >= 0, f"rollback is {rollback} tokens, want >= 0"
    offset = 0
    rings: list[RingLayout] = []
    for e in spec.rings:
        ring = RingLayout(e.layer, e.format, e.channels, e.window, e.window + rollback, e.record_bytes, offset)
        rings.append(ring)
        offset += padded(ring.ring_bytes)
    carries: list[CarryLayout] = []
    for e in spec.carries:
        carry = CarryLayout(e.layer, e.channels, e.ratio, e.ratio + rollback, offset)
        carries.append(carry)
        offset += padded(carry.carry_bytes)
    history = offset
    offset += padded(8 * spec.history_ids)
    return SlotLayout(rollback, tuple(rings), tuple(carries), history, spec.history_ids, offset)


def blocks_for(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    """Blocks that hold `tokens` positions."""
    return -(-tokens // block_tokens)


def total_bytes(layouts: Iterable[BlockPart]) -> int:
    """Bytes of the records themselves, without padding."""
    return sum(p.entries * p.record_bytes for p in layouts)
