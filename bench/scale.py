#!/usr/bin/env python3
"""Two processes with one thread each against one process with two threads, and the cluster model against both.

    bench/scale.py --model MODEL --text FILE --out docs/benchmarks/scale.md     builds attlas with MPI, measures, writes the page
    bench/scale.py --attlas PATH --only exact,decode                            parts of it, with another program

Parts: exact, long, decode, tune, load, cluster; exact and long also have predictions. Every figure is the median of
five runs or more on one machine with two processors or more; Open MPI's mpirun is needed. About eight minutes on two
cores.
"""
import argparse, json, os, pathlib, shlex, statistics, subprocess, sys, tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
PARTS = ["exact", "long", "decode", "tune", "load", "cluster"]
RUNS = 5


def shown(seconds):
    """Three digits in a readable unit."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (0, "us")):
        if seconds >= size * (1 if unit in ("s", "ms", "us") else 2):
            return digits(seconds / (size or 1e-6), unit)


def size(count):
    for unit, most in (("B", 1e3), ("kB", 1e6), ("MB", 1e9), ("GB", 1e12)):
        if count < most:
            return digits(count / (most / 1e3), unit)
    return digits(count / 1e12, "TB")


def digits(x, unit):
    return f"{x:.0f} {unit}" if x >= 99.95 else f"{x:.3g} {unit}"


def tokens(n):
    """Lengths in the command's syntax."""
    return f"{n >> 20}M" if n % (1 << 20) == 0 else f"{n:,.0f}".replace(",", " ")


