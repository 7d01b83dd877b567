"""The reward model in training, beside what tests/tasks/test_supervised.py shows of it."""

import pytest
import torch

from configs.training import TrainedRoleConfig
from resources.update_plan import MiniBatch, UpdatePlan
from resources.workers.reward_trainer import RewardTrainerWorker
from tasks.algorithms.supervised import preference_objective
from tests.resources.workers.tiny import MODEL, OPTIMIZER, make_rows


@pytest.mark.parametrize(("checkpointing", "passes_of_a_layer"), [(False, 1), (True, 2)])
def test_activations_are_recomputed_where_the_model_says_so(checkpointing: bool, passes_of_a_layer: int):
    model = MODEL.model_copy(update={"gradient_checkpointing": checkpointing})
    worker = RewardTrainerWorker(model, TrainedRoleConfig(optimizer=OPTIMIZER), 0, threads=1)
    passes = []
    worker.module.scalar.model.layers[0].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    one = MiniBatch(micro_batches=((100, 101, 102, 103),), num_response_tokens=2, num_sequences=2)
    worker.update(make_rows(4), UpdatePlan(mini_batches=(one,)), preference_objective)
    assert len(passes) == passes_of_a_layer
    assert all(bool(torch.isfinite(parameter).all()) for parameter in worker.module.parameters())
