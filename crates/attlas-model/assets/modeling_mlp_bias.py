"""DeepSeek-V3 whose dense feed-forward layers have biases, which the class of transformers has no setting for."""

from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DeepseekV3Model


class DeepseekV3MlpBiasConfig(DeepseekV3Config):
    model_type = "deepseek_v3_mlp_bias"


def add_biases(layers):
    for layer in layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            map = getattr(layer.mlp, name)
            setattr(layer.mlp, name, nn.Linear(map.in_features, map.out_features, bias=True))


class DeepseekV3MlpBiasModel(DeepseekV3Model):
    config_class = DeepseekV3MlpBiasConfig

    def __init__(self, config):
        super().__init__(config)
        add_biases(self.layers)
        self.post_init()


class DeepseekV3MlpBiasForCausalLM(DeepseekV3ForCausalLM):
    config_class = DeepseekV3MlpBiasConfig

    def __init__(self, config):
        super().__init__(config)
        add_biases(self.model.layers)
        self.post_init()
