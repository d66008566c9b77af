"""How far a command is, on standard error: a bar by rich where that is a terminal, else a line for each step.

Standard output belongs to the results.
"""

import sys
from collections.abc import Callable, Iterable


def track(items: Iterable, total: int, label: Callable[[object], str]):
    """Iterate over `items` and show, of `total`, which one the caller is at.

    Parameters
    ----------
    items : iterable
        Passed on, one by one.
    total : int
        How many there are.
    label : callable
        ``label(item)``, a line of text.
    """
    bar = _bar()
    if bar is None:
        for i, item in enumerate(items, 1):
            print(f"[{i}/{total}] {label(item)}", file=sys.stderr, flush=True)
            yield item
        return
    with bar:
        task = bar.add_task("", total=total)
        for item in items:
            bar.update(task, description=label(item))
            yield item
            bar.advance(task)


def _bar():
    """A bar that leaves standard output alone; None if standard error is no terminal, or rich (``numba_flash[cli]``) is not installed."""
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    # prints go above the bar only if both are on the terminal: rich would send them to standard error
    return Progress(*columns, console=Console(stderr=True), redirect_stdout=sys.stdout.isatty())
