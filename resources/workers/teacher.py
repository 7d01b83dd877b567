"""A teacher: scores the student's own samples, and with `top_k` says what it would have said itself."""

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from configs.model import ModelConfig
from configs.training import TrainedRoleConfig
from resources.batch import columns_of, make_shard, ragged_from_values
from resources.dispatch import Dispatch, dispatch
from resources.models.causal_lm import load_model_config, load_tokenizer
from resources.teachers import match_tokens
from resources.workers.base import Status
from resources.workers.padding import collect_columns
from resources.workers.reference import ReferenceWorker

_IMPOSSIBLE = -30.0
"""Log-prob of what cannot be sampled; its probability is 0 in float16."""


class TeacherWorker(ReferenceWorker):
    """Holds one teacher. Token ids on both sides are the student's; where the teacher numbers them otherwise, they are
    translated here."""

    role = "teacher"
    column = "teacher_log_probs"

    def __init__(
        self, model: ModelConfig, settings: TrainedRoleConfig, seed: int, *, student: ModelConfig, **options: Any
    ) -> None:
        """Load the teacher. Raises TeacherError when its tokens are not the student's."""
        match = match_tokens(load_tokenizer(student), load_tokenizer(model), model.path or "the teacher")
        super().__init__(model, settings, seed, **options)
        self.to_teacher = None if match is None else torch.tensor(match, device=self.device)
        """[student's tokens] the teacher's id of each of the student's tokens; None when they are the same."""
        self.student_vocab_size = int(load_model_config(student).get_text_config().vocab_size)
        self.to_student = None if match is None else _inverse(match, self.module.lm.config.get_text_config().vocab_size)

    @dispatch(Dispatch.MESH, bulk=True, split=("rows",))
    def score(
        self, rows: TensorDictBase, temperature: float = 1.0, top_k: int | None = None
    ) -> tuple[Status, TensorDict]:
        """Log-probs of the sampled tokens under the teacher.

        Returns:
            status, and a shard with `teacher_log_probs` (0 outside `response_mask`); with `top_k` also
            `teacher_top_k_ids` (int32) and `teacher_top_k_log_probs` (float16), [K] for each token of `response_mask`.
        """
        watch = self.stopwatch()
        self.module.eval()
        row_ids = rows["row_ids"].tolist()
        parts: list[tuple[list[int], Mapping[str, Tensor]]] = []
        likeliest: dict[int, tuple[Tensor, Tensor]] = {}
        for positions in self.scoring_batches(rows, watch):
            batch = self.micro_batch(rows, [row_ids[position] for position in positions])
            mask = batch["sampled_mask"].clone()
            mask[:, 0] = False
            ids = batch["input_ids"] if self.to_teacher is None else self.to_teacher[batch["input_ids"]]
            with watch.phase("forward"), torch.no_grad():
                log_probs, _, *more = self.module(ids, mask, temperature=temperature, top_k=top_k)
            if not positions:
                continue
            parts.append((positions, {self.column: log_probs}))
            if more:
                counts = mask.sum(dim=1).tolist()
                pairs = zip(more[0].cpu().split(counts), more[1].cpu().split(counts), strict=True)
                likeliest |= dict(zip(positions, pairs, strict=True))
        shard = collect_columns(rows, parts, [self.column])
        if top_k is not None:
            shard = self._with_top_k(shard, [likeliest[position] for position in range(len(row_ids))], top_k)
        return {"metrics": {}, "spans": watch.spans()}, shard

    def _with_top_k(self, shard: TensorDict, rows: list[tuple[Tensor, Tensor]], top_k: int) -> TensorDict:
        """Half the bytes of int64 and float32, and nothing for the prompt: K = 32 costs 192 bytes a sampled token."""
        lengths = torch.tensor([ids.shape[0] for ids, _ in rows], dtype=torch.int64)
        ids = torch.cat([ids for ids, _ in rows]) if rows else torch.empty((0, top_k), dtype=torch.int64)
        log_probs = torch.cat([part for _, part in rows]) if rows else torch.empty((0, top_k))
        if self.to_student is not None:
            ids = self.to_student[ids]
        # Embeddings that no token of the student owns: no model that was trained ever says them.
        is_foreign = (ids < 0) | (ids >= self.student_vocab_size)
        ids, log_probs = ids.masked_fill(is_foreign, 0), log_probs.masked_fill(is_foreign, _IMPOSSIBLE)
        return make_shard(
            {
                **columns_of(shard),
                "teacher_top_k_ids": ragged_from_values(ids.to(torch.int32), lengths),
                "teacher_top_k_log_probs": ragged_from_values(log_probs.to(torch.float16), lengths),
            }
        )


def _inverse(match: list[int], vocab_size: int) -> Tensor:
    """Teacher's id -> student's; -1 for an embedding that no token owns."""
    table = torch.full((vocab_size,), -1)
    table[torch.tensor(match)] = torch.arange(len(match))
    return table
