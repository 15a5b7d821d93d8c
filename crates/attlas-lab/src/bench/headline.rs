//! What the papers promise, measured here: each method at the setting its paper is known for, beside exact attention.
//!
//! Three parts. **Speed-ups**: one row for each claim of [`CLAIMS`], set-up included, exact attention timed in the same
//! rounds. **Growth**: times and memory of the same methods over lengths 16384 to 131072, as fitted exponents.
//! **Threads**: every method at 16384 tokens with one thread and with all, in alternation.

use super::live::{Data, Live};
use super::{Row, Settings, Step, bench, problem, refusal};
use crate::Result;
use crate::machine::Machine;
use crate::select::Chosen;
use crate::stats::log_slope;
use crate::synthetic::Kind;
use crate::table::{Table, bytes, number, percent, seconds, times};
use attlas::{Mask, Method, Options, Schedule, Workspace, registry};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

/// A speed-up that is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    /// Id of the method.
    pub method: &'static str,
    /// Settings other than the defaults.
    pub set: &'static [(&'static str, &'static str)],
    /// Tokens.
    pub n: usize,
    /// Width of heads.
    pub d: usize,
    /// With a causal mask.
    pub causal: bool,
    /// One new token at a time.
    pub decode: bool,
    /// What inputs are drawn from.
    pub kind: Kind,
    /// Times faster than exact attention, at least.
    pub faster: f64,
    /// Relative error, at most.
    pub error: Option<f64>,
}

impl Claim {
    const fn of(method: &'static str, n: usize, faster: f64) -> Self {
        let (set, kind) = (&[], Kind::Gaussian);
        Self { method, set, n, d: 64, causal: false, decode: false, kind, faster, error: None }
    }

    const fn with(self, set: &'static [(&'static str, &'static str)]) -> Self {
        Self { set, ..self }
    }

    const fn causal(self) -> Self {
        Self { causal: true, ..self }
    }

    const fn decode(self) -> Self {
        Self { decode: true, ..self }
    }

    fn chosen(&self) -> Result<Chosen> {
        let mut options = Options::new();
        self.set.iter().for_each(|(name, value)| {
            options.set(name, *value);
        });
        Ok(Chosen { method: registry::method(self.method)?, options, named: true })
    }

    /// The same inputs and mask: timed in one go.
    fn beside(&self, other: &Claim) -> bool {
        (self.n, self.d, self.causal, self.decode, self.kind)
            == (other.n, other.d, other.causal, other.decode, other.kind)
            && (self.method != other.method || self.set == other.set)
    }

    fn settings(&self, base: &Settings) -> Settings {
        Settings {
            lengths: vec![self.n],
            widths: vec![self.d],
            heads: 1,
            kv_heads: 1,
            mask: if self.causal { Mask::Causal } else { Mask::None },
            decode: self.decode,
            // A token takes about a millisecond.
            runs: if self.decode { base.runs * DECODED_TOKENS } else { base.runs },
            kind: self.kind,
            beside_exact: true,
            ..base.clone()
        }
    }

    fn name(&self) -> String {
        let set: Vec<String> = self.set.iter().map(|(k, v)| format!("{k}={v}")).collect();
        [&[self.method.to_owned()], &set[..]].concat().join(" ")
    }

    fn shape(&self) -> String {
        let mask = match (self.decode, self.causal) {
            (true, _) => "decode",
            (_, true) => "causal",
            _ => "no mask",
        };
        format!("{}, d {}, {mask}", self.n, self.d)
    }
}

/// The claims, in the order of the survey.
pub const CLAIMS: &[Claim] = &[
    Claim::of("hyper", 131_072, 54.0),
    Claim::of("hyper", 131_072, 5.4).causal(),
    Claim {
        kind: Kind::Clustered,
        error: Some(0.1),
        ..Claim::of("kdeformer", 32_768, 18.0).with(&[("block", "64"), ("samples", "2240")])
    },
    Claim {
        kind: Kind::Clustered,
        error: Some(0.1),
        ..Claim::of("kdeformer", 32_768, 18.0).with(&[("samples", "2240"), ("precision", "bf16")])
    },
    Claim::of("nystromformer", 8192, 12.7),
    Claim::of("linformer", 8192, 5.5).with(&[("rank", "128")]),
    Claim::of("linformer", 65_536, 20.0).with(&[("rank", "256")]),
    Claim::of("wildcat", 32_768, 12.0),
    Claim::of("performer", 131_072, 60.0).with(&[("map", "pos"), ("features", "256")]),
    Claim::of("performer", 131_072, 25.0).with(&[("map", "pos"), ("features", "256")]).causal(),
    Claim::of("polysketch", 32_768, 2.0).causal(),
    Claim::of("multipole", 131_072, 4.5).with(&[("budget", "8192")]).decode(),
    Claim { d: 128, ..Claim::of("loki", 32_768, 1.45).decode() },
    Claim::of("reformer", 65_536, 8.0),
    Claim::of("smyrf", 65_536, 8.0),
    Claim::of("routing", 65_536, 8.0),
    Claim::of("anna", 65_536, 8.0),
];

