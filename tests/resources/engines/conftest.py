"""A tiny model on disk, the same in transformers, and one vLLM engine for all engine tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from configs.rollout import RolloutConfig
from resources.engines.base import Sampling

VOCAB_SIZE = 96
STOP = 2


def build_tiny(seed: int, *, tied: bool = True, spread: float = 0.2) -> PreTrainedModel:
    """A Llama whose distribution is far from uniform, so that a wrong weight shows."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=STOP,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(spread * torch.randn_like(parameter))
    return model.eval()


def exact_log_probs(model: PreTrainedModel, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[T] float32 log-probs of ids[1:], 0 for the first, straight from the logits."""
    with torch.no_grad():
        log_probs = (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)
    picked = log_probs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return torch.cat([torch.zeros(1), picked])


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tied tiny model (seed 0), saved as safetensors."""
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny(0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vllm_engine(tiny_folder: Path) -> Iterator[object]:
    """One engine for all tests of this process; a test that changes weights restores them."""
    from resources.engines.vllm import VllmEngine

    rollout = RolloutConfig(max_running_sequences=32, kv_cache_bytes=8 * 2**20)
    engine = VllmEngine(rollout, str(tiny_folder), dtype="float32", max_model_length=64, seed=5)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="session")
def cramped_engine(tiny_folder: Path) -> Iterator[object]:
    """A second engine in this process, with seven KV blocks."""
    from resources.engines.vllm import VllmEngine

    rollout = RolloutConfig(max_running_sequences=8, num_gpu_blocks_override=7, enable_prefix_caching=False)
    engine = VllmEngine(rollout, str(tiny_folder), dtype="float32", max_model_length=64, seed=6)
    yield engine
    engine.shutdown()


@pytest.fixture
def sampling() -> Sampling:
    """Temperature 1, one stop token."""
    return Sampling(stop_token_ids=(STOP,))
