"""The automatic draft length against simulated machines: it must find the best length by itself, 0 included."""

import random

import pytest

from specheads.inference.schedule import AutoLength, FixedLength
from specheads.inference.theory import best_draft_length, expected_tokens


def simulate(
    schedule: AutoLength, alpha: float, c: float, rho: float, rounds: int, seed: int = 0, greedy: bool = False
) -> list[int]:
    """Lengths chosen on a machine with draft cost c and verify cost 1 + rho (n - 1); noisy times, rare hiccups.

    Greedy decoding shows only whether a token was accepted, sampling the overlap itself.
    """
    rng = random.Random(seed)
    chosen = []
    for _ in range(rounds):
        n = schedule.choose(100)
        accepted = next((k for k in range(n) if rng.random() > alpha), n)
        seconds = (n * c + 1 + rho * n) * rng.uniform(0.95, 1.05) * (5 if rng.random() < 0.02 else 1)
        overlaps = [1.0] * accepted + [0.0] * (accepted < n) if greedy else [alpha] * min(accepted + 1, n)
        schedule.record(drafted=n, overlaps=overlaps, seconds=seconds)
        chosen.append(n)
    return chosen


MACHINES = [
    (0.8, 0.05, 0.02),
    (0.6, 0.1, 0.05),
    (0.5, 0.06, 0.04),
    (0.95, 0.02, 0.01),
    (0.5, 0.3, 0.1),
    (0.2, 0.5, 0.1),
    (0.7, 1.2, 0.0),
]


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize(("alpha", "c", "rho"), MACHINES)
def test_it_finds_a_length_near_the_best(alpha: float, c: float, rho: float, greedy: bool) -> None:
    chosen = simulate(AutoLength(16), alpha, c, rho, 600, greedy=greedy)[300:]

    def rate(n: int) -> float:
        return expected_tokens(alpha, n) / (n * c + 1 + rho * n)

    reached = sum(map(rate, chosen)) / len(chosen)
    best = rate(best_draft_length(alpha, c, lambda n: 1 + rho * (n - 1), longest=16))
    assert reached > 0.95 * best


def test_a_useless_drafter_is_left_alone_but_looked_at_again() -> None:
    schedule = AutoLength(8)
    chosen = simulate(schedule, 0.0, 0.5, 0.1, 400)
    assert chosen[100:].count(0) / len(chosen[100:]) > 0.95
    assert any(chosen[100:])
    after = simulate(schedule, 0.95, 0.05, 0.01, 1500)
    assert sum(after[-100:]) / 100 > 6, "it never noticed that the drafter became good"


def test_a_good_drafter_s_rival_is_measured_too() -> None:
    chosen = simulate(AutoLength(8), 0.95, 0.02, 0.01, 400)
    assert 0 in chosen[:6]
    assert 0 in chosen[100:]
    assert chosen.count(0) < 12


def test_the_limit_holds_and_a_short_drafter_is_never_asked_for_more() -> None:
    schedule = AutoLength(3)
    for limit in (0, 1, 2, 5, 5, 5, 5, 5, 5, 5):
        n = schedule.choose(limit)
        assert n <= min(limit, 3)
        schedule.record(drafted=n, overlaps=[0.9] * n, seconds=1.0)
    assert FixedLength(4).choose(2) == 2
    assert FixedLength(4).choose(9) == 4


def test_costs_lie_on_lines_between_what_was_measured() -> None:
    schedule = AutoLength(16)
    assert schedule.round_seconds(5) == 1.0
    for n, seconds in [(0, 1.0), (4, 2.0), (4, 2.0), (4, 50.0), (8, 4.0)]:
        schedule.record(drafted=n, overlaps=[], seconds=seconds)
    assert [schedule.round_seconds(n) for n in (0, 2, 4, 6, 8, 10)] == pytest.approx([1.0, 1.5, 2.0, 3.0, 4.0, 5.0])
