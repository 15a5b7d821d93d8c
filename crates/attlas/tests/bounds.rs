//! Bounds that hold on every input: property tests on random and adversarial heads.
//!
//! With $S$ the logits, $A = e^S$, $Z$ the row sums and $\mathrm{range}_c$ the spread of value column $c$ over the keys
//! a row sees:
//!
//! - logits that move by $e$ with $\max e - \min e \le 2\delta$ move outputs by at most $\mathrm{range}_c \tanh(\delta/2)$;
//! - softmax over a subset that holds the share $p$ of the mass errs by at most $(1-p)\,\mathrm{range}_c$;
//! - any approximate score row $\hat a$, clipped to the range of the values, errs by at most
//!   $\mathrm{range}_c \min(1, \|a - \hat a\|_1 / Z)$;
//! - Nyström residuals bound every entry, and rows of landmarks are reproduced;
//! - centred keys have $Z \ge n$.

use attlas::method::Setting;
use attlas::testkit::adversarial::{Adversary, learn};
use attlas::testkit::{Case, How, Ran, reference, run_method, run_with};
use attlas::{Mask, Mat, MatRef, Options, Problem, registry};
use attlas_num::linalg::{matmul, matmul_nt, psd_factor, symmetric_eigen};
use attlas_num::rng::StreamKey;
use proptest::prelude::*;

fn adversaries() -> impl Strategy<Value = Adversary> {
    proptest::sample::select(Adversary::ALL.to_vec())
}

fn problems(masks: &'static [Mask]) -> impl Strategy<Value = Problem> {
    (1..3usize, 0..40usize, 20..90usize, 1..9usize, 1..5usize, proptest::sample::select(masks.to_vec()))
        .prop_map(|(heads, fewer, n_k, d, d_v, mask)| Problem {
            d_v,
            mask,
            ..Problem::new(heads, 1, d).with_kv_heads(1).with_lens(n_k - fewer.min(n_k - 1), n_k)
        })
}

const UNMASKED: &[Mask] = &[Mask::None];
const ANY_MASK: &[Mask] = &[Mask::None, Mask::Causal];

/// Returns the smallest and largest value of a column over the keys that row `i` sees.
fn range(case: &Case, i: usize, c: usize) -> (f64, f64) {
    let p = &case.problem;
    let seen = if p.mask == Mask::Causal { i + 1 + p.n_k - p.n_q } else { p.n_k };
    let column = || case.v[c..seen * p.d_v].iter().step_by(p.d_v).copied();
    (column().fold(f64::INFINITY, f64::min), column().fold(f64::NEG_INFINITY, f64::max))
}

/// Returns the rounding of a log-sum-exp of this size, and of numbers computed from it.
fn rounding(lse: f64) -> f64 {
    256.0 * f64::EPSILON * lse.abs().max(1.0)
}

fn options(pairs: &[(&str, &str)]) -> Options {
    pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v))
}

/// Runs a method, after learning if it must; `None` if it refuses the problem.
fn run(id: &str, pairs: &[(&str, &str)], case: &Case) -> Option<Ran> {
    let (method, options) = (registry::method(id).unwrap(), options(pairs));
    let needs = method.claims.needs == attlas::method::Needs::Calibration;
    let calibration = if needs { learn(method, &options, case).unwrap() } else { None };
    match method.plan_with(&case.problem, &options, calibration.as_ref()) {
        Ok(plan) => Some(run_with(&*plan, case, How::default()).unwrap()),
        Err(attlas::Error::Unsupported { .. }) => None,
        Err(e) => panic!("{id}: {e}"),
    }
}

/// Iterates over every method with the settings under which it is the softmax over some of the keys.
fn subsets() -> impl Iterator<Item = (&'static str, &'static [Setting])> {
    registry::METHODS.iter().flat_map(|m| m.subsets.iter().map(|pairs| (m.id, *pairs)))
}

