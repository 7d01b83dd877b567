"""The whole configuration of a run, and the checks that span its sections."""

from typing import Annotated

from pydantic import Field, model_validator

from configs.algorithm import AlgorithmConfig
from configs.base import Config, Count, Folder, Items, Name, Seed
from configs.data import DataConfig, ValidationConfig
from configs.model import ModelConfig
from configs.pools import PoolConfig, RoleConfig, RoleName
from configs.reward import RewardConfig
from configs.rollout import RolloutConfig
from configs.rules import check_rules
from configs.training import (
    CheckpointConfig,
    CodeConfig,
    CriticConfig,
    DistillationConfig,
    PrefectConfig,
    RayConfig,
    RecoveryConfig,
    SftConfig,
    TeacherConfig,
    TelemetryConfig,
    TrainedRoleConfig,
)

READERS_OF_OLD_LOG_PROBS = ("clip_cov", "kl_cov", "distillation")
"""Algorithms whose advantages are made from the actor's own log-probs."""


class RunConfig(Config):
    """One config says which model runs on which bundle, and everything else about a run."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", max_length=100)
    """Lower-case letters, digits, dots and dashes; the run id is made from it."""
    seed: Seed = 0
    iterations: Count
    run_dir: Folder = "runs"
    """Folder that holds a folder per run."""
    async_depth: Annotated[int, Field(ge=0)] = 0
    """Iterations by which a rollout may run ahead of the update; 0 is synchronous and bit-exact on recovery."""
    model: ModelConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig
    actor: TrainedRoleConfig = TrainedRoleConfig()
    critic: CriticConfig = CriticConfig()
    teachers: Items[TeacherConfig] = ()
    distillation: DistillationConfig | None = None
    sft: SftConfig | None = None
    validation: ValidationConfig = ValidationConfig()
    pools: dict[Name, PoolConfig] = Field(min_length=1)
    roles: dict[RoleName, RoleConfig] = Field(min_length=1)
    recovery: RecoveryConfig = RecoveryConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    code: CodeConfig = CodeConfig()
    prefect: PrefectConfig = PrefectConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _sections_agree(self) -> "RunConfig":
        check_rules(self)
        return self

    @property
    def correction_mode(self) -> str:
        """`algorithm.correction.mode`, or what a run that samples ahead takes when it is left out.

        Decoupled PPO weighs its loss towards the policy that sampled, so it needs no further correction.
        """
        asked = self.algorithm.correction.mode
        if asked is not None:
            return asked
        return "token-truncate" if self.async_depth and self.algorithm.name != "decoupled_ppo" else "off"

    @property
    def recomputes_log_probs(self) -> bool:
        """Whether the actor scores the responses before its update; see `algorithm.old_log_probs`."""
        algorithm, resolved = self.algorithm, self.algorithm.resolved()
        has_one_step = algorithm.num_ppo_epochs == algorithm.num_mini_batches == 1
        is_read = (
            algorithm.name in READERS_OF_OLD_LOG_PROBS
            or (resolved.kl_place == "reward" and resolved.kl_coef > 0)
            or self.correction_mode != "off"
            or self.distillation is not None
            or algorithm.advantage is not None
            or algorithm.loss is not None
        )
        return algorithm.old_log_probs == "recompute" or not has_one_step or is_read

    @property
    def rows_per_iteration(self) -> int:
        """B = P * G, before a source's own group size is counted."""
        return self.data.prompts_per_iteration * self.rollout.group_size
