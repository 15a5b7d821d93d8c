//! Models in factored form: written, opened again, and run on their factors.

mod common;

use attlas::conversions::common::network::{Role, Slot};
use attlas::conversions::common::product::{Factor, Product};
use attlas::layer::LayerShape;
use attlas::{Mat, MatRef, Options, Schedule, Workspace, registry};
use attlas_model::bert::Batch;
use attlas_model::checkpoint;
use attlas_model::compress::{
    Calibration, Compressed, Elements, Learnt, compress, compress_seen, flops_per_token,
};
use attlas_model::save::{Folder, NamedTensor};
use attlas_model::{Decoder, Encoder, Error, Model, Recipe, Rows, Weights};
use common::{alice, minilm, smollm2, tiny_llama};
use rayon::prelude::*;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Returns a free path.
fn place(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("compress-{name}"));
    let _ = std::fs::remove_dir_all(&path);
    path
}

/// Returns a grouped-query model of two layers whose widths do not divide each other.
fn small(name: &str) -> Model {
    small_with(name, Value::Null, &[]).unwrap()
}

/// Returns the same model with a section `attlas` and more tensors of these shapes.
fn small_with(name: &str, section: Value, more: &[(&str, [usize; 2])]) -> Result<Model, Error> {
    let path = place(name);
    let folder = Folder::create(&path).unwrap();
    let mut config = json!({"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "vocab_size": 11,
        "max_position_embeddings": 64, "tie_word_embeddings": true, "rope_theta": 1000.0});
    config["attlas"] = section;
    folder.json("config.json", &config).unwrap();
    let words = json!({"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}});
    folder.json("tokenizer.json", &words).unwrap();
    let mut list = Vec::new();
    let mut add = |name: String, shape: Vec<usize>| {
        let n = shape.iter().product::<usize>();
        let start = name.bytes().map(usize::from).sum::<usize>();
        let value = |i: usize| ((i * 7919 + start * 31) % 101) as f32 / 101.0 - 0.5;
        list.push(NamedTensor::dense(name, shape, (0..n).map(value).collect::<Vec<f32>>()));
    };
    add("model.embed_tokens.weight".into(), vec![11, 16]);
    add("model.norm.weight".into(), vec![16]);
    for l in 0..2 {
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            add(format!("model.layers.{l}.{norm}.weight"), vec![16]);
        }
        for (part, n_out, n_in) in [
            ("self_attn.q_proj", 16, 16),
            ("self_attn.k_proj", 8, 16),
            ("self_attn.v_proj", 8, 16),
            ("self_attn.o_proj", 16, 16),
            ("mlp.gate_proj", 24, 16),
            ("mlp.up_proj", 24, 16),
            ("mlp.down_proj", 16, 24),
        ] {
            add(format!("model.layers.{l}.{part}.weight"), vec![n_out, n_in]);
        }
        for (part, n) in [("q", 16), ("k", 8), ("v", 8)] {
            add(format!("model.layers.{l}.self_attn.{part}_proj.bias"), vec![n]);
        }
    }
    more.iter().for_each(|(name, shape)| add((*name).to_owned(), shape.to_vec()));
    folder.tensors("model.safetensors", &list).unwrap();
    folder.finish().unwrap();
    Model::open(&path)
}

fn threads() -> Workspace {
    Workspace::new(Schedule { threads: 2, ..Schedule::default() }).unwrap()
}

/// Returns the logits of all tokens: in one piece, and in two pieces with the second decoded token by token.
fn logits(model: &Arc<Model>, tokens: &[u32], split: usize) -> Vec<f32> {
    let mut decoder = Decoder::on(model.clone(), &Recipe::default(), &threads()).unwrap();
    let (mut all, mut hidden) = (Vec::new(), Vec::new());
    decoder.forward(&tokens[..split], Rows::All, &mut hidden).unwrap();
    all.extend_from_slice(&hidden);
    for t in &tokens[split..] {
        decoder.forward(&[*t], Rows::All, &mut hidden).unwrap();
        all.extend_from_slice(&hidden);
    }
    let mut out = vec![0.0; tokens.len() * model.config.vocab];
    decoder.logits_into(&all, &mut out);
    out
}

fn worst(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let size = a.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max) / size
}

/// Converts the given matrices, writes the model and reopens it.
fn through(
    model: &Model,
    id: &str,
    options: &Options,
    roles: &str,
    name: &str,
    elements: Elements,
) -> Result<Arc<Model>, Error> {
    let conversion = registry::conversion(id)?;
    let roles = Role::parse_list(roles)?;
    let path = place(name);
    compress(model, conversion, options, None, Some(&roles), &|_, _| ())?.write(&path, elements)?;
    Ok(Arc::new(Model::open(&path)?))
}

