"""What an engine knows of one `generate` call, for the rollout's span."""

from collections.abc import Mapping, Sequence

from resources.engines.base import GenerationFacts, GenerationOutput, GenerationRequest
from resources.telemetry.rollout_gauge import RolloutGauge, response_length_facts


def open_gauge(slots: int, requests: Sequence[GenerationRequest]) -> RolloutGauge:
    """A gauge that begins with as many rows running as fit, and the rest waiting."""
    running = min(slots, len(requests))
    gauge = RolloutGauge(max(1, running))
    gauge.observe(running=running, waiting=len(requests) - running, tokens=0)
    return gauge


def close_facts(
    facts: GenerationFacts, gauge: RolloutGauge, seconds: float, outputs: Mapping[int, GenerationOutput]
) -> None:
    """Fill `facts` at the end of a call."""
    lengths = [len(output.token_ids) for output in outputs.values()]
    facts.seconds, facts.tokens = seconds, sum(lengths)
    facts.finish_seconds = {output.row_id: output.finish_seconds for output in outputs.values()}
    facts.span = {
        **gauge.facts(),
        **response_length_facts(lengths),
        "tokens": facts.tokens,
        "tokens_per_second": facts.tokens / max(seconds, 1e-9),
        "prefix_cache_hit_fraction": facts.cached_prompt_tokens / max(facts.prompt_tokens, 1),
    }
