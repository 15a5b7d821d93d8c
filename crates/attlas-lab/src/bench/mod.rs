//! Growth of times with sequence length, beside exact attention and the machine's ceiling.
//!
//! At each length every method is planned and run once to warm up, which also measures its memory. Each round that
//! follows plans and times one run of exact attention and of every method: a machine that slows down slows all of them.
//! With `decode` a method that decodes first reads all tokens (its set-up) and is then timed on one further token at a
//! time, in rounds with exact attention alone; a method that does not decode is timed on a single query over all keys.
//! Figures: median and range of the runs, counted operations as a share of the measured multiply-add peak, bytes as a
//! share of the measured read bandwidth, the length at which a method overtakes exact attention, interpolated in
//! logarithms, and the exponent of a power law fitted to its times at the lengths where its settings do not cover every
//! key and make it exact attention.

use crate::compare::status_name;
use crate::machine::Machine;
use crate::run::{Meter, Run};
use crate::select::{Chosen, baseline};
use crate::stats::{Spread, log_slope};
use crate::synthetic::Kind;
use crate::{Error, Result};
use attlas::method::Needs;
use attlas::{Mask, Options, Problem, Status};
use live::{Data, Live};
use serde::{Deserialize, Serialize};
use std::path::Path;

mod live;
mod tables;

/// Settings of a benchmark.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Lengths, in any order.
    pub lengths: Vec<usize>,
    /// Widths of heads.
    pub widths: Vec<usize>,
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// Mask.
    pub mask: Mask,
    /// One new token at a time.
    pub decode: bool,
    /// Distribution of the inputs.
    pub kind: Kind,
    /// True if exact attention takes part; speed-ups and errors need it.
    pub beside_exact: bool,
    /// Timed runs of each method at each length.
    pub runs: usize,
    /// Lengths at which one run is expected to take longer are skipped.
    pub max_seconds: f64,
    /// Bytes read to measure the bandwidth.
    pub ceiling_bytes: usize,
    /// Counter of allocated bytes.
    pub meter: Meter,
    /// Figures of other programs.
    pub peers: Vec<Peer>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            lengths: vec![1 << 10, 1 << 11, 1 << 12, 1 << 13],
            widths: vec![64],
            heads: 1,
            kv_heads: 1,
            mask: Mask::None,
            decode: false,
            kind: Kind::Gaussian,
            beside_exact: true,
            runs: 7,
            max_seconds: 60.0,
            ceiling_bytes: 256 << 20,
            meter: Meter::NONE,
            peers: Vec::new(),
        }
    }
}

/// Figures that another program measured.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Peer {
    /// Name and version of the program.
    pub peer: String,
    /// Its figures.
    pub figures: Vec<PeerFigure>,
}

/// One figure of another program.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct PeerFigure {
    /// Id of the method to compare it with; `exact` if absent.
    #[serde(default = "exact_id")]
    pub method: String,
    /// Length.
    pub n: usize,
    /// Width of heads.
    pub d: usize,
    /// Query heads.
    #[serde(default = "one")]
    pub heads: usize,
    /// Key heads; one for each query head if absent.
    pub kv_heads: Option<usize>,
    /// With a causal mask.
    #[serde(default)]
    pub causal: bool,
    /// One query over all keys.
    #[serde(default)]
    pub decode: bool,
    /// Threads it used; any if absent.
    pub threads: Option<usize>,
    /// Seconds of one run.
    pub seconds: f64,
}

fn exact_id() -> String {
    baseline().map_or_else(|_| String::new(), |m| m.id.into())
}

fn one() -> usize {
    1
}

/// Reads the figures of another program.
pub fn read_peer(path: &Path) -> Result<Peer> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::reading(path, e))?;
    serde_json::from_str(&text).map_err(|e| Error::Malformed {
        path: path.into(),
        format: "peer figures",
        reason: format!("{e}; expected {{\"peer\": name, \"figures\": [{{\"n\", \"d\", \"seconds\", …}}]}}"),
    })
}

/// Everything measured.
#[derive(Clone, Debug, Serialize)]
pub struct Bench {
    /// The machine with its ceilings.
    pub machine: Machine,
    /// Mask.
    pub mask: Mask,
    /// One new token at a time.
    pub decode: bool,
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// One for each method, width and length.
    pub rows: Vec<Row>,
    /// One for each method and width.
    pub summary: Vec<Growth>,
    /// Methods that cannot do this problem, with their reasons.
    pub refused: Vec<crate::compare::Refused>,
    /// Runs left out or shortened, and why.
    pub notes: Vec<String>,
    /// The caller asked to stop before everything was measured.
    pub interrupted: bool,
}

