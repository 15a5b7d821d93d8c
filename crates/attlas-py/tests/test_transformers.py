"""Models of transformers with every kind of mask, cache and recipe, made from configs, no download."""

import contextlib

import attlas
import numpy as np
import pytest
from conftest import need

pytestmark = need("torch", "transformers")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("attlas.transformers")
import tiny  # noqa: E402

hf.register()


def logits(model, implementation, **inputs):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs).logits


def close(a, b, atol=1e-5):
    torch.testing.assert_close(a, b, atol=atol, rtol=1e-5)


def padded(side, lengths=(20, 13)):
    tokens = tiny.ids(len(lengths), max(lengths))
    mask = torch.zeros_like(tokens)
    for i, n in enumerate(lengths):
        mask[i, slice(-n, None) if side == "left" else slice(n)] = 1
    return {"input_ids": tokens, "attention_mask": mask}


@pytest.mark.parametrize("name", list(tiny.CAUSAL))
def test_logits_are_those_of_its_peer(name):
    model, peer = tiny.causal(name), tiny.peer(name)
    tokens = tiny.ids(2, 21)
    hf.stats("attlas", reset=True)
    close(logits(model, "attlas", input_ids=tokens), logits(model, peer, input_ids=tokens))
    told = hf.stats("attlas", reset=True)
    assert told.calls == 2
    for side in ("left", "right"):
        inputs = padded(side)
        ours, theirs = logits(model, "attlas", **inputs), logits(model, peer, **inputs)
        assert torch.isfinite(ours).all()
        valid = inputs["attention_mask"].bool()
        close(ours[valid], theirs[valid])


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_generation_is_that_of_its_peer(name):
    model, peer = tiny.causal(name), tiny.peer(name)
    inputs = padded("left", (12, 7))
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def text(implementation, **more):
        model.set_attn_implementation(implementation)
        return model.generate(**inputs, **settings, **more).tolist()

    want = text(peer)
    assert text("attlas") == want
    if name == "llama":
        assert text("attlas", cache_implementation="static", disable_compile=True) == want
        assert text("attlas", num_beams=3) == text(peer, num_beams=3)
        found = []
        for implementation in (peer, "attlas"):
            model.set_attn_implementation(implementation)
            found.append(model.generate(tiny.ids(1, 30), **settings, prompt_lookup_num_tokens=3).tolist())
        assert found[0] == found[1]


def test_a_sequence_in_a_padded_batch_gets_the_bits_it_gets_alone():
    class Layer:
        layer_idx, is_causal = 0, True

    q, k, v = (torch.randn(2, h, 20, 16) for h in (6, 2, 2))
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[0], mask[1, 8:] = True, True
    intervals = hf.interval_mask(2, 20, 20, attention_mask=mask)
    alone = hf.interval_mask(1, 12, 12)
    for method in ("exact", "hyper", "sink_window"):
        name = "attlas" if method == "exact" else f"attlas:{method}"
        attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[name]
        both, _ = attend(Layer, q, k, v, intervals)
        single, _ = attend(Layer, q[1:, :, 8:], k[1:, :, 8:], v[1:, :, 8:], alone)
        assert (both[1, :8] == 0).all()
        assert torch.equal(both[1:, 8:], single)


def test_masks_become_runs():
    from attlas import _native

    def runs(*args, **kwargs):
        mask = hf.interval_mask(*args, **kwargs)
        assert mask.dtype == torch.int32 and mask.shape == (args[0], 1, args[1], 2)
        return _native.runs(mask, args[2])

    assert runs(1, 5, 5) == [[("causal", 0, 5, 0, 5, 0)]]
    assert runs(1, 1, 9, q_offset=8) == [[("full", 0, 1, 0, 9, 0)]]
    assert runs(1, 3, 9, q_offset=6) == [[("causal", 0, 3, 0, 9, 0)]]
    left = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    assert runs(2, 5, 5, attention_mask=left) == [[("causal", 2, 5, 2, 5, 0)], [("causal", 0, 5, 0, 5, 0)]]
    right = torch.tensor([[1, 1, 1, 0, 0]]).bool()
    assert runs(1, 5, 5, attention_mask=right) == [[("causal", 0, 3, 0, 3, 0), ("full", 3, 5, 0, 3, 0)]]
    window = transformers.masking_utils.sliding_window_causal_mask_function(3)
    assert runs(1, 6, 6, mask_function=window) == [[("window", 0, 6, 0, 6, 3)]]
    chunks = transformers.masking_utils.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.int64))
    assert runs(1, 6, 6, mask_function=chunks) == [[("causal", 0, 3, 0, 3, 0), ("causal", 3, 6, 3, 6, 0)]]
    gap = torch.tensor([[1, 0, 1, 1, 1]]).bool()
    with pytest.raises(attlas.UnsupportedError, match="gaps"):
        runs(1, 5, 5, attention_mask=gap)


