#!/usr/bin/env python3
"""A model, by default SmolLM2-135M in Q4_1, against transformers (f32) and llama.cpp (llama-cpp-python).

All sides read the same file and the same tokens of data/alice29.txt, alternately, one run each; the table gives the
median of the repetitions. Prefill is one pass over the prompt with logits of its last token; decoding feeds one known
token at a time after a prompt of 1024, which excludes samplers from the times. Repetitions cycle through all cases: a
run that is stopped, or that ends after --seconds, has a table of all of them.

    bench/peers/model.py                              installs the peers into .cache/peers-model, builds attlas, prints the table
    bench/peers/model.py --cases prefill:512 --repeats 3 --records FILE.jsonl     one case, kept
    bench/peers/model.py --cases none --records FILE.jsonl --out FILE.md          the table of what was kept
    bench/peers/model.py --sides transformers,llama                               without building attlas
    bench/peers/model.py --sides attlas,attlas-int8                               attlas alone, with nothing to install
    bench/peers/model.py --recipe FILE.toml                                       a tuned recipe as a further side, in int8
    bench/peers/model.py --model random:Q4_K --sides attlas-int8,llama            another file; random:Q4_K and random:Q8_0 are made
                                                                                  by random_model.py, one billion parameters

llama-cpp-python has no wheel for every platform; pip then compiles it, which takes a C++ compiler and several minutes.
"""
import argparse, json, os, pathlib, signal, statistics, subprocess, sys, time

from sdpa import PAUSE, ROOT, cpu_model, ensure

VENV = ROOT / ".cache" / "peers-model"
MODELS = pathlib.Path(os.environ.get("ATTLAS_MODELS", ROOT / ".models"))
SMOLLM2 = MODELS / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
# The file that all sides read.
GGUF = SMOLLM2
CASES = ["prefill:512", "prefill:2048", "prefill:8000", "decode:1024"]
SIDES = ["attlas", "attlas-bf16", "attlas-int8", "attlas-int8-bf16", "attlas-int8-cache", "attlas-recipe", "transformers", "llama"]
STEPS = 64


