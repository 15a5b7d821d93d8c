//! The checks behind [`check_method`]: each tries to refute one rule or one claim.

use super::{Case, How, Ran, assert_rows_close, assert_same_bits, reference, run_with};
use crate::method::{Law, Method, Needs, Plan};
use crate::{
    Calibration, DType, Error, Inputs, Mask, Options, Out, Problem, Qkv, Real, Schedule, TensorMut,
    TensorRef, Workspace,
};

/// Tries to refute every claim of `method` and every rule that holds for all methods; panics when it succeeds.
pub fn check_method(method: &'static Method) {
    check_entry(method);
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
        subject.check_causality();
        subject.check_decoding();
        subject.check_refusals();
    }
    check_exact_limits(method);
    check_unbiased(method);
    check_seeds(method);
}

/// The defaults and every probe.
fn settings(method: &Method) -> Vec<Options> {
    let probe = |pairs: &&[(&str, &str)]| pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v));
    std::iter::once(Options::new()).chain(method.probes.iter().map(probe)).collect()
}

fn check_entry(method: &Method) {
    let id = method.id;
    let snake = id.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    assert!(snake && !id.is_empty(), "{id} is not snake_case");
    assert!(!method.title.is_empty() && !method.reference.is_empty(), "{id} has no title or reference");
    for p in method.params {
        assert!(!p.doc.trim().is_empty(), "{id}.{} has no documentation", p.name);
    }
    let exact_needs_probe = method.claims.exact_at.is_empty() || !method.probes.is_empty();
    assert!(
        exact_needs_probe,
        "{id} becomes exact but has no probe that keeps it approximate on small problems"
    );
    for (law, reason) in method.claims.except {
        assert!(reason.len() > 10, "{id} breaks {law:?} without a reason");
    }
    for w in method.claims.withdrawn {
        assert!(w.reason.len() > 10, "{id} withdraws {:?} without a reason", w.promise);
        assert!(method.params.iter().any(|p| p.name == w.param), "{id} has no parameter {}", w.param);
    }
    if !method.claims.deterministic {
        assert!(method.params.iter().any(|p| p.name == "seed"), "{id} draws random numbers but has no seed");
    }
}

/// A method with one setting.
struct Subject {
    method: &'static Method,
    options: Options,
}

/// Sequence lengths that are nothing's multiple, and those just past a block.
const LENGTHS: [usize; 9] = [0, 1, 2, 3, 17, 31, 64, 65, 129];

impl Subject {
    fn name(&self, what: &str, p: &Problem) -> String {
        let Problem { batch, n_heads, n_kv_heads, n_q, n_k, d, d_v, mask, .. } = p;
        let shape = format!("b{batch} h{n_heads}/{n_kv_heads} {n_q}×{n_k} d{d} d_v{d_v} mask {mask}");
        format!("{} [{}] {what}, {shape}", self.method.id, self.options)
    }

    /// A plan, learning from the case first where the method must; `None` where it is refused with reasons.
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

    /// The masks the method says it can do for self-attention of 97 tokens.
    fn masks(&self) -> Vec<Mask> {
        [Mask::None, Mask::Causal]
            .into_iter()
            .filter(|&mask| {
                let p = Problem { mask, ..Problem::new(1, 97, 16) };
                (self.method.supports)(&p, &self.options).is_yes()
            })
            .collect()
    }

    fn problems(&self) -> Vec<Problem> {
        self.masks().into_iter().map(|mask| Problem { mask, ..Problem::new(2, 97, 16) }).collect()
    }

