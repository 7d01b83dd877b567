"""Weights arrive whole, checked, under their names, by each of the three ways; nothing wrong passes in silence."""

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from configs.rollout import RolloutConfig, ScriptedConfig
from resources.batch import make_shard
from resources.engines.base import WeightMismatchError
from resources.engines.scripted import ScriptedEngine
from resources.failures import Failure, WorkerFailed
from resources.models.weights import in_buckets
from resources.weight_buckets import checksum, from_flat, pack, to_flat, unpack
from resources.weight_receiver import ReceivesWeights
from resources.weight_sender import HOST, SendsWeights, probe_tokens
from resources.weight_sync import WeightSyncError, check_probe, choose_way, sync_weights


class Tied(nn.Module):
    """Two matrices, the head being the embedding."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed_tokens = nn.Parameter(torch.randn(8, 4, generator=generator))
        self.middle = nn.Parameter(torch.randn(4, 4, generator=generator))


class Sender(SendsWeights):
    """The smallest actor: its score is a sum over its weights."""

    def __init__(self, seed: int = 0) -> None:
        self.model = Tied(seed)

    def export_weights(self, bucket_bytes: int, wire_dtype: str | None) -> Iterator[list[tuple[str, torch.Tensor]]]:
        ties = {"lm_head.weight": "embed_tokens"}
        yield from in_buckets(self.model.named_parameters(), bucket_bytes, wire_dtype or "float32", ties)

    def expected_names(self) -> list[str]:
        return ["embed_tokens", "middle", "lm_head.weight"]

    def compute_log_probs(self, rows, temperature):
        total = float(sum(parameter.detach().sum() for parameter in self.model.parameters()))
        scored = rows.get("input_ids") * 0.0 + total
        return {}, make_shard({"row_ids": rows["row_ids"], "old_log_probs": scored})


class Keeper(ScriptedEngine):
    """A scripted engine that keeps what it was sent, and scores with it."""

    def __init__(self) -> None:
        script = ScriptedConfig(responses={"mode": "random"})
        super().__init__(RolloutConfig(engine="scripted", scripted=script), vocab_size=40)
        self.kept: dict[str, torch.Tensor] = {}

    def load_weights(self, weights) -> None:
        pairs = list(weights)
        super().load_weights(pairs)
        self.kept.update((name, tensor.clone()) for name, tensor in pairs)

    def score(self, token_ids) -> list[float]:
        total = float(self.kept["embed_tokens"].sum() + self.kept["middle"].sum())
        return [total] * len(token_ids)


class Receiver(ReceivesWeights):
    def __init__(self) -> None:
        self.engine = Keeper()
        self.siblings: dict = {}


class LocalGroup:
    """Worker-group calls on plain workers of this process, each on a thread of its own, so that both ends can meet."""

    def __init__(self, *workers, pid: int = 1, node: str = "a") -> None:
        self.workers = workers
        self.world_size = len(workers)
        self.ranks = [{"node_id": node, "pid": pid + k, "node": "127.0.0.1"} for k in range(len(workers))]
        self.threads = [concurrent.futures.ThreadPoolExecutor(max_workers=1) for _ in workers]
        self.calls: list[str] = []

    def submit(self, method, /, *args, timeout=None, **kwargs):
        self.calls.append(method)
        # As marked on the actor's methods: rank zero alone, one answer.
        is_single = isinstance(self.workers[0], SendsWeights) and method.endswith("weight_channel")
        called = self.workers[:1] if is_single else self.workers
        futures = [
            pool.submit(getattr(worker, method), *args, **kwargs)
            for pool, worker in zip(self.threads, called, strict=False)
        ]
        return LocalCall(futures, is_single)


class LocalCall:
    def __init__(self, futures, is_single: bool) -> None:
        self.futures = futures
        self.is_single = is_single

    def result(self):
        answers = [future.result(timeout=60) for future in self.futures]
        return answers[0] if self.is_single else answers


class ReportingGroup(LocalGroup):
    """Tells a worker's exception as a worker group does: as a WorkerFailed, raised where the result is asked for."""

    def submit(self, method, /, *args, timeout=None, **kwargs):
        return ReportingCall(super().submit(method, *args, timeout=timeout, **kwargs), method)


