//! Order of measurements over key heads and candidates.

use super::candidates::{self, Candidate, Steps};
use super::choose::{Point, hull, interpolate};
use super::divergence::Replace;
use super::measure::Unit;
use super::state::{Measurement, SearchState};
use super::{DecodePick, Effort, Phase, Pick, Settings, WORTH_IT};
use crate::Result;
use crate::crew::Crew;
use crate::run::{Run, execute};
use crate::stats::median;
use crate::table::seconds;
use crate::workload::{LayerData, Workload};
use attlas::{Calibration, Mask, Options, Schedule, Workspace, registry};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Instant;

/// Error above which a method is useless.
const USELESS: f64 = 0.9;
/// Factor over exact attention's counted operations above which a candidate is not tried.
const DEAR: f64 = 1.5;
/// Assumed divergence of a head whose error is as large as its layer's output, if no model was measured.
const TYPICAL: f64 = 0.01;

pub(super) struct Search<'a> {
    workload: &'a Workload,
    settings: &'a Settings,
    /// Layer of the workload and key head.
    pub(super) units: Vec<(usize, usize)>,
    ws: Workspace,
    /// One thread, for new tokens.
    alone: Workspace,
    crew: &'a dyn Crew,
    seed: u64,
    /// Key heads measured by all processes, and their seconds.
    pub(super) pace: (usize, f64),
}

impl<'a> Search<'a> {
    pub(super) fn new(
        workload: &'a Workload,
        settings: &'a Settings,
        crew: &'a dyn Crew,
        run: &Run<'_>,
    ) -> Result<Self> {
        let all = workload.layers.iter().enumerate();
        let units = all.flat_map(|(i, l)| (0..l.problem.n_kv_heads).map(move |g| (i, g))).collect();
        let ws = run.workspace()?;
        let alone = Workspace::new(Schedule { threads: 1, ..*ws.schedule() })?;
        Ok(Self { workload, settings, units, ws, alone, crew, seed: run.seed, pace: (0, 0.0) })
    }

    fn layer(&self, i: usize) -> (&'a LayerData, usize) {
        let layer = &self.workload.layers[i];
        (layer, layer.layer.unwrap_or(i))
    }

