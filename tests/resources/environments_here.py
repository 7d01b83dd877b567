"""Environments for tests: importable by path."""

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from resources.workers.env import EnvWorker


class Countdown:
    """Ends after the row's `answer` turns; each turn that says the number left earns a share of the score."""

    def __init__(self, say: str = "left") -> None:
        self.say, self.left, self.total, self.right = say, 0, 0, 0

    def reset(self, record: Mapping[str, Any]) -> None:
        self.total = self.left = int(record["answer"])

    def step(self, text: str) -> tuple[str, float, bool]:
        self.right += text.removesuffix("<eos>") == str(self.left)
        self.left -= 1
        return f"{self.left} {self.say}", self.right / self.total, self.left == 0


class Unsure:
    """Gives no score."""

    def reset(self, record: Mapping[str, Any]) -> None:
        json.dumps(dict(record))

    def step(self, text: str) -> tuple[str, Any, bool]:
        return "well", None, False


class Slow:
    """Ends after one turn, which takes the seconds of the row's `answer`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def reset(self, record: Mapping[str, Any]) -> None:
        self.seconds = float(record["answer"])

    def step(self, text: str) -> tuple[str, float, bool]:
        time.sleep(self.seconds)
        return "done", 1.0, True


class Leaving:
    """Asks to end the process."""

    def reset(self, record: Mapping[str, Any]) -> None:
        json.dumps(dict(record))

    def step(self, text: str) -> tuple[str, float, bool]:
        raise SystemExit(3)


class Broken:
    """Raises in its second turn."""

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, record: Mapping[str, Any]) -> None:
        json.dumps(dict(record))

    def step(self, text: str) -> tuple[str, float, bool]:
        self.turns += 1
        if self.turns > 1:
            raise KeyError("board")
        return "go on", 0.0, False


def worker_has_imported_reasoning_gym(path: str) -> bool:
    """Whether a worker that was made for `path` has."""
    EnvWorker(path)
    return "reasoning_gym" in sys.modules
