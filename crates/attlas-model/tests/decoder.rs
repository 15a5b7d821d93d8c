//! The causal runtime on SmolLM2-135M: reference perplexities, logits and continuations of independent
//! implementations, and the invariants between ways of running it.

mod common;

use attlas::{Options, Schedule};
use attlas_model::decoder::{LOGIT_ROWS, Observer};
use attlas_model::perplexity::{Perplexity, Protocol, nll};
use attlas_model::recipe::{Numbers, Rule};
use attlas_model::sample::argmax;
use attlas_model::{Decoder, Model, Recipe, Rows};
use common::*;
use std::sync::{Arc, OnceLock};

fn model() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    MODEL.get_or_init(|| Arc::new(Model::open(&smollm2()).unwrap())).clone()
}

fn decoder(recipe: &Recipe) -> Decoder {
    Decoder::new(model(), recipe, Schedule::default()).unwrap()
}

fn alice_tokens(n: usize) -> Vec<u32> {
    let mut ids = model().tokenizer.encode(&alice(), false).unwrap();
    ids.truncate(n);
    ids
}

/// Negative log-likelihood of every token but the first, read in one window.
fn nlls(tokens: &[u32]) -> Vec<f64> {
    let mut decoder = decoder(&Recipe::default());
    let (d, vocab) = (decoder.model().config.hidden, decoder.model().config.vocab);
    let mut hidden = Vec::new();
    decoder.forward(tokens, Rows::All, &mut hidden).unwrap();
    let targets = &tokens[1..];
    let mut out = Vec::new();
    for (rows, targets) in hidden.chunks(LOGIT_ROWS * d).zip(targets.chunks(LOGIT_ROWS)) {
        let mut logits = vec![0.0; targets.len() * vocab];
        decoder.logits_into(&rows[..targets.len() * d], &mut logits);
        out.extend(logits.chunks(vocab).zip(targets).map(|(logits, &t)| nll(logits, t)));
    }
    out
}

fn assert_perplexity(nlls: &[f64], reference: f64) {
    let mut found = Perplexity::default();
    nlls.iter().for_each(|&x| found.push(x));
    let relative = found.perplexity() / reference - 1.0;
    assert!(relative.abs() < 5e-4, "{} tokens: {} against {reference}", nlls.len(), found.perplexity());
}

#[test]
fn perplexities_of_512_and_2048_tokens_are_the_reference_ones() {
    // No token attends to a later one: the short window is the beginning of the long one.
    let nlls = nlls(&alice_tokens(2048));
    assert_perplexity(&nlls[..511], 24.276);
    assert_perplexity(&nlls, 19.783);
}

#[test]
fn the_perplexity_of_8192_tokens_is_the_reference_one() {
    assert_perplexity(&nlls(&alice_tokens(8192)), 18.795);
}

#[test]
fn both_fixed_window_protocols_give_their_reference_perplexities() {
    let text = std::fs::read_to_string(models().join("smollm2/LICENSE")).unwrap();
    let tokens = model().tokenizer.encode(&text, false).unwrap();
    let disjoint = Protocol::Disjoint { window: 512 }.windows(tokens.len()).unwrap();
    let halves = Protocol::SecondHalf { window: 512 }.windows(tokens.len()).unwrap();
    let (mut all, mut second) = (Vec::new(), Vec::new());
    for (whole, half) in disjoint.iter().zip(&halves) {
        assert_eq!(whole.tokens, half.tokens);
        let nlls = nlls(&tokens[whole.tokens.clone()]);
        second.extend_from_slice(&nlls[half.targets.start - 1 - half.tokens.start..]);
        all.extend(nlls);
    }
    assert_eq!((all.len(), second.len()), (2044, 1020));
    assert_perplexity(&all, 17.984);
    assert_perplexity(&second, 15.928);
}

