"""Vetted settings of every algorithm, so that naming it is enough.

One row a name, from the paper given beside it; where a paper gives no number the comment says whose number it is.
`AlgorithmConfig.resolved()` lays a user's own values over the row. Formulas are in docs/algorithms.md.
"""

from dataclasses import dataclass
from typing import Literal

AlgorithmName = Literal[
    "ppo", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "dapo", "gspo",
    "cispo", "gpg", "opo", "sapo", "clip_cov", "kl_cov", "gmpo", "pass_at_k", "decoupled_ppo", "distillation",
]  # fmt: skip
Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlPlace = Literal["reward", "loss"]
KlEstimator = Literal["k1", "k2", "k3", "k1-straight-through", "k3-straight-through"]

ESTIMATOR_AT: dict[KlPlace, KlEstimator] = {"reward": "k1", "loss": "k3"}
"""Of a KL that is moved out of the place that the paper gives it: the gradient of k1 in a loss is 0 on average, and
that of k2 or k3 in a reward is not the KL's."""
_NO_LOWER_BOUND = 10.0
"""1 - 10 is below any ratio, so the lower clip never acts."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmDefaults:
    """The vetted values of the knobs that a user may leave out.

    `AlgorithmDefaults()` by itself is a clip of 0.2 both ways, a mean over tokens, and KL (k3), if any, in the loss.
    """

    whiten_advantages: bool = False
    scale_by_std: bool = False
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_dual: float | None = None
    aggregation: Aggregation = "token-mean"
    kl_place: KlPlace = "loss"
    kl_estimator: KlEstimator = "k3"
    dynamic_sampling: bool = False
    covariance_fraction: float = 0.0002


DEFAULTS: dict[AlgorithmName, AlgorithmDefaults] = {
    # Schulman et al. 2017, arXiv:1707.06347; KL in the reward as in Ouyang et al. 2022, arXiv:2203.02155.
    "ppo": AlgorithmDefaults(whiten_advantages=True, kl_place="reward", kl_estimator="k1"),
    # Shao et al. 2024, arXiv:2402.03300: per-response mean, divided by the group's deviation, KL (k3) in the loss.
    "grpo": AlgorithmDefaults(scale_by_std=True, aggregation="seq-mean-token-mean"),
    # Liu et al. 2025, arXiv:2503.20783: neither the deviation nor the response's own length divides.
    "dr_grpo": AlgorithmDefaults(aggregation="seq-mean-token-sum-norm"),
    # Ahmadian et al. 2024, arXiv:2402.14740; the token mean differs from its sum by one constant a mini-batch.
    "rloo": AlgorithmDefaults(kl_place="reward", kl_estimator="k1"),
    # Hu et al. 2025, arXiv:2501.03262: returns to go with KL inside, normalised over the whole batch.
    "reinforce_plus_plus": AlgorithmDefaults(whiten_advantages=True, kl_place="reward", kl_estimator="k1"),
    # The same paper's form for groups: the group's mean is taken off first; KL (k2) in the loss.
    "reinforce_plus_plus_baseline": AlgorithmDefaults(whiten_advantages=True, kl_estimator="k2"),
    # Li et al. 2023, arXiv:2310.10505: the greedy response's score is the baseline.
    "remax": AlgorithmDefaults(kl_place="reward", kl_estimator="k1"),
    # Yu et al. 2025, arXiv:2503.14476: clip higher, token mean, dynamic sampling; no KL.
    "dapo": AlgorithmDefaults(scale_by_std=True, clip_ratio_high=0.28, dynamic_sampling=True),
    # Zheng et al. 2025, arXiv:2507.18071, section 5.1: the ratio is of the sequence, hence the narrow clip.
    "gspo": AlgorithmDefaults(
        scale_by_std=True,
        clip_ratio_low=3e-4,
        clip_ratio_high=4e-4,
        aggregation="seq-mean-token-mean",
    ),
    # MiniMax 2025, arXiv:2506.13585: no lower bound; the paper gives no upper number, this one is verl's.
    "cispo": AlgorithmDefaults(scale_by_std=True, clip_ratio_low=_NO_LOWER_BOUND),
    # Chu et al. 2025, arXiv:2504.02546: no clip, no KL, no deviation.
    "gpg": AlgorithmDefaults(),
    # Hao et al. 2025, arXiv:2505.23585: the length-weighted baseline, exactly on-policy.
    "opo": AlgorithmDefaults(),
    # Gao et al. 2025, arXiv:2511.20347: a sigmoid gate in place of the clip.
    "sapo": AlgorithmDefaults(scale_by_std=True, aggregation="seq-mean-token-mean"),
    # Cui et al. 2025, arXiv:2505.22617: gradients of the most covariant tokens are cut ...
    "clip_cov": AlgorithmDefaults(scale_by_std=True),
    # ... or held back by a KL; the share is the paper's for 7B (0.0002 for 32B).
    "kl_cov": AlgorithmDefaults(scale_by_std=True, covariance_fraction=0.002),
    # Zhao et al. 2025, arXiv:2507.20673: clips are exp(-0.4) and exp(0.4), given here as log ratios.
    "gmpo": AlgorithmDefaults(
        scale_by_std=True,
        clip_ratio_low=0.4,
        clip_ratio_high=0.4,
        aggregation="seq-mean-token-mean",
    ),
    # Chen et al. 2025, arXiv:2508.10751: the analytic advantage of k of the group's responses.
    "pass_at_k": AlgorithmDefaults(),
    # Hilton et al. 2021, arXiv:2110.00641: the clip is around a proximal policy, the weight towards the behaviour.
    "decoupled_ppo": AlgorithmDefaults(whiten_advantages=True, kl_place="reward", kl_estimator="k1"),
    # Agarwal et al. 2023, arXiv:2306.13649: the teacher's per-token reverse KL is the reward of the token.
    "distillation": AlgorithmDefaults(kl_place="reward", kl_estimator="k1"),
}


_CRITICS: tuple[AlgorithmName, ...] = ("ppo", "decoupled_ppo")
_CLIPPED_AS_PPO: tuple[AlgorithmName, ...] = (
    *_CRITICS, "grpo", "dr_grpo", "dapo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo",
    "pass_at_k",
)  # fmt: skip
_CLIPPED: tuple[AlgorithmName, ...] = (*_CLIPPED_AS_PPO, "gspo", "gmpo", "cispo", "clip_cov")
READERS: dict[str, tuple[AlgorithmName, ...]] = {
    "gamma": (*_CRITICS, "reinforce_plus_plus", "distillation"),
    "gae_lambda": _CRITICS,
    "value_clip": _CRITICS,
    "scale_by_std": (
        "grpo", "dr_grpo", "dapo", "gspo", "gmpo", "cispo", "sapo", "clip_cov", "kl_cov",
        "reinforce_plus_plus_baseline",
    ),
    "clip_ratio_low": _CLIPPED,
    "clip_ratio_high": _CLIPPED,
    "clip_ratio_dual": _CLIPPED_AS_PPO,
    "pass_k": ("pass_at_k",),
    "pass_threshold": ("pass_at_k",),
    "covariance_fraction": ("clip_cov", "kl_cov"),
    "covariance_kl_coef": ("kl_cov",),
    "soft_temperature_positive": ("sapo",),
    "soft_temperature_negative": ("sapo",),
}  # fmt: skip
"""Knob -> the algorithms whose estimator or loss reads it; a knob that is not here is read by all."""


@dataclass(frozen=True, kw_only=True)
class ResolvedAlgorithm:
    """Every knob as a number or a name: what the tasks pass on to `tasks/algorithms`; nothing here is undecided."""

    name: AlgorithmName
    gamma: float
    gae_lambda: float
    whiten_advantages: bool
    scale_by_std: bool
    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_dual: float | None
    value_clip: float | None
    entropy_coef: float
    aggregation: Aggregation
    kl_coef: float
    kl_place: KlPlace
    kl_estimator: KlEstimator
    dynamic_sampling: bool
    pass_k: int
    pass_threshold: float
    covariance_fraction: float
    covariance_kl_coef: float
    soft_temperature_positive: float
    soft_temperature_negative: float
