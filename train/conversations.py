"""One record to token ids and a loss mask. Which records there are, and which tokens count, stands in `data`."""

import re
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from specheads.errors import UserError
from specheads.prompts import encode_text, parse_messages, parse_prompt, render_prompt, render_text

Rendered: TypeAlias = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]

GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\b")


class Renderer:
    """Turns records into token ids and a loss mask under one tokenizer."""

    def __init__(self, tokenizer: Any, *, raw: bool = False) -> None:
        self.tokenizer = tokenizer
        self.raw = raw
        self.has_markers = not raw and bool(
            tokenizer.chat_template and GENERATION_MARKER.search(tokenizer.get_chat_template())
        )
        self.marks = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}

    @cached_property
    def end_of_turn(self) -> int | None:
        """The token that ends an answer: the first mark that the chat template puts behind one, else the eos token.

        It need not be the tokenizer's eos token: Gemma's turns end with <end_of_turn>, its eos token is <eos>.
        """
        if self.raw:
            return self.tokenizer.eos_token_id
        answer = "specheads"
        text = render_text(
            self.tokenizer,
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}],
            where="a probe",
        )
        behind = encode_text(self.tokenizer, text.rpartition(answer)[2])
        return next((token for token in behind if token in self.marks), self.tokenizer.eos_token_id)

    def render(self, record: dict[str, Any], number: int, where: str) -> Rendered | None:
        """Ids and loss mask of a record, not cut; None where an answer does not begin at a token boundary.

        Raises:
            UserError: no answer, wrong types, an ambiguous template, or everything counted in spite of a prompt.
        """
        rendered: Rendered | None
        has_prompt = True
        if record.get("response_ids") is not None:
            if record.get("raw", self.raw) != self.raw:
                how = ("plain text", "true") if record["raw"] else ("a chat", "false")
                raise UserError(f"{where}: the target answered this prompt as {how[0]}; set data.raw to {how[1]}")
            prompt_ids = render_prompt(self.tokenizer, parse_prompt(record, number=number, where=where), self.raw)
            answer_ids = self._answer_ids(record, where)
            rendered = _spans(prompt_ids + answer_ids, [(len(prompt_ids), len(prompt_ids) + len(answer_ids))])
        elif self.raw:
            prompt = parse_prompt(record, number=number, where=where).raw
            if prompt is None or not isinstance(record.get("response"), str):
                raise UserError(f"{where}: raw text needs prompt and response, both texts; or leave raw out")
            has_prompt = bool(prompt)
            rendered = self._continuation(prompt, record["response"], finished=bool(record.get("finished")))
        else:
            messages = self._conversation(record, number, where)
            rendered = self._marked(messages, where) if self.has_markers else self._by_prefix(messages, where)
        if rendered is not None and has_prompt and rendered[1].all() and rendered[1].size:
            raise UserError(f"{where}: every token counts, the prompt too; mend the template's generation markers")
        return rendered

    def _answer_ids(self, record: dict[str, Any], where: str) -> list[int]:
        ids = record["response_ids"]
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise UserError(f"{where}: response_ids must be a list of integers")
        if ids and not 0 <= min(ids) <= max(ids) < len(self.tokenizer):
            raise UserError(
                f"{where}: response_ids reach from {min(ids)} to {max(ids)}, the tokenizer has {len(self.tokenizer)} "
                "tokens; these answers are another target's, regenerate them"
            )
        ended = not ids or ids[-1] in self.marks
        if record.get("finished") and not ended and self.end_of_turn is not None:
            return [*ids, self.end_of_turn]
        return ids

    def _conversation(self, record: dict[str, Any], number: int, where: str) -> list[dict[str, str]]:
        if record.get("response") is not None:
            if not isinstance(record["response"], str):
                raise UserError(f"{where}: response must be a text")
            prompt = parse_prompt(record, number=number, where=where)
            return [*prompt.messages, {"role": "assistant", "content": record["response"]}]
        messages = parse_messages(record["messages"], where) if record.get("messages") is not None else []
        roles = [message["role"] for message in messages]
        if "assistant" not in roles:
            found = ", ".join(key for key in record if record[key] is not None) or "nothing"
            raise UserError(f"{where}: no answer to learn from ({found}); let the target answer: specheads regenerate")
        if roles[0] == "assistant":
            raise UserError(f"{where}: the conversation begins with an answer; put the user's message before it")
        return messages

    def _continuation(self, prompt: str, answer: str, *, finished: bool) -> Rendered | None:
        before, ids = list(self.tokenizer(prompt)["input_ids"]), list(self.tokenizer(prompt + answer)["input_ids"])
        if ids[: len(before)] != before:
            return None
        if finished and self.end_of_turn is not None:
            ids.append(self.end_of_turn)
        return _spans(ids, [(len(before), len(ids))])

    def _marked(self, messages: list[dict[str, str]], where: str) -> Rendered:
        render_text(self.tokenizer, messages, where=where)  # for its error message
        out = self.tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return np.asarray(out["input_ids"], np.int32), np.asarray(out["assistant_masks"], bool)

    def _by_prefix(self, messages: list[dict[str, str]], where: str) -> Rendered | None:
        whole_text = render_text(self.tokenizer, messages, where=where)
        whole = encode_text(self.tokenizer, whole_text)
        spans = []
        for turn in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
            asked_text = render_text(self.tokenizer, messages[:turn], add_generation_prompt=True, where=where)
            answered_text = render_text(self.tokenizer, messages[: turn + 1], where=where)
            if not (whole_text.startswith(answered_text) and answered_text.startswith(asked_text)):
                raise UserError(
                    f"{where}: the chat template rewrites earlier text when an answer is added, so it is unclear which "
                    "tokens are the answer; add generation markers to the template, or use response_ids"
                )
            asked, answered = encode_text(self.tokenizer, asked_text), encode_text(self.tokenizer, answered_text)
            end = len(answered)
            if self.end_of_turn in answered[len(asked) :]:
                end -= answered[::-1].index(self.end_of_turn)
            if whole[: len(asked)] != asked or whole[:end] != answered[:end]:
                return None
            spans.append((len(asked), end))
        return _spans(whole, spans)


def _spans(ids: list[int], spans: list[tuple[int, int]]) -> Rendered:
    mask = np.zeros(len(ids), bool)
    for start, end in spans:
        mask[start:end] = True
    return np.asarray(ids, np.int32), mask
