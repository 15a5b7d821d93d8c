"""The lab: traces, comparisons, inspections, tuned recipes, reports, perplexities."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from . import _native
from ._arrays import library, threads_for
from ._errors import DataError, ModelError, ParameterError, missing
from ._records import Record

Progress = Callable[[int, int, str], None]


class Layer:
    """Queries, keys and values of one layer, read-only NumPy views of the trace's memory."""

    def __init__(self, native: _native.Trace, layer: int) -> None:
        self.layer = layer
        self.scale = native.scale(layer)
        self.q = np.asarray(native.part(layer, 0))
        self.k = np.asarray(native.part(layer, 1))
        self.v = np.asarray(native.part(layer, 2))

    def __repr__(self) -> str:
        return f"<layer {self.layer}: q {self.q.shape}, k {self.k.shape}, v {self.v.shape}>"


class Trace:
    """Queries, keys and values of one or more layers.

    >>> import attlas
    >>> trace = attlas.demo()
    >>> trace.layers, trace[5].q.shape
    ([5, 29], (2, 8192, 64))
    """

    def __init__(self, native: _native.Trace) -> None:
        self._native = native

    @staticmethod
    def load(path: Any) -> Trace:
        """Read a trace: `.safetensors`, `.npz` or `.npy`."""
        return Trace(_native.Trace.load(os.fspath(path)))

    @staticmethod
    def from_arrays(
        layers: Mapping[int, tuple[Any, Any, Any]],
        *,
        causal: bool = True,
        scale: float | Mapping[int, float] | None = None,
        source: str = "arrays",
        metadata: Mapping[str, str] | None = None,
    ) -> Trace:
        """A trace of arrays `{layer: (q, k, v)}`, each `[heads, n, d]` or `[n, d]`."""
        data = []
        for number, arrays in layers.items():
            q, k, v = (_single(x) for x in arrays)
            data.append((int(number), q, k, v, scale.get(number) if isinstance(scale, Mapping) else scale))
        return Trace(_native.Trace.from_arrays(data, causal, source, dict(metadata or {})))

    def save(self, path: Any) -> None:
        """Write it, in the format given by the name."""
        self._native.save(os.fspath(path))

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers."""
        return self._native.layers

    @property
    def causal(self) -> bool:
        """True if its default mask is causal."""
        return self._native.causal

    @property
    def source(self) -> str:
        """Its source."""
        return self._native.source

    @property
    def metadata(self) -> dict[str, str]:
        """Its metadata."""
        return self._native.metadata

    def __getitem__(self, layer: int) -> Layer:
        return Layer(self._native, layer)

    def __iter__(self) -> Iterator[Layer]:
        return (self[i] for i in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        first = self[self.layers[0]]
        return f"<trace of {self.source}: {len(self)} layers, q {first.q.shape}, k {first.k.shape}>"


def _single(x: Any) -> Any:
    """The array in single precision, readable by the native module."""
    lib = library(x, "trace")
    if lib.name == "torch":
        x = x.detach().float().cpu()
        return x.numpy() if x.is_contiguous() else x.contiguous().numpy()
    return np.ascontiguousarray(np.asarray(x), dtype=np.float32)


def demo() -> Trace:
    """Real queries, keys and values of SmolLM2-135M, part of the package."""
    return Trace(_native.Trace.load("demo"))


def synthetic(kind: str = "clustered", *, n: int = 2048, d: int = 64, heads: int = 1, kv_heads: int | None = None, seed: int = 0) -> Trace:
    """Inputs from a random model of attention: gaussian, clustered, heavy_hitters, low_rank, smooth or needle.

    >>> import attlas
    >>> attlas.synthetic("needle", n=64, d=8, heads=2)[0].q.shape
    (2, 64, 8)
    """
    return Trace(_native.Trace.load(f"synthetic:{kind},n={n},d={d},heads={heads},kv_heads={kv_heads or heads},seed={seed}"))


class Recipe:
    """Assignment of methods to layers and heads.

    >>> import attlas
    >>> recipe = attlas.Recipe.uniform("sink_window", window=64)
    >>> recipe.choice(3, 1)
    ('sink_window', 'window=64')
    """

    def __init__(self, native: _native.Recipe) -> None:
        self._native = native

    @staticmethod
    def load(path: Any) -> Recipe:
        """Read a recipe file (TOML)."""
        return Recipe(_native.Recipe.load(os.fspath(path)))

    @staticmethod
    def from_toml(text: str) -> Recipe:
        """Read the text of a recipe."""
        return Recipe(_native.Recipe.from_toml(text))

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Recipe:
        """Make a recipe from a dictionary with the fields of the file."""
        return Recipe(_native.Recipe.from_json(json.dumps(data)))

    @staticmethod
    def uniform(method: str = "exact", **params: Any) -> Recipe:
        """The same method everywhere."""
        return Recipe(_native.Recipe.uniform(method, params))

    def save(self, path: Any) -> None:
        """Write it as TOML, which `attlas generate --recipe` reads, too."""
        temporary = f"{os.fspath(path)}.tmp"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(self.to_toml())
            os.replace(temporary, path)
        except OSError as error:
            raise DataError(f"{os.fspath(path)}: writing failed: {error}") from None

    def to_toml(self) -> str:
        """The text of the file."""
        return self._native.to_toml()

    def to_dict(self) -> dict[str, Any]:
        """The fields of the file."""
        data: dict[str, Any] = json.loads(self._native.to_json())
        return data

    def choice(self, layer: int, head: int) -> tuple[str, str]:
        """The method of one query head, and its settings."""
        return self._native.choice(layer, head)

    @property
    def methods(self) -> list[str]:
        """Every method that it names."""
        return self._native.methods

    def __repr__(self) -> str:
        return f"<recipe: {', '.join(self.methods)}, {len(self.to_dict().get('rule', []))} rules>"

    def _repr_html_(self) -> str:
        """A map of layers and heads, where the rules name them."""
        from html import escape

        data = self.to_dict()
        rules = data.get("rule", [])
        layers = [n for r in rules for n in _numbers(r.get("layers"))]
        heads = [n for r in rules for n in _numbers(r.get("heads"))]
        if not layers:
            return f"<pre>{escape(self.to_toml())}</pre>"
        width = max(heads, default=0) + 1
        head_row = "".join(f"<th>{h}</th>" for h in range(width))
        rows = "".join(
            f"<tr><th>{layer}</th>"
            + "".join(f'<td title="{escape(self.choice(layer, h)[1])}">{escape(self.choice(layer, h)[0])}</td>' for h in range(width))
            + "</tr>"
            for layer in range(max(layers) + 1)
        )
        return f"<table><thead><tr><th>layer</th>{head_row}</tr></thead><tbody>{rows}</tbody></table>"


def _numbers(text: str | None) -> list[int]:
    found: list[int] = []
    for part in (text or "").split(","):
        first, _, last = part.partition("-")
        if first:
            found.extend(range(int(first), int(last or first) + 1))
    return found


def as_recipe(what: Any, params: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe from a recipe, a dictionary, the id of a method, or the path of a file."""
    params = dict(params or {})
    if isinstance(what, Mapping):
        what = Recipe.from_dict(what)
    if isinstance(what, Recipe):
        if params:
            raise ParameterError("parameters belong to a method, not to a recipe", next(iter(params)), "", "a method")
        return what
    text = os.fspath(what)
    if text.endswith(".toml") or os.sep in text or os.path.exists(text):
        return as_recipe(Recipe.load(text), params)
    return Recipe.uniform(text, **params)