/// One method at one length.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Id of the method.
    pub method: &'static str,
    /// Its family.
    pub family: &'static str,
    /// Every parameter with its value.
    pub params: serde_json::Map<String, serde_json::Value>,
    /// Length.
    pub n: usize,
    /// Width of heads.
    pub d: usize,
    /// Seconds of set-up: planning, and with a stream also reading the tokens before the timed ones.
    pub setup_seconds: Spread,
    /// Seconds of one run, or of one token.
    pub run_seconds: Spread,
    /// Median seconds of exact attention in the same rounds, with set-up if the method's includes it.
    pub exact_seconds: Option<f64>,
    /// Speed-up over exact attention; set-up counts unless decoding.
    pub speedup: Option<f64>,
    /// Relative Frobenius error of the last run; none for Gaussian inputs, whose exact output is nearly zero, for
    /// decoding, and without exact attention in the run.
    pub error: Option<f64>,
    /// Counted operations of set-up and rows; none for a stream.
    pub flops: Option<u64>,
    /// Billions of counted operations per second of set-up and run.
    pub gflops: Option<f64>,
    /// The same as a share of the measured multiply-add peak; none if that could not be measured.
    pub flop_share: Option<f64>,
    /// Bytes that have to be read at least once: the state of a stream, or the operands.
    pub bytes: u64,
    /// Those bytes per second as a share of the measured read bandwidth.
    pub read_share: f64,
    /// Most scratch bytes in use at one time.
    pub scratch_bytes: usize,
    /// Most bytes allocated while planning and running, the output apart.
    pub peak_bytes: usize,
    /// `run`, `stream` (decoding with state) or `one_query` (a single query over all keys).
    pub mode: &'static str,
    /// `complete`; `exact` where the settings covered everything; `stopped_early`.
    pub status: &'static str,
    /// Figures of other programs for the same shape.
    pub peers: Vec<PeerRatio>,
}

/// A figure of another program beside ours.
#[derive(Clone, Debug, Serialize)]
pub struct PeerRatio {
    /// The program.
    pub peer: String,
    /// Its seconds.
    pub seconds: f64,
    /// Its seconds over ours: above 1 we are faster.
    pub ratio: f64,
}

/// Growth of a method's time with length.
#[derive(Clone, Debug, Serialize)]
pub struct Growth {
    /// Id of the method.
    pub method: &'static str,
    /// Width of heads.
    pub d: usize,
    /// Exponent of the length in the time, fitted to the lengths at which the method was not exact attention by its
    /// settings, or to all lengths where those are fewer than two.
    pub exponent: Option<f64>,
    /// Exponent as published.
    pub claimed: f64,
    /// Length at which it overtakes exact attention.
    pub crossover: Crossover,
}

/// Length at which a method overtakes exact attention, within the measured lengths.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind", content = "n")]
pub enum Crossover {
    /// At this length, interpolated.
    At(f64),
    /// It is faster at every length measured, from this one on.
    Below(usize),
    /// It is slower at the longest length measured, this one.
    Above(usize),
    /// Nothing to compare with.
    Unknown,
}

/// Seconds of one run beyond which fewer runs are made.
const LONG_RUN_SECONDS: f64 = 10.0;
/// Fewest runs without a note.
const FEW_RUNS: usize = 5;
/// Length from which times are extrapolated if no shorter one was measured.
const PROBE_LEN: usize = 1024;

