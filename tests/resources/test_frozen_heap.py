"""Garbage collections pass over what a process had loaded when its work began."""

import gc
import weakref

from resources.frozen_heap import frozen_heap


class Loop:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.me = self


def test_what_was_there_before_is_passed_over_inside_the_block_alone_and_what_came_since_is_not():
    gc.collect()
    early, late = Loop(), None
    early_lives = weakref.ref(early)
    with frozen_heap():
        assert gc.get_freeze_count() > 1000
        late = Loop()
        late_lives = weakref.ref(late)
        del early, late
        gc.collect()
        assert early_lives() is not None
        assert late_lives() is None
    gc.collect()
    assert early_lives() is None
    assert gc.get_freeze_count() == 0
