"""The plain Transformer behind a bridge: the shared decoder and nothing else."""

from typing import Any

from satlens.architectures.parts import DecoderAdapter, decoder_names

MODEL_TYPE = "transformer"
ARCHITECTURE = "TransformerForCausalLM"


class Adapter(DecoderAdapter):
    """No parts beyond the shared decoder."""


def names(config: Any) -> dict[str, dict[int, str]]:
    """Role -> layer -> hook name."""
    return decoder_names(config)


def gate_kind(config: Any) -> str | None:
    """A Transformer has no gate."""
    return None
