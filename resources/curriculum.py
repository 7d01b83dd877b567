"""Which prompts are solved, as a text small enough for a checkpoint's manifest: no key is written out.

A key is `source:index`, as `Prompt.key` gives it. Twenty thousand prompts, half of them solved, take about 4 KiB.
"""

import base64
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

PART = "curriculum"
"""Name of its part of the run's state."""
Solved = dict[str, set[int]]
"""Source -> indices of its solved prompts."""


def encode_solved(keys: Iterable[str]) -> str:
    """Keys as one text; the same keys give the same text.

    >>> sorted(decode_solved(encode_solved(["a:7", "a:3", "b:0"])))
    ['a:3', 'a:7', 'b:0']
    """
    found: Solved = {}
    for key in keys:
        source, _, index = key.rpartition(":")
        found.setdefault(source, set()).add(int(index))
    if not found:
        return ""
    masks = {source: _mask(found[source]) for source in sorted(found)}
    return base64.b64encode(zlib.compress(json.dumps(masks).encode(), 9)).decode()


def decode_solved(text: str) -> frozenset[str]:
    """The keys of a text; none for an empty one."""
    if not text:
        return frozenset()
    masks: dict[str, str] = json.loads(zlib.decompress(base64.b64decode(text)))
    return frozenset(f"{source}:{index}" for source, mask in masks.items() for index in _indices(mask))


def join_solved(*texts: str) -> str:
    """The keys of all texts."""
    return encode_solved(key for text in texts for key in decode_solved(text))


def solved_in(lowest: Mapping[str, float], solved_score: float) -> str:
    """Keys whose lowest score reaches `solved_score`; a nan (an unscorable response) never does."""
    return encode_solved(key for key, score in lowest.items() if score >= solved_score)


def curriculum_after(parts: Mapping[str, Any], facts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The part `curriculum` of a run's state after an iteration, from the `solved` its steps told; {} without one."""
    told = [step["solved"] for step in facts.values() if "solved" in step]
    return {PART: join_solved(parts.get(PART, ""), *told)} if told else {}


def _mask(indices: set[int]) -> str:
    bits = bytearray(max(indices) // 8 + 1)
    for index in indices:
        bits[index // 8] |= 1 << (index % 8)
    return bits.hex()


def _indices(mask: str) -> Iterable[int]:
    for place, byte in enumerate(bytes.fromhex(mask)):
        for bit in range(8):
            if byte >> bit & 1:
                yield place * 8 + bit
