"""Programs that play an episode through a stock OpenAI client: importable by path."""

import os
import time
from typing import Any

from openai import OpenAI


def ask(base_url: str, prompt: str, answer: str) -> float:
    """One question; the share of the answer's characters that stand in their place."""
    with OpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=60.0) as client:
        said = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": prompt}])
    text = said.choices[0].message.content or ""
    return sum(a == b for a, b in zip(text, answer, strict=False)) / max(len(text), len(answer))


def ask_again(base_url: str, prompt: str) -> None:
    """Two turns of one conversation, and graders score it."""
    messages: list[Any] = [{"role": "user", "content": prompt}]
    with OpenAI(base_url=base_url, api_key="unused", max_retries=0, timeout=60.0) as client:
        first = client.chat.completions.create(model="policy", messages=messages, max_tokens=3)
        messages += [{"role": "assistant", "content": first.choices[0].message.content}]
        messages += [{"role": "user", "content": "?"}]
        client.chat.completions.create(model="policy", messages=messages, max_tokens=3)


def fail_in_turn(base_url: str, prompt: str, answer: str, index: int) -> object:
    """A third raises, a third ends its process or hangs or never asks, and a third does its work."""
    if index % 3 == 0:
        raise KeyError("board")
    if index % 3 == 1:
        return [lambda: os._exit(7), lambda: time.sleep(600), lambda: None, lambda: "good"][index // 3 % 4]()
    return ask(base_url, prompt, answer)
