"""The demonstrations worker: prompts answered as the data says, as rows a trainer can read."""

import os
from typing import Any

import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from configs.data import DataConfig
from configs.model import ModelConfig
from resources.batch import make_shard, ragged_from_rows
from resources.dispatch import Dispatch, dispatch
from resources.models.causal_lm import load_tokenizer
from resources.prompts import Prompt, PromptError, PromptSource

Status = dict[str, Any]


class DemonstrationWorker:
    """Reads prompts and their answers; rank r of n takes every n-th of them. Usable in-process."""

    role = "demonstrations"

    def __init__(self, model: ModelConfig, data: DataConfig) -> None:
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(model)
        self._prompts = PromptSource(data, self._tokenizer)

    @dispatch(Dispatch.BROADCAST, bulk=True)
    def read(self, epoch: int, start: int, count: int) -> tuple[Status, TensorDict]:
        """The `count` prompts from a position on, each followed by its answer and the end-of-sequence token.

        Returns:
            status, and a shard with row_ids, group_ids, prompt_lengths, response_lengths, input_ids, response_mask and
            train_mask (the answer's tokens).

        Raises:
            PromptError: for a prompt without an answer.
        """
        found = self._prompts.rows(epoch, start, count).prompts[self.rank :: self.world_size]
        answers = [self._answer_ids(prompt) for prompt in found]
        masks = [
            torch.tensor([False] * len(prompt.ids) + [True] * len(ids))
            for prompt, ids in zip(found, answers, strict=True)
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

    def _answer_ids(self, prompt: Prompt) -> list[int]:
        if not prompt.answer:
            raise PromptError(
                f"row {prompt.index} of source {prompt.source!r} has no answer to learn from; "
                "the warm-up needs one for every row (data.sources[].answer_column)"
            )
        ids = self._tokenizer(prompt.answer, add_special_tokens=False)["input_ids"]
        return [*ids, int(self._tokenizer.eos_token_id)]
