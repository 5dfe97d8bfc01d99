"""HuggingFace-native models under the official parameter and config names; importing it fills the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from satlens.hf.config import GATES, SATFormerConfig, SharedConfig, TransformerConfig
from satlens.hf.decoder import DecoderForCausalLM
from satlens.hf.satformer import SATFormerForCausalLM, SATFormerModel
from satlens.hf.transformer import TransformerForCausalLM, TransformerModel

MODELS: dict[str, type[DecoderForCausalLM]] = {
    "transformer": TransformerForCausalLM,
    "SATFormer": SATFormerForCausalLM,
}

for _config, _stack, _model in (
    (TransformerConfig, TransformerModel, TransformerForCausalLM),
    (SATFormerConfig, SATFormerModel, SATFormerForCausalLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _stack, exist_ok=True)
    AutoModelForCausalLM.register(_config, _model, exist_ok=True)

__all__ = ["GATES", "MODELS", "DecoderForCausalLM", "SATFormerConfig", "SharedConfig", "TransformerConfig"]
