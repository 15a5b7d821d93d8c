//! Which budgets are tried on which key head, and what is chosen.

use super::state::{Measurement, State};
use super::{Effort, Pick, Settings, WORTH_IT};
use crate::Result;
use crate::calibration::Calibrations;
use crate::compare::{self, Group, status_name};
use crate::run::execute;
use crate::select::Chosen;
use crate::table::{number, seconds};
use crate::workload::{LayerData, Workload};
use attlas::method::{Ladder as Steps, Needs};
use attlas::{Mask, Method, Options, Problem, Schedule, Status, Workspace, registry};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// A method that is further off than this on every screened key head, whatever its budget, is of no use.
const USELESS: f64 = 0.9;

/// A method with one budget.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub(super) method: &'static Method,
    pub(super) options: Options,
}

impl Candidate {
    pub(super) fn name(&self) -> String {
        format!("{} {}", self.method.id, self.options)
    }
}

/// A method's budgets, smallest first.
pub(super) type Ladder = Vec<Candidate>;

/// For each key head the largest size of its heads' exact outputs, over the root mean square of all heads of the layer:
/// what an error relative to the head is, relative to the layer.
fn weights(layer: &LayerData, ws: &mut Workspace) -> Result<Vec<f64>> {
    let problem = layer.group_problem(Mask::Causal);
    let plan = registry::baseline().plan(&problem, &Options::new())?;
    let len = problem.n_q * problem.d_v;
    let mut out = vec![0.0f32; problem.n_heads * len];
    let mut sizes: Vec<f64> = Vec::new();
    for g in 0..layer.problem.n_kv_heads {
        execute(&*plan, layer.group(g)?, &mut out, None, ws)?;
        let size = |rows: &[f32]| rows.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        sizes.extend(out.chunks(len.max(1)).map(size));
    }
    let mean = (sizes.iter().sum::<f64>() / sizes.len().max(1) as f64).sqrt();
    let largest = |heads: &[f64]| heads.iter().copied().fold(0.0, f64::max).sqrt();
    let weight = |heads: &[f64]| if mean > 0.0 { largest(heads) / mean } else { 1.0 };
    Ok(sizes.chunks(problem.n_heads.max(1)).map(weight).collect())
}

fn is_baseline(chosen: &Chosen) -> bool {
    std::ptr::eq(chosen.method, registry::baseline()) && chosen.options.is_empty()
}

/// A method as it is chosen, after itself with each value that its entry offers beside a default, such as rounded
/// inputs, where nothing was said about that parameter.
fn variants(chosen: &Chosen) -> Vec<Chosen> {
    let mut all = Vec::new();
    for t in chosen.method.tunable.iter().filter(|t| chosen.options.get(t.param).is_none()) {
        if let Steps::Values(values) = t.ladder {
            let with = |value: &&str| Chosen {
                options: chosen.options.clone().with(t.param, *value),
                ..chosen.clone()
            };
            all.extend(values.iter().map(with));
        }
    }
    all.push(chosen.clone());
    all
}

/// The budgets of a method that it accepts for a problem; empty where it cannot do it.
pub(super) fn ladder(chosen: &Chosen, problem: &Problem, effort: Effort, seed: u64) -> Ladder {
    let method = chosen.method;
    let base = chosen.options_for(seed);
    if is_baseline(chosen) {
        return Vec::new();
    }
    let names = crate::budget::params(chosen);
    let mut steps: Vec<Options> = Vec::new();
    for halvings in effort.halvings() {
        let budget = (problem.n_k >> halvings).max(1);
        let options = names.iter().fold(base.clone(), |options, name| options.with(name, budget));
        if !steps.contains(&options) {
            steps.push(options);
        }
    }
    // A recipe is planned again for other lengths, so short ones must be possible, too.
    let short = problem.with_lens(problem.n_q.min(64), problem.n_k.min(64));
    let accepted = |o: &Options| method.plan(problem, o).is_ok() && method.plan(&short, o).is_ok();
    steps.retain(accepted);
    if steps.is_empty() && accepted(&base) {
        steps.push(base);
    }
    steps.into_iter().map(|options| Candidate { method, options }).collect()
}

