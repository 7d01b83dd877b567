"""Runs a function on several ranks, each a process with the environment that the resource layer injects."""

import io
import multiprocessing
import os
import queue
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "tests.resources.workers.tiny"])
DEADLINE_SECONDS = 240.0


def run_ranked(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """function(*args) on every rank, in rank order. Raises the first rank's error with its traceback."""
    store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    answers: Any = _CONTEXT.Queue()
    children = [
        _CONTEXT.Process(target=_rank_main, args=(function, rank, world_size, store.port, args, answers), daemon=True)
        for rank in range(world_size)
    ]
    for child in children:
        child.start()
    try:
        found = dict(_next_answer(answers) for _ in children)
    finally:
        for child in children:
            child.join(10.0)
            if child.is_alive():
                child.kill()
    return [found[rank] for rank in range(world_size)]


def _next_answer(answers: Any) -> tuple[int, Any]:
    try:
        rank, error, answer = answers.get(timeout=DEADLINE_SECONDS)
    except queue.Empty:
        raise TimeoutError(f"a rank did not answer within {DEADLINE_SECONDS} seconds") from None
    if error is not None:
        raise AssertionError(f"rank {rank} failed:\n{error}")
    # As bytes: shared-memory tensors need a handshake with a process that has ended by now.
    return rank, torch.load(io.BytesIO(answer), weights_only=False)


def _rank_main(function: Callable[..., Any], rank: int, world_size: int, port: int, args: Any, answers: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    torch.set_num_threads(1)
    try:
        answer = io.BytesIO()
        torch.save(function(*args), answer)
        answers.put((rank, None, answer.getvalue()))
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
