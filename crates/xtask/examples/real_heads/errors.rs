//! Errors of methods at equal numbers of scores.

use crate::heads::{MASK, groups, head_errors, run};
use crate::{Args, Outcome, Subject};
use attlas::method::Family;
use attlas::{Options, Schedule, Workspace, registry};
use attlas_lab::stats::{Interval, median};
use attlas_lab::table::{Table, percent};
use attlas_lab::workload::Workload;

const LAYERS: [usize; 8] = [1, 5, 9, 13, 17, 21, 25, 29];
const TOKENS: usize = 4096;
const LEARNT: usize = 2048;
const SEEDS: u64 = 3;

/// Errors of one method over heads.
struct Found {
    errors: Vec<f64>,
    /// Share of the scores of exact attention.
    share: f64,
    fallback: f64,
}

/// Runs a method on every head; errors of a random method are averages over several seeds.
fn measure(
    subject: &Subject,
    heads: &Workload,
    learnt: Option<&Workload>,
    exact: &[Vec<f32>],
    ws: &mut Workspace,
) -> Outcome<Found> {
    let method = subject.method;
    let random = method.params.iter().any(|p| p.name == "seed") && !method.claims.deterministic;
    let seeds = if random { SEEDS } else { 1 };
    let (mut errors, mut visited, mut pairs, mut fallback, mut rows) = (Vec::new(), 0, 0, 0, 0);
    for ((i, layer, g), exact) in groups(heads).zip(exact) {
        let problem = layer.group_problem(MASK);
        let mut sums = vec![0.0; problem.n_heads];
        for seed in 0..seeds {
            let options =
                if random { subject.options.clone().with("seed", seed) } else { subject.options.clone() };
            let plan = match (method.calibrate, learnt) {
                (Some(calibrate), Some(learnt)) => {
                    let from = &learnt.layers[i];
                    let found = calibrate(&from.group_problem(MASK), &options, &[from.group(g)?.into()])?;
                    method.plan_with(&problem, &options, Some(&found))?
                }
                _ => method.plan(&problem, &options)?,
            };
            let (rows_of, info) = run(&*plan, layer.group(g)?, ws)?;
            let found = head_errors(&rows_of, exact, problem.n_heads);
            sums.iter_mut().zip(found).for_each(|(sum, e)| *sum += e / seeds as f64);
            visited += info.keys_visited + info.setup_scores;
            fallback += info.fallback_rows;
            pairs += problem.visible_pairs();
            rows += (problem.n_heads * problem.n_q) as u64;
        }
        errors.extend(sums);
    }
    Ok(Found { errors, share: visited as f64 / pairs as f64, fallback: fallback as f64 / rows as f64 })
}

fn exact(heads: &Workload, ws: &mut Workspace) -> Outcome<Vec<Vec<f32>>> {
    let all = groups(heads).map(|(_, layer, g)| {
        let plan = registry::baseline().plan(&layer.group_problem(MASK), &Options::new())?;
        Ok(run(&*plan, layer.group(g)?, ws)?.0)
    });
    all.collect()
}

fn row(name: String, found: &Found) -> Vec<String> {
    let mut sorted = found.errors.clone();
    sorted.sort_by(f64::total_cmp);
    let ninth = sorted[(sorted.len() * 9).div_ceil(10) - 1];
    let Interval { mean, lo, hi } = Interval::student(&found.errors);
    vec![
        name,
        percent(found.share),
        format!("{mean:.3}"),
        format!("{lo:.3}–{hi:.3}"),
        format!("{:.3}", median(&found.errors)),
        format!("{ninth:.3}"),
        format!("{:.2}", sorted[sorted.len() - 1]),
    ]
}