#[test]
fn what_loses_nothing_predicts_the_same_at_once_and_token_by_token() {
    let folder = small("exact-source");
    // This model stores queries and keys with neighbouring rotated pairs, and some quantised blocks.
    let gguf = Model::from_gguf_bytes(tiny_llama().bytes()).unwrap();
    let set = Options::new;
    for (which, model) in [("folder", Arc::new(folder)), ("gguf", Arc::new(gguf))] {
        let n = model.config.n_layers;
        let kept = set().with("rank", 64).with("format", "tucker").with("keep_factors", true);
        let cases = [
            ("svd", "all", set().with("rank", 64)),
            ("svd", "q,down", set().with("rel_error", 0.0)),
            ("shared_factor", "all", set().with("rank", 64)),
            ("tucker", "attention", set().with("rank", 64).with("layer_rank", 2 * n)),
            ("tucker", "ffn", set().with("rank", 64).with("layer_rank", 3 * n)),
            ("trawl", "ffn", set().with("rank", 64).with("format", "tucker")),
            ("trawl", "all", kept.with("span", "all")),
            ("tensor_product", "attention", set()),
        ];
        let tokens: Vec<u32> = (0..23).map(|i| i * i % model.config.vocab as u32).collect();
        let want = logits(&model, &tokens, 23);
        for (i, (id, roles, options)) in cases.iter().enumerate() {
            let after =
                through(&model, id, options, roles, &format!("exact-{which}-{i}"), Elements::F32).unwrap();
            let got = logits(&after, &tokens, 23);
            // Some hundred products of single precision, each a sum of at most 64 terms.
            assert!(worst(&want, &got) < 2e-4, "{which} {id} {roles}: {}", worst(&want, &got));
            let stepwise = logits(&after, &tokens, 9);
            assert!(worst(&got, &stepwise) < 1e-4, "{which} {id}: {}", worst(&got, &stepwise));
        }
    }
}

#[test]
fn a_lossy_form_runs_as_its_dense_weights_would() {
    let model = Arc::new(small("lossy-source"));
    let tokens: Vec<u32> = (0..19).map(|i| i * i % 11).collect();
    let base = Options::new().with("rank", 8).with("span", "all");
    let kept = base.clone().with("keep_factors", true);
    let dense = through(&model, "trawl", &base, "ffn", "lossy-dense", Elements::F32).unwrap();
    let factors = through(&model, "trawl", &kept, "ffn", "lossy-factors", Elements::F32).unwrap();
    let (a, b) = (logits(&dense, &tokens, 19), logits(&factors, &tokens, 19));
    assert!(worst(&a, &b) < 1e-4, "{}", worst(&a, &b));
    assert!(worst(&a, &logits(&model, &tokens, 19)) > 1e-2, "the last layers were changed");
    let (Weights::Decoder(d), Weights::Decoder(f)) = (&dense.weights, &factors.weights) else { panic!() };
    assert!(!d.layers[1].gate.is_product() && f.layers[1].gate.is_product());
    // Eight terms: gate and up share their first factor.
    let saved = flops_per_token(&dense, 19) - flops_per_token(&factors, 19);
    let (full, thin) = (2 * 3 * 16 * 24, 2 * (8 * 16 + 2 * 8 * 24 + 8 * (24 + 16)) + 3 * 8);
    assert_eq!(saved, full - thin);
}

#[test]
fn fewer_terms_of_keys_shrink_the_cache_as_the_layer_says() {
    let model = Arc::new(small("cache-source"));
    let tokens: Vec<u32> = (0..19).map(|i| i * i % 11).collect();
    let one = Options::new().with("rank_k", 1).with("rank_v", 1);
    let after = through(&model, "tensor_product", &one, "attention", "cache", Elements::F32).unwrap();
    let bytes = |m: &Arc<Model>| {
        let mut decoder = Decoder::on(m.clone(), &Recipe::default(), &threads()).unwrap();
        decoder.forward(&tokens, Rows::None, &mut Vec::new()).unwrap();
        decoder.cache_bytes()
    };
    // Keys and values of one head instead of two.
    assert_eq!((bytes(&model), bytes(&after)), (2 * 19 * 2 * 2 * 4 * 4, 2 * 19 * 2 * 4 * 4));
    let mut decoder = Decoder::on(after.clone(), &Recipe::default(), &threads()).unwrap();
    let (mut hidden, mut again) = (Vec::new(), Vec::new());
    decoder.forward(&tokens, Rows::All, &mut hidden).unwrap();
    decoder.truncate(7);
    decoder.forward(&tokens[7..], Rows::All, &mut again).unwrap();
    assert!(worst(&hidden[7 * 16..], &again) < 1e-5, "a cache that is cut short goes on as before");
    let recipe = Recipe::uniform("sink_window", Options::new());
    assert!(Decoder::on(after, &recipe, &threads()).is_err(), "other methods have no place in such a layer");
}