    /// Every length, odd widths, more queries than keys and the reverse: an answer without NaN or a refusal.
    fn check_shapes(&self) {
        let mut shapes: Vec<Problem> =
            LENGTHS.iter().map(|&n| Problem { d_v: 5, ..Problem::new(1, n, 8) }).collect();
        for (n_q, n_k) in [(1, 97), (13, 97), (97, 13), (65, 0), (0, 65), (3, 64)] {
            shapes.push(Problem::new(2, 1, 8).with_lens(n_q, n_k).with_kv_heads(1));
        }
        for (d, d_v) in [(1, 1), (3, 7), (7, 3), (33, 1), (16, 40)] {
            shapes.push(Problem { d_v, ..Problem::new(1, 67, d) });
        }
        shapes.push(Problem { batch: 2, ..Problem::new(6, 41, 8).with_kv_heads(3) });
        let planned = shapes
            .into_iter()
            .flat_map(|p| [p, p.causal()])
            .flat_map(|p| [Case::gaussian(p, 1), Case::gaussian(p, 2).cast_f32()])
            .filter(|case| self.check_shape(case))
            .count();
        assert!(planned > 0, "{}", self.name("refuses every shape", &Problem::new(1, 64, 8)));
    }

    fn check_shape(&self, case: &Case) -> bool {
        let p = &case.problem;
        let Some(plan) = self.plan_for(case, &self.options) else { return false };
        if p.mask == Mask::Causal {
            assert!(self.method.claims.causal, "{}", self.name("plans what it does not claim", p));
        }
        let ran = self.run_plan(&*plan, case, self.how());
        let name = self.name("gives NaN or infinity", p);
        assert!(ran.o.iter().all(|x| x.is_finite()), "{name}");
        if self.method.claims.lse {
            let sane = |l: &f64| l.is_finite() || *l == f64::NEG_INFINITY;
            assert!(ran.lse.iter().all(sane), "{name} as log-sum-exp");
        }
        for row in 0..p.batch * p.n_heads * p.n_q {
            let blind = p.n_k == 0 || p.mask == Mask::Causal && row % p.n_q + p.n_k < p.n_q;
            if blind {
                let zero = ran.o[row * p.d_v..(row + 1) * p.d_v].iter().all(|&x| x == 0.0);
                let lse = !self.method.claims.lse || ran.lse[row] == f64::NEG_INFINITY;
                assert!(zero && lse, "{}", self.name("a row that sees no key is not (0, −∞)", p));
            }
        }
        let declared = plan.workspace_bytes(1);
        assert!(
            ran.peak_bytes <= declared,
            "{}: {} bytes used",
            self.name(&format!("declares {declared} bytes"), p),
            ran.peak_bytes
        );
        let cost = plan.cost();
        assert!(cost.flops() > 0 || p.visible_pairs() == 0, "{}", self.name("costs nothing", p));
        true
    }

    /// The same bits again, with two threads and with other query tiles.
    fn check_bits(&self) {
        for p in self.problems() {
            let p = p.with_kv_heads(1);
            for case in [Case::gaussian(p, 3), Case::gaussian(p, 3).cast_f32()] {
                let Some(plan) = self.plan_for(&case, &self.options) else { continue };
                let first = self.run_plan(&*plan, &case, self.how());
                for (what, threads, tile_q) in
                    [("again", 1, 0), ("2 threads", 2, 0), ("tile_q 32", 1, 32), ("tile_q 80", 2, 80)]
                {
                    let schedule = Schedule { threads, tile_q, ..Schedule::default() };
                    let ran = self.run_plan(&*plan, &case, How { schedule, ..self.how() });
                    let name = self.name(what, &p);
                    assert_same_bits(&ran.o, &first.o, &name);
                    assert_same_bits(&ran.lse, &first.lse, &name);
                    let declared = plan.workspace_bytes(threads);
                    assert!(
                        ran.peak_bytes <= declared,
                        "{name}: {} bytes used, {declared} declared",
                        ran.peak_bytes
                    );
                }
            }
        }
    }

    /// Both layouts, with and without log-sum-exp: the same bits.
    fn check_layouts(&self) {
        for p in self.problems() {
            let case = Case::gaussian(Problem { batch: 2, d_v: 9, ..p }, 4);
            let Some(plan) = self.plan_for(&case, &self.options) else { continue };
            let first = self.run_plan(&*plan, &case, self.how());
            for how in [How { token_major: true, ..self.how() }, How { lse: false, ..self.how() }] {
                let ran = self.run_plan(&*plan, &case, how);
                assert_same_bits(&ran.o, &first.o, &self.name("other layout", &case.problem));
            }
        }
    }

