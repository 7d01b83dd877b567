"""The commands for a machine or a cluster: what is there, and what an interrupted run may have left."""

import json
from typing import Annotated

from cyclopts import Parameter

from flows.cli import DONE, AsJson, Refused, app

Address = Annotated[
    str | None, Parameter(help="HOST:PORT of a running Ray cluster; local leftovers only when left out.")
]


@app.command
def clean(
    *,
    run: Annotated[str | None, Parameter(help="One run's id; every ended run when left out.")] = None,
    address: Address = None,
) -> int:
    """Remove what ended runs left: placement groups and named actors on a cluster, processes on this machine."""
    from resources.cleanup import clean as remove

    with _connected(address):
        found = remove(run)
    if found.is_empty:
        print("nothing was left")
    for kind in ("runs", "actors", "placement_groups", "processes"):
        for one in getattr(found, kind):
            print(f"removed {kind.replace('_', ' ')[:-1] if kind != 'processes' else 'process'} {one}")
    return DONE


@app.command
def doctor(*, address: Address = None, json_: AsJson = False) -> int:
    """Versions, nodes, leftovers, ports, shared memory and accelerators, on one page."""
    from resources.cleanup import doctor_facts

    with _connected(address):
        facts = doctor_facts()
    if json_:
        print(json.dumps(facts, default=str))
        return DONE
    for name, value in facts.items():
        print(f"{name:>16}  {value}")
    return DONE


def _connected(address: str | None):  # noqa: ANN202 - a context manager
    import contextlib
    import logging

    if address is None:
        return contextlib.nullcontext()
    import ray

    from resources.cluster import ClusterError, check_listening

    try:
        check_listening(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ClusterError, ConnectionError, RuntimeError, ValueError) as error:
        raise Refused(f"--address is {address!r}: {error}") from None
    return contextlib.closing(_Connection())


class _Connection:
    """Closes this process's connection to Ray."""

    def close(self) -> None:
        import ray

        ray.shutdown()