/// Measures every method of `selection` at every length and width.
pub fn bench(selection: &[Chosen], settings: &Settings, run: &mut Run<'_>) -> Result<Bench> {
    let mut ws = run.workspace()?;
    let exact = baseline()?;
    let own = |c: &Chosen| c.method.id == exact.id && c.options.is_empty();
    let mut subjects = vec![Chosen { method: exact, options: Options::new(), named: true }];
    subjects.retain(|_| settings.beside_exact);
    subjects.extend(selection.iter().filter(|c| !own(c)).cloned());
    let mut lengths = settings.lengths.clone();
    lengths.sort_unstable();
    lengths.dedup();
    for &d in &settings.widths {
        problem(settings, lengths.first().copied().unwrap_or(1), d).validate()?;
    }
    let mut result = Bench {
        machine: Machine::measure(&ws, settings.ceiling_bytes),
        mask: if settings.decode { Mask::Causal } else { settings.mask },
        decode: settings.decode,
        heads: settings.heads,
        kv_heads: settings.kv_heads,
        rows: Vec::new(),
        summary: Vec::new(),
        refused: Vec::new(),
        notes: Vec::new(),
        interrupted: false,
    };
    if result.machine.fma_gflops.is_none() {
        let why = "the multiply-add peak could not be measured: the burst takes no longer with more to do";
        result.notes.push(why.into());
    }
    let total = settings.widths.len() * lengths.len() * subjects.len();
    let mut done = 0;
    for &d in &settings.widths {
        // Last length measured and its seconds, by method.
        let mut last: Vec<Option<(usize, f64)>> = vec![None; subjects.len()];
        for &n in &lengths {
            if run.stopped() {
                result.interrupted = true;
                break;
            }
            let data = Data::draw(problem(settings, n, d), settings, run.seed)?;
            let mut able = Vec::new();
            for (i, subject) in subjects.iter().enumerate() {
                run.at(done, total, &format!("{} n = {n}", subject.method.id));
                done += 1;
                if let Some(reasons) = refusal(subject, &data.problem, settings, run.seed)? {
                    let refused = &mut result.refused;
                    if !refused.iter().any(|r| r.method == subject.method.id) {
                        refused.push(crate::compare::Refused {
                            method: subject.method.id,
                            layer: None,
                            reasons,
                        });
                    }
                    continue;
                }
                if last[i].is_none() && n > 2 * PROBE_LEN {
                    let probe = Data::draw(problem(settings, PROBE_LEN, d), settings, run.seed)?;
                    let mut live = Live::new(subject, &probe, settings, run.seed, &mut ws)?;
                    live.round(&probe, &mut ws)?;
                    last[i] = Some((PROBE_LEN, live.total()));
                }
                if let Some((before, seconds)) = last[i] {
                    let growth = if settings.decode { 1.0 } else { subject.method.claims.exponent.max(1.0) };
                    let expected = seconds * (n as f64 / before as f64).powf(growth);
                    if expected > settings.max_seconds {
                        result.notes.push(format!(
                            "{} at n = {n}, d = {d} skipped: one run would take about {expected:.0} s \
                             (--max-seconds {})",
                            subject.method.id, settings.max_seconds
                        ));
                        continue;
                    }
                }
                able.push(i);
            }
            for batch in batches(&able, settings.decode && settings.beside_exact) {
                let mut live = Vec::new();
                for &i in &batch {
                    live.push((i, Live::new(&subjects[i], &data, settings, run.seed, &mut ws)?));
                }
                for round in 0..settings.runs {
                    for (_, live) in live.iter_mut() {
                        let allowed = live.runs_allowed(settings);
                        if round < allowed && !run.stopped() {
                            live.round(&data, &mut ws)?;
                        }
                    }
                }
                let beside =
                    live.first().filter(|(i, _)| settings.beside_exact && *i == 0).map(|(_, live)| live);
                for (i, live) in &live {
                    let subject = &subjects[*i];
                    let Some(row) = live.row(subject, &data, settings, &result.machine, beside) else {
                        continue;
                    };
                    last[*i] = Some((n, live.total()));
                    if row.run_seconds.runs < FEW_RUNS.min(settings.runs) {
                        result.notes.push(format!(
                            "{} at n = {n}, d = {d}: {} runs only, each takes {:.0} s",
                            row.method, row.run_seconds.runs, row.run_seconds.median
                        ));
                    }
                    // Exact attention takes part in several batches; the first stands in the table.
                    let known =
                        |r: &Row| (r.method, r.n, r.d) == (row.method, n, d) && r.params == row.params;
                    if !result.rows.iter().any(known) {
                        result.rows.push(row);
                    }
                }
            }
        }
    }
    result.summary = growth(&result, &subjects);
    Ok(result)
}

/// Groups the methods that share rounds: all of them, or each with exact attention alone if it keeps state.
fn batches(able: &[usize], decode: bool) -> Vec<Vec<usize>> {
    match able {
        [0, rest @ ..] if decode && !rest.is_empty() => rest.iter().map(|&i| vec![0, i]).collect(),
        rest if decode && rest != [0] => rest.iter().map(|&i| vec![i]).collect(),
        all => vec![all.to_vec()],
    }
}

fn problem(settings: &Settings, n: usize, d: usize) -> Problem {
    let p = Problem::new(settings.heads, n, d).with_kv_heads(settings.kv_heads);
    if settings.decode { p.with_lens(1, n).causal() } else { Problem { mask: settings.mask, ..p } }
}