    /// Padded keys are never read: the result is that of the shorter sequence.
    fn check_padding(&self) {
        for p in self.problems() {
            let case = Case::gaussian(p, 14);
            let short = case.with_keys(83);
            let (Some(plan), Some(want)) = (self.plan_for(&case, &self.options), self.run(&short)) else {
                continue;
            };
            let mut padded = case.clone();
            for h in 0..2 {
                padded.key_rows(h).skip(83).for_each(|row| row.fill(f64::NAN));
            }
            let view = |x, n, c| TensorRef::bhnd(x, [1, 2, n, c]).unwrap_or_else(|e| panic!("{e}"));
            let mut x =
                Qkv::new(view(&padded.q, 97, p.d), view(&padded.k, 97, p.d), view(&padded.v, 97, p.d_v));
            x.key_lens = Some(&[83]);
            let mut o = vec![f64::NAN; want.o.len()];
            let out = Out::new(TensorMut::bhnd(&mut o, [1, 2, 97, p.d_v]).unwrap_or_else(|e| panic!("{e}")));
            let mut ws = Workspace::single().unwrap_or_else(|e| panic!("{e}"));
            if let Err(e) = plan.execute(&Inputs::F64(x), &mut out.into(), &mut ws) {
                panic!("{}: {e}", self.name("padded", &p));
            }
            assert_same_bits(&o, &want.o, &self.name("padded to 97 from 83 keys", &p));
        }
    }

    /// Constant values are reproduced, outputs stay in the hull of the values, and are linear in them.
    fn check_values(&self) {
        for p in self.problems() {
            let case = Case::gaussian(p, 5);
            let Some(first) = self.run(&case) else { continue };
            if self.method.claims_with(&self.options).row_stochastic {
                let constant = Case { v: vec![1.5; case.v.len()], ..case.clone() };
                if let Some(ran) = self.run(&constant) {
                    let want = vec![1.5; ran.o.len()];
                    assert_rows_close(&ran.o, &want, 1e-12, &self.name("constant values", &p));
                }
                let (low, high) = case.v.iter().fold((f64::MAX, f64::MIN), |(a, b), &x| (a.min(x), b.max(x)));
                let inside = first.o.iter().all(|&x| x >= low - 1e-12 && x <= high + 1e-12);
                assert!(inside, "{}", self.name("leaves the hull of the values", &p));
            }
            if self.method.keeps_with(&self.options, Law::LinearInValues) {
                let other = Case { v: Case::gaussian(p, 6).v, ..case.clone() };
                let sum: Vec<f64> = case.v.iter().zip(&other.v).map(|(a, b)| a - 2.0 * b).collect();
                let sum = Case { v: sum, ..case.clone() };
                let (Some(b), Some(ab)) = (self.run(&other), self.run(&sum)) else { continue };
                let want: Vec<f64> = first.o.iter().zip(&b.o).map(|(a, b)| a - 2.0 * b).collect();
                assert_rows_close(&ab.o, &want, 1e-9, &self.name("linear in the values", &p));
            }
        }
    }