    fn learnt(&self, i: usize, g: usize, candidate: &Candidate) -> Result<Option<&'a Calibration>> {
        let layer = self.layer(i).1;
        Ok(self.settings.calibrations.find(candidate.method.id, Some(layer), g)?)
    }

    /// Returns the number of new tokens decoded in a measurement.
    fn steps(&self, i: usize) -> usize {
        self.settings.effort.steps().min(self.layer(i).0.problem.n_q / 2).max(1)
    }

    /// Returns the candidates to try on every key head: those on the front of error and cost of one of a few key heads,
    /// spread over the layers. `None` once `stop` is set.
    pub(super) fn screen(
        &mut self,
        phase: Phase,
        state: &mut SearchState,
        run: &mut Run<'_>,
    ) -> Result<Option<Vec<Candidate>>> {
        let Some(&(first, _)) = self.units.first() else { return Ok(Some(Vec::new())) };
        let problem = self.layer(first).0.group_problem(Mask::Causal);
        let all = candidates::all(self.settings, self.seed, &problem, phase);
        let exact = registry::baseline().plan(&problem, &Options::new())?.cost().flops() as f64;
        let cheap = |c: &Candidate| {
            // The operations of a method that needs calibration cannot be counted without it.
            c.method.plan(&problem, &c.options).map_or(true, |p| p.cost().flops() as f64 <= DEAR * exact)
        };
        let count = self.settings.effort.screens().min(self.units.len()).max(1);
        // Screened key heads are the middles of equal parts of the model.
        let screened: Vec<(usize, usize)> =
            (0..count).map(|s| self.units[(2 * s + 1) * self.units.len() / (2 * count)]).collect();
        let all: Vec<Steps> = all
            .into_iter()
            .map(|steps| steps.into_iter().filter(|c| phase == Phase::Decode || cheap(c)).collect())
            .collect();
        if !self.climb(phase, &screened, &all, state, run)? {
            return Ok(None);
        }
        let mut votes: BTreeMap<String, (Candidate, usize, f64)> = BTreeMap::new();
        for &(i, g) in &screened {
            let mut seen: Vec<(&Candidate, &Measurement)> = Vec::new();
            for steps in &all {
                for candidate in steps {
                    let Some(m) = state.get(phase, self.layer(i).1, g, candidate) else { break };
                    let slow = m.cost > WORTH_IT;
                    if !m.exact && !slow && m.error.is_some_and(|e| e <= USELESS) {
                        seen.push((candidate, m));
                    }
                    if slow {
                        break;
                    }
                }
            }
            let points: Vec<(f64, f64)> =
                seen.iter().map(|(_, m)| (m.error.unwrap_or(f64::NAN), m.cost)).collect();
            let front = crate::compare::front(&points);
            for ((candidate, _), (&(error, cost), _)) in
                seen.iter().zip(points.iter().zip(&front)).filter(|x| *x.1.1)
            {
                let known = votes.entry(candidate.name()).or_insert(((*candidate).clone(), 0, f64::INFINITY));
                (known.1, known.2) = (known.1 + 1, known.2.min(error * cost));
            }
        }
        // Candidates on more fronts come first, then those with the smallest error times cost.
        let mut kept: Vec<(Candidate, usize, f64)> = votes.into_values().collect();
        kept.sort_by(|a, b| b.1.cmp(&a.1).then(a.2.total_cmp(&b.2)));
        kept.truncate(self.settings.effort.candidates());
        Ok(Some(kept.into_iter().map(|k| k.0).collect()))
    }

    /// Measures candidates with growing budgets on a few key heads, each until it is too slow; the processes of a crew share
    /// key heads and methods. `false` once `stop` is set.
    fn climb(
        &mut self,
        phase: Phase,
        screened: &[(usize, usize)],
        all: &[Steps],
        state: &mut SearchState,
        run: &mut Run<'_>,
    ) -> Result<bool> {
        let total = screened.len() * all.len();
        let mut unit: (usize, Option<Unit<'a>>) = (0, None);
        let mut stopped = false;
        self.crew.begin(total);
        'list: while let Some(at) = self.crew.next() {
            let (s, steps) = (at / all.len(), &all[at % all.len()]);
            let (i, g) = screened[s];
            if unit.0 != s {
                unit = (s, None);
            }
            for candidate in steps {
                if run.stopped() {
                    stopped = true;
                    break 'list;
                }
                run.at(at, total, &format!("screening {}", candidate.method.id));
                // A larger budget takes longer.
                if self.measure(phase, i, g, candidate, &mut unit.1, state)?.0.cost > WORTH_IT {
                    break;
                }
            }
        }
        state.settle(self.crew)?;
        Ok(!self.crew.any(stopped))
    }

    /// Measures the candidates on every key head of the shard, and for some of them the model's loss. `false` once
    /// `stop` is set.
    pub(super) fn measure_all(
        &mut self,
        phase: Phase,
        kept: &[Candidate],
        mut model: Option<&mut dyn Replace>,
        state: &mut SearchState,
        run: &mut Run<'_>,
    ) -> Result<bool> {
        let (begun, mut fresh, mut stopped) = (Instant::now(), 0usize, false);
        let mine = |u: &usize| self.settings.shard.is_none_or(|s| u % s.count == s.index);
        let mut list: Vec<usize> = (0..self.units.len()).filter(mine).collect();
        // The longest units first: most candidates to measure, then most layers to rerun after a change.
        list.sort_by_key(|&u| {
            let (i, g) = self.units[u];
            let missing = kept.iter().filter(|c| state.get(phase, self.layer(i).1, g, c).is_none()).count();
            (Reverse(missing), i)
        });
        let total = list.len();
        self.crew.begin(total);
        'list: while let Some(done) = self.crew.next() {
            let (i, g) = self.units[list[done]];
            // Known units take no time and say nothing about the rest.
            let left = match fresh {
                0 => String::new(),
                n => {
                    let each = begun.elapsed().as_secs_f64() / n as f64 / self.crew.size() as f64;
                    format!(", about {} left", seconds(each * (total - done) as f64))
                }
            };
            let what = if phase == Phase::Prompt { "prompts" } else { "new tokens" };
            run.at(done, total, &format!("{what}: layer {}, key head {g}{left}", self.layer(i).1));
            let before = state.made();
            let mut unit = None;
            let mut tails: BTreeMap<String, Vec<f32>> = BTreeMap::new();
            let rows = model.as_ref().map_or(0, |m| m.rows());
            for candidate in kept {
                if run.stopped() {
                    stopped = true;
                    break 'list;
                }
                let (_, output) = self.measure(phase, i, g, candidate, &mut unit, state)?;
                if let (Some(output), Some(unit), Phase::Prompt) = (output, &unit, phase) {
                    tails.insert(candidate.name(), unit.last(&output, rows));
                }
            }
            if let (Some(model), Phase::Prompt) = (&mut model, phase) {
                for candidate in self.to_ask(i, g, kept, state) {
                    if run.stopped() {
                        stopped = true;
                        break 'list;
                    }
                    let tail = match tails.remove(&candidate.name()) {
                        Some(tail) => tail,
                        None => self.tail(i, g, &candidate, rows)?,
                    };
                    let (layer, number) = self.layer(i);
                    let kl = model.replaced(number, layer.heads_of(g), &tail)?;
                    // NaN must exceed every budget, also after it was written and read again.
                    let kl = if kl.is_finite() { kl } else { f64::MAX };
                    if let Some(m) = state.get(phase, number, g, &candidate).cloned() {
                        state.keep(Measurement { kl: Some(kl), ..m }, self.crew)?;
                    }
                }
            }
            fresh += usize::from(state.made() > before);
        }
        state.settle(self.crew)?;
        if self.crew.any(fresh > 0) {
            self.pace = (self.pace.0 + total, self.pace.1 + begun.elapsed().as_secs_f64());
        }
        Ok(!self.crew.any(stopped))
    }

    /// Returns the candidates whose divergence is measured: spread over the front of squared error and time, the
    /// fastest first.
    fn to_ask(&self, i: usize, g: usize, kept: &[Candidate], state: &SearchState) -> Vec<Candidate> {
        let number = self.layer(i).1;
        let mut points = vec![Point::EXACT];
        for (c, candidate) in kept.iter().enumerate() {
            let m = state.get(Phase::Prompt, number, g, candidate);
            if let Some((m, e)) =
                m.and_then(|m| Some((m, m.error?))).filter(|(m, _)| !m.exact && m.cost <= WORTH_IT)
            {
                points.push(Point { candidate: Some(c), cost: m.cost, kl: e * e });
            }
        }
        let front: Vec<usize> = hull(&points).iter().rev().filter_map(|p| p.candidate).collect();
        let most = self.settings.effort.asked();
        let stride = front.len().div_ceil(most.max(1)).max(1);
        let asked = front.iter().step_by(stride).map(|&c| &kept[c]);
        let unknown = |c: &&Candidate| state.get(Phase::Prompt, number, g, c).is_some_and(|m| m.kl.is_none());
        asked.filter(unknown).cloned().collect()
    }

    /// Returns the last rows of a candidate's output.
    fn tail(&mut self, i: usize, g: usize, candidate: &Candidate, rows: usize) -> Result<Vec<f32>> {
        let layer = self.layer(i).0;
        let learnt = self.learnt(i, g, candidate)?;
        let p = layer.group_problem(Mask::Causal);
        let plan = candidate.method.plan_with(&p, &candidate.options, learnt)?;
        let mut output = vec![0.0; p.n_heads * p.n_q * p.d_v];
        execute(&*plan, layer.group(g)?, &mut output, None, &mut self.ws)?;
        let cut = |h: &[f32]| h[(p.n_q - rows) * p.d_v..].to_vec();
        Ok(output.chunks(p.n_q * p.d_v).flat_map(cut).collect())
    }

    /// Returns a known measurement, or makes a new one and stores it at once; a new one comes with its output.
    fn measure(
        &mut self,
        phase: Phase,
        i: usize,
        g: usize,
        candidate: &Candidate,
        unit: &mut Option<Unit<'a>>,
        state: &mut SearchState,
    ) -> Result<(Measurement, Option<Vec<f32>>)> {
        let (layer, number) = self.layer(i);
        if let Some(m) = state.get(phase, number, g, candidate) {
            return Ok((m.clone(), None));
        }
        let learnt = self.learnt(i, g, candidate)?;
        let steps = self.steps(i);
        let unit = match unit {
            Some(unit) => unit,
            None => {
                let rows = (phase == Phase::Decode).then_some(steps);
                unit.insert(Unit::new(layer, g, rows, &mut self.ws)?)
            }
        };
        let seen = match phase {
            Phase::Prompt => unit.prompt(candidate, learnt, self.settings.effort.runs(), &mut self.ws),
            Phase::Decode => unit.decode(candidate, learnt, steps, &self.alone),
        };
        let mut m = Measurement {
            phase,
            layer: number,
            kv_head: g,
            method: candidate.method.id.into(),
            params: candidate.options.clone(),
            error: None,
            seconds: 0.0,
            // A method that fails on these inputs is never chosen.
            cost: f64::MAX,
            exact: false,
            kl: None,
            node: self.crew.node(),
        };
        let mut output = None;
        if let Ok(seen) = seen {
            (m.error, m.seconds, m.cost, m.exact) = (seen.error, seen.seconds, seen.cost, seen.exact);
            output = Some(seen.output);
        }
        state.keep(m.clone(), self.crew)?;
        Ok((m, output))
    }

    /// Returns the choices for every key head: the hull of cost and divergence over exact attention and the candidates
    /// within the largest error.
    pub(super) fn hulls(
        &mut self,
        phase: Phase,
        kept: &[Candidate],
        state: &SearchState,
    ) -> Result<Vec<Vec<Point>>> {
        let pooled: Vec<Option<f64>> = kept.iter().map(|c| self.pooled_cost(phase, c, state)).collect();
        let mut weights: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        let mut all = Vec::new();
        for u in 0..self.units.len() {
            let (i, g) = self.units[u];
            let number = self.layer(i).1;
            let mut known: Vec<(f64, f64)> = state
                .of(Phase::Prompt, number, g)
                .filter_map(|m| Some((m.error?, m.kl?)))
                .filter(|(e, _)| *e > 0.0)
                .collect();
            known.sort_by(|a, b| a.0.total_cmp(&b.0));
            if known.is_empty() && self.settings.on_model() && !weights.contains_key(&i) {
                let found = layer_weights(self.layer(i).0, &mut self.ws)?;
                weights.insert(i, found);
            }
            let mut points = vec![Point::EXACT];
            for (c, candidate) in kept.iter().enumerate() {
                let Some(m) = state.get(phase, number, g, candidate) else { continue };
                let Some(error) = m.error.filter(|_| !m.exact) else { continue };
                let cost = pooled[c].unwrap_or(m.cost);
                if cost > WORTH_IT || self.settings.max_error.is_some_and(|most| error > most) {
                    continue;
                }
                let weight = weights.get(&i).map_or(1.0, |w| w[g]);
                let guess = TYPICAL * (weight * error).powi(2);
                let kl = m.kl.or_else(|| interpolate(&known, error)).unwrap_or(guess);
                points.push(Point { candidate: Some(c), cost, kl });
            }
            all.push(hull(&points));
        }
        Ok(all)
    }

    /// Returns a candidate's time as the median over key heads, if each has only one run, as new tokens always do: the
    /// time hardly depends on the inputs.
    fn pooled_cost(&self, phase: Phase, candidate: &Candidate, state: &SearchState) -> Option<f64> {
        if phase == Phase::Prompt && self.settings.effort == Effort::Thorough {
            return None;
        }
        let costs: Vec<f64> = self
            .units
            .iter()
            .filter_map(|&(i, g)| state.get(phase, self.layer(i).1, g, candidate))
            .filter(|m| m.error.is_some() && !m.exact)
            .map(|m| m.cost)
            .collect();
        (!costs.is_empty()).then(|| median(&costs))
    }

    /// Converts the choice to picks.
    pub(super) fn picks(
        &self,
        phase: Phase,
        points: &[Point],
        kept: &[Candidate],
        state: &SearchState,
    ) -> Vec<Pick> {
        let one = |(&(i, g), point): (&(usize, usize), &Point)| {
            let (layer, number) = self.layer(i);
            let exact = Pick {
                layer: number,
                kv_head: g,
                heads: layer.heads_of(g).collect(),
                method: registry::baseline().id.into(),
                params: Options::new(),
                error: 0.0,
                cost: 1.0,
                kl: 0.0,
                decode: None,
            };
            let Some(candidate) = point.candidate.map(|c| &kept[c]) else { return exact };
            let error = state.get(phase, number, g, candidate).and_then(|m| m.error).unwrap_or(0.0);
            Pick {
                method: candidate.method.id.into(),
                params: candidate.options.clone(),
                error,
                cost: point.cost,
                kl: point.kl,
                ..exact
            }
        };
        self.units.iter().zip(points).map(one).collect()
    }
}

