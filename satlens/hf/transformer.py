"""The plain Transformer: the twin every SATFormer is compared with."""

from satlens.hf.config import TransformerConfig
from satlens.hf.decoder import DecoderForCausalLM, DecoderModel


class TransformerModel(DecoderModel):
    """The stack without a head."""

    config_class = TransformerConfig


class TransformerForCausalLM(DecoderForCausalLM):
    """The stack with its head."""

    config_class = TransformerConfig
    stack = TransformerModel