#[test]
fn what_is_left_alone_is_stored_as_it_was() {
    let model = Model::from_gguf_bytes(tiny_llama().bytes()).unwrap();
    let options = Options::new().with("rank", 4);
    let after = through(&model, "svd", &options, "k", "alone", Elements::F16).unwrap();
    let (Weights::Decoder(a), Weights::Decoder(b)) = (&model.weights, &after.weights) else { panic!() };
    let (a, b) = (&a.layers[0], &b.layers[0]);
    assert_eq!(a.down.weight().bytes(), b.down.weight().bytes(), "quantised blocks are kept");
    assert_eq!(a.down.weight().format(), b.down.weight().format());
    assert_ne!(a.q.weight().bytes(), b.q.weight().bytes(), "rows are in the order of Hugging Face");
    assert_eq!(a.q.weight().bytes().len(), b.q.weight().bytes().len());
    assert!(b.k.is_product() && !b.q.is_product());
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("compress-alone");
    let (parameters, bytes) = checkpoint::size(&path).unwrap();
    let embedding = 8 * 32;
    let rest = 32 * 32 + 16 * 32 + 32 * 32 + 3 * 32 * 64 + 3 * 32;
    assert_eq!(parameters, embedding + rest + 4 * (16 + 32));
    // Blocks of 32 numbers in 20 bytes; single precision elsewhere; half precision for the factors.
    let quantised = (32 * 32 + 32 * 64) / 32 * 20;
    let single = 4 * (embedding + 16 * 32 + 32 * 32 + 2 * 32 * 64 + 3 * 32);
    assert_eq!(bytes, quantised + single + 2 * 4 * (16 + 32));
}

#[test]
fn element_types_round_as_they_should() {
    // Rows of 32 numbers, as blocks of 8 bits need them.
    let model = Arc::new(Model::from_gguf_bytes(tiny_llama().bytes()).unwrap());
    let tokens: Vec<u32> = (0..19).map(|i| i * i % 8).collect();
    let want = logits(&model, &tokens, 19);
    let options = Options::new().with("rank", 32);
    let mut last = 0.0;
    for (name, elements, limit) in [
        ("f32", Elements::F32, 1e-4),
        ("f16", Elements::F16, 1e-2),
        ("q8", Elements::Q8, 1e-1),
        ("bf16", Elements::Bf16, 1e-1),
    ] {
        let after = through(&model, "svd", &options, "all", &format!("types-{name}"), elements).unwrap();
        let off = worst(&want, &logits(&after, &tokens, 19));
        assert!(off < limit, "{name}: {off}");
        if name != "q8" {
            assert!(off > last, "{name}: {off} after {last}");
            last = off;
        }
    }
}

#[test]
fn requests_that_make_no_sense_are_refused_and_leave_nothing() {
    let model = small("refused-source");
    let refuse = |id: &str, options: Options, roles: &str, words: &str| {
        let error = through(&model, id, &options, roles, "refused", Elements::F32).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        assert!(!Path::new(env!("CARGO_TARGET_TMPDIR")).join("compress-refused").exists());
    };
    refuse("collaborative", Options::new(), "attention", "rotary positions");
    refuse("collaborative", Options::new(), "attention", "keys of its own");
    refuse("tensor_product", Options::new(), "q", "as a whole");
    refuse("mla", Options::new(), "all", "mla");
    refuse("svd", Options::new().with("rank", 0), "all", "rank");
    refuse("svd", Options::new().with("order", 3), "all", "order");
    refuse("tucker", Options::new().with("layer_rank", 9), "ffn", "number of blocks, 6");
    refuse("svd", Options::new(), "z", "attention, ffn or all");
    let svd = registry::conversion("svd").unwrap();
    let error = compress(&model, svd, &Options::new(), Some(&[2]), None, &|_, _| ()).unwrap_err();
    assert!(error.to_string().contains("0 to 1"), "{error}");

    let options = Options::new().with("rank", 4);
    let first = through(&model, "svd", &options, "k", "refused-twice", Elements::F32).unwrap();
    let again = compress(&first, svd, &options, None, None, &|_, _| ()).unwrap_err();
    assert!(again.to_string().contains("already in another form"), "{again}");
    let there = compress(&model, svd, &options, None, None, &|_, _| ()).unwrap();
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("compress-refused-twice");
    assert!(matches!(there.write(&path, Elements::F32), Err(Error::Exists { .. })));
    assert!(Model::open(&path).is_ok(), "what was there is still there");
}

