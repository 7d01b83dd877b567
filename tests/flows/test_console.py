"""What a person sees on a terminal while a run goes on."""

from rich.console import Console

from flows.console import RunPanel
from tasks.watchers import Progress


def shown(panel: RunPanel) -> str:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(panel.render())
    return capture.get()


def test_the_time_left_of_a_resumed_run_is_told_from_its_own_iterations():
    panel = RunPanel("resumed")
    panel.add(Progress(iteration=900, iterations=1000, metrics={"time/iteration": 10.0}))
    assert "iteration 901 of 1000, about 990 s left" in shown(panel)
    panel.add(Progress(iteration=901, iterations=1000, metrics={"time/iteration": 20.0}))
    assert "iteration 902 of 1000, about 1470 s left" in shown(panel)
