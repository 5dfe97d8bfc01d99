"""HuggingFace-native models under the official parameter and config names; importing it fills the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from satlens.hf.config import GATES, SATFormerConfig, SharedConfig, TransformerConfig
from satlens.hf.decoder import DecoderForCausalLM
from satlens.hf.denseformer import DenseFormerForCausalLM
from satlens.hf.hyperconnections import HyperConnectionsForCausalLM
from satlens.hf.muddformer import MUDDFormerForCausalLM
from satlens.hf.resformer import ResFormerForCausalLM
from satlens.hf.satformer import SATFormerForCausalLM
from satlens.hf.transformer import TransformerForCausalLM

MODELS: dict[str, type[DecoderForCausalLM]] = {
    model.config_class.model_type: model
    for model in (
        TransformerForCausalLM,
        SATFormerForCausalLM,
        ResFormerForCausalLM,
        DenseFormerForCausalLM,
        MUDDFormerForCausalLM,
        HyperConnectionsForCausalLM,
    )
}
"""Model type, as config.json says it, to class."""

for _model in MODELS.values():
    AutoConfig.register(_model.config_class.model_type, _model.config_class, exist_ok=True)
    AutoModel.register(_model.config_class, _model.stack, exist_ok=True)
    AutoModelForCausalLM.register(_model.config_class, _model, exist_ok=True)

__all__ = ["GATES", "MODELS", "DecoderForCausalLM", "SATFormerConfig", "SharedConfig", "TransformerConfig"]