    /// Logits of ±10⁴, zero keys, equal keys, zero queries: finite answers in both precisions.
    fn check_extremes(&self) {
        for p in self.problems() {
            let base = Case::gaussian(p, 7);
            let factor = 1e4 / (p.scale * p.d as f64);
            let huge = Case { q: base.q.iter().map(|x| x * factor).collect(), ..base.clone() };
            let zero_keys = Case { k: vec![0.0; base.k.len()], ..base.clone() };
            let row = base.k[..p.d].to_vec();
            let equal_keys = Case { k: row.repeat(base.k.len() / p.d), ..base.clone() };
            let zero_queries = Case { q: vec![0.0; base.q.len()], ..base.clone() };
            let pairs = base.k.chunks(2 * p.d).flat_map(|two| two[..p.d].repeat(two.len() / p.d)).collect();
            let twins = Case { k: pairs, ..base.clone() };
            let named = [
                ("logits of ±1e4", huge),
                ("zero keys", zero_keys),
                ("equal keys", equal_keys),
                ("zero queries", zero_queries),
                ("keys in equal pairs", twins),
            ];
            for (what, case) in named {
                for case in [case.clone(), case.cast_f32()] {
                    if let Some(ran) = self.run(&case) {
                        let finite = ran.o.iter().all(|x| x.is_finite());
                        assert!(finite, "{}", self.name(&format!("{what} (single: {})", case.single), &p));
                    }
                }
            }
            // NaN must not be turned into a number where everything is NaN, nor end in a panic anywhere.
            let nan = Case { v: vec![f64::NAN; base.v.len()], ..base.clone() };
            if let Some(ran) = self.run(&nan) {
                assert!(ran.o.iter().any(|x| x.is_nan()), "{}", self.name("hides NaN values", &p));
            }
            for spoil in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                let mut case = base.clone();
                case.q[3] = spoil;
                case.k[5] = spoil;
                case.v[7] = spoil;
                if let Some(plan) = self.plan_for(&case, &self.options) {
                    // Any answer or error will do; a panic will not.
                    let _ = run_with(&*plan, &case, self.how());
                }
            }
        }
    }

    /// Query heads of a group get what each would get alone; key heads are given to the right query heads.
    fn check_groups(&self) {
        for p in self.problems() {
            let p = Problem { n_heads: 3, n_kv_heads: 1, ..p };
            let case = Case::gaussian(p, 8);
            let Some(all) = self.run(&case) else { continue };
            if self.method.keeps_with(&self.options, Law::HeadsAlone) {
                let alone = Problem { n_heads: 1, ..p };
                for h in 0..3 {
                    let rows = h * p.n_q * p.d..(h + 1) * p.n_q * p.d;
                    let one = Case { problem: alone, q: case.q[rows].to_vec(), ..case.clone() };
                    let Some(ran) = self.run(&one) else { continue };
                    let size = p.n_q * p.d_v;
                    assert_same_bits(&all.o[h * size..(h + 1) * size], &ran.o, &self.name("head alone", &p));
                }
            }
            if self.method.claims.deterministic && self.method.keeps_with(&self.options, Law::HeadsAlone) {
                let p = Problem { n_heads: 4, n_kv_heads: 2, ..p };
                let grouped = Case::gaussian(p, 9);
                let repeat = |x: &[f64], width: usize| {
                    x.chunks(p.n_k * width).flat_map(|head| head.repeat(2)).collect::<Vec<f64>>()
                };
                let repeated = Case {
                    problem: Problem { n_kv_heads: 4, ..p },
                    k: repeat(&grouped.k, p.d),
                    v: repeat(&grouped.v, p.d_v),
                    ..grouped.clone()
                };
                let (Some(a), Some(b)) = (self.run(&grouped), self.run(&repeated)) else { continue };
                assert_same_bits(&a.o, &b.o, &self.name("shared keys = repeated keys", &p));
            }
        }
    }

    /// Without a mask, the order of the keys does not matter.
    fn check_key_order(&self) {
        if !self.method.keeps_with(&self.options, Law::KeyOrder) || !self.masks().contains(&Mask::None) {
            return;
        }
        let p = Problem::new(1, 97, 16);
        let case = Case::gaussian(p, 10);
        let reverse =
            |x: &[f64], width: usize| x.chunks(width).rev().flatten().copied().collect::<Vec<f64>>();
        let turned = Case { k: reverse(&case.k, p.d), v: reverse(&case.v, p.d_v), ..case.clone() };
        let (Some(a), Some(b)) = (self.run(&case), self.run(&turned)) else { return };
        assert_rows_close(&b.o, &a.o, 1e-10, &self.name("keys in reverse order", &p));
    }

    /// A row does not feel the other queries.
    fn check_queries_alone(&self) {
        if !self.method.keeps_with(&self.options, Law::QueriesAlone) {
            return;
        }
        for p in self.problems() {
            let case = Case::gaussian(p, 15);
            let mut changed = case.clone();
            let other = Case::gaussian(p, 16);
            changed.q[..40 * p.d].copy_from_slice(&other.q[..40 * p.d]);
            let (Some(a), Some(b)) = (self.run(&case), self.run(&changed)) else { continue };
            assert_same_bits(&b.o[40 * p.d_v..], &a.o[40 * p.d_v..], &self.name("other queries changed", &p));
        }
    }

    /// Changing token `t` in any way, even to NaN, leaves every row before it bit-identical.
    fn check_causality(&self) {
        if !self.masks().contains(&Mask::Causal) {
            let claimed = self.method.claims.causal;
            let base = self.options.is_empty();
            assert!(!claimed || !base, "{} claims a causal form and refuses it by default", self.method.id);
            return;
        }
        for (n_q, n_k) in [(97, 97), (50, 97)] {
            let p = Problem::new(2, 1, 16).with_lens(n_q, n_k).with_kv_heads(1).causal();
            for single in [false, true] {
                let case = Case::gaussian(p, 11);
                let case = if single { case.cast_f32() } else { case };
                let Some(first) = self.run(&case) else { continue };
                for t in [0, 48, 49, 64, 80, 96] {
                    for change in [-3.0, 1e3, f64::NAN, f64::INFINITY] {
                        self.check_leak(&case, &first, t, change);
                    }
                }
            }
        }
    }

    /// Rows that do not see key `t` keep their bits when the token is multiplied by `change`.
    fn check_leak(&self, case: &Case, first: &Ran, t: usize, change: f64) {
        let p = &case.problem;
        let mut changed = case.clone();
        changed.k[t * p.d..(t + 1) * p.d].iter_mut().for_each(|x| *x *= change);
        changed.v[t * p.d_v..(t + 1) * p.d_v].iter_mut().for_each(|x| *x *= change);
        let query = (t + p.n_q).checked_sub(p.n_k);
        if let Some(i) = query {
            for h in 0..p.n_heads {
                let start = (h * p.n_q + i) * p.d;
                changed.q[start..start + p.d].iter_mut().for_each(|x| *x *= change);
            }
        }
        let Some(plan) = self.plan_for(&changed, &self.options) else { return };
        let Ok(ran) = run_with(&*plan, &changed, self.how()) else {
            assert!(!change.is_finite(), "{}", self.name("fails on a finite change", p));
            return;
        };
        let blind = query.unwrap_or(0);
        for h in 0..p.n_heads {
            let rows = h * p.n_q * p.d_v..(h * p.n_q + blind) * p.d_v;
            let what = self.name(&format!("row before token {t} feels it multiplied by {change}"), p);
            assert_same_bits(&ran.o[rows.clone()], &first.o[rows], &what);
        }
    }

    /// Decoding gives the rows of the causal plan.
    fn check_decoding(&self) {
        let p = Problem { d_v: 6, ..Problem::new(4, 97, 8).with_kv_heads(2).causal() };
        let case = Case::gaussian(p, 12);
        if !(self.method.supports)(&p, &self.options).is_yes() {
            return;
        }
        let Some(plan) = self.plan_for(&case, &self.options) else { return };
        if !self.method.claims.decode {
            assert!(plan.stream(DType::F64).is_none(), "{}", self.name("streams without claiming it", &p));
            return;
        }
        let want = self.run_plan(&*plan, &case, self.how());
        self.check_stream::<f64>(&*plan, &case, &want, 1e-10);
        self.check_stream::<f32>(&*plan, &case, &want, 2e-3);
    }

    fn check_stream<T: Real>(&self, plan: &dyn Plan, case: &Case, want: &Ran, tolerance: f64)
    where
        for<'a> Qkv<'a, T>: Into<Inputs<'a>>,
        for<'a> Out<'a, T>: Into<crate::Output<'a>>,
    {
        let p = case.problem;
        let name = self.name("stream", &p);
        let fail = |e: Error| -> ! { panic!("{name}: {e}") };
        let Some(mut stream) = plan.stream(T::DTYPE) else { panic!("{name}: claimed but not offered") };
        let mut ws = Workspace::single().unwrap_or_else(|e| fail(e));
        let load = |x: &[f64]| x.iter().map(|&x| T::from_f64(x)).collect::<Vec<T>>();
        let (q, k, v) = (load(&case.q), load(&case.k), load(&case.v));
        let q = TensorRef::bhnd(&q, [1, p.n_heads, p.n_q, p.d]).unwrap_or_else(|e| fail(e));
        let k = TensorRef::bhnd(&k, [1, p.n_kv_heads, p.n_k, p.d]).unwrap_or_else(|e| fail(e));
        let v = TensorRef::bhnd(&v, [1, p.n_kv_heads, p.n_k, p.d_v]).unwrap_or_else(|e| fail(e));
        // A prompt at once, then one token at a time.
        let prompt = 33;
        let mut done = 0;
        while done < p.n_q {
            let next = if done == 0 { prompt } else { done + 1 };
            let x = Qkv::new(q.rows(next - 1..next), k.rows(done..next), v.rows(done..next));
            stream.push(&x.into(), &mut ws).unwrap_or_else(|e| fail(e));
            let mut o = vec![T::NAN; p.n_heads * p.d_v];
            let out = Out::new(TensorMut::bhnd(&mut o, [1, p.n_heads, 1, p.d_v]).unwrap_or_else(|e| fail(e)));
            stream.attend(&x.into(), &mut out.into(), &mut ws).unwrap_or_else(|e| fail(e));
            assert_eq!(stream.len(), next, "{name}");
            let got: Vec<f64> = o.into_iter().map(Real::to_f64).collect();
            assert!(got.iter().all(|x| x.is_finite()), "{name}: not finite after {next} tokens");
            if self.method.keeps_with(&self.options, Law::DecodeIsPrefill) {
                let row = |h: usize| &want.o[(h * p.n_q + next - 1) * p.d_v..][..p.d_v];
                let want: Vec<f64> = (0..p.n_heads).flat_map(row).copied().collect();
                assert_rows_close(&got, &want, tolerance, &format!("{name} after {next} tokens"));
            }
            done = next;
        }
        assert!(stream.state_bytes() > 0, "{name}: holds nothing");
        if let Some(&each) = want.info.figures.get("decode_bytes") {
            let (held, stated) = (stream.state_bytes() as f64, each * p.n_kv_heads as f64);
            assert!(held <= stated, "{name}: holds {held} bytes, stated {stated}");
        }
    }

    /// Wrong shapes are errors and leave the output as it was.
    fn check_refusals(&self) {
        let Some(&mask) = self.masks().first() else { return };
        let p = Problem { mask, ..Problem::new(1, 97, 16) };
        let case = Case::gaussian(p, 13);
        let Some(plan) = self.plan_for(&case, &self.options) else { return };
        let mut ws = Workspace::single().unwrap_or_else(|e| panic!("{e}"));
        let view = |n| TensorRef::bhnd(&case.q, [1, 1, n, 16]).unwrap_or_else(|e| panic!("{e}"));
        for (n_q, n_k, n_o) in [(96, 97, 97), (97, 96, 97), (97, 97, 96)] {
            let mut o = vec![7.0f64; n_o * 16];
            let out = Out::new(TensorMut::bhnd(&mut o, [1, 1, n_o, 16]).unwrap_or_else(|e| panic!("{e}")));
            let x = Qkv::new(view(n_q), view(n_k), view(97));
            let result = plan.execute(&x.into(), &mut out.into(), &mut ws);
            assert!(matches!(result, Err(Error::Shape { .. })), "{}", self.name("takes a wrong shape", &p));
            assert!(o.iter().all(|&x| x == 7.0), "{}", self.name("writes before it refuses", &p));
        }
        let unknown = self.options.clone().with("no_such_parameter", 1);
        let refused =
            self.method.plan_with(&p, &unknown, calibrate(self.method, &case, &self.options).as_ref());
        assert!(
            matches!(refused, Err(Error::UnknownParam { .. } | Error::Unsupported { .. })),
            "{}",
            self.name("takes any parameter", &p)
        );
    }
}

