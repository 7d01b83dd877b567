"""The size of a Ray cluster that is started on this machine: what the pools ask, whatever the machine has.

CPUs are logical in Ray: they are counted and bind no core, so a config of many small pools runs on two cores, slowly.
"""

import math
import os

from configs.run import RunConfig


def asked_cpus(config: RunConfig) -> int:
    """CPUs of all bundles together."""
    return math.ceil(sum(pool.cpus_per_bundle * pool.size for pool in config.pools.values()))


def local_cpus(config: RunConfig) -> int:
    """CPUs a local cluster is given: `ray.num_cpus`, else what the pools ask, and the machine's at least."""
    return config.ray.num_cpus or max(len(os.sched_getaffinity(0)), asked_cpus(config))


def shared_cores_note(config: RunConfig) -> str | None:
    """What to tell a person whose pools ask for more CPUs than the machine has; None where they fit."""
    asked, cores = asked_cpus(config), len(os.sched_getaffinity(0))
    if config.ray.address is not None or config.ray.num_cpus is not None or asked <= cores:
        return None
    return (
        f"the pools ask for {asked} CPUs and this machine has {cores}: the local cluster counts {asked} logical ones, "
        "so processes share cores and times say little about a larger machine"
    )
