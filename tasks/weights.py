"""The weight sync step: the actor's weights go to the rollout engines, checked; and loading a checkpoint into roles."""

from resources.casting import stateful_duties
from resources.weight_sync import sync_weights
from tasks.host import host
from tasks.replies import send
from tasks.servers import sampling_paused
from tasks.stamp import Stamp
from tasks.step import StepResult, step


@step(role="actor")
def weight_sync(at: Stamp, policy_version: int) -> StepResult:
    """Publish the actor's weights to the engines as `policy_version`; no tensor passes through this process."""
    config = host().config
    deadline = config.recovery.call_deadline_seconds
    with sampling_paused(deadline):
        report = sync_weights(
            host().group("actor"),
            host().group("rollout"),
            policy_version,
            config.rollout,
            vocab_size=host().group("actor").call("vocabulary_size"),
            wire_dtype=config.rollout.dtype or config.model.dtype,
            compute_dtype=config.model.dtype,
            max_probe_tokens=config.data.max_prompt_length,
            timeout=deadline,
        )
    metrics = {} if report.probe_gap is None else {"rollout/probe_gap": report.probe_gap}
    return StepResult(metrics=metrics, facts={"way": report.way, "bytes": report.num_bytes, "version": report.version})


@step(role="actor")
def load_state(at: Stamp, folder: str | None) -> StepResult:
    """Fill the stateful roles from a checkpoint's folder; nothing to do for a fresh run."""
    every = stateful_duties(host().config) if folder is not None else ()
    duties = [duty for duty in every if duty in host().groups]
    calls = [send(duty, "load_checkpoint", folder) for duty in duties]
    return StepResult(spans=tuple(span for call in calls for span in call.wait().spans))
