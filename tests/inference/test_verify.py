"""Verification, exactly: the verifier is run in every cell of its own randomness, and the law it emits is compared.

All probabilities are quarters, so every threshold that a uniform can meet (p/q, partial sums of p, of the residual) is
a multiple of 1/12. With uniforms at the midpoints of the twelfths each cell is met once, and counting cells *is* the
law.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from specheads.errors import UserError
from specheads.inference import verify
from specheads.inference.draws import pick
from specheads.inference.verify import Verdict, decide_chain, overlap, verify_chain

CELLS = 12
Prefix = tuple[int, ...]
Table = dict[Prefix, list[Fraction]]  # a distribution behind each prefix
Law = dict[Prefix, float]
Verifier = Callable[[Tensor, Tensor, Tensor, Tensor], Verdict]


def quarters(*counts: int) -> list[Fraction]:
    assert sum(counts) == 4
    return [Fraction(count, 4) for count in counts]


def random_table(vocab: int, depth: int, seed: int) -> Table:
    rng = np.random.default_rng(seed)
    prefixes = [prefix for n in range(depth + 1) for prefix in itertools.product(range(vocab), repeat=n)]
    return {prefix: quarters(*np.bincount(rng.integers(0, vocab, 4), minlength=vocab)) for prefix in prefixes}


def constant_table(distribution: list[Fraction], depth: int) -> Table:
    vocab = len(distribution)
    return {prefix: distribution for n in range(depth + 1) for prefix in itertools.product(range(vocab), repeat=n)}


def walked_law(p: Table, q: Table, lengths: list[int], verifier: Verifier = decide_chain) -> Law:
    """The law of what one round emits: all drafts by their probability, all cells of the uniforms.

    `lengths` are the draft lengths in the batch; shorter drafts end in -1. Each row starts anew, so all lengths must
    give the same target law, and the mean over them is returned.
    """
    vocab, gamma = len(p[()]), max(lengths)
    law: Law = defaultdict(float)
    midpoints = (torch.arange(CELLS, dtype=torch.float64) + 0.5) / CELLS
    uniforms = torch.cartesian_prod(*[midpoints] * (gamma + 1)).reshape(-1, gamma + 1)
    for length in lengths:
        for draft in itertools.product(range(vocab), repeat=length):
            weight = float(np.prod([float(q[draft[:k]][draft[k]]) for k in range(length)], initial=1.0))
            if weight == 0:
                continue
            padded = [*draft, *[-1] * (gamma - length)]
            q_rows = [q[draft[:k]] if k < length else [Fraction(1, vocab)] * vocab for k in range(gamma)]
            p_rows = [p[draft[: min(k, length)]] for k in range(gamma + 1)]
            rows = len(uniforms)
            verdict = verifier(
                torch.tensor(padded, dtype=torch.int64).expand(rows, -1),
                torch.tensor(q_rows, dtype=torch.float64).reshape(gamma, vocab).expand(rows, -1, -1),
                torch.tensor(p_rows, dtype=torch.float64).expand(rows, -1, -1),
                uniforms,
            )
            outcomes, counts = torch.stack([verdict.accepted, verdict.next_token], 1).unique(dim=0, return_counts=True)
            for (accepted, token), count in zip(outcomes.tolist(), counts.tolist(), strict=True):
                law[(*draft[:accepted], token)] += weight * count / rows / len(lengths)
    return law


def reference_law(p: Table, q: Table, gamma: int) -> dict[Prefix, Fraction]:
    """Algorithm 1 written down again, in fractions: the law of what one round emits."""
    vocab = len(p[()])
    law: dict[Prefix, Fraction] = defaultdict(Fraction)

    def go_on(prefix: Prefix, chance: Fraction) -> None:
        p_here = p[prefix]
        if len(prefix) == gamma:
            for token in range(vocab):
                law[(*prefix, token)] += chance * p_here[token]
            return
        q_here = q[prefix]
        for token in range(vocab):
            if q_here[token] and p_here[token]:
                go_on((*prefix, token), chance * q_here[token] * min(Fraction(1), p_here[token] / q_here[token]))
        for token in range(vocab):  # rejected with probability 1 - beta, which is the residual's normaliser
            law[(*prefix, token)] += chance * max(Fraction(0), p_here[token] - q_here[token])

    go_on((), Fraction(1))
    return law


def joint_law(round_law: Law, p: Table, tokens: int) -> Law:
    """Law of the first `tokens` tokens if the target itself goes on behind the round."""
    joint: Law = defaultdict(float)
    for emitted, chance in round_law.items():
        for rest in itertools.product(range(len(p[()])), repeat=tokens - len(emitted)):
            full = (*emitted, *rest)
            joint[full] += float(chance) * float(
                np.prod([float(p[full[:k]][full[k]]) for k in range(len(emitted), tokens)])
            )
    return joint


def target_law(p: Table, tokens: int) -> Law:
    return joint_law({(): 1.0}, p, tokens)


def gap(left: Law, right: Law) -> float:
    return max(abs(float(left.get(key, 0)) - float(right.get(key, 0))) for key in {*left, *right})


CASES = [
    *[(random_table(3, 2, seed), random_table(3, 2, seed + 100), 2) for seed in range(8)],
    *[(random_table(2, 3, seed), random_table(2, 3, seed + 100), 3) for seed in range(2)],
    *[(random_table(4, 1, seed), random_table(4, 1, seed + 100), 1) for seed in range(4)],
    pytest.param(random_table(3, 1, 7), random_table(3, 1, 8), 0, id="nothing drafted"),
    pytest.param(random_table(3, 2, 7), constant_table(quarters(0, 4, 0), 2), 2, id="one-hot q"),
    pytest.param(constant_table(quarters(0, 0, 4), 2), random_table(3, 2, 7), 2, id="one-hot p"),
    pytest.param(constant_table(quarters(2, 2, 0, 0), 2), constant_table(quarters(0, 0, 1, 3), 2), 2, id="disjoint"),
    pytest.param(random_table(3, 2, 7), random_table(3, 2, 7), 2, id="p equals q"),
]


@pytest.mark.parametrize(("p", "q", "gamma"), CASES)
def test_a_round_emits_the_law_of_algorithm_1_and_so_the_target_s(p: Table, q: Table, gamma: int) -> None:
    law = walked_law(p, q, [gamma])
    assert gap(law, reference_law(p, q, gamma)) < 1e-12
    assert gap(joint_law(law, p, gamma + 1), target_law(p, gamma + 1)) < 1e-12


def test_the_reference_itself_is_exact() -> None:
    p, q = random_table(3, 2, 1), random_table(3, 2, 2)
    law = reference_law(p, q, 2)
    assert sum(law.values()) == 1
    for first in range(3):
        assert sum(chance for emitted, chance in law.items() if emitted[0] == first) == p[()][first]


@pytest.mark.parametrize("lengths", [[0, 2], [1, 2], [0, 1, 2]])
def test_rows_may_have_shorter_drafts(lengths: list[int]) -> None:
    p, q = random_table(3, 2, 11), random_table(3, 2, 12)
    assert gap(joint_law(walked_law(p, q, lengths), p, 3), target_law(p, 3)) < 1e-12


@pytest.mark.parametrize(("p", "q", "gamma"), CASES)
def test_acceptance_of_the_first_token_is_the_overlap(p: Table, q: Table, gamma: int) -> None:
    if gamma == 0:
        pytest.skip("nothing is drafted")
    accepted = sum(chance for emitted, chance in walked_law(p, q, [gamma]).items() if len(emitted) > 1)
    beta = float(sum(map(min, p[()], q[()])))
    assert accepted == pytest.approx(beta, abs=1e-12)
    rows = [torch.tensor([[[float(x) for x in table[()]]]]) for table in (q, p)]
    assert overlap(rows[0], torch.cat([rows[1], rows[1]], 1)).item() == pytest.approx(beta)


# Known mistakes, on the same tables: the test must see them.


def residual_is_p(ids: Tensor, q: Tensor, p: Tensor, uniforms: Tensor) -> Verdict:
    accepted = decide_chain(ids, q, p, uniforms).accepted
    return Verdict(accepted, pick(p[torch.arange(len(ids)), accepted], uniforms[:, -1]))


def bonus_is_one_row_early(ids: Tensor, q: Tensor, p: Tensor, uniforms: Tensor) -> Verdict:
    shifted = torch.cat([p[:, :-1], p[:, -2:-1]], dim=1)
    return decide_chain(ids, q, shifted, uniforms)


def residual_is_from_the_row_before(ids: Tensor, q: Tensor, p: Tensor, uniforms: Tensor) -> Verdict:
    right = decide_chain(ids, q, p, uniforms)
    rejected = (right.accepted < ids.shape[1]) & (right.accepted > 0)
    row = torch.arange(len(ids)), (right.accepted - 1).clamp(min=0)
    residual = (p[row] - q[row]).clamp(min=0)
    return Verdict(right.accepted, torch.where(rejected, pick(residual, uniforms[:, -1]), right.next_token))


def accepts_when_equal(ids: Tensor, q: Tensor, p: Tensor, uniforms: Tensor) -> Verdict:
    """u q <= p, with the lowest cell of u being 0: accepts tokens that the target rules out."""
    lowest = torch.where(uniforms < 1 / CELLS, 0.0, uniforms)
    ids_1 = ids[..., None]
    keeps = lowest[:, :-1] * q.gather(-1, ids_1)[..., 0] <= p[:, :-1].gather(-1, ids_1)[..., 0]
    accepted = keeps.long().cumprod(-1).sum(-1)
    return Verdict(accepted, pick(p[torch.arange(len(ids)), accepted], uniforms[:, -1]))


@pytest.mark.parametrize(
    "wrong", [residual_is_p, bonus_is_one_row_early, residual_is_from_the_row_before, accepts_when_equal]
)
def test_a_known_mistake_is_seen(wrong: Verifier) -> None:
    gaps = []
    for seed in range(3):
        p, q = random_table(3, 2, seed), random_table(3, 2, seed + 100)
        gaps.append(gap(joint_law(walked_law(p, q, [2], wrong), p, 3), target_law(p, 3)))
    assert min(gaps) > 0.01


# Numbers at the edge, and the public face.


def test_a_token_that_the_target_rules_out_is_never_accepted() -> None:
    ids, q = torch.tensor([[0]]), torch.tensor([[[1.0, 0.0]]])
    p = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    verdict = decide_chain(ids, q, p, torch.zeros(1, 2, dtype=torch.float64))
    assert (verdict.accepted.item(), verdict.next_token.item()) == (0, 1)


def test_a_rejection_without_a_residual_falls_back_to_p() -> None:
    p = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    q = p[:, :1].nextafter(torch.tensor(2.0))  # greater in the last bit everywhere: the residual is empty
    ids = torch.tensor([[0]])
    counts = torch.zeros(2)
    for cell in range(4):
        uniforms = torch.tensor([[1 - 2**-53, (cell + 0.5) / 4]], dtype=torch.float64)
        verdict = decide_chain(ids, q, p, uniforms)
        assert verdict.accepted.item() == 0
        counts[verdict.next_token] += 1
    assert counts.tolist() == [1, 3]


def test_float32_rows_with_a_huge_vocabulary_lose_no_tail() -> None:
    vocab = 200_000
    p = torch.full((1, 1, vocab), 0.0)
    p[0, 0, 0], p[0, 0, -1] = 1 - 1e-9, 1e-9
    empty_ids, empty_q = torch.empty(1, 0, dtype=torch.int64), torch.empty(1, 0, vocab)
    uniforms = torch.tensor([[1 - 1e-10]], dtype=torch.float64)
    assert decide_chain(empty_ids, empty_q, p, uniforms).next_token.item() == vocab - 1
    assert decide_chain(empty_ids, empty_q, p, 1 - (1 - uniforms) * 100).next_token.item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_generator_gives_the_same_verdicts_and_the_global_state_stays(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(64, 4, 5, generator=generator, dtype=dtype).softmax(-1)
    q = torch.rand(64, 3, 5, generator=generator, dtype=dtype).softmax(-1)
    ids = torch.randint(0, 5, (64, 3), generator=generator)
    before = torch.random.get_rng_state()
    first, second = (verify_chain(ids, q, p, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    other = verify_chain(ids, q, p, generator=torch.Generator().manual_seed(2))
    verify_chain(ids, q, p)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first.accepted, second.accepted)
    assert torch.equal(first.next_token, second.next_token)
    assert not torch.equal(first.next_token, other.next_token)


def test_without_a_generator_each_call_draws_anew() -> None:
    p = torch.full((64, 1, 1000), 1e-3)
    empty = torch.empty(64, 0, dtype=torch.int64), torch.empty(64, 0, 1000)
    assert not torch.equal(verify_chain(*empty, p).next_token, verify_chain(*empty, p).next_token)


def test_rows_of_a_batch_are_drawn_independently() -> None:
    p = torch.full((4000, 1, 2), 0.5)
    empty = torch.empty(4000, 0, dtype=torch.int64), torch.empty(4000, 0, 2)
    tokens = verify_chain(*empty, p, generator=torch.Generator().manual_seed(0)).next_token.double()
    assert abs(tokens.mean().item() - 0.5) < 0.03
    assert abs(torch.corrcoef(torch.stack([tokens[:-1], tokens[1:]]))[0, 1].item()) < 0.06


def test_shapes_that_do_not_fit_are_named() -> None:
    ids, q, p = torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2, 3), torch.ones(1, 2, 3)
    with pytest.raises(UserError, match=r"target_probs \(1, 2, 3\); expected .*gamma \+ 1"):
        verify.verify_chain(ids, q, p)