#[test]
fn a_section_that_lies_is_an_error() {
    let model = small("lies-source");
    let options = Options::new().with("rank", 4).with("layer_rank", 3);
    through(&model, "tucker", &options, "attention", "lies", Elements::F32).unwrap();
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("compress-lies");
    let good: Value = serde_json::from_slice(&std::fs::read(path.join("config.json")).unwrap()).unwrap();
    let open = |change: &dyn Fn(&mut Value)| {
        let mut config = good.clone();
        change(&mut config["attlas"]);
        std::fs::write(path.join("config.json"), config.to_string()).unwrap();
        Model::open(&path).map(|_| ()).unwrap_err().to_string()
    };
    let cases: Vec<(&str, Box<dyn Fn(&mut Value)>)> = vec![
        ("version", Box::new(|s| s["version"] = 2.into())),
        ("more", Box::new(|s| s["more"] = 1.into())),
        ("none", Box::new(|s| s["maps"][MAP][0]["tensor"] = "none".into())),
        ("dimensions", Box::new(|s| s["maps"][MAP][0]["tensor"] = "attlas.factor.1".into())),
        ("do not fit", Box::new(|s| s["maps"][MAP][0]["transposed"] = false.into())),
        ("do not fit", Box::new(|s| s["maps"][MAP][0]["slices"] = 0.into())),
        ("slices", Box::new(|s| s["maps"][MAP][0]["slices"] = u64::MAX.into())),
        ("mixture", Box::new(|s| s["maps"][MAP][1]["rows"] = json!([99]))),
        ("mixture", Box::new(|s| s["maps"][MAP][1]["rows"] = json!([]))),
        ("do not fit", Box::new(|s| s["maps"][MAP] = json!([]))),
        ("row", Box::new(|s| s["maps"][MAP] = json!([{"diagonal": "attlas.factor.2", "row": 99}]))),
        ("Q4_1", Box::new(|s| s["stored"] = json!({"model.norm.weight": {"format": "Q4_1", "shape": [16]}}))),
        ("Q9", Box::new(|s| s["stored"] = json!({"model.norm.weight": {"format": "Q9", "shape": [16]}}))),
        ("nonsense", Box::new(|s| s["attention"] = layer("nonsense", 16))),
        ("weight", Box::new(|s| s["attention"] = layer("third_order", 16))),
        ("sizes from 1", Box::new(|s| s["attention"] = layer("collaborative", 0))),
        ("weight", Box::new(|s| s["attention"] = layer("tensor_product", 16))),
    ];
    for (words, change) in &cases {
        let error = open(&**change);
        assert!(error.contains(words), "{words}: {error}");
    }
}

#[test]
fn shapes_of_factors_that_lie_are_errors() {
    let refused = |name: &str, part: &str, content: Value, more: &[(&str, [usize; 2])], words: &str| {
        let mut section = json!({"version": 1, "conversion": "svd"});
        section[part] = content;
        let error = small_with(name, section, more).unwrap_err().to_string();
        assert!(error.contains(words), "{words}: {error}");
    };
    // A layer that fits together but is half as wide as the model.
    let narrow = [
        ("x.q.weight", [4, 8]),
        ("x.k.weight", [4, 8]),
        ("x.mix.weight", [4, 1]),
        ("x.v.weight", [8, 8]),
        ("x.o.weight", [8, 8]),
    ];
    let names: serde_json::Map<String, Value> =
        ["q", "k", "mix", "v", "o"].map(|n| (n.to_owned(), format!("x.{n}").into())).into_iter().collect();
    let layer = json!({"0": {"layer": "collaborative", "options": {"rank": 4}, "shape": [8, 1, 1, 8, 8], "weights": names}});
    refused("lies-width", "attention", layer.clone(), &narrow, "width of the attention of layer 0");
    let mut wide = layer.clone();
    wide["0"]["shape"][0] = (1 << 21).into();
    refused("lies-wide", "attention", wide, &narrow, "inputs");
    let mut ranked = layer;
    ranked["0"]["options"]["rank"] = 5.into();
    refused("lies-rank", "attention", ranked, &narrow, "with 5 outputs");
    // A file can claim any number of rows without columns.
    let map = json!({MAP: [{"tensor": "a"}, {"tensor": "b", "slices": 16}, {"tensor": "c"}]});
    let empty = [("a", [0, 16]), ("b", [1 << 60, 0]), ("c", [16, 0])];
    refused("lies-empty", "maps", map, &empty, "do not fit");
    // A map of another size than its place.
    let map = json!({"model.layers.0.self_attn.o_proj": [{"tensor": "a"}, {"tensor": "b"}]});
    refused("lies-size", "maps", map, &[("a", [2, 16]), ("b", [12, 2])], "[12, 16]");
}