/// What the method learns from the case itself, where it must learn.
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

/// At every setting of `exact_at`, the output is that of `exact`, bit for bit.
fn check_exact_limits(method: &'static Method) {
    let exact = crate::registry::method("exact").unwrap_or_else(|e| panic!("{e}"));
    for base in settings(method) {
        for &(name, budget) in method.claims.exact_at {
            for n in [1usize, 64, 97] {
                for mask in [Mask::None, Mask::Causal] {
                    let p = Problem { mask, d_v: 7, ..Problem::new(4, n, 16).with_kv_heads(2) };
                    let options = base.clone().with(name, budget.value(&p));
                    let subject = Subject { method, options };
                    for case in [Case::gaussian(p, 20), Case::gaussian(p, 20).cast_f32()] {
                        let Some(ran) = subject.run(&case) else { continue };
                        let how = How { lse: method.claims.lse, ..How::default() };
                        let plan = exact.plan(&p, &Options::new()).unwrap_or_else(|e| panic!("{e}"));
                        let want = subject.run_plan(&*plan, &case, how);
                        let what = subject.name(&format!("exact at {name} = {budget:?}"), &p);
                        assert_same_bits(&ran.o, &want.o, &what);
                        assert_same_bits(&ran.lse, &want.lse, &what);
                    }
                }
            }
        }
    }
}

