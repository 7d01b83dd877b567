"""vLLM against transformers: what is sampled, with which log-probs, and what new weights change."""

import pytest
import torch

from configs.rollout import RolloutConfig, SamplingConfig
from resources.engines.base import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    Sampling,
    WeightMismatchError,
)
from resources.engines.vllm import VllmEngine
from resources.seeding import row_seed
from tests.resources.engines.updates import update_weights

from .conftest import STOP, VOCAB_SIZE, build_tiny, exact_log_probs

pytestmark = pytest.mark.timeout(120)


def requests_for(
    rows: range, *, length: int = 6, max_tokens: int = 8, iteration: int = 0, run_seed: int = 0
) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            row_id=row,
            prompt_ids=(1, *(3 + (7 * row // 4 + 5 * k) % (VOCAB_SIZE - 3) for k in range(length - 1))),
            seed=row_seed(run_seed, iteration, row),
            max_tokens=max_tokens,
        )
        for row in rows
    ]


def ids_of(outputs: list[GenerationOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def weights_of(model) -> tuple[list[tuple[str, torch.Tensor]], list[str]]:
    weights = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    return weights, [name for name, _ in weights]


def load(engine: VllmEngine, model, version: int) -> None:
    weights, names = weights_of(model)
    update_weights(engine, weights, version, names)


@pytest.fixture
def original(vllm_engine):
    """Puts the weights of seed 0 back after a test that replaced them."""
    yield build_tiny(0)
    load(vllm_engine, build_tiny(0), 0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_log_probs_equal_those_of_transformers_at_the_sampling_temperature(vllm_engine, temperature):
    model = build_tiny(0)
    requests = requests_for(range(24))
    outputs = vllm_engine.generate(requests, Sampling(temperature=temperature, stop_token_ids=(STOP,)))
    for request, output in zip(requests, outputs, strict=True):
        ids = [*request.prompt_ids, *output.token_ids]
        exact = exact_log_probs(model, ids, temperature)[len(request.prompt_ids) :]
        torch.testing.assert_close(torch.tensor(output.log_probs), exact, atol=1e-4, rtol=0)


def test_log_probs_are_of_the_distribution_cut_by_top_k(vllm_engine):
    model = build_tiny(0)
    [request] = requests_for(range(1), max_tokens=1)
    [output] = vllm_engine.generate([request], Sampling(top_k=2))
    with torch.no_grad():
        top = model(torch.tensor([request.prompt_ids])).logits[0, -1].topk(2)
    kept = dict(zip(top.indices.tolist(), top.values.log_softmax(0).tolist(), strict=True))
    assert output.log_probs[0] == pytest.approx(kept[output.token_ids[0]], abs=1e-4)


def test_top_p_keeps_only_the_tokens_of_its_mass(vllm_engine):
    model = build_tiny(0)
    requests = requests_for(range(0, 1)) * 1
    many = [
        GenerationRequest(row_id=k, prompt_ids=requests[0].prompt_ids, seed=row_seed(0, 0, k), max_tokens=1)
        for k in range(64)
    ]
    outputs = vllm_engine.generate(many, Sampling(top_p=0.5))
    with torch.no_grad():
        ranked = model(torch.tensor([requests[0].prompt_ids])).logits[0, -1].softmax(-1).sort(descending=True)
    kept = ranked.indices[: int((ranked.values.cumsum(0) < 0.5).sum()) + 1].tolist()
    assert {output.token_ids[0] for output in outputs} <= set(kept)


def test_a_score_is_the_log_prob_at_temperature_one(vllm_engine):
    ids = [1, 5, 9, 40, 41, 7]
    scored = torch.tensor(vllm_engine.score(ids))
    torch.testing.assert_close(scored, exact_log_probs(build_tiny(0), ids), atol=1e-4, rtol=0)


def test_the_same_seeds_give_the_same_tokens_again(vllm_engine, sampling):
    first = vllm_engine.generate(requests_for(range(24)), sampling)
    second = vllm_engine.generate(requests_for(range(24)), sampling)
    assert ids_of(first) == ids_of(second)


def test_siblings_of_one_prompt_differ_and_another_iteration_differs(vllm_engine, sampling):
    first = vllm_engine.generate(requests_for(range(4)), sampling)
    assert len(set(ids_of(first))) == 4
    later = vllm_engine.generate(requests_for(range(4), iteration=1), sampling)
    assert ids_of(first) != ids_of(later)


def test_one_engine_of_16_rows_equals_two_engines_of_5_and_11(vllm_engine, sampling):
    whole = vllm_engine.generate(requests_for(range(16)), sampling)
    parts = [
        *vllm_engine.generate(requests_for(range(5)), sampling),
        *vllm_engine.generate(requests_for(range(5, 16)), sampling),
    ]
    assert ids_of(whole) == ids_of(parts)
    for one, other in zip(whole, parts, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def test_outputs_come_in_request_order_with_their_own_rows(vllm_engine, sampling):
    requests = list(reversed(requests_for(range(10))))
    outputs = vllm_engine.generate(requests, sampling)
    assert [output.row_id for output in outputs] == [request.row_id for request in requests]


def test_a_response_ends_at_any_of_several_stop_tokens_and_keeps_it(vllm_engine):
    stops = tuple(range(2, 40))
    outputs = vllm_engine.generate(requests_for(range(32), max_tokens=20), Sampling(stop_token_ids=stops))
    stopped = [output for output in outputs if output.finish_reason is FinishReason.STOP]
    assert len({output.token_ids[-1] for output in stopped}) > 1
    for output in stopped:
        assert output.token_ids[-1] in stops
        assert not set(output.token_ids[:-1]) & set(stops)
        assert len(output.log_probs) == len(output.token_ids)


def test_a_response_without_stop_token_ends_at_its_limit(vllm_engine):
    outputs = vllm_engine.generate(requests_for(range(4), max_tokens=5), Sampling())
    assert [(len(output.token_ids), output.finish_reason) for output in outputs] == [(5, FinishReason.LENGTH)] * 4


def test_finished_rows_are_told_while_others_still_decode(vllm_engine):
    told: list[list[int]] = []
    short, long = requests_for(range(1), max_tokens=2)[0], requests_for(range(1, 2), max_tokens=9)[0]
    vllm_engine.generate(
        [long, short], Sampling(), on_finished=lambda outputs: told.append([o.row_id for o in outputs])
    )
    assert told == [[0], [1]]


def test_greedy_responses_follow_the_highest_logit(vllm_engine):
    model = build_tiny(0)
    [request] = requests_for(range(1))
    [output] = vllm_engine.generate([request], Sampling(greedy=True))
    with torch.no_grad():
        exact = model.generate(  # pyright: ignore[reportCallIssue]
            torch.tensor([request.prompt_ids]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert output.token_ids == tuple(exact[0, len(request.prompt_ids) :].tolist())


def test_after_an_update_the_engine_samples_as_the_new_model(vllm_engine, original):
    new = build_tiny(1)
    load(vllm_engine, new, 7)
    assert vllm_engine.policy_version == 7
    [request] = requests_for(range(1))
    [output] = vllm_engine.generate([request], Sampling(greedy=True))
    with torch.no_grad():
        exact = new.generate(  # pyright: ignore[reportCallIssue]
            torch.tensor([request.prompt_ids]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert output.token_ids == tuple(exact[0, len(request.prompt_ids) :].tolist())


def test_a_tied_head_follows_the_embedding(vllm_engine, original):
    new = build_tiny(0)
    with torch.no_grad():
        new.model.embed_tokens.weight.mul_(1.5)
    load(vllm_engine, new, 1)
    ids = [1, 5, 9, 40, 41, 7]
    torch.testing.assert_close(torch.tensor(vllm_engine.score(ids)), exact_log_probs(new, ids), atol=1e-4, rtol=0)


def test_no_prefix_of_the_old_weights_survives_an_update(vllm_engine, original):
    # 48 shared tokens fill several KV blocks, which the second call would otherwise reuse.
    requests = requests_for(range(4), length=48, max_tokens=4)
    shared = [
        GenerationRequest(row_id=r.row_id, prompt_ids=requests[0].prompt_ids, seed=r.seed, max_tokens=4)
        for r in requests
    ]
    vllm_engine.generate(shared, Sampling())
    vllm_engine.generate(shared, Sampling())
    assert vllm_engine.facts.cached_prompt_tokens > 0
    new = build_tiny(2)
    load(vllm_engine, new, 1)
    outputs = vllm_engine.generate(shared[:1], Sampling())
    assert vllm_engine.facts.cached_prompt_tokens == 0
    ids = [*shared[0].prompt_ids, *outputs[0].token_ids]
    torch.testing.assert_close(torch.tensor(outputs[0].log_probs), exact_log_probs(new, ids)[-4:], atol=1e-4, rtol=0)


def test_weights_that_went_away_and_came_back_sample_the_same_tokens(vllm_engine, original, sampling):
    before = vllm_engine.generate(requests_for(range(8)), sampling)
    load(vllm_engine, build_tiny(1), 1)
    load(vllm_engine, original, 2)
    assert ids_of(vllm_engine.generate(requests_for(range(8)), sampling)) == ids_of(before)


def test_renamed_weights_are_refused_by_name_and_the_engine_then_refuses_to_sample(vllm_engine, original, sampling):
    weights, names = weights_of(build_tiny(1))
    renamed = [(name.replace("q_proj", "query"), tensor) for name, tensor in weights]
    with pytest.raises(WeightMismatchError, match=r"self_attn\.query"):
        update_weights(vllm_engine, renamed, 1, names)
    with pytest.raises(RuntimeError, match="no valid weights"):
        vllm_engine.generate(requests_for(range(1)), sampling)


def test_an_update_broken_off_inside_a_fused_layer_leaves_nothing_in_the_next_one(vllm_engine, original):
    weights, names = weights_of(build_tiny(3))
    until = names.index("model.layers.0.mlp.gate_proj.weight") + 1  # its other half, up_proj, never comes
    vllm_engine.begin_update()
    vllm_engine.load_weights(weights[:until])
    new = build_tiny(1)
    load(vllm_engine, new, 1)
    ids = [1, 5, 9, 40, 41, 7]
    torch.testing.assert_close(torch.tensor(vllm_engine.score(ids)), exact_log_probs(new, ids), atol=1e-4, rtol=0)


def test_missing_weights_are_listed(vllm_engine, original):
    weights, names = weights_of(build_tiny(1))
    with pytest.raises(WeightMismatchError, match=f"{len(names) - 1} weights are missing"):
        update_weights(vllm_engine, weights[:1], 1, names)


def test_a_sender_of_another_model_is_refused_even_when_its_own_names_add_up(vllm_engine, original):
    weights, _ = weights_of(build_tiny(1))
    fewer = [(name, tensor) for name, tensor in weights if "layers.1" not in name]
    with pytest.raises(WeightMismatchError, match="got no value"):
        update_weights(vllm_engine, fewer, 1, [name for name, _ in fewer])


def test_a_name_sent_twice_is_refused(vllm_engine, original):
    weights, names = weights_of(build_tiny(1))
    with pytest.raises(WeightMismatchError, match="twice"):
        update_weights(vllm_engine, [*weights, weights[0]], 1, names)


def test_aborted_responses_keep_what_was_sampled(vllm_engine, sampling):
    whole = vllm_engine.generate(requests_for(range(2)), Sampling())
    for request in requests_for(range(2)):
        vllm_engine.add_request(request, Sampling())
    for _ in range(3):
        vllm_engine.step()
    [aborted] = vllm_engine.abort([1])
    assert aborted.finish_reason is FinishReason.ABORT
    assert 0 < len(aborted.token_ids) < 8
    assert aborted.token_ids == whole[1].token_ids[: len(aborted.token_ids)]
    assert aborted.log_probs == pytest.approx(whole[1].log_probs[: len(aborted.log_probs)], abs=1e-5)
    rest = []
    while vllm_engine.has_unfinished():
        rest += vllm_engine.step()
    assert [output.token_ids for output in rest] == [whole[0].token_ids]


def test_an_aborted_response_continues_from_its_tokens_like_a_longer_prompt(vllm_engine):
    [request] = requests_for(range(1))
    [whole] = vllm_engine.generate([request], Sampling(greedy=True))
    head = GenerationRequest(
        row_id=0, prompt_ids=(*request.prompt_ids, *whole.token_ids[:3]), seed=request.seed, max_tokens=5
    )
    [tail] = vllm_engine.generate([head], Sampling(greedy=True))
    assert whole.token_ids[3:] == tail.token_ids


def test_a_reader_of_finished_rows_that_raises_leaves_the_engine_empty(vllm_engine, sampling):
    def fail(outputs: list[GenerationOutput]) -> None:
        raise OSError("reader went away")

    with pytest.raises(OSError, match="went away"):
        vllm_engine.generate(requests_for(range(8)), sampling, on_finished=fail)
    assert not vllm_engine.has_unfinished()
    assert len(vllm_engine.generate(requests_for(range(8)), sampling)) == 8


@pytest.mark.parametrize(
    ("prompt_ids", "max_tokens", "message"),
    [((), 4, "empty prompt"), ((1, VOCAB_SIZE), 4, "vocabulary has 96"), ((1,) * 60, 8, "60 [+] 8 tokens")],
)
def test_a_request_that_cannot_work_is_refused_with_its_row(vllm_engine, sampling, prompt_ids, max_tokens, message):
    request = GenerationRequest(row_id=31, prompt_ids=prompt_ids, seed=1, max_tokens=max_tokens)
    with pytest.raises(ValueError, match=rf"row 31.*{message}"):
        vllm_engine.generate([request], sampling)


def test_the_trainer_can_still_change_its_thread_count(vllm_engine):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)


def test_starting_an_engine_leaves_random_numbers_and_dtype_alone(tiny_folder, vllm_engine):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    rollout = RolloutConfig(max_running_sequences=2, kv_cache_bytes=2**20)
    engine = VllmEngine(rollout, str(tiny_folder), dtype="bfloat16", max_model_length=64, seed=1)
    assert torch.equal(torch.rand(2), expected)
    assert torch.get_default_dtype() is torch.float32
    engine.shutdown()


def test_facts_tell_tokens_slots_and_finish_times(vllm_engine):
    outputs = vllm_engine.generate(requests_for(range(40), max_tokens=3), Sampling())
    facts = vllm_engine.facts
    assert facts.tokens == 120
    assert facts.span["slots"] == 32
    assert facts.span["waiting"][0][2 - 1] >= 0
    assert facts.span["response_length_p50"] == 3
    assert set(facts.finish_seconds) == {output.row_id for output in outputs}


def test_stop_tokens_are_the_models_and_the_configs():
    assert Sampling.from_config(SamplingConfig(stop_token_ids=(9, 4)), [STOP, 9]).stop_token_ids == (2, 4, 9)


def test_preempted_rows_are_counted_and_sample_the_same_tokens(vllm_engine, cramped_engine):
    requests = requests_for(range(8), length=4, max_tokens=50)
    outputs = cramped_engine.generate(requests, Sampling())
    assert cramped_engine.facts.span["preemptions"] > 0
    assert cramped_engine.facts.span["kv_cache_use_max"] > 0.5
    roomy = vllm_engine.generate(requests, Sampling())
    assert vllm_engine.facts.span["preemptions"] == 0
    assert ids_of(outputs) == ids_of(roomy)


def test_seeded_rows_longer_than_one_step_together_are_sampled(vllm_engine):
    # 100 prompts of 60 tokens exceed a step's 4096; vLLM would cut one prefill in two and fail on a CPU.
    outputs = vllm_engine.generate(requests_for(range(100), length=60, max_tokens=2), Sampling())
    assert [len(output.token_ids) for output in outputs] == [2] * 100


def test_the_rules_know_the_widths_of_heads_that_vllm_has_on_a_cpu():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from configs.parallel_rules import CPU_HEAD_SIZES

    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()