/// Compares the best methods at a fifth of the scores, on the demo's heads and on 72 heads at 4096 tokens.
pub(crate) fn errors(args: &Args) -> Outcome<()> {
    let mut ws = Workspace::new(Schedule::default())?;
    let listed = [
        "sink_window sinks=4 window=704",
        "sampled_columns",
        "sampled_columns keys=256",
        "sampled_columns far=none",
        "sampled_columns far=split",
        "sampled_columns scouts=1",
        "sampled_columns chooser=mean_query",
        "block_sparse",
        "multipole prompt=blocks",
        "multipole",
        "quest",
        "snap",
        "h2o",
    ];
    let layers = args.layers.clone().unwrap_or(LAYERS.to_vec());
    let real = args.place.heads(TOKENS, &layers)?;
    for (name, heads) in [("demo", attlas_lab::demo::load()?), ("real", real)] {
        let exact = exact(&heads, &mut ws)?;
        let p = heads.layers[0].problem;
        println!(
            "\n{name}: {} layers, {} query heads each, {} tokens\n",
            heads.layers.len(),
            p.n_heads,
            p.n_q
        );
        let mut table =
            Table::new(&["<method", "scores", "mean", "95 % over heads", "median", "90th pct", "worst"]);
        for subject in args.subjects_or(&listed)? {
            let found = measure(&subject, &heads, None, &exact, &mut ws)?;
            table.push(row(subject.name(), &found));
            eprintln!("{}", subject.name());
        }
        print!("{}", table.markdown());
    }
    Ok(())
}

/// Compares every method with a near field against that near field alone.
pub(crate) fn near(args: &Args) -> Outcome<()> {
    let mut ws = Workspace::new(Schedule::default())?;
    let layers = args.layers.clone().unwrap_or(LAYERS.to_vec());
    let heads = args.place.heads(TOKENS, &layers)?;
    let learnt = args.place.to_learn_from(LEARNT, &layers)?;
    let exact = exact(&heads, &mut ws)?;
    let alone = Subject::read("sink_window sinks=4 window=128")?;
    let found = measure(&alone, &heads, None, &exact, &mut ws)?;
    let headers = [
        "<method",
        "scores",
        "mean",
        "95 % over heads",
        "median",
        "90th pct",
        "worst",
        "fallbacks",
        "<verdict",
    ];
    let mut table = Table::new(&headers);
    let base = found.errors.clone();
    let add = |cells: Vec<String>, more: [String; 2]| cells.into_iter().chain(more).collect::<Vec<_>>();
    table.push(add(row(alone.name(), &found), ["".into(), "".into()]));
    for subject in subjects(args)? {
        let subject = subject.with("near.sinks", 4).with("near.window", 128);
        match measure(&subject, &heads, Some(&learnt), &exact, &mut ws) {
            Ok(found) => {
                let gaps: Vec<f64> = found.errors.iter().zip(&base).map(|(e, b)| e - b).collect();
                let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
                let better = gaps.iter().filter(|g| **g <= 0.0).count();
                let verdict = format!(
                    "{} ({better} of {} heads no worse)",
                    if mean <= 0.0 { "no worse" } else { "worse" },
                    gaps.len()
                );
                table.push(add(row(subject.name(), &found), [percent(found.fallback), verdict]));
            }
            Err(e) => eprintln!("{}: {e}", subject.name()),
        }
        eprintln!("{}", subject.name());
    }
    print!("{}", table.markdown());
    Ok(())
}

/// Settings at which a method with its near field computes at most a quarter of the scores, and those that keep it from
/// being exact attention at this length. Chosen on another text.
const SETTINGS: &[(&str, &str)] = &[
    ("anna", "weights=softmax"),
    ("block_sparse", "sinks=0 threshold=0.45 window=0"),
    ("h2o", "keys=192 recent=64"),
    ("hybrid_features", "bases=8 weights=4"),
    ("hyper", "block=64 n_min=128 samples=48"),
    ("kdeformer", "block=48 n_min=128 samples=64"),
    ("lifted_nystrom", "block=256 landmarks=24 sinks=0 window=0"),
    ("multipole", "budget=96 interval=64"),
    ("prescored_hyper", "block=96 keys=512 n_min=128"),
    ("sampled_columns", "diagonals=1 keys=128 sinks=0 window=0"),
    ("smyrf", "block=32 min_len=256 rounds=2"),
    ("snap", "keys=304 window=16"),
    ("wildcat", "block=256 rank=24 sinks=0 window=0"),
];

/// Returns every clustering, low-rank and positive-feature method with a log-sum-exp, or those of `--try`.
fn subjects(args: &Args) -> Outcome<Vec<Subject>> {
    if !args.subjects.is_empty() {
        return Ok(args.subjects.clone());
    }
    let families = [Family::Clustering, Family::LowRank, Family::Kernel];
    let methods = registry::METHODS.iter().filter(|m| families.contains(&m.family) && m.claims.lse);
    let all = methods.map(|m| {
        let settings = SETTINGS.iter().find(|s| s.0 == m.id).map_or("", |s| s.1);
        Subject::read(&format!("{} {settings}", m.id))
    });
    all.collect()
}
