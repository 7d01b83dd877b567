"""The slow and correct engine: transformers' forward with a key-value cache, and a sampling loop written out.

No padding anywhere: rows of one prompt length form a cohort and decode side by side. A second opinion on the fast
engine, and a way to sample models that it lacks.
"""

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from resources.engines.base import (
    FinishReason,
    GenerationFacts,
    GenerationOutput,
    GenerationRequest,
    OnFinished,
    Sampling,
    WeightMismatchError,
    WeightReport,
    Weights,
)
from resources.engines.generation_facts import close_facts, open_gauge
from resources.engines.request_checks import check_request
from resources.engines.weight_update import TakesUpdates, WeightUpdate


@dataclass(slots=True)
class _Row:
    request: GenerationRequest
    sampling: Sampling
    generator: torch.Generator
    added: float
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def output(self, reason: FinishReason) -> GenerationOutput:
        return GenerationOutput(
            row_id=self.request.row_id,
            token_ids=tuple(self.ids),
            log_probs=tuple(self.log_probs),
            finish_reason=reason,
            finish_seconds=time.monotonic() - self.added,
        )


@dataclass(slots=True)
class _Cohort:
    rows: list[_Row]
    cache: DynamicCache
    coming: Tensor
    """[rows, tokens] int64: what the next forward takes."""


