"""A shipped engine without a model: it answers by a script, with the delays of a real one. For tests and studies.

Slots, waiting rows, per-token delays and weight versions behave as in a continuous-batching engine; tokens and
log-probs are functions of each row's seed. The script is `rollout.scripted.responses`, see `configs/scripted.py`.
"""

import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from configs.rollout import RolloutConfig
from configs.scripted import FaultScript, Script
from resources.engines.base import (
    FinishReason,
    GenerationFacts,
    GenerationOutput,
    GenerationRequest,
    OnFinished,
    Sampling,
    WeightReport,
    Weights,
)
from resources.engines.generation_facts import close_facts, open_gauge
from resources.engines.weight_update import TakesUpdates, WeightUpdate

Encode = Callable[[str], list[int]]


@dataclass(slots=True)
class _Row:
    request: GenerationRequest
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    reason: FinishReason
    added: float
    extra_seconds: float = 0.0
    started: float | None = None

    def seconds(self, per_token: float) -> float:
        return len(self.ids) * per_token + self.extra_seconds


@dataclass(slots=True)
class _State:
    waiting: list[_Row] = field(default_factory=list)
    running: list[_Row] = field(default_factory=list)


class ScriptedEngine(TakesUpdates):
    """Answers by `rollout.scripted`."""

    def __init__(
        self, rollout: RolloutConfig, *, vocab_size: int, encode: Encode | None = None, model_folder: str | None = None
    ) -> None:
        """Args:
        rollout: `scripted` and `max_running_sequences` are read.
        vocab_size: random tokens lie below it.
        encode: text -> ids for modes with text; the tokenizer in `model_folder` when left out.
        model_folder: where the tokenizer lies.
        """
        if rollout.scripted is None:
            raise ValueError("rollout.scripted is missing; a scripted engine needs its script")
        self.policy_version = 0
        self.facts = GenerationFacts()
        self.script = rollout.scripted.responses
        self._per_token = rollout.scripted.seconds_per_token
        self._slots = rollout.max_running_sequences
        self._vocab_size = vocab_size
        self._encode = encode
        self._folder = model_folder
        self._state = _State()
        self._generation = 0
        self._asked: Counter[int] = Counter()
        """Requests of each row so far, for the turns of an episode."""
        self._long_row: int | None = None
        """Row that `one_long` makes long."""

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, on_finished: OnFinished | None = None
    ) -> list[GenerationOutput]:
        """Answer all requests, taking the time a real engine with these slots would take."""
        self._generation += 1
        started = time.monotonic()
        gauge = open_gauge(self._slots, requests)
        self.facts = GenerationFacts(prompt_tokens=sum(len(request.prompt_ids) for request in requests))
        outputs: dict[int, GenerationOutput] = {}
        self._long_row = requests[0].row_id if requests else None
        is_done = False
        try:
            for request in requests:
                self.add_request(request, sampling)
            self._plan_slow_row()
            self._meet_faults(0)
            before = time.monotonic()
            while self.has_unfinished():
                finished = self.step()
                before, seconds = time.monotonic(), time.monotonic() - before
                outputs.update((output.row_id, output) for output in finished)
                gauge.observe(
                    running=len(self._state.running),
                    waiting=len(self._state.waiting),
                    tokens=self._sampled(outputs),
                    steps=seconds / self._per_token if self._per_token else None,
                )
                if finished and on_finished is not None:
                    on_finished(finished)
                self._meet_faults(len(outputs))
            is_done = True
        finally:
            if not is_done:
                self.abort()
        close_facts(self.facts, gauge, time.monotonic() - started, outputs)
        return [outputs[request.row_id] for request in requests]

    def add_request(self, request: GenerationRequest, sampling: Sampling) -> None:
        """Queue one response; what it will be is fixed now."""
        rng = random.Random(0 if sampling.greedy else request.seed)
        ids = self._response(request, sampling, rng)
        reason = FinishReason.STOP if ids and ids[-1] in sampling.stop_token_ids else FinishReason.LENGTH
        # Log-probs of a plausible policy: about -0.7 on average, none above 0.
        log_probs = tuple(-rng.expovariate(1.5) for _ in ids)
        row = _Row(request=request, ids=ids, log_probs=log_probs, reason=reason, added=time.monotonic())
        self._state.waiting.append(row)

    def has_unfinished(self) -> bool:
        """Whether any response is running or waiting."""
        return bool(self._state.running or self._state.waiting)

    def step(self) -> list[GenerationOutput]:
        """Sleep until the next running rows are done, and give them."""
        state = self._state
        now = time.monotonic()
        while state.waiting and len(state.running) < self._slots:
            row = state.waiting.pop(0)
            row.started = now
            state.running.append(row)
        if not state.running:
            return []
        ends = [(row.started or now) + row.seconds(self._per_token) for row in state.running]
        first = min(ends)
        if self.script.by_token:
            first = min(first, now + self._per_token)
        time.sleep(max(0.0, first - now))
        done = [row for row, end in zip(state.running, ends, strict=True) if end <= first]
        state.running = [row for row, end in zip(state.running, ends, strict=True) if end > first]
        return [_output(row, row.reason) for row in done]

    def abort(self, row_ids: Collection[int] | None = None) -> list[GenerationOutput]:
        """End responses; a running one has as many tokens as its time allowed."""
        wanted = None if row_ids is None else set(row_ids)
        state, now = self._state, time.monotonic()
        gone = [r for r in (*state.running, *state.waiting) if wanted is None or r.request.row_id in wanted]
        state.running = [row for row in state.running if row not in gone]
        state.waiting = [row for row in state.waiting if row not in gone]
        for row in gone:
            sampled = 0 if row.started is None else int((now - row.started) / max(self._per_token, 1e-9))
            row.ids, row.log_probs = row.ids[:sampled], row.log_probs[:sampled]
        return [_output(row, FinishReason.ABORT) for row in gone]

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Nothing: there is no model to compare with."""
        return []

    def begin_update(self) -> None:
        """Take new weights."""
        self._update = WeightUpdate(None)

    def load_weights(self, weights: Weights) -> None:
        """Read them, so that every check on the way runs, and forget them."""
        for _ in self._open_update().take(weights):
            pass

    def finish_update(self, version: int, expected_names: Collection[str]) -> WeightReport:
        """Take over the version. Raises WeightMismatchError for other names."""
        update = self._open_update()
        self._update = None
        update.check_names(expected_names)
        self.policy_version = version
        return update.report(version)

    def sleep(self) -> None:
        """Nothing to free."""

    def wake(self) -> None:
        """Nothing to take back."""

    def shutdown(self) -> None:
        """Nothing to free."""

    def _sampled(self, outputs: Mapping[int, GenerationOutput]) -> int:
        """Tokens so far, of finished and running rows."""
        done = sum(len(output.token_ids) for output in outputs.values())
        if self._per_token <= 0.0:
            return done
        now = time.monotonic()
        return done + sum(round((now - (row.started or now)) / self._per_token) for row in self._state.running)

    def _response(self, request: GenerationRequest, sampling: Sampling, rng: random.Random) -> tuple[int, ...]:
        script = self.script
        stop = list(sampling.stop_token_ids[:1])
        if script.mode == "random":
            length = _length(script, rng, is_long=request.row_id == self._long_row)
            ids = [self._random_token(sampling, rng) for _ in range(length - 1)] + (
                stop or [self._random_token(sampling, rng)]
            )
        elif script.mode == "fixed":
            self._asked[request.row_id] += 1
            turn, index = self._asked[request.row_id], request.prompt_index
            keys = (f"{index}/{turn}", str(index), f"*/{turn}", "*")
            text = next((script.texts[key] for key in keys if key in script.texts), None)
            if text is None:
                raise ValueError(
                    f"scripted.responses.texts has neither {str(request.prompt_index)!r} nor '*'; add one of them"
                )
            ids = self._ids(text)
            ids += [] if ids and ids[-1] in sampling.stop_token_ids else stop
        else:
            right = self._ids(request.answer)
            ids = (right if rng.random() < script.accuracy else self._wrong(right, sampling, rng)) + stop
        return tuple(ids[: request.max_tokens])

    def _wrong(self, right: list[int], sampling: Sampling, rng: random.Random) -> list[int]:
        """As long as the answer, and different in at least one token."""
        if not right:
            return [self._random_token(sampling, rng)]
        ids = [token if rng.random() < 0.5 else self._random_token(sampling, rng) for token in right]
        place = rng.randrange(len(ids))
        while ids == right:
            ids[place] = self._random_token(sampling, rng)
        return ids

    def _random_token(self, sampling: Sampling, rng: random.Random) -> int:
        while True:
            token = rng.randrange(self._vocab_size)
            if token not in sampling.stop_token_ids:
                return token

    def _ids(self, text: str) -> list[int]:
        if self._encode is None:
            from transformers import AutoTokenizer  # seconds to import; only scripts with text need it

            tokenizer = AutoTokenizer.from_pretrained(self._folder)
            self._encode = lambda text: list(tokenizer.encode(text, add_special_tokens=False))
        return self._encode(text)

    def _plan_slow_row(self) -> None:
        for fault in self.script.faults:
            if fault.kind == "slow_row" and self._is_due(fault) and self._state.waiting:
                _mark(fault)
                self._state.waiting[-1].extra_seconds = fault.seconds

    def _meet_faults(self, finished: int) -> None:
        for fault in self.script.faults:
            if fault.kind == "slow_row" or finished < fault.after_rows or not self._is_due(fault):
                continue
            _mark(fault)
            if fault.kind == "exit":
                os._exit(17)
            if fault.kind == "hang":
                time.sleep(fault.seconds)
            else:
                raise RuntimeError(f"scripted fault in generation {self._generation} after {finished} rows")

    def _is_due(self, fault: FaultScript) -> bool:
        if fault.generation != self._generation:
            return False
        if fault.engine is not None and fault.engine != int(os.environ.get("RANK", "0")):
            return False
        return fault.marker is None or not Path(fault.marker).exists()


def _output(row: _Row, reason: FinishReason) -> GenerationOutput:
    return GenerationOutput(
        row_id=row.request.row_id,
        token_ids=row.ids,
        log_probs=row.log_probs,
        finish_reason=reason,
        finish_seconds=time.monotonic() - row.added,
    )


def _length(script: Script, rng: random.Random, *, is_long: bool) -> int:
    low, high = script.min_length, script.max_length
    if script.lengths == "one_long":
        return high if is_long else low
    if script.lengths == "uniform":
        return rng.randint(low, high)
    # A quarter of the range for most, exponentially rarer; one row in fifty near the maximum.
    if rng.random() < 0.02:
        return rng.randint(math.ceil(0.9 * high), high) if high > low else high
    return min(high, low + int(rng.expovariate(8.0 / max(1, high - low))))


def _mark(fault: FaultScript) -> None:
    if fault.marker is not None:
        Path(fault.marker).touch()
