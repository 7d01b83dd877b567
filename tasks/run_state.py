"""Where a run stands, apart from weights: plain numbers that a checkpoint holds and a recovery rolls back."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from configs.run import RunConfig
from tasks.algorithms.kl import update_kl_coef
from tasks.stamp import Stamp


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state after `iteration` finished iterations.

    >>> state = RunState(kl_coef=0.1)
    >>> state.after(position={"epoch": 0, "start": 512}, kl_coef=0.2).start
    512
    """

    iteration: int = 0
    policy_version: int = 0
    epoch: int = 0
    start: int = 0
    """Prompts of the epoch already used."""
    data_identity: str = ""
    """Hash of the prompts; a resume with other prompts starts at their beginning."""
    kl_coef: float = 0.0
    nan_steps: int = 0
    """Optimizer steps skipped so far because the gradient was no number."""
    parts: dict[str, Any] = field(default_factory=dict)
    """Small JSON state of other parts, by name (reward statistics, curriculum)."""

    def stamp(self, config: RunConfig, attempt: int) -> Stamp:
        """What the steps of the next iteration are told."""
        return Stamp(
            iteration=self.iteration,
            attempt=attempt,
            policy_version=self.policy_version,
            epoch=self.epoch,
            start=self.start,
            count=config.data.prompts_per_iteration,
            kl_coef=self.kl_coef,
        )

    def after(
        self, *, position: Mapping[str, Any], kl_coef: float, parts: Mapping[str, Any] | None = None
    ) -> "RunState":
        """The state one iteration on; `position` is where the next prompt is (see PromptSource.position_state)."""
        return replace(
            self,
            iteration=self.iteration + 1,
            policy_version=self.policy_version + 1,
            epoch=int(position["epoch"]),
            start=int(position["start"]),
            data_identity=str(position.get("identity", "")),
            kl_coef=kl_coef,
            parts={**self.parts, **(parts or {})},
        )

    def under(self, config: RunConfig) -> "RunState":
        """This state as `config` goes on from it: a coefficient that no controller moves is the config's own."""
        kl = config.algorithm.kl
        return replace(self, kl_coef=kl.coef) if kl.controller == "fixed" else self

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint's manifest holds it."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "RunState":
        """The inverse of `to_json`."""
        return cls(**record)


def next_kl_coef(config: RunConfig, kl_coef: float, metrics: dict[str, float]) -> float:
    """The coefficient of the next iteration: the same, or moved towards the target KL by the adaptive controller."""
    kl = config.algorithm.kl
    measured = metrics.get("actor/reference_kl")
    if kl.controller == "fixed" or measured is None:
        return kl_coef
    return update_kl_coef(
        kl_coef, measured, target=kl.target, horizon=kl.horizon, num_sequences=config.rows_per_iteration
    )