/// The layers, the budgets of every method on each, and which methods are still worth trying.
pub(super) struct Search<'a> {
    workload: &'a Workload,
    settings: &'a Settings,
    /// For each layer.
    ladders: Vec<Vec<Ladder>>,
    /// For each layer and key head, what an error of its heads counts in a target; empty where all count the same.
    weights: Vec<Vec<f64>>,
    bench: &'a Bench,
    ws: Workspace,
}

/// How measurements are made; no method gets anything that was learnt before.
pub(super) struct Bench {
    measuring: compare::Settings,
    given: Calibrations,
}

impl Bench {
    pub(super) fn new(workload: &Workload, settings: &Settings) -> Self {
        let measuring = compare::Settings {
            seeds: 1,
            seed: settings.seed,
            threads: settings.threads,
            certify_rows: workload.layers.iter().map(|l| l.problem.n_q).max().unwrap_or(0),
            runs: settings.effort.runs(),
            ..compare::Settings::default()
        };
        Self { measuring, given: Calibrations::default() }
    }
}

impl<'a> Search<'a> {
    pub(super) fn new(workload: &'a Workload, settings: &'a Settings, bench: &'a Bench) -> Result<Self> {
        let ladders = workload.layers.iter().map(|layer| {
            let problem = layer.group_problem(Mask::Causal);
            let able = |c: &&Chosen| {
                let claims = &c.method.claims;
                let wanted = c.named || settings.effort == Effort::Thorough || claims.softmax;
                wanted && claims.causal && claims.needs != Needs::Calibration && !claims.oracle
            };
            // Exact attention in fewer bits stands first: whatever comes after it has to be faster than that.
            let own = Chosen { method: registry::baseline(), options: Options::new(), named: false };
            let ladders = settings.selection.iter().filter(able).filter(|c| !is_baseline(c)).cloned();
            std::iter::once(own)
                .chain(ladders)
                .flat_map(|c| variants(&c))
                .map(|c| ladder(&c, &problem, settings.effort, settings.seed))
                .filter(|l| !l.is_empty())
                .collect()
        });
        let mut ws = Workspace::new(Schedule { threads: settings.threads, ..Schedule::default() })?;
        let weights = match settings.max_error.is_none() {
            true => workload.layers.iter().map(|layer| weights(layer, &mut ws)).collect::<Result<_>>()?,
            false => Vec::new(),
        };
        Ok(Self { workload, settings, ladders: ladders.collect(), weights, bench, ws })
    }

    /// The choice of every key head for a target, or of those of the shard; `None` once `stop` is set.
    pub(super) fn round(
        &mut self,
        target: f64,
        state: &mut State,
        watch: &mut dyn FnMut(usize, usize, &str),
        stop: &AtomicBool,
    ) -> Result<Option<Vec<Pick>>> {
        let layers = &self.workload.layers;
        let units: Vec<(usize, usize)> = layers
            .iter()
            .enumerate()
            .flat_map(|(i, l)| (0..l.problem.n_kv_heads).map(move |g| (i, g)))
            .collect();
        let dropped = match self.screen(&units, state, watch, stop)? {
            Some(dropped) => dropped,
            None => return Ok(None),
        };
        let mut picks = Vec::new();
        let begun = Instant::now();
        let known = state.len();
        for (done, &(i, g)) in units.iter().enumerate() {
            if self.settings.shard.is_some_and(|s| done % s.count != s.index) {
                continue;
            }
            // What is already known takes no time, so it says nothing about the rest.
            let left = if state.len() > known && done > 0 {
                let each = begun.elapsed().as_secs_f64() / done as f64;
                format!(", about {} left", seconds(each * (units.len() - done) as f64))
            } else {
                String::new()
            };
            let layer = layers[i].layer.unwrap_or(i);
            watch(
                done,
                units.len(),
                &format!("layer {layer}, key head {g}, target {}{left}", number(target)),
            );
            match self.pick(i, g, target, &dropped, state, stop)? {
                Some(pick) => picks.push(pick),
                None => return Ok(None),
            }
        }
        Ok(Some(picks))
    }

