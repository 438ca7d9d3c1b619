"""How Sphinx builds the site: `make docs`.

tests/docs.py collects its sources in build/docs-source, this file among them."""

from configparser import ConfigParser
from pathlib import Path

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

root = Path(__file__).parents[2]  # from build/docs-source
settings = ConfigParser(delimiters=["="], interpolation=None)
settings.read(root / "settings.ini", encoding="utf-8")

project = settings["DEFAULT"]["lib_name"]
author = settings["DEFAULT"]["author"]
copyright = settings["DEFAULT"]["copyright"]
release = settings["DEFAULT"]["version"]

extensions = ["myst_nb", "sphinx_copybutton"]
root_doc = "index"
exclude_patterns = ["conf.py"]
suppress_warnings = [
    "ref.python",  # a type whose name stands in several modules gets no link
    "myst.header",  # a section of a notebook may begin below its page's title by two levels
]

nb_execution_mode = "off"  # the notebooks keep what they showed; the tests run them
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_math_renderer = "mathml"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_title = f"{project} {release}"
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}


def show_inline(writer, node):
    "A formula inside a line, as MathML: browsers draw it without a script or the network."
    writer.body.append(convert(node.astext()))
    raise SkipNode


def show_block(writer, node):
    "A formula on lines of its own."
    writer.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise SkipNode


def setup(app):
    "Called by Sphinx."
    app.add_html_math_renderer("mathml", (show_inline, None), (show_block, None))
