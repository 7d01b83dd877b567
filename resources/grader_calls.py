"""Grading calls to functions in grader processes: which keywords they get, and how their answers are read."""

from collections.abc import Sequence
from typing import Any

from resources.grader_pool import GraderPool
from resources.graders import FINISH_REASONS, Grader, GraderFailedError, Outcome, Sample, check_scores, describe


class PoolBackend:
    """Rules and a user's functions, in grader processes."""

    def __init__(self, pool: GraderPool, index: int) -> None:
        self._pool, self._index = pool, index

    @property
    def workers(self) -> int:
        return self._pool.processes

    async def grade(self, grader: Grader, samples: Sequence[Sample]) -> Outcome:
        arguments = group_arguments(samples) if grader.is_group_wise else arguments_of(samples[0])
        try:
            value, seconds = await self._pool.call(self._index, arguments, grader.timeout_seconds)
        except GraderFailedError as error:
            raise GraderFailedError(error.cause, f"{describe(samples)}: {error}", error.seconds) from None
        return Outcome(
            scores=check_scores(value, len(samples), str(grader.function), seconds, is_group=grader.is_group_wise),
            seconds=seconds,
        )

    async def close(self) -> None:
        """The pool is closed by its owner."""


def arguments_of(sample: Sample) -> dict[str, Any]:
    """Keywords a grading function may ask for; `extra` holds those about the response as well."""
    about = {
        "source": sample.source,
        "index": sample.index,
        "finish_reason": FINISH_REASONS[sample.finish_reason],
        "response_length": sample.response_length,
    }
    return {
        "prompt": sample.prompt,
        "response": sample.response,
        "answer": sample.answer,
        "extra": {**sample.extra, **about},
        **about,
    }


def group_arguments(samples: Sequence[Sample]) -> dict[str, Any]:
    """Keywords of a group-wise function: the prompt's once, the responses' as lists in order of row id."""
    each = [arguments_of(sample) for sample in samples]
    return {
        **{key: each[0][key] for key in ("prompt", "answer", "source", "index", "extra")},
        "responses": [one["response"] for one in each],
        "extras": [one["extra"] for one in each],
        "finish_reasons": [one["finish_reason"] for one in each],
        "response_lengths": [one["response_length"] for one in each],
    }
