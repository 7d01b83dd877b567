"""What the iteration that is about to run consists of: a function of the config and of where the run stands.

Flows read these as words of the DAG (`if run.should_validate`); nothing here starts, waits or writes.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.model import ModelConfig
from configs.run import RunConfig
from resources.curriculum import PART
from resources.demonstration_rows import WARM_UP_EPOCH
from resources.run_directory import RunDirectory
from resources.worker_group import WorkerGroup
from tasks.export import start_model
from tasks.run_state import RunState
from tasks.stamp import Stamp

FIRST_VALIDATION = "first_validation"


class Agenda:
    """See the module."""

    def __init__(self, config: RunConfig, directory: RunDirectory) -> None:
        self.config = config
        self.directory = directory
        self.groups: dict[str, WorkerGroup] = {}
        self.state = RunState(kl_coef=config.algorithm.kl.coef)
        self.failed_attempts: Counter[int] = Counter()
        """Iteration -> how often it failed, or was rolled back, in this process."""

    # --- the run --------------------------------------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        """Whether every iteration is done."""
        return self.state.iteration >= self.config.iterations

    @property
    def attempt(self) -> int:
        """The attempt of the next iteration; a number that was used is never used again."""
        return self.failed_attempts[self.state.iteration] + 1

    def stamp(self) -> Stamp:
        """What the steps of the next iteration are told."""
        return self.state.stamp(self.config, self.attempt)

    @property
    def should_validate(self) -> bool:
        """Whether the iteration that is about to run ends with a validation."""
        validation, done = self.config.validation, self.state.iteration + 1
        if not validation.sources:
            return False
        is_last = done == self.config.iterations
        return (validation.every > 0 and done % validation.every == 0) or (is_last and validation.at_end)

    @property
    def should_validate_first(self) -> bool:
        """Whether held-out prompts are scored before the first iteration."""
        validation = self.config.validation
        is_fresh = self.state.iteration == 0 and not self.first_validation
        return bool(validation.sources) and validation.at_start and is_fresh

    @property
    def should_save(self) -> bool:
        """Whether the iteration that is about to run ends with a save step; an asynchronous save needs none."""
        return not self.config.checkpoint.asynchronous and self.is_save_due(self.state.iteration + 1)

    def is_save_due(self, done: int) -> bool:
        """Whether a full checkpoint is due after so many iterations; after the last one it always is."""
        return self.config.checkpoint.is_due(done, self.config.iterations)

    def needs(self, duty: str) -> bool:
        """Whether this run has workers for `duty`."""
        return any(name.partition(".")[0] == duty for name in self.groups)

    @property
    def keeps_samples(self) -> bool:
        """Whether each iteration's rows are written with their text."""
        return self.config.telemetry.samples_per_iteration > 0 and self.needs("reward")

    @property
    def samples_folder(self) -> str:
        """Where they are written."""
        return str(self.directory.samples)

    @property
    def solved(self) -> str:
        """Prompts that the curriculum leaves out; see `resources/curriculum.py`."""
        return str(self.state.parts.get("curriculum", ""))

    @property
    def has_adapter_reference(self) -> bool:
        """Whether the reference is the actor with its adapters off."""
        return self.config.model.lora is not None and self.config.algorithm.needs_reference

    @property
    def recomputes_log_probs(self) -> bool:
        """Whether the actor scores the responses before its update."""
        return self.config.recomputes_log_probs

    @property
    def should_refresh_reference(self) -> bool:
        """Whether the reference becomes the actor at the end of the iteration that is about to run."""
        every = self.config.algorithm.kl.refresh_every
        return every is not None and self.needs("reference") and (self.state.iteration + 1) % every == 0

    @property
    def trains_actor(self) -> bool:
        """False while only the critic learns."""
        return self.state.iteration >= self.config.algorithm.critic_warmup_iterations or not self.needs("critic")

    # --- its data -------------------------------------------------------------------------------------------------

    @property
    def saved_position(self) -> dict[str, Any] | None:
        """Where in which data the run stands; None for a run that has read nothing yet."""
        state = self.state
        if not state.data_identity:
            return None
        return {"identity": state.data_identity, "epoch": state.epoch, "start": state.start}

    def take_position(self, found: Mapping[str, Any]) -> None:
        """Data that is not what the state is of starts at its beginning, none of it solved; an event says so."""
        if found["identity"] == self.state.data_identity:
            return
        self.directory.event("data-changed", before=self.saved_position, epoch=found["epoch"], start=found["start"])
        parts = {name: part for name, part in self.state.parts.items() if name != PART}
        self.state = replace(
            self.state, epoch=found["epoch"], start=found["start"], data_identity=found["identity"], parts=parts
        )

    # --- its models -----------------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelConfig:
        """The policy's start: what the warm-up made, once it is there, else the config's model."""
        return start_model(self.config, self.directory.path)

    @property
    def warm_model_folder(self) -> Path:
        """Where the supervised warm-up publishes its model."""
        return self.directory.path / "model"

    @property
    def first_validation(self) -> dict[str, float]:
        """What held-out prompts scored before the first iteration."""
        return dict(self.state.parts.get(FIRST_VALIDATION, {}))

    # --- warm-up --------------------------------------------------------------------------------------------------

    @property
    def needs_warm_up(self) -> bool:
        """Whether the config asks for a supervised warm-up that was not published yet."""
        sft = self.config.sft
        return sft is not None and sft.warms_up and not (self.warm_model_folder / "config.json").exists()

    @property
    def warm_up_steps(self) -> int:
        """Optimizer steps of the warm-up."""
        return self.config.sft.steps if self.config.sft is not None else 0

    def warm_up_stamp(self) -> Stamp:
        """The warm-up reads the first rows of the epoch before the first."""
        rows = self.warm_up_steps * (self.config.sft.batch_size if self.config.sft is not None else 0)
        return replace(self.stamp(), attempt=0, epoch=WARM_UP_EPOCH, start=0, count=rows)