#[test]
fn every_subset_misses_some_mass_and_no_method_refuses() {
    assert!(subsets().count() >= 14);
    // Without this, the bound below would say nothing.
    let case = Case::gaussian(Problem { d_v: 3, ..Problem::new(2, 80, 6).with_kv_heads(1) }, 3);
    let (_, want) = reference(&case);
    for (id, pairs) in subsets() {
        let ran = run(id, pairs, &case).unwrap_or_else(|| panic!("{id} with {pairs:?} refuses"));
        let mass = ran.lse.iter().zip(&want).map(|(a, b)| (a - b).exp()).sum::<f64>() / want.len() as f64;
        assert!(mass > 0.0 && mass < 0.9, "{id} with {pairs:?} holds {mass}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::default())]

    #[test]
    fn moved_logits_move_outputs_by_less_than_the_tangent(
        p in problems(ANY_MASK), kind in adversaries(), seed in 0..1000u64, size in -4.0..1.0f64,
    ) {
        let case = kind.case(p, seed);
        let mut moved = case.clone();
        let mut rng = StreamKey::new(seed).named("move").rng();
        moved.k.iter_mut().for_each(|k| *k += 10f64.powf(size) * rng.normal());
        let exact = registry::method("exact").unwrap();
        let (a, lse) = run_method(exact, &Options::new(), &case);
        let (b, _) = run_method(exact, &Options::new(), &moved);
        for row in 0..p.n_heads * p.n_q {
            let i = row % p.n_q;
            let seen = if p.mask == Mask::Causal { i + 1 + p.n_k - p.n_q } else { p.n_k };
            let q = &case.q[row * p.d..(row + 1) * p.d];
            let moves = (0..seen).map(|j| {
                (0..p.d).map(|c| p.scale * q[c] * (moved.k[j * p.d + c] - case.k[j * p.d + c])).sum::<f64>()
            });
            let (low, high) =
                moves.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), e| (l.min(e), h.max(e)));
            let bound = ((high - low) / 4.0).tanh() + rounding(lse[row]);
            for c in 0..p.d_v {
                let (least, most) = range(&case, i, c);
                let gap = (a[row * p.d_v + c] - b[row * p.d_v + c]).abs();
                prop_assert!(gap <= (most - least) * bound + rounding(most.abs().max(least.abs())));
            }
        }
    }

    #[test]
    fn single_precision_errs_by_less_than_its_rounded_logits_allow(
        p in problems(ANY_MASK), kind in adversaries(), seed in 0..1000u64,
    ) {
        let case = kind.case(p, seed).cast_f32();
        let (want, _) = reference(&case);
        let (got, _) = run_method(registry::method("exact").unwrap(), &Options::new(), &case);
        let u = f64::from(f32::EPSILON) / 2.0;
        let mut largest = 0.0f64;
        for q in case.q.chunks(p.d) {
            for k in case.k.chunks(p.d) {
                largest = largest.max(q.iter().zip(k).map(|(a, b)| (a * b).abs()).sum());
            }
        }
        let delta = (p.d as f64 + 2.0) * u * p.scale * largest;
        for row in 0..p.n_heads * p.n_q {
            for c in 0..p.d_v {
                let (least, most) = range(&case, row % p.n_q, c);
                let size = (most - least).max(most.abs()).max(least.abs());
                let gap = (got[row * p.d_v + c] - want[row * p.d_v + c]).abs();
                prop_assert!(gap <= size * (delta + 32.0 * u), "{kind:?}, row {row}: {gap}");
            }
        }
    }

    #[test]
    fn subsets_err_by_less_than_the_mass_they_miss(
        p in problems(ANY_MASK), kind in adversaries(), seed in 0..1000u64,
    ) {
        let case = kind.case(p, seed);
        let (want, want_lse) = reference(&case);
        for (id, pairs) in subsets() {
            let Some(ran) = run(id, pairs, &case) else { continue };
            for row in 0..p.n_heads * p.n_q {
                let (l, exact) = (ran.lse[row], want_lse[row]);
                prop_assert!(l <= exact + rounding(exact), "{id}, {kind:?}: row {row} holds more than all mass");
                if l == f64::NEG_INFINITY {
                    continue;
                }
                let missed = (1.0 - (l - exact).exp()).max(0.0) + rounding(exact);
                for c in 0..p.d_v {
                    let (least, most) = range(&case, row % p.n_q, c);
                    let gap = (ran.o[row * p.d_v + c] - want[row * p.d_v + c]).abs();
                    let bound = missed * (most - least) + rounding(most.abs().max(least.abs()));
                    prop_assert!(gap <= bound, "{id} {pairs:?}, {kind:?}: row {row} errs by {gap}, over {bound}");
                }
            }
        }
    }

    #[test]
    fn means_of_clusters_never_hold_more_than_the_mass(
        p in problems(ANY_MASK), kind in adversaries(), seed in 0..1000u64, budget in 0..20usize,
    ) {
        let case = kind.case(p, seed);
        let (_, want) = reference(&case);
        let text = budget.to_string();
        let base = [("budget", text.as_str()), ("interval", "4"), ("window", "16"), ("sinks", "1"), ("ratio", "0.2")];
        for hierarchy in ["false", "true"] {
            let pairs: Vec<(&str, &str)> = base.into_iter().chain([("hierarchy", hierarchy)]).collect();
            let Some(ran) = run("multipole", &pairs, &case) else { continue };
            for (row, (l, exact)) in ran.lse.iter().zip(&want).enumerate() {
                prop_assert!(*l <= exact + rounding(*exact), "{kind:?}, row {row}: {l} over {exact}");
            }
        }
    }

    #[test]
    fn centred_keys_give_every_row_at_least_unit_mass_per_key(
        p in problems(UNMASKED), kind in adversaries(), seed in 0..1000u64,
    ) {
        let mut case = kind.case(p, seed);
        for c in 0..p.d {
            let mean = case.k.iter().skip(c).step_by(p.d).sum::<f64>() / p.n_k as f64;
            case.k.iter_mut().skip(c).step_by(p.d).for_each(|k| *k -= mean);
        }
        let (_, lse) = run_method(registry::method("exact").unwrap(), &Options::new(), &case);
        // The rounding error of the mean, times the longest query.
        let left = (0..p.d).map(|c| {
            (case.k.iter().skip(c).step_by(p.d).sum::<f64>() / p.n_k as f64).abs()
        });
        let left: f64 = left.sum();
        let longest = case.q.iter().fold(0.0f64, |a, q| a.max(q.abs()));
        for l in lse {
            prop_assert!(l >= (p.n_k as f64).ln() - p.scale * left * longest - rounding(l), "{kind:?}: {l}");
        }
    }

    #[test]
    fn the_certificate_of_a_coreset_covers_its_error(
        p in problems(UNMASKED), kind in adversaries(), seed in 0..1000u64, rank in 1..30usize,
        bins in 1..4usize, single in any::<bool>(),
    ) {
        let case = kind.case(p, seed);
        let case = if single { case.cast_f32() } else { case };
        let (want, _) = reference(&case);
        let (rank, bins) = (rank.to_string(), bins.to_string());
        let Some(ran) = run("wildcat", &[("rank", rank.as_str()), ("bins", bins.as_str())], &case) else { return Ok(()) };
        let Some(&certified) = ran.info.figures.get("certified_error") else { return Ok(()) };
        prop_assert!((0.0..=1.0).contains(&certified));
        for row in 0..p.n_heads * p.n_q {
            for c in 0..p.d_v {
                let (least, most) = range(&case, row % p.n_q, c);
                let gap = (ran.o[row * p.d_v + c] - want[row * p.d_v + c]).abs();
                let rounded = rounding(most.abs().max(least.abs()));
                let rounded = if single { rounded * f64::from(f32::EPSILON) / f64::EPSILON } else { rounded };
                let bound = certified * (most - least) + rounded;
                prop_assert!(gap <= bound, "{kind:?}: {gap} over {bound}");
            }
        }
    }

    #[test]
    fn nystrom_residuals_bound_scores_and_scores_bound_outputs(
        n in 4..40usize, d in 1..6usize, m in 1..12usize, kind in adversaries(), seed in 0..1000u64,
    ) {
        let case = kind.case(Problem { d_v: 2, ..Problem::new(1, n, d) }, seed);
        let x = MatRef::new(&case.k, n, d);
        let products = matmul_nt(x, x);
        // The Gaussian kernel in the form that cannot overflow: a diagonal factor cancels in all that follows.
        let kernel = Mat::from_fn(n, n, |i, j| {
            (products[(i, j)] - (products[(i, i)] + products[(j, j)]) / 2.0).min(0.0).exp()
        });
        let landmarks = StreamKey::new(seed).rng().subset(n, m.min(n));
        // A core that a plain Cholesky factorisation only just gets through has no digits left to test.
        let core = Mat::from_fn(landmarks.len(), landmarks.len(), |i, j| kernel[(landmarks[i], landmarks[j])]);
        let least = symmetric_eigen(core.as_ref()).unwrap().values.into_iter().fold(f64::INFINITY, f64::min);
        let factor = psd_factor(core.as_ref()).unwrap();
        prop_assume!(least > 1e-8 || factor.jitter() > 0.0 || factor.rank() < landmarks.len());
        // C M⁺ Cᵀ, and the diagonal of the residual.
        let cross = Mat::from_fn(landmarks.len(), n, |i, j| kernel[(landmarks[i], j)]);
        let found = matmul(cross.transpose().as_ref(), factor.solve(cross.as_ref()).unwrap().as_ref());
        let half = factor.half_solve(cross.as_ref()).unwrap();
        let explained = |j: usize| (0..half.rows()).map(|i| half[(i, j)].powi(2)).sum::<f64>();
        let residual: Vec<f64> = (0..n).map(|j| (1.0 - explained(j)).max(0.0)).collect();
        // Jitter on a deficient core moves entries by about its size.
        let slack = 1e-6 + 10.0 * factor.jitter();
        for i in 0..n {
            prop_assert!((0.0..=1.0 + 1e-12).contains(&residual[i]));
            for j in 0..n {
                let gap = (kernel[(i, j)] - found[(i, j)]).abs();
                prop_assert!(gap <= (residual[i] * residual[j]).sqrt() + slack, "{kind:?}: {gap} at {i}, {j}");
                prop_assert!((residual[i] * residual[j]).sqrt() <= residual[j].sqrt() * (1.0 + 1e-12));
                if landmarks.contains(&i) {
                    prop_assert!(gap <= slack, "{kind:?}: landmark {i} errs by {gap}");
                }
            }
            // A row of the kernel as scores, its approximation as approximate scores.
            let (a, b) = (kernel.row(i), found.row(i));
            check_scores(a, b, &case.v)?;
        }
    }

    #[test]
    fn approximate_scores_of_any_sign_keep_the_bound(
        a in proptest::collection::vec(1e-6..10.0f64, 1..20), size in -3.0..1.5f64, seed in 0..1000u64,
    ) {
        let mut rng = StreamKey::new(seed).rng();
        let b: Vec<f64> = a.iter().map(|a| a + 10f64.powf(size) * rng.normal()).collect();
        let v: Vec<f64> = a.iter().flat_map(|_| [rng.normal(), 1e3 * rng.normal()]).collect();
        check_scores(&a, &b, &v)?;
    }
}

/// Checks the bound for approximate scores `b` of the positive scores `a`, over values of two columns.
fn check_scores(a: &[f64], b: &[f64], v: &[f64]) -> Result<(), TestCaseError> {
    let (z, sum): (f64, f64) = (a.iter().sum(), b.iter().sum());
    let gap: f64 = a.iter().zip(b).map(|(a, b)| (a - b).abs()).sum();
    for c in 0..2 {
        let column = || v.iter().skip(c).step_by(2).copied();
        let (least, most) =
            (column().fold(f64::INFINITY, f64::min), column().fold(f64::NEG_INFINITY, f64::max));
        let over = |w: &[f64], z: f64| w.iter().zip(column()).map(|(w, v)| w * v).sum::<f64>() / z;
        let approximate = if sum > 0.0 { over(b, sum).clamp(least, most) } else { (least + most) / 2.0 };
        let error = (over(a, z) - approximate).abs();
        let bound = (most - least) * (gap / z).min(1.0);
        prop_assert!(error <= bound + rounding(most.abs().max(least.abs())), "{error} over {bound}");
    }
    Ok(())
}
