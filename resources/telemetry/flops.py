"""Floating-point operations a decoder-only model needs, and how much of the accelerator's peak that is."""

PEAK_FLOPS: dict[str, float] = {
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX-4090": 165e12,
}
"""Dense bfloat16 peak by accelerator type, floating-point operations a second, from the makers' data sheets."""


def model_flops(
    *,
    num_parameters: int,
    num_layers: int,
    hidden_size: int,
    tokens: int,
    mean_length: float,
    is_training: bool,
    is_recomputed: bool = False,
) -> float:
    """Operations for `tokens` tokens in sequences of `mean_length`.

    forward = tokens * (2 * num_parameters + 2 * num_layers * hidden_size * mean_length)

    The second term is causal attention (half of 4 * L * d * T). Backward costs two forwards, recomputed activations one
    more. Kaplan et al. 2020 (arXiv 2001.08361) section 2.1; Chowdhery et al. 2022 (arXiv 2204.02311) appendix B, which
    leaves recomputation out of *model* operations: pass it only to know the hardware's.

    >>> model_flops(num_parameters=100, num_layers=1, hidden_size=4, tokens=10, mean_length=5.0, is_training=True)
    7200.0
    """
    forward = tokens * (2.0 * num_parameters + 2.0 * num_layers * hidden_size * mean_length)
    return forward * (1 + (2 if is_training else 0) + (1 if is_recomputed else 0))


def flop_utilisation(flops: float, seconds: float, accelerator_type: str, num_accelerators: int = 1) -> float | None:
    """Share of the peak, or None for an accelerator whose peak is not in the table (a CPU)."""
    peak = PEAK_FLOPS.get(accelerator_type)
    return None if peak is None or seconds <= 0 else flops / (seconds * peak * num_accelerators)
