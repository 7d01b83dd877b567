"""The real engine: vLLM, in this process, on CPU and GPU. The only file that imports vllm.

In-process on purpose: a worker then owns engine and weights, a fused actor hands tensors over without a copy, and
nothing outlives the worker. What vLLM changes in the process (threads, dtype, random streams) is put back.
"""

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from configs.rollout import RolloutConfig
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
from resources.engines.process_state import process_state_kept
from resources.engines.request_checks import check_request
from resources.engines.tensor_parallel import check_peers, join_peers, name_shared_memory, unlink_shared_memory
from resources.engines.uncompiled import uncompiled
from resources.engines.vllm_arguments import (
    check_accelerator,
    check_arguments,
    effective_arguments,
    engine_arguments,
)
from resources.engines.weight_update import TakesUpdates, WeightUpdate
from resources.telemetry.rollout_gauge import RolloutGauge

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

with process_state_kept():
    from vllm import LLM, SamplingParams
    from vllm.config import set_current_vllm_config
    from vllm.distributed.device_communicators import cpu_communicator
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.sample import sampler

if current_platform.is_cpu():
    # vLLM 0.32 cannot load what it compiled ahead of time for a CPU, and compiles again at every start (40 s); what
    # torch keeps of a compiled model it can.
    os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")

logger = logging.getLogger(__name__)