fn refusal(
    subject: &Chosen,
    problem: &Problem,
    settings: &Settings,
    seed: u64,
) -> Result<Option<Vec<String>>> {
    let options = subject.options_for(seed);
    // A stream is planned for the whole sequence.
    let whole = problem.with_lens(problem.n_k, problem.n_k);
    let asked = if settings.decode && subject.method.claims.decode { &whole } else { problem };
    if subject.method.claims.needs == Needs::Calibration {
        let support = subject.method.support(asked, &options);
        return Ok((!support.is_yes()).then_some(support.reasons));
    }
    match subject.method.plan(asked, &options) {
        Ok(_) => Ok(None),
        Err(attlas::Error::Unsupported { reasons, .. }) => Ok(Some(reasons)),
        Err(e) => Err(e.into()),
    }
}

impl Row {
    /// Returns the seconds of a length.
    pub fn total(&self) -> f64 {
        let run = self.run_seconds.median;
        if self.mode == "stream" { run } else { self.setup_seconds.median + run }
    }

    /// Returns the shortest time of a length.
    pub fn fastest(&self) -> f64 {
        let run = self.run_seconds.min;
        if self.mode == "stream" { run } else { self.setup_seconds.min + run }
    }
}

fn growth(result: &Bench, subjects: &[Chosen]) -> Vec<Growth> {
    let mut widths: Vec<usize> = result.rows.iter().map(|r| r.d).collect();
    widths.sort_unstable();
    widths.dedup();
    let mut out = Vec::new();
    for d in widths {
        for (i, subject) in subjects.iter().enumerate() {
            let rows: Vec<&Row> = result
                .rows
                .iter()
                .filter(|r| r.method == subject.method.id && r.d == d)
                .filter(|r| subject.options.iter().all(|(k, v)| r.params[k] == serde_json::json!(v)))
                .collect();
            if rows.is_empty() {
                continue;
            }
            // If a method computed exact attention, its time says nothing about the method.
            let baseline = std::ptr::eq(subject.method, attlas::registry::baseline());
            let own = || rows.iter().filter(|r| baseline || r.status != status_name(Status::Exact));
            let times: Vec<(f64, f64)> = own().map(|r| (r.n as f64, r.total())).collect();
            let gains: Vec<(usize, f64)> = own().filter_map(|r| Some((r.n, r.speedup?))).collect();
            out.push(Growth {
                method: subject.method.id,
                d,
                exponent: log_slope(&times),
                claimed: subject.method.claims.exponent,
                crossover: if i == 0 && rows[0].speedup == Some(1.0) {
                    Crossover::Unknown
                } else {
                    crossover(&gains)
                },
            });
        }
    }
    out
}