/// Lengths over which growth is fitted.
pub const GROWTH_LENGTHS: [usize; 4] = [16_384, 32_768, 65_536, 131_072];
/// Length at which threads are compared.
pub const THREADS_LENGTH: usize = 16_384;
/// Tokens decoded for every run that is asked for.
const DECODED_TOKENS: usize = 40;
/// Growth and threads go through all methods as often as runs are asked for, with so many runs of each length in a pass.
/// Other programs on the machine disturb runs for seconds at a time; the fastest of runs that lie minutes apart is judged.
const RUNS_A_PASS: usize = 3;
/// Rounds in which threads are compared in a pass, as far as they fit into so many seconds: short runs are the ones that
/// are disturbed.
const THREADS_ROUNDS: usize = 12;
const THREADS_SECONDS: f64 = 0.5;
/// What a second thread has to bring.
const THREADS_WANTED: f64 = 1.8;
/// Growth allowed beyond the published exponent, for caches that no longer hold what they held.
const GROWTH_SLACK: f64 = 0.15;

/// Everything measured.
#[derive(Clone, Debug, Serialize)]
pub struct Headline {
    /// The machine with its ceilings.
    pub machine: Machine,
    /// One for each claim.
    pub speedups: Vec<Speedup>,
    /// One for each method and mask.
    pub growth: Vec<Exponent>,
    /// One for each method.
    pub threads: Vec<Threads>,
    /// What was left out, and why.
    pub notes: Vec<String>,
    /// The caller asked to stop before everything was measured.
    pub interrupted: bool,
}

/// A claim beside what was found.
#[derive(Clone, Debug, Serialize)]
pub struct Speedup {
    /// Method and settings.
    pub what: String,
    /// Length, width, mask.
    pub shape: String,
    /// What was asked for.
    pub wanted: f64,
    /// What was found.
    pub found: f64,
    /// Largest error accepted.
    pub wanted_error: Option<f64>,
    /// Whether speed and error are as asked for.
    pub holds: bool,
    /// The figures behind it.
    pub row: Row,
}

/// How a method grows.
#[derive(Clone, Debug, Serialize)]
pub struct Exponent {
    /// Method and settings.
    pub what: String,
    /// Mask.
    pub mask: Mask,
    /// Exponent of the length in the time.
    pub time: f64,
    /// Largest exponent accepted.
    pub wanted: f64,
    /// Exponent of the length in the memory.
    pub memory: Option<f64>,
    /// Bytes held at the longest length.
    pub peak_bytes: usize,
    /// Whether the time grows no faster than accepted.
    pub holds: bool,
}

/// What threads bring.
#[derive(Clone, Debug, Serialize)]
pub struct Threads {
    /// Id of the method.
    pub method: &'static str,
    /// Seconds with one thread.
    pub one_seconds: f64,
    /// Seconds with all of them.
    pub all_seconds: f64,
    /// Times faster.
    pub faster: f64,
    /// What was asked for.
    pub wanted: f64,
    /// Whether it is as asked for.
    pub holds: bool,
}

