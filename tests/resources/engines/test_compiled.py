"""An engine that compiles (`enforce_eager: false`) on a CPU: the numbers of the model, new weights, a quick start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from configs.rollout import RolloutConfig
from resources.engines.base import GenerationRequest, Sampling
from resources.engines.vllm import VllmEngine
from tests.resources.engines.updates import update_weights

from .conftest import STOP, build_tiny, exact_log_probs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

COMPILED = RolloutConfig(max_running_sequences=32, kv_cache_bytes=8 * 2**20, enforce_eager=False)
START = """
import sys
from configs.rollout import RolloutConfig
from resources.engines.vllm import VllmEngine
rollout = RolloutConfig(max_running_sequences=8, kv_cache_bytes=8 * 2**20, enforce_eager=False)
VllmEngine(rollout, sys.argv[1], dtype="float32", max_model_length=64, seed=5).shutdown()
"""


@pytest.fixture(scope="module")
def engine(tiny_folder: Path):
    engine = VllmEngine(COMPILED, str(tiny_folder), dtype="float32", max_model_length=64, seed=5)
    yield engine
    engine.shutdown()


@pytest.mark.parametrize("seed", [0, 1])
def test_log_probs_are_those_of_transformers_under_the_first_weights_and_under_new_ones(engine, seed):
    model = build_tiny(seed)
    update_weights(engine, list(model.named_parameters()), seed + 1, [name for name, _ in model.named_parameters()])
    prompts = [(1, 9, 4 + row) for row in range(5)]
    requests = [
        GenerationRequest(row_id=row, prompt_ids=ids, seed=row, max_tokens=8) for row, ids in enumerate(prompts)
    ]
    for output in engine.generate(requests, Sampling(stop_token_ids=(STOP,))):
        ids = [*prompts[output.row_id], *output.token_ids]
        exact = exact_log_probs(model, ids)[3:]
        assert torch.allclose(torch.tensor(output.log_probs), exact, atol=1e-4)


def test_a_second_start_compiles_nothing_anew(tiny_folder: Path, tmp_path: Path):
    environment = os.environ | {
        "VLLM_CACHE_ROOT": str(tmp_path / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    written = []
    for _ in range(2):
        command = [sys.executable, "-c", START, str(tiny_folder)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert ended.returncode == 0, ended.stderr[-2000:]
        assert "Compiling model again" not in ended.stderr + ended.stdout
        written.append({file for file in tmp_path.rglob("*.so") if file.is_file()})
    assert written[0], "nothing was compiled at the first start"
    assert written[1] == written[0]
