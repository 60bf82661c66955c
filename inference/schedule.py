"""How many tokens to draft in the next round. Only past rounds decide: nothing of the draft at hand is looked at."""

from collections import deque
from statistics import median_low
from typing import Protocol

from specheads.inference.theory import expected_tokens_by_position

_OPTIMISM = 0.6  # acceptance assumed before anything was seen
_PRIOR = 12.0  # what was seen elsewhere counts as so many tokens at each position
_MEMORY_ROUNDS = 100.0  # rounds after which an old one counts little
_MEMORY = 16  # measured rounds kept for each number of drafted tokens
_FIRST_LENGTHS = (4, 0, 8, 4, 0, 8)  # tried before anything is known; twice, since a first pass often pays for others
_PROBE_EVERY = 128  # rounds between looks at what the present choice never shows
_RETRY_EVERY = 64  # the same while nothing is drafted, which shows nothing of the text


class DraftLength(Protocol):
    """A rule for the draft length, told about every round after it."""

    def choose(self, limit: int) -> int:
        """Tokens to draft in the next round, at most `limit`."""

    def record(self, *, drafted: int, overlaps: list[float], seconds: float) -> None:
        """A round is over: tokens drafted, sum_x min(p, q) at each position it reached, and how long all of it took."""


class FixedLength:
    """Always `length` tokens, as far as there is room for them."""

    def __init__(self, length: int) -> None:
        self.length = length

    def choose(self, limit: int) -> int:
        return min(self.length, limit)

    def record(self, *, drafted: int, overlaps: list[float], seconds: float) -> None:
        """Nothing to learn."""


class AutoLength:
    """The length that gives most tokens a second, by running acceptance and measured cost; 0 is among the choices.

    The cost of drafting n tokens is the time from one read by the host to the next in past rounds that drafted n, so it
    holds everything a round does. Lengths not tried yet lie on straight lines between those that were. Acceptance at a
    position is a running mean, drawn towards that of all positions where little was seen: greedy decoding shows only
    zeros and ones, and the later positions are rarely reached.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._accepted = [0.0] * longest  # at each position, sums in which old rounds fade
        self._reached = [0.0] * longest
        self._seconds: dict[int, deque[float]] = {}
        self._planned = deque(min(length, longest) for length in _FIRST_LENGTHS)
        self._since_probe = 0

    def choose(self, limit: int) -> int:
        best = self.best()
        if not self._planned and self._since_probe >= (_PROBE_EVERY if best else _RETRY_EVERY):
            self._since_probe = 0
            # The first of two rounds after a pause pays for the pause: the drafter takes in what it left out.
            start = min(_FIRST_LENGTHS[0], self.longest)
            self._planned.extend([0, min(2 * best, self.longest)] if best else [start, start])
        length = self._planned.popleft() if self._planned else best
        return min(length, limit)

    def record(self, *, drafted: int, overlaps: list[float], seconds: float) -> None:
        self._since_probe += 1
        self._seconds.setdefault(drafted, deque(maxlen=_MEMORY)).append(seconds)
        if drafted:  # positions not reached fade as well, or bad luck there would never be forgotten
            kept = 1 - 1 / _MEMORY_ROUNDS
            self._accepted = [kept * accepted for accepted in self._accepted]
            self._reached = [kept * reached for reached in self._reached]
        for position, overlap in enumerate(overlaps):
            self._accepted[position] += overlap
            self._reached[position] += 1

    def acceptance(self) -> list[float]:
        """The acceptance to expect at each position."""
        everywhere = (sum(self._accepted) + _PRIOR * _OPTIMISM) / (sum(self._reached) + _PRIOR)
        pairs = zip(self._accepted, self._reached, strict=True)
        return [(accepted + _PRIOR * everywhere) / (reached + _PRIOR) for accepted, reached in pairs]

    def best(self) -> int:
        """The length with most expected tokens a second; the shortest among equals."""
        acceptance = self.acceptance()
        return max(
            range(self.longest + 1), key=lambda n: expected_tokens_by_position(acceptance[:n]) / self.round_seconds(n)
        )

    def round_seconds(self, length: int) -> float:
        """What a round with `length` drafted tokens takes by past rounds; 1 as long as there are none."""
        known = sorted((n, median_low(times)) for n, times in self._seconds.items())
        if len(known) < 2:
            return known[0][1] if known else 1.0
        after = next((i for i, (n, _) in enumerate(known) if n >= length), len(known) - 1)
        (left, at_left), (right, at_right) = known[max(after, 1) - 1], known[max(after, 1)]
        line = at_left + (at_right - at_left) * (length - left) / (right - left)
        # A noisy pair can slope downwards; more tokens never take less time than the fewest measured.
        return max(line, known[0][1])
