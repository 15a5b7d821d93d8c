#!/usr/bin/env python3
"""Writes the files under `corpus/`: small, valid, and together covering every part of each format; `hostile` adds files
that once exhausted stack, memory or time."""

import io
import json
import pathlib
import struct
import zipfile

HERE = pathlib.Path(__file__).resolve().parent / "corpus"


def put(target, name, content):
    folder = HERE / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def text(s):
    raw = s.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(v):
    """A GGUF value with its type number, chosen by the Python type; `(kind, list)` is an array."""
    if isinstance(v, bool):
        return 7, struct.pack("<B", v)
    if isinstance(v, int):
        return 4, struct.pack("<I", v)
    if isinstance(v, float):
        return 6, struct.pack("<f", v)
    if isinstance(v, str):
        return 8, text(v)
    kind, items = v
    pack = {8: text, 5: lambda x: struct.pack("<i", x), 6: lambda x: struct.pack("<f", x), 10: lambda x: struct.pack("<Q", x)}[kind]
    return 9, struct.pack("<IQ", kind, len(items)) + b"".join(map(pack, items))


def gguf(metadata, tensors=(), version=3):
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, v in metadata.items():
        kind, raw = value(v)
        out += text(key) + struct.pack("<I", kind) + raw
    data = b""
    for name, dims, kind, raw in tensors:
        out += text(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", d) for d in reversed(dims))
        out += struct.pack("<IQ", kind, len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    return out + b"\0" * (-len(out) % 32) + data


def floats(*dims):
    n = 1
    for d in dims:
        n *= d
    return struct.pack(f"<{n}f", *(((i * 7919) % 13) / 13 - 0.5 for i in range(n)))


BPE = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": (8, ["<s>", "a", "b", "c", "ab", "Ġ", "Ġa", "</s>"]),
    "tokenizer.ggml.token_type": (5, [3, 1, 1, 1, 1, 1, 1, 3]),
    "tokenizer.ggml.merges": (8, ["a b", "Ġ a"]),
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 7,
}
PIECES = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": (8, ["<unk>", "<s>", "</s>", "▁", "a", "▁a", "ab", "<0x41>"]),
    "tokenizer.ggml.scores": (6, [0.0, 0.0, 0.0, -3.0, -1.0, -2.0, -1.5, 0.0]),
    "tokenizer.ggml.token_type": (5, [2, 3, 3, 1, 1, 1, 1, 6]),
    "tokenizer.ggml.add_bos_token": True,
}
WORDS = {
    "tokenizer.ggml.model": "bert",
    "tokenizer.ggml.tokens": (8, ["[UNK]", "[CLS]", "[SEP]", "▁a", "b", "▁c"]),
    "tokenizer.ggml.token_type": (5, [2, 3, 3, 1, 1, 1]),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.seperator_token_id": 2,
}


def decoder(name, extra):
    """Hidden 8, two query heads, one key head of width 4."""
    sizes = {
        "block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 4, "attention.head_count": 2,
        "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0,
    }
    metadata = {"general.architecture": name, **{f"{name}.{k}": v for k, v in sizes.items()}, **extra}
    shapes = {
        "token_embd.weight": (8, 8), "output_norm.weight": (8,), "blk.0.attn_norm.weight": (8,), "blk.0.ffn_norm.weight": (8,),
        "blk.0.attn_q.weight": (8, 8), "blk.0.attn_k.weight": (4, 8), "blk.0.attn_v.weight": (4, 8),
        "blk.0.attn_output.weight": (8, 8), "blk.0.ffn_gate.weight": (4, 8), "blk.0.ffn_up.weight": (4, 8),
        "blk.0.ffn_down.weight": (8, 4),
    }
    if name == "qwen2":
        shapes |= {"blk.0.attn_q.bias": (8,), "blk.0.attn_k.bias": (4,), "blk.0.attn_v.bias": (4,)}
    if name == "qwen3":
        shapes |= {"blk.0.attn_q_norm.weight": (4,), "blk.0.attn_k_norm.weight": (4,)}
    return gguf(metadata, [(n, s, 0, floats(*s)) for n, s in shapes.items()])


