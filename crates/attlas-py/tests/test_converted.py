"""Folders that `attlas convert` writes, loaded by transformers."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, need

pytestmark = need("torch", "transformers", "tokenizers")


def convert(model, out, text, *more):
    words = ["convert", model, "--to", "mla", "--text", text, "--rank", "12", "--max-ppl-increase", "10000", "--out", out]
    command = [sys.executable, "-m", "attlas", *map(str, words), *more, "--json", "--quiet"]
    return json.loads(subprocess.check_output(command, text=True))


@pytest.fixture
def biased(tmp_path):
    """A folder with a Llama whose feed-forward layers have biases, and a text in its words."""
    import torch
    import transformers
    from tiny import VOCAB, causal, ids
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = causal("llama", mlp_bias=True, tie_word_embeddings=True).float()
    with torch.no_grad():
        for name, bias in model.named_parameters():
            if name.endswith("bias"):
                bias.normal_()
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w1", eos_token="w2", pad_token="w0")
    model.save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i}" for i in ids(1, 600)[0].tolist()))
    return tmp_path / "source", text


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_biases_of_feed_forward_layers_are_loaded_with_the_class_of_the_folder(tmp_path, biased, dtype):
    import torch
    import transformers

    model, text = biased
    out = tmp_path / "converted"
    record = convert(model, out, text, "--dtype", dtype)
    assert record["dtype"] == dtype
    assert record["written_diff"] < 1e-4
    # Logits in one pass and with the cache equal those that attlas wrote beside the model.
    script = ROOT / "goldens/model/check_converted.py"
    done = subprocess.run([sys.executable, script, "--trust", out], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    # The stock class has no biases: without the custom class the folder is refused, and no bias is dropped.
    with pytest.raises(ValueError, match="trust_remote_code"):
        transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=False)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert loaded.dtype == {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert all(layer.mlp.down_proj.bias.abs().max() > 0.1 for layer in loaded.model.layers)