impl Pick {
    /// Converts a choice to one for new tokens.
    pub(super) fn as_decode(&self) -> DecodePick {
        DecodePick {
            method: self.method.clone(),
            params: self.params.clone(),
            error: self.error,
            cost: self.cost,
            kl: self.kl,
        }
    }
}

/// Returns for each key head the largest norm of its heads' exact outputs over the root mean square of all heads of the
/// layer: the factor from an error relative to the head to one relative to the layer.
fn layer_weights(layer: &LayerData, ws: &mut Workspace) -> Result<Vec<f64>> {
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

#[cfg(test)]
mod tests {
    use super::super::choose::choose;
    use super::super::tests::settings;
    use super::*;
    use crate::crew::Alone;
    use crate::select::Choice;
    use attlas::Schedule;
    use std::sync::atomic::AtomicBool;

    fn with(methods: &[&str], effort: Effort) -> Settings {
        let methods = methods.iter().map(|m| m.to_string()).collect();
        let selection = Choice { methods, ..Choice::default() }.resolve().unwrap();
        Settings { selection, effort, ..settings() }
    }

    fn workload() -> Workload {
        let source = "synthetic:clustered,n=256,d=8,heads=4,kv_heads=2";
        let mut workload = source.parse::<crate::Source>().unwrap().load().unwrap();
        workload.mask = Mask::Causal;
        workload
    }

    fn search_of<'a>(workload: &'a Workload, settings: &'a Settings, crew: &'a dyn Crew) -> Search<'a> {
        Run::silent(1, 7, |run| Search::new(workload, settings, crew, run)).unwrap()
    }

    fn state() -> SearchState {
        SearchState::open(None, &super::super::Key::default()).unwrap()
    }

    fn window(keys: usize) -> Candidate {
        Candidate {
            method: registry::method("sink_window").unwrap(),
            options: Options::new().with("window", keys),
        }
    }

    fn made_up(kv_head: usize, c: &Candidate, error: f64, cost: f64, kl: Option<f64>) -> Measurement {
        Measurement {
            phase: Phase::Prompt,
            layer: 0,
            kv_head,
            method: c.method.id.into(),
            params: c.options.clone(),
            error: Some(error),
            seconds: cost,
            cost,
            exact: false,
            kl,
            node: None,
        }
    }

    #[test]
    fn the_divergence_decides_not_the_error() {
        let alone = Alone::default();
        let (workload, s) = (workload(), with(&["sink_window"], Effort::Thorough));
        let mut search = search_of(&workload, &s, &alone);
        let mut known = state();
        let kept = [window(16), window(64)];
        for g in 0..2 {
            // The same errors and times; the second head hardly matters to the model.
            let scale = if g == 0 { 1.0 } else { 1e-4 };
            known.push(made_up(g, &kept[0], 0.4, 0.1, Some(0.1 * scale))).unwrap();
            known.push(made_up(g, &kept[1], 0.1, 0.5, None)).unwrap();
        }
        let hulls = search.hulls(Phase::Prompt, &kept, &known).unwrap();
        let picks = search.picks(Phase::Prompt, &choose(&hulls, 0.01), &kept, &known);
        assert_eq!(picks[0].params, kept[1].options);
        // A quarter of the error, a sixteenth of the divergence.
        assert!((picks[0].kl - 0.1 / 16.0).abs() < 1e-12);
        assert_eq!((picks[1].params.clone(), picks[1].error), (kept[0].options.clone(), 0.4));
        // Exact attention under another name is no choice, whatever its time.
        for g in 0..2 {
            known.push(Measurement { exact: true, ..made_up(g, &kept[0], 0.0, 0.01, Some(0.0)) }).unwrap();
        }
        let hulls = search.hulls(Phase::Prompt, &kept, &known).unwrap();
        let picks = search.picks(Phase::Prompt, &choose(&hulls, 1.0), &kept, &known);
        assert!(picks.iter().all(|p| p.params == kept[1].options));
        // Nor is anything past the largest error.
        let strict = Settings { max_error: Some(0.05), ..s.clone() };
        let mut search = search_of(&workload, &strict, &alone);
        let hulls = search.hulls(Phase::Prompt, &kept, &known).unwrap();
        assert!(hulls.iter().all(|h| *h == [Point::EXACT]));
    }

    /// A model whose divergence is the distance of rows from zero.
    struct Model;

    impl Replace for Model {
        fn rows(&self) -> usize {
            8
        }

        fn replaced(&mut self, layer: usize, heads: std::ops::Range<usize>, out: &[f32]) -> Result<f64> {
            assert!(layer == 0 && heads.len() == 2 && out.len() == 2 * 8 * 8);
            Ok(0.5 * out.iter().map(|x| f64::from(x.abs())).sum::<f64>())
        }
    }

    #[test]
    fn every_key_head_is_measured_once_and_the_model_is_asked() {
        let alone = Alone::default();
        let (workload, s) = (workload(), with(&["sink_window", "sampled_columns"], Effort::Quick));
        let mut search = search_of(&workload, &s, &alone);
        let mut known = state();
        let (stop, stopped) = (AtomicBool::new(false), AtomicBool::new(true));
        let mut run = Run { threads: 1, seed: 7, progress: &mut |_| (), stop: &stop };
        let kept = [window(16), window(64)];
        let mut model = Model;
        assert!(search.measure_all(Phase::Prompt, &kept, Some(&mut model), &mut known, &mut run).unwrap());
        let made = known.made();
        assert!(known.of(Phase::Prompt, 0, 1).count() == 2);
        assert!(search.measure_all(Phase::Prompt, &kept, Some(&mut model), &mut known, &mut run).unwrap());
        assert_eq!(known.made(), made, "nothing is measured twice");
        assert!(search.measure_all(Phase::Decode, &kept, None, &mut known, &mut run).unwrap());
        let seen = known.get(Phase::Decode, 0, 0, &kept[0]).unwrap();
        assert!(seen.error.is_some() && !seen.exact && seen.cost > 0.0, "{seen:?}");
        run.stop = &stopped;
        assert!(search.screen(Phase::Prompt, &mut state(), &mut run).unwrap().is_none());
    }

    #[test]
    fn a_quiet_head_may_be_further_off() {
        let mut layer = workload().layers.remove(0);
        let loud = layer.problem.n_k * layer.problem.d_v;
        layer.v[..loud].iter_mut().for_each(|v| *v *= 10.0);
        let mut ws = Workspace::new(Schedule { threads: 1, ..Schedule::default() }).unwrap();
        let found = layer_weights(&layer, &mut ws).unwrap();
        // Two groups of equal size, one ten times the other: about √2 and √2/10.
        assert!(found[0] > 1.2 && found[0] < 1.7 && found[1] < 0.25, "{found:?}");
    }
}