def quantised():
    metadata = {
        "general.architecture": "llama", "general.alignment": 32, "llama.block_count": 1, "llama.context_length": 16,
        "llama.embedding_length": 32, "llama.feed_forward_length": 32, "llama.attention.head_count": 8,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 16, "tokenizer.chat_template": "{{ messages[0]['content'] }}", **BPE,
    }
    half = struct.pack("<e", 0.5)
    block = {2: half + bytes(range(16)), 3: half + half + bytes(range(16)), 8: half + bytes(range(32)), 1: half * 32}
    def matrix(name, rows, kind):
        return name, (rows, 32), kind, block[kind] * rows
    tensors = [matrix("token_embd.weight", 8, 8), ("output_norm.weight", (32,), 0, floats(32)),
               ("blk.0.attn_norm.weight", (32,), 0, floats(32)), ("blk.0.ffn_norm.weight", (32,), 0, floats(32))]
    names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    tensors += [matrix(f"blk.0.{n}.weight", 32, [2, 3, 8, 1][i % 4]) for i, n in enumerate(names)]
    return gguf(metadata, tensors)


def safetensors(tensors, metadata=None):
    header, data = ({"__metadata__": metadata} if metadata else {}), b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + data


def npy(shape, descr="<f4", raw=None, fortran=False):
    header = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {tuple(shape)}, }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + (floats(*shape) if raw is None else raw)


def npz(arrays, how):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", how) as z:
        for name, raw in arrays.items():
            z.writestr(zipfile.ZipInfo(f"{name}.npy", (2024, 1, 1, 0, 0, 0)), raw, how)
    return out.getvalue()


TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None,
    "added_tokens": [{"id": 3, "special": True, "content": "[X]", "single_word": False, "lstrip": False, "rstrip": False,
                      "normalized": False}],
    "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True},
    "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": None,
    "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    "model": {"type": "WordPiece", "unk_token": "[U]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
              "vocab": {"[U]": 0, "a": 1, "##b": 2, "[X]": 3}},
}
BYTE_LEVEL = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "▁"}]},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}|\\s+(?!\\S)|\\w+"}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
    "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                       "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                       "special_tokens": {"a": {"id": "a", "ids": [0], "tokens": ["a"]}}},
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
              "fuse_unk": False, "byte_fallback": True, "ignore_merges": False, "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}
UNIGRAM = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}, "post_processor": None,
    "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["▁a", -1.0], ["b", -2.0]], "byte_fallback": False},
}
CONFIG = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "vocab_size": 4, "max_position_embeddings": 64, "hidden_act": "silu",
    "tie_word_embeddings": True, "eos_token_id": 1,
}
SCALINGS = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.7},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192},
    "linear": {"type": "linear", "factor": 2.0},
    "dynamic": {"type": "dynamic", "factor": 2.0},
}


def folder(files):
    return b"".join(b"\n=== " + name.encode() + b"\n" + (c if isinstance(c, bytes) else json.dumps(c).encode()) for name, c in files.items())


def hf_weights(names=None):
    shapes = {"embed_tokens": [4, 8], "norm": [8]}
    layer = {"input_layernorm": [8], "post_attention_layernorm": [8], "self_attn.q_proj": [8, 8], "self_attn.k_proj": [4, 8],
             "self_attn.v_proj": [4, 8], "self_attn.o_proj": [8, 8], "mlp.gate_proj": [4, 8], "mlp.up_proj": [4, 8], "mlp.down_proj": [8, 4]}
    shapes |= {f"layers.0.{k}": v for k, v in layer.items()}
    return {f"model.{k}.weight": ("F32", v, floats(*v)) for k, v in shapes.items()}


