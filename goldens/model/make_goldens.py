#!/usr/bin/env python3
"""Reference values for attlas-model from independent implementations.

    pip install gguf==0.19.0 numpy sentencepiece==0.2.1
    python goldens/model/make_goldens.py

Writes `quants.json` (block formats, by the numpy code of the `gguf` package) and `sentencepiece.json`
(a small SentencePiece BPE model trained on data/alice29.txt, and what it makes of some texts).
"""

import io
import json
import pathlib

import gguf
import numpy as np
import sentencepiece

HERE = pathlib.Path(__file__).resolve().parent
ALICE = HERE.parent.parent / "data" / "alice29.txt"

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
TYPES += ["IQ4_NL", "IQ4_XS", "MXFP4"]


def quants():
    rng = np.random.default_rng(20240607)
    out = {}
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = {1: 64, 32: 6, 256: 3}[block]
        # Every byte value is legal, scales that are infinite or not a number included.
        raw = rng.integers(0, 256, size=(1, blocks * size), dtype=np.uint8)
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(raw, kind).astype("<f4").reshape(-1)
        out[name] = {"bytes": raw.tobytes().hex(), "values": values.tobytes().hex()}
    return out


def pieces():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(ALICE.read_text().splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=800,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=1.0,
        num_threads=1,
        minloglevel=2,
    )
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    n = sp.get_piece_size()
    kind = lambda i: 6 if sp.is_byte(i) else 3 if sp.is_control(i) else 2 if sp.is_unknown(i) else 1
    texts = [
        "Alice was beginning to get very tired of sitting by her sister on the bank",
        "  two spaces, and a tail  ",
        "naïve café — 北京 🙂",
        "In 2024, 3.14159 is pi.\n\n\tdef f(x): return x**2",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "",
        ALICE.read_text()[:4000],
    ]
    return {
        "tokens": [sp.id_to_piece(i) for i in range(n)],
        "scores": [sp.get_score(i) for i in range(n)],
        "types": [kind(i) for i in range(n)],
        "texts": [{"text": t, "ids": sp.encode(t)} for t in texts],
    }


def main():
    for name, value in [("quants", quants()), ("sentencepiece", pieces())]:
        (HERE / f"{name}.json").write_text(json.dumps(value, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main()
