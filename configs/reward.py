"""Rewards: which graders score which source, with what weight, limit and policy."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from configs.base import Config, Count, Items, Seconds, Strings
from configs.model import ModelConfig
from configs.problems import as_written

RULES = (
    "exact_answer", "positions_right", "numeric_answer", "math_answer", "response_format", "overlong_penalty",
    "reasoning_gym_answer", "environment_score",
)  # fmt: skip
"""What `kind: rule` may name; tasks/rewards/table.py has them."""


_READERS: dict[str, tuple[str, ...]] = {
    "is_group_wise": ("python", "http"),
    "options": ("rule", "python", "judge", "http", "sandbox"),
    "timeout_seconds": ("rule", "python", "judge", "http", "sandbox"),
    "sandbox": ("sandbox",),
}
"""Setting of a grader -> the kinds that read it: the others see one response at a time, or wait for nobody."""


class JudgeConfig(Config):
    """A generative judge behind an OpenAI-compatible endpoint: anybody's, or a model that the run serves itself."""

    base_url: str | None = None
    model: str = "judge"
    """Name of the model at `base_url`."""
    serve: ModelConfig | None = None
    """In place of `base_url`: a model served beside each reward worker, on the reward pool."""
    engine: Literal["vllm", "huggingface"] = "vllm"
    """Of a served model; its other settings are those of `rollout`."""
    max_model_length: Count = 2048
    """Of a served model: prompt and verdict."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key; keys never stand in a config."""
    api_key_block: str | None = None
    """Name of a Prefect Secret block that holds the key."""
    prompt: str = "Question: {prompt}\nReference answer: {answer}\nResponse: {response}\nScore from 0 to 1:"
    max_concurrency: Count = 8
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_retries: Annotated[int, Field(ge=0)] = 4
    max_tokens: Count = 8

    @model_validator(mode="after")
    def _is_somewhere(self) -> "JudgeConfig":
        if (self.base_url is None) == (self.serve is None):
            given = "are both missing" if self.serve is None else "are both given"
            raise ValueError(f"base_url and serve {given}; give exactly one of them")
        if self.api_key_env is not None and self.api_key_block is not None:
            raise ValueError("api_key_env and api_key_block both name a key; give one of them")
        if "{response}" not in self.prompt:
            raise ValueError(
                f"prompt is {self.prompt!r:.80}; without {{response}} in it the judge never sees what it scores"
            )
        return self


class GraderConfig(Config):
    """One source of reward."""

    name: Annotated[str, Field(min_length=1)]
    kind: Literal["rule", "python", "model", "judge", "http", "sandbox"] = "rule"
    function: str | None = None
    """For `rule` a name in tasks/rewards/table.py; for `python` an import path `module:function`."""
    weight: float = 1.0
    sources: Strings = ()
    """Data sources this grader scores; all of them when empty."""
    is_group_wise: bool = False
    """The function (`python`) or service (`http`) gets all responses to a prompt at once."""
    options: dict[str, Any] = Field(default_factory=dict)
    model: ModelConfig | None = None
    judge: JudgeConfig | None = None
    url: str | None = None
    timeout_seconds: Seconds = 30.0
    on_failure: Literal["exclude", "retry", "stop"] = "exclude"
    """A row whose grader raises, hangs or returns nonsense: leave it out of baselines and losses and count it,
    try again up to `retries`, or end the run (resumable)."""
    retries: Annotated[int, Field(ge=0)] = 2
    sandbox: Literal["bubblewrap", "unsafe"] = "bubblewrap"

    @property
    def serves_judge(self) -> bool:
        """Whether the run serves this grader's judge itself."""
        return self.kind == "judge" and self.judge is not None and self.judge.serve is not None

    @model_validator(mode="after")
    def _kind_has_its_part(self) -> "GraderConfig":
        needed = {"rule": "function", "python": "function", "model": "model", "judge": "judge", "http": "url"}
        part = needed.get(self.kind)
        if part is not None and getattr(self, part) is None:
            raise ValueError(f"grader {self.name!r} is of kind {self.kind} and has no {part}")
        for other in sorted(set(needed.values()) - {part}):
            if getattr(self, other) is not None:
                raise ValueError(
                    f"grader {self.name!r} is of kind {self.kind} and has {other}, which nothing reads; remove "
                    f"{other}, or correct kind"
                )
        if self.kind == "rule" and self.function not in RULES:
            raise ValueError(
                f"grader {self.name!r} names rule {self.function!r}; the rules are {sorted(RULES)}, and a function of "
                "yours has kind python"
            )
        for setting, readers in _READERS.items():
            value, field = getattr(self, setting), type(self).model_fields[setting]
            if self.kind not in readers and value != field.get_default(call_default_factory=True):
                kinds = " and ".join(readers)
                raise ValueError(
                    f"grader {self.name!r} is of kind {self.kind} and has {setting} {as_written(value)}, which {kinds} "
                    "alone read; remove it, or correct kind"
                )
        return self


class RewardConfig(Config):
    """How responses are scored."""

    graders: Items[GraderConfig] = Field(min_length=1)
    processes: Count = 2
    """Grader processes in each reward worker."""
    clip: Annotated[float, Field(gt=0.0)] | None = None
    """Scores are clipped to [-clip, clip]."""
    normalise: bool = False
    """Divide by the running standard deviation of scores; the state is checkpointed."""
    truncated_score: float | None = None
    """Score of a response cut at the length limit, in place of the graders'; graded as it is when null."""
    stream: bool = True
    """Score responses as they finish, while the rollout still decodes."""
