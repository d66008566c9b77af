"""Sphinx configuration."""

import numba_flash

project = "numba_flash"
author = "the numba_flash developers"
release = numba_flash.__version__
extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.mathjax"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_theme = "pydata_sphinx_theme"
html_show_sourcelink = False
exclude_patterns = ["_build", "examples"]
numpydoc_show_class_members = False
