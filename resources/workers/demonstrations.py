"""The demonstrations worker: prompts answered as the data says, as rows a trainer can read."""

import os
from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from configs.data import DataConfig
from configs.model import ModelConfig
from configs.rollout import RolloutConfig
from configs.training import hold_answers
from resources.agent_rollout import build_agent_rollout, tool_schemas
from resources.batch import make_shard, ragged_from_rows
from resources.dispatch import Dispatch, dispatch
from resources.models.causal_lm import load_tokenizer
from resources.prompts import Prompt, PromptError, PromptSource

Status = dict[str, Any]


class DemonstrationWorker:
    """Reads prompts and their answers; rank r of n takes every n-th of them. Usable in-process."""

    role = "demonstrations"

    def __init__(
        self, model: ModelConfig, data: DataConfig, rollout: RolloutConfig | None = None, turns: Sequence[str] = ()
    ) -> None:
        """`turns`: texts of a demonstration's turns; the tools of `rollout` answer between them. See SftConfig."""
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(model)
        tools = () if rollout is None else tool_schemas(rollout)
        self._prompts = PromptSource(data, self._tokenizer, tools=tools)
        self._turns, self._holds_answers = tuple(turns), hold_answers(turns)
        ends = {cast("int", self._tokenizer.eos_token_id)}
        self._agent = build_agent_rollout(rollout, data, self._tokenizer, ends) if rollout is not None else None

    @dispatch(Dispatch.BROADCAST, bulk=True)
    def read(self, epoch: int, start: int, count: int) -> tuple[Status, TensorDict]:
        """The `count` prompts from a position on, each followed by its answer and the end-of-sequence token.

        Returns:
            status, and a shard with row_ids, group_ids, prompt_lengths, response_lengths, input_ids, response_mask and
            train_mask (the answer's tokens).

        Raises:
            PromptError: for a prompt without an answer where its answer is part of what is learnt.
        """
        found = self._prompts.rows(epoch, start, count).prompts[self.rank :: self.world_size]
        written = [self._written(prompt) for prompt in found]
        answers = [ids for ids, _ in written]
        masks = [
            torch.tensor([False] * len(prompt.ids) + mask) for prompt, (_, mask) in zip(found, written, strict=True)
        ]
        shard = make_shard(
            {
                "row_ids": torch.tensor([prompt.ordinal for prompt in found], dtype=torch.int64),
                "group_ids": torch.tensor([prompt.ordinal for prompt in found], dtype=torch.int64),
                "prompt_lengths": torch.tensor([len(prompt.ids) for prompt in found], dtype=torch.int64),
                "response_lengths": torch.tensor([len(ids) for ids in answers], dtype=torch.int64),
                "input_ids": ragged_from_rows(
                    [torch.tensor([*prompt.ids, *ids]) for prompt, ids in zip(found, answers, strict=True)], torch.int64
                ),
                "response_mask": ragged_from_rows(masks, torch.bool),
                "train_mask": ragged_from_rows(masks, torch.bool),
            }
        )
        return {"metrics": {}, "spans": {}}, shard

    def _written(self, prompt: Prompt) -> tuple[list[int], list[bool]]:
        """Ids after the prompt, and which of them a policy would have to write itself."""
        if self._holds_answers and not prompt.answer.strip():
            raise PromptError(
                f"row {prompt.index} of source {prompt.source!r} has no answer to learn from; "
                "the warm-up needs one for every row that it reads (data.sources[].answer_column)"
            )
        if not self._turns:
            ids = self._tokenizer(prompt.answer, add_special_tokens=False)["input_ids"]
            return [*ids, cast("int", self._tokenizer.eos_token_id)], [True] * (len(ids) + 1)
        texts = [turn.format(prompt=prompt.text, answer=prompt.answer) for turn in self._turns]
        ids, mask = [], []
        for place, text in enumerate(texts):
            own = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            is_end = place == len(texts) - 1 or self._agent is None or not self._agent.pauses_at(own[-1])
            end = cast("int", self._tokenizer.eos_token_id) if is_end else None
            own = list(own) if end is None else [*own, end]
            ids, mask = [*ids, *own], [*mask, *[True] * len(own)]
            if place < len(texts) - 1:
                said = self._agent.answer_to(text, end=end) if self._agent is not None else []
                ids, mask = [*ids, *said], [*mask, *[False] * len(said)]
        return ids, mask
