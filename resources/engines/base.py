"""What every sampling engine offers: token ids in, token ids and log-probs out.

Text never enters an engine: decoding and encoding again is not the identity, so the ids that were sampled are the ids
that are trained on. Engines know nothing of prompts, groups, ranks or rewards.
"""

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from configs.rollout import RolloutConfig, SamplingConfig

Weights = Iterable[tuple[str, Tensor]]


class FinishReason(enum.IntEnum):
    """Why a response ended; the value is what `finish_reasons` of a batch holds."""

    STOP = 0
    """A stop token was sampled; it is the last token of the response."""
    LENGTH = 1
    ABORT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The distribution to draw from, with every stop token spelled out.

    Log-probs belong to exactly this distribution: temperature divides the logits, then top-k and top-p cut and the rest
    is normalised again. Greedy responses carry the log-probs at temperature 1.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    greedy: bool = False

    @classmethod
    def from_config(cls, config: SamplingConfig, eos_token_ids: Collection[int], *, greedy: bool = False) -> "Sampling":
        """The config's distribution; a model's own end-of-sequence ids stop a response besides the config's."""
        return cls(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            stop_token_ids=tuple(sorted({*eos_token_ids, *config.stop_token_ids})),
            greedy=greedy,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One response to sample."""

    row_id: int
    prompt_ids: tuple[int, ...]
    seed: int
    """Of this row alone; one seed for a whole batch would give every row the same noise."""
    max_tokens: int
    answer: str = ""
    """The reference answer. Only the scripted engine reads it; a real one never sees it."""
    prompt_index: int = -1
    """Index of the prompt in its source; only the scripted engine reads it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationOutput:
    """One sampled response: the stop token is kept, padding does not exist.

    >>> output = GenerationOutput(row_id=7, token_ids=(21, 2), log_probs=(-0.1, -0.3), finish_reason=FinishReason.STOP)
    >>> output.token_ids[-1], output.finish_reason.name
    (2, 'STOP')
    """

    row_id: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: FinishReason
    finish_seconds: float = 0.0
    """Since the start of the `generate` call (or since the request was added)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightReport:
    """What an engine loaded."""

    version: int
    names: tuple[str, ...]
    num_bytes: int
    seconds: float
    aliases: tuple[str, ...] = ()
    """Names filled from another name's tensor (a tied head)."""


@dataclass(slots=True)
class GenerationFacts:
    """What the last `generate` call knows of itself; `span` has the names of resources/telemetry/facts.py."""

    tokens: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    finish_seconds: dict[int, float] = field(default_factory=dict)
    span: dict[str, Any] = field(default_factory=dict)


OnFinished = Callable[[list[GenerationOutput]], None]
"""Called from the decode loop with the rows that just finished; it must not block."""


class Engine(Protocol):
    """Samples responses with the newest weights it was given."""

    policy_version: int
    facts: GenerationFacts

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, on_finished: OnFinished | None = None
    ) -> list[GenerationOutput]:
        """Sample all requests; the answers come in request order."""
        ...

    def add_request(self, request: GenerationRequest, sampling: Sampling) -> None:
        """Queue one response (continuous batching); `step` works on it."""
        ...

    def step(self) -> list[GenerationOutput]:
        """Advance every running response by about one token; gives those that finished."""
        ...

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""
        ...

    def abort(self, row_ids: Collection[int] | None = None) -> list[GenerationOutput]:
        """End responses (all of them by default) and give what was sampled so far, finish reason ABORT."""
        ...

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs at temperature 1 of each token given those before it; 0.0 for the first."""
        ...

    def begin_update(self) -> None:
        """Start taking new weights; nothing may be sampled until `finish_update`."""
        ...

    def load_weights(self, weights: Weights) -> None:
        """Take some of the new weights (checkpoint names and layout)."""
        ...

    def finish_update(self, version: int, expected_names: Collection[str]) -> WeightReport:
        """Put the new weights in force and drop every cache made with the old ones.

        Raises WeightMismatchError naming what is missing or unknown; the engine then refuses to sample.
        """
        ...

    def sleep(self) -> None:
        """Give accelerator memory back (weights to host memory, KV cache dropped); nothing on a CPU."""
        ...

    def wake(self) -> None:
        """Undo `sleep`."""
        ...

    def shutdown(self) -> None:
        """Free everything; the engine is of no use afterwards."""
        ...


class WeightMismatchError(ValueError):
    """The weights that came are not the weights the engine needs."""


def check_names(sent: Collection[str], expected: Collection[str]) -> None:
    """Raise WeightMismatchError unless both are the same set of names; the message lists the difference."""
    missing = sorted(set(expected) - set(sent))
    unknown = sorted(set(sent) - set(expected))
    if missing or unknown:
        raise WeightMismatchError(
            f"{len(missing)} weights are missing: {missing}; {len(unknown)} were not expected: {unknown}. Sender and "
            "engine must hold the same model"
        )


def build_engine(
    rollout: RolloutConfig,
    model_folder: str,
    *,
    dtype: str,
    vocab_size: int,
    max_model_length: int,
    seed: int,
    tensor_parallel: int = 1,
) -> Engine:
    """The engine that `rollout.engine` names, on the model in `model_folder`."""
    if rollout.engine == "scripted":
        from resources.engines.scripted import ScriptedEngine

        return ScriptedEngine(rollout, model_folder=model_folder, vocab_size=vocab_size)
    if rollout.engine == "huggingface":
        from resources.engines.huggingface import HuggingFaceEngine

        return HuggingFaceEngine(model_folder, dtype=dtype, slots=rollout.max_running_sequences)
    from resources.engines.vllm import VllmEngine

    return VllmEngine(
        rollout,
        model_folder,
        dtype=dtype,
        max_model_length=max_model_length,
        seed=seed,
        tensor_parallel=tensor_parallel,
    )


def counted(weights: Weights, seen: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Pass weights on, noting name -> bytes in `seen`; a name that comes twice is refused."""
    for name, tensor in weights:
        if name in seen:
            raise WeightMismatchError(f"weight {name!r} came twice in one update; send every name once")
        seen[name] = tensor.numel() * tensor.element_size()
        yield name, tensor
