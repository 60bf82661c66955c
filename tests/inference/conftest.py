"""Drafters that are no models: one that follows a script, and one that draws from any q it is given."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from specheads.inference import Sampler
from specheads.inference.draft import Draft, Drafter
from specheads.inference.draws import draw_uniforms, pick
from specheads.target import TargetModel


class RecordingDrafter(Drafter):
    """Knows the committed text, `text`, and keeps every call."""

    name = kind = "stub"

    def start(self, target: TargetModel, sampler: Sampler, generator: torch.Generator) -> None:
        self.target, self.sampler, self.generator = target, sampler, generator
        self.text: list[int] = []
        self.observed: list[tuple[list[int], Tensor | None, int]] = []
        self.proposed: list[list[int]] = []
        self.limits: list[int] = []

    def observe(self, ids_1L: Tensor, taps_1LTD: Tensor | None, next_ids_1: Tensor) -> None:
        if self.text:
            assert self.text.pop() == ids_1L[0, 0], "the target reads the newest token first"
        self.text += [*ids_1L[0].tolist(), *next_ids_1.tolist()]
        self.observed.append((ids_1L[0].tolist(), taps_1LTD, next_ids_1.item()))

    def propose(self, limit: int) -> Draft:
        self.limits.append(limit)
        draft = self.make(limit)
        assert draft.length <= limit
        self.proposed.append(draft.ids_BK[0].tolist())
        return draft

    def make(self, limit: int) -> Draft:
        raise NotImplementedError

    @property
    def memory_bytes(self) -> int:
        return 0


class ScriptedDrafter(RecordingDrafter):
    """Proposes `script(position)` for each absolute position behind the text, with a one-hot q."""

    def __init__(self, script: Callable[[int], int], tap_layers: Sequence[int] = ()) -> None:
        self.script = script
        self.tap_layers = tuple(tap_layers)

    def make(self, limit: int) -> Draft:
        ids = torch.tensor([[self.script(len(self.text) + k) for k in range(limit)]], dtype=torch.int64)
        return Draft(ids, torch.nn.functional.one_hot(ids, self.target.vocab_size).double())


class DrawingDrafter(RecordingDrafter):
    """Draws each token from `q(text so far)`, honestly; `tamper` changes how."""

    def __init__(self, q: Callable[[list[int]], Tensor]) -> None:
        self.q = q

    def make(self, limit: int) -> Draft:
        ids, rows = self.text[:0], []
        for _ in range(limit):
            q_V = self.q(self.text + ids)
            step = self.tamper(q_V)
            if step is None:
                break
            ids.append(step[0])
            rows.append(step[1])
        empty = Draft.empty(self.target)
        return Draft(torch.tensor([ids]), torch.stack(rows)[None]) if ids else empty

    def draw(self, q_V: Tensor) -> int:
        return int(pick(q_V[None], draw_uniforms(1, 1, self.generator)[:, 0]))

    def tamper(self, q_V: Tensor) -> tuple[int, Tensor] | None:
        """The token drafted and the q reported for it; None ends the draft."""
        return self.draw(q_V), q_V


@pytest.fixture(scope="session")
def scripted() -> type[ScriptedDrafter]:
    return ScriptedDrafter


@pytest.fixture(scope="session")
def drawing() -> type[DrawingDrafter]:
    return DrawingDrafter
