#!/usr/bin/env python3
"""A GGUF file with the shape of a Llama of one billion parameters and random weights, only for measuring speed.

    bench/peers/random_model.py Q4_K FILE.gguf        matrices in Q4_K, the embedding, which is the output too, in Q6_K
    bench/peers/random_model.py Q8_0 FILE.gguf        everything in Q8_0

Shape: that of Llama 3.2 1B, 16 layers of width 2048 with 32 heads, 8 of them of keys, and 8192 hidden units. The vocabulary, of
49152 tokens, is that of the SmolLM2 file in the folder of models. Weights are blocks of random bytes whose scales give them a
deviation of about 0.02; one mebibyte of them is written repeatedly, which does not change times.
"""
import pathlib, random, struct, sys

WIDTH, LAYERS, HEADS, KV_HEADS, HIDDEN, VOCABULARY, CONTEXT = 2048, 16, 32, 8, 8192, 49152, 8192
# Number in GGUF, weights and bytes of a block, and offsets of its half-precision scales with their values.
FORMATS = {
    "Q8_0": (8, 32, 34, {0: 0.0003}),
    "Q4_K": (12, 256, 144, {0: 0.00015, 2: 0.001}),
    "Q6_K": (14, 256, 210, {208: 0.00002}),
}
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY, U32, F32 = 8, 9, 4, 6


def metadata(path):
    """The stored bytes of every entry of a GGUF file's metadata, by name."""
    data = path.read_bytes()
    magic, _, _, count = struct.unpack_from("<4sIQQ", data)
    assert magic == b"GGUF", f"{path} is no GGUF file"
    at = 24

    def text(at):
        (length,) = struct.unpack_from("<Q", data, at)
        return at + 8 + length

    def value(kind, at):
        if kind == STRING:
            return text(at)
        if kind == ARRAY:
            item, length = struct.unpack_from("<IQ", data, at)
            at += 12
            if item in SIZES:
                return at + length * SIZES[item]
            for _ in range(length):
                at = value(item, at)
            return at
        return at + SIZES[kind]

    entries = {}
    for _ in range(count):
        start, at = at, text(at)
        name = data[start + 8 : at].decode()
        (kind,) = struct.unpack_from("<I", data, at)
        first, at = at, value(kind, at + 4)
        entries[name] = data[first:at]
    return entries


def named(name):
    return struct.pack("<Q", len(name.encode())) + name.encode()


def weights(format, count):
    """Random weights in the given number."""
    _, length, size, halves = FORMATS[format]
    blocks = count // length
    some = min(blocks, (1 << 20) // size)
    piece = bytearray(random.Random(1).randbytes(some * size))
    for at, scale in halves.items():
        for byte, value in enumerate(struct.pack("<e", scale)):
            piece[at + byte :: size] = bytes([value]) * some
    while blocks > 0:
        yield memoryview(piece)[: min(blocks, some) * size]
        blocks -= some


def write(format, path, vocabulary):
    tensors = [("token_embd.weight", [WIDTH, VOCABULARY], "Q6_K" if format == "Q4_K" else format), ("output_norm.weight", [WIDTH], None)]
    for layer in range(LAYERS):
        for name, rows, columns in [
            ("attn_q", WIDTH, WIDTH), ("attn_k", WIDTH * KV_HEADS // HEADS, WIDTH), ("attn_v", WIDTH * KV_HEADS // HEADS, WIDTH),
            ("attn_output", WIDTH, WIDTH), ("ffn_gate", HIDDEN, WIDTH), ("ffn_up", HIDDEN, WIDTH), ("ffn_down", WIDTH, HIDDEN),
        ]:
            tensors.append((f"blk.{layer}.{name}.weight", [columns, rows], format))
        tensors += [(f"blk.{layer}.{name}.weight", [WIDTH], None) for name in ["attn_norm", "ffn_norm"]]
    entries = {name: bytes for name, bytes in metadata(vocabulary).items() if name.startswith("tokenizer.")}
    entries["general.architecture"] = struct.pack("<I", STRING) + named("llama")
    entries["general.name"] = struct.pack("<I", STRING) + named("random weights")
    for name, number in [
        ("block_count", LAYERS), ("context_length", CONTEXT), ("embedding_length", WIDTH), ("feed_forward_length", HIDDEN),
        ("attention.head_count", HEADS), ("attention.head_count_kv", KV_HEADS), ("rope.dimension_count", WIDTH // HEADS),
        ("vocab_size", VOCABULARY),
    ]:
        entries[f"llama.{name}"] = struct.pack("<II", U32, number)
    entries["llama.attention.layer_norm_rms_epsilon"] = struct.pack("<If", F32, 1e-5)
    entries["llama.rope.freq_base"] = struct.pack("<If", F32, 500000.0)
    with open(path, "wb") as file:
        file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(entries)))
        for name, bytes in entries.items():
            file.write(named(name) + bytes)
        start = 0
        for name, shape, kind in tensors:
            number, length, size, _ = FORMATS[kind] if kind else (0, 1, 4, None)
            file.write(named(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, start))
            count = shape[0] * (shape[1] if len(shape) == 2 else 1)
            start += -(-count // length * size // 32) * 32
        for name, shape, kind in tensors:
            file.write(b"\0" * (-file.tell() % 32))
            if kind:
                file.writelines(weights(kind, shape[0] * shape[1]))
            else:
                file.write(struct.pack("<f", 1.0) * shape[0])
        file.write(b"\0" * (-file.tell() % 32))


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in ["Q4_K", "Q8_0"]:
        sys.exit(__doc__)
    from model import SMOLLM2

    write(sys.argv[1], pathlib.Path(sys.argv[2]), SMOLLM2)


if __name__ == "__main__":
    main()
