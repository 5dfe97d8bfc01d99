"""satlens opens SATFormer checkpoints, measures what their gates do, and draws it."""

from typing import Any

__all__ = ["load_bridge", "load_model"]


def __getattr__(name: str) -> Any:
    """``load_model`` and ``load_bridge``, looked up on first use: importing satlens must not import torch."""
    if name in __all__:
        from satlens import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module 'satlens' has no attribute {name!r}")
