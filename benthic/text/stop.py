"""Stop strings: text that may be the start of one is held back, and what a match cuts off is never shown.

Source: online API specification, section 5, point 3. The match that is complete first wins, so that the result does not
depend on how the text comes in pieces; on a tie the first listed.
"""

from collections.abc import Sequence


class StopMatcher:
    """Text in pieces in, text that is safe to show out.

    Held text is at most one character shorter than the longest stop string. Cost per piece: the piece and the held
    text, times the number of stop strings.
    """

    def __init__(self, stops: Sequence[str]):
        """stops: non-empty strings; none: every piece passes at once."""
        assert all(stops), "a stop string is empty"
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held: str = ""
        self.matched: str | None = None  # the stop string found; the text is complete then

    def push(self, text: str, armed: bool = True) -> str:
        """What may be shown after this piece. Text pushed with armed=False can take no part in a match."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        if not armed:
            text, self._held = self._held + text, ""
            return text
        text = self._held + text
        found = [(at + len(stop), i) for i, stop in enumerate(self._stops) if (at := text.find(stop)) >= 0]
        if found:
            end, i = min(found)
            self.matched, self._held = self._stops[i], ""
            return text[: end - len(self._stops[i])]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The held text, when the completion ended for another reason."""
        text, self._held = self._held, ""
        return text

    def _possible_start(self, text: str) -> int:
        """Length of the longest tail of `text` that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
