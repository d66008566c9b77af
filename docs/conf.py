"""Sphinx configuration; after the pages of docs/, those of the benchmark history are written beside them."""

import os
import subprocess
import sys
from pathlib import Path

from sphinx.errors import ExtensionError

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
autodoc_typehints = "none"  # the types stand in the docstrings


def publish_benchmarks(app, exception):
    """The history in asv_bench/results as pages, in ``benchmarks/`` of the output: data by asv, the page by asv-tachyon. Needs git."""
    root, pages = Path(__file__).parents[1], Path(app.outdir) / "benchmarks"
    if exception is not None or app.builder.format != "html" or not (root / ".git").exists():
        return
    configuration = root / "asv_bench" / "asv.conf.json"
    for command in (["asv", "publish", "--config", configuration, "--html-dir", pages], ["asv_tachyon", "install", "--no-backup", pages]):
        run = subprocess.run([sys.executable, "-m", *command], env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True)
        if run.returncode:
            raise ExtensionError(f"{command[0]} failed (numba_flash[docs] installs it):\n{run.stdout}{run.stderr}")


def setup(app):
    app.connect("build-finished", publish_benchmarks)
