"""A run whose whole cast is in this process: the steps of the DAG called one after another, without Prefect and Ray.

The same step bodies on the same workers; what is left out is placement, parallelism, recovery and files.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.layout import process_groups
from configs.model import ModelConfig
from configs.run import RunConfig
from resources.casting import Casting, all_duties, duties_of, worker_spec
from resources.curriculum import curriculum_after
from resources.demonstration_rows import WARM_UP_EPOCH
from resources.import_paths import import_class
from resources.local_group import LocalGroup, make_siblings
from resources.store import BatchStore, StoreView
from tasks.actor import actor_log_probs, actor_update
from tasks.advantage import advantage
from tasks.critic import critic_update, critic_values
from tasks.export import start_model
from tasks.graders_of import build_graders
from tasks.host import HostContext, call_step, use_host
from tasks.reference import adapter_reference, reference, refresh_reference
from tasks.reward import reward
from tasks.rollout import rollout
from tasks.run_state import RunState, next_kl_coef
from tasks.samples import samples
from tasks.step import StepResult
from tasks.supervised import actor_fit, demonstrations, publish_model
from tasks.teacher import teacher
from tasks.validation import validation
from tasks.weights import weight_sync


def cast_here(
    config: RunConfig, model: ModelConfig | None = None, given: Mapping[str, LocalGroup] | None = None
) -> dict[str, LocalGroup]:
    """One worker of each duty of the config, in this process, as siblings. Those of `given` are used as they are."""
    casting = Casting(config=config, model=model or config.model, graders=build_graders(config))
    groups = dict(given or {})
    for group in process_groups(config):
        for duty in all_duties(config, group):
            if duty not in groups:
                spec = worker_spec(casting, group, duty)
                maker: Any = import_class(spec.worker) if isinstance(spec.worker, str) else spec.worker
                groups[duty] = LocalGroup(duty, [maker(*spec.args, **spec.kwargs)])
    make_siblings({duty: group.workers[0] for duty, group in groups.items()})
    return groups


def warm_up_here(config: RunConfig, folder: Path) -> ModelConfig:
    """The supervised warm-up of the config in this process; publishes `folder`/model and gives its config."""
    sft = config.sft
    if sft is None:
        raise ValueError("the config has no sft section, so there is no warm-up to run")
    fitting = config.model_copy(update={"actor": config.actor.model_copy(update={"optimizer": sft.optimizer})})
    group = next(group for group in process_groups(config) if "actor" in duties_of(group))
    casting = Casting(config=fitting, model=config.model)
    groups: dict[str, LocalGroup] = {}
    for duty in ("actor", "demonstrations"):
        spec = worker_spec(casting, group, duty)
        maker: Any = import_class(str(spec.worker))
        groups[duty] = LocalGroup(duty, [maker(*spec.args, **spec.kwargs)])
    run = LocalRun(fitting, groups)
    at = replace(run.state.stamp(fitting, 0), epoch=WARM_UP_EPOCH, count=sft.steps * sft.batch_size)
    with use_host(run.context):
        rows = call_step(demonstrations, at)
        call_step(actor_fit, at, rows, sft.steps)
        call_step(publish_model, at, str(folder / "model"))
    return start_model(config, folder)


class LocalRun:
    """See the module."""

    def __init__(self, config: RunConfig, groups: Mapping[str, LocalGroup]) -> None:
        self.config = config
        self.store = BatchStore("local")
        self.context = HostContext(
            pool="local", run_id=config.name, store=StoreView(self.store), config=config, groups=dict(groups)
        )
        self.state = RunState(kl_coef=config.algorithm.kl.coef)
        self.facts: dict[str, Mapping[str, Any]] = {}
        """Of each step of the last iteration."""
        self.samples_folder: Path | None = None
        """Where each iteration's rows are written, if anywhere."""

    def sync(self) -> None:
        """The actor's weights to the engine, before the first iteration."""
        with use_host(self.context):
            at = self.state.stamp(self.config, 1)
            call_step(weight_sync, at, at.policy_version)

    def validate(self) -> dict[str, float]:
        """Metrics of the held-out prompts under the engine's weights."""
        with use_host(self.context):
            at = self.state.stamp(self.config, 1)
            return dict(call_step(validation, at, at.policy_version).metrics)

    def iterate(self) -> dict[str, float]:
        """One iteration; returns its metrics."""
        with use_host(self.context):
            done = self._steps()
        metrics = {name: value for result in done.values() for name, value in result.metrics.items()}
        self.facts = {name: result.facts for name, result in done.items()}
        self.state = self.state.after(
            position=self.facts["rollout"]["next_position"],
            kl_coef=next_kl_coef(self.config, self.state.kl_coef, metrics),
            parts={
                **{name: facts["state"] for name, facts in self.facts.items() if "state" in facts},
                **curriculum_after(self.state.parts, self.facts),
            },
        )
        return metrics

    def _steps(self) -> dict[str, StepResult]:
        at = self.state.stamp(self.config, 1)
        has, config = self.context.groups, self.config
        batch = call_step(rollout, at, at.policy_version, str(self.state.parts.get("curriculum", "")))
        done = {
            "rollout": batch,
            "reward": call_step(reward, at, batch),
        }
        if config.recomputes_log_probs:
            done["actor-log-probs"] = call_step(actor_log_probs, at, batch)
        if "reference" in has:
            done["reference"] = call_step(reference, at, batch)
        if config.model.lora is not None and config.algorithm.needs_reference:
            done["adapter-reference"] = call_step(adapter_reference, at, batch)
        if config.teachers:
            done["teacher"] = call_step(teacher, at, batch)
        if "critic" in has:
            done["critic-values"] = call_step(critic_values, at, batch)
        done["advantage"] = call_step(advantage, at, list(done.values()))
        everything = list(done.values())
        if self.samples_folder is not None:
            done["samples"] = call_step(samples, at, everything, str(self.samples_folder))
        if at.iteration >= config.algorithm.critic_warmup_iterations or "critic" not in has:
            done["actor-update"] = call_step(actor_update, at, everything)
        if "critic" in has:
            done["critic-update"] = call_step(critic_update, at, everything)
        refresh_every = config.algorithm.kl.refresh_every
        if refresh_every is not None and (at.iteration + 1) % refresh_every == 0:
            done["refresh-reference"] = call_step(refresh_reference, at, at.policy_version + 1)
        done["weight-sync"] = call_step(weight_sync, at, at.policy_version + 1)
        self.store.drop(at.batch_id)
        return done
