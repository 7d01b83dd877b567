"""Bottlenecks to plant in real runs: graders to name in a config, and the verdict each plant must get.

`reward.graders: [{name: planted, kind: python, function: "tests.resources.telemetry.planted:sleeps"}]`.
"""

import hashlib
import time

from resources.telemetry.causes import Cause

SLEEP_SECONDS = 0.2
RARE_SLEEP_SECONDS = 4.0
RARE_ONE_IN = 50

EXPECTED: dict[str, tuple[str, Cause]] = {
    "a grader that sleeps": ("reward", Cause.SLOW_GRADER),
    "one grader call in 50 that sleeps long": ("reward", Cause.RARE_SLOW_GRADER),
    "one very long response": ("rollout", Cause.LONG_TAIL),
    "a slow rank in the actor group": ("actor", Cause.SLOW_RANK),
    "a critic three times the actor's size": ("critic", Cause.HEAVY_CRITIC),
    "a reference on a slow pool": ("reference", Cause.SLOW_REFERENCE),
    "a driver that serialises": ("controller", Cause.SERIALISE),
    "too small a KV cache": ("rollout", Cause.KV_CACHE),
    "nothing": ("none", Cause.BALANCED),
}
"""Plant -> the role and cause its verdict must name."""


def sleeps(prompt: str, response: str, answer: str) -> float:
    """Right or wrong, after a nap."""
    time.sleep(SLEEP_SECONDS)
    return float(response.strip() == str(answer).strip())


def rarely_sleeps(prompt: str, response: str, answer: str) -> float:
    """About one row in fifty, chosen by its text, takes twenty naps."""
    chosen = hashlib.sha256(f"{prompt}\n{response}".encode()).digest()
    if int.from_bytes(chosen[:4], "big") % RARE_ONE_IN == 0:
        time.sleep(RARE_SLEEP_SECONDS)
    return float(response.strip() == str(answer).strip())
