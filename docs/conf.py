"""Sphinx configuration; after the pages of docs/, those of the benchmark history are written beside them."""

import sys
from pathlib import Path

from sphinx.errors import ExtensionError

sys.path.insert(0, str(Path(__file__).parent))

import history
import offline

import numba_flash

project = "numba_flash"
author = "the numba_flash developers"
release = numba_flash.__version__
extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "mathml"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_math_renderer = "mathml"
html_theme = "pydata_sphinx_theme"
html_title = project
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_sidebars = {"*": []}  # a list of neighbours where there are some: in howto/
html_theme_options = {"header_links_before_dropdown": 10, "show_prev_next": False}
html_show_sourcelink = False
highlight_options = {"pycon": {"stripnl": True}}  # without the empty line that ends a doctest
exclude_patterns = ["_build", "examples"]
numpydoc_show_class_members = False
autodoc_typehints = "none"  # the types stand in the docstrings


def finish(app, exception):
    """Write the pages of the benchmark history where there is one, and see that no page loads anything from elsewhere."""
    if exception is not None or app.builder.format != "html":
        return
    if (Path(__file__).parents[1] / ".git").exists():
        try:
            history.write_pages(Path(app.outdir) / "benchmarks")
        except RuntimeError as error:
            raise ExtensionError(str(error)) from error
    if found := offline.loaded_from_elsewhere(Path(app.outdir)):
        raise ExtensionError("these pages load something from elsewhere:\n" + "\n".join(found))


def setup(app):
    app.connect("build-finished", finish)
