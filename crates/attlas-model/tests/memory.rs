//! Memory of a decoder between tokens: streams without keys, packed keys and values.

mod common;

use attlas::{Options, Schedule};
use attlas_model::kept::CacheFormat;
use attlas_model::{Decoder, Model, Recipe, Rows};
use common::repository;
use std::sync::Arc;

fn model(name: &str) -> Arc<Model> {
    Arc::new(Model::open(&repository().join("goldens/model/families").join(name)).unwrap())
}

fn decoder(name: &str, recipe: &Recipe) -> Decoder {
    Decoder::new(model(name), recipe, Schedule { threads: 2, ..Schedule::default() }).unwrap()
}

/// Returns the logits of every position, fed in chunks.
fn logits(decoder: &mut Decoder, tokens: &[u32], chunks: &[usize]) -> Vec<f32> {
    let (mut all, mut hidden, mut start) = (Vec::new(), Vec::new(), 0);
    for &n in chunks {
        decoder.forward(&tokens[start..start + n], Rows::All, &mut hidden).unwrap();
        let mut out = vec![f32::NAN; n * decoder.model().config.vocab];
        decoder.logits_into(&hidden, &mut out);
        all.extend(out);
        start += n;
    }
    all
}

fn gap(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Returns the norm of the difference over the norm of the reference.
fn relative(a: &[f32], b: &[f32]) -> f32 {
    let squares = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
    squares(&mut a.iter().zip(b).map(|(a, b)| a - b)) / squares(&mut b.iter().copied())
}

fn tokens(n: u32) -> Vec<u32> {
    (0..n).map(|i| (i * i + i / 3) % 32).collect()
}

#[test]
fn streams_decode_without_keys_what_they_decode_with_them() {
    let recipe = Recipe::uniform("performer", Options::new().with("features", 32));
    let tokens = tokens(40);
    for chunks in [&[40usize][..], &[1; 40], &[9, 1, 1, 20, 1, 8]] {
        let want = logits(&mut decoder("granite", &recipe), &tokens, &[40]);
        let mut lean = decoder("granite", &recipe);
        lean.forget_keys().unwrap();
        let got = logits(&mut lean, &tokens, chunks);
        assert!(gap(&got, &want) < 1e-3, "{chunks:?}: {}", gap(&got, &want));
        assert!(lean.decoding().iter().all(|l| !l.keeps_keys));
    }
    // The state does not grow with the tokens.
    let mut lean = decoder("granite", &recipe);
    lean.forget_keys().unwrap();
    logits(&mut lean, &tokens, &[8]);
    let held = lean.cache_bytes();
    logits(&mut lean, &tokens[8..], &[32]);
    assert_eq!((lean.cache_bytes(), lean.len()), (held, 40));
    assert!(lean.forget_keys().is_err(), "tokens are held");
    // Streams cannot go back.
    lean.truncate(40);
    assert_eq!(lean.len(), 40);
    lean.truncate(39);
    assert_eq!((lean.len(), lean.cache_bytes()), (0, 0));
    let again = logits(&mut lean, &tokens, &[40]);
    assert!(gap(&again, &logits(&mut decoder("granite", &recipe), &tokens, &[40])) < 1e-3);
}

#[test]
fn methods_without_a_stream_are_said_to_decode_exactly_and_keep_their_keys() {
    let recipe = Recipe::uniform("smyrf", Options::new());
    let mut decoder = decoder("granite", &recipe);
    decoder.forget_keys().unwrap();
    for layer in decoder.decoding() {
        assert!(layer.keeps_keys && layer.falls_back);
        assert!(layer.methods.iter().all(|(_, reads, decodes)| (*reads, *decodes) == ("smyrf", "exact")));
    }
}

#[test]
fn a_method_of_its_own_for_new_tokens_decodes_where_it_has_a_stream() {
    let rule = |layers: &str, decode: &str| {
        format!("[[rule]]\nlayers = {layers}\nmethod = 'smyrf'\n[rule.decode]\nmethod = '{decode}'\n")
    };
    let text = format!("version = 1\n{}{}", rule("[0]", "sink_window"), rule("[1]", "reformer"));
    let found = decoder("granite", &Recipe::from_toml(&text).unwrap());
    assert_eq!(found.decodes_exactly(), Vec::<usize>::new());
    let text = format!("version = 1\n{}[[rule]]\nlayers = [1]\nmethod = 'smyrf'\n", rule("[0]", "exact"));
    let found = decoder("granite", &Recipe::from_toml(&text).unwrap());
    // The recipe sets exact attention in layer 0; it replaces a method only in layer 1.
    assert_eq!(found.decodes_exactly(), [1]);
}

#[test]
fn packed_caches_cost_their_rounding_whenever_tokens_are_read() {
    let tokens = tokens(20);
    // They include windows, capped logits and an extra logit per head.
    for name in ["granite", "gemma2", "gemma3", "gpt_oss"] {
        let exact = logits(&mut decoder(name, &Recipe::default()), &tokens, &[20]);
        for format in [CacheFormat::Bf16, CacheFormat::Q8] {
            let packed = |chunks: &[usize]| {
                let mut decoder = decoder(name, &Recipe::default());
                decoder.pack_keys(format).unwrap();
                let all = logits(&mut decoder, &tokens, chunks);
                (all, decoder.cache_bytes())
            };
            let (whole, bytes) = packed(&[20]);
            // Rounding keys by 2^-9 moves a logit of attention by that share of itself, and those of gemma3 are the largest:
            // 3 % of its logits, 0.3 % of the others'. A wrong scale or row moves them by their own size.
            let cost = relative(&whole, &exact);
            assert!(cost > 0.0 && cost < 0.05, "{name} {format:?}: {cost}");
            for chunks in [&[1usize; 20][..], &[9, 1, 1, 9]] {
                assert!(gap(&packed(chunks).0, &whole) < 1e-4, "{name} {format:?} {chunks:?}");
            }
            let mut full = decoder(name, &Recipe::default());
            logits(&mut full, &tokens, &[20]);
            assert!(
                bytes <= full.cache_bytes() / 2 || format == CacheFormat::Q8 && bytes < full.cache_bytes()
            );
        }
        // Truncating and reading again gives the same result.
        let mut decoder = decoder(name, &Recipe::default());
        decoder.pack_keys(CacheFormat::Bf16).unwrap();
        let first = logits(&mut decoder, &tokens, &[20]);
        decoder.truncate(7);
        let again = logits(&mut decoder, &tokens[7..], &[13]);
        assert!(gap(&again, &first[7 * decoder.model().config.vocab..]) < 1e-4);
    }
}

#[test]
fn new_tokens_attend_exactly_until_the_recipe_says_otherwise() {
    let tokens = tokens(12);
    let text = |from: &str| {
        let method = "method = 'sink_window'\nparams = { sinks = 0, window = 2 }\n";
        format!("version = 1\n{from}[default]\nmethod = 'exact'\n[default.decode]\n{method}")
    };
    let run = |text: &str| {
        let recipe = Recipe::from_toml(text).unwrap();
        assert_eq!(Recipe::from_toml(&recipe.to_toml().unwrap()).unwrap(), recipe);
        logits(&mut decoder("granite", &recipe), &tokens, &[1; 12])
    };
    let exact = logits(&mut decoder("granite", &Recipe::default()), &tokens, &[1; 12]);
    let (always, later) = (run(&text("")), run(&text("decode_from = 9\n")));
    let of = |all: &[f32], tokens: std::ops::Range<usize>| {
        let vocab = all.len() / 12;
        all[tokens.start * vocab..tokens.end * vocab].to_vec()
    };
    assert_eq!(of(&later, 0..8), of(&exact, 0..8));
    assert!(relative(&of(&later, 8..9), &of(&exact, 8..9)) > 1e-3);
    assert!(relative(&of(&always, 4..8), &of(&exact, 4..8)) > 1e-3);
}
