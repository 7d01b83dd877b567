"""A controller in a process of its own, for tests that end it in every way.

python sample_driver.py RUN_ID ADDRESS RUN_DIR HOW -> a line of JSON about itself; then it waits, or ends by HOW.
"""

import json
import os
import sys
import time
from pathlib import Path

from configs.environment import apply_defaults

apply_defaults()

from configs.pools import PoolConfig  # noqa: E402 - the environment comes before Ray
from resources.cluster import Cluster  # noqa: E402
from resources.worker_group import WorkerSpec, start_group  # noqa: E402
from tests.resources.sample_workers import EchoWorker  # noqa: E402


def main() -> None:
    run_id, address, run_dir, how = sys.argv[1:]
    with Cluster(run_id, address=address, run_dir=Path(run_dir), num_cpus=4, object_store_bytes=80_000_000) as run:
        run.reserve({"main": PoolConfig(nodes=(2,))})
        spec = WorkerSpec(role="echo", worker=EchoWorker, rendezvous=False)
        group = start_group(run, run.pools["main"], spec)
        pids = [rank["pid"] for rank in group.ranks]
        print(json.dumps({"pids": pids, "state": group.add_state(len(run_id))}), flush=True)
        if how == "exception":
            raise RuntimeError("the run failed")
        if how == "calls":
            for _ in range(20):
                group.add_state(1)
            print(json.dumps({"state": group.add_state(0)}), flush=True)
        if how == "wait":
            time.sleep(300)
        if how == "hard-exit":
            os._exit(9)


if __name__ == "__main__":
    main()
