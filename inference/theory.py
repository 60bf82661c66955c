"""What to expect of speculative decoding: the formulas of Leviathan et al. (2211.17192), with plain numbers.

alpha is the acceptance rate E[sum_x min(p, q)], gamma the tokens drafted a round, c the time of one draft step and v(n)
that of a target pass over n tokens, both in units of a target pass over one token. The paper takes v = 1.
"""

from collections.abc import Callable, Sequence

from specheads.errors import UserError

VerifyCost = Callable[[int], float]


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens emitted a round, the bonus token included: (1 - alpha^(gamma+1)) / (1 - alpha), equation 1.

    Summed as the geometric series it is, so that alpha = 1 is its limit gamma + 1 and nothing cancels near it.
    """
    _check(alpha=alpha, gamma=gamma)
    return sum(alpha**k for k in range(gamma + 1))


def expected_tokens_by_position(acceptance: Sequence[float]) -> float:
    """The same for an acceptance rate of its own at each position: 1 + sum_k prod_{j<=k} alpha_j."""
    total = survival = 1.0
    for alpha in acceptance:
        _check(alpha=alpha)
        survival *= alpha
        total += survival
    return total


def speedup(alpha: float, gamma: int, c: float, v: VerifyCost | None = None) -> float:
    """Time of plain decoding over time of speculative decoding: E / (gamma c + v(gamma + 1)), theorem 3.8 for v = 1."""
    _check(c=c)
    verify_cost = 1.0 if v is None else v(gamma + 1)
    return expected_tokens(alpha, gamma) / (gamma * c + verify_cost)


def operations(alpha: float, gamma: int, c_hat: float) -> float:
    """Arithmetic done a token, in units of plain decoding's: (gamma c_hat + gamma + 1) / E, theorem 3.11.

    Args:
        c_hat: operations of the drafter a token over those of the target a token.
    """
    _check(c=c_hat)
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def best_draft_length(alpha: float, c: float, v: VerifyCost | None = None, *, longest: int = 64) -> int:
    """The gamma from 0 (do not draft) to `longest` with the greatest speedup; the shortest among equals."""
    return max(range(longest + 1), key=lambda gamma: speedup(alpha, gamma, c, v) if gamma else 1.0)


def least_speedup(alpha: float, c: float) -> float:
    """What some gamma reaches for sure when alpha > c: (1 + alpha) / (1 + c), corollary 3.9."""
    _check(alpha=alpha, c=c)
    return (1 + alpha) / (1 + c)


def oracle_tokens(alpha: float) -> float:
    """Tokens a target pass if the drafter knew where to stop: 1 / (1 - alpha); infinite at alpha = 1."""
    _check(alpha=alpha)
    return float("inf") if alpha == 1 else 1 / (1 - alpha)


def oracle_speedup(alpha: float, c: float) -> float:
    """Speedup of the drafter that stops before each rejection: 1 / (1 - alpha + alpha c)."""
    _check(alpha=alpha, c=c)
    cost = 1 - alpha + alpha * c
    return float("inf") if cost == 0 else 1 / cost


def _check(*, alpha: float = 0.0, gamma: int = 0, c: float = 0.0) -> None:
    if not 0 <= alpha <= 1:
        raise UserError(f"alpha is {alpha}; expected an acceptance rate from 0 to 1")
    if gamma < 0:
        raise UserError(f"gamma is {gamma}; expected 0 or more drafted tokens")
    if not c >= 0:
        raise UserError(f"cost ratio is {c}; expected 0 or more target steps a draft step")
