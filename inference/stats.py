"""What was drafted, accepted and emitted, and how long it took."""

from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any, TypeVar

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class RoundTimes:
    """Seconds from one read by the host to the next, and of these the draft's and the target pass's."""

    total: float
    draft: float
    target: float


@dataclass
class Stats:
    """Counts and seconds of one generation, or of several added up with `a + b`.

    The prefill gives the first token and is not a round. A position counts as reached (`drafted_by_position`) in rounds
    where all positions before it were accepted; what a stop cut off counts nowhere but in `drafted`.
    """

    new_tokens: int = 0
    generations: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    overlap_by_position: list[float] = field(default_factory=list)  # of sum_x min(p, q), summed over rounds
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0

    def add_prefill(self, times: RoundTimes) -> None:
        self.seconds += times.total
        self.prefill_seconds += times.total

    def add_round(self, drafted: int, accepted: int, emitted: int, overlaps: list[float], times: RoundTimes) -> None:
        """Count a round: `drafted` tokens, the first `accepted` of them kept; `emitted` ones left, bonus included.

        `overlaps` are those of the positions reached.
        """
        self.rounds += 1
        self.drafted += drafted
        self.accepted += min(accepted, emitted)
        reached = range(min(accepted + 1, drafted, emitted))
        self.drafted_by_position = _added(self.drafted_by_position, [1 for _ in reached])
        self.accepted_by_position = _added(self.accepted_by_position, [int(k < accepted) for k in reached])
        self.overlap_by_position = _added(self.overlap_by_position, overlaps)
        self.seconds += times.total
        self.draft_seconds += times.draft
        self.target_seconds += times.target

    @property
    def tau(self) -> float | None:
        """Mean tokens emitted a round, the bonus token included; None without a round."""
        return (self.new_tokens - self.generations) / self.rounds if self.rounds else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of accepted tokens at each position, among the rounds that reached it."""
        return [kept / seen for kept, seen in zip(self.accepted_by_position, self.drafted_by_position, strict=True)]

    @property
    def alpha(self) -> float | None:
        """Mean overlap sum_x min(p, q) over all positions reached; None when nothing was drafted."""
        reached = sum(self.drafted_by_position)
        return sum(self.overlap_by_position) / reached if reached else None

    def __add__(self, other: "Stats") -> "Stats":
        if not isinstance(other, Stats):
            return NotImplemented
        sums: dict[str, Any] = {}
        for name in (entry.name for entry in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            sums[name] = _added(mine, theirs) if isinstance(mine, list) else mine + theirs
        return Stats(**sums)


def _added(left: list[Number], right: list[Number]) -> list[Number]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]
