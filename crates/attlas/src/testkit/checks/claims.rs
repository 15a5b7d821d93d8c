//! Checks of a method's claims: its exact settings, its unbiased normaliser, its seed.

use super::{Subject, settings};
use crate::method::Method;
use crate::testkit::{Case, How, assert_same_bits, reference};
use crate::{Mask, Options, Problem};

/// Checks that at every setting of `exact_at`, the output is that of `exact`, bit for bit.
pub(super) fn check_exact_limits(method: &'static Method) {
    let exact = crate::registry::method("exact").unwrap_or_else(|e| panic!("{e}"));
    for base in settings(method) {
        for &(name, budget) in method.claims_with(&base).exact_at {
            for n in [1usize, 64, 97] {
                for mask in [Mask::None, Mask::Causal] {
                    let p = Problem { mask, d_v: 7, ..Problem::new(4, n, 16).with_kv_heads(2) };
                    let options = base.clone().with(name, budget.value(&p));
                    if method.claims_with(&options).exact_at.is_empty() {
                        continue;
                    }
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

/// Checks that the mean of the normaliser over seeds is the exact one, within five standard errors and one largest
/// draw.
pub(super) fn check_unbiased(method: &'static Method) {
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
            // Estimators with long tails: the part that the draws missed weighs about as much as the largest draw.
            assert!((mean - 1.0).abs() <= 5.0 * error + largest / n, "{name}");
        }
    }
}

/// Checks that a method without random draws ignores its seed, and that one with draws changes with its seed.
pub(super) fn check_seeds(method: &'static Method) {
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
