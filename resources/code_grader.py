"""Graders of kind `sandbox`: the response's program runs in a box, and its outputs are read outside of it."""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from resources.grader_calls import arguments_of
from resources.graders import Grader, GraderFailedError, Outcome, Sample
from resources.sandbox import Program, Sandbox, SandboxLimits

Run = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class CodeSettings:
    """What a code grader needs, as values."""

    plan: Callable[[str, Any, Mapping[str, Any]], list[Run]]
    """(response, answer, extra) -> (program, standard input) of each run. Raises ValueError for a row without tests."""
    judge: Callable[[Any, Mapping[str, Any], Sequence[tuple[bool, str]]], float]
    """(answer, extra, (ended well, output) of each run) -> score."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    is_unsafe: bool = False
    runs_all: bool = False
    """Run the rest after a run that failed; for a grader that gives a share of the tests."""


class CodeBackend:
    """Runs a response's programs one after another, responses side by side."""

    def __init__(self, settings: CodeSettings, slots: int) -> None:
        """Raises SandboxUnavailableError when this node cannot make a box."""
        self._settings = settings
        self._sandbox = Sandbox(settings.limits, slots, is_unsafe=settings.is_unsafe)

    @property
    def workers(self) -> int:
        return self._sandbox.slots

    async def grade(self, grader: Grader, samples: Sequence[Sample]) -> Outcome:
        """A program that fails or is over a limit fails its test; that is a score. No test at all is no score."""
        sample = samples[0]
        extra = arguments_of(sample)["extra"]
        try:
            runs = self._settings.plan(sample.response, sample.answer, extra)
        except (ValueError, KeyError, TypeError) as error:
            raise GraderFailedError("error", f"row {sample.row_id}: {error}") from error
        outputs: list[tuple[bool, str]] = []
        seconds = 0.0
        for source, stdin in runs:
            try:
                finished = await self._sandbox.run(Program(source=source, stdin=stdin))
            except (OSError, subprocess.SubprocessError) as error:  # the box failed, not the program
                text = f"row {sample.row_id}: the sandbox failed with {type(error).__name__}: {error}"
                raise GraderFailedError("error", text, seconds) from error
            seconds += finished.seconds
            ended_well = finished.ended == "exit" and finished.exit_code == 0
            outputs.append((ended_well, finished.stdout))
            if not ended_well and not self._settings.runs_all:
                break
        return Outcome(scores=(self._settings.judge(sample.answer, extra, outputs),), seconds=seconds)

    async def close(self) -> None:
        """Boxes end with their calls."""