class _Steps:
    """Progress messages for the user."""

    def __init__(self, progress: bool | Progress | None) -> None:
        self.call: Progress | None = progress if callable(progress) else None
        self.bar: Any = None
        if progress is True:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                self.call = _lines
            else:
                self.bar = tqdm(leave=False)
                self.call = self._step

    def _step(self, done: int, total: int, text: str) -> None:
        self.bar.total = total
        self.bar.n = done
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.refresh()

    def __enter__(self) -> Progress | None:
        return self.call

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()


def _lines(done: int, total: int, text: str) -> None:
    print(f"{done}/{total} {text}", file=sys.stderr, flush=True)


def _words(x: str | Iterable[str] | None) -> list[str]:
    if x is None:
        return []
    return [w for w in x.split(",") if w] if isinstance(x, str) else list(x)


def _settings(x: Mapping[str, Any] | Iterable[str] | None) -> list[str]:
    if isinstance(x, Mapping):
        return [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in x.items()]
    return _words(x)


def _span(x: str | Iterable[int] | int | None) -> str | None:
    if x is None or isinstance(x, str):
        return x
    if isinstance(x, int):
        return str(x)
    return ",".join(str(int(i)) for i in x)


def is_model(x: Any) -> bool:
    """True if it is a transformers model."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.nn.Module)


def trace_of(
    source: Any,
    text: Any = None,
    tokenizer: Any = None,
    tokens: int = 2048,
    layers: Any = None,
    heads: Any = None,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> Trace:
    """The trace that a source names."""
    if isinstance(source, Trace):
        trace = source
    elif is_model(source):
        return extract(source, text, tokenizer=tokenizer, tokens=tokens, layers=layers, heads=heads)
    elif isinstance(source, Mapping):
        trace = Trace.from_arrays(source)
    else:
        name = os.fspath(source)
        if text is not None:
            threads = threads_for(num_threads, None)
            return Trace(_native.Trace.extract(name, os.fspath(text), tokens, _span(layers), _span(heads), threads, progress))
        trace = Trace.load(name)
    if layers is not None:
        trace = Trace(trace._native.keep(_numbers(_span(layers))))
    return trace


def compare(
    source: Any = "demo",
    *,
    methods: str | Iterable[str] | None = None,
    set: Mapping[str, Any] | Iterable[str] | None = None,
    match: str | None = None,
    seeds: int = 5,
    seed: int = 0,
    causal: bool | None = None,
    layers: Any = None,
    text: Any = None,
    tokenizer: Any = None,
    tokens: int = 2048,
    time_limit: float | None = None,
    num_threads: int | None = None,
    progress: bool | Progress | None = None,
    on_interrupt: str = "raise",
) -> Record:
    """Errors and times of methods against exact attention, on the queries, keys and values of a source.

    `source` is a `Trace`, `"demo"`, `"synthetic:clustered,n=4096"`, a file, a GGUF file with `text=`, or a transformers model
    with `text=` and `tokenizer=`. `set` is `{"top_k.keys": 32}`. Ctrl-C raises `KeyboardInterrupt`; with
    `on_interrupt="return"` the finished part is returned.

    >>> import attlas
    >>> c = attlas.compare(attlas.synthetic(n=128, d=16), methods="top_k", set={"top_k.keys": 16}, seeds=1)
    >>> c.summary[-1].method
    'top_k'
    """
    if on_interrupt not in ("raise", "return"):
        expected = "raise or return"
        raise ParameterError(f"on_interrupt: expected {expected}, found {on_interrupt!r}", "on_interrupt", str(on_interrupt), expected)
    with _Steps(progress) as watch:
        trace = trace_of(source, text, tokenizer, tokens, layers, None, num_threads, watch)
        shown = _native.compare(
            trace._native, _words(methods), _settings(set), match, seeds, seed, causal, time_limit,
            threads_for(num_threads, None), watch, on_interrupt == "return",
        )  # fmt: skip
    return Record._shown(shown, "rows")


def inspect(
    source: Any = "demo",
    *,
    heads: Any = None,
    rank: int | None = None,
    seed: int | None = None,
    causal: bool | None = None,
    layers: Any = None,
    text: Any = None,
    tokenizer: Any = None,
    tokens: int = 2048,
    num_threads: int | None = None,
    progress: bool | Progress | None = None,
    on_interrupt: str = "raise",
) -> Record:
    """Patterns, sinks, spectra and ranks of heads.

    >>> import attlas
    >>> attlas.inspect(attlas.synthetic(n=64, d=8)).heads[0].head
    0
    """
    figures = ",".join(f"{n}={x}" for n, x in (("rank", rank), ("seed", seed)) if x is not None)
    with _Steps(progress) as watch:
        trace = trace_of(source, text, tokenizer, tokens, layers, None, num_threads, watch)
        threads = threads_for(num_threads, None)
        shown = _native.inspect(trace._native, _span(heads), figures, causal, threads, watch, on_interrupt == "return")
    return Record._shown(shown, "heads")


class Report:
    """A report page; opens from disk, shown in a frame in a notebook."""

    def __init__(self, page: str) -> None:
        self.html = page

    def save(self, path: Any) -> None:
        """Write the page."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.html)

    def __repr__(self) -> str:
        return f"<report of {len(self.html)} bytes: .save(path)>"

    def _repr_html_(self) -> str:
        from html import escape

        return f'<iframe srcdoc="{escape(self.html)}" style="width:100%;height:48em;border:0" title="attlas report"></iframe>'