def factored_folder(section, tensors, config=None):
    """A folder in factored form: a section of the configuration, and replacements of some weights; `None` removes one."""
    weights = {n: t for n, t in {**hf_weights(), **tensors}.items() if t is not None}
    config = {**(config or CONFIG), "attlas": {"version": 1, "params": {"rank": 2}, **section}}
    return folder({"config.json": config, "tokenizer.json": TOKENIZER, "model.safetensors": safetensors(weights)})


def matrix(*dims):
    return "F32", list(dims), floats(*dims)


def factored():
    """One folder for each kind of map and of attention that `attlas compress` writes."""
    layer = "model.layers.0."
    q, k, v, o = (f"{layer}self_attn.{x}_proj" for x in "qkvo")
    gate, up, down = (f"{layer}mlp.{x}_proj" for x in ("gate", "up", "down"))
    gone = lambda *names: {f"{n}.weight": None for n in names}
    yield "svd", factored_folder(
        {"conversion": "svd", "maps": {q: [{"tensor": "attlas.factor.0"}, {"tensor": "attlas.factor.1"}]}},
        {**gone(q), "attlas.factor.0": ("F16", [2, 8], struct.pack("<16e", *range(16))), "attlas.factor.1": matrix(8, 2), f"{q}.bias": matrix(8)})
    mixed = lambda *rows: {"cores": "attlas.factor.1", "mixture": "attlas.factor.2", "rows": list(rows)}
    ends = {"tensor": "attlas.factor.0", "transposed": True}, {"tensor": "attlas.factor.3"}
    # Two stacked blocks of keys, and values as slices, as in wide feed-forward layers.
    yield "tucker", factored_folder(
        {"conversion": "tucker", "params": {"rank": 2, "layer_rank": 3}, "maps": {
            q: [ends[0], {**mixed(0), "transposed": True}, {"tensor": "attlas.factor.4"}],
            up: [ends[0], mixed(1, 2), ends[1]],
            down: [{"tensor": "attlas.factor.5", "slices": 2}, {**mixed(1, 2), "transposed": True}, {"tensor": "attlas.factor.4"}]}},
        {**gone(q, up, down), "attlas.factor.0": matrix(8, 2), "attlas.factor.1": matrix(3, 2, 2), "attlas.factor.2": matrix(4, 3),
         "attlas.factor.3": matrix(4, 4), "attlas.factor.4": matrix(8, 2), "attlas.factor.5": matrix(2, 2)})
    yield "trawl", factored_folder(
        {"conversion": "trawl", "params": {"rank": 3, "keep_factors": True}, "maps": {
            n: [{"tensor": "attlas.factor.0", "transposed": True}, {"diagonal": "attlas.factor.1", "row": row}, {"tensor": "attlas.factor.2"}]
            for row, n in enumerate((gate, up))}},
        {**gone(gate, up), "attlas.factor.0": matrix(8, 3), "attlas.factor.1": matrix(3, 3), "attlas.factor.2": matrix(4, 3)})
    part = lambda name: f"attlas.attention.0.{name}"
    heads = {"a_k": matrix(2 * 1, 1), "b_k": matrix(4, 8), "a_v": matrix(2 * 1, 1), "b_v": matrix(4, 8)}
    options = {"contextual": "b_only", "kv_only": True, "rank_k": 1, "rank_v": 1, "rope": "half"}
    yield "tensor_product", factored_folder(
        {"conversion": "tensor_product", "attention": {"0": {
            "layer": "tensor_product", "options": options, "shape": [8, 2, 2, 4, 4], "weights": {"q": q, "o": o, **{n: part(n) for n in heads}}}}},
        {**gone(k, v), **{f"{part(n)}.weight": t for n, t in heads.items()}})
    half = struct.pack("<e", 0.25)
    block = half + bytes(range(32))
    # Rows of 32 numbers, the size of a block.
    wide = {**CONFIG, "hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 1, "intermediate_size": 4}
    shapes = {"model.embed_tokens": [4, 32], "model.norm": [32], f"{layer}input_layernorm": [32], f"{layer}post_attention_layernorm": [32],
              q: [32, 32], k: [4, 32], v: [4, 32], o: [32, 32], gate: [4, 32], up: [4, 32], down: [32, 4]}
    blocks = {f"{n}.weight": ("U8", [shapes[n][0], 34], block * shapes[n][0]) for n in (q, o)}
    yield "stored", factored_folder(
        {"conversion": "svd", "stored": {n: {"format": "Q8_0", "shape": [32, 32]} for n in blocks},
         "maps": {k: [{"tensor": "attlas.factor.0"}, {"tensor": "attlas.factor.1"}]}},
        {**{f"{n}.weight": matrix(*s) for n, s in shapes.items()}, **gone(k), **blocks,
         "attlas.factor.0": matrix(2, 32), "attlas.factor.1": matrix(4, 2)}, wide)
    bert = {k: v for k, v in CONFIG.items() if k not in ("num_key_value_heads", "rms_norm_eps", "hidden_act")}
    bert |= {"model_type": "bert", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "hidden_act": "gelu"}
    norm = lambda name: {f"{name}.weight": matrix(8), f"{name}.bias": matrix(8)}
    dense = lambda name, n_out, n_in: {f"{name}.weight": matrix(n_out, n_in), f"{name}.bias": matrix(n_out)}
    e = "encoder.layer.0."
    maps = {"q": f"{part('q')}", "k": f"{part('k')}", "mix": part("mix"), "content": part("content"), "v": f"{e}attention.self.value", "o": f"{e}attention.output.dense"}
    yield "collaborative", factored_folder(
        {"conversion": "collaborative", "attention": {"0": {
            "layer": "collaborative", "options": {"rank": 3}, "shape": [8, 2, 2, 4, 4], "weights": maps}}},
        {**{n: None for n in hf_weights()}, "embeddings.word_embeddings.weight": matrix(4, 8), "embeddings.position_embeddings.weight": matrix(64, 8),
         "embeddings.token_type_embeddings.weight": matrix(2, 8), **norm("embeddings.LayerNorm"), **norm(f"{e}attention.output.LayerNorm"),
         **norm(f"{e}output.LayerNorm"), **dense(f"{e}attention.self.value", 8, 8), **dense(f"{e}attention.output.dense", 8, 8),
         **dense(f"{e}intermediate.dense", 4, 8), **dense(f"{e}output.dense", 8, 4), f"{part('q')}.weight": matrix(3, 8), f"{part('k')}.weight": matrix(3, 8),
         f"{part('mix')}.weight": matrix(6, 1), f"{part('content')}.weight": matrix(2, 8)}, bert)


def main():
    put("gguf", "llama.gguf", decoder("llama", BPE))
    put("gguf", "mistral.gguf", decoder("mistral", {**PIECES, "mistral.attention.sliding_window": 4}))
    put("gguf", "qwen2.gguf", decoder("qwen2", {**BPE, "tokenizer.ggml.pre": "qwen2"}))
    put("gguf", "qwen3.gguf", decoder("qwen3", {**BPE, "tokenizer.ggml.pre": "llama-bpe"}))
    put("gguf", "quantised.gguf", quantised())
    for name, vocabulary in [("bpe", BPE), ("pieces", PIECES), ("words", WORDS)]:
        put("gguf_vocabulary", f"{name}.gguf", gguf(vocabulary))
    put("gguf_vocabulary", "version2.gguf", gguf({**PIECES, "other": (10, [1, 2])}, version=2))

    every = {d: (d, s, bytes(range(n))) for d, s, n in [("F32", [2, 3], 24), ("F64", [2], 16), ("F16", [], 2), ("BF16", [3], 6), ("I64", [1, 2], 16)]}
    put("safetensors", "every.safetensors", safetensors(every, {"format": "pt"}))
    put("safetensors", "weights.safetensors", safetensors(hf_weights()))

    for name, scaling in SCALINGS.items():
        put("config", f"{name}.json", json.dumps({**CONFIG, "rope_theta": 1e5, "rope_scaling": scaling}))
    put("config", "window.json", json.dumps({**CONFIG, "model_type": "mistral", "sliding_window": 16, "eos_token_id": [1, 2]}))
    bert = {k: v for k, v in CONFIG.items() if k not in ("num_key_value_heads", "rms_norm_eps", "hidden_act")}
    put("config", "bert.json", json.dumps({**bert, "model_type": "bert", "layer_norm_eps": 1e-12, "type_vocab_size": 2, "hidden_act": "gelu"}))
    put("config", "index.json", json.dumps({"metadata": {"total_size": 12}, "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}))

    common = {"config.json": CONFIG, "tokenizer.json": TOKENIZER}
    weights = safetensors(hf_weights())
    put("folder", "whole", folder({**common, "model.safetensors": weights}))
    put("folder", "shards", folder({
        **common, "generation_config.json": {"eos_token_id": [1, 2]},
        "tokenizer_config.json": {"bos_token": "a", "eos_token": {"content": "[X]"}, "chat_template": [{"name": "default", "template": "{{ bos_token }}"}]},
        "model.safetensors.index.json": {"weight_map": {n: "one.safetensors" for n in hf_weights()}}, "one.safetensors": weights,
    }))

    for name, content in factored():
        put("factored", name, content)

    for name, tokenizer in [("words", TOKENIZER), ("bytes", BYTE_LEVEL), ("unigram", UNIGRAM)]:
        put("tokenizer", f"{name}.json", json.dumps(tokenizer, ensure_ascii=False))

    put("chat_template", "chatml.jinja", "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
    put("chat_template", "namespace.jinja", "{%- set ns = namespace(found=false) -%}\n{%- for m in messages if m.role != 'system' %}\n    {%- if not loop.first %}{{ eos_token }}{% endif -%}\n    {{- m.content | trim }}{% set ns.found = true %}\n{%- endfor %}{% if ns.found is defined and messages[-1]['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}")
    put("chat_template", "macro.jinja", "{% macro turn(m) %}[{{ m.role|upper }}] {{ m.content.split(' ')[0] }}{% endmacro %}{{ bos_token }}{% for m in messages[:2] %}{{ turn(m) }}{% if loop.index > 5 %}{% break %}{% endif %}{% endfor %}{{ messages|length }}{{ {'a': [1, 2.5]}|tojson }}")

    q, k, v = floats(2, 3, 4), floats(1, 3, 4), floats(1, 3, 5)
    layer = {"layer2.q": ("F32", [2, 3, 4], q), "layer2.k": ("F32", [1, 3, 4], k), "layer2.v": ("F32", [1, 3, 5], v)}
    put("trace_safetensors", "one.safetensors", safetensors(layer, {"scale": "0.5", "mask": "none", "model": "a"}))
    mixed = {"layer0.q": ("BF16", [3, 4], bytes(24)), "layer0.k": ("F16", [3, 4], bytes(24)), "layer0.v": ("F64", [3, 1], bytes(24))}
    put("trace_safetensors", "mixed.safetensors", safetensors(mixed))
    put("trace_npy", "stacked.npy", npy([3, 4, 2]))
    put("trace_npy", "heads.npy", npy([3, 2, 2, 3], "<f8", struct.pack("<36d", *range(36))))
    put("trace_npy", "big_endian.npy", npy([3, 2, 2], ">f4", struct.pack(">12f", *range(12))))
    one = {"q": npy([3, 4]), "k": npy([3, 4]), "v": npy([3, 2])}
    put("trace_npz", "stored.npz", npz(one, zipfile.ZIP_STORED))
    put("trace_npz", "deflated.npz", npz({f"layer1.{n}": raw for n, raw in one.items()}, zipfile.ZIP_DEFLATED))
    put("trace_npz", "wide.npz", npz({"q": npy([2, 3, 4]), "k": npy([1, 64, 4]), "v": npy([1, 64, 4])}, zipfile.ZIP_DEFLATED))

    put("recipe", "rules.toml", "version = 1\nproducer = \"by hand\"\nmodel = \"a\"\n\n[default]\nmethod = \"exact\"\n\n[[rule]]\nlayers = \"0\"\nheads = [0, 1]\nmethod = \"sink_window\"\nparams = { sinks = 4, window = 256 }\nmeasured = { error = 0.012, cost = 0.31 }\n\n[[rule]]\nheads = \"0-1\"\nmethod = \"wildcat\"\nparams = { seed = 3 }\n")
    put("recipe", "short.toml", "version = 1\n[[rule]]\nlayers = 0\nmethod = \"top_k\"\n")

    put("arguments", "synthetic.txt", "synthetic:clustered,n=2k,d=64,heads=4,kv_heads=2,seed=7\nsink_window.window=256\nhyper.block=32\n")
    put("arguments", "files.txt", "q.npy,k.npy,v.npy\ncrt.variant=sderf\nperformer.features=auto\n")
    square = lambda n: {"rows": n, "cols": n, "data": [float(i % (n + 1) == 0) for i in range(n * n)]}
    row = lambda *x: {"rows": 1, "cols": len(x), "data": x}
    learnt = {"method": "loki", "n_kv_heads": 1, "n_heads": 2, "d": 4, "d_v": 3, "matrices": {
        "basis.0": square(4), "lambda.0": row(2.0, 1.0, 0.5, 0.25), "mean.0": row(0.0, 0.1, 0.2, 0.3), "count.0": row(16.0),
        "a_q.0": square(4), "a_k.0": square(4)}}
    crt = {**learnt, "method": "crt", "matrices": {f"{n}_{x}.0": m for x in "qk" for n, m in (("mean", row(0.0, 0.0, 0.0, 0.0)), ("outer", square(4)))}}
    entries = [{"layer": None, "kv_head": 0, "calibration": learnt}, {"layer": 3, "kv_head": 0, "calibration": crt}]
    put("calibrations", "two.json", json.dumps({"format": "attlas calibrations", "version": 1, "entries": entries}))
    hostile()


def hostile():
    """Files that the limits of each parser must stop."""
    put("chat_template", "hostile_minus.jinja", "{{ " + "-" * 20400 + "1 }}")
    put("chat_template", "hostile_chain.jinja", "{{ 1" + "|string" * 4000 + " }}")
    put("chat_template", "hostile_double.jinja", "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}")
    put("chat_template", "hostile_width.jinja", "{{ '%1000000000d'|format(1) }}{{ range(100000)|slice(1000000000)|list }}")
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    for name, normalizer in [("replace", {"type": "Sequence", "normalizers": [replace] * 4}),
                             ("precompiled", {"type": "Precompiled", "precompiled_charsmap": "/////w=="})]:
        put("tokenizer", f"hostile_{name}.json", json.dumps({**UNIGRAM, "normalizer": normalizer}, ensure_ascii=False))
    zeros = npy([1 << 20, 4], raw=bytes(1 << 24))
    put("trace_npz", "hostile_packed.npz", npz({"q": zeros, "k": npy([3, 4]), "v": npy([3, 2])}, zipfile.ZIP_DEFLATED))
    up = "model.layers.0.mlp.up_proj"
    many = {"cores": "attlas.factor.1", "mixture": "attlas.factor.2", "rows": [0] * 1024}
    put("factored", "hostile_mixture", factored_folder(
        {"conversion": "tucker", "maps": {up: [{"tensor": "attlas.factor.0", "transposed": True}, many, {"tensor": "attlas.factor.3"}]}},
        {f"{up}.weight": None, "attlas.factor.0": matrix(8, 32), "attlas.factor.1": matrix(1, 32, 32), "attlas.factor.2": matrix(1, 1),
         "attlas.factor.3": matrix(4, 32)}))


if __name__ == "__main__":
    main()
