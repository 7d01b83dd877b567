"""The weight sync step, on a real actor and engine of this process."""

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from configs.model import ModelConfig
from resources.engines.huggingface import HuggingFaceEngine
from resources.local_group import LocalGroup
from resources.store import BatchStore, StoreView
from resources.weight_receiver import ReceivesWeights
from tasks.host import HostContext, call_step, use_host
from tasks.run_state import RunState
from tasks.weights import weight_sync
from tests.resources.workers.tiny import actor
from tests.tasks.local_cast import small_config


class Receiver(ReceivesWeights):
    def __init__(self, engine: HuggingFaceEngine) -> None:
        self.engine = engine
        self.siblings = {}


@pytest.mark.parametrize("vocab_size", [12, 100])
def test_a_model_of_any_number_of_tokens_is_probed_with_tokens_of_its_own(tmp_path: Path, vocab_size: int):
    shape = LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(tmp_path)
    trained = actor(ModelConfig(path=str(tmp_path)))
    engine = HuggingFaceEngine(str(tmp_path), dtype="float32", slots=2)
    probed: list[int] = []
    score = engine.score
    engine.score = lambda token_ids: probed.extend(token_ids) or score(token_ids)
    context = HostContext(
        pool="local",
        run_id="probe",
        store=StoreView(BatchStore("local")),
        config=small_config("rollout.weight_sync=object_store"),
        groups={"actor": LocalGroup("actor", [trained]), "rollout": LocalGroup("rollout", [Receiver(engine)])},
    )
    at = RunState().stamp(context.config, 1)
    with use_host(context):
        synced = call_step(weight_sync, at, 1)
    assert synced.metrics["rollout/probe_gap"] < 1e-4
    assert 0.5 * vocab_size < max(probed) < vocab_size
