"""On the real small target: greedy output of every drafter is, token for token, that of transformers' own `generate`.

In float32, where the rounding of a pass over several tokens flips no argmax. SPECHEADS_HEAD and SPECHEADS_DRAFT_MODEL
name a head and a separate model (default: those of the quickstart), SPECHEADS_PROMPTS the prompts, SPECHEADS_NEW_TOKENS
how many tokens are compared.
"""

import os
from pathlib import Path

import pytest
import torch

from specheads import TargetModel, load_head
from specheads.inference import HeadDrafter, LookupDrafter, ModelDrafter, NoDrafter, SpeculativeDecoder
from specheads.prompts import read_prompts, render_prompt

pytestmark = pytest.mark.real

CHECKOUT = Path(__file__).parent.parent
QUICKSTART = CHECKOUT / "work" / "quickstart"
NEW_TOKENS = int(os.environ.get("SPECHEADS_NEW_TOKENS", "24"))


@pytest.fixture(scope="module")
def target(real_target_folder: Path) -> TargetModel:
    torch.set_num_threads(os.cpu_count() or 1)
    return TargetModel.load(str(real_target_folder), dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(target: TargetModel) -> list[torch.Tensor]:
    """Prompts of at most 320 tokens, at most 60 of them."""
    default = CHECKOUT / "scripts" / "quickstart_eval_prompts.jsonl"
    found = read_prompts(os.environ.get("SPECHEADS_PROMPTS", default))
    encoded = [torch.tensor([render_prompt(target.tokenizer, prompt)]) for prompt in found]
    return [ids for ids in encoded if ids.shape[1] <= 320][:60]


@pytest.fixture(scope="module")
def expected(target: TargetModel, prompts: list[torch.Tensor]) -> list[list[int]]:
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    return [target.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist() for ids in prompts]


def make_drafter(kind: str) -> NoDrafter | LookupDrafter | ModelDrafter | HeadDrafter:
    head = Path(os.environ.get("SPECHEADS_HEAD", QUICKSTART / "eagle3" / "head"))
    model = Path(os.environ.get("SPECHEADS_DRAFT_MODEL", QUICKSTART / "draft-model" / "head"))
    if kind in ("head", "model") and not (head if kind == "head" else model).is_dir():
        pytest.skip(f"no {kind} trained yet: run scripts/quickstart.sh, or name one")
    if kind == "head":
        return HeadDrafter(load_head(head, dtype=torch.float32))
    if kind == "model":
        return ModelDrafter(TargetModel.load(str(model), dtype=torch.float32))
    return LookupDrafter() if kind == "lookup" else NoDrafter()


@pytest.mark.parametrize("length", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("kind", ["lookup", "model", "head"])
def test_greedy_output_is_that_of_transformers(
    kind: str, length: int, target: TargetModel, prompts: list[torch.Tensor], expected: list[list[int]]
) -> None:
    decoder = SpeculativeDecoder(target, make_drafter(kind), draft_length=length)
    for ids, wanted in zip(prompts, expected, strict=True):
        result = decoder.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert result.sequences[0].tolist() == wanted


def test_plain_greedy_output_is_that_of_transformers(
    target: TargetModel, prompts: list[torch.Tensor], expected: list[list[int]]
) -> None:
    decoder = SpeculativeDecoder(target)
    for ids, wanted in zip(prompts, expected, strict=True):
        assert decoder.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False).sequences[0].tolist() == wanted
