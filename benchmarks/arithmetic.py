"""In what a user would train on this machine's CPU."""

from typing import Literal

from resources.cpu_features import multiplies_bfloat16

FASTEST: Literal["bfloat16", "float32"] = "bfloat16" if multiplies_bfloat16() else "float32"
"""A comparison in bfloat16 on a CPU without it would compare conversions in software."""
