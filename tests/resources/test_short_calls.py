"""Which methods of a process are called by a method of the actor's own."""

from resources.dispatch import Dispatch, dispatch, marked_methods
from resources.short_calls import SHORT_CALLS, short_keys, short_name
from resources.worker_process import WorkerProcess


class Mixed:
    @dispatch(Dispatch.BROADCAST)
    def plain(self) -> None: ...

    @dispatch(Dispatch.BROADCAST, bulk=True)
    def bulk(self) -> None: ...

    @dispatch(Dispatch.BROADCAST)
    def given(self, rows: int) -> None: ...

    @dispatch(Dispatch.RANK_ZERO)
    def first_alone(self) -> None: ...


class Overlapping:
    @dispatch(Dispatch.BROADCAST)
    async def late(self) -> None: ...


MIXED = tuple(marked_methods(Mixed).values())
LATE = tuple(marked_methods(Overlapping).values())


def test_a_short_call_goes_to_every_rank_and_neither_takes_nor_stores_anything():
    assert short_keys([("actor", method) for method in MIXED]) == ["actor.plain"]


def test_a_process_with_async_methods_has_no_short_calls():
    assert short_keys([("env", method) for method in (*MIXED, *LATE)]) == []


def test_the_methods_of_fused_roles_are_numbered_in_their_order_up_to_the_last_that_has_one():
    roles = [f"role{number}" for number in range(SHORT_CALLS + 1)]
    keys = short_keys([(role, method) for role in roles for method in MIXED])
    assert keys == [f"{role}.plain" for role in roles[:-1]]
    assert all(hasattr(WorkerProcess, short_name(number)) for number in range(len(keys)))
