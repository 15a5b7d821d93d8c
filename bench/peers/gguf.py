#!/usr/bin/env python3
"""Perplexities of GGUF files in llama.cpp (llama-cpp-python) and in attlas, on the same tokens of the same text.

    pip install llama-cpp-python numpy
    cargo build --release
    python bench/peers/gguf.py data/alice29.txt converted.gguf [more.gguf …] [--tokens 2048] [--window 512]

Windows without overlap; all but the first token of each are scored. llama.cpp keeps keys and values in single precision
here, as attlas does by default; it multiplies quantised weights with activations rounded to 8 bits, which attlas does with
`--compute int8`: both are printed. Exit status 1 if a perplexity differs by more than --within from the nearer of the two.
"""

import argparse
import json
import pathlib
import subprocess
import sys

import numpy as np
from llama_cpp import Llama


def peer(model, text, tokens, window):
    """Perplexity in llama.cpp, and how many tokens the text has."""
    llama = Llama(str(model), n_ctx=window, n_batch=window, logits_all=True, verbose=False, n_threads=2,
                  n_threads_batch=2, type_k=0, type_v=0)
    ids = llama.tokenize(text, add_bos=False, special=False)[:tokens]
    nats, scored = 0.0, 0
    for start in range(0, len(ids) - window + 1, window):
        part = ids[start : start + window]
        llama.reset()
        llama.eval(part)
        logits = np.asarray(llama.scores[: window - 1], dtype=np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        right = logits[np.arange(window - 1), part[1:]]
        nats += float((np.log(np.exp(logits).sum(axis=1)) - right).sum())
        scored += window - 1
    return np.exp(nats / scored), scored


def ours(attlas, model, text, tokens, window, compute):
    command = [attlas, "perplexity", model, "--text", text, "--tokens", tokens, "--context", window,
               "--protocol", "windows", "--compute", compute, "--json", "--quiet"]
    done = subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True)
    record = json.loads(done.stdout)
    return record["ppl"], record["scored"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("models", type=pathlib.Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--within", type=float, default=0.005)
    parser.add_argument("--attlas", type=pathlib.Path, default=pathlib.Path("target/release/attlas"))
    args = parser.parse_args()
    text, ok = args.text.read_bytes(), True
    print(f"{'file':40} {'scored':>6} {'llama.cpp':>10} {'attlas f32':>10} {'attlas int8':>11} {'off':>8}")
    for model in args.models:
        theirs, scored = peer(model, text, args.tokens, args.window)
        found = [ours(args.attlas, model, args.text, args.tokens, args.window, c) for c in ("f32", "int8")]
        if any(n != scored for _, n in found):
            sys.exit(f"{model}: llama.cpp scored {scored} tokens, attlas {[n for _, n in found]}")
        off = min((theirs / ppl - 1 for ppl, _ in found), key=abs)
        ok &= abs(off) <= args.within
        print(f"{model.name:40} {scored:6} {theirs:10.4f} {found[0][0]:10.4f} {found[1][0]:11.4f} {100 * off:+7.3f}%")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
