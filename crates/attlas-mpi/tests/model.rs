//! Models whose tokens are divided among several processes, compared with one process.

use attlas::{Schedule, Workspace};
use attlas_lab::Run;
use attlas_lab::crew::{Alone, Crew};
use attlas_lab::perplexity::{Record, Settings, Sharing, perplexity_with};
use attlas_lab::text::Text;
use attlas_lab::units::Ledger;
use attlas_model::decoder::Blind;
use attlas_model::kept::CacheFormat;
use attlas_model::perplexity::Protocol;
use attlas_model::{Compute, Decoder, Model, Recipe, Rows};
use attlas_mpi::{SpreadModel, Team, Threads};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Opens a small checkpoint of a family.
fn model(family: &str) -> Arc<Model> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/model/families").join(family);
    Arc::new(Model::open(&folder).unwrap())
}

fn recipe(method: &str, params: &[(&str, &str)]) -> Recipe {
    let mut recipe = Recipe::default();
    recipe.default.method = method.into();
    recipe.default.params = params.iter().fold(attlas::Options::new(), |o, (k, v)| o.with(k, *v));
    recipe
}

fn tokens(model: &Model, n: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i * 31 + 7 * i + 3) % model.config.vocab) as u32).collect()
}

/// Returns the final hidden states of all tokens, and the bytes of keys and values on each process.
fn spread(
    model: &Arc<Model>,
    recipe: &Recipe,
    tokens: &[u32],
    processes: usize,
) -> Result<(Vec<f32>, Vec<usize>), String> {
    let d = model.config.hidden;
    let parts = Threads::run(processes, |t| -> Result<_, String> {
        let mut decoder = Decoder::on(model.clone(), recipe, &Workspace::single().unwrap()).unwrap();
        let mut hidden = Vec::new();
        let held = decoder
            .forward_spread(tokens, &mut hidden, &mut SpreadModel::new(t), &mut Blind)
            .map_err(|e| e.to_string())?;
        assert!(decoder.is_empty() && hidden.len() == d * held.pieces.iter().map(|r| r.len()).sum::<usize>());
        Ok((held, hidden))
    });
    let mut all = vec![f32::NAN; tokens.len() * d];
    let mut bytes = Vec::new();
    for part in parts {
        let (held, hidden) = part?;
        let rows = held.pieces.into_iter().flatten().zip(hidden.chunks_exact(d));
        rows.for_each(|(i, row)| all[i * d..(i + 1) * d].copy_from_slice(row));
        bytes.push(held.cache_bytes);
    }
    Ok((all, bytes))
}

#[test]
fn hidden_states_are_those_of_one_process() {
    let window = [("window", "5"), ("sinks", "2")];
    let sampled = [("block", "64"), ("samples", "64")];
    let cases: [(&str, &str, &[(&str, &str)]); 8] = [
        ("granite", "exact", &[]),
        ("granite", "sink_window", &window),
        ("granite", "linear", &[]),
        ("granite", "polynomial", &[("block", "4")]),
        ("granite", "hyper", &sampled),
        // Soft caps and layers with a window; a logit beside the keys and experts; frequencies that follow the length.
        ("gemma2", "exact", &[]),
        ("gpt_oss", "exact", &[]),
        ("dynamic", "exact", &[]),
    ];
    for (family, method, params) in cases {
        let model = model(family);
        let recipe = recipe(method, params);
        for n in [1, 7, 41] {
            let tokens = tokens(&model, n);
            let mut decoder = Decoder::new(model.clone(), &recipe, Schedule::default()).unwrap();
            let mut want = Vec::new();
            decoder.forward(&tokens, Rows::All, &mut want).unwrap();
            let whole = decoder.cache_bytes();
            // Rounding of single precision, which the norms of a few layers amplify.
            let limit = 1e-4 * want.iter().fold(0.0f32, |a, x| a.max(x.abs()));
            for processes in 1..=3 {
                let name = format!("{family} {method}, {n} tokens, {processes} processes");
                let (found, bytes) = spread(&model, &recipe, &tokens, processes).expect(&name);
                let gap = found.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(gap <= limit && found.iter().all(|x| x.is_finite()), "{name}: {gap} beside {limit}");
                assert_eq!(bytes.iter().sum::<usize>(), whole, "{name}: keys are kept once");
                let most = whole / n * (n.div_ceil(2 * processes) * 2 + 8);
                assert!(bytes.iter().all(|&b| b <= most), "{name}: {bytes:?} of {whole}");
            }
        }
    }
}

#[test]
fn methods_without_a_schedule_are_refused_with_the_reason() {
    let granite = model("granite");
    let refused = spread(&granite, &recipe("top_k", &[]), &tokens(&granite, 9), 2).unwrap_err();
    assert!(refused.contains("no schedule"), "{refused}");
    let latent = model("deepseek_v2");
    let refused = spread(&latent, &Recipe::default(), &tokens(&latent, 9), 2).unwrap_err();
    assert!(refused.contains("attend as a whole"), "{refused}");
}

#[test]
fn perplexity_is_that_of_one_process() {
    let model = model("granite");
    let text = Text { source: "a text".into(), sha256: String::new(), tokens: tokens(&model, 50) };
    let measure = |crew: &dyn Crew, recipe: Option<Recipe>, protocol, bos| -> Record {
        let (cache, compute) = (CacheFormat::F32, Compute::F32);
        let sharing = Sharing::Fewer;
        let settings = Settings { protocol, bos, task: None, recipe, cache, compute, sharing };
        let stop = AtomicBool::new(false);
        let mut run = Run { threads: 1, seed: 0, progress: &mut |_| (), stop: &stop };
        perplexity_with(&model, &text, &settings, crew, &mut Ledger::none(), None, &mut run).unwrap()
    };
    let method = || recipe("sink_window", &[("window", "6")]);
    for (recipe, protocol) in [
        (None, Protocol::Strided { window: 50, stride: 50 }),
        (Some(method()), Protocol::Strided { window: 64, stride: 64 }),
        (Some(method()), Protocol::SecondHalf { window: 25 }),
    ] {
        let alone = measure(&Alone::default(), recipe.clone(), protocol, false);
        assert_eq!(alone.spread_keys, None);
        for processes in [2, 3] {
            let found = Threads::run(processes, |t| measure(&Team::new(t), recipe.clone(), protocol, false));
            for record in &found {
                // Two windows on two processes are shared as windows.
                let keys = alone.windows < processes;
                assert_eq!(record.spread_keys.map(|s| s.processes), keys.then_some(processes));
                assert_eq!((record.scored, record.windows), (alone.scored, alone.windows));
                assert!((record.nll - alone.nll).abs() < 1e-4, "{} {}", record.nll, alone.nll);
                let [a, b] =
                    [record, &alone].map(|r| r.against_exact.as_ref().map(|x| (x.kl_mean, x.keys_share)));
                let close =
                    |(a, b): ((f64, f64), (f64, f64))| (a.0 - b.0).abs() < 1e-4 && (a.1 - b.1).abs() < 1e-9;
                assert!(a.zip(b).is_none_or(close) && a.is_some() == b.is_some(), "{a:?} {b:?}");
            }
            assert!(found.iter().all(|r| r.nll == found[0].nll), "every process has the same record");
        }
    }
}