#[test]
fn logits_equal_those_in_double_precision() {
    let tokens = [504, 3575, 282, 4649, 314];
    let mut decoder = decoder(&Recipe::default());
    let (mut hidden, mut logits) = (Vec::new(), vec![0.0; 5 * 49152]);
    decoder.forward(&tokens, Rows::All, &mut hidden).unwrap();
    decoder.logits_into(&hidden, &mut logits);
    let last = &logits[4 * 49152..];
    let reference = [
        (7042, 17.37126),
        (260, 14.88859),
        (4528, 13.24497),
        (2250, 13.00947),
        (1315, 12.95151),
        (5145, 12.90494),
        (216, 12.7133),
        (441, 12.69785),
        (0, 1.613639),
        (1, -11.871879),
        (2, -7.944459),
        (3, -9.34693),
    ];
    // Single against double precision moves logits of this model by up to 1e-4.
    for (id, want) in reference {
        assert!((last[id] - want).abs() < 2e-4, "id {id}: {} against {want}", last[id]);
    }
    for (id, want) in [15.655282, 6.824468, 10.591206, 5.109442].into_iter().enumerate() {
        assert!((logits[id] - want).abs() < 2e-4, "id {id}: {} against {want}", logits[id]);
    }
    assert!((nll(last, 7042) - 0.2581).abs() < 1e-4);
}

#[test]
fn the_greedy_continuation_is_the_reference_one() {
    let mut decoder = decoder(&Recipe::default());
    let mut next: Vec<u32> = vec![504, 3575, 282, 4649, 314];
    let (mut ids, mut logits) = (Vec::new(), Vec::new());
    for _ in 0..8 {
        decoder.next_logits(&next, &mut logits).unwrap();
        next = vec![argmax(&logits).unwrap()];
        ids.extend_from_slice(&next);
    }
    assert_eq!(ids, [7042, 30, 198, 198, 504, 2988, 314, 42]);
    assert_eq!(decoder.len(), 12);
}

/// The largest difference of the logits after the last token, relative to their spread of about ten.
fn logits_after(recipe: &Recipe, tokens: &[u32], chunks: &[usize]) -> Vec<f32> {
    let mut decoder = decoder(recipe);
    let mut logits = Vec::new();
    for &n in chunks {
        let first = decoder.len();
        decoder.next_logits(&tokens[first..first + n], &mut logits).unwrap();
    }
    logits
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max)
}

#[test]
fn the_cache_changes_nothing_but_rounding() {
    let tokens = alice_tokens(150);
    let whole = logits_after(&Recipe::default(), &tokens, &[150]);
    for chunks in [&[149, 1][..], &[40, 1, 1, 100, 8]] {
        let parts = logits_after(&Recipe::default(), &tokens, chunks);
        let difference = largest_difference(&whole, &parts);
        assert!(difference < 1e-3, "{chunks:?}: {difference}");
    }
}

#[test]
fn truncating_takes_tokens_back_and_errors_leave_no_trace() {
    let tokens = alice_tokens(60);
    let mut decoder = decoder(&Recipe::uniform("sink_window", Options::new().with("window", 16u64)));
    let (mut first, mut again) = (Vec::new(), Vec::new());
    decoder.next_logits(&tokens[..50], &mut first).unwrap();
    decoder.next_logits(&tokens[50..51], &mut first).unwrap();
    decoder.next_logits(&tokens[51..52], &mut again).unwrap();
    decoder.truncate(50);
    assert!(decoder.next_logits(&[1, 49152], &mut again).is_err());
    assert!(decoder.next_logits(&vec![1; 8192], &mut again).is_err(), "a text longer than the context");
    assert_eq!(decoder.len(), 50);
    decoder.next_logits(&tokens[50..51], &mut again).unwrap();
    assert_eq!(first, again);
}

