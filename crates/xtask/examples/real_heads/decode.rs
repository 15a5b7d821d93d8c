//! Decoding: single tokens over a long cache, against exact attention on the same tokens.

use crate::heads::{head_errors, repeat};
use crate::{Args, Outcome, Subject};
use attlas::{DType, Mask, Out, Problem, Schedule, TensorMut, TensorRef, Workspace};
use attlas_lab::machine;
use attlas_lab::stats::{mean, median};
use attlas_lab::table::{Table, percent, seconds, times};
use attlas_lab::workload::LayerData;
use std::time::Instant;

/// Decoded tokens: several times the interval between two refreshes or updates.
const TOKENS: usize = 128;

/// Most tokens that the model reads; longer caches repeat them.
const READ: usize = 32768;

/// Methods of the table, with defaults and with settings chosen on another text for an error of 0.1.
const LISTED: &[&str] = &[
    "sampled_columns",
    "sampled_columns far_share=0.05 refresh=64",
    "sampled_columns far_share=0.09 refresh=64",
    "multipole",
    "multipole budget=1536",
    "quest",
];

struct Decoded {
    rows: Vec<f32>,
    setup: f64,
    tokens: Vec<f64>,
    share: f64,
    bytes: usize,
}

/// Pushes all but the last tokens, then decodes these one at a time.
fn decoded(subject: &Subject, layer: &LayerData, ws: &mut Workspace) -> Outcome<Decoded> {
    let p = Problem { mask: Mask::Causal, ..layer.problem };
    let q = TensorRef::bhnd(&layer.q, [1, p.n_heads, p.n_q, p.d])?;
    let k = TensorRef::bhnd(&layer.k, [1, p.n_kv_heads, p.n_k, p.d])?;
    let v = TensorRef::bhnd(&layer.v, [1, p.n_kv_heads, p.n_k, p.d_v])?;
    let start = Instant::now();
    let plan = subject.method.plan(&p, &subject.options)?;
    let mut stream =
        plan.stream(DType::F32).ok_or_else(|| format!("{} does not decode", subject.method.id))?;
    let first = p.n_k - TOKENS;
    stream.push(k.rows(0..first).into(), v.rows(0..first).into(), ws)?;
    let setup = start.elapsed().as_secs_f64();
    let (mut rows, mut tokens, mut visited) = (Vec::new(), Vec::new(), 0);
    for t in first..p.n_k {
        let mut row = vec![0.0f32; p.n_heads * p.d_v];
        let mut out = Out::new(TensorMut::bhnd(&mut row, [1, p.n_heads, 1, p.d_v])?).into();
        let start = Instant::now();
        stream.push(k.rows(t..t + 1).into(), v.rows(t..t + 1).into(), ws)?;
        let info = stream.attend(q.rows(t..t + 1).into(), &mut out, ws)?;
        tokens.push(start.elapsed().as_secs_f64());
        visited += info.keys_visited + info.setup_scores;
        rows.push(row);
    }
    // Heads first, because errors are per head.
    let heads = (0..p.n_heads).flat_map(|h| rows.iter().flat_map(move |r| &r[h * p.d_v..(h + 1) * p.d_v]));
    let share = visited as f64 / (TOKENS * p.n_heads * p.n_k) as f64;
    Ok(Decoded { rows: heads.copied().collect(), setup, tokens, share, bytes: stream.state_bytes() })
}

pub(crate) fn decode(args: &Args) -> Outcome<()> {
    let mut ws = Workspace::new(Schedule::default())?;
    println!("{}, {}", machine::name(&ws), machine::date());
    let exact = Subject::read("exact")?;
    let subjects = args.subjects_or(LISTED)?;
    for n in args.lengths.clone().unwrap_or(vec![32768, 131_072]) {
        let layers = args.layers.clone().unwrap_or(vec![1, 5]);
        let copies = n.div_ceil(READ);
        let mut heads = args.place.heads(n / copies, &layers)?;
        repeat(&mut heads, copies);
        let headers = [
            "<method",
            "scores",
            "error",
            "worst head",
            "median token",
            "mean token",
            "exact",
            "faster",
            "reading",
            "state",
        ];
        let mut table = Table::new(&headers);
        for subject in &subjects {
            let (mut errors, mut medians, mut means, mut times_exact) = (vec![], vec![], vec![], vec![]);
            let (mut share, mut setup, mut bytes, mut ratios) = (vec![], 0.0, 0, vec![]);
            for layer in &heads.layers {
                for _ in 0..args.runs {
                    let want = decoded(&exact, layer, &mut ws)?;
                    let got = decoded(subject, layer, &mut ws)?;
                    errors.extend(head_errors(&got.rows, &want.rows, layer.problem.n_heads));
                    medians.push(median(&got.tokens));
                    means.push(mean(&got.tokens));
                    times_exact.push(mean(&want.tokens));
                    ratios.push(mean(&want.tokens) / mean(&got.tokens));
                    share.push(got.share);
                    (setup, bytes) = (setup + got.setup, bytes.max(got.bytes));
                }
            }
            let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
            let most = ratios.iter().copied().fold(0.0, f64::max);
            table.push(vec![
                subject.name(),
                percent(mean(&share)),
                format!("{:.3}", mean(&errors)),
                format!("{:.3}", errors.iter().copied().fold(0.0, f64::max)),
                seconds(mean(&medians)),
                seconds(mean(&means)),
                seconds(mean(&times_exact)),
                format!("{} ({}–{})", times(median(&ratios)), times(least), times(most)),
                seconds(setup / ratios.len() as f64),
                attlas_lab::table::bytes(bytes),
            ]);
        }
        let repeated =
            if copies > 1 { format!(", {READ} tokens {copies} times over") } else { String::new() };
        println!("\n{n} keys{repeated}, {TOKENS} tokens, layers {layers:?}\n");
        print!("{}", table.markdown());
    }
    Ok(())
}