/// A model whose first layer attends by a layer of the registry, with made-up weights.
fn with_layer(id: &str, options: &Options) -> Result<Arc<Model>, Error> {
    let shape = LayerShape { d_model: 16, n_heads: 4, n_kv_heads: 4, d: 4, d_v: 4 };
    let specs = (registry::layer(id)?.weights)(&shape, options)?;
    let names: Vec<(String, [usize; 2])> =
        specs.iter().map(|w| (format!("x.{}.weight", w.name), [w.n_out, w.n_in])).collect();
    let weights: serde_json::Map<String, Value> =
        specs.iter().map(|w| (w.name.to_owned(), format!("x.{}", w.name).into())).collect();
    let attention =
        json!({"0": {"layer": id, "options": options, "shape": [16, 4, 4, 4, 4], "weights": weights}});
    let section = json!({"version": 1, "conversion": "trained", "attention": attention});
    let more: Vec<(&str, [usize; 2])> = names.iter().map(|(name, shape)| (name.as_str(), *shape)).collect();
    small_with(&format!("layer-{id}"), section, &more).map(Arc::new)
}

#[test]
fn every_layer_of_the_registry_can_stand_in_a_checkpoint() {
    let tokens = [3, 1, 4, 1, 5, 9, 2, 6];
    let plain = logits(&Arc::new(small("layer-plain")), &tokens, 8);
    let set = Options::new;
    for kind in registry::LAYERS {
        let options = match kind.id {
            "latent" => set().with("rank", 6).with("rope_dim", 2),
            "tensorized" => set().with("rank", 5).with("seq_len", 8),
            "mode_wise" => set().with("modes", "3x4"),
            "axial" => set().with("dims", "3x4"),
            "teaformer" => set().with("dims", "4x4").with("core", "3x2"),
            "two_simplicial" => set().with("w1", 5).with("w2", 3),
            _ => set(),
        };
        if kind.id == "higher_order" {
            let error = with_layer(kind.id, &options).unwrap_err().to_string();
            assert!(error.contains("attention of layer 0") && error.contains("no causal form"), "{error}");
            continue;
        }
        let model = with_layer(kind.id, &options).unwrap_or_else(|e| panic!("{}: {e}", kind.id));
        let at_once = logits(&model, &tokens, 8);
        assert!(at_once.iter().all(|x| x.is_finite()) && worst(&at_once, &plain) > 1e-3, "{}", kind.id);
        assert!(worst(&at_once, &logits(&model, &tokens, 3)) < 1e-5, "{}: token by token", kind.id);
        assert!(model.weights.has_other_attention());
    }
}

#[test]
fn a_layer_with_the_weights_of_the_model_is_the_model() {
    let part = |p: &str| Value::from(format!("model.layers.1.self_attn.{p}_proj"));
    let weights = json!({"q": part("q"), "k": part("k"), "v": part("v"), "o": part("o")});
    let attention = json!({"1": {"layer": "grouped_query", "options": {"rope_base": 1000}, "shape": [16, 4, 2, 4, 4],
        "weights": weights}});
    let section = json!({"version": 1, "conversion": "trained", "attention": attention});
    let tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3];
    let same = logits(&Arc::new(small_with("layer-same", section, &[]).unwrap()), &tokens, 6);
    assert!(worst(&logits(&Arc::new(small("layer-source")), &tokens, 6), &same) < 1e-5);
}

const MAP: &str = "model.layers.0.self_attn.q_proj";

/// A first layer without weights.
fn layer(id: &str, width: usize) -> Value {
    json!({"0": {"layer": id, "shape": [width, 4, 4, 4, 4], "weights": {}}})
}

/// The encoder of the page, 40 paragraphs, and their embeddings.
struct Original {
    model: Model,
    batch: Batch,
    embeddings: Vec<Vec<f32>>,
}

/// Opens and runs it once for all tests.
fn original() -> &'static Original {
    static ORIGINAL: OnceLock<Original> = OnceLock::new();
    ORIGINAL.get_or_init(|| {
        let model = Model::open(&minilm()).unwrap();
        let text = alice();
        let paragraphs = text.split("\n\n").map(|p| p.split_whitespace().collect::<Vec<_>>().join(" "));
        let ids: Vec<Vec<u32>> = paragraphs
            .filter(|p| p.len() > 200)
            .take(40)
            .map(|p| {
                let mut ids = model.tokenizer.encode(&p, true).unwrap();
                if ids.len() > 128 {
                    let last = ids[ids.len() - 1];
                    ids.truncate(127);
                    ids.push(last);
                }
                ids
            })
            .collect();
        let batch = Batch::new(&ids).unwrap();
        let embeddings = embed(&model, &batch);
        Original { model, batch, embeddings }
    })
}

fn embed(model: &Model, batch: &Batch) -> Vec<Vec<f32>> {
    let encoder = Encoder::new(model).unwrap();
    encoder.embed(batch, registry::baseline(), &Options::new(), &mut threads()).unwrap()
}

