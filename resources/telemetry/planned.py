"""What a past run says of a config that has not run yet: the layout of the config, simulated with its timings."""

from pathlib import Path

from configs.layout import advantage_pool, duties, num_workers, placed, styles
from configs.run import RunConfig
from resources.telemetry.profile import RunProfile
from resources.telemetry.report import profile_of_run
from resources.telemetry.topology import Topology
from resources.telemetry.whatif import Prediction, predict, predict_unchanged


def planned_topology(config: RunConfig, profile: RunProfile) -> Topology:
    """The layout that `config` describes, on the cores of the measured run."""
    roles = {duty: config.roles[role].pool for duty, role in duties(config).items()}
    roles["advantage"] = advantage_pool(config)
    return Topology(
        pools={name: pool.size for name, pool in config.pools.items()},
        roles=roles,
        colocate=styles(config),
        accelerator_pools=frozenset(name for name, pool in config.pools.items() if pool.accelerator != "none"),
        group_size=config.rollout.group_size,
        prompts_per_iteration=config.data.prompts_per_iteration,
        async_depth=config.async_depth,
        tensor_parallel=placed(config, "rollout").tensor_parallel,
        max_running_sequences=config.rollout.max_running_sequences,
        cores=profile.cores,
        workers={duty: num_workers(config, duty) for duty in duties(config)},
    )


def predict_plan(config: RunConfig, run_dir: Path) -> tuple[Prediction, float, float]:
    """(the config's layout, the step predicted for the layout that the run had, the step that it measured).

    Raises FileNotFoundError where the folder has no spans; ValueError where no iteration is complete or a role of the
    run stands in no pool of the config.
    """
    profile = profile_of_run(run_dir)
    planned = predict(profile, planned_topology(config, profile))
    return planned, predict_unchanged(profile), profile.measured_step_seconds