TIED_HEAD = "lm_head.weight"
_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class VllmEngine(TakesUpdates):
    """Continuous batching over vLLM's own step loop, one request a row, each row with its own seed."""

    _num_alive = 0

    def __init__(
        self,
        rollout: RolloutConfig,
        model_folder: str,
        *,
        dtype: str,
        max_model_length: int,
        seed: int,
        tensor_parallel: int = 1,
    ) -> None:
        """Start the engine on the weights in `model_folder` (checkpoint layout).

        Args:
            rollout: engine settings; every one reaches vLLM or an error is raised.
            model_folder: config.json and safetensors.
            dtype: of the engine's weights, float32 or bfloat16.
            max_model_length: prompt + response, in tokens.
            seed: of the engine itself; rows have seeds of their own, so it only must differ between engines.
            tensor_parallel: ranks of the injected world that form one engine.

        Raises ValueError for a vLLM that is built for accelerators where none is seen.
        """
        self.policy_version = 0
        self.facts = GenerationFacts()
        self._tensor_parallel = tensor_parallel
        self._is_cpu = current_platform.is_cpu()
        check_accelerator(is_needed=current_platform.is_cuda_alike(), is_there=torch.cuda.is_available())
        self._is_eager = rollout.enforce_eager
        self._slots = rollout.max_running_sequences
        self._max_model_length = max_model_length
        asked = engine_arguments(
            rollout,
            dtype=dtype,
            max_model_length=max_model_length,
            seed=seed,
            tensor_parallel=tensor_parallel,
            is_cpu=self._is_cpu,
        )
        if tensor_parallel > 1:
            join_peers(self._is_cpu)
            name_shared_memory(cpu_communicator._CPUSHMDistributed)
        with process_state_kept(), self._without_compiling():
            self._llm = LLM(model_folder, **asked, **_FIXED_ARGUMENTS)
        if tensor_parallel > 1 and self._is_cpu:
            unlink_shared_memory(get_tp_group())
        self._engine: Any = self._llm.llm_engine  # in-process, so its parts can be reached; they are not typed
        self._core = self._engine.engine_core.engine_core
        # An engine that is merely collected must not end the process groups under the others.
        self._engine.engine_core._finalizer.detach()
        VllmEngine._num_alive += 1
        self._vocab_size = self._engine.model_config.get_vocab_size()
        self._is_tied = bool(getattr(self._engine.model_config.hf_config, "tie_word_embeddings", False))
        self.arguments = effective_arguments(self._engine.vllm_config)
        check_arguments(asked, self.arguments)
        logger.info("vLLM engine arguments in effect: %s", self.arguments)
        self._added: dict[str, tuple[int, float, Any]] = {}  # request id -> row id, time, vLLM's own request
        self._gauge = RolloutGauge(self._slots)
        self._tokens = 0

    # Sampling ------------------------------------------------------------------------------------------------------

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, on_finished: OnFinished | None = None
    ) -> list[GenerationOutput]:
        """Sample all requests; `on_finished` gets rows as they finish, between two steps."""
        if self._added:
            raise RuntimeError(
                f"{len(self._added)} responses are still being sampled; finish or abort them before `generate`"
            )
        if self._tensor_parallel > 1:
            check_peers(requests, sampling, get_tp_group().cpu_group, self._tensor_parallel)
        self.facts = GenerationFacts(prompt_tokens=sum(len(request.prompt_ids) for request in requests))
        self._gauge, self._tokens = open_gauge(self._slots, requests), 0
        started = time.monotonic()
        outputs: dict[int, GenerationOutput] = {}
        try:
            with self._without_compiling():
                for request in requests:
                    self.add_request(request, sampling)
                while self._added:
                    finished = self._step()
                    outputs.update((output.row_id, output) for output in finished)
                    if finished and on_finished is not None:
                        on_finished(finished)
        except BaseException:
            self.abort()
            raise
        close_facts(self.facts, self._gauge, time.monotonic() - started, outputs)
        return [outputs[request.row_id] for request in requests]

    def add_request(self, request: GenerationRequest, sampling: Sampling) -> None:
        """Queue one response. Raises ValueError for ids the model lacks or a response that cannot fit."""
        self._check_usable()
        check_request(request, self._vocab_size, self._max_model_length)
        params = sampling_params(request, sampling)
        self._submit(f"row-{request.row_id}", request.row_id, list(request.prompt_ids), params)

    def _submit(self, request_id: str, row_id: int, prompt_ids: list[int], params: SamplingParams) -> None:
        if request_id in self._added:
            raise ValueError(f"row {row_id} is being sampled already; a row id is an identity")
        internal_id = self._engine.add_request(request_id, {"prompt_token_ids": prompt_ids}, params)
        self._added[request_id] = (row_id, time.monotonic(), self._core.scheduler.requests[internal_id])

    def step(self) -> list[GenerationOutput]:
        """Advance every running response by one token; gives those that finished."""
        self._check_usable()
        with self._without_compiling():
            return self._step()

    def has_unfinished(self) -> bool:
        """Whether any response is running or waiting."""
        return bool(self._added)

    def abort(self, row_ids: Collection[int] | None = None) -> list[GenerationOutput]:
        """End these responses (all by default), keeping what was sampled."""
        wanted = None if row_ids is None else set(row_ids)
        chosen = [name for name, (row_id, _, _) in self._added.items() if wanted is None or row_id in wanted]
        states = {state.external_req_id: state for state in self._engine.output_processor.request_states.values()}
        outputs = [self._aborted(name, states[name]) for name in chosen if name in states]
        self._engine.abort_request(chosen)
        for name in chosen:
            del self._added[name]
        return outputs

    def _aborted(self, name: str, state: Any) -> GenerationOutput:
        row_id, added, _ = self._added[name]
        ids = tuple(state.detokenizer.output_token_ids)
        return GenerationOutput(
            row_id=row_id,
            token_ids=ids,
            log_probs=tuple(state.logprobs_processor.logprobs.logprobs[: len(ids)]),
            finish_reason=FinishReason.ABORT,
            finish_seconds=time.monotonic() - added,
        )

    def _step(self) -> list[GenerationOutput]:
        outputs = [self._finished(output) for output in self._engine.step() if output.finished]
        running, waiting = self._core.scheduler.get_request_counts()
        # Every scheduled sequence gets one token in a step; only chunked prefill makes this a slight over-count.
        self._tokens += running + len(outputs)
        self._gauge.observe(
            running=running,
            waiting=waiting,
            kv_cache_use=self._core.scheduler.get_kv_cache_usage(),
            tokens=self._tokens,
            steps=1,
        )
        return outputs

    def _finished(self, output: Any) -> GenerationOutput:
        row_id, added, request = self._added.pop(output.request_id)
        self._gauge.preemptions += request.num_preemptions
        self.facts.cached_prompt_tokens += output.num_cached_tokens or 0
        completion = output.outputs[0]
        return GenerationOutput(
            row_id=row_id,
            token_ids=tuple(completion.token_ids),
            log_probs=tuple(completion.logprobs.logprobs),
            finish_reason=_FINISH_REASONS[completion.finish_reason],
            finish_seconds=time.monotonic() - added,
        )

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs at temperature 1 of `token_ids` under the engine's own weights; 0.0 for the first."""
        self._check_usable()
        if self._added:
            raise RuntimeError("the engine is sampling; score a sequence between two rollouts")
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0, **_FIXED_SAMPLING)
        self._submit("score", -1, list(token_ids), params)
        log_probs: list[float] = []
        with self._without_compiling():
            while self._added:
                for output in self._engine.step():
                    self._added.pop(output.request_id)
                    log_probs = list(output.prompt_logprobs.logprobs)
        return [0.0, *log_probs]

    # Weights -------------------------------------------------------------------------------------------------------

    def begin_update(self) -> None:
        """Open the model for new weights; the old ones are gone from then on."""
        if self._added:
            raise RuntimeError(
                f"{len(self._added)} responses are being sampled; pause or abort them before new weights come"
            )
        if self._update is not None:
            # The one before was broken off between two calls. vLLM does not open an open layer again: what such a
            # layer got would count towards the new weights.
            self._close("a weight update was broken off")
        self._broken = "a weight update was begun and not finished"
        self._update = WeightUpdate(TIED_HEAD if self._is_tied else None)
        self._on_worker(_open_model)

    def load_weights(self, weights: Weights) -> None:
        """Load some weights. The tensors are read during this call and up to `finish_update`: don't overwrite them."""
        update = self._open_update()
        stream = update.take(weights)
        try:
            update.loaded |= self._on_worker(_load, stream)
        except (ValueError, KeyError) as error:
            self._close(f"the engine could not load {update.last!r}")
            raise WeightMismatchError(f"the engine could not load weight {update.last!r}: {error}") from error
        except BaseException:
            self._close("a weight update was broken off")
            raise

    def finish_update(self, version: int, expected_names: Collection[str]) -> WeightReport:
        """Put the weights in force, drop prefix and other caches, and check that every weight of the engine came."""
        update = self._open_update()
        self._close("the weights that came were not those of the engine")
        update.check_names(expected_names)
        lacking = sorted(self._on_worker(_parameter_names) - update.loaded)
        if lacking:
            raise WeightMismatchError(
                f"{len(lacking)} weights of the engine got no value: {lacking}; the sender holds another model"
            )
        self._drop_caches()
        self._broken = None
        self.policy_version = version
        return update.report(version)

    def _close(self, reason: str) -> None:
        # Always: vLLM keeps a half-open model on the meta device, where even freeing it fails.
        self._update = None
        self._broken = reason
        with process_state_kept():
            self._on_worker(_close_model)

    def _drop_caches(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise RuntimeError(
                "the prefix cache is still in use; new weights must not meet keys and values of the old ones"
            )
        self._engine.reset_encoder_cache()

    def _on_worker(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._llm.collective_rpc(function, args=args)[0]

    # The rest ------------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Move the weights to host memory and drop the KV cache. vLLM cannot do so on a CPU, where nothing happens."""
        if not self._is_cpu:
            self._llm.sleep(level=1)

    def wake(self) -> None:
        """Undo `sleep`."""
        if not self._is_cpu:
            self._llm.wake_up()
            self._drop_caches()

    def shutdown(self) -> None:
        """Free model and KV cache; the last engine of a process ends vLLM's process groups, which all of them share."""
        VllmEngine._num_alive -= 1
        if VllmEngine._num_alive == 0:
            self._core.shutdown()
        self._broken = "it was shut down"
        del self._llm, self._engine, self._core

    def _without_compiling(self) -> AbstractContextManager[None]:
        return uncompiled(sampler) if self._is_cpu and self._is_eager else nullcontext()


_FIXED_ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": True,  # token ids in, token ids out
    "generation_config": "vllm",  # a model's own sampling defaults would change the distribution unseen
    "disable_log_stats": True,
    "use_tqdm_on_load": False,
}
_FIXED_SAMPLING: dict[str, Any] = {
    "logprobs": 0,  # of the sampled token alone
    "detokenize": False,
    "flat_logprobs": True,
    "output_kind": RequestOutputKind.FINAL_ONLY,
    "skip_clone": True,
}


def sampling_params(request: GenerationRequest, sampling: Sampling) -> SamplingParams:
    """vLLM's words for one row: greedy is temperature 0, and every stop token stands in one list."""
    return SamplingParams(
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_p=1.0 if sampling.greedy else sampling.top_p,
        top_k=0 if sampling.greedy else sampling.top_k,
        seed=None if sampling.greedy else request.seed,
        max_tokens=request.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # the end-of-sequence ids are among stop_token_ids, the same list for every engine
        **_FIXED_SAMPLING,
    )


def _open_model(worker: Any) -> None:
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(worker.model_runner.get_model())


def _load(worker: Any, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
    with set_current_vllm_config(worker.vllm_config):
        return set(worker.model_runner.get_model().load_weights(weights))


def _close_model(worker: Any) -> None:
    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(worker.model_runner.get_model(), worker.model_config)
    worker.model_runner.reset_lora_state()


def _parameter_names(worker: Any) -> set[str]:
    return {name for name, _ in worker.model_runner.get_model().named_parameters()}