/// Returns the mean and the smallest cosine between the embeddings of 40 paragraphs by another encoder and by the
/// original.
fn cosines(changed: &Model) -> (f64, f64) {
    let Original { batch, embeddings, .. } = original();
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    let all: Vec<f64> = embeddings.iter().zip(&embed(changed, batch)).map(|(a, b)| dot(a, b)).collect();
    (all.iter().sum::<f64>() / all.len() as f64, all.iter().copied().fold(f64::INFINITY, f64::min))
}

/// Fails unless mean and smallest cosine equal the page's within `tolerance`.
fn assert_cosines(changed: &Model, want: (f64, f64), tolerance: (f64, f64), what: &str) {
    let (mean, least) = cosines(changed);
    assert!(
        (mean - want.0).abs() < tolerance.0 && (least - want.1).abs() < tolerance.1,
        "{what}: {mean:.4} {least:.4} against {want:?}"
    );
}

#[test]
fn an_encoder_in_collaborative_form_keeps_its_embeddings_as_the_page_says() {
    let model = &original().model;
    let full = Options::new().with("rank", 384);
    let exact = through(model, "collaborative", &full, "attention", "minilm-exact", Elements::F32).unwrap();
    let (mean, least) = cosines(&exact);
    assert!(least > 1.0 - 1e-5, "{mean} {least}");

    let conversion = registry::conversion("collaborative").unwrap();
    let rows = [
        (192usize, [0.267, 0.420, 0.440, 0.468, 0.393, 0.487], [(0.917, 0.874), (0.914, 0.846)]),
        (288, [0.138, 0.245, 0.258, 0.284, 0.233, 0.270], [(0.959, 0.910), (0.957, 0.915)]),
    ];
    for (rank, errors, kept) in rows {
        let options = Options::new().with("rank", rank).with("iters", 30).with("tol", 0.0);
        let mut fewer = compress(model, conversion, &options, None, None, &|_, _| ()).unwrap();
        for (loss, want) in fewer.rewritten.losses.iter().zip(errors) {
            assert!((loss.rel_error - want).abs() < 5e-3, "{}: {}", loss.what, loss.rel_error);
        }
        // With the temperature of the replaced layer, then with that of the public code.
        for (temperature, want) in ["original", "from_rank"].into_iter().zip(kept) {
            for a in fewer.rewritten.attention.values_mut() {
                a.options.set("temperature", temperature);
            }
            let changed = fewer.model(Elements::F32).unwrap();
            assert_cosines(&changed, want, (5e-3, 2e-2), &format!("{rank} {temperature}"));
        }
    }
}

#[test]
fn heads_truncated_one_by_one_keep_as_little_as_the_page_says() {
    let model = &original().model;
    let conversion = registry::conversion("collaborative").unwrap();
    let rows = [
        (288usize, [0.149, 0.292, 0.305, 0.305, 0.258, 0.305], (0.915, 0.849)),
        (192, [0.283, 0.492, 0.501, 0.498, 0.429, 0.512], (0.799, 0.698)),
    ];
    for (rank, errors, kept) in rows {
        let options = Options::new().with("rank", rank).with("iters", 0);
        let pruned = compress(model, conversion, &options, None, None, &|_, _| ()).unwrap();
        for (loss, want) in pruned.rewritten.losses.iter().zip(errors) {
            assert!((loss.rel_error - want).abs() < 1e-3, "{}: {}", loss.what, loss.rel_error);
        }
        assert_cosines(
            &pruned.model(Elements::F32).unwrap(),
            kept,
            (1e-3, 1e-3),
            &format!("pruned to {rank}"),
        );
    }
}

#[test]
fn key_heads_of_a_real_model_share_as_little_as_the_page_says() {
    let model = Model::open(&smollm2()).unwrap();
    let conversion = registry::conversion("tensor_product").unwrap();
    for (rank, mean, range) in [(1usize, 0.76, 0.695..0.815), (2, 0.51, 0.395..0.575)] {
        let options = Options::new().with("rank_k", rank).with("rank_v", rank);
        let fitted = compress(&model, conversion, &options, None, None, &|_, _| ()).unwrap();
        let errors: Vec<f64> = fitted.rewritten.losses.iter().map(|l| l.rel_error).collect();
        assert_eq!(errors.len(), 60);
        let found = errors.iter().sum::<f64>() / 60.0;
        // The page gives two digits.
        assert!((found - mean).abs() < 1e-2, "rank {rank}: {found}");
        // One matrix is outside the page's range, 0.373 at rank 2.
        let inside = errors.iter().filter(|e| range.contains(*e)).count();
        assert!(inside >= 59, "rank {rank}: {errors:?}");
    }
}