class HuggingFaceEngine(TakesUpdates):
    """Continuous batching in its plainest form."""

    def __init__(self, model_folder: str, *, dtype: str, slots: int) -> None:
        """Load the model onto the accelerator, or the CPU. `slots`: rows decoded at a time."""
        self.policy_version = 0
        self.facts = GenerationFacts()
        self._slots = slots
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_folder, dtype=getattr(torch, dtype), trust_remote_code=False
        )
        self._model = model.to(self._device).eval()
        self._waiting: deque[_Row] = deque()
        self._cohorts: list[_Cohort] = []

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, on_finished: OnFinished | None = None
    ) -> list[GenerationOutput]:
        """Sample all requests."""
        started = time.monotonic()
        gauge = open_gauge(self._slots, requests)
        self.facts = GenerationFacts(prompt_tokens=sum(len(request.prompt_ids) for request in requests))
        outputs: dict[int, GenerationOutput] = {}
        is_done = False
        try:
            for request in requests:
                self.add_request(request, sampling)
            while self.has_unfinished():
                finished = self.step()
                outputs.update((output.row_id, output) for output in finished)
                gauge.observe(running=sum(len(cohort.rows) for cohort in self._cohorts), waiting=len(self._waiting))
                if finished and on_finished is not None:
                    on_finished(finished)
            is_done = True
        finally:
            if not is_done:
                self.abort()
        close_facts(self.facts, gauge, time.monotonic() - started, outputs)
        return [outputs[request.row_id] for request in requests]

    def add_request(self, request: GenerationRequest, sampling: Sampling) -> None:
        """Queue one response."""
        self._check_usable()
        config = self._model.config.get_text_config()
        # A model without position embeddings (ALiBi, recurrent) names no length.
        check_request(request, config.vocab_size, getattr(config, "max_position_embeddings", None))
        generator = torch.Generator().manual_seed(request.seed)
        self._waiting.append(_Row(request=request, sampling=sampling, generator=generator, added=time.monotonic()))

    def has_unfinished(self) -> bool:
        """Whether any response is running or waiting."""
        return bool(self._cohorts or self._waiting)

    @torch.no_grad()
    def step(self) -> list[GenerationOutput]:
        """One token for every running row."""
        self._check_usable()
        self._admit()
        finished: list[GenerationOutput] = []
        for cohort in self._cohorts:
            made = self._model(input_ids=cohort.coming, past_key_values=cohort.cache, use_cache=True)
            logits = made.logits[:, -1].float().cpu()  # rows draw with generators of their own, on the CPU
            kept: list[int] = []
            for place, row in enumerate(cohort.rows):
                reason = _extend(row, logits[place])
                if reason is None:
                    kept.append(place)
                else:
                    finished.append(row.output(reason))
            if len(kept) < len(cohort.rows):
                cohort.rows = [cohort.rows[place] for place in kept]
                if kept:
                    cohort.cache.batch_select_indices(torch.tensor(kept, device=self._device))
            cohort.coming = torch.tensor([[row.ids[-1]] for row in cohort.rows], device=self._device)
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]
        return finished

    def abort(self, row_ids: Collection[int] | None = None) -> list[GenerationOutput]:
        """End these responses (all by default), keeping what was sampled."""
        wanted = None if row_ids is None else set(row_ids)
        gone: list[_Row] = []
        for cohort in self._cohorts:
            kept = [k for k, row in enumerate(cohort.rows) if wanted is not None and row.request.row_id not in wanted]
            gone += [row for k, row in enumerate(cohort.rows) if k not in kept]
            if kept and len(kept) < len(cohort.rows):
                cohort.cache.batch_select_indices(torch.tensor(kept, device=self._device))
                cohort.coming = cohort.coming[kept]
            cohort.rows = [cohort.rows[k] for k in kept]
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]
        gone += [row for row in self._waiting if wanted is None or row.request.row_id in wanted]
        self._waiting = deque(row for row in self._waiting if wanted is not None and row.request.row_id not in wanted)
        return [row.output(FinishReason.ABORT) for row in gone]

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs at temperature 1; 0.0 for the first."""
        self._check_usable()
        ids = torch.tensor([list(token_ids)], device=self._device)
        log_probs = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return [0.0, *log_probs.gather(1, ids[0, 1:, None])[:, 0].tolist()]

    def begin_update(self) -> None:
        """Open the model for new weights."""
        if self.has_unfinished():
            raise RuntimeError("responses are being sampled; abort them before new weights come")
        self._broken = "a weight update was begun and not finished"
        self._update = WeightUpdate(None)

    @torch.no_grad()
    def load_weights(self, weights: Weights) -> None:
        """Copy some weights in place."""
        update = self._open_update()
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for name, tensor in update.take(weights):
            if name not in parameters or parameters[name].shape != tensor.shape:
                found = tuple(parameters[name].shape) if name in parameters else None
                raise WeightMismatchError(f"weight {name!r} has shape {tuple(tensor.shape)}; the engine's is {found}")
            parameters[name].copy_(tensor)
            update.loaded.add(name)

    def finish_update(self, version: int, expected_names: Collection[str]) -> WeightReport:
        """Put the weights in force. Raises WeightMismatchError."""
        update = self._open_update()
        self._update = None
        update.check_names(expected_names)
        own = dict(self._model.named_parameters(remove_duplicate=False))
        reached = {id(own[name]) for name in update.loaded}
        lacking = sorted(name for name, parameter in own.items() if id(parameter) not in reached)
        if lacking:
            raise WeightMismatchError(f"{len(lacking)} weights of the engine got no value: {lacking}")
        self._broken = None
        self.policy_version = version
        return update.report(version)

    def sleep(self) -> None:
        """Move the weights to host memory."""
        self._model.to("cpu")

    def wake(self) -> None:
        """Undo `sleep`."""
        self._model.to(self._device)

    def shutdown(self) -> None:
        """Free the model."""
        del self._model

    def _admit(self) -> None:
        free = self._slots - sum(len(cohort.rows) for cohort in self._cohorts)
        while free > 0 and self._waiting:
            length = len(self._waiting[0].request.prompt_ids)
            rows: list[_Row] = []
            while self._waiting and free > 0 and len(self._waiting[0].request.prompt_ids) == length:
                rows.append(self._waiting.popleft())
                free -= 1
            prompts = torch.tensor([row.request.prompt_ids for row in rows], device=self._device)
            self._cohorts.append(_Cohort(rows=rows, cache=DynamicCache(config=self._model.config), coming=prompts))


def _extend(row: _Row, logits: Tensor) -> FinishReason | None:
    """Sample one token for a row from `logits` [V] float32; why the row ended, if it did."""
    log_probs = processed_log_probs(logits, row.sampling)
    if row.sampling.greedy:
        token = int(log_probs.argmax())
    else:
        noise = torch.empty_like(log_probs).exponential_(generator=row.generator)
        token = int((log_probs.exp() / noise).argmax())
    row.ids.append(token)
    row.log_probs.append(float(log_probs[token]))
    if token in row.sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(row.ids) == row.request.max_tokens else None


def processed_log_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probs [V] of the distribution that is drawn from: temperature, then top-k, then top-p, normalised again.

    >>> processed_log_probs(torch.tensor([2.0, 1.0, 0.0]).log(), Sampling(top_k=1)).exp().tolist()
    [1.0, 0.0, 0.0]
    """
    if sampling.greedy:
        return logits.log_softmax(-1)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1.0:
        ordered, places = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits = logits.index_fill(0, places[before >= sampling.top_p], -torch.inf)
    return logits.log_softmax(-1)
