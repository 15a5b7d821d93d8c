"""Tiny random models of many architectures, made from their configs."""

import torch
import transformers

VOCAB = 97
BASE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

# Architecture: its differences from the base.
CAUSAL = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 8},
    "gemma2": {"head_dim": 8, "attn_logit_softcapping": None, "sliding_window": 512},
    "gemma3_text": {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {
        "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "phi3": {},
    "olmo2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "deepseek_v3": {
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "moe_intermediate_size": 16, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 12, "first_k_dense_replace": 1,
    },
}  # fmt: skip


# Experts are computed in single precision, and so are masks of eager attention, which overflow in double precision.
SINGLE = ("gemma2", "gpt_oss", "deepseek_v3")
PEER = {"gemma2": "eager", "gpt_oss": "eager"}


def peer(name):
    """The reference attention of a model: sdpa, if it has it."""
    return PEER.get(name, "sdpa")


def causal(name, seed=0, **changes):
    """A causal model, in double precision if it supports it: differences are then those of the algorithm."""
    torch.manual_seed(seed)
    settings = {**BASE, **CAUSAL.get(name, {}), **changes}
    config = transformers.AutoConfig.for_model(name, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model = model if name in SINGLE else model.double()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(2 if name in SINGLE else 3)
        for module in model.modules():
            if isinstance(getattr(module, "sinks", None), torch.nn.Parameter):
                module.sinks.normal_()
    return model


def ids(batch, n, seed=1):
    return torch.randint(3, VOCAB, (batch, n), generator=torch.Generator().manual_seed(seed))
