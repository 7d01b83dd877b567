"""Workers that the tests of the resource layer cast: small, and importable where they run."""

import asyncio
import os
import signal
import sys
import time
from typing import Any

import numpy as np

from resources.dispatch import CustomDispatch, Dispatch, Topology, dispatch


class TwoArgumentError(Exception):
    """Cannot be unpickled: pickle calls the class with one argument."""

    def __init__(self, left: str, right: str) -> None:
        super().__init__(f"{left} and {right}")


ORDER: list[str] = []
"""What the roles of this process were asked, in order."""


class OrderWorker:
    """Notes its calls beside those of the other roles in its process."""

    @dispatch(Dispatch.BROADCAST)
    def note(self, name: str) -> None:
        ORDER.append(name)

    @dispatch(Dispatch.BROADCAST)
    def order(self) -> list[str]:
        return ORDER


class EchoWorker:
    """Answers about itself and its arguments."""

    def __init__(self, offset: int = 0, fail_on: int | None = None) -> None:
        self.rank = int(os.environ["RANK"])
        self.offset = offset
        self.state = 0
        if fail_on == self.rank:
            raise ValueError("root cause")

    @dispatch(Dispatch.BROADCAST)
    def environment(self, keys: list[str]) -> dict[str, str | None]:
        return {key: os.environ.get(key) for key in keys}

    @dispatch(Dispatch.BROADCAST)
    def facts(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "torch": "torch" in sys.modules, "rank": self.rank}

    @dispatch(Dispatch.BROADCAST)
    def nothing(self) -> None:
        return None

    @dispatch(Dispatch.BROADCAST)
    def add_state(self, amount: int) -> int:
        self.state += amount
        return self.state

    @dispatch(Dispatch.BROADCAST)
    def state_now(self) -> int:
        return self.state

    @dispatch(Dispatch.SPLIT_ROWS)
    def shift(self, xs: list[int], by: int = 0) -> list[int]:
        return [x + self.offset + by for x in xs]

    @dispatch(Dispatch.PER_RANK)
    def own(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    @dispatch(Dispatch.MESH)
    def on_mesh(self, rows: list[int]) -> list[tuple[int, int]]:
        return [(self.rank, row) for row in rows]

    @dispatch(Dispatch.RANK_ZERO)
    def who(self) -> int:
        return self.rank

    @dispatch(Dispatch.METRICS, reduce={"loss": "sum", "rate": "mean", "time/*": "max", "low": "min"})
    def measure(self) -> dict[str, float]:
        return {"loss": 1.0, "rate": float(self.rank), "time/step": float(self.rank), "low": float(self.rank)}

    @dispatch(Dispatch.METRICS, reduce={"loss": "sum"})
    def measure_undeclared(self) -> dict[str, float]:
        return {"loss": 1.0, "mystery": 2.0}

    @dispatch(
        CustomDispatch(
            split=lambda topology, args, kwargs: [((args[0] * rank,), {}) for rank in range(topology.world_size)],
            join=lambda topology, answers: sum(answers),
        )
    )
    def times_rank(self, value: int) -> int:
        return value

    @dispatch(Dispatch.BROADCAST, bulk=True)
    def bulk(self, rows: int) -> tuple[dict[str, Any], np.ndarray]:
        return {"rows": rows}, np.full(rows, self.rank)

    @dispatch(Dispatch.BROADCAST, bulk=True)
    def not_a_pair(self) -> int:
        return 3

    @dispatch(Dispatch.PER_RANK)
    def centre(self, x: np.ndarray) -> float:
        x -= x.mean()
        return float(x[0])

    @dispatch(Dispatch.PER_RANK, read_only=True)
    def is_view(self, x: np.ndarray) -> bool:
        return not x.flags.writeable

    @dispatch(Dispatch.BROADCAST, blocking=False)
    def slowly(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    @dispatch(Dispatch.BROADCAST)
    def fail(self, on: int, others: float = 0.0) -> int:
        if self.rank == on:
            raise ValueError("root cause")
        time.sleep(others)
        return self.rank

    @dispatch(Dispatch.BROADCAST)
    def fail_unpicklable(self) -> None:
        raise TwoArgumentError("this", "that")

    @dispatch(Dispatch.BROADCAST)
    def answer_unpicklable(self) -> Any:
        return (x for x in range(3))

    @dispatch(Dispatch.BROADCAST)
    def end(self, on: int, how: str) -> None:
        if self.rank != on:
            time.sleep(60)
        print("last words", flush=True)
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(60)

    @dispatch(Dispatch.BROADCAST)
    def spin(self, seconds: float) -> int:
        """Keeps the interpreter busy, which must not look like being stopped."""
        end = time.monotonic() + seconds
        count = 0
        while time.monotonic() < end:
            count += 1
        return count


class AsyncWorker:
    """Methods that overlap, beside one that does not."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.release = asyncio.Event()

    @dispatch(Dispatch.BROADCAST, blocking=False)
    async def wait(self) -> str:
        await self.release.wait()
        return "released"

    @dispatch(Dispatch.BROADCAST)
    async def let_go(self) -> None:
        self.release.set()

    @dispatch(Dispatch.BROADCAST)
    def plain(self) -> int:
        return self.rank


class MemoryWorker:
    """Answers with its live memory where its process says that answers are copied, as workers that keep state do."""

    def __init__(self) -> None:
        self.memory = np.zeros(1_000_000)

    @dispatch(Dispatch.BROADCAST, bulk=True)
    def snapshot(self) -> tuple[dict[str, Any], np.ndarray]:
        return {}, self.memory if self.answers_are_copied else self.memory.copy()  # pyright: ignore[reportAttributeAccessIssue]

    @dispatch(Dispatch.BROADCAST)
    def fill(self, value: float) -> None:
        self.memory.fill(value)


class AsyncMemoryWorker(MemoryWorker):
    """In a process that runs other calls meanwhile."""

    @dispatch(Dispatch.RANK_ZERO)
    async def wait(self) -> None:
        """Makes the process one of asyncio."""


class SumWorker:
    """All-reduces over torch.distributed through the environment it was given."""

    def __init__(self) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method="env://")

    @dispatch(Dispatch.BROADCAST)
    def total(self) -> int:
        import torch
        import torch.distributed as dist

        mine = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(mine)
        return int(mine)

    @dispatch(Dispatch.BROADCAST)
    def pid(self) -> int:
        return os.getpid()

    @dispatch(Dispatch.BROADCAST)
    def total_unless(self, rank: int) -> int:
        if int(os.environ["RANK"]) == rank:
            raise ValueError("root cause")
        return self.total()

    @dispatch(Dispatch.BROADCAST)
    def sibling_pid(self, role: str) -> int:
        return self.siblings[role].pid()  # type: ignore[attr-defined]

    siblings: dict[str, Any]


class NoTorchWorker:
    """Stands for a fleet of CPU workers."""

    @dispatch(Dispatch.BROADCAST)
    def has_torch(self) -> bool:
        return "torch" in sys.modules


def halves(topology: Topology) -> int:
    """Used by tests of planning."""
    return topology.world_size // 2