/// Measures everything; `base` gives runs, seed, threads and the meter. Stops with what is finished once `stop` is set.
pub fn headline(base: &Settings, watch: &mut dyn FnMut(Step<'_>), stop: &AtomicBool) -> Result<Headline> {
    let ws = Workspace::new(Schedule { threads: base.threads, ..Schedule::default() })?;
    let mut result = Headline {
        machine: Machine::measure(&ws, base.ceiling_bytes),
        speedups: Vec::new(),
        growth: Vec::new(),
        threads: Vec::new(),
        notes: Vec::new(),
        interrupted: false,
    };
    drop(ws);
    speedups(CLAIMS, base, &mut result, watch, stop)?;
    growth(CLAIMS, &GROWTH_LENGTHS, base, &mut result, watch, stop)?;
    threads(THREADS_LENGTH, base, &mut result, watch, stop)?;
    result.interrupted = stop.load(Ordering::Relaxed);
    Ok(result)
}

/// Claims that can be timed in the same rounds.
fn together(claims: &'static [Claim]) -> Vec<Vec<&'static Claim>> {
    let mut groups: Vec<Vec<&Claim>> = Vec::new();
    for claim in claims {
        match groups.iter_mut().find(|g| g.iter().all(|c| c.beside(claim))) {
            Some(group) => group.push(claim),
            None => groups.push(vec![claim]),
        }
    }
    groups
}

fn speedups(
    claims: &'static [Claim],
    base: &Settings,
    result: &mut Headline,
    watch: &mut dyn FnMut(Step<'_>),
    stop: &AtomicBool,
) -> Result<()> {
    for group in together(claims) {
        let Some(first) = group.first() else { continue };
        let selection = group.iter().map(|c| c.chosen()).collect::<Result<Vec<_>>>()?;
        let found = bench(&selection, &first.settings(base), watch, stop)?;
        result.notes.extend(found.notes);
        for claim in group {
            let of_claim = |r: &&Row| {
                r.method == claim.method && claim.set.iter().all(|(k, v)| shown(&r.params[*k]) == *v)
            };
            let Some(row) = found.rows.iter().find(of_claim) else { continue };
            let Some(speedup) = row.speedup else { continue };
            let accurate = claim.error.is_none_or(|most| row.error.is_some_and(|e| e <= most));
            result.speedups.push(Speedup {
                what: claim.name(),
                shape: claim.shape(),
                wanted: claim.faster,
                found: speedup,
                wanted_error: claim.error,
                holds: speedup >= claim.faster && accurate,
                row: row.clone(),
            });
        }
    }
    Ok(())
}

/// A setting as it is written on the command line.
fn shown(value: &serde_json::Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn growth(
    claims: &[Claim],
    lengths: &[usize],
    base: &Settings,
    result: &mut Headline,
    watch: &mut dyn FnMut(Step<'_>),
    stop: &AtomicBool,
) -> Result<()> {
    let mut growing: Vec<&Claim> = Vec::new();
    for claim in claims.iter().filter(|c| !c.decode) {
        if !growing.iter().any(|c| (c.method, c.causal) == (claim.method, claim.causal)) {
            growing.push(claim);
        }
    }
    // By claim and length: the fastest run, since whatever else the machine does adds to a time, and the most memory.
    let mut points = vec![BTreeMap::<usize, (f64, usize)>::new(); growing.len()];
    for pass in 0..base.runs {
        for (claim, points) in growing.iter().zip(&mut points) {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            // Nothing here is compared with the ceilings, which need not be measured well.
            let settings = Settings {
                lengths: lengths.to_vec(),
                runs: RUNS_A_PASS,
                ceiling_bytes: 1 << 20,
                beside_exact: false,
                ..claim.settings(base)
            };
            let found = bench(&[claim.chosen()?], &settings, watch, stop)?;
            result.notes.extend(found.notes.into_iter().filter(|_| pass == 0));
            for row in &found.rows {
                let (seconds, bytes) = points.entry(row.n).or_insert((f64::INFINITY, 0));
                (*seconds, *bytes) = (seconds.min(row.fastest()), row.peak_bytes.max(*bytes));
            }
        }
    }
    for (claim, points) in growing.iter().zip(&points) {
        let slope = |of: fn(&(f64, usize)) -> f64| {
            log_slope(&points.iter().map(|(&n, point)| (n as f64, of(point))).collect::<Vec<_>>())
        };
        let (Some(time), Some((_, &(_, peak_bytes)))) = (slope(|p| p.0), points.last_key_value()) else {
            continue;
        };
        // Published exponents just above 1 come from theory; blocks and samples of fixed size are linear.
        let claimed = claim.chosen()?.method.claims.exponent;
        let wanted = if claimed < 1.4 { 1.0 } else { claimed - 0.05 } + GROWTH_SLACK;
        result.growth.push(Exponent {
            what: claim.name(),
            mask: claim.settings(base).mask,
            time,
            wanted,
            memory: slope(|p| p.1 as f64),
            peak_bytes,
            holds: time <= wanted,
        });
    }
    Ok(())
}

fn threads(
    n: usize,
    base: &Settings,
    result: &mut Headline,
    watch: &mut dyn FnMut(Step<'_>),
    stop: &AtomicBool,
) -> Result<()> {
    let mut one = Workspace::new(Schedule { threads: 1, ..Schedule::default() })?;
    let mut all = Workspace::new(Schedule { threads: base.threads, ..Schedule::default() })?;
    let wanted = THREADS_WANTED / 2.0 * result.machine.threads as f64;
    if result.machine.threads == 1 {
        return Ok(());
    }
    let methods: Vec<_> = registry::METHODS.iter().filter(|m| !m.claims.oracle || m.id == "exact").collect();
    let mut fastest: Vec<Option<[f64; 2]>> = vec![None; methods.len()];
    for pass in 0..base.runs {
        for (i, method) in methods.iter().enumerate() {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            watch(Step {
                done: pass * methods.len() + i,
                total: base.runs * methods.len(),
                method: method.id,
                n,
            });
            match one_and_all(method, n, base, &mut one, &mut all)? {
                Some(now) => {
                    let [a, b] = fastest[i].unwrap_or(now);
                    fastest[i] = Some([a.min(now[0]), b.min(now[1])]);
                }
                None if pass == 0 => {
                    result.notes.push(format!("{} does not run here without training", method.id));
                }
                None => {}
            }
        }
    }
    for (method, fastest) in methods.iter().zip(fastest) {
        let Some([one_seconds, all_seconds]) = fastest else { continue };
        let faster = one_seconds / all_seconds;
        let holds = faster >= wanted;
        result.threads.push(Threads { method: method.id, one_seconds, all_seconds, faster, wanted, holds });
    }
    Ok(())
}

/// The fastest run of a method with the threads of each workspace, in turn; none if it does not run untrained. Whatever
/// else the machine does only adds to a time, and meets two threads more often than one.
fn one_and_all(
    method: &'static Method,
    n: usize,
    base: &Settings,
    one: &mut Workspace,
    all: &mut Workspace,
) -> Result<Option<[f64; 2]>> {
    let chosen = Chosen { method, options: Options::new(), named: true };
    for mask in [Mask::None, Mask::Causal] {
        let settings = Settings { heads: 1, kv_heads: 1, mask, decode: false, ..base.clone() };
        let problem = problem(&settings, n, 64);
        if refusal(&chosen, &problem, &settings)?.is_some() {
            continue;
        }
        let data = Data::draw(problem, &settings)?;
        let mut live =
            [Live::new(&chosen, &data, &settings, one)?, Live::new(&chosen, &data, &settings, all)?];
        let fitting = THREADS_SECONDS / live.iter().map(Live::warm_seconds).sum::<f64>();
        for _ in 0..(fitting as usize).clamp(1, THREADS_ROUNDS) {
            for (live, ws) in live.iter_mut().zip([&mut *one, &mut *all]) {
                // What caches lost to the other workspace's run comes back in a run that does not count, where that matters.
                if fitting > 1.0 {
                    live.once(&data, ws)?;
                }
                live.round(&data, ws)?;
            }
        }
        return Ok(Some(live.map(|l| l.fastest())));
    }
    Ok(None)
}

impl Headline {
    /// One line for each claim.
    pub fn speedup_table(&self) -> Table {
        let headers =
            ["<method", "<n", "seconds", "exact", "faster", "asked", "error", "share", "memory", "<"];
        let mut table = Table::new(&headers);
        for s in &self.speedups {
            let flop = s.row.flop_share.unwrap_or(0.0);
            let read = s.row.read_share;
            table.push(vec![
                s.what.clone(),
                s.shape.clone(),
                seconds(s.row.total()),
                s.row.exact_seconds.map_or("-".into(), seconds),
                times(s.found),
                times(s.wanted),
                s.row.error.map_or("-".into(), number),
                if flop >= read { percent(flop) + "F" } else { percent(read) + "B" },
                bytes(s.row.peak_bytes),
                verdict(s.holds),
            ]);
        }
        table
    }

    /// One line for each method and mask.
    pub fn growth_table(&self) -> Table {
        let mut table = Table::new(&["<method", "<mask", "time", "at most", "memory", "at the longest", "<"]);
        for g in &self.growth {
            table.push(vec![
                g.what.clone(),
                g.mask.to_string(),
                format!("N^{:.2}", g.time),
                format!("N^{:.2}", g.wanted),
                g.memory.map_or("-".into(), |m| format!("N^{m:.2}")),
                bytes(g.peak_bytes),
                verdict(g.holds),
            ]);
        }
        table
    }

    /// One line for each method.
    pub fn thread_table(&self) -> Table {
        let mut table = Table::new(&["<method", "one thread", "all", "faster", "asked", "<"]);
        for t in &self.threads {
            table.push(vec![
                t.method.into(),
                seconds(t.one_seconds),
                seconds(t.all_seconds),
                times(t.faster),
                times(t.wanted),
                verdict(t.holds),
            ]);
        }
        table
    }
}

fn verdict(holds: bool) -> String {
    if holds { "" } else { "below" }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &[Claim] = &[
        Claim { d: 16, ..Claim::of("hyper", 256, 1e-9).with(&[("block", "16"), ("n_min", "32")]) },
        Claim { d: 16, ..Claim::of("nystromformer", 256, 1e9).with(&[("landmarks", "8")]) },
        Claim { d: 16, kind: Kind::Clustered, error: Some(10.0), ..Claim::of("kdeformer", 256, 1e-9) },
        Claim { d: 16, ..Claim::of("sink_window", 256, 1e-9).decode() },
    ];

    fn base() -> Settings {
        Settings { runs: 1, threads: 2, ceiling_bytes: 1 << 20, ..Settings::default() }
    }

    fn empty() -> Headline {
        let ws = Workspace::single().unwrap();
        Headline {
            machine: Machine { threads: 2, ..Machine::measure(&ws, 1 << 20) },
            speedups: Vec::new(),
            growth: Vec::new(),
            threads: Vec::new(),
            notes: Vec::new(),
            interrupted: false,
        }
    }

    #[test]
    fn claims_of_one_shape_share_their_rounds_and_are_judged_by_speed_and_error() {
        assert_eq!(together(SMALL).iter().map(Vec::len).collect::<Vec<_>>(), [2, 1, 1]);
        let mut found = empty();
        speedups(SMALL, &base(), &mut found, &mut |_| (), &AtomicBool::new(false)).unwrap();
        let judged: Vec<(&str, bool)> = found.speedups.iter().map(|s| (s.row.method, s.holds)).collect();
        let wanted = [("hyper", true), ("nystromformer", false), ("kdeformer", true), ("sink_window", true)];
        assert_eq!(judged, wanted);
        assert!(found.speedups[2].row.error.is_some_and(|e| e > 0.0));
        assert!(found.speedups[0].row.error.is_none());
        assert_eq!(found.speedup_table().markdown().lines().count(), 2 + SMALL.len());
    }

    #[test]
    fn growth_is_fitted_without_exact_attention() {
        let mut found = empty();
        growth(SMALL, &[128, 256], &base(), &mut found, &mut |_| (), &AtomicBool::new(false)).unwrap();
        assert_eq!(found.growth.len(), 3);
        assert!(found.growth.iter().all(|g| g.time.is_finite() && g.wanted == 1.15));
    }

    #[test]
    fn every_method_that_runs_untrained_is_timed_with_one_thread_and_with_all() {
        let mut found = empty();
        threads(64, &base(), &mut found, &mut |_| (), &AtomicBool::new(false)).unwrap();
        let ids: Vec<&str> = found.threads.iter().map(|t| t.method).collect();
        for id in ["exact", "hyper", "loki", "performer"] {
            assert!(ids.contains(&id), "{id} of {ids:?}");
        }
        assert!(found.threads.iter().all(|t| t.wanted == THREADS_WANTED && t.faster > 0.0));
    }

    #[test]
    fn every_claim_names_a_method_with_such_settings() {
        for claim in CLAIMS {
            let chosen = claim.chosen().unwrap();
            let settings = claim.settings(&base());
            let p = problem(&settings, claim.n, claim.d);
            assert_eq!(refusal(&chosen, &p, &settings).unwrap(), None, "{}", claim.name());
        }
    }
}
