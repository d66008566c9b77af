"""What this installation can do: `show_config` and `selftest`."""


def show_config():
    """Print versions."""
