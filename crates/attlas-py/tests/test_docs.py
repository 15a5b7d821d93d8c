"""Every block of docs/python.md, of the README's Python part and of the examples runs."""

import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT, need

ALL = need("torch", "transformers", "gguf", "jax", "pandas")


def blocks(path: pathlib.Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def placed(text: str, models: pathlib.Path) -> str:
    """The text with the folder that `scripts/fetch-models` filled here, if it is not `.models`."""
    return text.replace('".models/', f'"{models}/')


def run(path, models, monkeypatch):
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    found = blocks(path, "python")
    for block in found:
        exec(compile(placed(block, models), str(path), "exec"), names)
    return found


@ALL
def test_the_guide(monkeypatch, models, capsys):
    assert len(run(ROOT / "docs" / "python.md", models, monkeypatch)) >= 12


@ALL
def test_the_readme(monkeypatch, models, tmp_path, capsys):
    found = run(ROOT / "README.md", models, monkeypatch)
    assert len(found) == 3


@need("lm_eval", "torch", "transformers")
def test_the_harness(tmp_path, monkeypatch):
    """`python -m attlas.lm_eval` on a task of the repository: exact attention gives the figures of sdpa."""
    import json

    import tiny
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {w: i for i, w in enumerate(["<pad>", "<s>", "</s>", "<unk>", *(chr(c) for c in range(32, 120))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>").save_pretrained(tmp_path)
    model = tiny.causal("llama")
    model.to(torch.float32).save_pretrained(tmp_path)
    monkeypatch.chdir(ROOT)
    (line,) = [b for b in blocks(ROOT / "docs" / "python.md", "sh") if "lm_eval" in b]
    figures = {}
    for name in ("sdpa", "attlas", "attlas:sink_window"):
        words_ = shlex.split(line.strip().replace("FOLDER", str(tmp_path)).replace("attn_implementation=attlas", f"attn_implementation={name}"))
        out = tmp_path / name.replace(":", "_")
        command = [sys.executable, *words_[1:], "--device", "cpu", "--output_path", str(out), "--batch_size", "1"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        (told,) = out.rglob("results*.json")
        figures[name] = {k: v for k, v in json.loads(told.read_text())["results"]["alice"].items() if isinstance(v, float)}
    assert figures["attlas"] == pytest.approx(figures["sdpa"], rel=1e-4)
    assert figures["attlas:sink_window"]


@pytest.mark.parametrize("example", sorted((ROOT / "examples" / "python").glob("*.py")), ids=lambda p: p.stem)
@ALL
def test_examples(example, models):
    assert len(example.read_text().splitlines()) <= 60
    code = placed(example.read_text(), models)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