#[test]
fn blocks_with_shared_bases_have_the_errors_and_embeddings_of_the_page() {
    let model = &original().model;
    let rows = [
        ("shared_factor", 320, None, 0.436, (0.409, 0.302)),
        ("shared_factor", 256, None, 0.624, (0.137, 0.037)),
        ("shared_factor", 192, None, 0.760, (0.140, 0.054)),
        ("tucker", 320, Some(60), 0.497, (0.188, 0.097)),
        ("tucker", 256, Some(36), 0.738, (0.111, 0.047)),
    ];
    for (id, rank, layer_rank, error, kept) in rows {
        let mut options = Options::new().with("rank", rank).with("iters", 4).with("tol", 0.0);
        let mut numbers = 2 * 384 * rank + layer_rank.unwrap_or(72) * rank * rank;
        if let Some(l) = layer_rank {
            options.set("layer_rank", l);
            numbers += 72 * l;
        }
        let conversion = registry::conversion(id).unwrap();
        let shared =
            threads().install(|_| compress(model, conversion, &options, None, None, &|_, _| ())).unwrap();
        let loss = &shared.rewritten.losses[0];
        assert!(loss.what.starts_with("72 blocks") && shared.rewritten.losses.len() == 1);
        assert_eq!(loss.after, numbers);
        assert!((loss.rel_error - error).abs() < 1e-3, "{id} {rank}: {}", loss.rel_error);
        // At such errors embeddings distinguish bases of almost equal error: at R = 256 the error changes by less than
        // 1e-4 between one sweep and eight, the mean cosine by 0.015 and the smallest by 0.02.
        assert_cosines(&shared.model(Elements::F32).unwrap(), kept, (2e-2, 3e-2), &format!("{id} {rank}"));
    }
}

#[test]
fn blocks_truncated_one_by_one_have_the_errors_and_embeddings_of_the_page() {
    let model = &original().model;
    let Weights::Encoder(w) = &model.weights else { panic!() };
    let roles = Role::parse_list("q,k,v,o,up,down").unwrap();
    let ranks = [192, 128];
    let cuts: Vec<(Slot, [Mat<f32>; 2], [f64; 3])> = (0..w.layers.len())
        .flat_map(|layer| roles.iter().map(move |&role| Slot { layer, role }))
        .collect::<Vec<_>>()
        .into_par_iter()
        .map(|slot| {
            let l = &w.layers[slot.layer];
            let map = match slot.role {
                Role::Query => &l.q,
                Role::Key => &l.k,
                Role::Value => &l.v,
                Role::Output => &l.o,
                Role::Up => &l.up,
                _ => &l.down,
            };
            let m = Mat::from_vec(map.weight().to_f32(), map.outputs(), map.inputs());
            // The page stacks blocks of 384 × 384, whose transposes have the same singular values.
            let wide = m.rows() < m.cols();
            let m = if wide { m.transpose() } else { m };
            let mut cut = [const { Vec::new() }; 2];
            let mut squares = [0.0; 3];
            for block in m.data().chunks_exact(384 * 384) {
                let svd = attlas_num::linalg::svd(MatRef::new(block, 384, 384)).unwrap();
                let square = |s: &[f64]| s.iter().map(|s| s * s).sum::<f64>();
                squares[2] += square(&svd.sigma);
                for (i, rank) in ranks.into_iter().enumerate() {
                    squares[i] += square(&svd.sigma[rank..]);
                    cut[i].extend_from_slice(svd.truncated(rank).rebuild().cast::<f32>().data());
                }
            }
            let of = |data: Vec<f32>| {
                let kept = Mat::from_vec(data, m.rows(), 384);
                if wide { kept.transpose() } else { kept }
            };
            (slot, cut.map(of), squares)
        })
        .collect();
    let sum = |i: usize| cuts.iter().map(|c| c.2[i]).sum::<f64>();
    assert!((f64::sqrt(sum(2)) - 199.928).abs() < 1e-3, "{}", f64::sqrt(sum(2)));
    for (i, (error, kept)) in [(0.243, (0.723, 0.661)), (0.406, (0.432, 0.343))].into_iter().enumerate() {
        let found = f64::sqrt(sum(i) / sum(2));
        assert!((found - error).abs() < 1e-3, "{found}");
        let conversion = registry::conversion("svd").unwrap();
        let mut changed = Compressed::unchanged(model, conversion, &Options::new()).unwrap();
        for (slot, cut, _) in &cuts {
            let product = Product { factors: vec![Factor::matrix(cut[i].clone())] };
            changed.rewritten.maps.insert(*slot, product);
        }
        let changed = changed.model(Elements::F32).unwrap();
        assert_cosines(&changed, kept, (1e-3, 1e-3), &format!("rank {}", ranks[i]));
    }
}

