"""How an answer becomes ids behind a turn: only the answer's own text is encoded, never what was sampled."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

_MARK = "\u2402assistant\u2403"
"""Stands for the turn in a rendered conversation; no template and no model writes it."""


class AnswerEncoder:
    """Encodes results of tools, or observations, as the model expects to read them.

    With a chat template: as the template renders a message of role `tool` (or `user`) behind the assistant's, up to the
    next assistant's turn. Without: each result through `template`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: str = "{result}",
        max_tokens: int,
        chat_role: str | None = None,
    ) -> None:
        """`chat_role`: role of the message that carries an answer; None for a model without chat template."""
        self._tokenizer, self._template, self._max_tokens = tokenizer, template, max_tokens
        self._role = chat_role

    def __call__(self, texts: Sequence[str], end: int | None) -> list[int]:
        """Ids to append. `end`: the token that ended the turn and stands there already; None where none did.

        Each result is cut to `max_tokens` tokens; what the template adds around it is never cut.
        """
        kept = [self._cut(text) for text in texts]
        if self._role is None:
            return [token for text in kept for token in self._encode(self._template.replace("{result}", text))]
        return self._encode(self._behind_turn(kept, end))

    def _cut(self, text: str) -> str:
        ids = self._encode(text)
        return text if len(ids) <= self._max_tokens else str(self._tokenizer.decode(ids[: self._max_tokens]))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _behind_turn(self, texts: Sequence[str], end: int | None) -> str:
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _MARK},
            *({"role": self._role, "content": text} for text in texts),
        ]
        rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        _, found, tail = str(rendered).partition(_MARK)
        if not found:
            raise ValueError("the chat template does not write an assistant's message as it is; tools cannot follow it")
        if end is None:
            return tail
        shorter = without_end(tail, self._tokenizer, end)
        return shorter if shorter != tail else tail.removeprefix(str(self._tokenizer.eos_token))


def without_end(tail: str, tokenizer: PreTrainedTokenizerBase, end: int) -> str:
    """What a template writes behind a turn, from behind the token `end` where that comes first.

    A model may end a turn with another token than the tokenizer's end of sequence, and what was sampled is not to stand
    there twice; a template may write a space before it.
    """
    text = str(tokenizer.decode([end], skip_special_tokens=False))
    before, found, behind = tail.partition(text) if text else ("", "", "")
    return behind if found and not before.strip() else tail
