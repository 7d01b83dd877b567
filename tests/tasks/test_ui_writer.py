"""What only the UI needs is written beside the run, and not while the next subflow is opened."""

import threading

from tasks.ui_writer import UiWriter


def test_a_write_waits_for_its_pause_and_the_end_of_the_run_cuts_the_pause_short(prefect_session: None):
    done = threading.Event()
    with UiWriter(after_seconds=300.0) as writer:
        writer.put("curve", lambda client: done.set())
        assert not done.wait(0.5)
    assert done.is_set()
