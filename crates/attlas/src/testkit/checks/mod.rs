//! The checks behind [`check_method`]: each tries to refute one rule or one claim.
//!
//! | file | faults found |
//! | --- | --- |
//! | `entry` | an incomplete registry entry; wrong shapes and names that are accepted |
//! | `invariance` | shapes, threads, tiles, layouts and padding that change an answer |
//! | `laws` | broken laws of values, heads, keys and queries; failures on extreme inputs |
//! | `causality` | rows that change with later tokens; streams that differ from the plan |
//! | `gradient` | gradients that differ from finite differences, or with threads, layouts and padding |
//! | `claims` | false exact settings, biased normalisers, wrong use of seeds |

mod causality;
mod claims;
mod entry;
mod gradient;
mod invariance;
mod laws;

use super::{Case, How, Ran, run_with};
use crate::method::{Method, Needs, Plan};
use crate::{Calibration, Error, Inputs, Mask, Options, Problem, Qkv, TensorRef};

/// Tries to refute every claim of `method` and every rule for all methods; panics on success.
pub fn check_method(method: &'static Method) {
    entry::check_entry(method);
    for options in settings(method) {
        let subject = Subject { method, options };
        subject.check_shapes();
        subject.check_bits();
        subject.check_layouts();
        subject.check_padding();
        subject.check_values();
        subject.check_extremes();
        subject.check_groups();
        subject.check_key_order();
        subject.check_queries_alone();
        subject.check_negative_scale();
        subject.check_causality();
        subject.check_decoding();
        subject.check_refusals();
        subject.check_gradient();
    }
    for options in near_settings(method) {
        let subject = Subject { method, options };
        subject.check_shapes();
        subject.check_bits();
        subject.check_padding();
        subject.check_extremes();
        subject.check_causality();
        subject.check_decoding();
    }
    claims::check_exact_limits(method);
    claims::check_unbiased(method);
    claims::check_seeds(method);
}

/// Returns the defaults and every probe.
fn settings(method: &Method) -> Vec<Options> {
    let probe = |pairs: &&[(&str, &str)]| pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v));
    std::iter::once(Options::new()).chain(method.probes.iter().map(probe)).collect()
}

/// Near fields around the last setting that takes one: a plain one, and one with every part that is chosen from
/// queries.
const NEAR_PROBES: [&[(&str, &str)]; 2] = [
    &[("near.sinks", "2"), ("near.window", "8"), ("near.guard", "false")],
    &[
        ("near.sinks", "1"),
        ("near.window", "5"),
        ("near.heavy", "6"),
        ("near.block", "16"),
        ("near.recent", "20"),
    ],
];

fn near_settings(method: &Method) -> Vec<Options> {
    let p = Problem::new(1, 97, 16);
    let with = |base: &Options, pairs: &[(&str, &str)]| {
        pairs.iter().fold(base.clone(), |options, (name, value)| options.with(name, *value))
    };
    let takes = |o: &&Options| {
        let o = with(o, NEAR_PROBES[0]);
        [p, p.causal()].iter().any(|p| method.support(p, &o).is_yes())
    };
    let settings = settings(method);
    let base = settings.iter().rev().find(takes);
    let bases = settings.first().filter(takes).into_iter().chain(base.filter(|o| !o.is_empty()));
    bases.flat_map(|base| NEAR_PROBES.map(|pairs| with(base, pairs))).collect()
}

/// A method with one setting.
struct Subject {
    method: &'static Method,
    options: Options,
}

impl Subject {
    fn name(&self, what: &str, p: &Problem) -> String {
        let Problem { batch, n_heads, n_kv_heads, n_q, n_k, d, d_v, mask, .. } = p;
        let shape = format!("b{batch} h{n_heads}/{n_kv_heads} {n_q}×{n_k} d{d} d_v{d_v} mask {mask}");
        format!("{} [{}] {what}, {shape}", self.method.id, self.options)
    }

    /// Plans, after learning from the case if the method must; `None` if it is refused with reasons.
    fn plan_for(&self, case: &Case, options: &Options) -> Option<Box<dyn Plan>> {
        let p = &case.problem;
        let calibration = calibrate(self.method, case, options);
        match self.method.plan_with(p, options, calibration.as_ref()) {
            Ok(plan) => Some(plan),
            Err(Error::Unsupported { reasons, .. }) => {
                assert!(!reasons.is_empty(), "{}", self.name("refused without a reason", p));
                None
            }
            Err(e) => panic!("{}: {e}", self.name("planning", p)),
        }
    }

    fn how(&self) -> How {
        How { lse: self.method.claims.lse, ..How::default() }
    }

    fn run_plan(&self, plan: &dyn Plan, case: &Case, how: How) -> Ran {
        run_with(plan, case, how).unwrap_or_else(|e| panic!("{}: {e}", self.name("running", &case.problem)))
    }

    fn run(&self, case: &Case) -> Option<Ran> {
        Some(self.run_plan(&*self.plan_for(case, &self.options)?, case, self.how()))
    }

    /// Returns the masks that the method supports for self-attention of 97 tokens.
    fn masks(&self) -> Vec<Mask> {
        [Mask::None, Mask::Causal]
            .into_iter()
            .filter(|&mask| {
                let p = Problem { mask, ..Problem::new(1, 97, 16) };
                self.method.support(&p, &self.options).is_yes()
            })
            .collect()
    }

    fn problems(&self) -> Vec<Problem> {
        self.masks().into_iter().map(|mask| Problem { mask, ..Problem::new(2, 97, 16) }).collect()
    }
}

/// Learns a calibration from the case itself, for methods that need one.
fn calibrate(method: &Method, case: &Case, options: &Options) -> Option<Calibration> {
    if method.claims.needs != Needs::Calibration {
        return None;
    }
    let calibrate =
        method.calibrate.unwrap_or_else(|| panic!("{} needs a calibration but cannot make one", method.id));
    let p = Problem { n_q: 64, n_k: 64, ..case.problem };
    let sample = Case::gaussian(p, 99);
    let view = |x, h, c| TensorRef::bhnd(x, [p.batch, h, 64, c]).unwrap_or_else(|e| panic!("{e}"));
    let x = Qkv::new(
        view(&sample.q, p.n_heads, p.d),
        view(&sample.k, p.n_kv_heads, p.d),
        view(&sample.v, p.n_kv_heads, p.d_v),
    );
    match calibrate(&p, options, &[Inputs::F64(x)]) {
        Ok(c) => Some(c),
        Err(e) => panic!("{} does not calibrate: {e}", method.id),
    }
}