def run(command):
    print("+", " ".join(map(shlex.quote, command)), file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


class Pair:
    """The same command on one process with two threads and on two with one each."""

    def __init__(self, attlas, mpirun):
        self.attlas, self.mpirun, self.link, self.rows, self.predicted = attlas, mpirun, None, [], []

    def one(self, *args, threads=2):
        return run([self.attlas, *args, "--threads", str(threads), "--json", "--quiet"])

    def two(self, *args, processes=2, more=()):
        return run([*self.mpirun, *more, "-n", str(processes), self.attlas, *args, "--threads", "1", "--json", "--quiet"])

    def bench(self, name, method, *args, least, predict=True):
        base = ["bench", "--methods", method, *args, "--runs", str(RUNS)]
        one = next(r for r in self.one(*base)["rows"] if r["method"] == method)
        ours = one["run_seconds"]["median"] + (0 if "--decode" in args else one["setup_seconds"]["median"])
        spread = self.two(*base)
        self.link = spread["link"]
        row = next(r for r in spread["rows"] if r["method"] == method)
        self.add(name, " ".join(base), shown(ours), shown(row["median"]), ours / row["median"], least)
        if predict:
            cluster = f"nodes=2,gbps={self.link['gbps']:.3g},us={self.link['us']:.2g}"
            found = self.one(*base, "--cluster", cluster, threads=1)["rows"]
            predicted = next(r for r in found if r["method"] == method)
            self.predicted.append((name, cluster, predicted["seconds"], row["median"]))
            print(f"predicted {shown(predicted['seconds'])}", file=sys.stderr, flush=True)

    def add(self, *row):
        """Adds a row of the page and prints it at once: a stopped run then has results."""
        self.rows.append(row)
        print(*row, sep="; ", file=sys.stderr, flush=True)


def tune(pair, model, text):
    rates = {"one": [], "two": []}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(RUNS):
            for name, start in (("one", pair.one), ("two", pair.two)):
                out = str(pathlib.Path(folder) / f"{name}{i}.toml")
                # Shard 0 of 1: only measurements, without the checks after them.
                args = ["tune", model, "--text", text, "--tokens", "1024", "--max-kl", "0.01", "--effort", "quick"]
                rates[name].append(start(*args, "--shard", "0/1", "--out", out)["heads_per_second"])
    one, two = statistics.median(rates["one"]), statistics.median(rates["two"])
    command = "tune SmolLM2 --tokens 1024 --max-kl 0.01 --effort quick --shard 0/1"
    pair.add("key heads of `tune`, a second", command, f"{one:.2f}", f"{two:.2f}", two / one, 0.90)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--attlas")
    p.add_argument("--model")
    p.add_argument("--text", default=str(ROOT / "data/alice29.txt"))
    p.add_argument("--mpirun", default="mpirun")
    p.add_argument("--only", default=",".join(PARTS))
    p.add_argument("--out")
    a = p.parse_args()
    parts = a.only.split(",")
    if unknown := [x for x in parts if x not in PARTS]:
        sys.exit(f"--only: expected parts among {', '.join(PARTS)}, found {', '.join(unknown)}")
    if "tune" in parts and not a.model:
        sys.exit("--model: expected a model for the part tune, found none; leave the part out with --only")
    if not a.attlas:
        subprocess.check_call(["cargo", "build", "--release", "-q", "-p", "attlas-cli", "--features", "mpi"], cwd=ROOT)
        target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
        a.attlas = str(target / "release" / "attlas")
    pair = Pair(a.attlas, shlex.split(a.mpirun) + (["--allow-run-as-root"] if os.geteuid() == 0 else []))

    heads = ["--d", "64", "--heads", "8"]
    if "exact" in parts:
        pair.bench("`exact`, 8 heads, d 64, n 32768", "exact", "--n", "32k", *heads, least=0.93)
        pair.bench("the same, causal", "exact", "--n", "32k", *heads, "--causal", least=0.93)
    if "long" in parts:
        # Exact attention, which is measured beside others, takes minutes at these lengths and is left out.
        long = ["--n", "128k", *heads, "--max-seconds", "2"]
        pair.bench("`hyper`, 8 heads, d 64, n 131072", "hyper", *long, least=0.90)
        pair.bench("`linear`, causal, the same sizes", "linear", *long, "--causal", least=0.90)
    if "decode" in parts:
        sizes = ["--n", "128k", "--d", "128", "--heads", "32", "--kv-heads", "8", "--decode"]
        pair.bench("decoding, 32 and 8 heads, d 128, 131072 keys", "exact", *sizes, least=0.85, predict=False)
    if "tune" in parts:
        tune(pair, a.model, a.text)

    page = ["# Two processes beside two threads", ""]
    page += ["Command: `bench/scale.py` (medians of five runs; each row's own command after `attlas`, with `--threads 2` in one process", ""]
    page[-2] += " and `--threads 1`\nunder `mpirun -n 2`, planning included unless decoding)."
    if pair.rows:
        page += ["| what | one process | two processes | ratio | command |", "| --- | ---: | ---: | ---: | --- |"]
        page += [f"| {n} | {x} | {y} | {r:.2f} | `{c}` |" for n, c, x, y, r, _ in pair.rows]
        page += ["", "Ratio: time of one process over that of two, or the rates the other way round.", ""]
    if "load" in parts:
        row = pair.two("bench", "--methods", "exact", "--n", "16k", "--causal", "--runs", "1", processes=4,
                       more=["--oversubscribe"])["rows"][0]
        page += [f"Causal load at 16384 tokens on four processes, counted pairs: the process with most has {row['balance']:.4f} of the mean.", ""]
    if pair.predicted:
        page += ["## The model beside the measurement", "",
                 "Predicted by `--cluster` from one thread, counted work and the link that `bench` measured between the processes:", "",
                 "| what | link | predicted | measured | off by |", "| --- | --- | ---: | ---: | ---: |"]
        page += [f"| {n} | `{c}` | {shown(x)} | {shown(y)} | {100 * (x / y - 1):+.1f} % |" for n, c, x, y in pair.predicted]
        page += [""]
    if "cluster" in parts:
        nodes = [8, 16, 32, 64, 128, 256, 512, 1024]
        args = ["bench", "--methods", "exact,linear,wildcat", "--n", "1M,10M", "--causal", "--d", "128", "--heads", "32", "--kv-heads", "8"]
        for n in nodes:
            args += ["--cluster", f"nodes={n},gbps=100,us=2"]
        found = pair.one(*args)["rows"]
        page += ["## Past these machines", "",
                 "32 query heads, 8 key heads, d 128, causal, 100 Gbit/s and 2 µs, from this machine's rates with two threads; assumptions in"
                 " [scale.md](../scale.md#past-these-machines):", "",
                 "| method | schedule | tokens | machines | time | efficiency | sent by each | hidden from |",
                 "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
        for r in found:
            hidden = "-" if r["hidden_from"] is None else tokens(round(r["hidden_from"], 2 - len(str(int(r["hidden_from"])))))
            page += [f"| `{r['method']}` | `{r['schedule']}` | {tokens(r['n'])} | {r['nodes']} | {shown(r['seconds'])} |"
                     f" {100 * r['efficiency']:.1f} % | {size(r['bytes'])} | {hidden} |"]
        page += [""]
    text = "\n".join(page)
    print(text)
    if a.out:
        pathlib.Path(a.out).write_text(text)
    low = [f"{n}: {r:.2f} below {least}" for n, _, _, _, r, least in pair.rows if r < least]
    low += [f"{n}: predicted {100 * (x / y - 1):+.1f} %" for n, _, x, y in pair.predicted if abs(x / y - 1) > 0.15]
    for line in low:
        print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
