"""The preferences worker: pairs of a preferred and a rejected response, as rows a reward model can be trained on."""

import os
from typing import Any, cast

import torch
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from configs.data import DataConfig
from configs.model import ModelConfig
from configs.rollout import RolloutConfig
from resources.agent_rollout import tool_schemas
from resources.batch import make_shard, ragged_from_rows
from resources.dispatch import Dispatch, dispatch
from resources.models.causal_lm import load_tokenizer
from resources.preference_pairs import pair_of
from resources.prompts import Prompt, PromptSource

Status = dict[str, Any]


class PreferenceWorker:
    """Reads prompts with two responses; rank r of n takes every n-th of them. Usable in-process."""

    role = "preferences"

    def __init__(self, model: ModelConfig, data: DataConfig, rollout: RolloutConfig | None = None) -> None:
        """`rollout`: its tools stand in the prompts, as in those that are sampled."""
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(model)
        tools = () if rollout is None else tool_schemas(rollout)
        self._prompts = PromptSource(data, self._tokenizer, tools=tools)

    @dispatch(Dispatch.BROADCAST, bulk=True)
    def read(self, epoch: int, start: int, count: int) -> tuple[Status, TensorDict]:
        """The `count` pairs from a position on: row 2n is the preferred, row 2n + 1 the rejected response to prompt n.

        Returns:
            status, and a shard with row_ids, group_ids (n), prompt_lengths, response_lengths, input_ids and
            response_mask.

        Raises:
            PromptError: for a prompt that lacks one of the two.
        """
        found = self._prompts.rows(epoch, start, count).prompts[self.rank :: self.world_size]
        rows = [(2 * prompt.ordinal + k, prompt, ids) for prompt in found for k, ids in enumerate(self._pair(prompt))]
        masks = [torch.tensor([False] * len(prompt.ids) + [True] * len(ids)) for _, prompt, ids in rows]
        shard = make_shard(
            {
                "row_ids": torch.tensor([row for row, _, _ in rows], dtype=torch.int64),
                "group_ids": torch.tensor([prompt.ordinal for _, prompt, _ in rows], dtype=torch.int64),
                "prompt_lengths": torch.tensor([len(prompt.ids) for _, prompt, _ in rows], dtype=torch.int64),
                "response_lengths": torch.tensor([len(ids) for _, _, ids in rows], dtype=torch.int64),
                "input_ids": ragged_from_rows(
                    [torch.tensor([*prompt.ids, *ids]) for _, prompt, ids in rows], torch.int64
                ),
                "response_mask": ragged_from_rows(masks, torch.bool),
            }
        )
        return {"metrics": {}, "spans": {}}, shard

    def _pair(self, prompt: Prompt) -> tuple[list[int], list[int]]:
        texts = pair_of(prompt.source, prompt.index, prompt.answer, prompt.extra)
        ended = [
            [*self._tokenizer(text, add_special_tokens=False)["input_ids"], cast("int", self._tokenizer.eos_token_id)]
            for text in texts
        ]
        return ended[0], ended[1]
