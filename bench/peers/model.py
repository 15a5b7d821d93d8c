#!/usr/bin/env python3
"""SmolLM2-135M beside transformers (f32) and llama.cpp (llama-cpp-python) on the same threads.

All sides read the same Q4_1 file and the same tokens of data/alice29.txt, alternately, one run each; the table gives the median
of the repetitions. Prefill is one pass over the prompt with logits of its last token; decoding feeds one known token at a time
after a prompt of 1024, so that nobody's sampler is timed.

    bench/peers/model.py                              installs the peers into .cache/peers-model, builds attlas, prints the table
    bench/peers/model.py --cases prefill:512 --repeats 3 --records FILE.jsonl     one case, kept
    bench/peers/model.py --cases none --records FILE.jsonl --out FILE.md          the table of what was kept
    bench/peers/model.py --sides transformers,llama                               without building attlas

llama-cpp-python has no wheel for every platform; pip then compiles it, which takes a C++ compiler and several minutes.
"""
import argparse, json, os, pathlib, statistics, subprocess, sys, time

from sdpa import PAUSE, ROOT, cpu_model, ensure

VENV = ROOT / ".cache" / "peers-model"
MODELS = pathlib.Path(os.environ.get("ATTLAS_MODELS", ROOT / ".models"))
GGUF = MODELS / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
CASES = ["prefill:512", "prefill:2048", "prefill:8000", "decode:1024"]
SIDES = ["attlas", "attlas-bf16", "transformers", "llama"]
STEPS = 64