def test_packed_sequences_and_masks_of_the_users():
    model = tiny.causal("llama")
    tokens = tiny.ids(1, 16)
    positions = torch.cat([torch.arange(7), torch.arange(9)])[None]
    packed = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
    close(logits(model, "attlas", **packed), logits(model, "sdpa", **packed))
    square = torch.tril(torch.ones(16, 16, dtype=torch.bool))[None, None]
    square = square & (torch.arange(16) >= torch.arange(16)[:, None] - 4)
    for mask in (square, torch.where(square, 0.0, -torch.inf).double()):
        inputs = {"input_ids": tokens, "attention_mask": mask, "use_cache": False}
        close(logits(model, "attlas", **inputs), logits(model, "sdpa", **inputs))
    soft = {"input_ids": tokens, "attention_mask": torch.randn(1, 1, 16, 16).double()}
    with pytest.raises(attlas.UnsupportedError, match="adds to the scores"):
        logits(model, "attlas", **soft)
    by_head = square.expand(1, 4, 16, 16).clone()
    by_head[:, 1, 5:] = torch.tril(torch.ones(16, 16, dtype=torch.bool))[5:]
    with pytest.raises(attlas.UnsupportedError, match="differs between heads"):
        logits(model, "attlas", input_ids=tokens, attention_mask=by_head)


def test_what_cannot_be_computed_is_refused_by_name():
    tokens = tiny.ids(1, 12)
    with pytest.raises(attlas.UnsupportedError, match="softcap"):
        logits(tiny.causal("gemma2", attn_logit_softcapping=50.0), "attlas", input_ids=tokens)
    model = tiny.causal("llama", attention_dropout=0.1).train()
    model.set_attn_implementation("attlas")
    with pytest.raises(attlas.UnsupportedError, match="dropout"):
        model(input_ids=tokens)
    with pytest.raises((attlas.UnsupportedError, ValueError)):
        logits(tiny.causal("llama"), "attlas", input_ids=tokens, output_attentions=True)
    hole = torch.ones_like(tokens)
    hole[0, 4] = 0
    with pytest.raises(attlas.UnsupportedError, match="gaps"):
        logits(tiny.causal("llama"), "attlas", input_ids=tokens, attention_mask=hole)


def test_models_off_the_interface_are_refused():
    config = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    with pytest.raises(attlas.ModelError, match="interface"):
        hf.use(transformers.BloomForCausalLM(config), "exact")
    config = transformers.FalconConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    with pytest.raises(attlas.ModelError, match="interface"):
        hf.use(transformers.FalconForCausalLM(config), "exact")
    with pytest.raises(attlas.ModelError, match="model of transformers"):
        hf.use(torch.nn.Linear(2, 2), "exact")


def test_encoders_and_cross_attention():
    torch.manual_seed(0)
    bert = transformers.BertModel(
        transformers.BertConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    ).double().eval()
    inputs = padded("right")
    valid = inputs["attention_mask"].bool()
    found = {}
    for name in ("eager", "attlas"):
        bert.set_attn_implementation(name)
        with torch.no_grad():
            found[name] = bert(**inputs).last_hidden_state[valid]
    close(found["attlas"], found["eager"])
    bart = transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
        )
    ).double().eval()  # fmt: skip
    two = {**inputs, "decoder_input_ids": tiny.ids(2, 9)}
    close(logits(bart, "attlas", **two), logits(bart, "eager", **two))
    vit = transformers.ViTModel(
        transformers.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4)
    ).double().eval()
    image = torch.randn(1, 3, 16, 16).double()
    for name in ("eager", "attlas"):
        vit.set_attn_implementation(name)
        with torch.no_grad():
            found[name] = vit(image).last_hidden_state
    close(found["attlas"], found["eager"])


