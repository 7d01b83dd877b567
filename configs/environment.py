"""Environment every process of a run needs, set before Ray, Prefect, vLLM or torch are imported."""

import os

DEFAULTS = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Telemetry to outside is off; Ray's listeners are on all interfaces whatever they are told, so its token stays on."""


def apply_defaults() -> None:
    """Set each default that the user has not set; call before importing ray, prefect, vllm or torch."""
    for key, value in DEFAULTS.items():
        os.environ.setdefault(key, value)
