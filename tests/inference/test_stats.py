import pytest

from specheads.inference.stats import RoundTimes, Stats

TIMES = RoundTimes(total=1.0, draft=0.25, target=0.5)


def two_rounds() -> Stats:
    """Prefill; 3 drafted, 1 accepted; 2 drafted, both accepted: 1 + 2 + 3 tokens."""
    stats = Stats(generations=1, new_tokens=6)
    stats.add_prefill(TIMES)
    stats.add_round(3, 1, 2, [0.9, 0.4], TIMES)
    stats.add_round(2, 2, 3, [1.0, 0.8], TIMES)
    return stats


def test_counts_and_times() -> None:
    stats = two_rounds()
    assert (stats.rounds, stats.drafted, stats.accepted) == (2, 5, 3)
    assert stats.drafted_by_position == [2, 2]
    assert stats.accepted_by_position == [2, 1]
    assert stats.acceptance_by_position == [1.0, 0.5]
    assert stats.alpha == pytest.approx((0.9 + 0.4 + 1.0 + 0.8) / 4)
    assert stats.tau == 2.5, "the bonus token counts, the prefill's token does not"
    assert (stats.seconds, stats.prefill_seconds, stats.draft_seconds, stats.target_seconds) == (3.0, 1.0, 0.5, 1.0)


def test_what_a_stop_cuts_off_counts_only_as_drafted() -> None:
    stats = Stats(generations=1, new_tokens=3)
    stats.add_round(5, 4, 2, [0.9, 0.8], TIMES)
    assert (stats.drafted, stats.accepted) == (5, 2)
    assert stats.drafted_by_position == stats.accepted_by_position == [1, 1]


def test_nothing_drafted() -> None:
    stats = Stats(generations=1, new_tokens=1)
    assert (stats.tau, stats.alpha, stats.acceptance_by_position) == (None, None, [])
    stats.add_round(0, 0, 1, [], TIMES)
    stats.new_tokens += 1
    assert (stats.tau, stats.alpha, stats.drafted_by_position) == (1.0, None, [])


def test_sums_line_up_by_position() -> None:
    other = Stats(generations=1, new_tokens=5)
    other.add_round(3, 3, 4, [0.5, 0.5, 0.5], TIMES)
    total = two_rounds() + other
    assert total.drafted_by_position == [3, 3, 1]
    assert total.accepted_by_position == [3, 2, 1]
    assert total.overlap_by_position == pytest.approx([2.4, 1.7, 0.5])
    assert (total.new_tokens, total.generations, total.rounds) == (11, 2, 3)
    assert total.tau == 3.0
    assert sum([other], start=Stats()) == other