def test_recipes_by_layer_and_head(tmp_path):
    model = tiny.causal("llama")
    recipe = attlas.Recipe.from_toml(
        'version = 1\n[default]\nmethod = "exact"\n[[rule]]\nlayers = "1"\nheads = "0-1"\nmethod = "sink_window"\n'
        "params = { window = 4, sinks = 1 }\n"
    )
    recipe.save(tmp_path / "r.toml")
    tokens = tiny.ids(1, 30)
    exact = logits(model, "attlas", input_ids=tokens)
    with hf.use(model, tmp_path / "r.toml") as used:
        ours = logits(model, model.config._attn_implementation, input_ids=tokens)
        rows = [(r.layer, r.method, r.heads) for r in used.stats().rows]
    assert rows == [(0, "exact", [0, 4]), (1, "exact", [2, 4]), (1, "sink_window", [0, 2])]
    assert model.config._attn_implementation == "attlas"
    assert not torch.allclose(ours, exact)
    assert torch.equal(logits(model, "attlas", input_ids=tokens), exact)
    assert recipe.choice(1, 0)[0] == "sink_window" and "sink_window" in recipe._repr_html_()
    with pytest.raises(attlas.Error, match="0 to 1"):
        hf.use(model, attlas.Recipe.from_toml('version = 1\n[[rule]]\nlayers = "7"\nmethod = "exact"'))
    with pytest.raises(attlas.UnsupportedError):
        hf.use(model, next(m.id for m in attlas.methods() if not m.claims.causal))
    foreign = recipe.to_dict() | {"evidence": {"model_shape": "9 layers"}, "model": "another"}
    with pytest.raises(attlas.ModelError, match="another"):
        hf.use(model, foreign)
    with pytest.raises(attlas.DataError):
        hf.use(model, str(tmp_path / "none.toml"))


