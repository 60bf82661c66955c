"""The paper's printed figures (2211.17192), to the digits printed, and the limits that its tables leave out."""

import math

import pytest

from specheads.errors import UserError
from specheads.inference import theory

# alpha, gamma, operations, speed: table 1 (c = c_hat = 0)
TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]
# gamma, alpha, c, predicted speedup: T5-XXL, translation and summaries at temperature 0 and 1
T5_XXL = [
    (7, 0.75, 0.02, 3.2),
    (7, 0.62, 0.02, 2.3),
    (5, 0.65, 0.02, 2.4),
    (5, 0.53, 0.02, 1.9),
    (7, 0.80, 0.04, 3.3),
    (5, 0.68, 0.04, 2.4),
    (5, 0.73, 0.04, 2.6),
    (3, 0.55, 0.04, 1.8),
    (7, 0.82, 0.11, 2.5),
    (3, 0.71, 0.11, 2.0),
    (3, 0.74, 0.11, 2.0),
    (3, 0.56, 0.11, 1.6),
]


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speed"), TABLE_1)
def test_table_1(alpha: float, gamma: int, operations: float, speed: float) -> None:
    assert round(theory.operations(alpha, gamma, 0), 2) == operations
    assert round(theory.speedup(alpha, gamma, 0), 2) == speed
    assert round(theory.expected_tokens(alpha, gamma), 2) == speed


@pytest.mark.parametrize(("gamma", "alpha", "c", "predicted"), T5_XXL)
def test_predicted_speedups_of_t5_xxl(gamma: int, alpha: float, c: float, predicted: float) -> None:
    """To .1: the alphas are printed with two digits."""
    assert theory.speedup(alpha, gamma, c) == pytest.approx(predicted, abs=0.1)


def test_bounds_when_verification_costs_more_for_more_tokens() -> None:
    for alpha, c, rho, bound in [
        (0.75, 0.09, 0.0, 2.27),
        (0.75, 0.09, 0.05, 1.96),
        (0.75, 0.09, 0.1, 1.74),
        (0.75, 0.09, 0.2, 1.46),
        (0.85, 0.03, 0.0, 4.3),
    ]:

        def v(n: int, rho: float = rho) -> float:
            return 1 + rho * (n - 1)

        best = theory.speedup(alpha, theory.best_draft_length(alpha, c, v), c, v)
        assert best == pytest.approx(bound, abs=0.01 if bound < 4 else 0.05)


def test_alpha_one_is_a_limit_and_nothing_cancels_near_it() -> None:
    assert theory.expected_tokens(1, 7) == 8
    assert theory.expected_tokens(1 - 1e-15, 7) == pytest.approx(8, abs=1e-12)
    assert theory.expected_tokens(0, 7) == 1
    assert theory.speedup(1, 4, 0) == 5
    assert theory.operations(1, 4, 0.1) == pytest.approx(5.4 / 5)
    assert theory.oracle_tokens(1) == math.inf
    assert theory.oracle_tokens(0.75) == 4
    assert theory.oracle_speedup(1, 0) == math.inf
    assert theory.oracle_speedup(0.75, 0.1) == pytest.approx(1 / 0.325)


def test_expected_tokens_by_position_agrees_for_equal_positions() -> None:
    assert theory.expected_tokens_by_position([0.7] * 5) == pytest.approx(theory.expected_tokens(0.7, 5))
    assert theory.expected_tokens_by_position([]) == 1
    assert theory.expected_tokens_by_position([0.5, 0.0, 1.0]) == 1.5


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.3, 0.6, 0.9, 0.99])
@pytest.mark.parametrize("c", [0.0, 0.05, 0.2, 0.5, 1.0])
def test_best_draft_length(alpha: float, c: float) -> None:
    best = theory.best_draft_length(alpha, c)
    speeds = [theory.speedup(alpha, gamma, c) for gamma in range(65)]
    assert speeds[best] == max(speeds)
    if alpha > c:
        assert best > 0
        assert max(speeds) >= theory.least_speedup(alpha, c) - 1e-12
    else:
        assert best == 0
    assert max(speeds) <= theory.oracle_speedup(alpha, c) + 1e-12


def test_a_dear_verification_makes_drafting_not_worth_it() -> None:
    assert theory.best_draft_length(0.9, 0.05, lambda n: n) == 0


@pytest.mark.parametrize(("alpha", "gamma", "c"), [(1.1, 1, 0.1), (-0.1, 1, 0.1), (0.5, -1, 0.1), (0.5, 1, -0.1)])
def test_impossible_values_are_named(alpha: float, gamma: int, c: float) -> None:
    with pytest.raises(UserError, match=r"is -?\d.*; expected"):
        theory.speedup(alpha, gamma, c)
