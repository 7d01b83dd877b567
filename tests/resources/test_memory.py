"""Memory by hand on a shape that fits on a napkin, and against what real models have and keep."""

import pytest

from configs.load import load_config
from configs.model import LoraConfig, ModelConfig, ModelShape
from configs.training import TrainedRoleConfig
from resources.memory import (
    RoleMemory,
    activation_bytes,
    forward_memory,
    held_parameters,
    kv_bytes_per_token,
    lora_parameters,
    memory_of_duties,
    models_of,
    training_memory,
)
from resources.ranks import Mesh

TINY = ModelShape(num_layers=2, hidden_size=8, intermediate_size=16, num_heads=2, num_kv_heads=1, vocab_size=10)
MODEL = ModelConfig(build="tiny", shape=TINY)
HALF = ModelConfig(build="tiny", shape=TINY, dtype="bfloat16")
# A layer: q 8x8, k 8x4, v 8x4, o 8x8 = 192; MLP 3x8x16 = 384; norms 2x8 = 16; together 592.
# The model: embeddings 10x8 = 80; two layers 1184; final norm 8; together 1272.
PARAMETERS = 1272


def test_parameters_are_counted_by_hand():
    assert (TINY.num_layer_parameters, TINY.num_parameters) == (592, PARAMETERS)
    assert TINY.model_copy(update={"tied_embeddings": False}).num_parameters == PARAMETERS + 80


@pytest.mark.parametrize(
    ("shape", "biases", "published"),
    [
        # q, k and v of Qwen2.5 have biases, which the count leaves out
        ({"num_layers": 24, "hidden_size": 896, "intermediate_size": 4864, "num_heads": 14, "num_kv_heads": 2,
          "vocab_size": 151936}, 24 * (896 + 2 * 128), 494_032_768),
        ({"num_layers": 28, "hidden_size": 1536, "intermediate_size": 8960, "num_heads": 12, "num_kv_heads": 2,
          "vocab_size": 151936}, 28 * (1536 + 2 * 256), 1_543_714_304),
        ({"num_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_heads": 9, "num_kv_heads": 3,
          "vocab_size": 49152}, 0, 134_515_008),
    ],
)  # fmt: skip
def test_parameters_of_published_models_are_met(shape: dict[str, int], biases: int, published: int):
    assert ModelShape.model_validate(shape).num_parameters + biases == published


def test_training_in_float32_on_one_rank():
    role = TrainedRoleConfig(micro_batch_size=3, log_prob_chunk_tokens=4)
    # 3 sequences x 5 tokens; a layer keeps 8x8 + 4x16 + 2x4 = 136 numbers a token, two of them 272, final norm 16
    assert training_memory(MODEL, TINY, role, ranks=1, longest=5) == RoleMemory(
        weights=PARAMETERS * 4,
        gradients=PARAMETERS * 4,
        optimizer=PARAMETERS * 8,
        activations=15 * (272 + 16) * 4 + 4 * 10 * 4 * 3,
        communication=0,
    )


def test_shards_divide_the_state_and_gather_layers():
    role = TrainedRoleConfig(micro_batch_size=1)
    whole = training_memory(HALF, TINY, role, ranks=1, longest=5)
    shard = training_memory(HALF, TINY, role, ranks=4, longest=5)
    assert (shard.weights, shard.gradients, shard.optimizer) == (PARAMETERS, PARAMETERS, PARAMETERS * 2)
    assert shard.communication == 2 * 592 * 2 + 592 * 4
    assert whole.communication == PARAMETERS * 2, "the weights in bfloat16"
    assert shard.activations == whole.activations
    unsharded = training_memory(HALF, TINY, role.model_copy(update={"fsdp": False}), ranks=4, longest=5)
    assert unsharded == whole


def test_checkpointing_keeps_layer_inputs_and_one_layer():
    checkpointed = MODEL.model_copy(update={"gradient_checkpointing": True})
    assert activation_bytes(TINY, checkpointed, tokens=10, longest=5) == 10 * (2 * 8 + 136 + 16) * 4


