"""Frames of panels."""

from rlbench.views.panel import Panel


def frame(panel: Panel) -> Panel:
    "One more frame, without an error."
    panel.frame()
    assert not getattr(panel, "trace", ""), panel.trace
    return panel
