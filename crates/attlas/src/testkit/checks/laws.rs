//! Checks of the laws that every method keeps unless it claims an exception: rows are averages of values and linear in
//! them, heads and queries are independent of each other, keys have no order, and no finite input gives NaN.

use super::Subject;
use crate::method::Law;
use crate::testkit::{Case, assert_rows_close, assert_same_bits, run_with};
use crate::{Mask, Problem};

impl Subject {
    /// Checks that constant values are reproduced, and that outputs stay in the hull of the values and are linear in
    /// them.
    pub(super) fn check_values(&self) {
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

    /// Checks for finite answers in both precisions: logits of ±10⁴, zero keys, equal keys, zero queries.
    pub(super) fn check_extremes(&self) {
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
            // If all values are NaN, NaN must not become a number; NaN anywhere must not end in a panic.
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
                    // Any answer or error is accepted; a panic is not.
                    let _ = run_with(&*plan, &case, self.how());
                }
            }
        }
    }

    /// Checks that query heads of a group give the same results as alone, and that key heads go to the right query
    /// heads.
    pub(super) fn check_groups(&self) {
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

    /// Checks that, without a mask, the order of the keys does not matter.
    pub(super) fn check_key_order(&self) {
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

    /// Checks that a negative scale equals a positive one with the queries negated, in both precisions and when
    /// decoding.
    pub(super) fn check_negative_scale(&self) {
        if !self.method.claims_with(&self.options).softmax {
            return;
        }
        for p in self.problems() {
            let base = Case::gaussian(p, 17);
            let negative = Case { problem: Problem { scale: -p.scale, ..p }, ..base.clone() };
            let mirrored = Case { q: base.q.iter().map(|x| -x).collect(), ..base };
            for (a, b) in [(negative.clone(), mirrored.clone()), (negative.cast_f32(), mirrored.cast_f32())] {
                let (Some(a), Some(b)) = (self.run(&a), self.run(&b)) else { continue };
                assert_same_bits(&a.o, &b.o, &self.name("negative scale", &p));
                assert_same_bits(&a.lse, &b.lse, &self.name("negative scale: log-sum-exp", &p));
            }
        }
    }

    /// Checks that a row does not depend on the other queries.
    pub(super) fn check_queries_alone(&self) {
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
}
