#!/usr/bin/env python3
"""Reference values for whole models from transformers, in double precision.

    pip install torch transformers accelerate gguf sentencepiece
    scripts/fetch-models
    python goldens/model/make_model_goldens.py

Writes `minilm.json` (sentence embeddings of all-MiniLM-L6-v2, and queries, keys and values of two layers) and `smollm2.json`
(queries, keys and values of SmolLM2-135M, dequantised, by hooks on its projections, and logits of a few positions).

Arrays of numbers are little-endian f32 in hexadecimal. Rotary pairs of queries and keys stand half a head apart, as
transformers keeps them; the GGUF file itself keeps them side by side.
"""

import json
import os
import pathlib

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import modeling_llama

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MODELS = pathlib.Path(os.environ.get("ATTLAS_MODELS", ROOT / ".models"))
ALICE = (ROOT / "data" / "alice29.txt").read_text()


def encoded(tensor):
    return tensor.detach().to(torch.float32).contiguous().numpy().astype("<f4").tobytes().hex()


def heads(projection, n_heads):
    """`[n, heads · d]` as `[heads, n, d]`."""
    n, width = projection.shape
    return projection.reshape(n, n_heads, width // n_heads).transpose(0, 1)


def watch(modules):
    """Keeps the last output of each module under its name."""
    kept = {}
    for name, module in modules.items():
        module.register_forward_hook(lambda _m, _i, output, name=name: kept.__setitem__(name, output[0]))
    return kept


def minilm():
    folder = MODELS / "all-minilm-l6-v2"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.no_truncation()
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").double().eval()
    texts = [
        "This is an example sentence",
        "Each sentence is converted",
        "a",
        "Café naïve: 北京, don't! Which way I ought to go from here?",
        "The White Rabbit put on his spectacles. 'Where shall I begin, please your Majesty?' he asked.",
        ALICE[2000:3900],
    ]
    ids = [tokenizer(text, padding=False, truncation=False)["input_ids"] for text in texts]
    longest = max(map(len, ids))
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
    with torch.no_grad():
        last = model(input_ids=padded, attention_mask=mask).last_hidden_state
        weights = mask[:, :, None].double()
        pooled = (last * weights).sum(1) / weights.sum(1)
        embeddings = torch.nn.functional.normalize(pooled, dim=1)
        layers = [0, 5]
        attention = {i: model.encoder.layer[i].attention.self for i in layers}
        kept = watch({f"{i}.{p}": getattr(a, name) for i, a in attention.items()
                      for p, name in [("q", "query"), ("k", "key"), ("v", "value")]})
        model(input_ids=padded[:1, : len(ids[0])])
    n_heads = model.config.num_attention_heads
    some = [0, 7]
    return {
        "producer": f"transformers {transformers.__version__}, torch {torch.__version__}, f64",
        "texts": [{"text": t, "ids": i, "embedding": encoded(e)} for t, i, e in zip(texts, ids, embeddings)],
        "heads": some,
        "layers": {str(i): {p: encoded(heads(kept[f"{i}.{p}"], n_heads)[some]) for p in "qkv"} for i in layers},
    }


def smollm2():
    folder, file = MODELS / "smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32, attn_implementation="eager")
    model = model.double().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    ids = tokenizer(ALICE[:400], add_special_tokens=False)["input_ids"][:24]
    layers, positions = [0, 11, 29], [0, 5, 23]
    q_heads, kv_heads = [0, 8], [0, 2]
    c = model.config

    rotated = {}
    original = modeling_llama.apply_rotary_pos_emb

    def record(q, k, *args, **kwargs):
        q_out, k_out = original(q, k, *args, **kwargs)
        rotated[len(rotated)] = (q_out[0], k_out[0])
        return q_out, k_out

    modeling_llama.apply_rotary_pos_emb = record
    attention = {i: model.model.layers[i].self_attn for i in layers}
    kept = watch({f"{i}.{p}": getattr(a, f"{p}_proj") for i, a in attention.items() for p in "qkv"})
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    assert len(rotated) == c.num_hidden_layers
    out = {}
    for i in layers:
        parts = {
            "q_pre": heads(kept[f"{i}.q"], c.num_attention_heads)[q_heads],
            "k_pre": heads(kept[f"{i}.k"], c.num_key_value_heads)[kv_heads],
            "q": rotated[i][0][q_heads],
            "k": rotated[i][1][kv_heads],
            "v": heads(kept[f"{i}.v"], c.num_key_value_heads)[kv_heads],
        }
        out[str(i)] = {name: encoded(part[:, positions]) for name, part in parts.items()}
    chosen = sorted(set(range(16)) | {int(j) for p in positions for j in logits[p].topk(8).indices})
    return {
        "producer": f"transformers {transformers.__version__}, torch {torch.__version__}, f64 on dequantised weights",
        "text": ALICE[:400],
        "ids": ids,
        "positions": positions,
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "layers": out,
        "logit_ids": chosen,
        "logits": encoded(logits[positions][:, chosen]),
        "log_sum_exp": [float(x) for x in logits[positions].logsumexp(1)],
    }


def main():
    for name, make in [("minilm", minilm), ("smollm2", smollm2)]:
        (HERE / f"{name}.json").write_text(json.dumps(make(), ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main()
