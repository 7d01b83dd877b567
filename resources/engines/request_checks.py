"""Refuses requests that an engine would answer wrongly or not at all, naming the row."""

from resources.engines.base import GenerationRequest


def check_request(request: GenerationRequest, vocab_size: int, max_model_length: int | None) -> None:
    """Raise ValueError for an empty prompt, ids the model lacks, or a response that cannot fit; None is no limit."""
    if not request.prompt_ids:
        raise ValueError(f"row {request.row_id} has an empty prompt; a response needs at least one token before it")
    top = max(request.prompt_ids)
    if top >= vocab_size:
        raise ValueError(
            f"row {request.row_id} holds token id {top}; the engine's vocabulary has {vocab_size}. Tokenizer and model "
            "differ"
        )
    length = len(request.prompt_ids) + request.max_tokens
    if max_model_length is not None and length > max_model_length:
        raise ValueError(
            f"row {request.row_id} needs {len(request.prompt_ids)} + {request.max_tokens} tokens; the engine was "
            f"started for {max_model_length}. Raise rollout.max_model_length or lower data.max_prompt_length"
        )
