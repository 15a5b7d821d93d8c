#!/usr/bin/env python3
"""Small random checkpoints of every family, written by transformers, their logits in double precision, and the same
models as GGUF files with llama.cpp's names.

    pip install torch transformers gguf
    python goldens/model/make_family_goldens.py [NAME ...]

Writes `families/NAME`: `config.json`, `model.safetensors`, a `tokenizer.json` of one letter a token, `model.gguf`, and
`logits.json` with token ids and the logits of every position, rows of little-endian f32 in hexadecimal; for `dynamic`
and `phi3_long`, whose frequencies change with the length, also those of decoding token by token. `gpt_oss_mxfp4` is the
folder of `gpt_oss` with experts stored in four bits, as OpenAI publishes them.
"""

import json
import math
import pathlib
import shutil
import sys

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

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
# DeepSeek's own epsilon: transformers norms latents with 1e-6 whatever the config says, llama.cpp with the file's.
LATENT = dict(
    rms_norm_eps=1e-6,
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
    "gemma2": lambda: T.Gemma2ForCausalLM(config(
        T.Gemma2Config, num_hidden_layers=3, head_dim=8, sliding_window=5, query_pre_attn_scalar=6, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0, tie_word_embeddings=True)),
    "gemma3": lambda: T.Gemma3ForCausalLM(config(
        T.Gemma3TextConfig, num_hidden_layers=4, head_dim=8, sliding_window=5, query_pre_attn_scalar=6, tie_word_embeddings=True,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"], rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}})),
    "gpt_oss": lambda: T.GptOssForCausalLM(config(
        T.GptOssConfig, hidden_size=32, intermediate_size=32, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=5, rope_parameters={
            "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 16})),
    # Two sets of frequencies, one up to eight tokens and one for more.
    "phi3_long": lambda: T.Phi3ForCausalLM(config(
        T.Phi3Config, head_dim=None, hidden_size=32, original_max_position_embeddings=8, rope_parameters={
            "rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 8,
            "short_factor": [1.0, 1.1, 1.3, 1.2], "long_factor": [1.5, 2.0, 3.0, 8.0]})),
    # Past the context they were made for.
    "dynamic": lambda: T.LlamaForCausalLM(config(T.LlamaConfig, max_position_embeddings=12, rope_parameters={
        "rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0})),
    "yarn": lambda: T.LlamaForCausalLM(config(T.LlamaConfig, max_position_embeddings=12, rope_parameters={
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": 6})),
}
# Where llama.cpp rotates neighbouring pairs, it writes the rows of queries and keys in that order.
PERMUTED = {"granite", "smollm3", "mixtral"}
ARCH = {
    "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "phi3_long": "phi3",
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
}
NO_GGUF = {"dynamic", "yarn"}
DEEPSEEK = {"deepseek_v2", "deepseek_v3"}
STEPPED = {"dynamic", "phi3_long"}
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
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.router": "ffn_gate_inp",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OWN = {
    "olmo2": {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "gpt_oss": {"post_attention_layernorm": "post_attention_norm"},
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
    if name in DEEPSEEK:
        # One key head, whose width is that of the latent and the rotated key.
        w.add_head_count_kv(1)
        w.add_key_length(c.kv_lora_rank + c.qk_rope_head_dim)
        w.add_value_length(c.kv_lora_rank)
        w.add_key_length_mla(c.qk_nope_head_dim + c.qk_rope_head_dim)
        w.add_value_length_mla(c.v_head_dim)
        w.add_kv_lora_rank(c.kv_lora_rank)
        w.add_q_lora_rank(c.q_lora_rank)
        w.add_leading_dense_block_count(c.first_k_dense_replace)
        w.add_expert_count(c.n_routed_experts)
        w.add_expert_used_count(c.num_experts_per_tok)
        w.add_expert_shared_count(c.n_shared_experts)
        w.add_expert_feed_forward_length(c.moe_intermediate_size)
        w.add_expert_weights_scale(c.routed_scaling_factor)
        w.add_expert_weights_norm(name == "deepseek_v3")
        v3 = name == "deepseek_v3"
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if v3 else gguf.ExpertGatingFuncType.SOFTMAX)
        w.add_expert_group_count(c.n_group)
        w.add_expert_group_used_count(c.topk_group)
    else:
        w.add_head_count_kv(c.num_key_value_heads)
        w.add_key_length(head_dim)
        w.add_value_length(head_dim)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    w.add_rope_freq_base(rope["rope_theta"])
    rotated = c.qk_rope_head_dim if name in DEEPSEEK else int(head_dim * rope.get("partial_rotary_factor", 1.0))
    w.add_rope_dimension_count(rotated)
    if name in ("gemma2", "gemma3", "gpt_oss"):
        w.add_sliding_window(c.sliding_window)
    if name == "gemma2":
        w.add_attn_logit_softcapping(c.attn_logit_softcapping)
        w.add_final_logit_softcapping(c.final_logit_softcapping)
    if name in ("gemma2", "gemma3"):
        w.add_attention_scale(c.query_pre_attn_scalar ** -0.5)
    if name == "gemma3":
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(rope["factor"])
        w.add_float32("gemma3.rope.freq_base_swa", c.rope_parameters["sliding_attention"]["rope_theta"])
        w.add_array("gemma3.attention.sliding_window_pattern", [t == "sliding_attention" for t in c.layer_types])
    if name == "gpt_oss":
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(rope["factor"])
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        w.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        w.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        w.add_expert_count(c.num_local_experts)
        w.add_expert_used_count(c.num_experts_per_tok)
        w.add_expert_feed_forward_length(c.intermediate_size)
    if name == "phi3_long":
        ratio = c.max_position_embeddings / rope["original_max_position_embeddings"]
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        w.add_rope_scaling_attn_factors((1 + math.log(ratio) / math.log(rope["original_max_position_embeddings"])) ** 0.5)
        w.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], dtype=np.float32))
        w.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], dtype=np.float32))
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
        if stem.endswith("self_attn") and kind == "sinks":
            w.add_tensor(f"{layer}attn_sinks.weight", value)
            continue
        if name == "gpt_oss" and ".experts" in stem:
            # Gate and up alternate, inputs come before outputs.
            value = value if kind.endswith("bias") else value.swapaxes(1, 2)
            tail = "bias" if kind.endswith("bias") else "weight"
            parts = dict(gate=value[:, ::2], up=value[:, 1::2]) if kind.startswith("gate_up") else dict(down=value)
            for part, rows in parts.items():
                rows = np.ascontiguousarray(rows)
                if tail == "weight":
                    four = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.MXFP4)
                    w.add_tensor(f"{layer}ffn_{part}_exps.weight", four, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
                else:
                    w.add_tensor(f"{layer}ffn_{part}_exps.bias", rows)
            continue
        if stem == "mlp.gate" and kind == "e_score_correction_bias":
            w.add_tensor(f"{layer}exp_probs_b.bias", value)
            continue
        if name in DEEPSEEK and stem == "self_attn.kv_b_proj":
            heads = value.reshape(c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
            keys, values = np.split(heads, [c.qk_nope_head_dim], axis=1)
            w.add_tensor(f"{layer}attn_k_b.weight", np.ascontiguousarray(keys.swapaxes(1, 2)))
            w.add_tensor(f"{layer}attn_v_b.weight", np.ascontiguousarray(values))
            continue
        if name.startswith("gemma") and "norm" in stem:
            value = value + 1.0
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


def fours(x):
    """What the numbers of four bits nearest to `x` stand for, 32 along the last axis with one scale."""
    kind = gguf.GGMLQuantizationType.MXFP4
    return gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)


def write_mxfp4(folder):
    """The folder with experts in blocks of four bits and scales."""
    tensors, new = load_file(folder / "model.safetensors"), {}
    for key, value in tensors.items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            new[key] = value
            continue
        rows = np.ascontiguousarray(value.numpy().swapaxes(1, 2))
        blocks = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.MXFP4).reshape(*rows.shape[:2], -1, 17)
        # Numbers 0 to 15 stand in the low halves there, every other number in the low half here.
        both = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
        new[key + "_blocks"] = torch.from_numpy(both[..., ::2] | both[..., 1::2] << 4)
        new[key + "_scales"] = torch.from_numpy(np.ascontiguousarray(blocks[..., 0]))
    other = folder.parent / "gpt_oss_mxfp4"
    shutil.rmtree(other, ignore_errors=True)
    other.mkdir()
    save_file(new, other / "model.safetensors", metadata={"format": "pt"})
    (other / "model.safetensors").chmod(0o644)
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (other / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    shutil.copy(folder / "tokenizer.json", other / "tokenizer.json")


def write(name):
    generator = torch.Generator().manual_seed(11)
    model = FAMILIES[name]().eval()
    model.config._experts_implementation = "eager"
    # Others leave out what some families do to the logits.
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for key, value in list(model.named_parameters()) + list(model.named_buffers()):
            if "inv_freq" in key or value.dim() == 0:
                continue
            noise = torch.randn(value.shape, generator=generator)
            if value.dim() == 1 and "norm" in key:
                value.copy_(1.0 + 0.2 * noise)
            elif value.dim() == 1:
                value.copy_(0.3 * noise)
            else:
                value.copy_(1.5 * noise / value.shape[-1] ** 0.5)
            if key.endswith("gate_up_proj_bias"):
                # Far enough out that some are clamped.
                value.copy_(4.0 * noise)
            if name == "gpt_oss" and key.endswith(("gate_up_proj", "down_proj")):
                # Numbers that four bits hold, so that every file stores the same model.
                rows = np.ascontiguousarray(value.to(torch.float32).numpy().swapaxes(1, 2))
                value.copy_(torch.from_numpy(fours(rows).swapaxes(1, 2).copy()))
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
    if name == "gpt_oss":
        write_mxfp4(folder)
    with torch.no_grad():
        logits = model.double()(torch.tensor([tokens])).logits[0]
    golden = dict(
        made_with=f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}",
        tokens=tokens,
        logits=[row.to(torch.float32).numpy().astype("<f4").tobytes().hex() for row in logits],
    )
    if name in STEPPED:
        model = FAMILIES[name]().eval()
        model.set_attn_implementation("eager")
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
