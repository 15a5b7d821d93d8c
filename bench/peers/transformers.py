#!/usr/bin/env python3
"""SmolLM2 in transformers with `attlas` against `sdpa`, in the same process and minutes.

    bench/peers/transformers.py [--only prompts|decoding|overhead] [--lengths 2048,8000] [--threads 2] [--runs 3] [--out FILE]

Times whole prompts, the attention function alone inside them, decoding after a prompt, and one call of
`attlas.attention` on one token of 9 heads against 1024 keys and against one, beside the same problem without Python.
Runs alternate; the results are medians.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import sys
import time

# This file has the name of the measured library, and a script's own folder is searched first.
sys.path[:] = [p for p in sys.path if pathlib.Path(p).resolve() != pathlib.Path(__file__).resolve().parent]

import attlas  # noqa: E402
import attlas.transformers  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def timed_attention(name):
    """Registers `name` again with a timer around it; the list collects the seconds."""
    spent = []
    inner = ALL_ATTENTION_FUNCTIONS[name]

    def function(*args, **kwargs):
        begun = time.perf_counter()
        result = inner(*args, **kwargs)
        spent.append(time.perf_counter() - begun)
        return result

    clocked = f"clocked_{name}"
    transformers.AttentionInterface.register(clocked, function)
    mask = transformers.AttentionMaskInterface._global_mapping[name]
    transformers.AttentionMaskInterface.register(clocked, mask)
    return clocked, spent


def prompts(model, ids, lengths, runs):
    rows = []
    clocks = {name: timed_attention(name) for name in ("attlas", "sdpa")}
    for n in lengths:
        tokens = torch.tensor([ids[:n]])
        total = {name: [] for name in clocks}
        inside = {name: [] for name in clocks}
        for run in range(runs + 1):
            for name, (clocked, spent) in clocks.items():
                model.set_attn_implementation(clocked)
                spent.clear()
                begun = time.perf_counter()
                with torch.no_grad():
                    model(input_ids=tokens, use_cache=False, logits_to_keep=1)
                if run:
                    total[name].append(time.perf_counter() - begun)
                    inside[name].append(sum(spent))
        row = {"prompt": n}
        for name in clocks:
            row[f"{name}_seconds"] = statistics.median(total[name])
            row[f"{name}_attention_seconds"] = statistics.median(inside[name])
        row["attention_ratio"] = row["sdpa_attention_seconds"] / row["attlas_attention_seconds"]
        row["whole_ratio"] = row["sdpa_seconds"] / row["attlas_seconds"]
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def decoding(model, ids, runs):
    clocks = {name: timed_attention(name) for name in ("attlas", "sdpa")}
    found = {name: [] for name in clocks}
    for run in range(runs):
        for name in list(clocks)[:: 1 if run % 2 else -1]:
            clocked, spent = clocks[name]
            model.set_attn_implementation(clocked)
            cache = transformers.DynamicCache()
            with torch.no_grad():
                model(input_ids=torch.tensor([ids[:1024]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
                spent.clear()
                begun = time.perf_counter()
                for i in range(64):
                    model(input_ids=torch.tensor([[ids[1024 + i]]]), past_key_values=cache, use_cache=True)
                found[name].append((64 / (time.perf_counter() - begun), statistics.median(spent)))
    row = {}
    for name, seen in found.items():
        row[f"{name}_tokens_per_second"] = statistics.median(speed for speed, _ in seen)
        row[f"{name}_layer_microseconds"] = statistics.median(layer for _, layer in seen) * 1e6
    print(json.dumps(row), flush=True)
    return row


def overhead():
    """Microseconds of one call on one thread: NumPy, torch, and Rust alone, alternately, 20 times 100 calls; medians."""
    rows = []
    calls = 100
    for n in (1, 1024):
        rng = np.random.default_rng(0)
        arrays = [rng.standard_normal((1, heads, rows_, 64), dtype=np.float32) for heads, rows_ in ((9, 1), (3, n), (3, n))]
        tensors = [torch.from_numpy(x) for x in arrays]

        def called(x):
            begun = time.perf_counter()
            for _ in range(calls):
                attlas.attention(*x, num_threads=1)
            return (time.perf_counter() - begun) / calls

        sizes = [1, 9, 3, 1, n, 64, 64]
        kinds = {
            "rust": lambda sizes=sizes: attlas._native.own_seconds("exact", None, sizes, False, 1, calls),
            "numpy": lambda x=arrays: called(x),
            "torch": lambda x=tensors: called(x),
        }
        found = {name: [] for name in kinds}
        with torch.no_grad():
            for run in range(21):
                for name, measure in kinds.items():
                    seconds = measure()
                    if run:
                        found[name].append(seconds * 1e6)
        row = {"keys": n} | {f"{name}_microseconds": statistics.median(x) for name, x in found.items()}
        for name in ("numpy", "torch"):
            row[f"{name}_beyond_rust"] = row[f"{name}_microseconds"] - row["rust_microseconds"]
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("prompts", "decoding", "overhead"), help="one part, in less than three minutes")
    parser.add_argument("--lengths", default="2048,8000")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    attlas.set_num_threads(args.threads)
    attlas.transformers.register()
    record = {
        "threads": args.threads,
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if args.only in (None, "overhead"):
        record["overhead"] = overhead()
    if args.only != "overhead":
        model, ids = load()
    if args.only in (None, "prompts"):
        record["prompts"] = prompts(model, ids, [int(n) for n in args.lengths.split(",")], args.runs)
    if args.only in (None, "decoding"):
        record["decoding"] = decoding(model, ids, args.runs)
    if args.out:
        args.out.write_text(json.dumps(record, indent=2) + "\n")


def load():
    """SmolLM2 and the tokens of a book."""
    folder = pathlib.Path(os.environ.get("ATTLAS_MODELS") or ROOT / ".models") / "smollm2"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    return model, tokenizer((ROOT / "data" / "alice29.txt").read_text(), add_special_tokens=False)["input_ids"]


if __name__ == "__main__":
    main()
