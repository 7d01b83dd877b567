"""The graders by name."""

from tasks.rewards.environment_score import environment_score
from tasks.rewards.exact_answer import exact_answer, positions_right
from tasks.rewards.length import overlong_penalty
from tasks.rewards.math_answer import math_answer
from tasks.rewards.numeric_answer import numeric_answer
from tasks.rewards.reasoning_gym_answer import reasoning_gym_answer
from tasks.rewards.response_format import response_format
from tasks.rewards.score import Grader

GRADERS: dict[str, Grader] = {
    "exact_answer": exact_answer,
    "positions_right": positions_right,
    "numeric_answer": numeric_answer,
    "math_answer": math_answer,
    "response_format": response_format,
    "overlong_penalty": overlong_penalty,
    "reasoning_gym_answer": reasoning_gym_answer,
    "environment_score": environment_score,
}
