"""The lab in Python: records, pictures, progress, interrupts, tuning."""

import json
import os
import signal
import subprocess
import sys
import threading
from html.parser import HTMLParser

import attlas
import numpy as np
import pytest
from conftest import has, need


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)


def test_a_comparison_is_the_command_lines():
    ours = attlas.compare("synthetic:clustered,n=256,d=16", methods="top_k,hyper", seeds=2, num_threads=1)
    words = ["compare", "synthetic:clustered,n=256,d=16", "--methods", "top_k,hyper", "--seeds", "2", "--threads", "1", "--json", "--quiet"]
    theirs = json.loads(subprocess.check_output([sys.executable, "-m", "attlas", *words], text=True))
    assert set(ours) == set(theirs)
    for a, b in zip(ours.rows, theirs["rows"], strict=True):
        assert (a.method, a.params.to_dict(), a.rel_fro.to_dict()) == (b["method"], b["params"], b["rel_fro"])
    tags = Tags()
    tags.feed(ours._repr_html_())
    assert tags.tags.count("table") == 1 and tags.tags.count("svg") == 1 and "script" not in tags.tags
    assert "top_k" in repr(ours) and ours.to_dict()["seeds"] == 2


@need("pandas")
def test_pandas_has_one_row_for_each_method_and_head():
    told = attlas.compare(attlas.synthetic(n=128, d=16, heads=2), methods=["top_k", "hyper"], seeds=1)
    table = told.to_pandas()
    table = table[table["family"] != "baseline"]
    assert len(table) == 4 and {"method", "head", "rel_fro.mean"} <= set(table.columns)
    assert len(attlas.inspect(attlas.synthetic(n=64, d=8, heads=3)).to_pandas()) == 3


def test_records(tmp_path):
    told = attlas.inspect(attlas.synthetic(n=64, d=8, heads=2), heads=[0])
    assert len(told.heads) == 1 and told.heads[0].head == 0 and "svg" in told._repr_html_()
    told.save(tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text()) == told.to_dict()
    with pytest.raises(AttributeError, match="it has"):
        _ = told.nonsense
    assert "heads" in dir(told)


def test_traces_are_views_and_survive_files(tmp_path):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((6, 20, 8), dtype=np.float32), *rng.standard_normal((2, 2, 20, 8), dtype=np.float32)
    trace = attlas.Trace.from_arrays({3: (q, k, v)}, causal=False, scale=0.5)
    np.testing.assert_array_equal(trace[3].q, q)
    assert trace[3].q.ctypes.data == trace[3].q.ctypes.data and not trace[3].q.flags.owndata
    trace.save(tmp_path / "t.safetensors")
    again = attlas.Trace.load(tmp_path / "t.safetensors")
    np.testing.assert_array_equal(again[3].v, v)
    assert (again.causal, again[3].scale, again.layers) == (False, 0.5, [3])
    with pytest.raises(KeyError, match="expected one of"):
        trace[0]
    with pytest.raises(attlas.DataError):
        attlas.Trace.load(tmp_path / "none.npz")
    with pytest.raises(ValueError, match="finite"):
        attlas.Trace.from_arrays({0: (q * np.nan, k, v)})
    with pytest.raises(attlas.ShapeError):
        attlas.Trace.from_arrays({0: (q, k[:, :3], v)})


def test_progress_is_told():
    steps = []
    attlas.compare(attlas.synthetic(n=64, d=8), methods="top_k", seeds=1, progress=lambda *step: steps.append(step))
    assert steps and steps[0][0] == 0 and all(isinstance(s[2], str) for s in steps)
    with pytest.raises(ZeroDivisionError):
        attlas.compare(attlas.synthetic(n=64, d=8), progress=lambda *_: 1 / 0)
    if has("tqdm"):
        attlas.compare(attlas.synthetic(n=64, d=8), methods="top_k", seeds=1, progress=True)


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("how", ["raise", "return"])
def test_ctrl_c_ends_a_comparison(how):
    # A shell that starts the tests in the background lets them ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        told = attlas.compare(attlas.synthetic(n=4096, d=64, heads=4), seeds=50, on_interrupt=how)
        assert how == "return" and told.interrupted
    except KeyboardInterrupt:
        assert how == "raise"
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, before)


def test_reports_open_from_disk(tmp_path):
    page = attlas.report(attlas.synthetic(n=64, d=8), methods="top_k", seeds=1, out=tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert text == page.html and text.startswith("<!doctype html>") and "iframe" in page._repr_html_()


def test_recipes():
    recipe = attlas.Recipe.uniform("sink_window", window=64)
    assert attlas.Recipe.from_toml(recipe.to_toml()).to_dict() == recipe.to_dict()
    assert attlas.Recipe.from_dict(recipe.to_dict()).methods == ["sink_window"]
    for bad in ("version = 2", "nonsense", 'version = 1\n[default]\nmethod = "x"\nwhat = 1'):
        with pytest.raises((attlas.RecipeError, attlas.ModelError)):
            attlas.Recipe.from_toml(bad)


@need("torch", "transformers")
class TestModels:
    def test_perplexity_of_a_model(self):
        import tiny

        model = tiny.causal("llama").float()
        tokens = tiny.ids(1, 120)
        exact = attlas.perplexity(model, tokens, window=50, stride=25)
        assert exact.scored == 119 and exact.ppl == pytest.approx(np.exp(exact.nll))
        told = attlas.perplexity(model, tokens, recipe={"version": 1, "default": {"method": "sink_window", "params": {"sinks": 1, "window": 8}}}, window=60)
        assert told.kl_mean >= 0 and told.exact_ppl > 1 and 0 <= told.same_top <= 1
        assert told.nll_increase == pytest.approx(told.nll - told.exact_nll) and not told.past_recipe
        assert told.nll_increase_se is None, "119 tokens are one run of 64"
        with pytest.raises(attlas.ParameterError, match="tokenizer"):
            attlas.perplexity(model, "a text")

    def test_tune_is_interrupted_and_goes_on(self, tmp_path):
        import tiny

        model = tiny.causal("llama").float()
        tokens = tiny.ids(1, 400)
        settings = {"max_error": 0.9, "effort": "quick", "methods": ["sink_window", "top_k"], "state": tmp_path / "s.jsonl", "tokens": 200}
        steps = []

        def stop(done, total, text):
            steps.append(text)
            if len(steps) > 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            attlas.tune(model, tokens, progress=stop, **settings)
        kept = (tmp_path / "s.jsonl").read_text().count("\n")
        tuned = attlas.tune(model, tokens, **settings)
        assert tuned.measurements >= kept - 1 and isinstance(tuned.recipe, attlas.Recipe)
        assert "llama" in tuned.model.lower() and len(tuned.picks) == 4 and "|" not in repr(tuned)[:1]
        tuned.recipe.save(tmp_path / "r.toml")
        import attlas.transformers as hf

        with hf.use(model, tmp_path / "r.toml"):
            model(tokens[:, :50])
        with pytest.raises(attlas.ParameterError, match="budget"):
            attlas.tune(model, tokens)


def test_a_missing_library_names_its_extra():
    code = (
        "import sys; sys.modules['pandas'] = None; sys.modules['torch'] = None\n"
        "import attlas\n"
        "for f in (lambda: attlas.Record({'a': 1}).to_pandas(), lambda: __import__('attlas.torch')):\n"
        "    try: f()\n"
        "    except ImportError as e: print(e)\n"
    )
    told = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert 'pip install "attlas[notebook]"' in told and 'pip install "attlas[torch]"' in told
