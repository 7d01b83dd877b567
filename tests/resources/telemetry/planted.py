"""Graders to name in a config, each a bottleneck to plant in a real run.

`reward.graders: [{name: planted, kind: python, function: "tests.resources.telemetry.planted:sleeps"}]`.
"""

import hashlib
import time

SLEEP_SECONDS = 2.0
RARE_SLEEP_SECONDS = 4.0
RARE_ONE_IN = 50


def sleeps(prompt: str, response: str, answer: str) -> float:
    """Right or wrong, after a nap."""
    time.sleep(SLEEP_SECONDS)
    return float(response.strip() == str(answer).strip())


def rarely_sleeps(prompt: str, response: str, answer: str) -> float:
    """About one row in fifty, chosen by its text, takes two naps."""
    chosen = hashlib.sha256(f"{prompt}\n{response}".encode()).digest()
    if int.from_bytes(chosen[:4], "big") % RARE_ONE_IN == 0:
        time.sleep(RARE_SLEEP_SECONDS)
    return float(response.strip() == str(answer).strip())
