"""The algorithm: naming it picks vetted settings (see `configs/algorithm_defaults.py`), every knob may be set."""

from typing import Annotated, Literal, TypeVar

from pydantic import Field, model_validator

from configs.algorithm_defaults import (
    DEFAULTS,
    ESTIMATOR_AT,
    READERS,
    Aggregation,
    AlgorithmName,
    KlEstimator,
    KlPlace,
    ResolvedAlgorithm,
)
from configs.base import Config, Count, Fraction

T = TypeVar("T")


class KlConfig(Config):
    """The pull towards the reference policy."""

    coef: Annotated[float, Field(ge=0.0)] = 0.0
    """0 turns the reference role off altogether."""
    place: KlPlace | None = None
    """`reward`: subtracted from the token rewards (PPO); `loss`: added to the loss (GRPO). null: as in the paper."""
    estimator: KlEstimator | None = None
    """null: as in the paper of `algorithm.name`; with the other `place` k1 in the reward and k3 in the loss."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    target: Annotated[float, Field(gt=0.0)] = 6.0
    """KL per sequence that the adaptive controller steers to."""
    horizon: Annotated[float, Field(gt=0.0)] = 10_000.0
    """Sequences over which the adaptive controller reacts."""
    refresh_every: Count | None = None
    """Copy the actor into the reference every so many iterations; never when left out."""


class CorrectionConfig(Config):
    """Correction between the distribution sampled by the engine and the one trained on."""

    mode: Literal[
        "off", "token-truncate", "sequence-truncate", "geometric-truncate", "icepop",
        "reject-k1", "reject-k2", "reject-k3",
    ] | None = None  # fmt: skip
    """null: `token-truncate` where rollouts run ahead of the update (async_depth), else off."""
    lower: Annotated[float, Field(ge=0.0)] = 0.0
    """Smallest weight (truncate), smallest weight kept (icepop), smallest exp(mean d) of a row kept (reject-k1)."""
    upper: Annotated[float, Field(gt=0.0)] = 2.0
    """Largest weight (truncate), or largest weight or statistic kept (icepop, reject)."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Rows sampled more policy versions than this before the update are left out of it; none when left out."""

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> "CorrectionConfig":
        if self.lower >= self.upper:
            raise ValueError(
                f"lower is {self.lower} and upper {self.upper}; nothing lies between them: lower must be smaller"
            )
        return self


class DynamicSamplingConfig(Config):
    """DAPO: groups whose scores are all equal carry no signal; sample again until the batch is full."""

    enabled: bool | None = None
    """null: on for `dapo`, off for the others."""
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
            raise ValueError(
                f"buffer is {self.buffer} and max_length {self.max_length}; the buffer lies inside the maximum"
            )
        return self


class AlgorithmConfig(Config):
    """Knobs of the estimator and of the loss; null means 'the vetted value of `name`' (see `resolved`)."""

    name: AlgorithmName = "ppo"
    gamma: Fraction = 1.0
    gae_lambda: Fraction = 0.95
    whiten_advantages: bool | None = None
    """Mean 0 and deviation 1 over the response tokens of the whole batch."""
    scale_by_std: bool | None = None
    """GRPO divides by the group's standard deviation; Dr.GRPO does not."""
    clip_ratio_low: Annotated[float, Field(gt=0.0)] | None = None
    clip_ratio_high: Annotated[float, Field(gt=0.0)] | None = None
    clip_ratio_dual: Annotated[float, Field(gt=1.0)] | None = None
    """Dual clip for negative advantages; off when left out."""
    bootstrap_truncated: bool = False
    """A response cut at the length limit is followed by the critic's value of its last state, in place of 0."""
    value_clip: Annotated[float, Field(gt=0.0)] | None = 0.2
    """Largest move of a value in one iteration; null turns it off."""
    entropy_coef: Annotated[float, Field(ge=0.0)] = 0.0
    aggregation: Aggregation | None = None
    kl: KlConfig = KlConfig()
    num_ppo_epochs: Count = 1
    num_mini_batches: Count = 1
    """Optimizer steps in one PPO epoch."""
    old_log_probs: Literal["auto", "recompute"] = "auto"
    """`recompute` always scores the responses under the actor before its update. `auto` leaves that pass out where it
    changes nothing: one optimizer step an iteration, whose own forward pass has the same numbers, and no other reader.
    """
    target_kl: Annotated[float, Field(gt=0.0)] | None = None
    """Leave out the remaining steps of an iteration once the policy moved this far (approximate KL per token)."""
    critic_warmup_iterations: Annotated[int, Field(ge=0)] = 0
    """Iterations in which only the critic learns."""
    correction: CorrectionConfig = CorrectionConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    overlong: OverlongConfig | None = None
    pass_k: Count = 2
    """k of the pass@k advantage."""
    pass_threshold: float = 0.5
    """A response whose score, weights and all, is above this counts as right for the pass@k advantage."""
    covariance_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of tokens that clip-cov and kl-cov act on."""
    covariance_kl_coef: Annotated[float, Field(gt=0.0)] = 1.0
    soft_temperature_positive: Annotated[float, Field(gt=0.0)] = 1.0
    """Steepness of SAPO's gate where the advantage is positive ..."""
    soft_temperature_negative: Annotated[float, Field(gt=0.0)] = 1.05
    """... and where it is negative."""
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

    def unread(self) -> tuple[str, ...]:
        """Knobs that were given and that neither the estimator nor the loss of `name` reads.

        >>> AlgorithmConfig(name="gspo", clip_ratio_dual=3.0, clip_ratio_low=0.1).unread()
        ('clip_ratio_dual',)
        """
        if self.advantage is not None or self.loss is not None:
            return ()  # those may ask for any
        given = {name for name in self.model_fields_set if getattr(self, name) is not None}
        return tuple(sorted(knob for knob, readers in READERS.items() if knob in given and self.name not in readers))

    def resolved(self) -> ResolvedAlgorithm:
        """Every knob decided: the user's value where there is one, else the vetted value of `name`."""
        vetted = DEFAULTS[self.name]
        place: KlPlace = _first(self.kl.place, vetted.kl_place)
        return ResolvedAlgorithm(
            name=self.name,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            whiten_advantages=_first(self.whiten_advantages, vetted.whiten_advantages),
            scale_by_std=_first(self.scale_by_std, vetted.scale_by_std),
            clip_ratio_low=_first(self.clip_ratio_low, vetted.clip_ratio_low),
            clip_ratio_high=_first(self.clip_ratio_high, vetted.clip_ratio_high),
            clip_ratio_dual=_first(self.clip_ratio_dual, vetted.clip_ratio_dual),
            value_clip=self.value_clip,
            entropy_coef=self.entropy_coef,
            aggregation=_first(self.aggregation, vetted.aggregation),
            kl_coef=self.kl.coef,
            kl_place=place,
            kl_estimator=_first(
                self.kl.estimator, vetted.kl_estimator if place == vetted.kl_place else ESTIMATOR_AT[place]
            ),
            dynamic_sampling=_first(self.dynamic_sampling.enabled, vetted.dynamic_sampling),
            pass_k=self.pass_k,
            pass_threshold=self.pass_threshold,
            covariance_fraction=_first(self.covariance_fraction, vetted.covariance_fraction),
            covariance_kl_coef=self.covariance_kl_coef,
            soft_temperature_positive=self.soft_temperature_positive,
            soft_temperature_negative=self.soft_temperature_negative,
        )


def _first(own: T | None, vetted: T) -> T:
    return vetted if own is None else own
