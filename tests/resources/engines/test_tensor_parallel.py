"""One engine over two ranks: the same tokens as alone, and peers that disagree are told so."""

from pathlib import Path

import pytest

from configs.rollout import RolloutConfig
from resources.engines.base import GenerationRequest, Sampling
from resources.seeding import row_seed
from tests.resources.workers.ranked_processes import run_ranked

pytestmark = pytest.mark.slow


def requests_for(count: int, run_seed: int = 0) -> list[GenerationRequest]:
    return [
        GenerationRequest(row_id=row, prompt_ids=(1, 5, 9 + row), seed=row_seed(run_seed, 0, row), max_tokens=6)
        for row in range(count)
    ]


def sample_on_a_rank(folder: str) -> tuple[list, list, str]:
    import os

    from resources.engines.vllm import VllmEngine

    rollout = RolloutConfig(max_running_sequences=8, kv_cache_bytes=4 * 2**20)
    engine = VllmEngine(rollout, folder, dtype="float32", max_model_length=64, seed=1, tensor_parallel=2)
    outputs = engine.generate(requests_for(6), Sampling())
    complaint = ""
    try:
        engine.generate(requests_for(6, run_seed=int(os.environ["RANK"])), Sampling())
    except ValueError as error:
        complaint = str(error)
    return [output.token_ids for output in outputs], [output.log_probs for output in outputs], complaint


@pytest.mark.parametrize("world_size", [2, 4])
def test_tensor_parallel_ranks_sample_as_one_engine_of_however_many_their_world_has(
    vllm_engine, tiny_folder: Path, world_size: int
):
    """Ranks that are fused with an actor of another layout are in one world with the peers of other engines."""
    alone = vllm_engine.generate(requests_for(6), Sampling())
    for tokens, log_probs, complaint in run_ranked(sample_on_a_rank, world_size, str(tiny_folder)):
        assert tokens == [output.token_ids for output in alone]
        for mine, single in zip(log_probs, alone, strict=True):
            assert mine == pytest.approx(single.log_probs, abs=1e-4)
        assert "different rows or seeds" in complaint