def report(
    source: Any = "demo",
    *,
    recipe: Any = None,
    out: Any = "report.html",
    methods: str | Iterable[str] | None = None,
    seeds: int = 3,
    layers: Any = None,
    text: Any = None,
    tokenizer: Any = None,
    tokens: int = 2048,
    time_limit: float | None = None,
    rank: int | None = None,
    num_threads: int | None = None,
    progress: bool | Progress | None = None,
) -> Report:
    """Inspect and compare a source and put it on one page, written to `out` unless that is `None`."""
    given = None
    if recipe is not None:
        name = recipe if isinstance(recipe, str) else "recipe"
        given = (name, as_recipe(recipe)._native)
    with _Steps(progress) as watch:
        trace = trace_of(source, text, tokenizer, tokens, layers, None, num_threads, watch)
        figures = "" if rank is None else f"rank={rank}"
        page = _native.report(
            trace._native, given, _words(methods), seeds, time_limit, figures, threads_for(num_threads, None),
            f"attlas.report({trace.source!r})", watch,
        )  # fmt: skip
    made = Report(page)
    if out is not None:
        made.save(out)
    return made


def token_ids(text: Any, tokenizer: Any) -> tuple[list[int], str, str]:
    """Tokens of a text, of a text file, or given directly; with a name and the hash of the bytes."""
    if isinstance(text, str | os.PathLike):
        name = "text"
        words: str
        if isinstance(text, os.PathLike) or (len(text) < 4096 and "\n" not in text and os.path.isfile(text)):
            name = os.fspath(text)
            try:
                with open(text, encoding="utf-8", newline="") as file:
                    words = file.read()
            except OSError as error:
                raise DataError(f"{name}: reading failed: {error}") from None
        else:
            words = str(text)
        if tokenizer is None:
            raise ParameterError("tokenizer: expected one that fits the model, found none", "tokenizer", "None", "a tokenizer")
        ids = tokenizer(words, add_special_tokens=False)["input_ids"]
        digest = hashlib.sha256(words.encode()).hexdigest()
    else:
        ids = text.tolist() if hasattr(text, "tolist") else list(text)
        if ids and isinstance(ids[0], list):
            if len(ids) != 1:
                raise ParameterError("text: expected one sequence of tokens, found a batch", "text", str(len(ids)), "one")
            ids = ids[0]
        name, digest = "tokens", hashlib.sha256(np.asarray(ids, dtype=np.int64).tobytes()).hexdigest()
    if not ids:
        raise ParameterError("text: expected one or more tokens, found none", "text", "", "one or more tokens")
    return [int(i) for i in ids], name, digest


