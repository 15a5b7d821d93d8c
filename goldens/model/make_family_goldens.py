#!/usr/bin/env python3
"""Small random checkpoints of every family, written by transformers, their logits in double precision, and the same
models as GGUF files with llama.cpp's names.

    pip install torch transformers gguf
    python goldens/model/make_family_goldens.py [NAME ...]

Writes `families/NAME`: `config.json`, `model.safetensors`, a `tokenizer.json` of one letter a token, `model.gguf`, and
`logits.json` with token ids and the logits of every position, rows of little-endian f32 in hexadecimal; for `dynamic`,
whose frequencies change with the length, also those of decoding token by token.
"""

import json
import pathlib
import shutil
import sys

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file

HERE = pathlib.Path(__file__).resolve().parent
VOCAB = 32
D = 16
BASE = dict(
    vocab_size=VOCAB,
    hidden_size=D,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
ROPE = dict(rope_type="default", rope_theta=100.0)
MOE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=10, norm_topk_prob=True)
LATENT = dict(
    kv_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, num_key_value_heads=4,
    n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=10, n_shared_experts=2,
    first_k_dense_replace=1, n_group=4, topk_group=2, routed_scaling_factor=1.5,
)


def config(kind, **changes):
    values = {**BASE, "rope_parameters": dict(ROPE), **changes}
    return kind(**{k: v for k, v in values.items() if v is not None})