def test_streams_decode_by_the_method():
    model = tiny.causal("llama")
    model.set_attn_implementation("eager")
    tokens = tiny.ids(1, 60)
    with hf.use(model, "sink_window", window=16, sinks=2) as used, torch.no_grad():
        whole = model(input_ids=tokens).logits
        cache = hf.StreamCache()
        model(input_ids=tokens[:, :50], past_key_values=cache, use_cache=True)
        rows = [
            model(input_ids=tokens[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(50, 60)
        ]
        assert any(r.kind == "stream" for r in used.stats().rows)
        close(torch.cat(rows, 1), whole[:, 50:], atol=1e-6)
        plain = transformers.DynamicCache()
        model(input_ids=tokens[:, :50], past_key_values=plain, use_cache=True)
        exact = model(input_ids=tokens[:, 50:51], past_key_values=plain, use_cache=True).logits
        assert (exact - whole[:, 50:51]).abs().max() > 1e-3
        again = model.generate(
            tokens, past_key_values=hf.StreamCache(), max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        assert again.shape == (1, 65)


def test_a_recipe_names_another_method_for_new_tokens():
    model = tiny.causal("llama")
    tokens = tiny.ids(1, 40)
    recipe = attlas.Recipe.from_toml(
        'version = 1\n[[rule]]\nlayers = "1"\nmethod = "exact"\n[rule.decode]\nmethod = "sink_window"\nparams = { window = 8, sinks = 1 }\n'
    )
    with hf.use(model, recipe) as used, torch.no_grad():
        cache = hf.StreamCache()
        model(input_ids=tokens[:, :39], past_key_values=cache, use_cache=True)
        model(input_ids=tokens[:, 39:], past_key_values=cache, use_cache=True)
        rows = {(r.layer, r.method, r.kind) for r in used.stats().rows}
    assert rows == {(0, "exact", "causal"), (1, "exact", "causal"), (0, "exact", "full"), (1, "sink_window", "stream")}
    without = next(m.id for m in attlas.methods(causal=True) if not m.claims.decode and m.claims.needs != "calibration")
    with pytest.raises(attlas.UnsupportedError, match="new tokens"):
        hf.use(model, attlas.Recipe.from_toml(f'version = 1\n[[rule]]\nmethod = "exact"\n[rule.decode]\nmethod = "{without}"\n'))


def test_gradients_reach_the_weights():
    model = tiny.causal("llama").train()
    inputs = padded("left")
    found = {}
    for name in ("sdpa", "attlas"):
        model.set_attn_implementation(name)
        model.zero_grad()
        out = model(**inputs).logits[inputs["attention_mask"].bool()]
        out.square().mean().backward()
        found[name] = model.model.layers[0].self_attn.k_proj.weight.grad.clone()
    close(found["attlas"], found["sdpa"], atol=1e-7)
    model.set_attn_implementation("attlas:hyper")
    with pytest.raises(NotImplementedError, match="hyper"):
        model(**inputs).logits.sum().backward()


@pytest.mark.parametrize("side", [None, "left"])
def test_compiled_models_have_one_graph(side):
    model = tiny.causal("llama")
    model.set_attn_implementation("attlas")
    inputs = padded(side) if side else {"input_ids": tiny.ids(2, 20)}
    inputs["use_cache"] = False
    with torch.no_grad():
        want = model(**inputs).logits
        torch._dynamo.reset()
        got = torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_registration_is_idempotent_and_names_are_checked():
    assert hf.register() == hf.register()
    assert hf.register("attlas:narrow", "sink_window", window=8) == ["attlas:narrow"]
    for bad in ("sdpa_attlas", "attlas/x", "mine"):
        with pytest.raises(ValueError, match="name"):
            hf.register(bad, "hyper")
    with pytest.raises(KeyError, match="expected one of"):
        hf.stats("nothing")


def warned(name):
    """Layers that a trace leaves out, and those with sinks, are named in a warning."""
    return pytest.warns(UserWarning) if name in ("gemma3_text", "gpt_oss", "mistral") else contextlib.nullcontext()


@pytest.mark.parametrize("name", list(tiny.CAUSAL))
def test_the_lab_on_any_architecture(name):
    """Extraction, comparison, inspection, a report and a tuned recipe, all from the model object."""
    # A window of 8 leaves no layer of mistral to record; 32 is longer than the compared text.
    model = tiny.causal(name, sliding_window=32) if name == "mistral" else tiny.causal(name)
    model = model.float()
    tokens = tiny.ids(1, 64)
    layers = [1] if name in ("gemma3_text", "gpt_oss") else [0, 1]
    with warned("" if name == "mistral" else name):
        trace = attlas.extract(model, tokens[:, :24])
    assert trace.layers == layers and trace.causal
    assert trace.metadata.get("sinks") == ("1" if name == "gpt_oss" else None)
    layer = trace[1]
    assert layer.q.shape[1] == 24 and np.isfinite(layer.q).all() and not layer.q.flags.writeable
    told = attlas.compare(trace, methods=["top_k", "sink_window"], seeds=1)
    assert {r.method for r in told.rows} >= {"top_k", "sink_window"}
    seen = attlas.inspect(trace)
    assert {h.layer for h in seen.heads} == set(layers)
    page = attlas.report(trace, methods="top_k", seeds=1, out=None)
    assert page.html.startswith("<!doctype html>")
    with warned("" if name == "mistral" else name):
        tuned = attlas.tune(model, tokens, tokens=24, max_error=0.9, effort="quick", methods=["sink_window", "top_k"])
    assert tuned.picks and isinstance(tuned.recipe, attlas.Recipe)
    with hf.use(model, tuned.recipe) as used, torch.no_grad():
        assert torch.isfinite(model(input_ids=tokens[:, :24]).logits).all()
        assert used.stats().calls == 2


def test_what_is_recorded_gives_the_output_of_the_model():
    """The recorded queries, keys and values, attended by attlas, give the input of the next layer."""
    for name in ("llama", "gpt_oss", "deepseek_v3", "gemma2"):
        model = tiny.causal(name)
        tokens = tiny.ids(1, 24)
        handed = {}
        inner = model.model.layers[1].self_attn.o_proj
        hook = inner.register_forward_hook(lambda _, x, __, to=handed: to.update(x=x[0]))
        with hf.record(model) as recorded, torch.no_grad():
            model(input_ids=tokens, use_cache=False)
        hook.remove()
        q, k, v, scale = recorded.layers[1]
        o, lse, _ = attlas.attention(q[None], k[None], v[None], causal=True, scale=scale, return_lse=True)
        if recorded.sinks:
            sinks = model.model.layers[1].self_attn.sinks.detach()
            o = o * torch.sigmoid(lse - sinks[None, :, None])[..., None]
        o = o[0].transpose(0, 1).reshape(1, 24, -1)
        close(o.double(), handed["x"].double(), atol=2e-6)


def test_layers_that_a_trace_cannot_hold_are_named():
    with pytest.warns(UserWarning, match="window"):
        trace = attlas.extract(tiny.causal("gemma3_text"), tiny.ids(1, 24))
    assert trace.layers == [1]
    with pytest.raises(attlas.ModelError, match="window"), pytest.warns(UserWarning):
        attlas.extract(tiny.causal("mistral"), tiny.ids(1, 24))
    with pytest.raises(attlas.ModelError, match="softcap"), pytest.warns(UserWarning):
        attlas.extract(tiny.causal("gemma2", attn_logit_softcapping=50.0), tiny.ids(1, 24))
    assert attlas.extract(tiny.causal("mistral"), tiny.ids(1, 6)).layers == [0, 1]


def test_models_that_bias_their_scores_are_refused():
    torch.manual_seed(0)
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    ).eval()
    tokens = tiny.ids(1, 9)
    # It does not follow the interface, or passes a bias: never a number.
    with pytest.raises((attlas.Error, ValueError)), hf.use(t5, "exact"), torch.no_grad():
        t5(input_ids=tokens, decoder_input_ids=tokens)
    falcon = transformers.FalconForCausalLM(
        transformers.FalconConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True)
    )
    with pytest.raises(attlas.ModelError, match="interface"):
        hf.use(falcon, "exact")


def test_speech():
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=20, max_target_positions=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).double().eval()
    inputs = {"input_features": torch.randn(2, 8, 40).double(), "decoder_input_ids": tiny.ids(2, 9)}
    close(logits(model, "attlas", **inputs), logits(model, "eager", **inputs))


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma3_text"])
def test_static_caches(name):
    """Only the mask distinguishes the zeros after the tokens."""
    model, peer = tiny.causal(name), tiny.peer(name)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for inputs in (padded("left", (12, 7)), {"input_ids": tiny.ids(1, 11)}):
        found = []
        for implementation, more in ((peer, {}), ("attlas", {}), ("attlas", {"cache_implementation": "static", "disable_compile": True})):
            model.set_attn_implementation(implementation)
            found.append(model.generate(**inputs, **settings, **more).tolist())
        assert found[0] == found[1] == found[2]


def test_an_assistant_proposes_tokens():
    """Assisted decoding: several rows over more keys, and a cache that is cropped."""
    model, assistant = tiny.causal("llama"), tiny.causal("llama", seed=3, num_hidden_layers=1)
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens = tiny.ids(1, 10)
    found = []
    for implementation in ("sdpa", "attlas"):
        for m in (model, assistant):
            m.set_attn_implementation(implementation)
        found.append(model.generate(tokens, assistant_model=assistant, **settings).tolist())
    assert found[0] == found[1]
    hf.stats("attlas", reset=True)
    model.generate(tokens, assistant_model=assistant, **settings)
    kinds = {(r.kind, r.method) for r in hf.stats("attlas").rows}
    assert ("causal", "exact") in kinds and ("full", "exact") in kinds


def test_a_compiled_model_generates():
    """`generate` compiles the decoding step of a static cache by itself."""
    model = tiny.causal("llama")
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    inputs = padded("left", (12, 7))
    model.set_attn_implementation("sdpa")
    want = model.generate(**inputs, **settings).tolist()
    model.set_attn_implementation("attlas")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.forward = torch.compile(model.forward, backend="aot_eager")
    assert model.generate(**inputs, **settings, cache_implementation="static").tolist() == want
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