class ReportingCall:
    def __init__(self, call: LocalCall, method: str) -> None:
        self.call, self.method = call, method

    def result(self):
        try:
            return self.call.result()
        except (ValueError, RuntimeError) as error:
            failure = Failure(
                kind="exception", detail=f"{type(error).__qualname__}: {error}", role="r", group="g", pool="p", rank=0,
                world_size=1, node_ip="", node_id="", pid=1, incarnation=1, method=self.method,
                exception_type=type(error).__qualname__,
            )  # fmt: skip
            raise WorkerFailed(failure) from None


def sync(actor: LocalGroup, rollout: LocalGroup, version: int = 1, **changes):
    config = {"bucket_bytes": 100, **{k: v for k, v in changes.items() if k in ("bucket_bytes", "weight_sync")}}
    return sync_weights(
        actor,
        rollout,
        version,
        RolloutConfig(**config),
        vocab_size=40,
        wire_dtype=changes.get("wire_dtype", "float32"),
        timeout=30.0,
    )


def fused() -> tuple[LocalGroup, LocalGroup]:
    sender, receiver = Sender(), Receiver()
    receiver.siblings = {"actor": sender, "rollout": receiver}
    return LocalGroup(sender), LocalGroup(receiver)


# The three ways


@pytest.mark.parametrize("way", ["in_process", "object_store", "process_group"])
def test_each_way_delivers_every_weight_and_the_version(way, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    actor, rollout = fused()
    report = sync(actor, rollout, 5, weight_sync=way)
    assert (report.version, report.way, report.num_weights) == (5, way, 3)
    assert report.num_bytes == (32 + 16) * 4
    assert report.probe_gap == pytest.approx(0.0, abs=1e-6)
    engine = rollout.workers[0].engine
    assert engine.policy_version == 5
    assert torch.equal(engine.kept["embed_tokens"], actor.workers[0].model.embed_tokens)
    assert torch.equal(engine.kept["lm_head.weight"], actor.workers[0].model.embed_tokens)


def test_a_tied_head_travels_once():
    tensor = torch.randn(4, 2)
    entries, tensors = pack([("embed_tokens", tensor), ("lm_head.weight", tensor)], HOST)
    assert len(tensors) == 1
    assert [(name, got.data_ptr()) for name, got in unpack(entries, tensors)] == [
        ("embed_tokens", tensor.data_ptr()),
        ("lm_head.weight", tensor.data_ptr()),
    ]


class OnCard(torch.Tensor):
    """Stands for a tensor on an accelerator: it is brought to the host as one is, and has another checksum there."""

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).to(*args, **kwargs)

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("way", ["object_store", "process_group"])
def test_weights_on_an_accelerator_reach_an_engine_that_gets_them_in_host_memory(way, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(
        "resources.weight_buckets.checksum", lambda tensor: checksum(tensor) + isinstance(tensor, OnCard)
    )
    actor, rollout = fused()
    plain = actor.workers[0].export_weights

    def on_card(bucket_bytes, wire_dtype):
        for bucket in plain(bucket_bytes, wire_dtype):
            cards = {id(tensor): tensor.as_subclass(OnCard) for _, tensor in bucket}
            yield [(name, cards[id(tensor)]) for name, tensor in bucket]

    actor.workers[0].export_weights = on_card
    report = sync(actor, rollout, weight_sync=way)
    assert report.num_bytes == (32 + 16) * 4  # the tied head travels once
    engine = rollout.workers[0].engine
    assert torch.equal(engine.kept["lm_head.weight"], actor.workers[0].model.embed_tokens)


def test_at_most_two_buckets_exist_at_a_time(monkeypatch):
    alive, most = 0, 0
    sender = Sender()
    plain = sender.export_weights

    def watched(bucket_bytes, wire_dtype):
        nonlocal alive, most
        for bucket in plain(bucket_bytes, wire_dtype):
            alive += 1
            most = max(most, alive)
            yield bucket

    sender.export_weights = watched
    receiver = Receiver()
    load = receiver.load_weight_bucket

    def counted(entries, bucket):
        nonlocal alive
        load(entries, bucket)
        alive -= 1

    receiver.load_weight_bucket = counted
    sync(LocalGroup(sender), LocalGroup(receiver, pid=9), bucket_bytes=64)
    assert most <= 2


def test_the_wire_dtype_rounds_as_the_engine_would():
    exported = torch.tensor([1.001, 3.14159, 65504.0])
    [[(_, wire)]] = list(in_buckets([("w", exported)], 100, "bfloat16", {}))
    entries, tensors = pack([("w", wire)], HOST)
    [(_, got)] = unpack(entries, tensors)
    assert (entries[0].dtype, got.dtype) == ("bfloat16", torch.bfloat16)
    assert got.float().tolist() == [1.0, 3.140625, 65536.0]


def test_a_bfloat16_channel_keeps_shapes_and_values():
    bucket = [("a", torch.randn(3, 5).bfloat16()), ("b", torch.randn(7)), ("c", torch.randn(2, 2).bfloat16())]
    entries, tensors = pack(bucket, HOST)
    again = dict(unpack(entries, from_flat(entries, to_flat(tensors))))
    assert all(torch.equal(again[name], tensor) for name, tensor in bucket)


# What goes wrong


def test_a_changed_byte_is_found_and_named():
    entries, tensors = pack([("good", torch.ones(4)), ("bad", torch.ones(4))], HOST)
    tensors[1][2] = 1.5
    with pytest.raises(WeightMismatchError, match="'bad' arrived with checksum"):
        list(unpack(entries, tensors))


def test_two_swapped_rows_change_the_checksum():
    tensor = torch.arange(8.0).view(4, 2)
    assert checksum(tensor) != checksum(tensor[[1, 0, 2, 3]])


def test_another_shape_or_type_is_refused():
    entries, _ = pack([("w", torch.ones(2, 3))], HOST)
    with pytest.raises(WeightMismatchError, match=r"arrived as \('float32', \(3, 2\)\)"):
        list(unpack(entries, [torch.ones(3, 2)]))
    with pytest.raises(WeightMismatchError, match="bfloat16"):
        list(unpack(entries, [torch.ones(2, 3).bfloat16()]))


@pytest.mark.parametrize("way", ["in_process", "object_store", "process_group"])
def test_a_name_that_does_not_come_ends_the_sync(way, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    actor, rollout = fused()
    actor.workers[0].expected_names = lambda: ["embed_tokens", "middle", "lm_head.weight", "norm"]
    with pytest.raises(WeightMismatchError, match=r"1 weights are missing: \['norm'\]"):
        sync(actor, rollout, weight_sync=way)


def test_a_sender_that_fails_while_it_broadcasts_is_named_and_not_the_engines_that_lost_it(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    sender, receiver = Sender(), Receiver()
    plain = sender.export_weights

    def short(bucket_bytes, wire_dtype):
        yield next(plain(bucket_bytes, wire_dtype))
        raise ValueError("no gathering of layer 2")

    sender.export_weights = short
    with pytest.raises(WorkerFailed, match="ValueError: no gathering of layer 2") as told:
        sync(ReportingGroup(sender), ReportingGroup(receiver, pid=9), weight_sync="process_group")
    assert isinstance(told.value.__cause__, WorkerFailed)
    assert told.value.__cause__.failure.exception_type == "WeightChannelError"


def test_an_engine_that_fails_while_it_receives_is_named_and_not_the_sender_that_lost_it(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    sender, receiver = Sender(), Receiver()

    def refuse(weights):
        raise WeightMismatchError("no such weight")

    receiver.engine.load_weights = refuse
    with pytest.raises(WorkerFailed, match="WeightMismatchError: no such weight"):
        sync(ReportingGroup(sender), ReportingGroup(receiver, pid=9), weight_sync="process_group")


def test_a_failed_sync_can_be_followed_by_a_good_one():
    actor, rollout = fused()
    actor.workers[0].expected_names = lambda: ["nothing"]
    with pytest.raises(WeightMismatchError):
        sync(actor, rollout, weight_sync="object_store")
    del actor.workers[0].expected_names
    assert sync(actor, rollout, 2, weight_sync="object_store").version == 2


def test_an_engine_that_scores_otherwise_than_the_actor_is_found():
    actor, rollout = fused()
    rollout.workers[0].engine.score = lambda ids: [0.0] * len(ids)
    with pytest.raises(WeightSyncError, match="engine 0 and the actor differ by"):
        sync(actor, rollout, weight_sync="object_store")


def test_a_probe_of_nan_is_a_difference():
    with pytest.raises(WeightSyncError):
        check_probe([[0.0, float("nan")]], [0.0, 1.0], 1e9)


def test_engines_without_a_model_are_not_probed():
    assert check_probe([[], []], [0.0, 1.0], 0.0) is None


# Which way


def test_the_way_follows_from_where_the_ranks_are():
    actor = LocalGroup(Sender(), pid=1, node="a")
    assert choose_way("auto", actor, LocalGroup(Receiver(), pid=1, node="a")) == "in_process"
    assert choose_way("auto", actor, LocalGroup(Receiver(), pid=2, node="a")) == "object_store"
    assert choose_way("auto", actor, LocalGroup(Receiver(), pid=2, node="b")) == "process_group"
    assert choose_way("process_group", actor, LocalGroup(Receiver(), pid=1, node="a")) == "process_group"


def test_probe_tokens_lie_in_the_vocabulary_and_differ():
    for vocab_size in (64, 100, 49_152):
        tokens = probe_tokens(vocab_size)
        assert len(set(tokens)) == 8
        assert all(0 <= token < vocab_size for token in tokens)


# Adapters


def test_merged_adapters_are_sent_the_same_each_time_and_the_base_stays(tmp_path):
    # three syncs of an unchanged actor; nothing accumulates.
    from configs.model import LoraConfig
    from resources.engines.huggingface import HuggingFaceEngine
    from resources.models.causal_lm import prepare_model_folder
    from tests.resources.workers.tiny import MODEL, actor

    lora = actor(MODEL.model_copy(update={"lora": LoraConfig(rank=2)}))
    with torch.no_grad():
        for name, parameter in lora.module.named_parameters():
            if "lora_" in name:
                parameter.add_(0.3)
    base = {name: p.detach().clone() for name, p in lora.module.named_parameters() if "lora_" not in name}
    receiver = Receiver()
    folder = prepare_model_folder(MODEL, 0, tmp_path)
    receiver.engine = HuggingFaceEngine(str(folder), dtype="float32", slots=2)
    untouched = receiver.probe(probe_tokens(100))
    groups = LocalGroup(lora), LocalGroup(receiver, pid=9)
    probes = []
    for version in (1, 2, 3):
        assert sync(*groups, version, bucket_bytes=4000).probe_gap < 1e-5
        probes.append(receiver.probe(probe_tokens(100)))
    assert probes[0] == probes[1] == probes[2] != untouched
    after = {name: p.detach() for name, p in lora.module.named_parameters() if "lora_" not in name}
    assert all(torch.equal(base[name], after[name]) for name in base)


def test_the_probe_may_differ_by_a_share_of_the_size_of_its_log_probs():
    """2 % of 1 + 12 is 0.26, of 1 + 5 it is 0.12: a gap of 0.2 is rounding in the one, a lost weight in the other."""
    assert check_probe([[0.0, -12.0, -12.4]], [0.0, -12.0, -12.0], 0.02) == pytest.approx(0.2)
    with pytest.raises(WeightSyncError, match=r"differ by 0.2 .*allowed: 0.12\)"):
        check_probe([[0.0, -5.0, -5.4]], [0.0, -5.0, -5.0], 0.02)