/// Returns the length from which the speed-up stays above 1, interpolated in logarithms; `gains` are ordered by length.
fn crossover(gains: &[(usize, f64)]) -> Crossover {
    let Some(&(longest, gain)) = gains.last() else { return Crossover::Unknown };
    if gain < 1.0 {
        return Crossover::Above(longest);
    }
    let Some(slow) = gains.iter().rposition(|&(_, g)| g < 1.0) else { return Crossover::Below(gains[0].0) };
    let ((n0, g0), (n1, g1)) = (gains[slow], gains[slow + 1]);
    let (n0, n1) = ((n0 as f64).ln(), (n1 as f64).ln());
    let share = -g0.ln() / (g1.ln() - g0.ln());
    Crossover::At((n0 + share * (n1 - n0)).exp())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::Choice;

    fn run(methods: &[&str], settings: Settings) -> Bench {
        let methods = methods.iter().map(|s| s.to_string()).collect();
        let selection = Choice { methods, ..Choice::default() }.resolve().unwrap();
        Run::silent(1, 0, |run| bench(&selection, &settings, run)).unwrap()
    }

    fn small() -> Settings {
        Settings {
            lengths: vec![128, 64],
            widths: vec![8],
            heads: 2,
            kv_heads: 1,
            runs: 5,
            ceiling_bytes: 1 << 20,
            ..Settings::default()
        }
    }

    #[test]
    fn every_method_is_timed_at_every_length_beside_exact() {
        let b = run(&["top_k", "sink_window"], small());
        let shape: Vec<(&str, usize)> = b.rows.iter().map(|r| (r.method, r.n)).collect();
        let methods = ["exact", "sink_window", "top_k"];
        let wanted: Vec<(&str, usize)> = [64, 128].iter().flat_map(|&n| methods.map(|m| (m, n))).collect();
        assert_eq!(shape, wanted);
        for r in &b.rows {
            assert_eq!((r.run_seconds.runs, r.mode), (5, "run"));
            assert!(r.run_seconds.min <= r.run_seconds.median && r.run_seconds.median <= r.run_seconds.max);
            assert!(r.gflops.unwrap() > 0.0 && r.read_share > 0.0 && r.exact_seconds.unwrap() > 0.0);
            assert_eq!(r.flop_share, b.machine.fma_gflops.map(|peak| r.gflops.unwrap() / peak));
        }
        // 4 · n² · d per head.
        assert_eq!(b.rows[0].flops, Some(2 * 4 * 64 * 64 * 8));
        assert_eq!(b.rows[0].speedup, Some(1.0));
        assert!(b.summary[0].exponent.is_some());
        assert_eq!(b.summary[0].crossover, Crossover::Unknown);
    }

    #[test]
    fn exact_attention_under_another_name_neither_grows_nor_overtakes() {
        let b = run(&["hyper"], small());
        assert!(b.rows.iter().filter(|r| r.method == "hyper").all(|r| r.status == "exact"));
        let hyper = b.summary.iter().find(|g| g.method == "hyper").unwrap();
        assert_eq!((hyper.exponent, hyper.crossover), (None, Crossover::Unknown));
    }

    #[test]
    fn decoding_uses_streams_where_a_method_has_them() {
        let b = run(&["top_k", "sink_window"], Settings { decode: true, ..small() });
        let modes: Vec<(&str, &str)> = b.rows.iter().map(|r| (r.method, r.mode)).take(3).collect();
        assert_eq!(modes, [("exact", "stream"), ("sink_window", "stream"), ("top_k", "one_query")]);
        // Keys and values of one head, 64 tokens and those decoded since.
        let cached = b.rows[0].bytes as usize / (2 * 8 * 4);
        assert!((64..80).contains(&cached), "{cached}");
        assert_eq!(b.rows[0].flops, None);
    }

    #[test]
    fn lengths_that_would_take_too_long_are_skipped_with_a_note() {
        let settings = Settings { lengths: vec![64, 1 << 22], max_seconds: 0.5, runs: 1, ..small() };
        let settings = Settings { heads: 1, widths: vec![1], ..settings };
        let b = run(&["exact"], settings);
        assert_eq!(b.rows.len(), 1);
        assert!(b.notes.iter().any(|n| n.contains("skipped") && n.contains("4194304")), "{:?}", b.notes);
    }

    #[test]
    fn peers_are_merged_where_shapes_agree() {
        let text = r#"{"peer": "other 1.0", "figures": [
            {"n": 64, "d": 8, "heads": 2, "kv_heads": 1, "threads": 1, "seconds": 1e9},
            {"n": 64, "d": 8, "heads": 2, "kv_heads": 1, "causal": true, "seconds": 2.0},
            {"n": 128, "d": 8, "heads": 2, "kv_heads": 1, "threads": 64, "seconds": 2.0}]}"#;
        let peer: Peer = serde_json::from_str(text).unwrap();
        let b = run(&["exact"], Settings { peers: vec![peer], ..small() });
        assert_eq!(b.rows[0].peers.len(), 1);
        assert!(b.rows[0].peers[0].ratio > 1e6 && b.rows[1].peers.is_empty());
    }

    #[test]
    fn crossovers_are_interpolated_in_logarithms() {
        assert_eq!(crossover(&[]), Crossover::Unknown);
        assert_eq!(crossover(&[(10, 0.5), (20, 0.9)]), Crossover::Above(20));
        assert_eq!(crossover(&[(10, 1.5), (20, 3.0)]), Crossover::Below(10));
        match crossover(&[(10, 2.0), (100, 0.5), (400, 2.0), (1600, 8.0)]) {
            Crossover::At(n) => assert!((n - 200.0).abs() < 1e-9, "{n}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn batches_pair_every_decoder_with_exact() {
        assert_eq!(batches(&[0, 1, 2], false), [vec![0, 1, 2]]);
        assert_eq!(batches(&[0, 1, 2], true), [vec![0, 1], vec![0, 2]]);
        assert_eq!(batches(&[0], true), [vec![0]]);
        assert_eq!(batches(&[1, 2], true), [vec![1], vec![2]]);
    }
}
