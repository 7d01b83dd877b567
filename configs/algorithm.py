"""The algorithm: naming it picks vetted settings (see `configs/algorithm_defaults.py`), every knob may be overridden."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.base import Config, Count, Fraction

AlgorithmName = Literal[
    "ppo", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "dapo", "gspo", "cispo",
    "gpg", "opo", "sapo", "clip_cov", "kl_cov", "gmpo", "pass_at_k", "decoupled_ppo", "distillation",
]  # fmt: skip
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class KlConfig(Config):
    """The pull towards the reference policy."""

    coef: Annotated[float, Field(ge=0.0)] = 0.0
    """0 turns the reference role off altogether."""
    place: Literal["reward", "loss"] = "reward"
    """Subtracted from the token rewards (PPO) or added to the loss (GRPO)."""
    estimator: Literal["k1", "k2", "k3", "k1-straight-through", "k3-straight-through"] = "k1"
    controller: Literal["fixed", "adaptive"] = "fixed"
    target: Annotated[float, Field(gt=0.0)] = 6.0
    """KL per sequence that the adaptive controller steers to."""
    horizon: Annotated[float, Field(gt=0.0)] = 10_000.0
    """Sequences over which the adaptive controller reacts."""
    refresh_every: Count | None = None
    """Copy the actor into the reference every so many iterations; never when left out."""


class CorrectionConfig(Config):
    """Correction between the distribution sampled by the engine and the one trained on."""

    mode: Literal["off", "token-truncate", "sequence-truncate", "geometric-truncate", "icepop", "reject-k1", "reject-k2", "reject-k3"] = "off"
    lower: Annotated[float, Field(ge=0.0)] = 0.0
    upper: Annotated[float, Field(gt=0.0)] = 2.0


class DynamicSamplingConfig(Config):
    """DAPO: groups whose scores are all equal carry no signal; sample again until the batch is full."""

    enabled: bool = False
    max_rounds: Count = 5
    """Rounds of refill in one iteration; the run ends with a message when none brought any signal."""


class OverlongConfig(Config):
    """DAPO's soft penalty: 0 up to max - buffer, falling linearly to -factor at max."""

    max_length: Count
    buffer: Count
    factor: Annotated[float, Field(gt=0.0)] = 1.0

    @model_validator(mode="after")
    def _buffer_fits(self) -> "OverlongConfig":
        if self.buffer > self.max_length:
            raise ValueError(f"buffer is {self.buffer} and max_length {self.max_length}; the buffer lies inside the maximum")
        return self


class AlgorithmConfig(Config):
    """Knobs of the estimator and of the loss; None means 'the vetted value of `name`'."""

    name: AlgorithmName = "ppo"
    gamma: Fraction = 1.0
    gae_lambda: Fraction = 0.95
    whiten_advantages: bool | None = None
    scale_by_std: bool | None = None
    """GRPO divides by the group's standard deviation; Dr.GRPO does not."""
    clip_ratio_low: Annotated[float, Field(gt=0.0)] | None = None
    clip_ratio_high: Annotated[float, Field(gt=0.0)] | None = None
    clip_ratio_dual: Annotated[float, Field(gt=1.0)] | None = None
    """Dual clip for negative advantages; off when None in the vetted defaults too."""
    value_clip: Annotated[float, Field(gt=0.0)] | None = 0.2
    entropy_coef: Annotated[float, Field(ge=0.0)] = 0.0
    aggregation: Aggregation | None = None
    kl: KlConfig = KlConfig()
    num_ppo_epochs: Count = 1
    num_mini_batches: Count = 1
    """Optimizer steps in one PPO epoch."""
    target_kl: Annotated[float, Field(gt=0.0)] | None = None
    """Stop the epochs of an iteration once the policy moved this far (approximate KL per token)."""
    critic_warmup_iterations: Annotated[int, Field(ge=0)] = 0
    """Iterations in which only the critic learns."""
    correction: CorrectionConfig = CorrectionConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    overlong: OverlongConfig | None = None
    pass_k: Count = 2
    """k of the pass@k advantage."""
    covariance_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.0002
    """Share of tokens that clip-cov and kl-cov act on."""
    covariance_kl_coef: Annotated[float, Field(gt=0.0)] = 1.0
    advantage: str | None = None
    """Import path `module:function` of an estimator of your own, in place of the one `name` picks."""
    loss: str | None = None
    """Import path `module:function` of an actor objective of your own."""

    @property
    def needs_critic(self) -> bool:
        """Only the PPO family with a learned baseline has a critic."""
        return self.name in ("ppo", "decoupled_ppo")

    @property
    def needs_reference(self) -> bool:
        """The reference is scored only when something reads it."""
        return self.kl.coef > 0.0

    @property
    def is_group_relative(self) -> bool:
        """Baselines over siblings need at least two responses a prompt."""
        return self.name not in ("ppo", "decoupled_ppo", "reinforce_plus_plus", "remax", "distillation")
