"""From the configuration to the graders that reward workers run: plain values, functions by import path."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from configs.reward import GraderConfig
from configs.run import RunConfig
from resources.graders import Grader
from tasks.rewards.table import GRADERS


@dataclass(frozen=True, kw_only=True)
class _InProcess:
    """What is called in place of a rule that keeps processes of its own: grader processes can be ended already."""

    function: str
    modules: tuple[str, ...]
    limit_option: str


_IN_PROCESS = {
    "math_answer": _InProcess(
        function="tasks.rewards.math_answer:verify_math", modules=("math_verify",), limit_option="limit_seconds"
    )
}


def build_graders(config: RunConfig, secrets: Mapping[str, str] | None = None) -> tuple[Grader, ...]:
    """The graders of `config.reward`, in its order.

    `secrets`: values of the Prefect Secret blocks that judges name, by block name. Raises ValueError for an unknown
    rule or a key that is not there.
    """
    return tuple(_build(config, grader, dict(secrets or {})) for grader in config.reward.graders)


def _build(config: RunConfig, grader: GraderConfig, secrets: Mapping[str, str]) -> Grader:
    fields: dict[str, Any] = {
        "name": grader.name,
        "kind": grader.kind,
        "weight": grader.weight,
        "sources": tuple(grader.sources),
        "is_group_wise": grader.is_group_wise,
        "timeout_seconds": grader.timeout_seconds,
        "on_failure": grader.on_failure,
        "retries": grader.retries,
    }
    if grader.kind == "python":
        fields |= {"function": grader.function, "options": dict(grader.options)}
    if grader.kind == "rule":
        fields |= _rule(config, grader)
    return Grader(**fields)


def _rule(config: RunConfig, grader: GraderConfig) -> dict[str, Any]:
    if grader.function not in GRADERS:
        raise ValueError(f"grader {grader.name!r} names rule {grader.function!r}; the rules are {sorted(GRADERS)}")
    options = dict(grader.options)
    special = _IN_PROCESS.get(grader.function)
    if special is not None:
        limit = options.pop(special.limit_option, grader.timeout_seconds)
        return {
            "function": special.function,
            "modules": special.modules,
            "options": options,
            "timeout_seconds": min(float(limit), grader.timeout_seconds),
        }
    if grader.function == "overlong_penalty" and "buffer" in options:
        options.setdefault("max_length", config.rollout.max_response_length)
    found = GRADERS[grader.function]
    return {"function": f"{found.__module__}:{found.__qualname__}", "options": options}
