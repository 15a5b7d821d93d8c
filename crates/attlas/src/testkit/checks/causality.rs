//! Checks that no row changes with a later token, and that decoding gives the rows of the causal plan.

use super::Subject;
use crate::method::{Law, Plan};
use crate::testkit::{Case, Ran, assert_rows_close, assert_same_bits, run_with};
use crate::{DType, Error, Inputs, Mask, Out, Problem, Qkv, Real, Tensor, TensorMut, TensorRef, Workspace};
use std::ops::Range;

/// The part of a token that is changed.
#[derive(Clone, Copy, Debug)]
enum Changed {
    Token,
    Query,
    Key,
    Value,
}

impl Subject {
    /// Checks that every row before token `t` stays bit-identical when token `t`, or anything of all tokens from `t`
    /// on, changes, even to NaN.
    pub(super) fn check_causality(&self) {
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
                        self.check_leak(&case, &first, t..t + 1, Changed::Token, change);
                    }
                    for changed in [Changed::Token, Changed::Query, Changed::Key, Changed::Value] {
                        self.check_leak(&case, &first, t..n_k, changed, -3.0);
                        self.check_leak(&case, &first, t..n_k, changed, f64::NAN);
                    }
                }
            }
        }
    }

    /// Checks that rows before those of `tokens` keep their bits, output and log-sum-exp, when the part `what` of these
    /// tokens is multiplied by `change`.
    fn check_leak(&self, case: &Case, first: &Ran, tokens: Range<usize>, what: Changed, change: f64) {
        let p = &case.problem;
        let mut changed = case.clone();
        let multiply = |data: &mut [f64]| data.iter_mut().for_each(|x| *x *= change);
        if matches!(what, Changed::Token | Changed::Key) {
            multiply(&mut changed.k[tokens.start * p.d..tokens.end * p.d]);
        }
        if matches!(what, Changed::Token | Changed::Value) {
            multiply(&mut changed.v[tokens.start * p.d_v..tokens.end * p.d_v]);
        }
        let row = |t: usize| (t + p.n_q).saturating_sub(p.n_k);
        if matches!(what, Changed::Token | Changed::Query) {
            for h in 0..p.n_heads {
                let rows = h * p.n_q + row(tokens.start)..h * p.n_q + row(tokens.end);
                multiply(&mut changed.q[rows.start * p.d..rows.end * p.d]);
            }
        }
        let Some(plan) = self.plan_for(&changed, &self.options) else { return };
        let Ok(ran) = run_with(&*plan, &changed, self.how()) else {
            assert!(!change.is_finite(), "{}", self.name("fails on a finite change", p));
            return;
        };
        let earlier = row(tokens.start);
        let t = tokens.start;
        for h in 0..p.n_heads {
            let rows = h * p.n_q..h * p.n_q + earlier;
            let name =
                self.name(&format!("row before token {t} feels it multiplied by {change} ({what:?})"), p);
            let outputs = rows.start * p.d_v..rows.end * p.d_v;
            assert_same_bits(&ran.o[outputs.clone()], &first.o[outputs], &name);
            if self.method.claims.lse {
                let name = format!("{name}, log-sum-exp");
                assert_same_bits(&ran.lse[rows.clone()], &first.lse[rows], &name);
            }
        }
    }

    /// Checks that decoding gives the rows of the causal plan.
    pub(super) fn check_decoding(&self) {
        let p = Problem { d_v: 6, ..Problem::new(4, 97, 8).with_kv_heads(2).causal() };
        let case = Case::gaussian(p, 12);
        if !self.method.support(&p, &self.options).is_yes() {
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
        for<'a> TensorRef<'a, T>: Into<Tensor<'a>>,
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
            let (keys, values) = (k.rows(done..next), v.rows(done..next));
            stream.push(keys.into(), values.into(), &mut ws).unwrap_or_else(|e| fail(e));
            let mut o = vec![T::NAN; p.n_heads * p.d_v];
            let out = Out::new(TensorMut::bhnd(&mut o, [1, p.n_heads, 1, p.d_v]).unwrap_or_else(|e| fail(e)));
            stream
                .attend(q.rows(next - 1..next).into(), &mut out.into(), &mut ws)
                .unwrap_or_else(|e| fail(e));
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
        // The near field's keys add to the bytes that a method states.
        let near = self.options.iter().any(|(name, _)| crate::Near::names(name, self.method.params));
        if let Some(&each) = want.info.figures.get("decode_bytes").filter(|_| !near) {
            let (found, stated) = (stream.state_bytes() as f64, each * p.n_kv_heads as f64);
            assert!(found <= stated, "{name}: holds {found} bytes, stated {stated}");
        }
    }
}
