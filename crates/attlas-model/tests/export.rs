//! Models written as GGUF files: those that llama.cpp's layout can express are read back as the same model, others are
//! refused.

mod common;

use attlas::conversions::mla::{Params, Stage};
use attlas::{Options, Schedule, Workspace, registry};
use attlas_model::compress::{Elements, compress};
use attlas_model::convert::{calibrate, check, convert, stored_as};
use attlas_model::export::{check_gguf, check_latent_gguf, write_gguf};
use attlas_model::gguf::Gguf;
use attlas_model::{Architecture, Decoder, Model, Recipe, Rows, Weights};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

fn place(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_file(&path);
    let _ = std::fs::remove_dir_all(&path);
    path
}

fn source() -> Arc<Model> {
    Arc::new(Model::from_gguf_bytes(common::tiny_llama().bytes()).unwrap())
}

fn written(model: &Model, name: &str) -> (PathBuf, Arc<Model>) {
    let path = place(name);
    write_gguf(model, Elements::F32, &path).unwrap();
    let opened = Arc::new(Model::open(&path).unwrap());
    (path, opened)
}

fn tokens(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * i * 5 + i / 3) % 8).collect()
}

/// The logits of every position.
fn logits(model: &Arc<Model>) -> Vec<f32> {
    let schedule = Schedule { threads: 1, ..Schedule::default() };
    let mut decoder = Decoder::new(model.clone(), &Recipe::default(), schedule).unwrap();
    let mut hidden = Vec::new();
    decoder.forward(&tokens(40), Rows::All, &mut hidden).unwrap();
    let mut out = vec![f32::NAN; 40 * model.config.vocab];
    decoder.logits_into(&hidden, &mut out);
    out
}

fn gap(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    // A NaN logit is no agreement.
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, |most, x| if x <= most { most } else { x })
}

#[test]
fn a_file_is_written_as_it_was_read() {
    let model = source();
    let (path, again) = written(&model, "export-same.gguf");
    assert_eq!(logits(&again), logits(&model));
    assert_eq!(again.config, model.config);
    let text = "ab a cab";
    assert_eq!(again.tokenizer.encode(text, true).unwrap(), model.tokenizer.encode(text, true).unwrap());
    // Quantised blocks stay unchanged.
    let bytes = std::fs::read(&path).unwrap();
    let gguf = Gguf::parse(&bytes).unwrap();
    assert_eq!(gguf.tensor("blk.0.attn_q.weight").unwrap().format.name(), "Q4_1");
}

#[test]
fn factors_of_a_folder_are_multiplied_out_and_its_rotated_pairs_put_in_the_order_of_the_file() {
    let model = source();
    let svd = registry::conversion("svd").unwrap();
    let options = Options::new().with("rank", 9);
    let compressed = compress(&model, svd, &options, None, None, &|_, _| {}).unwrap();
    let folder = place("export-folder");
    compressed.write(&folder, Elements::F32).unwrap();
    let folder = Arc::new(Model::open(&folder).unwrap());
    assert!(folder.weights.has_products());
    let want = logits(&folder);
    assert!(gap(&want, &logits(&model)) > 1e-2, "the rank is lossy");
    let file = place("export-svd.gguf");
    compressed.write(&file, Elements::F32).unwrap();
    // The tokeniser comes from the file in one case, and from the folder in the other.
    for opened in [Arc::new(Model::open(&file).unwrap()), written(&folder, "export-twice.gguf").1] {
        assert!(!opened.weights.has_products());
        assert!(gap(&logits(&opened), &want) < 1e-4);
        assert_eq!(
            opened.tokenizer.encode("ab a1", true).unwrap(),
            model.tokenizer.encode("ab a1", true).unwrap()
        );
        assert_eq!((opened.tokenizer.bos(), opened.tokenizer.eos()), (Some(0), Some(7)));
    }
}

