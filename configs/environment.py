"""Environment every process of a run needs, set before Ray, Prefect, vLLM or torch are imported."""

import os
import re

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
    # Threads that wait must sleep: roles take turns on the same cores, and spinning ones take them from each other. But
    # not at once: a pass is thousands of parallel regions, and a thread that slept between two has to be woken
    # (docs/benchmarks.md).
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "3000",
    "KMP_BLOCKTIME": "0",
}
"""Telemetry to outside is off; Ray's listeners are on all interfaces whatever they are told, so its token stays on."""

PROXIED = ("http", "https", "all")
LOOPBACK = ("127.0.0.1", "localhost", "::1")

PROTECTED_ENV_KEYS = frozenset(
    {
        "WORLD_SIZE",
        "RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "RAY_LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "WG_PREFIX",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "ASCEND_RT_VISIBLE_DEVICES",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS",
        "RAY_AUTH_MODE",
        "CALLSHEET_RUN_ID",
        "CALLSHEET_CONTROLLER",
    }
)
"""Keys that the resource layer, or Ray for it, sets for every rank; a role's own `env` may not name them."""

_SECRET_NAME = re.compile(
    r"(API_?KEY|(^|_)KEY|(^|_)TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)$", re.IGNORECASE
)


def is_secret_name(key: str) -> bool:
    """Whether an environment variable of this name is likely to hold a secret: OPENAI_API_KEY, HF_TOKEN."""
    return _SECRET_NAME.search(key) is not None


def apply_defaults() -> None:
    """Set each default that the user has not set; call before importing ray, prefect, vllm or torch."""
    for key, value in DEFAULTS.items():
        os.environ.setdefault(key, value)
    if any(os.environ.get(f"{scheme}_proxy".upper()) or os.environ.get(f"{scheme}_proxy") for scheme in PROXIED):
        _keep_loopback_direct()


def _keep_loopback_direct() -> None:
    """Let no proxy stand between a run and its own servers; what the user excluded already stays excluded."""
    for key in ("NO_PROXY", "no_proxy"):
        kept = [host.strip() for host in os.environ.get(key, "").split(",") if host.strip()]
        os.environ[key] = ",".join([*kept, *(host for host in LOOPBACK if host not in kept)])