T = transformers
FAMILIES = {
    "phi3": lambda: T.Phi3ForCausalLM(config(
        T.Phi3Config, head_dim=None, hidden_size=32, sliding_window=7, rope_parameters={**ROPE, "partial_rotary_factor": 0.5})),
    "olmo2": lambda: T.Olmo2ForCausalLM(config(T.Olmo2Config, head_dim=4)),
    "granite": lambda: T.GraniteForCausalLM(config(
        T.GraniteConfig, head_dim=4, embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.2,
        logits_scaling=2.5, tie_word_embeddings=True)),
    "smollm3": lambda: T.SmolLM3ForCausalLM(config(T.SmolLM3Config, head_dim=4, num_hidden_layers=4)),
    "glm4": lambda: T.Glm4ForCausalLM(config(
        T.Glm4Config, head_dim=8, attention_bias=True, rope_parameters={**ROPE, "partial_rotary_factor": 0.5})),
    "mixtral": lambda: T.MixtralForCausalLM(config(
        T.MixtralConfig, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "qwen2_moe": lambda: T.Qwen2MoeForCausalLM(config(
        T.Qwen2MoeConfig, head_dim=4, shared_expert_intermediate_size=14, **{**MOE, "norm_topk_prob": False})),
    "qwen3_moe": lambda: T.Qwen3MoeForCausalLM(config(T.Qwen3MoeConfig, **MOE)),
    "deepseek_v2": lambda: T.DeepseekV2ForCausalLM(config(
        T.DeepseekV2Config, head_dim=None, q_lora_rank=12, topk_method="group_limited_greedy", **LATENT)),
    "deepseek_v3": lambda: T.DeepseekV3ForCausalLM(config(T.DeepseekV3Config, head_dim=None, q_lora_rank=12, **LATENT)),
    # Past the context they were made for.
    "dynamic": lambda: T.LlamaForCausalLM(config(T.LlamaConfig, max_position_embeddings=12, rope_parameters={
        "rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0})),
    "yarn": lambda: T.LlamaForCausalLM(config(T.LlamaConfig, max_position_embeddings=12, rope_parameters={
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": 6})),
}
# Where llama.cpp rotates neighbouring pairs, it writes the rows of queries and keys in that order.
PERMUTED = {"granite", "smollm3", "mixtral"}
ARCH = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
NO_GGUF = {"deepseek_v2", "deepseek_v3", "dynamic", "yarn"}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
OWN = {
    "olmo2": {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
    "glm4": {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
}
EXPERT = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def permuted(weight, heads):
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_gguf(name, c, tensors, path):
    arch = ARCH.get(name, name)
    w = gguf.GGUFWriter(str(path), arch)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_key_length(head_dim)
    w.add_value_length(head_dim)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    w.add_rope_dimension_count(int(head_dim * c.rope_parameters.get("partial_rotary_factor", 1.0)))
    w.add_vocab_size(c.vocab_size)
    if getattr(c, "sliding_window", None) and name == "phi3":
        w.add_sliding_window(c.sliding_window)
    if name == "granite":
        w.add_embedding_scale(c.embedding_multiplier)
        w.add_residual_scale(c.residual_multiplier)
        w.add_attention_scale(c.attention_multiplier)
        w.add_logit_scale(c.logits_scaling)
    if name in ("mixtral", "qwen2_moe", "qwen3_moe"):
        w.add_expert_count(c.num_local_experts if name == "mixtral" else c.num_experts)
        w.add_expert_used_count(c.num_experts_per_tok)
        if name != "mixtral":
            w.add_expert_feed_forward_length(c.moe_intermediate_size)
        if name == "qwen2_moe":
            w.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
    letters = [chr(ord("A") + i) for i in range(VOCAB)]
    w.add_tokenizer_model("llama")
    w.add_token_list(letters)
    w.add_token_scores([0.0] * VOCAB)
    w.add_token_types([1] * VOCAB)
    stacks = {}
    for key, value in tensors.items():
        value = value.to(torch.float32).numpy()
        stem, kind = key.rsplit(".", 1)
        parts = stem.split(".")
        layer = ""
        if stem.startswith("model.layers."):
            layer, stem = f"blk.{parts[2]}.", ".".join(parts[3:])
        if ".experts." in stem:
            e, part = stem.split(".")[-2:]
            stacks.setdefault(f"{layer}ffn_{EXPERT[part]}_exps.weight", {})[int(e)] = value
            continue
        if name in PERMUTED and stem.endswith(("q_proj", "k_proj")):
            heads = c.num_attention_heads if stem.endswith("q_proj") else c.num_key_value_heads
            value = permuted(value, heads)
        new = OWN.get(name, {}).get(stem) or NAMES[stem]
        if new == "ffn_gate_inp_shexp":
            value = value.reshape(-1)
        w.add_tensor(f"{layer}{new}.{kind}", np.ascontiguousarray(value))
    for key, experts in stacks.items():
        w.add_tensor(key, np.stack([experts[e] for e in sorted(experts)]))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def write(name):
    generator = torch.Generator().manual_seed(11)
    model = FAMILIES[name]().eval()
    model.config._experts_implementation = "eager"
    with torch.no_grad():
        for key, value in list(model.named_parameters()) + list(model.named_buffers()):
            if "inv_freq" in key:
                continue
            noise = torch.randn(value.shape, generator=generator)
            if value.dim() == 1 and "norm" in key:
                value.copy_(1.0 + 0.2 * noise)
            elif value.dim() == 1:
                value.copy_(0.3 * noise)
            else:
                value.copy_(1.5 * noise / value.shape[-1] ** 0.5)
    folder = HERE / "families" / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)
    letters = {chr(ord("A") + i): i for i in range(VOCAB)}
    words = dict(type="WordLevel", vocab=letters, unk_token="A")
    tokenizer = dict(version="1.0", added_tokens=[], normalizer=None, pre_tokenizer=None, post_processor=None)
    tokenizer.update(decoder=None, model=words)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer) + "\n")
    if name not in NO_GGUF:
        write_gguf(name, model.config, load_file(folder / "model.safetensors"), folder / "model.gguf")

    tokens = torch.randint(VOCAB, (20,), generator=generator).tolist()
    with torch.no_grad():
        logits = model.double()(torch.tensor([tokens])).logits[0]
    golden = dict(
        made_with=f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}",
        tokens=tokens,
        logits=[row.to(torch.float32).numpy().astype("<f4").tobytes().hex() for row in logits],
    )
    if name == "dynamic":
        model = FAMILIES[name]().eval()
        model.load_state_dict(load_file(folder / "model.safetensors"))
        model, rows, cache = model.double(), [], None
        with torch.no_grad():
            for token in tokens:
                step = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
                rows.append(step.logits[0, 0])
                cache = step.past_key_values
        golden["decoded"] = [r.to(torch.float32).numpy().astype("<f4").tobytes().hex() for r in rows]
    (folder / "logits.json").write_text(json.dumps(golden, indent=1) + "\n")
    print(name, sum(p.numel() for p in model.parameters()), "parameters, largest logit", logits.abs().max().item())


for family in sys.argv[1:] or FAMILIES:
    write(family)
