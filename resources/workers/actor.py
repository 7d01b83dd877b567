"""The actor: scores responses under the policy, and trains it."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from resources.dispatch import Dispatch, dispatch
from resources.models.causal_lm import build_causal_lm, load_tokenizer, own_config
from resources.models.export import export_folder
from resources.models.log_probs import head_of
from resources.models.lora import (
    adapter_layers,
    adapter_tensors,
    adapters_off,
    add_adapters,
    export_adapter,
    merged_names,
    merged_tensors,
)
from resources.models.policy import PolicyModel
from resources.models.sharding import in_dtype_of_passes
from resources.models.weights import Bucket, in_buckets, tensor_checksum
from resources.update_plan import UpdatePlan
from resources.weight_sender import SendsWeights
from resources.workers.base import Status
from resources.workers.padding import collect_columns
from resources.workers.trained import Movement, TrainedWorker, movement_of

ActorLoss = Callable[[Tensor, Tensor | None, Mapping[str, Tensor]], tuple[Tensor, Mapping[str, Tensor]]]
"""loss_fn(log_probs [b, t], entropy [b, t] or None, padded columns) -> (share of the loss, metrics as sums)."""


class ActorWorker(SendsWeights, TrainedWorker):
    """Holds the policy. Arguments of the constructor: see ModelWorker."""

    role = "actor"
    module: PolicyModel

    def build_module(self) -> nn.Module:
        lm = build_causal_lm(self.model_config, self.seed)
        if self.model_config.gradient_checkpointing:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        if self.model_config.lora is not None:
            add_adapters(lm, self.model_config.lora, self.seed)
        return PolicyModel(lm, self.settings.log_prob_chunk_tokens, self.model_config.share_prompts)

    @dispatch(Dispatch.MESH, bulk=True, split=("rows",))
    def compute_log_probs(
        self, rows: TensorDictBase, temperature: float = 1.0, with_entropy: bool = True
    ) -> tuple[Status, TensorDict]:
        """Log-probs of the sampled tokens under the policy as it is now.

        Returns:
            status, and a shard with `old_log_probs` and, with `with_entropy`, `entropy` (ragged, 0 where
            `response_mask` is False).
        """
        entropy = {"entropy": 1} if with_entropy else {}
        with self.on_device():
            return score_rows(self, self.module, rows, temperature, {"old_log_probs": 0, **entropy})

    @dispatch(Dispatch.MESH, bulk=True, split=("rows",))
    def score_reference(self, rows: TensorDictBase, temperature: float = 1.0) -> tuple[Status, TensorDict]:
        """Log-probs under the policy with its adapters off: the reference of a LoRA run, without a second model.

        Returns status and a shard with `ref_log_probs`. Raises ValueError for an actor without adapters, which would
        score itself.
        """
        if not adapter_layers(self.module):
            raise ValueError(
                "score_reference needs model.lora: the actor has no adapters to switch off; use a reference role"
            )
        with self.on_device(), adapters_off(self.module):
            return score_rows(self, self.module, rows, temperature, {"ref_log_probs": 0})

    @dispatch(Dispatch.PER_RANK, split=("rows", "plan"))
    def update(
        self,
        rows: TensorDictBase,
        plan: UpdatePlan,
        loss_fn: ActorLoss,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> Status:
        """Take the optimizer steps of `plan` on `rows`.

        Args:
            rows: this rank's share: `input_ids`, `response_mask`, `train_mask` if any, and what `loss_fn` reads.
            plan: of this data-parallel rank, from `make_update_plans`.
            loss_fn: see ActorLoss.
            temperature: of the sampling distribution; divides the logits.
            with_entropy: give `loss_fn` the entropies of the whole distribution; only an entropy bonus needs them.

        Returns:
            status with metrics as sums and counts.

        Raises:
            RatioError: the policy is not the one that scored `old_log_probs` (see UpdatePlan.first_ratio_tolerance).
        """
        with self.on_device():
            return self.run_update(rows, plan, loss_fn, {"temperature": temperature, "with_entropy": with_entropy})

    def loss_of(
        self, batch: Mapping[str, Tensor], loss_fn: ActorLoss, options: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Tensor], Movement | None]:
        mask = batch["response_mask"].clone()
        mask[:, 0] = False  # nothing predicts the first token
        candidates = batch.get("teacher_top_k_ids")
        if candidates is not None:
            options = {**options, "candidates": candidates.long()}
        log_probs, entropy, *more = self.module(batch["input_ids"], mask, **options)
        columns = {**batch, "top_k_log_probs": more[0]} if more else batch
        loss, metrics = loss_fn(log_probs, entropy, columns)
        moved = movement_of(log_probs, batch["old_log_probs"], mask) if "old_log_probs" in batch else None
        # The zero keeps every parameter in the graph, and with it every collective, whatever the loss looks at.
        return loss + 0.0 * log_probs.sum(), metrics, moved

    @dispatch(Dispatch.RANK_ZERO)
    def vocabulary_size(self) -> int:
        """Token ids that the policy has an embedding of."""
        return int(self.module.lm.config.get_text_config().vocab_size)

    def expected_names(self) -> list[str]:
        """Names that `export_weights` sends, second names of tied tensors included."""
        ties = self._ties()
        return merged_names(self.module.lm) + sorted(ties)

    def export_weights(self, bucket_bytes: int = 256 * 2**20, wire_dtype: str | None = None) -> Iterator[Bucket]:
        """The policy's weights as buckets of (name, whole tensor); all ranks run through it together.

        Tied embeddings come under both names with one memory. The tensors may be the live weights: read, never write.
        """
        with self.on_device():
            dtype = wire_dtype or self.model_config.dtype
            named = in_dtype_of_passes(self.module, merged_tensors(self.module.lm), dtype)
            yield from in_buckets(named, bucket_bytes, dtype, self._ties())

    @dispatch(Dispatch.BROADCAST)
    def export(self, folder: str) -> None:
        """Write the policy (adapters merged) as a Hugging Face folder; all ranks gather, rank 0 writes."""
        gathered = [pair for bucket in self.export_weights(wire_dtype="float32") for pair in bucket]
        if self.rank == 0:
            lm, tokenizer = self.module.lm, load_tokenizer(self.model_config)
            config = own_config(self.model_config, lm.config)
            export_folder(Path(folder), config, lm.generation_config, tokenizer, gathered)

    @dispatch(Dispatch.BROADCAST)
    def export_adapter(self, folder: str, base: str) -> None:
        """Write the adapters alone as a peft folder for the model at `base`; all ranks gather, rank 0 writes.

        Raises ValueError for an actor without adapters.
        """
        config = self.model_config.lora
        if config is None:
            raise ValueError("there is no adapter to export: model.lora is not set; export the whole model")
        named = list(adapter_tensors(self.module.lm))
        if self.rank == 0:
            export_adapter(Path(folder), config, base, iter(named))

    @dispatch(Dispatch.BROADCAST)
    def checksum(self, wire_dtype: str | None = None) -> dict[str, int]:
        """Checksum of each exported tensor in the wire dtype."""
        return {
            name: tensor_checksum(tensor)
            for bucket in self.export_weights(wire_dtype=wire_dtype)
            for name, tensor in bucket
        }

    def _ties(self) -> dict[str, str]:
        """Second name -> first name of tensors that share memory."""
        lm = self.module.lm
        head = head_of(lm)
        if head.weight is not lm.get_input_embeddings().weight:
            return {}
        names = {id(part): name for name, part in lm.named_modules()}
        return {f"{names[id(head)]}.weight": f"{names[id(lm.get_input_embeddings())]}.weight"}


@torch.no_grad()
def score_rows(
    worker: Any, module: PolicyModel, rows: TensorDictBase, temperature: float, columns: Mapping[str, int]
) -> tuple[Status, TensorDict]:
    """Score all rows under `module`; `columns` maps a column's name to 0 (log-probs) or 1 (entropies)."""
    watch = worker.stopwatch()
    module.eval()
    row_ids = rows["row_ids"].tolist()
    parts: list[tuple[list[int], Mapping[str, Tensor]]] = []
    for positions in worker.scoring_batches(rows, watch):
        batch = worker.micro_batch(rows, [row_ids[position] for position in positions])
        mask = batch["sampled_mask"].clone()
        mask[:, 0] = False
        with watch.phase("forward"):
            outputs = module(batch["input_ids"], mask, temperature=temperature, with_entropy=1 in columns.values())
        if positions:
            parts.append((positions, {name: outputs[index] for name, index in columns.items()}))
    return {"metrics": {}, "spans": watch.spans()}, collect_columns(rows, parts, list(columns))