def test_eager_attention_keeps_its_scores():
    eager = MODEL.model_copy(update={"attention": "eager"})
    more = activation_bytes(TINY, eager, tokens=10, longest=5) - activation_bytes(TINY, MODEL, tokens=10, longest=5)
    assert more == 10 * 2 * (2 * 2 * 5) * 4


def test_a_token_budget_replaces_the_number_of_sequences():
    by_tokens = training_memory(MODEL, TINY, TrainedRoleConfig(micro_batch_tokens=15), ranks=1, longest=5)
    by_rows = training_memory(MODEL, TINY, TrainedRoleConfig(micro_batch_size=3), ranks=1, longest=5)
    assert by_tokens == by_rows


def test_tensor_and_sequence_parallel_ranks_share_the_state_too():
    role = TrainedRoleConfig(micro_batch_size=4, log_prob_chunk_tokens=100)
    # Norms, 5x8 = 40, stay whole; of the other 1232 numbers one of two tensor-parallel ranks holds 616: 656 in all.
    # 8 ranks are 4 rows of 2: FSDP cuts the 656 by 4, of which 2 are data-parallel and 2 sequence-parallel.
    memory = training_memory(HALF, TINY, role, ranks=8, mesh=Mesh(tp=2, sp=2), longest=5)
    assert (memory.weights, memory.gradients, memory.optimizer) == (656, 656, 1312)
    assert memory.communication == 2 * 296 * 2 + 296 * 4
    assert memory.activations == 10 * (272 + 16) * 2 + 10 * 10 * 4 * 3, "10 of a micro-batch's 20 tokens"


def test_without_fsdp_tensor_parallel_ranks_alone_divide_the_weights():
    role = TrainedRoleConfig(fsdp=False)
    memory = training_memory(MODEL, TINY, role, ranks=2, mesh=Mesh(tp=2), longest=5)
    assert (memory.weights, memory.optimizer, memory.communication) == (656 * 4, 656 * 8, 0)
    spread = training_memory(MODEL, TINY, role, ranks=2, mesh=Mesh(sp=2), longest=5)
    assert spread.weights == PARAMETERS * 4, "a whole copy on every rank"


def test_a_7b_actor_on_eight_tensor_parallel_gpus_of_80_gib_fits():
    """Qwen2.5-7B: 16 bytes of 7.6e9 numbers over 8 ranks are 15 GB, and 8 GB more as each holds the embedding whole."""
    shape = {
        "num_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "num_heads": 28, "num_kv_heads": 4,
        "vocab_size": 152064, "tied_embeddings": False,
    }  # fmt: skip
    model = ModelConfig(path="org/7b", dtype="bfloat16", shape=ModelShape.model_validate(shape))
    assert model.shape is not None
    memory = training_memory(model, model.shape, TrainedRoleConfig(), ranks=8, mesh=Mesh(tp=8), longest=2048)
    # (7 615 487 488 - 544 997 376 of the embedding - 57 x 3584 of norms) / 8 + those = 1 428 987 392, times 16
    assert memory.certain == 1_428_987_392 * 16 < 24e9


def test_lora_trains_its_adapters_alone_on_a_base_in_float32():
    lora = LoraConfig(rank=2, target_modules=("q_proj", "down_proj"))
    # q: 2 x (8 + 8) = 32, down: 2 x (16 + 8) = 48, in two layers
    assert lora_parameters(TINY, lora) == 160
    memory = training_memory(HALF.model_copy(update={"lora": lora}), TINY, TrainedRoleConfig(), ranks=1, longest=5)
    assert (memory.weights, memory.gradients, memory.optimizer) == ((PARAMETERS + 160) * 4, 160 * 4, 160 * 8)
    assert memory.communication == (PARAMETERS + 160) * 2, "both in bfloat16 while a pass runs"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_real_actor_with_adapters_holds_the_weights_that_are_counted(dtype: str):
    from tests.resources.workers.tiny import SHAPE, actor

    model = ModelConfig.model_validate({"build": "tiny", "shape": SHAPE, "dtype": dtype, "lora": LoraConfig(rank=2)})
    held = sum(parameter.nbytes for parameter in actor(model).module.parameters())
    assert training_memory(model, SHAPE, TrainedRoleConfig(), ranks=1, longest=5).weights == held


