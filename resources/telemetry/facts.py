"""Names, units and meaning of the facts that spans carry beside their fields.

A name is used in one sense everywhere. `R` after a name: on rank spans; `T`: on task spans; `I`: on iteration spans.
"""

FACTS: dict[str, str] = {
    # training and scoring roles (actor, critic, reference, reward model), R
    "tokens": "R: real tokens worked on (without padding)",
    "rows": "R, T: sequences worked on",
    "tokens_per_second": "R: tokens / execute seconds",
    "model_flops": "R: this rank's share of the operations the model needed for these tokens (flops.py)",
    "flop_utilisation": "R: model_flops / (execute seconds x the accelerator's peak)",
    "peak_memory_bytes": "R: the highest use of accelerator memory, or resident memory on a CPU",
    "micro_batch_fill": "R: real tokens / computed tokens of its micro-batches",
    "micro_batches": "R: forward passes",
    "optimizer_steps": "R: optimizer steps taken in this call",
    "passes": "R: how often an update went over this rank's rows",
    "nonfinite_steps": "R: optimizer steps of this call that were skipped, for a NaN or infinite gradient",
    "num_parameters": "R: parameters of the whole model",
    # rollout, R (from the worker and RolloutGauge)
    "weights_seconds": "R: from its engine's opening for the weights it sampled with until they were in force",
    "weights_age_seconds": "R: from then to its start",
    "slots": "R: sequences the engine could run at once: min(max_running_sequences, requests)",
    "running": "R: [[seconds since start, sequences running], ...]",
    "waiting": "R: [[seconds since start, sequences waiting], ...]",
    "long_tail_seconds": "R, T: time during which fewer than a quarter of the slots were busy and none waited",
    "starved_seconds": "R: slot-seconds left empty while sequences waited, divided by slots",
    "preemptions": "R: sequences thrown out of the KV cache and computed again",
    "kv_cache_use_mean": "R: fraction of the KV cache in use, over time",
    "kv_cache_use_max": "R: its highest",
    "prefix_cache_hit_fraction": "R: prompt tokens found in the prefix cache",
    "decode_steps": "R: decode steps its engine took",
    "decode_step_seconds": "R: fitted cost of a decode step, however many run",
    "decode_token_seconds": "R: fitted cost of each token in it",
    "response_length_p50": "R, T: tokens",
    "response_length_p95": "R, T: tokens",
    "response_length_max": "R, T: tokens",
    "response_length_mean": "R, T: tokens",
    "response_length_quantiles": "R, T: 17 quantiles from 0 to 1, tokens",
    "response_length_histogram": "R, T: {lower edge: count}, edges in steps of a quarter octave",
    # reward, T (from GraderLatency)
    "graders": "T: [{name, kind, workers, calls, slow_calls, timeouts, p50_, p95_, max_, total_seconds}]",
    "hidden_seconds": "T: grading that went on while the rollout still decoded",
    # weight sync and data, R, T
    "bytes": "R, T: bytes moved by the task itself (weights, snapshots)",
    "policy_version": "T: version the rows were sampled with, or published",
    # controller, I
    "controller_bytes": "I: bytes of batch that went through the controller and the API",
    "attempts": "I: attempts it took",
    "between_seconds": "I: from the end of the iteration before to the first submission: commit, snapshot, Prefect",
}