#[test]
fn latents_are_written_as_deepseek2_with_norms_that_do_nothing() {
    let model = source();
    let threads = Workspace::new(Schedule { threads: 1, ..Schedule::default() }).unwrap();
    let go_on = AtomicBool::new(false);
    let text = tokens(160);
    let moments = calibrate(&model, &model, &text, 40, true, &threads, &mut |_, _| {}, &go_on).unwrap();
    for rank_q in [None, Some(20)] {
        check_latent_gguf(&model, rank_q).unwrap();
        let params = Params { rank: Some(14), rank_q, rope_dim: Some(4), ..Params::default() };
        let params = check(&model, &params).unwrap();
        let latents = convert(&model, &params, Stage::LowRankQueries, &moments, None, false).unwrap();
        let want = logits(&Arc::new(latents.model.clone()));
        let (path, opened) = written(&latents.model, "export-latent.gguf");
        assert_eq!(opened.config.architecture, Architecture::DeepseekV2);
        assert_eq!(opened.config.latent, latents.model.config.latent);
        // Two roundings of the scales and the epsilon itself, 2⁻²⁴ of a latent at most.
        assert!(gap(&logits(&opened), &want) < 1e-4, "{}", gap(&logits(&opened), &want));
        let bytes = std::fs::read(&path).unwrap();
        let gguf = Gguf::parse(&bytes).unwrap();
        assert_eq!(gguf.text("general.architecture").unwrap(), Some("deepseek2"));
        for (key, value) in
            [("key_length", 18), ("value_length", 14), ("key_length_mla", 12), ("head_count_kv", 1)]
        {
            assert_eq!(gguf.integer(&format!("deepseek2.attention.{key}")).unwrap(), Some(value), "{key}");
        }
        assert_eq!(gguf.tensor("blk.0.attn_k_b.weight").unwrap().shape, [4, 14, 8]);
        assert_eq!(gguf.tensor("blk.0.attn_v_b.weight").unwrap().shape, [4, 8, 14]);
        // In narrower types the file is the equally rounded model; maps to latents keep the range of single precision.
        for (elements, to_latent, to_heads) in
            [(Elements::F16, "BF16", "F16"), (Elements::Bf16, "BF16", "BF16"), (Elements::Q8, "BF16", "Q8_0")]
        {
            let rounded = Arc::new(stored_as(&latents.model, elements, true).unwrap());
            let path = place("export-narrow.gguf");
            write_gguf(&rounded, elements, &path).unwrap();
            let opened = Arc::new(Model::open(&path).unwrap());
            let off = gap(&logits(&opened), &logits(&rounded));
            assert!(off < 1e-4, "{elements:?}: {off}");
            assert!(gap(&logits(&rounded), &want) > 0.0);
            let bytes = std::fs::read(&path).unwrap();
            let gguf = Gguf::parse(&bytes).unwrap();
            let format = |part: &str| gguf.tensor(&format!("blk.0.{part}.weight")).unwrap().format.name();
            assert_eq!(format("attn_kv_a_mqa"), to_latent);
            // Rows of a latent of 14 or 20 are no blocks.
            let to_queries = if rank_q.is_some() && elements == Elements::Q8 { "F16" } else { to_heads };
            assert_eq!(format(if rank_q.is_some() { "attn_q_b" } else { "attn_q" }), to_queries);
            assert_eq!(format("attn_v_b"), if elements == Elements::Bf16 { "BF16" } else { "F16" });
            assert_eq!(format("ffn_down"), "Q4_1", "narrow matrices stay as they are");
        }
    }
    // Norms that a constant coordinate makes neutral need a bias, which that layer of llama.cpp does not have.
    let params = check(&model, &Params { rank: Some(14), ..Params::default() }).unwrap();
    let normed = convert(&model, &params, Stage::LowRank, &moments, None, true).unwrap();
    let error = write_gguf(&normed.model, Elements::F32, &place("export-no.gguf")).unwrap_err().to_string();
    assert!(error.contains("biases of latent attention"), "{error}");
}

#[test]
fn what_the_format_has_no_place_for_is_refused() {
    let mut model = Model::clone(&source());
    model.config.windows = vec![Some(8)];
    assert!(check_gguf(&model).unwrap_err().to_string().contains("sliding windows"));
    let mut model = Model::clone(&source());
    model.config.n_layers = 27;
    assert!(check_latent_gguf(&model, Some(4)).unwrap_err().to_string().contains("27 layers"));
    let Weights::Decoder(w) = &mut model.weights else { panic!() };
    let o = &w.layers[0].o;
    w.layers[0].o = attlas_model::Linear::new(o.weight().clone(), Some(vec![1.0; 32])).unwrap();
    assert!(check_latent_gguf(&model, None).unwrap_err().to_string().contains("biases of latent attention"));
}

#[test]
fn biases_of_feed_forward_layers_are_written_where_the_architecture_has_tensors_for_them() {
    let mut model = Model::clone(&source());
    let Weights::Decoder(w) = &mut model.weights else { panic!() };
    for layer in &mut w.layers {
        for map in [&mut layer.gate, &mut layer.up, &mut layer.down] {
            let bias = (0..map.outputs()).map(|i| (i % 5) as f32 - 2.0).collect();
            *map = attlas_model::Linear::new(map.weight().clone(), Some(bias)).unwrap();
        }
    }
    let model = Arc::new(model);
    let (_, opened) = written(&model, "export-mlp-bias.gguf");
    assert_eq!(logits(&opened), logits(&model));
    assert!(gap(&logits(&model), &logits(&source())) > 1e-2, "biases change predictions");
    let error = check_latent_gguf(&model, None).unwrap_err().to_string();
    assert!(
        error.contains("feed-forward") && error.contains("deepseek2") && error.contains("folder"),
        "{error}"
    );
    let mut qwen2 = Model::clone(&model);
    qwen2.config.architecture = Architecture::Qwen2;
    assert!(check_gguf(&qwen2).unwrap_err().to_string().contains("feed-forward"));
}
