"""The panel in front ends other than JupyterLab: only widgets that every widget manager has,
and without widgets a picture that is renewed."""

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from ipywidgets.embed import dependency_state, embed_data

from rlbench.views.panel import Panel
from rlbench.workbench.handle import example_run

EVERYWHERE = {"@jupyter-widgets/base", "@jupyter-widgets/controls", "@jupyter-widgets/output"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "The folder of a run without a model, which has ended."
    return example_run(tmp_path_factory.mktemp("runs")).folder


@pytest.fixture
def panel(folder):
    "Its panel, with all controls."
    return Panel(folder, "me")


@pytest.fixture
def published(monkeypatch):
    "What is displayed, as messages to a front end."
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    monkeypatch.setattr(shell, "display_pub", CapturingDisplayPublisher())
    yield shell.display_pub.outputs
    InteractiveShell.clear_instance()


def test_every_widget_is_of_a_module_that_all_front_ends_have(panel):
    state = dependency_state([panel.widget])
    modules = {widget["model_module"] for widget in state.values()}
    views = {widget["state"].get("_view_module") for widget in state.values()} - {None}
    assert modules <= EVERYWHERE and views <= EVERYWHERE
    assert "FloatSliderModel" in {widget["model_name"] for widget in state.values()}


def test_the_state_of_the_widgets_can_stand_in_a_page_of_its_own(panel):
    "Whole: each child that a widget names is in the state, so a page without a kernel can draw it."
    state = embed_data([panel.widget])["manager_state"]["state"]
    named = {
        child.removeprefix("IPY_MODEL_") for widget in state.values() for child in widget["state"].get("children", ())
    }
    assert len(named) > 40 and named <= state.keys()


def test_a_front_end_without_widgets_gets_a_picture_that_is_renewed(panel, published):
    panel._ipython_display_()
    panel.close()
    panel.thread.join(20)
    widget, picture = published[:2]
    assert "application/vnd.jupyter.widget-view+json" in widget["data"] and "text/plain" in widget["data"]
    assert "<svg" in picture["data"]["text/html"] and "<script" not in picture["data"]["text/html"]
    place = picture["transient"]["display_id"]
    before = len(published)
    panel.pictures.update(panel.snapshot, panel.light)
    (renewed,) = published[before:]
    assert renewed["update"] and renewed["transient"]["display_id"] == place
    assert "a new picture comes every 15 s" in renewed["data"]["text/html"]


def test_the_picture_hides_only_where_widgets_are_drawn(panel):
    "The rule that hides it comes with a widget, so it is not there in a front end that draws none."
    assert ".rl-still { display: none; }" in panel.parts["style"].value.replace("\n", " ")