/// Over seeds, the normaliser has the exact one as its mean, within five standard errors and one largest draw.
fn check_unbiased(method: &'static Method) {
    if !method.claims.unbiased {
        return;
    }
    for base in settings(method).into_iter().skip(1) {
        if !method.claims_with(&base).unbiased {
            continue;
        }
        let subject = Subject { method, options: base.clone() };
        let Some(&mask) = subject.masks().first() else { continue };
        let p = Problem { mask, ..Problem::new(1, 97, 8) };
        let mut case = Case::gaussian(p, 21);
        case.q.iter_mut().for_each(|x| *x *= 0.7);
        let (_, exact) = reference(&case);
        let seeds = 400;
        let mut ratios = vec![(0.0, 0.0, 0.0f64); 97];
        for seed in 0..seeds {
            let subject = Subject { method, options: base.clone().with("seed", seed as u64) };
            let Some(ran) = subject.run(&case) else { return };
            for (r, (l, e)) in ratios.iter_mut().zip(ran.lse.iter().zip(&exact)) {
                let ratio = (l - e).exp();
                *r = (r.0 + ratio, r.1 + ratio * ratio, r.2.max(ratio));
            }
        }
        let n = seeds as f64;
        for (row, (sum, squares, largest)) in ratios.into_iter().enumerate() {
            let mean = sum / n;
            let error = ((squares / n - mean * mean).max(0.0) / (n - 1.0)).sqrt();
            let name = subject.name(&format!("row {row}: mean ratio of normalisers {mean} ± {error}"), &p);
            // Estimators with long tails: what the draws did not reach weighs about as much as the largest of them.
            assert!((mean - 1.0).abs() <= 5.0 * error + largest / n, "{name}");
        }
    }
}

/// A method that draws nothing ignores its seed; one that draws answers differently to another seed.
fn check_seeds(method: &'static Method) {
    if !method.params.iter().any(|p| p.name == "seed") {
        return;
    }
    let mut moved = false;
    for base in settings(method) {
        let with_seed = |seed: u64| Subject { method, options: base.clone().with("seed", seed) };
        for p in with_seed(0).problems() {
            let case = Case::gaussian(p, 22);
            let (Some(a), Some(b)) = (with_seed(1).run(&case), with_seed(2).run(&case)) else { continue };
            moved |= a.o != b.o;
        }
    }
    assert_eq!(
        moved, !method.claims.deterministic,
        "{}: the seed must matter exactly if random numbers are claimed",
        method.id
    );
}