class Attlas:
    def __init__(self, threads, precision="full"):
        target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
        binary = os.environ.get("ATTLAS_PEER_MODEL")
        if not binary:
            command = ["cargo", "build", "--release", "-q", "-p", "xtask", "--example", "peer_model"]
            subprocess.check_call(command, cwd=ROOT)
            binary = str(target / "release" / "examples" / "peer_model")
        self.threads, self.precision = threads, precision
        self.process = subprocess.Popen([binary, str(GGUF)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def version(self):
        return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()

    def run(self, prompt, steps):
        self.process.stdin.write(json.dumps(dict(threads=self.threads, precision=self.precision, prompt=prompt, steps=steps)) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return answer["prefill"], answer["decode"]


class Transformers:
    def __init__(self, threads):
        # A script beside this one has the name of the library.
        sys.path[:] = [p for p in sys.path if pathlib.Path(p).resolve() != pathlib.Path(__file__).resolve().parent]
        import torch, transformers

        torch.set_num_threads(threads)
        self.torch, self.transformers = torch, transformers
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            GGUF.parent, gguf_file=GGUF.name, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()

    def version(self):
        return f"{self.transformers.__version__} with torch {self.torch.__version__}"

    def run(self, prompt, steps):
        with self.torch.inference_mode():
            start = time.perf_counter()
            out = self.model(self.torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
            prefill = time.perf_counter() - start
            cache = out.past_key_values
            start = time.perf_counter()
            for token in steps:
                out = self.model(self.torch.tensor([[token]]), past_key_values=cache, use_cache=True)
                cache = out.past_key_values
            return prefill, time.perf_counter() - start


class Llama:
    def __init__(self, threads):
        import llama_cpp

        self.library = llama_cpp
        self.model = llama_cpp.Llama(
            str(GGUF), n_ctx=8192, n_batch=512, n_threads=threads, n_threads_batch=threads, flash_attn=True, verbose=False
        )

    def version(self):
        return f"llama-cpp-python {self.library.__version__}, flash attention"

    def run(self, prompt, steps):
        self.model.reset()
        start = time.perf_counter()
        self.model.eval(prompt)
        prefill = time.perf_counter() - start
        start = time.perf_counter()
        for token in steps:
            self.model.eval([token])
        return prefill, time.perf_counter() - start


MAKE = {"attlas": Attlas, "attlas-bf16": lambda threads: Attlas(threads, "bf16"), "transformers": Transformers, "llama": Llama}


def tokens():
    """Alice's first tokens, by llama.cpp's tokeniser."""
    import llama_cpp

    vocabulary = llama_cpp.Llama(str(GGUF), vocab_only=True, verbose=False)
    return vocabulary.tokenize((ROOT / "data" / "alice29.txt").read_bytes(), add_bos=False, special=False)


def measure(cases, names, threads, repeats):
    ids = tokens()
    sides = {name: MAKE[name](threads) for name in names}
    for case in cases:
        kind, n = case.split(":")
        prompt = ids[: int(n)]
        steps = ids[int(n) : int(n) + STEPS] if kind == "decode" else []
        for side in sides.values():
            side.run(ids[:64], ids[64:66])
        for _ in range(repeats):
            for name, side in sides.items():
                # The other side's threads spin for a while after their work: let them go to sleep first.
                time.sleep(PAUSE)
                prefill, decode = side.run(prompt, steps)
                rate = len(steps) / decode if kind == "decode" else len(prompt) / prefill
                yield dict(case=case, side=name, threads=threads, tokens_per_second=rate, version=side.version(), cpu=cpu_model())


def table(records):
    lines = ["# SmolLM2-135M beside transformers and llama.cpp", ""]
    last = {r["side"]: r["version"] for r in records}
    repeats = statistics.median([sum(r["case"] == c and r["side"] == s for r in records) for c in CASES for s in last] or [0])
    lines += [
        f"CPU {records[-1]['cpu']}; " + "; ".join(f"{side} {version}" for side, version in last.items())
        + f"; median of {repeats:.0f} alternating runs.",
        "Command: `bench/peers/model.py`. Tokens per second; ratios are attlas over the peer.",
        "`bf16` is attlas with `--method exact --set precision=bf16`: operands of attention in 16 bits, sums in f32, as",
        "llama.cpp keeps its keys and values in f16.", "",
        "| threads | case | attlas | attlas bf16 | transformers f32 | llama.cpp | over transformers | over llama.cpp | bf16 over llama.cpp |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for threads in sorted({r["threads"] for r in records}):
        for case in CASES:
            rates = {}
            for side in SIDES:
                runs = [r["tokens_per_second"] for r in records if (r["case"], r["side"], r["threads"]) == (case, side, threads)]
                if runs:
                    rates[side] = statistics.median(runs)
            if not rates:
                continue
            cell = lambda side: f"{rates[side]:.1f}" if side in rates else "-"
            ratio = lambda side, ours="attlas": f"{rates[ours] / rates[side]:.2f}" if side in rates and ours in rates else "-"
            lines.append(
                f"| {threads} | {case.replace(':', ' ')} | {cell('attlas')} | {cell('attlas-bf16')} | {cell('transformers')} | {cell('llama')} "
                f"| {ratio('transformers')} | {ratio('llama')} | {ratio('llama', 'attlas-bf16')} |"
            )
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="comma separated, or none")
    parser.add_argument("--sides", default=",".join(SIDES), help="comma separated")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--records", help="JSON lines: what is measured is added, what is there joins the table")
    parser.add_argument("--out", help="write the table to this Markdown file")
    args = parser.parse_args()
    records = []
    if args.records and pathlib.Path(args.records).exists():
        records = [json.loads(line) for line in pathlib.Path(args.records).read_text().splitlines()]
    if args.cases != "none":
        ensure(VENV, "torch", "transformers", "accelerate", "gguf", "sentencepiece", "numpy", "llama-cpp-python")
        for record in measure(args.cases.split(","), args.sides.split(","), args.threads, args.repeats):
            records.append(record)
            if args.records:
                with open(args.records, "a") as file:
                    file.write(json.dumps(record) + "\n")
    text = table(records)
    print(text)
    if args.out:
        pathlib.Path(args.out).write_text(text)


if __name__ == "__main__":
    main()