def extract(
    model: Any,
    text: Any,
    *,
    tokenizer: Any = None,
    tokens: int = 2048,
    layers: Any = None,
    heads: Any = None,
    num_threads: int | None = None,
    progress: bool | Progress | None = None,
) -> Trace:
    """Queries, keys and values of a model reading a text.

    `model` is a transformers model of any architecture that follows its attention interface, with `text` a text, the path of
    one, or token ids; or the path of a GGUF file or folder for the Rust runtime, with `text` the path of a text.
    """
    if not is_model(model):
        with _Steps(progress) as watch:
            threads = threads_for(num_threads, None)
            native = _native.Trace.extract(
                os.fspath(model), os.fspath(text), tokens, _span(layers), _span(heads), threads, watch
            )
        return Trace(native)
    from .transformers import _extract

    return _extract(model, text, tokenizer, tokens, _span(layers), _span(heads))


def perplexity(
    model: Any,
    text: Any,
    *,
    tokenizer: Any = None,
    method: str | None = None,
    recipe: Any = None,
    window: int = 2048,
    stride: int | None = None,
    tokens: int | None = None,
    num_threads: int | None = None,
    progress: bool | Progress | None = None,
    **params: Any,
) -> Record:
    """Perplexity of a model on a text, also with a method or recipe: the record of `attlas perplexity --json`."""
    if method is not None and recipe is not None:
        raise ParameterError("method and recipe: expected one of them, found both", "recipe", "both", "one")
    what = None if method is None and recipe is None else as_recipe(recipe if recipe is not None else method, params)
    stride = window if stride is None else stride
    if not is_model(model):
        with _Steps(progress) as watch:
            told = _native.perplexity_of_file(
                os.fspath(model), os.fspath(text), tokens, window, stride, None if what is None else what._native,
                threads_for(num_threads, None), watch,
            )  # fmt: skip
        return Record(json.loads(told))
    ids, name, digest = token_ids(text, tokenizer)
    with _Steps(progress) as watch:
        return Record(_score(model, ids[:tokens], name, digest, what, window, stride, watch))


