"""What is computed again behind a cached prefix, and what prompts need not compute at all. Plain arithmetic, no torch.

A block holds what every later token may read of its tokens. Window rows, compressor carries and n-gram history of the
last tokens before a hit are not in it; they come from a state that was kept, or from computing a few tokens again.
Layers behind the last one that stores entries leave nothing but window rows: a prompt's beginning never needs them.
Source: service specification, 2.3; engine specification, 6; model specification, 2.10.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Windows:
    """The window layers of a model. A row's window: itself and the `tokens - 1` before it."""

    tokens: int  # of the widest window
    storing: int  # layers up to the last one that stores entries, itself included
    others: int  # layers behind it

    @property
    def layers(self) -> int:
        return self.storing + self.others

    @property
    def reach_others(self) -> int:
        """Positions before a row that the layers behind the last source can see, through one another."""
        return self.others * (self.tokens - 1)

    @property
    def reach_storing(self) -> int:
        return self.storing * (self.tokens - 1)

    def cuts(
        self, start: int, again: bool, length: int, truncation: str, kept_rows: int
    ) -> tuple[tuple[int, int], ...]:
        """(layer, position), rising: the first position of a prompt that has to be computed from that layer on.

        A layer's window rows come from the layer below, where they need a window more. So each needs a window less
        than the one below it: rows whose own window is cut short are only read by rows that end with this layer.

        start       first position that is computed at all.
        again       it is as far before a hit as `start` says for "exact".
        length      of everything that is computed before the first token is drawn; not of one chunk of it.
        truncation  of the layers behind the last source. "off"; "halo": as many rows as the last row can see, which
                    changes nothing; "compact" and "mask": the last `kept_rows` alone, whose windows then begin there.
        """
        step = self.tokens - 1
        cuts: list[tuple[int, int]] = []
        if again and truncation != "mask":  # whose cut is none
            cuts += [(layer, start + layer * step) for layer in range(1, self.storing)]
        if truncation == "halo":
            first = length - 1 - self.reach_others
            cuts += [(self.storing + i, first + i * step) for i in range(self.others)]
        elif truncation != "off":
            cuts.append((self.storing, length - kept_rows))
        return tuple([(layer, position) for layer, position in cuts if position > start])

    def start(self, hit: int, length: int, mode: str, replay_rows: int) -> int:
        """First position to compute behind a hit of `hit` tokens, below 0 where nothing is gained by it.

        length  as in `cuts`.
        mode    "replay": `replay_rows` before its end, with empty windows before them: an approximation. "exact": so
                many that every row behind the hit, and every window row that stays, is what it would be without the
                hit.
        """
        if mode == "replay":
            return hit - replay_rows
        return min(hit, length - 1 - self.reach_others) - self.reach_storing
