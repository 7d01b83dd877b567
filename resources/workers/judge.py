"""The judge worker: an engine of its own beside a reward worker, which asks it over the OpenAI API on loopback."""

from collections.abc import Callable
from typing import Any

from configs.model import ModelConfig
from configs.rollout import RolloutConfig
from resources.dispatch import Dispatch, dispatch
from resources.engines.base import Sampling, build_engine
from resources.judge import SERVED_HERE
from resources.models.causal_lm import load_model_config, load_tokenizer, prepare_model_folder
from resources.models.generation_config import end_token_ids
from resources.openai_endpoint import OpenAiEndpoint, Terms
from resources.replicas import LocalReplica
from resources.request_serving import ServesRequests
from resources.rollout_servers import RolloutServers
from resources.workers.base import set_threads


class JudgeWorker(ServesRequests):
    """One replica in each process of the reward role; each reward worker asks the one beside it."""

    role = "reward"

    def __init__(
        self,
        name: str,
        model: ModelConfig,
        rollout: RolloutConfig,
        seed: int,
        *,
        max_model_length: int,
        threads: int | None = None,
    ) -> None:
        """`name`: of the grader. `rollout`: the engine and its settings; a judge always answers greedily."""
        set_threads(threads)
        folder, tokenizer = prepare_model_folder(model, seed), load_tokenizer(model)
        model_config = load_model_config(model)
        self.siblings: dict[str, Any] = {}
        self.engine = build_engine(
            rollout,
            str(folder),
            dtype=model.dtype,
            vocab_size=int(model_config.get_text_config().vocab_size),
            max_model_length=max_model_length,
            seed=seed,
        )
        ends = tuple(sorted(end_token_ids(str(folder), model_config, tokenizer)))
        sampling = Sampling(stop_token_ids=ends, greedy=True)
        self._servers = RolloutServers([LocalReplica(name, self)])
        self._endpoint = OpenAiEndpoint(
            self._servers,
            tokenizer,
            Terms(seed=seed, sampling=sampling, max_tokens=max_model_length),
            max_model_length=max_model_length,
        )
        SERVED_HERE[name] = f"http://127.0.0.1:{self._endpoint.port}/v1"

    @dispatch(Dispatch.BROADCAST)
    def close(self) -> None:
        """Stop listening, then free the engine."""
        ends: tuple[Callable[[], None], ...] = (self._endpoint.close, self._servers.close, self.engine.shutdown)
        for end in ends:
            end()
