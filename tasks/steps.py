"""Every step of the DAG, for the task hosts: which columns each still has to read, and that each role has a pool."""

from tasks.actor import actor_log_probs, actor_update
from tasks.advantage import advantage
from tasks.checkpoint import checkpoint
from tasks.critic import critic_update, critic_values
from tasks.reference import adapter_reference, reference, refresh_reference
from tasks.reward import reward
from tasks.rollout import data_position, rollout
from tasks.samples import samples
from tasks.step import Step
from tasks.supervised import (
    actor_fit,
    demonstrations,
    preferences,
    publish_model,
    publish_reward_model,
    reward_model_fit,
)
from tasks.teacher import teacher
from tasks.validation import validation
from tasks.weights import weight_sync

ITERATION_STEPS: tuple[Step, ...] = (
    rollout, reward, actor_log_probs, reference, adapter_reference, teacher, critic_values, advantage, critic_update,
    actor_update, refresh_reference, samples, weight_sync, validation, checkpoint,
)  # fmt: skip
STEPS: tuple[Step, ...] = (
    *ITERATION_STEPS, data_position, demonstrations, actor_fit, publish_model, preferences, reward_model_fit,
    publish_reward_model,
)  # fmt: skip