def test_a_critic_has_a_head_of_one_number():
    untied = TINY.model_copy(update={"tied_embeddings": False})
    memory = training_memory(MODEL, untied, TrainedRoleConfig(), ranks=1, longest=5, has_value_head=True)
    assert memory.weights == (PARAMETERS + 8) * 4


def test_a_model_that_is_only_read_has_weights_and_one_layer():
    role = TrainedRoleConfig(micro_batch_size=2, log_prob_micro_batch_size=3, log_prob_chunk_tokens=4)
    memory = forward_memory(HALF, TINY, role, ranks=1, longest=5)
    assert memory == RoleMemory(weights=PARAMETERS * 2, activations=15 * 136 * 2 + 4 * 10 * 4 * 3)


def test_a_model_that_is_only_read_lies_over_several_ranks_as_a_trained_one_does():
    role = TrainedRoleConfig()
    assert forward_memory(HALF, TINY, role, ranks=4, longest=5).weights == PARAMETERS * 4 // 4
    assert forward_memory(HALF, TINY, role, ranks=4, mesh=Mesh(tp=4), longest=5).weights == (1232 // 4 + 40) * 4
    whole = forward_memory(HALF, TINY, role.model_copy(update={"fsdp": False}), ranks=4, longest=5)
    assert (whole.weights, whole.communication) == (PARAMETERS * 4, PARAMETERS * 2)


def test_keys_and_values_of_a_token():
    assert kv_bytes_per_token(TINY, "float32") == 2 * 2 * 4 * 4
    assert kv_bytes_per_token(TINY, "bfloat16", tensor_parallel=2) == 2 * 2 * 4 * 2 // 2


def test_every_model_role_of_a_preset_is_estimated():
    config = load_config("quickstart-distillation")
    shapes = {path: model.shape for path, model in models_of(config).items() if model.shape is not None}
    table = memory_of_duties(config, shapes)
    assert set(table) == {"actor", "rollout", "teacher"}
    assert table["teacher"].weights == shapes["teachers.0.model"].num_parameters * 4
    assert table["rollout"].kv_cache == 64 * 2**20


def test_a_teacher_of_four_tensor_parallel_workers_is_counted_on_four():
    changes = [
        "pools.teachers.nodes=[4]", "roles.teacher.workers=4", "roles.teacher.tensor_parallel=4",
        "distillation={objective: reverse_kl_loss}",
    ]  # fmt: skip
    config = load_config("quickstart-distillation", changes)
    shapes = {path: model.shape for path, model in models_of(config).items() if model.shape is not None}
    shape = shapes["teachers.0.model"]
    assert memory_of_duties(config, shapes)["teacher"].weights == held_parameters(shape, 4) * 4


def test_a_gpu_engine_wants_a_cache_for_all_that_run_at_once():
    config = load_config("gsm8k-qwen2.5-1.5b-8gpu-split-pools", ["rollout.max_running_sequences=10"])
    shapes = {path: model.shape for path, model in models_of(config).items() if model.shape is not None}
    per_token = 2 * 28 * 256 * 2
    assert memory_of_duties(config, shapes)["rollout"].kv_cache == 10 * (512 + 1024) * per_token


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_activations_are_what_a_real_forward_keeps(attention: str):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = ModelShape(num_layers=3, hidden_size=96, intermediate_size=256, num_heads=6, num_kv_heads=2, vocab_size=50)
    rows, length = 4, 32
    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=96, intermediate_size=256, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=50,
    )  # fmt: skip
    net = LlamaForCausalLM._from_config(config, attn_implementation=attention)
    parameters = {weight.untyped_storage().data_ptr() for weight in net.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        net.model(input_ids=torch.zeros(rows, length, dtype=torch.long))
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    model = MODEL.model_copy(update={"attention": attention})
    estimate = activation_bytes(shape, model, tokens=rows * length, longest=length)
    assert estimate == pytest.approx(measured, rel=0.1)
