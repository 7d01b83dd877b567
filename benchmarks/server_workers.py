"""A rollout worker that can also answer with one bare `LLM.generate` call, for benchmarks/servers.py."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from resources.dispatch import Dispatch, dispatch
from resources.engines.base import GenerationRequest, Sampling
from resources.workers.rollout import RolloutWorker


class ComparedWorker(RolloutWorker):
    """The same engine, asked in two ways."""

    @dispatch(Dispatch.BROADCAST)
    def bare_generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> tuple[int, float]:
        """(tokens, seconds) of one `LLM.generate` on these requests, with the settings the engine itself uses."""
        engine: Any = self.engine
        params_class = vars(sys.modules["resources.engines.vllm"])["SamplingParams"]
        fixed = vars(sys.modules["resources.engines.vllm"])["_FIXED_SAMPLING"]
        params = [
            params_class(
                temperature=sampling.temperature,
                seed=request.seed,
                max_tokens=request.max_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                ignore_eos=True,
                **fixed,
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        started = time.monotonic()
        with engine._without_compiling():
            outputs = engine._llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs), time.monotonic() - started

    @dispatch(Dispatch.BROADCAST)
    def new_version(self, version: int) -> float:
        """The engine's own weights once more, as a new version; seconds. What an update costs without the transfer."""
        from resources.models.causal_lm import build_causal_lm

        started = time.monotonic()
        lm = build_causal_lm(self.model_config, 0)
        named = dict(lm.named_parameters())
        if "lm_head.weight" not in named:
            named["lm_head.weight"] = lm.get_output_embeddings().weight  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        self.engine.begin_update()
        self.engine.load_weights((name, tensor.detach()) for name, tensor in named.items())
        self.engine.finish_update(version, list(named))
        return time.monotonic() - started

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_config = args[1]
