"""matplotlib, drawing into files, for whoever has it. No torch."""

from importlib import import_module
from typing import Any

from benthic.errors import MissingDependency


def pyplot() -> Any:
    """matplotlib.pyplot, without a display. Raises MissingDependency."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependency("matplotlib", "train") from error
    matplotlib.use("Agg")
    return import_module("matplotlib.pyplot")
