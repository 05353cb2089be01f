"""Sizes that kernels are tested and timed at, each with the reason it is in the list.

`rows` is what a step brings; 0 and 1 rows, one past a tile and a prefill chunk are in every list.
"""

from typing import NamedTuple


class Rows(NamedTuple):
    rows: int
    reason: str


ROWS = (
    Rows(0, "an idle rank runs an empty step"),
    Rows(1, "decode at batch 1"),
    Rows(3, "odd, fewer than any vector"),
    Rows(32, "decode at batch 32"),
    Rows(65, "one past a tile of 64"),
)


class Width(NamedTuple):
    width: int
    reason: str


WIDTHS = (
    Width(32, "one quantisation group"),
    Width(128, "head width of the small model"),
    Width(160, "no power of two, a whole number of groups"),
    Width(512, "head width of the release"),
)


class AttentionCase(NamedTuple):
    rows: int
    heads: int
    width: int
    window: int
    entries: int  # selected per row
    stored: int  # compressed entries there are
    reason: str


ATTENTION = (
    AttentionCase(0, 4, 64, 8, 4, 9, "no row"),
    AttentionCase(1, 4, 64, 8, 4, 9, "decode at batch 1, fewer entries than a group of 64"),
    AttentionCase(5, 2, 64, 65, 0, 0, "a window one past a group, no entries at all"),
    AttentionCase(33, 3, 32, 64, 65, 70, "entries one past a group, neighbours share most of them"),
    AttentionCase(40, 2, 32, 16, 7, 900, "few entries of many: neighbours share hardly any"),
)


class AttendCase(NamedTuple):
    chunks: tuple[tuple[int, int, int], ...]  # slot, position of the first row, rows
    padding: int  # rows of slot 0 at the end
    heads: int
    width: int
    window: int
    listed: int  # records a row, some of them -1
    stored: int  # records there are
    entries: int  # records a block
    reason: str


ATTEND = (
    AttendCase((), 0, 4, 64, 8, 4, 9, 4, "no row"),
    AttendCase(((1, 0, 1),), 0, 4, 128, 64, 64, 90, 32, "the first token of a sequence"),
    AttendCase(((1, 200, 1), (3, 63, 1), (2, 64, 1)), 2, 4, 128, 64, 65, 90, 32, "decode at batch 3, padding rows"),
    AttendCase(
        ((2, 5, 12), (1, 30, 2)), 0, 2, 64, 8, 70, 90, 4, "prefill beyond the window, one past a tile of entries"
    ),
    AttendCase(((1, 100, 1), (2, 62, 4)), 1, 3, 64, 65, 0, 0, 1, "no entries at all, a window one past a tile"),
    AttendCase(((1, 300, 1), (2, 126, 2)), 0, 64, 512, 128, 512, 700, 128, "the release, ring and own rows"),
    AttendCase(((1, 40, 1),), 1, 64, 512, 128, 130, 150, 64, "the release, a window that fills, one past a tile"),
    AttendCase(((1, 90, 2),), 0, 8, 512, 128, 64, 70, 64, "few heads of the release's width"),
    AttendCase(((1, 500, 1),), 0, 128, 512, 128, 0, 0, 1, "two blocks of heads, window only"),
)


class IndexCase(NamedTuple):
    rows: int
    heads: int
    width: int
    entries: int
    topk: int
    blocks: int
    size: int
    reason: str


INDEX = (
    IndexCase(0, 2, 32, 5, 3, 2, 2, "no row"),
    IndexCase(1, 2, 32, 0, 3, 2, 2, "nothing compressed yet"),
    IndexCase(1, 8, 32, 9, 9, 3, 4, "as many entries as may be kept, a partial last block"),
    IndexCase(7, 4, 32, 65, 16, 5, 8, "one past a tile, a last block of one entry"),
    IndexCase(33, 8, 32, 200, 64, 16, 8, "the small model's head count and block size"),
)


class ModelSizes(NamedTuple):
    """Sizes of one model that benches and speed checks run at."""

    hidden: int
    streams: int
    heads: int
    head_width: int
    rope_width: int
    window: int
    index_heads: int
    index_width: int
    topk: int
    experts: int
    experts_per_token: int
    expert_width: int


SMALL = ModelSizes(256, 4, 16, 128, 64, 64, 8, 128, 64, 16, 4, 128)  # the model that ships with the package
RELEASE = ModelSizes(5120, 4, 64, 512, 64, 128, 32, 128, 512, 384, 6, 2304)  # DeepSeek-V4.1-Flash