    /// Methods that are faster than exact attention on none of a few key heads, or useless on all of them.
    fn screen(
        &mut self,
        units: &[(usize, usize)],
        state: &mut State,
        watch: &mut dyn FnMut(usize, usize, &str),
        stop: &AtomicBool,
    ) -> Result<Option<Vec<&'static str>>> {
        let count = self.settings.effort.screens().min(units.len());
        let mut useful: Vec<&'static str> = Vec::new();
        let mut all: Vec<&'static str> = Vec::new();
        for s in 0..count {
            // The middles of equal parts of the model.
            let (i, g) = units[(2 * s + 1) * units.len() / (2 * count)];
            let mut bench = None;
            for ladder in self.ladders[i].clone() {
                if stop.load(Ordering::Relaxed) {
                    return Ok(None);
                }
                let id = ladder[0].method.id;
                all.push(id);
                watch(s, count, &format!("screening {id}"));
                let first = self.measure(i, g, &ladder[0], &mut bench, state)?;
                if useful.contains(&id) || first.exact || first.cost > WORTH_IT {
                    continue;
                }
                let last = self.measure(i, g, &ladder[ladder.len() - 1], &mut bench, state)?;
                if [first, last].iter().any(|m| m.error.is_some_and(|e| e <= USELESS)) {
                    useful.push(id);
                }
            }
        }
        Ok(Some(all.into_iter().filter(|id| !useful.contains(id)).collect()))
    }

    fn pick(
        &mut self,
        i: usize,
        g: usize,
        target: f64,
        dropped: &[&str],
        state: &mut State,
        stop: &AtomicBool,
    ) -> Result<Option<Pick>> {
        let layer: &'a LayerData = &self.workload.layers[i];
        let size = layer.problem.group_size();
        let mut best = Pick {
            layer: layer.layer.unwrap_or(i),
            kv_head: g,
            heads: (g * size..(g + 1) * size).collect(),
            method: registry::baseline().id.into(),
            params: Options::new(),
            error: 0.0,
            cost: 1.0,
        };
        let weight = self.weights.get(i).map_or(1.0, |w| w[g]);
        let mut bench = None;
        for ladder in self.ladders[i].clone() {
            if dropped.contains(&ladder[0].method.id) {
                continue;
            }
            for candidate in ladder {
                if stop.load(Ordering::Relaxed) {
                    return Ok(None);
                }
                let m = self.measure(i, g, &candidate, &mut bench, state)?;
                // Exact attention under another name: what it gains is noise, and at other lengths it is something else.
                if m.exact {
                    continue;
                }
                if m.cost > WORTH_IT || m.cost >= best.cost {
                    break;
                }
                if let Some(error) = m.error.filter(|e| e * weight <= target) {
                    best = Pick { method: m.method, params: m.params, error, cost: m.cost, ..best };
                    break;
                }
            }
        }
        Ok(Some(best))
    }

    /// A measurement that is known, or a new one that is kept at once.
    fn measure(
        &mut self,
        i: usize,
        g: usize,
        candidate: &Candidate,
        bench: &mut Option<Group<'a>>,
        state: &mut State,
    ) -> Result<Measurement> {
        let layer: &'a LayerData = &self.workload.layers[i];
        let number = layer.layer.unwrap_or(i);
        if let Some(m) = state.get(number, g, candidate) {
            return Ok(m.clone());
        }
        let chosen = Chosen { method: candidate.method, options: candidate.options.clone(), named: true };
        let group = match bench {
            Some(group) => group,
            None => {
                let Bench { measuring, given } = self.bench;
                bench.insert(Group::new(layer, g, Mask::Causal, measuring, given, &mut self.ws)?)
            }
        };
        let rows = group.measure(&chosen, None, &mut Calibrations::default(), &mut self.ws);
        let mut m = Measurement {
            layer: number,
            kv_head: g,
            method: candidate.method.id.into(),
            params: candidate.options.clone(),
            error: None,
            seconds: 0.0,
            // A method that fails on these numbers is never worth it.
            cost: f64::MAX,
            exact: false,
        };
        if let Ok(rows) = rows {
            m.error = rows.iter().try_fold(0.0, |a: f64, r| r.certified.bound.map(|b| a.max(b)));
            m.seconds = rows.iter().map(|r| r.setup_seconds + r.run_seconds).sum();
            let exact: f64 = rows.iter().map(|r| r.speedup * (r.setup_seconds + r.run_seconds)).sum();
            m.cost = if exact > 0.0 { m.seconds / exact } else { f64::MAX };
            m.exact = rows.iter().all(|r| r.status == status_name(Status::Exact));
        }
        state.push(m.clone())?;
        Ok(m)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::Choice;

    /// The setting with which exact attention rounds its inputs.
    const ROUNDED: (&str, &str) = ("precision", "bf16");

    fn settings(methods: &[&str], max_error: f64) -> Settings {
        let methods: Vec<String> = methods.iter().map(|m| m.to_string()).collect();
        // What a test makes up is of one precision.
        let set =
            methods.iter().filter(|m| *m == "sink_window").map(|m| format!("{m}.precision=full")).collect();
        Settings {
            max_error: Some(max_error),
            max_kl: None,
            max_ppl_increase: None,
            selection: Choice { methods, set, ..Choice::default() }.resolve().unwrap(),
            layers: None,
            effort: Effort::Thorough,
            shard: None,
            seed: 7,
            threads: 1,
            model: "a model".into(),
            command: None,
        }
    }

    fn workload() -> Workload {
        let mut workload = "synthetic:clustered,n=256,d=8,heads=4,kv_heads=2"
            .parse::<crate::Source>()
            .unwrap()
            .load()
            .unwrap();
        workload.mask = Mask::Causal;
        workload
    }

    fn search(settings: &Settings, target: f64, state: &mut State) -> Vec<Pick> {
        let workload = workload();
        let bench = Bench::new(&workload, settings);
        let mut search = Search::new(&workload, settings, &bench).unwrap();
        search.round(target, state, &mut |_, _, _| (), &AtomicBool::new(false)).unwrap().unwrap()
    }

    /// A measurement that says what a test needs.
    fn made_up(kv_head: usize, candidate: &Candidate, error: f64, cost: f64) -> Measurement {
        Measurement {
            layer: 0,
            kv_head,
            method: candidate.method.id.into(),
            params: candidate.options.clone(),
            error: Some(error),
            seconds: cost,
            cost,
            exact: false,
        }
    }

    fn ladder_of(id: &str, s: &Settings) -> Ladder {
        let chosen = s.selection.iter().find(|c| c.method.id == id).unwrap();
        ladder(chosen, &workload().layers[0].group_problem(Mask::Causal), s.effort, s.seed)
    }

    #[test]
    fn budgets_grow_with_the_number_of_keys_and_carry_the_seed() {
        let s = settings(&["sink_window", "hyper"], 0.1);
        let windows: Vec<String> = ladder_of("sink_window", &s)
            .iter()
            .map(|c| c.options.get("window").unwrap().to_string())
            .collect();
        assert_eq!(windows, ["4", "8", "16", "32", "64", "128"]);
        assert!(ladder_of("hyper", &s).iter().all(|c| c.options.get("seed") == Some(&7u64.into())));
        let exact = Choice { methods: vec!["exact".into()], ..Choice::default() }.resolve().unwrap();
        let problem = workload().layers[0].group_problem(Mask::Causal);
        let ladders: Vec<Ladder> =
            variants(&exact[0]).iter().map(|c| ladder(c, &problem, Effort::Quick, 0)).collect();
        assert_eq!(ladders[0][0].name(), "exact precision=bf16");
        assert!(ladders[0].len() == 1 && ladders[1].is_empty(), "plain exact attention is always there");
    }

    #[test]
    fn the_cheapest_method_within_the_target_is_chosen_and_a_tighter_target_goes_on() {
        let s = settings(&["sink_window", "top_k"], 0.1);
        let (windows, tops) = (ladder_of("sink_window", &s), ladder_of("top_k", &s));
        let mut state = State::open(None, &super::super::Key::default()).unwrap();
        let (name, value) = ROUNDED;
        let rounded = Candidate { method: registry::baseline(), options: Options::new().with(name, value) };
        for g in 0..2 {
            state.push(made_up(g, &rounded, 0.0, 1.0)).unwrap();
            for (i, c) in windows.iter().enumerate() {
                state.push(made_up(g, c, 0.4 / f64::from(1 << i), 0.1 + 0.1 * i as f64)).unwrap();
            }
            for (i, c) in tops.iter().enumerate() {
                state.push(made_up(g, c, 0.09 / f64::from(1 << i), 0.35 + 0.2 * i as f64)).unwrap();
            }
        }
        let known = state.len();
        // Windows reach 0.1 at the third step for 0.3 of the time; keys at the first for 0.35.
        let loose = search(&s, 0.1, &mut state);
        assert_eq!(
            (loose.len(), loose[0].method.as_str(), loose[0].cost),
            (2, "sink_window", 0.30000000000000004)
        );
        assert_eq!(loose[1].heads.to_string(), "2-3");
        // 0.05 takes the fourth window, 0.4, or the second number of keys, 0.55.
        assert_eq!(search(&s, 0.05, &mut state)[0].params, windows[3].options);
        // 0.0126 takes the sixth window, 0.6; the third number of keys, 0.75, is dearer and not accurate enough.
        let tight = search(&s, 0.0126, &mut state);
        assert_eq!((tight[0].method.as_str(), tight[0].error), ("sink_window", 0.0125));
        // Nothing reaches 1e-9: exact attention is left.
        let none = search(&s, 1e-9, &mut state);
        assert_eq!((none[0].method.as_str(), none[0].error, none[0].cost), ("exact", 0.0, 1.0));
        assert_eq!(state.len(), known, "everything was known");
    }

    #[test]
    fn exact_attention_under_another_name_is_not_chosen() {
        let s = settings(&["sink_window", "hyper"], 0.1);
        let mut state = State::open(None, &super::super::Key::default()).unwrap();
        let (name, value) = ROUNDED;
        let rounded = Candidate { method: registry::baseline(), options: Options::new().with(name, value) };
        for g in 0..2 {
            state.push(made_up(g, &rounded, 0.0, 1.0)).unwrap();
            for c in ladder_of("sink_window", &s) {
                state.push(made_up(g, &c, 0.5, 0.5)).unwrap();
            }
            // Noise makes a fallback look twice as fast.
            for c in ladder_of("hyper", &s) {
                state.push(Measurement { exact: true, ..made_up(g, &c, 0.0, 0.5) }).unwrap();
            }
        }
        assert!(search(&s, 0.1, &mut state).iter().all(Pick::is_exact));
        assert_eq!(state.fell_back(), ["hyper"]);
        let mut fresh = State::open(None, &super::super::Key::default()).unwrap();
        search(&settings(&["hyper"], 0.1), 0.1, &mut fresh);
        assert_eq!(fresh.fell_back(), ["hyper"], "n_min is above 256");
    }

    #[test]
    fn real_measurements_stay_within_the_target() {
        let s = settings(&["sink_window", "top_k"], 0.3);
        let mut state = State::open(None, &super::super::Key::default()).unwrap();
        let picks = search(&s, 0.3, &mut state);
        assert!(picks.iter().all(|p| p.error <= 0.3 && p.cost <= 1.0), "{picks:?}");
        assert!(!state.is_empty());
        assert!(state.done.values().all(|m| m.error.is_some_and(|e| e.is_finite()) && m.cost > 0.0));
    }

    #[test]
    fn a_stop_ends_the_search_between_measurements() {
        let s = settings(&["sink_window"], 0.1);
        let workload = workload();
        let bench = Bench::new(&workload, &s);
        let mut search = Search::new(&workload, &s, &bench).unwrap();
        let mut state = State::open(None, &super::super::Key::default()).unwrap();
        let stopped = search.round(0.1, &mut state, &mut |_, _, _| (), &AtomicBool::new(true)).unwrap();
        assert!(stopped.is_none() && state.is_empty());
    }

    #[test]
    fn a_quiet_head_may_be_further_off() {
        let mut layer = workload().layers.remove(0);
        let loud = layer.problem.n_k * layer.problem.d_v;
        layer.v[..loud].iter_mut().for_each(|v| *v *= 10.0);
        let mut ws = Workspace::new(Schedule { threads: 1, ..Schedule::default() }).unwrap();
        let found = weights(&layer, &mut ws).unwrap();
        // Two groups of equal size, one ten times the other: about √2 and √2/10.
        assert!(found[0] > 1.2 && found[0] < 1.7 && found[1] < 0.25, "{found:?}");
    }
}
