"""The store where the ranks of one incarnation meet, hosted by the process of rank 0 on a port the kernel chooses."""

from datetime import timedelta
from typing import Any


def host_store(node_ip: str, world_size: int, timeout_seconds: float) -> tuple[Any, tuple[str, int]]:
    """Open a `TCPStore` server on port 0. Returns (store, (ip, port)); the caller keeps the store alive.

    Binding port 0 means no port is ever chosen before it is bound, so two groups or two runs cannot pick the same one.
    Imports torch, which is why groups that need no rendezvous say so (`WorkerSpec.rendezvous`).
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = TCPStore(
        node_ip,
        0,
        world_size,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
    )
    return store, (node_ip, store.port)
