#!/usr/bin/env python3
"""Perplexities of GGUF files in llama.cpp (llama-cpp-python) and in attlas, on the same tokens of the same text.

    pip install llama-cpp-python numpy
    cargo build --release
    python bench/peers/gguf.py data/alice29.txt converted.gguf [more.gguf …] [--tokens 2048] [--window 512]
    python bench/peers/gguf.py data/alice29.txt model.gguf --compress "svd --rank 288 --matrices q,o"

With `--compress`, which may be repeated, every model is also compressed: into a GGUF file with multiplied-out factors,
which both programs read, and into a folder, which attlas runs on its factors.

Windows without overlap; all but the first token of each are scored. llama.cpp keeps keys and values in single precision
here, as attlas does by default; it multiplies quantised weights with activations rounded to 8 bits, which attlas does with
`--compute int8`: both are printed. Exit status 1 if a perplexity differs by more than --within from the nearer of the two.
"""

import argparse
import json
import pathlib
import shlex
import subprocess
import sys
import tempfile

import numpy as np
from llama_cpp import Llama


def peer(model, text, tokens, window):
    """Perplexity in llama.cpp, and the number of tokens of the text."""
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


def compressed(attlas, model, text, tokens, window, how, out):
    """Writes the compressed model; a loss beyond the command's limit (status 1) is a result, too."""
    command = [attlas, "compress", model, "--with", *shlex.split(how), "--text", text, "--tokens", tokens, "--context", window,
               "--repeats", 0, "--out", out, "--quiet", "--json"]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(done.stderr)
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("models", type=pathlib.Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--within", type=float, default=0.005)
    parser.add_argument("--compress", action="append", default=[], metavar="ARGUMENTS")
    parser.add_argument("--attlas", type=pathlib.Path, default=pathlib.Path("target/release/attlas"))
    args = parser.parse_args()
    text, ok = args.text.read_bytes(), True
    print(f"{'file':60} {'MB':>6} {'scored':>6} {'llama.cpp':>10} {'attlas f32':>10} {'attlas int8':>11} {'off':>8}")

    def row(name, model):
        """Prints a line about a file, which both programs read, or a folder; returns true if both agree."""
        own = [ours(args.attlas, model, args.text, args.tokens, args.window, c) for c in ("f32", "int8")]
        theirs, off = None, 0.0
        if model.is_file():
            theirs, scored = peer(model, text, args.tokens, args.window)
            if any(n != scored for _, n in own):
                sys.exit(f"{model}: llama.cpp scored {scored} tokens, attlas {[n for _, n in own]}")
            off = min((theirs / ppl - 1 for ppl, _ in own), key=abs)
        size = sum(f.stat().st_size for f in ([model] if model.is_file() else model.glob("*.safetensors")))
        shown = f"{theirs:10.4f}" if theirs else f"{'-':>10}"
        print(f"{name:60} {size / 1e6:6.1f} {own[0][1]:6} {shown} {own[0][0]:10.4f} {own[1][0]:11.4f} "
              + (f"{100 * off:+7.3f}%" if theirs else f"{'-':>8}"), flush=True)
        return abs(off) <= args.within

    for model in args.models:
        ok &= row(model.name, model)
        for how in args.compress:
            with tempfile.TemporaryDirectory() as folder:
                for name, out in ((how, "out.gguf"), ("  on its factors", "out")):
                    to = pathlib.Path(folder) / out
                    ok &= row(name, compressed(args.attlas, model, args.text, args.tokens, args.window, how, to))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