class Attlas:
    def __init__(self, threads, precision="full", compute="f32", recipe=None, cache="f32"):
        target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
        binary = os.environ.get("ATTLAS_PEER_MODEL")
        if not binary:
            command = ["cargo", "build", "--release", "-q", "-p", "xtask", "--example", "peer_model"]
            subprocess.check_call(command, cwd=ROOT)
            binary = str(target / "release" / "examples" / "peer_model")
        self.how = dict(threads=threads, precision=precision, compute=compute, recipe=recipe, cache=cache)
        self.process = subprocess.Popen([binary, str(GGUF)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def version(self):
        return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()

    def ask(self, **request):
        self.process.stdin.write(json.dumps({**self.how, **request}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def run(self, prompt, steps):
        answer = self.ask(prompt=prompt, steps=steps)
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


MAKE = {
    "attlas": Attlas,
    "attlas-bf16": lambda threads: Attlas(threads, "bf16"),
    "attlas-int8": lambda threads: Attlas(threads, "full", "int8"),
    "attlas-int8-bf16": lambda threads: Attlas(threads, "bf16", "int8"),
    "attlas-int8-cache": lambda threads: Attlas(threads, "full", "int8", cache="bf16"),
    "transformers": Transformers,
    "llama": Llama,
}
HEADINGS = {
    "attlas": "attlas", "attlas-bf16": "attlas bf16", "attlas-int8": "attlas int8", "attlas-int8-bf16": "attlas int8, bf16",
    "attlas-int8-cache": "attlas int8, bf16 cache", "attlas-recipe": "attlas int8, recipe", "transformers": "transformers f32", "llama": "llama.cpp",
}
# The packages of a side.
NEEDS = {"transformers": ["torch", "transformers", "accelerate", "gguf", "sentencepiece", "numpy"], "llama": ["llama-cpp-python"]}


def tokens(sides):
    """Alice's first tokens."""
    text = ROOT / "data" / "alice29.txt"
    for side in sides.values():
        if isinstance(side, Attlas):
            return side.ask(tokens=str(text))["tokens"]
    import llama_cpp

    vocabulary = llama_cpp.Llama(str(GGUF), vocab_only=True, verbose=False)
    return vocabulary.tokenize(text.read_bytes(), add_bos=False, special=False)


def measure(cases, names, threads, repeats, recipe, seconds):
    end = time.monotonic() + seconds
    make = dict(MAKE, **{"attlas-recipe": lambda threads: Attlas(threads, "full", "int8", recipe)})
    sides = {name: make[name](threads) for name in names}
    ids = tokens(sides)
    ours = next((side for side in sides.values() if isinstance(side, Attlas)), None)
    ceilings = None
    for side in sides.values():
        side.run(ids[:64], ids[64:66])
    for _ in range(repeats):
        if ours:
            # Other load on the machine can only lower them.
            seen = ours.ask(ceilings=True)
            ceilings = {name: max(rate, (ceilings or seen)[name]) for name, rate in seen.items()}
        for case in cases:
            kind, n = case.split(":")
            prompt = ids[: int(n)]
            steps = ids[int(n) : int(n) + STEPS] if kind == "decode" else []
            for name, side in sides.items():
                if time.monotonic() > end:
                    return
                # The other side's threads spin for a while after their work: wait until they sleep.
                time.sleep(PAUSE)
                prefill, decode = side.run(prompt, steps)
                rate = len(steps) / decode if kind == "decode" else len(prompt) / prefill
                yield dict(
                    case=case, side=name, threads=threads, tokens_per_second=rate, version=side.version(), cpu=cpu_model(),
                    ceilings=ceilings, cache=side.how["cache"] if isinstance(side, Attlas) else None,
                )


def model_file(name):
    """The file of the model; a missing one with random weights is made."""
    kind, _, format = name.partition(":")
    if name == "smollm2":
        return SMOLLM2
    if kind != "random":
        return pathlib.Path(name).resolve()
    import random_model

    path = ROOT / ".cache" / f"random-{format}.gguf"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(".part")
        random_model.write(format, part, SMOLLM2)
        part.rename(path)
    return path


def share(case, rate, ceilings, cache):
    """Share of the machine's rate: 8-bit products in a prompt, bytes read while decoding."""
    kind, n = case.split(":")
    if kind == "prefill":
        return rate * ceilings["products"] / ceilings["int8_per_second"]
    return rate * (ceilings["stored"] + int(n) * ceilings["cached"][cache]) / ceilings["read_per_second"]


def table(records, model):
    lines = [f"# {model} beside its peers", ""]
    if not records:
        return "\n".join(lines + ["Nothing was measured."]) + "\n"
    last = {r["side"]: r["version"] for r in records}
    sides = [side for side in SIDES if side in last]
    cases = list(dict.fromkeys([c for c in CASES if any(r["case"] == c for r in records)] + [r["case"] for r in records]))
    counts = [sum(r["case"] == c and r["side"] == s for r in records) for c in cases for s in last]
    lines += [
        f"CPU {records[-1]['cpu']}; " + "; ".join(f"{side} {version}" for side, version in last.items())
        + f"; median of {statistics.median([c for c in counts if c] or [0]):.0f} alternating runs.",
        "Command: `bench/peers/model.py`. Tokens per second. `attlas` multiplies in f32; `int8` with `--compute int8`; `bf16` with",
        "`--method exact --set precision=bf16`: operands of attention in 16 bits, sums in f32; `bf16 cache` with `--cache bf16`.",
        "llama.cpp rounds activations to eight bits and stores keys and values in f16.", "",
        "| threads | case | " + " | ".join(HEADINGS[s] for s in sides) + " |",
        "|---|---|" + "---|" * len(sides),
    ]
    peers, ours = [s for s in ["transformers", "llama"] if s in last], [s for s in sides if s.startswith("attlas")]
    over, shares = [], []
    for threads in sorted({r["threads"] for r in records}):
        for case in cases:
            rates, of, cache = {}, {}, {}
            for side in sides:
                runs = [r for r in records if (r["case"], r["side"], r["threads"]) == (case, side, threads)]
                if runs:
                    rates[side] = statistics.median(r["tokens_per_second"] for r in runs)
                    of[side], cache[side] = runs[-1].get("ceilings"), runs[-1].get("cache")
            if not rates:
                continue
            start = f"| {threads} | {case.replace(':', ' ')} |"
            lines.append(start + "".join(f" {rates[s]:.1f} |" if s in rates else " - |" for s in sides))
            ratio = lambda a, b: f" {rates[a] / rates[b]:.2f} |" if a in rates and b in rates else " - |"
            over.append(start + "".join(ratio(a, b) for b in peers for a in ours))
            part = lambda s: f" {100 * share(case, rates[s], of[s], cache[s]):.0f} % |" if of.get(s) else " - |"
            shares.append(start + "".join(part(s) for s in ours))
    if peers and ours:
        lines += ["", "Ratios, attlas over the peer:", "", "| threads | case | "
                  + " | ".join(f"{HEADINGS[a]} over {HEADINGS[b]}" for b in peers for a in ours) + " |", "|---|---|" + "---|" * (len(peers) * len(ours))]
        lines += over
    found = [r["ceilings"] for r in records if r.get("ceilings")]
    if found and ours:
        c = found[-1]
        lines += [
            "",
            f"Shares of the machine's rates on the same threads: for prompts, products without attention, of {c['int8_per_second'] / 1e12:.2f} T 8-bit",
            f"multiplications and additions a second; for decoding, bytes of weights and cache, of {c['read_per_second'] / 1e9:.1f} GB/s.",
            "", "| threads | case | " + " | ".join(HEADINGS[a] for a in ours) + " |", "|---|---|" + "---|" * len(ours),
        ] + shares
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="comma separated, or none")
    parser.add_argument("--sides", default=",".join(s for s in SIDES if s != "attlas-recipe"), help="comma separated")
    parser.add_argument("--model", default="smollm2", help="smollm2, random:Q4_K, random:Q8_0 or a GGUF file")
    parser.add_argument("--recipe", help="a recipe that a further side attends by")
    parser.add_argument("--seconds", type=float, default=540, help="start no run after so many seconds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--records", help="JSON lines: what is measured is added, what is there joins the table")
    parser.add_argument("--out", help="write the table to this Markdown file")
    args = parser.parse_args()
    global GGUF
    GGUF = model_file(args.model)
    records = []
    if args.records and pathlib.Path(args.records).exists():
        records = [json.loads(line) for line in pathlib.Path(args.records).read_text().splitlines()]
    if args.cases != "none":
        sides = args.sides.split(",") + (["attlas-recipe"] if args.recipe else [])
        needs = [package for side in sides for package in NEEDS.get(side, [])]
        if needs:
            ensure(VENV, *needs)
        # A stopped script prints its measurements.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        recipe = str(pathlib.Path(args.recipe).resolve()) if args.recipe else None
        try:
            for record in measure(args.cases.split(","), sides, args.threads, args.repeats, recipe, args.seconds):
                records.append(record)
                if args.records:
                    with open(args.records, "a") as file:
                        file.write(json.dumps(record) + "\n")
        except KeyboardInterrupt:
            print("stopped: the table is of the runs that ended", file=sys.stderr)
    text = table(records, {"smollm2": "SmolLM2-135M"}.get(args.model, args.model))
    print(text)
    if args.out:
        pathlib.Path(args.out).write_text(text)


if __name__ == "__main__":
    main()
