#!/usr/bin/env python3
"""Small random checkpoints with latent attention, written by transformers, and their logits in double precision.

    pip install torch transformers
    python goldens/model/make_latent_goldens.py

Writes `latent/v2` (plain queries) and `latent/v3` (a latent of queries, biases, YaRN): `config.json`,
`model.safetensors`, a `tokenizer.json` of one letter a token, and `logits.json` with token ids and the logits of every
position, rows of little-endian f32 in hexadecimal.
"""

import json
import pathlib
import shutil

import torch
import transformers
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

HERE = pathlib.Path(__file__).resolve().parent
VOCAB = 40
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    kv_lora_rank=10,
    first_k_dense_replace=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
)
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    original_max_position_embeddings=32,
    beta_fast=32,
    beta_slow=1,
    mscale=0.7,
    mscale_all_dim=1.0,
)


def write(name, model):
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if value.dim() == 1 and "norm" in key:
                value.copy_(1.0 + 0.2 * noise)
            elif value.dim() == 1:
                value.copy_(0.3 * noise)
            else:
                value.copy_(1.5 * noise / value.shape[-1] ** 0.5)
    folder = HERE / "latent" / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)
    letters = {chr(ord("A") + i): i for i in range(VOCAB)}
    words = dict(type="WordLevel", vocab=letters, unk_token="A")
    tokenizer = dict(version="1.0", added_tokens=[], normalizer=None, pre_tokenizer=None, post_processor=None)
    tokenizer.update(decoder=None, model=words)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer) + "\n")

    tokens = torch.randint(VOCAB, (24,), generator=generator).tolist()
    with torch.no_grad():
        logits = model.double()(torch.tensor([tokens])).logits[0]
    golden = dict(
        made_with=f"transformers {transformers.__version__}, torch {torch.__version__}",
        tokens=tokens,
        logits=[row.to(torch.float32).numpy().astype("<f4").tobytes().hex() for row in logits],
    )
    (folder / "logits.json").write_text(json.dumps(golden, indent=1) + "\n")
    print(name, sum(p.numel() for p in model.parameters()), "parameters, largest logit", logits.abs().max().item())


write("v2", DeepseekV2ForCausalLM(DeepseekV2Config(q_lora_rank=None, rope_theta=10000.0, **SIZES)).eval())
v3 = DeepseekV3Config(q_lora_rank=12, attention_bias=True, rope_parameters=YARN, **SIZES)
write("v3", DeepseekV3ForCausalLM(v3).eval())