#[test]
fn a_model_without_a_folder_is_the_one_that_is_written() {
    let gguf = Arc::new(Model::from_gguf_bytes(tiny_llama().bytes()).unwrap());
    let folder = Arc::new(small("memory-source"));
    let set = Options::new;
    for (which, model) in [("folder", folder), ("gguf", gguf)] {
        let cases = [
            ("svd", "all", set().with("rank", 3)),
            ("tucker", "attention", set().with("rank", 4).with("layer_rank", 2)),
            ("trawl", "ffn", set().with("rank", 3).with("keep_factors", true)),
            ("trawl", "ffn", set().with("rank", 3)),
            ("tensor_product", "attention", set().with("rank_k", 1).with("rank_v", 1)),
        ];
        let tokens: Vec<u32> = (0..17).map(|i| i * i % model.config.vocab as u32).collect();
        for (i, (id, roles, options)) in cases.iter().enumerate() {
            let conversion = registry::conversion(id).unwrap();
            let roles = Role::parse_list(roles).unwrap();
            let made = compress(&model, conversion, options, None, Some(&roles), &|_, _| ()).unwrap();
            for elements in [Elements::F32, Elements::F16, Elements::Q8] {
                let path = place(&format!("memory-{which}-{i}"));
                made.write(&path, elements).unwrap();
                let written = logits(&Arc::new(Model::open(&path).unwrap()), &tokens, 17);
                let memory = logits(&Arc::new(made.model(elements).unwrap()), &tokens, 17);
                assert_eq!(memory, written, "{which} {id} {elements:?}");
            }
        }
        // Parts of a model converted one by one equal those converted together.
        let conversion = registry::conversion("svd").unwrap();
        let options = set().with("rank", 3);
        let whole = compress(&model, conversion, &options, None, None, &|_, _| ()).unwrap();
        let mut parts = Compressed::unchanged(&model, conversion, &options).unwrap();
        let before = logits(&Arc::new(parts.model(Elements::F32).unwrap()), &tokens, 17);
        // Features of rotated heads have another order, and are summed in that order.
        assert!(worst(&logits(&model, &tokens, 17), &before) < 1e-5, "{which}: nothing is changed");
        for layer in (0..model.config.n_layers).rev() {
            let one = compress(&model, conversion, &options, Some(&[layer]), None, &|_, _| ()).unwrap();
            parts.add(one.rewritten);
        }
        let [a, b] =
            [&whole, &parts].map(|c| logits(&Arc::new(c.model(Elements::F32).unwrap()), &tokens, 17));
        assert_eq!(a, b, "{which}");
    }
}

#[test]
fn factors_fitted_to_a_text_predict_it_better_than_those_fitted_to_nothing() {
    let model = Arc::new(small("seen-source"));
    let tokens: Vec<u32> = (0..240u32).map(|i| (i * i * 3 + i / 7) % 11).collect();
    let go_on = std::sync::atomic::AtomicBool::new(false);
    let read = Calibration::Tokens { tokens: &tokens, window: 48 };
    let mut told = Vec::new();
    let mut progress = |done: usize, all: usize| told.push((done, all));
    let learnt = Learnt::read(&model, read, None, None, &threads(), &mut progress, &go_on).unwrap();
    assert_eq!((learnt.tokens, told.last()), (240, Some(&(240, 240))));
    let text = &tokens[..48];
    let want = logits(&model, text, 48);
    let gap = |learnt: Option<&Learnt>, rank: usize| {
        let svd = registry::conversion("svd").unwrap();
        let options = Options::new().with("rank", rank);
        let changed = compress_seen(&model, svd, &options, None, None, learnt, &|_, _| ()).unwrap();
        let seen = changed.rewritten.losses.iter().filter_map(|l| l.seen_error).count();
        assert_eq!(seen, if learnt.is_some() { 14 } else { 0 });
        let got = logits(&Arc::new(changed.model(Elements::F32).unwrap()), text, 48);
        got.iter().zip(&want).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
    };
    assert!(gap(Some(&learnt), 16) < 1e-3, "full rank");
    let (seen, blind) = (gap(Some(&learnt), 6), gap(None, 6));
    assert!(seen < blind, "{seen} and {blind}");
    // Only the requested moments are kept, and encoders read texts.
    let part =
        Learnt::read(&model, read, Some(&[1]), Some(&[Role::Down]), &threads(), &mut |_, _| (), &go_on);
    let part = part.unwrap();
    assert!(part.moments(Slot { layer: 1, role: Role::Down }).is_some_and(|m| m.width() == 24));
    assert!(part.moments(Slot { layer: 0, role: Role::Down }).is_none());
    assert!(part.moments(Slot { layer: 1, role: Role::Query }).is_none());
    let texts = [tokens.clone()];
    let wrong =
        Learnt::read(&model, Calibration::Texts(&texts), None, None, &threads(), &mut |_, _| (), &go_on);
    assert!(matches!(wrong, Err(Error::Unsupported { .. })));
    let stopped = std::sync::atomic::AtomicBool::new(true);
    let ended = Learnt::read(&model, read, None, None, &threads(), &mut |_, _| (), &stopped);
    assert!(matches!(ended, Err(Error::Interrupted)));
}
