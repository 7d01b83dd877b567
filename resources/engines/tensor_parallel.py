"""What several ranks that form one engine need: a process group, shared memory of their own, and the same requests."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from resources.engines.base import GenerationRequest, Sampling

_SHARED_MEMORY = Path("/dev/shm")


def join_peers(is_cpu: bool) -> None:
    """Join the process group of the injected ranks, unless a fused role did so already."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo" if is_cpu else "cpu:gloo,cuda:nccl")


def name_shared_memory(communicator_class: Any) -> None:
    """Give the shared memory of vLLM's CPU ranks names that no other run of this machine has.

    vLLM makes them from the last part of the init method, which is the same (`env://`) for every run; two runs would
    add to one another's sums. The rendezvous port is the run's own.
    """
    plain_name = communicator_class.make_group_name
    if plain_name.__name__ == "name_of_this_run":
        return

    def name_of_this_run(communicator: Any) -> str:
        return f"{plain_name(communicator)}-{os.environ['MASTER_PORT']}"

    communicator_class.make_group_name = staticmethod(name_of_this_run)


def unlink_shared_memory(group: Any) -> None:
    """Remove the names once every peer has the memory open, so that nothing is left on the machine, however it ends."""
    name = str(group.device_communicator.dist_module.group_name).lstrip("/")
    torch.distributed.barrier(group=group.cpu_group)
    for path in _SHARED_MEMORY.iterdir():
        if path.name.startswith(f"{name}_"):
            path.unlink(missing_ok=True)


def check_peers(requests: Sequence[GenerationRequest], sampling: Sampling, group: Any, size: int) -> None:
    """Collective over the peers of one engine. Raise ValueError on all of them unless all were given the same.

    Tensor-parallel peers draw each token on their own; with other rows or seeds each would go on with other tokens.
    """
    text = repr((tuple((r.row_id, r.prompt_ids, r.seed, r.max_tokens) for r in requests), sampling))
    mine = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
    hashes = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    torch.distributed.all_gather(hashes, torch.tensor([mine]), group=group)
    values = [int(value) for value in hashes]
    if len(set(values)) > 1:
        raise ValueError(
            f"tensor-parallel peers were given different rows or seeds (hashes {values}); every peer of an engine must "
            "sample the same requests"
        )
