#!/usr/bin/env python3
"""Peak memory of `attlas generate` on a long prompt, by method and by storage format of keys and values.

    cargo build --release
    python bench/memory.py .models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf data/alice29.txt [--tokens 32768]

Every run is a separate process that reads the prompt and generates 16 tokens; its peak is the largest resident set
(`ru_maxrss`). The first line is the same process with a prompt of a few words: the mapped weights, the program, buffers
for one token. *Above* is the peak of a run minus that of the first line: the cache and the buffers of a chunk. *Cache*
is the size at the end from `--json`.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

RUNS = [("performer", "f32"), ("exact", "f32"), ("exact", "bf16"), ("exact", "q8")]
ADDED = 16


def run(command):
    """The record of a run and its peak in bytes."""
    child = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    out = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        sys.exit(f"{' '.join(map(str, command))}: status {status}")
    # Linux counts in KiB.
    return json.loads(out), 1024 * usage.ru_maxrss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--tokens", type=int, default=32768, help="the context; the prompt takes what is added less")
    parser.add_argument("--runs", nargs="+", default=[f"{m}:{c}" for m, c in RUNS], metavar="METHOD:CACHE")
    parser.add_argument("--attlas", type=pathlib.Path, default=pathlib.Path("target/release/attlas"))
    args = parser.parse_args()
    fixed = [args.attlas, "generate", args.model, "-n", ADDED, "--ignore-eos", "--json", "--quiet"]
    floor, least = run([*fixed, "--prompt", "Alice was"])
    print(f"{'method':10} {'cache in':8} {'prompt':>7} {'cache MB':>9} {'peak MB':>8} {'above MB':>9}")
    print(f"{'exact':10} {'f32':8} {len(floor['prompt_ids']):7} {floor['cache_bytes'] / 1e6:9.2f} {least / 1e6:8.1f} {0:9.1f}")
    text = args.text.read_text()
    # Tokens a letter, from a few pages: the prompt is as long as it can be for its context.
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        letters = prompt_letters(fixed, file, text, args.tokens - ADDED)
        write(file, text[:letters])
        for name in args.runs:
            method, cache = name.split(":")
            record, peak = run([*fixed, "--prompt-file", file.name, "--context", args.tokens, "--method", method,
                                "--cache", cache])
            n = len(record["prompt_ids"])
            print(f"{method:10} {cache:8} {n:7} {record['cache_bytes'] / 1e6:9.2f} {peak / 1e6:8.1f} "
                  f"{(peak - least) / 1e6:9.1f}", flush=True)


def prompt_letters(fixed, file, text, tokens):
    """Number of letters that make at most that many tokens, by the rate of the first 8000 letters, minus 2 %."""
    write(file, text[:8000])
    record, _ = run([*fixed, "--prompt-file", file.name])
    return min(len(text), int(0.98 * 8000 * tokens / len(record["prompt_ids"])))


def write(file, text):
    file.seek(0)
    file.truncate()
    file.write(text)
    file.flush()


if __name__ == "__main__":
    main()
