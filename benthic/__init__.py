"""Benthic: an inference engine for the DeepSeek-V4.1-Flash architecture, on any CPU and on Hopper GPUs."""

from typing import TYPE_CHECKING, Any

from benthic.types import CacheOptions, SamplingParams

if TYPE_CHECKING:
    from benthic.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "CacheOptions", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":  # loaded on first use, so that `import benthic` needs no torch
        from benthic.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'benthic' has no attribute {name!r}")
