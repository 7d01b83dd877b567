"""Servers over several engines: routing, deaths, stuck requests, aborts, and weights that change between two tokens."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import pytest
import torch

from configs.rollout import RolloutConfig, ScriptedConfig
from resources.engines.base import FinishReason, GenerationRequest, Sampling
from resources.engines.scripted import ScriptedEngine
from resources.prefix_router import PrefixRouter
from resources.replicas import LocalReplica, ReplicaLost
from resources.request_serving import Orders, Report, ServesRequests
from resources.requests_on_the_way import Completion, RequestLostError
from resources.rollout_servers import QUIET_CALLS, RolloutServers
from resources.served_engine import ServedEngine

SAMPLING = Sampling(stop_token_ids=(2,))


class ScriptedReplica(LocalReplica):
    """A scripted engine that can be killed between two calls, as a process can."""

    def __init__(self, name: str, seconds_per_token: float = 0.0, length: int = 20, slots: int = 64) -> None:
        script = ScriptedConfig(
            responses={"mode": "random", "min_length": length, "max_length": length, "by_token": True},
            seconds_per_token=seconds_per_token,
        )
        worker = ServesRequests()
        worker.engine = ScriptedEngine(
            RolloutConfig(engine="scripted", scripted=script, max_running_sequences=slots), vocab_size=100
        )
        super().__init__(name, worker)
        self.is_dead = False
        self.answered: list[int] = []

    def send(self, orders: Orders) -> Callable[[], Report]:
        if self.is_dead:
            raise ReplicaLost(f"replica {self.name} was killed")
        wait_for = super().send(orders)

        def report() -> Report:
            if self.is_dead:
                raise ReplicaLost(f"replica {self.name} was killed")
            return wait_for()

        return report


def request(row_id: int, prompt: tuple[int, ...] = (5, 6, 7), max_tokens: int = 64) -> GenerationRequest:
    return GenerationRequest(row_id=row_id, prompt_ids=prompt, seed=1000 + row_id, max_tokens=max_tokens)


def serve(*replicas: Any, **options: Any) -> RolloutServers:
    return RolloutServers(replicas, **{"deadline_seconds": 30.0, **options})


def test_every_request_is_answered_in_order_with_the_noise_of_its_own_seed() -> None:
    servers = serve(ScriptedReplica("a"), ScriptedReplica("b"))
    alone = ScriptedReplica("c").worker.engine.generate([request(n) for n in range(40)], SAMPLING)
    answers = servers.generate([request(n) for n in range(40)], SAMPLING)
    servers.close()
    assert [answer.row_id for answer in answers] == list(range(40))
    assert [answer.token_ids for answer in answers] == [output.token_ids for output in alone]
    assert {answer.replica for answer in answers} == {"a", "b"}


def test_servers_that_wait_for_long_responses_are_heard_of_meanwhile() -> None:
    servers = serve(ScriptedReplica("a", seconds_per_token=0.05, length=64))
    asked = time.monotonic()
    sampling = threading.Thread(target=servers.generate, args=([request(0)], SAMPLING))
    sampling.start()
    while servers.answered < asked and sampling.is_alive():
        time.sleep(0.01)
    was_under_way = sampling.is_alive()
    sampling.join()
    servers.close()
    assert was_under_way


@pytest.mark.parametrize(("least_steps", "finished", "steps"), [(1, [0], 2), (5, [0, 1], 5), (100, [0, 1, 2], 6)])
def test_a_call_ends_with_a_finished_response_but_not_before_its_least_steps(
    least_steps: int, finished: list[int], steps: int
) -> None:
    worker = ScriptedReplica("a", seconds_per_token=0.01).worker
    add = tuple((request(n, max_tokens=2 * (n + 1)), SAMPLING) for n in range(3))  # of 2, 4 and 6 tokens
    report = worker.serve(Orders(add=add, steps=100, least_steps=least_steps))
    assert ([output.row_id for output in report.finished], report.steps) == (finished, steps)


def test_calls_are_whole_once_nobody_asks_again() -> None:
    """The first calls tell of each response as it ends; later ones go on to their end, until a new request comes."""

    class Recording(ScriptedReplica):
        def send(self, orders: Orders) -> Callable[[], Report]:
            sent.append(orders)
            return super().send(orders)

    sent: list[Orders] = []
    servers = serve(Recording("a", seconds_per_token=0.02, length=64))
    first = [servers.submit(request(n), SAMPLING) for n in range(2)]
    while len(sent) < QUIET_CALLS + 3:
        time.sleep(0.01)
    servers.submit(request(9), SAMPLING)
    wait(first, timeout=30)
    servers.close()
    asked = [index for index, orders in enumerate(sent) if orders.add]
    begun, again = asked[-2], asked[-1]
    assert [orders.least_steps for orders in sent[begun : begun + QUIET_CALLS]] == [1] * QUIET_CALLS
    assert all(orders.least_steps == orders.steps for orders in sent[begun + QUIET_CALLS : again])
    assert again > begun + QUIET_CALLS
    assert sent[again].least_steps == 1


def test_single_requests_join_while_others_decode() -> None:
    servers = serve(ScriptedReplica("a", seconds_per_token=0.02))
    first = servers.submit(request(0), SAMPLING)
    time.sleep(0.1)
    second = servers.submit(request(1), SAMPLING)
    answers = [first.result(20), second.result(20)]
    servers.close()
    # One after the other would take 0.8 s; the second waits for a step, not for the first.
    assert answers[1].seconds < 1.9 * answers[0].seconds


def test_a_killed_replica_loses_no_request_and_each_is_answered_once() -> None:
    replicas = [ScriptedReplica(name, seconds_per_token=0.02) for name in "abc"]
    servers = serve(*replicas)
    heard: list[int] = []
    futures = [servers.submit(request(n), SAMPLING) for n in range(30)]
    for future in futures:
        future.add_done_callback(lambda done: heard.append(done.result().row_id))
    time.sleep(0.1)
    replicas[1].is_dead = True
    answers = [future.result(30) for future in futures]
    servers.close()
    assert sorted(heard) == list(range(30))
    assert {answer.replica for answer in answers} == {"a", "c"}
    moved = [answer for answer in answers if answer.dispatches == 2]
    assert len(moved) == servers.redispatches == 10
    assert "was killed" in servers.lost["b"]


def test_the_answer_after_a_death_is_the_one_there_would_have_been() -> None:
    replicas = [ScriptedReplica(name, seconds_per_token=0.02) for name in "ab"]
    alone = ScriptedReplica("c").worker.engine.generate([request(n) for n in range(4)], SAMPLING)
    servers = serve(*replicas)
    futures = [servers.submit(request(n), SAMPLING) for n in range(4)]
    time.sleep(0.1)
    replicas[0].is_dead = True
    answers = [future.result(30) for future in futures]
    servers.close()
    assert [answer.token_ids for answer in answers] == [output.token_ids for output in alone]


def test_a_request_that_kills_replicas_is_given_up_and_named() -> None:
    replicas = [ScriptedReplica(name, seconds_per_token=0.05) for name in "ab"]
    servers = serve(*replicas, max_redispatches=0)
    future = servers.submit(request(7), SAMPLING)
    time.sleep(0.1)
    for replica in replicas:
        replica.is_dead = True
    with pytest.raises(RequestLostError, match="request 7 was sent 1 times and lost each time, last because replica"):
        future.result(20)
    with pytest.raises(RequestLostError, match=r"no replica is left|was sent"):
        servers.submit(request(8), SAMPLING).result(20)
    servers.close()


@pytest.mark.parametrize("error", [ValueError("no block 7"), AssertionError("7 blocks"), RuntimeError("gone")])
def test_an_engine_that_raises_anything_is_lost_with_its_cause_and_keeps_nobody_waiting(error: Exception) -> None:
    broken, whole = ScriptedReplica("a"), ScriptedReplica("b")
    servers = serve(broken, whole)

    def step() -> list[Any]:
        raise error

    broken.worker.engine.step = step  # pyright: ignore[reportAttributeAccessIssue]
    assert {answer.replica for answer in servers.generate([request(n) for n in range(4)], SAMPLING)} == {"b"}
    assert servers.lost == {"a": f"replica a: {type(error).__name__}: {error}"}
    whole.worker.engine.step = step  # pyright: ignore[reportAttributeAccessIssue]
    for row in (8, 9):
        with pytest.raises(RequestLostError, match=f"no replica is left: replica a: {type(error).__name__}"):
            servers.submit(request(row), SAMPLING).result(20)
    servers.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_replica_that_cannot_be_asked_is_lost_whatever_it_raises() -> None:
    class Closed(ScriptedReplica):
        def send(self, orders: Orders) -> Callable[[], Report]:
            raise OSError("the pipe is closed")

    servers = serve(Closed("a"))
    with pytest.raises(RequestLostError, match="no replica is left: replica a: OSError: the pipe is closed"):
        servers.submit(request(1), SAMPLING).result(20)
    servers.close()


def test_a_replica_that_came_back_works_again() -> None:
    dead = ScriptedReplica("a")
    dead.is_dead = True
    servers = serve(dead, ScriptedReplica("b"))
    servers.generate([request(n) for n in range(4)], SAMPLING)
    servers.replace(0, ScriptedReplica("a2"))
    answers = servers.generate([request(n) for n in range(10, 20)], SAMPLING)
    servers.close()
    assert {answer.replica for answer in answers} == {"a2", "b"}


def test_a_request_that_no_engine_can_answer_fails_alone() -> None:
    class Picky(ServesRequests):
        def __init__(self) -> None:
            self.engine = ScriptedReplica("x").worker.engine
            self.add = self.engine.add_request
            self.engine.add_request = self.refuse  # pyright: ignore[reportAttributeAccessIssue]

        def refuse(self, one: GenerationRequest, sampling: Sampling) -> None:
            if len(one.prompt_ids) > 5:
                raise ValueError(f"needs {len(one.prompt_ids)} tokens; the engine was started for 5")
            self.add(one, sampling)

    servers = serve(LocalReplica("a", Picky()))
    bad = servers.submit(request(1, tuple(range(9))), SAMPLING)
    good = servers.submit(request(2), SAMPLING)
    with pytest.raises(ValueError, match="needs 9 tokens; the engine was started for 5"):
        bad.result(20)
    assert good.result(20).finish_reason is FinishReason.STOP
    servers.close()


def test_an_aborted_request_is_answered_with_what_it_has() -> None:
    servers = serve(ScriptedReplica("a", seconds_per_token=0.02, length=100))
    futures = [servers.submit(request(n, max_tokens=200), SAMPLING) for n in range(3)]
    time.sleep(0.3)
    servers.abort([1])
    answer = futures[1].result(20)
    assert answer.finish_reason is FinishReason.ABORT
    assert 0 < len(answer.token_ids) < 100
    servers.abort()
    assert {future.result(20).finish_reason for future in futures} == {FinishReason.ABORT}
    servers.close()


def test_a_stuck_request_goes_to_another_replica() -> None:
    slow, quick = ScriptedReplica("slow", seconds_per_token=5.0), ScriptedReplica("quick")
    for replica in (slow, quick):
        replica.worker.engine.script = replica.worker.engine.script
    servers = serve(slow, quick, stuck_seconds=0.3, deadline_seconds=60.0)
    slow.worker.engine.step = lambda: time.sleep(0.05) or []  # pyright: ignore[reportAttributeAccessIssue]
    answers = servers.generate([request(n) for n in range(4)], SAMPLING)
    servers.close()
    assert {answer.replica for answer in answers} == {"quick"}
    assert sorted(answer.dispatches for answer in answers) == [1, 1, 2, 2]


def test_a_request_past_its_deadline_fails_with_the_setting_to_change() -> None:
    replica = ScriptedReplica("a")
    replica.worker.engine.step = lambda: time.sleep(0.02) or []  # pyright: ignore[reportAttributeAccessIssue]
    servers = serve(replica, deadline_seconds=0.3)
    with pytest.raises(RequestLostError, match=r"no answer within 0.3 s \(rollout.servers.request_deadline_seconds\)"):
        servers.submit(request(1), SAMPLING).result(20)
    servers.close()


def test_a_request_past_its_deadline_is_dropped_for_good_and_not_kept_for_the_next_weights() -> None:
    replica = ScriptedReplica("a", seconds_per_token=0.02, length=60)
    servers = serve(replica, deadline_seconds=0.3)
    futures = [servers.submit(request(n), SAMPLING) for n in range(3)]
    assert {type(future.exception(20)) for future in futures} == {RequestLostError}
    end = time.monotonic() + 20.0
    while servers.loads["a"] and time.monotonic() < end:
        time.sleep(0.01)
    assert (servers.loads, servers._parked) == ({"a": 0}, [])
    servers.close()


def test_a_row_past_its_deadline_comes_back_aborted_without_tokens_or_versions() -> None:
    replica = ScriptedReplica("a")
    replica.worker.engine.step = lambda: time.sleep(0.02) or []  # pyright: ignore[reportAttributeAccessIssue]
    engine = ServedEngine(serve(replica, deadline_seconds=0.3))
    [output] = engine.generate([request(1)], SAMPLING)
    assert (output.finish_reason, output.token_ids) == (FinishReason.ABORT, ())
    assert engine.token_versions == {1: []}
    assert "no answer within" in engine.lost[1]
    engine.shutdown()


def new_weights(replica: ScriptedReplica, version: int) -> None:
    engine = replica.worker.engine
    engine.begin_update()
    engine.load_weights([("w", torch.zeros(1))])
    engine.finish_update(version, ["w"])


def test_a_weight_update_under_load_loses_no_request_and_tags_every_token() -> None:
    replicas = [ScriptedReplica(name, seconds_per_token=0.02, length=30) for name in "ab"]
    servers = serve(*replicas)
    futures = [servers.submit(request(n), SAMPLING) for n in range(12)]
    time.sleep(0.3)
    with servers.paused():
        assert sum(servers.loads.values()) == 0
        kept = {pending.request.row_id: list(pending.ids) for pending in servers._parked}
        for replica in replicas:
            new_weights(replica, 1)
    answers = [future.result(30) for future in futures]
    servers.close()
    assert len(kept) == 12
    for answer in answers:
        before = kept[answer.row_id]
        assert len(before) > 0
        assert list(answer.token_ids[: len(before)]) == before  # not sampled again
        assert answer.versions == (0,) * len(before) + (1,) * (len(answer.token_ids) - len(before))
        assert len(answer.log_probs) == len(answer.token_ids)
        assert answer.dispatches == 1


def test_requests_that_come_during_an_update_wait_for_the_new_weights() -> None:
    replica = ScriptedReplica("a")
    servers = serve(replica)
    servers.pause()
    future = servers.submit(request(0), SAMPLING)
    assert not wait([future], timeout=0.2).done
    new_weights(replica, 4)
    servers.resume()
    assert set(future.result(20).versions) == {4}
    servers.close()


def test_closing_fails_what_is_open_and_refuses_what_comes() -> None:
    servers = serve(ScriptedReplica("a", seconds_per_token=1.0))
    future = servers.submit(request(0), SAMPLING)
    servers.close()
    with pytest.raises(RequestLostError, match="closed"):
        future.result(5)
    with pytest.raises(RequestLostError, match="closed"):
        servers.submit(request(1), SAMPLING)


def test_many_callers_at_once_get_their_own_answers() -> None:
    servers = serve(*[ScriptedReplica(name, slots=4) for name in "ab"])
    found: dict[int, Completion] = {}

    def call(first: int) -> None:
        for row in range(first, first + 20):
            found[row] = servers.submit(request(row), SAMPLING).result(30)

    threads = [threading.Thread(target=call, args=(first,)) for first in range(0, 160, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    servers.close()
    assert {row: answer.row_id for row, answer in found.items()} == {row: row for row in range(160)}


def test_a_longer_conversation_goes_where_its_beginning_is_cached() -> None:
    router = PrefixRouter()
    first, second = list(range(40)), list(range(100, 140))
    assert router.route(first, {0: 0, 1: 0}) == 0
    assert router.route(second, {0: 1, 1: 0}) == 1
    assert router.route([*first, 1, 2, 3], {0: 3, 1: 0}) == 0
    assert router.route([*first, 1, 2, 3], {0: 9, 1: 0}) == 1  # too busy for the cache to be worth it
    router.forget(1)
    assert router.route([*second, 5], {0: 0, 1: 1}) == 0