#[test]
fn a_recipe_by_head_with_the_same_method_everywhere_changes_nothing_but_rounding() {
    let tokens = alice_tokens(80);
    let whole = logits_after(&Recipe::default(), &tokens, &[80]);
    let exact = Recipe::default().default.method;
    let rule = |heads: &str, keys: u64| Rule {
        layers: None,
        heads: Some(heads.parse().unwrap()),
        method: "top_k".into(),
        params: Options::new().with("keys", keys),
        measured: None,
        decode: None,
    };
    // A budget of all keys is exact attention; three different budgets split every key head.
    let recipe = Recipe {
        rules: vec![rule("0,4,8", 80), rule("1-2,5", 90)],
        ..Recipe::uniform(&exact, Options::new())
    };
    assert!(largest_difference(&whole, &logits_after(&recipe, &tokens, &[80])) < 1e-3);
    assert!(largest_difference(&whole, &logits_after(&recipe, &tokens, &[79, 1])) < 1e-3, "exact decoding");
}

#[test]
fn approximate_methods_attend_in_prompts_and_where_they_stream_in_decoding() {
    let tokens = alice_tokens(200);
    let exact = logits_after(&Recipe::default(), &tokens, &[200]);
    let window = Recipe::uniform("sink_window", Options::new().with("window", 24u64));
    let prompt = logits_after(&window, &tokens, &[200]);
    assert!(largest_difference(&exact, &prompt) > 0.05, "the window must be felt");
    let decoded = logits_after(&window, &tokens, &[190, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
    assert!(largest_difference(&prompt, &decoded) < 1e-3, "a stream gives the rows of the plan");
    let top: Numbers = "0-29".parse().unwrap();
    let rule = Rule {
        layers: Some(top),
        heads: None,
        method: "top_k".into(),
        params: Options::new().with("keys", 2u64),
        measured: None,
        decode: None,
    };
    let recipe = Recipe { rules: vec![rule], ..Recipe::default() };
    let prompt = logits_after(&recipe, &tokens, &[200]);
    assert!(largest_difference(&exact, &prompt) > 0.05, "two keys are too few");
}

/// Observer that recomputes attention from queries, keys and values and compares it with the heads' outputs.
struct Recompute {
    layer: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    q_pre: Vec<f32>,
    o: Vec<f32>,
}

impl Observer for Recompute {
    fn layers(&self) -> usize {
        self.layer + 1
    }

    fn before_rotation(&mut self, layer: usize, _: usize, q: &[f32], _: &[f32]) {
        if layer == self.layer {
            self.q_pre.extend_from_slice(q);
        }
    }

    fn projected(&mut self, layer: usize, _: usize, q: &[f32], k: &[f32], v: &[f32]) {
        if layer == self.layer {
            self.q.extend_from_slice(q);
            self.k.extend_from_slice(k);
            self.v.extend_from_slice(v);
        }
    }

    fn attended(&mut self, layer: usize, _: usize, o: &[f32]) {
        if layer == self.layer {
            self.o.extend_from_slice(o);
        }
    }
}

#[test]
fn attention_recomputed_from_what_is_observed_reproduces_the_heads() {
    let (n, layer) = (40, 3);
    let mut seen =
        Recompute { layer, q: Vec::new(), k: Vec::new(), v: Vec::new(), q_pre: Vec::new(), o: Vec::new() };
    let mut decoder = decoder(&Recipe::default());
    decoder.forward_observed(&alice_tokens(n), Rows::None, &mut Vec::new(), &mut seen).unwrap();
    assert_eq!(decoder.len(), 0, "an observer that ends early leaves the cache as it was");
    assert_eq!(seen.q_pre[..576], seen.q[..576], "position 0 is not rotated");
    assert_ne!(seen.q_pre[576..1152], seen.q[576..1152]);
    let (at, kv) = (|x: &[f32], i: usize, h: usize| x[(i * 9 + h) * 64..][..64].to_vec(), 3);
    let key = |x: &[f32], i: usize, g: usize| x[(i * kv + g) * 64..][..64].to_vec();
    for i in [0, 1, n - 1] {
        for h in 0..9 {
            let q = at(&seen.q, i, h);
            let weights: Vec<f64> = (0..=i)
                .map(|j| {
                    let dot: f64 =
                        q.iter().zip(key(&seen.k, j, h / 3)).map(|(a, b)| f64::from(*a) * f64::from(b)).sum();
                    (dot / 8.0).exp()
                })
                .collect();
            let total: f64 = weights.iter().sum();
            let o = at(&seen.o, i, h);
            for c in 0..64 {
                let want: f64 = weights
                    .iter()
                    .enumerate()
                    .map(|(j, w)| w / total * f64::from(key(&seen.v, j, h / 3)[c]))
                    .sum();
                assert!((f64::from(o[c]) - want).abs() < 1e-5, "token {i}, head {h}: {} {want}", o[c]);
            }
        }
    }
}

/// Observer that keeps the residual stream before every layer, and may replace the rows of one head.
#[derive(Default)]
struct Again {
    residuals: Vec<Vec<f32>>,
    zero: Option<(usize, usize)>,
}

impl Observer for Again {
    fn residual(&mut self, layer: usize, _: usize, x: &[f32]) {
        self.residuals.resize_with(self.residuals.len().max(layer + 1), Vec::new);
        self.residuals[layer].extend_from_slice(x);
    }

    fn change(&mut self, layer: usize, _: usize, o: &mut [f32]) {
        if let Some((l, head)) = self.zero.filter(|z| z.0 == layer) {
            assert_eq!(l, layer);
            o.chunks_mut(9 * 64).for_each(|row| row[head * 64..][..64].fill(0.0));
        }
    }
}

#[test]
fn layers_run_again_from_the_middle_give_the_same_and_changed_heads_something_else() {
    let tokens = alice_tokens(96);
    let mut decoder = decoder(&Recipe::default());
    let (mut whole, mut again) = (Vec::new(), Vec::new());
    decoder.forward(&tokens[..64], Rows::None, &mut whole).unwrap();
    let mut seen = Again::default();
    decoder.forward_observed(&tokens[64..], Rows::All, &mut whole, &mut seen).unwrap();
    decoder.truncate(64);
    assert_eq!(seen.residuals.len(), 30);
    for layer in [29, 0, 12] {
        decoder.forward_from(layer, &seen.residuals[layer], &mut again, &mut Again::default()).unwrap();
        assert_eq!((decoder.len(), again.len()), (64, whole.len()));
        assert!(largest_difference(&again, &whole) < 1e-4, "layer {layer}");
        let mut change = Again { zero: Some((layer, 3)), ..Again::default() };
        decoder.forward_from(layer, &seen.residuals[layer], &mut again, &mut change).unwrap();
        assert!(largest_difference(&again, &whole) > 1e-3, "layer {layer}");
    }
    // The decoder can still take the tokens as before.
    decoder.forward(&tokens[64..], Rows::All, &mut again).unwrap();
    assert!(largest_difference(&again, &whole) < 1e-4);
}

#[test]
fn new_tokens_go_to_the_method_that_the_recipe_has_for_them() {
    let tokens = alice_tokens(96);
    let text = "version = 1\n[default]\nmethod = \"exact\"\n[default.decode]\nmethod = \"sink_window\"\n";
    let narrow = Recipe::from_toml(&format!("{text}params = {{ sinks = 1, window = 4 }}")).unwrap();
    let wide = Recipe::from_toml(&format!("{text}params = {{ window = 512 }}")).unwrap();
    let exact = logits_after(&Recipe::default(), &tokens, &[90, 1, 1, 1, 1, 1, 1]);
    let gap =
        |recipe: &Recipe| largest_difference(&logits_after(recipe, &tokens, &[90, 1, 1, 1, 1, 1, 1]), &exact);
    assert!(gap(&wide) < 1e-3, "{}", gap(&wide));
    assert!(gap(&narrow) > 0.1, "{}", gap(&narrow));
    // A prompt in one piece is exact with both.
    let whole = logits_after(&Recipe::default(), &tokens, &[96]);
    assert!(largest_difference(&logits_after(&narrow, &tokens, &[96]), &whole) < 1e-4);
}
