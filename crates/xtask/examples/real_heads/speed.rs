//! Prompts: the time of a method with its set-up against exact attention in the same rounds.

use crate::heads::{MASK, head_errors};
use crate::{Args, Outcome, Subject};
use attlas::{Mask, Out, Schedule, TensorMut, Workspace};
use attlas_lab::machine;
use attlas_lab::stats::{Spread, mean};
use attlas_lab::table::{Table, percent, seconds, times};
use attlas_lab::workload::LayerData;
use std::time::Instant;

const LENGTHS: [usize; 2] = [8192, 32768];
const LAYERS: [usize; 2] = [1, 5];

/// Methods of the table up to the trained length, and beyond it. Settings were chosen on another text.
const SHORT: &[&str] = &[
    "sampled_columns",
    "sampled_columns precision=bf16",
    "sampled_columns block=128",
    "sampled_columns block=128 precision=bf16",
    "sampled_columns block=256 diagonals=1 keys=256",
    "sampled_columns block=256 diagonals=0 keys=256 precision=bf16",
    "multipole prompt=blocks chunk=512",
    "snap",
];
const LONG: &[&str] = &[
    "sampled_columns block=128",
    "sampled_columns block=128 precision=bf16",
    "sampled_columns block=256 diagonals=0 far_share=0.08",
    "sampled_columns block=256 diagonals=0 far_share=0.08 precision=bf16",
];

/// Makes one run with its plan; returns outputs, seconds and share of the scores.
fn once(subject: &Subject, layer: &LayerData, rows: &mut [f32], ws: &mut Workspace) -> Outcome<(f64, f64)> {
    let problem = attlas::Problem { mask: MASK, ..layer.problem };
    let inputs = layer.inputs()?;
    let start = Instant::now();
    let plan = subject.method.plan(&problem, &subject.options)?;
    let out = Out::new(TensorMut::bhnd(rows, [1, problem.n_heads, problem.n_q, problem.d_v])?);
    let info = plan.execute(&inputs, &mut out.into(), ws)?;
    let taken = start.elapsed().as_secs_f64();
    Ok((taken, (info.keys_visited + info.setup_scores) as f64 / problem.visible_pairs() as f64))
}

pub(crate) fn speed(args: &Args) -> Outcome<()> {
    let mut ws = Workspace::new(Schedule::default())?;
    println!("{}, {}", machine::name(&ws), machine::date());
    let exact = [Subject::read("exact")?, Subject::read("exact precision=bf16")?];
    let layers = args.layers.clone().unwrap_or(LAYERS.to_vec());
    for n in args.lengths.clone().unwrap_or(LENGTHS.to_vec()) {
        let heads = args.place.heads(n, &layers)?;
        let subjects = args.subjects_or(if n > LENGTHS[0] { LONG } else { SHORT })?;
        let mut table =
            Table::new(&["<method", "layers", "scores", "error", "worst head", "time", "+-", "faster"]);
        // By method: times and exact times, summed over layers, of each round; errors of all heads; shares.
        let count = exact.len() + subjects.len();
        let mut taken = vec![vec![0.0; args.runs]; count];
        let (mut errors, mut shares) = (vec![Vec::new(); count], vec![Vec::new(); count]);
        for layer in &heads.layers {
            let p = attlas::Problem { mask: Mask::Causal, ..layer.problem };
            let mut want = vec![0.0f32; p.n_heads * p.n_q * p.d_v];
            let mut rows = vec![0.0f32; want.len()];
            once(&exact[0], layer, &mut want, &mut ws)?;
            for round in 0..args.runs {
                for (i, subject) in exact.iter().chain(&subjects).enumerate() {
                    let (time, share) = once(subject, layer, &mut rows, &mut ws)?;
                    taken[i][round] += time;
                    if round == 0 {
                        errors[i].extend(head_errors(&rows, &want, p.n_heads));
                        shares[i].push(share);
                    }
                }
            }
        }
        for (i, subject) in exact.iter().chain(&subjects).enumerate() {
            let rounded = subject.name().contains("bf16");
            let ratios: Vec<f64> =
                taken[usize::from(rounded)].iter().zip(&taken[i]).map(|(e, t)| e / t).collect();
            let (Some(time), Some(ratio)) = (Spread::new(&taken[i]), Spread::new(&ratios)) else { continue };
            table.push(vec![
                subject.name(),
                heads.layers.len().to_string(),
                percent(mean(&shares[i])),
                format!("{:.3}", mean(&errors[i])),
                format!("{:.3}", errors[i].iter().copied().fold(0.0, f64::max)),
                seconds(time.median),
                seconds((time.max - time.min) / 2.0),
                format!("{} ({}–{})", times(ratio.median), times(ratio.min), times(ratio.max)),
            ]);
        }
        println!(
            "\n{n} tokens, layers {layers:?}, times of all {} query heads of each\n",
            heads.layers[0].problem.n_heads
        );
        print!("{}", table.markdown());
    }
    Ok(())
}