def _windows(n: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """First token, end, first target of each window, as the command line cuts a text."""
    if window < 2:
        raise ParameterError(f"window = {window} is not accepted; expected 2 or more", "window", str(window), "2 or more")
    if not 1 <= stride <= window:
        raise ParameterError(f"stride = {stride} is not accepted; expected 1 to {window}", "stride", str(stride), f"1 to {window}")
    if n < 2:
        raise ParameterError(f"text: expected at least 2 tokens, found {n}", "text", str(n), "at least 2 tokens")
    found, scored = [], 0
    for start in range(0, n, stride):
        end = min(start + window, n)
        first = max(scored, start + 1)
        if first < end:
            found.append((start, end, first))
        scored = end
        if end == n:
            break
    return found


_LOGIT_ROWS = 256


def _score(
    model: Any, ids: Sequence[int], name: str, digest: str, recipe: Recipe | None, window: int, stride: int, watch: Progress | None
) -> dict[str, Any]:
    import torch

    from . import transformers as hf

    spans = _windows(len(ids), window, stride)
    exact_too = recipe is not None and recipe.to_dict() != Recipe.uniform("exact").to_dict()
    nll: list[Any] = []
    base: list[Any] = []
    kl: list[Any] = []
    top: list[Any] = []
    change: list[Any] = []
    seconds = exact_seconds = 0.0
    keys = exact_keys = 0
    run = 0

    def logits(what: Recipe, tokens: Any) -> tuple[Any, float, int]:
        with hf.use(model, what) as used, torch.no_grad():
            begun = time.perf_counter()
            out = model(input_ids=tokens, use_cache=False).logits[0]
            spent = time.perf_counter() - begun
            stats = hf.stats(used.name)
        if not stats["calls"]:
            raise ModelError("the model did not use attlas: its class does not follow the attention interface")
        return out, spent, stats["keys_visited"]

    subject = recipe if recipe is not None else Recipe.uniform("exact")
    was_training = model.training
    model.eval()
    try:
        for step, (start, end, first) in enumerate(spans):
            if watch is not None:
                so_far = math.exp(float(torch.cat(nll).mean())) if nll else math.nan
                watch(step, len(spans), f"perplexity {so_far:.3f}")
            tokens = torch.tensor([list(ids[start:end])], device="cpu")
            run += end - start
            ours, spent, visited = logits(subject, tokens)
            seconds, keys = seconds + spent, keys + visited
            theirs = None
            if exact_too:
                theirs, spent, visited = logits(Recipe.uniform("exact"), tokens)
                exact_seconds, exact_keys = exact_seconds + spent, exact_keys + visited
            rows = slice(first - start - 1, end - start - 1)
            targets = tokens[0, first - start : end - start]
            for at in range(0, len(targets), _LOGIT_ROWS):
                some = targets[at : at + _LOGIT_ROWS, None]
                a = ours[rows][at : at + _LOGIT_ROWS].double().log_softmax(-1)
                nll.append(-a.gather(-1, some)[:, 0])
                if theirs is not None:
                    b = theirs[rows][at : at + _LOGIT_ROWS].double().log_softmax(-1)
                    base.append(-b.gather(-1, some)[:, 0])
                    kl.append((b.exp() * (b - a)).sum(-1).clamp_min(0))
                    top.append(a.argmax(-1) == b.argmax(-1))
                    change.append(a.gather(-1, some)[:, 0].exp() - b.gather(-1, some)[:, 0].exp())
    finally:
        model.train(was_training)
    losses = torch.cat(nll)
    mean, se = _mean(losses)
    record: dict[str, Any] = {
        "text": name, "text_sha256": digest, "tokens": len(ids), "scored": len(losses), "protocol": "strided",
        "context": window, "stride": stride, "bos": False, "windows": len(spans),
        "attention": "recipe" if subject.to_dict().get("rule") else subject.to_dict()["default"]["method"],
        "params": subject.to_dict()["default"].get("params", {}), "nll": mean, "nll_se": se, "ppl": math.exp(mean),
        "ppl_se": math.exp(mean) * se, "seconds": seconds, "tokens_per_second": run / max(seconds, 1e-12),
    }  # fmt: skip
    if exact_too:
        exact_mean, _ = _mean(torch.cat(base))
        divergence = torch.cat(kl)
        kl_mean, kl_se = _mean(divergence)
        quantile = {f"kl_{n}": float(torch.quantile(divergence, p)) for n, p in (("median", 0.5), ("q90", 0.9), ("q99", 0.99), ("max", 1.0))}
        moved = torch.cat(change)
        record |= {
            "exact_nll": exact_mean, "exact_ppl": math.exp(exact_mean), "ppl_increase": math.exp(mean - exact_mean) - 1,
            **_paired(losses - torch.cat(base)),
            "kl_mean": kl_mean, "kl_se": kl_se, **quantile, "same_top": float(torch.cat(top).double().mean()),
            "delta_p_mean": float(moved.mean()), "delta_p_rms": float(moved.square().mean().sqrt()),
            "exact_seconds": exact_seconds, "keys_share": keys / max(exact_keys, 1),
            "fell_back": float(divergence.max()) == 0 and float(moved.abs().max()) == 0,
            "past_recipe": window > subject.to_dict().get("tokens", window),
        }  # fmt: skip
    return record | {"interrupted": False}


_RUN = 64
"""Scored tokens whose mean counts as one observation: neighbours are not independent."""


def _paired(increase: Any) -> dict[str, float | None]:
    """Mean increase of the loss token by token, and its standard error from means of runs; none for fewer than two."""
    runs = increase[: len(increase) // _RUN * _RUN].reshape(-1, _RUN).mean(-1)
    se = _mean(runs)[1] if len(runs) > 1 else None
    return {"nll_increase": float(increase.mean()), "nll_increase_se": se}


def _mean(x: Any) -> tuple[float, float]:
    """Mean and standard error."""
    se = float(x.std() / math.sqrt(len(x))) if len(x) > 1 else math.nan
    return float(x.mean()), se if math.isfinite(se) else 0.0


class Tuned(Record):
    """The result of `tune`; `recipe` is the `Recipe`, `rounds` are the budgets tried."""

    _recipe: Recipe | None = None

    @property
    def recipe(self) -> Recipe | None:
        """The recipe, to be saved or used."""
        return self._recipe


def tune(
    model: Any,
    text: Any,
    *,
    tokenizer: Any = None,
    check_text: Any = None,
    max_error: float | None = None,
    max_kl: float | None = None,
    max_ppl_increase: float | None = None,
    tokens: int | None = None,
    check_tokens: int | None = None,
    methods: str | Iterable[str] | None = None,
    set: Mapping[str, Any] | Iterable[str] | None = None,
    effort: str = "normal",
    seed: int = 0,
    state: Any = None,
    name: str | None = None,
    num_threads: int | None = None,
    progress: bool | Progress | None = None,
) -> Tuned:
    """Choose a method for each head of a transformers model within an accepted error.

    Heads are measured on the model's own queries, keys and values by the Rust search; each recipe is checked by running the
    model on text that was not used for tuning. `state` is a file of measurements from which an
    interrupted search resumes.
    Models of the Rust runtime are tuned by `attlas tune`.
    """
    if not is_model(model):
        raise ModelError("expected a transformers model, found a path: the command `attlas tune` is for files")
    if max_error is None and max_kl is None and max_ppl_increase is None:
        raise ParameterError("expected a budget: max_error, max_kl or max_ppl_increase", "max_error", "None", "a number")
    from .transformers import _longest, shape_of

    ids, source, digest = token_ids(text, tokenizer)
    longest = _longest(model)
    share = len(ids) if check_text is not None else len(ids) // 2
    n = min(2048, longest, share) if tokens is None else tokens
    if not 0 < n <= min(len(ids), longest):
        expected = f"1 to {min(len(ids), longest)} tokens"
        raise ParameterError(f"tokens: expected {expected}, found {n}", "tokens", str(n), expected)
    if check_text is None:
        other, other_name, other_digest = ids[n:], f"{source} after its first {n} tokens", digest
    else:
        other, other_name, other_digest = token_ids(check_text, tokenizer)
    other = other[: n if check_tokens is None else check_tokens]
    if len(other) < 16:
        expected = "16 tokens or more that are not used for tuning, or check_text"
        raise ParameterError(f"text: expected {expected}, found {len(other)}", "text", str(len(other)), expected)

    def check(toml: str, context: int) -> str:
        return json.dumps(_score(model, other, other_name, other_digest, Recipe.from_toml(toml), context, context, None))

    with _Steps(progress) as watch:
        if watch is not None:
            watch(0, 1, "reading")
        trace = extract(model, ids[:n])
        told, table, markdown, recipe = _native.tune(
            trace._native, check, (name or type(model).__name__, shape_of(model)),
            [(source, digest, n), (other_name, other_digest, len(other))], (max_error, max_kl, max_ppl_increase),
            _words(methods), _settings(set), effort, seed, None if state is None else os.fspath(state), None,
            threads_for(num_threads, None), watch,
        )  # fmt: skip
    tuned = Tuned(json.loads(told), text=table, markdown=markdown, rows="picks")
    tuned._recipe = None if recipe is None else Recipe(recipe)
    return tuned


def need(package: str, extra: str) -> Any:
    """Import an optional library; the error names the extra that installs it."""
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError:
        raise missing(package, extra) from None
