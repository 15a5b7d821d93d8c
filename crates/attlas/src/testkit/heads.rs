//! Four kinds of synthetic heads on which published and specified accuracies are compared: one head, no mask,
//! independent standard normal values.

use super::Case;
use crate::Problem;
use attlas_num::Mat;
use attlas_num::linalg::{matmul_nt, thin_qr};
use attlas_num::rng::StreamKey;

/// Distribution of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Workload {
    /// Independent standard normal entries: flat attention without structure.
    Iid,
    /// Autoregressive along the sequence with coefficient 0.98 and unit variance: neighbours are alike.
    Smooth,
    /// 32 centres of deviation 1.5; keys are a centre, queries 0.8 times one, with noise of 0.3: peaked attention.
    Clustered,
    /// Deviations $\propto e^{-i/(0.28d)}$ along common, randomly rotated axes, total variance $2.25 d$.
    Decaying,
}

impl Workload {
    /// All distributions.
    pub const ALL: [Workload; 4] = [Workload::Iid, Workload::Smooth, Workload::Clustered, Workload::Decaying];

    /// Draws a case of `n` tokens of width `d`.
    pub fn case(self, n: usize, d: usize, seed: u64) -> Case {
        let key = StreamKey::new(seed).named("workload");
        let normal = |what: &str, rows: usize| {
            let mut rng = key.named(what).rng();
            Mat::from_fn(rows, d, |_, _| rng.normal())
        };
        let (mut q, mut k) = (normal("q", n), normal("k", n));
        match self {
            Workload::Iid => {}
            Workload::Smooth => {
                let (keep, fresh) = (0.98, (1.0f64 - 0.98 * 0.98).sqrt());
                for x in [&mut q, &mut k] {
                    for t in d..n * d {
                        x.data_mut()[t] = keep * x.data()[t - d] + fresh * x.data()[t];
                    }
                }
            }
            Workload::Clustered => {
                let centres = normal("centres", 32);
                for (x, factor, what) in [(&mut q, 1.2, "q centre"), (&mut k, 1.5, "k centre")] {
                    let mut rng = key.named(what).rng();
                    for i in 0..n {
                        let centre = centres.row(rng.below(32));
                        x.row_mut(i).iter_mut().zip(centre).for_each(|(x, c)| *x = 0.3 * *x + factor * c);
                    }
                }
            }
            Workload::Decaying => {
                let rotation = thin_qr(normal("rotation", d).as_ref()).unwrap_or_else(|e| panic!("{e}")).q;
                let deviation: Vec<f64> = (0..d).map(|i| (-(i as f64) / (0.28 * d as f64)).exp()).collect();
                let total: f64 = deviation.iter().map(|s| s * s).sum();
                let size = (2.25 * d as f64 / total).sqrt();
                for x in [&mut q, &mut k] {
                    for i in 0..n {
                        x.row_mut(i).iter_mut().zip(&deviation).for_each(|(x, s)| *x *= size * s);
                    }
                    *x = matmul_nt(x.as_ref(), rotation.as_ref());
                }
            }
        }
        Case {
            problem: Problem::new(1, n, d),
            q: q.into_vec(),
            k: k.into_vec(),
            v: normal("v", n).into_vec(),
            single: false,
        }
    }
}

/// Draws one causal head of `n` tokens of width `d` with the traits of trained heads: queries and keys in two nearly
/// orthogonal cones, a first key with a third of the mass and a small value, a score of the key alone with a heavy
/// tail, and neighbours that attend to each other.
pub fn trained_head(n: usize, d: usize, seed: u64) -> Case {
    let key = StreamKey::new(seed).named("trained head");
    let draw = |what: &str, len: usize| {
        let mut rng = key.named(what).rng();
        (0..len).map(|_| rng.normal()).collect::<Vec<f64>>()
    };
    // The first axis is the mean query, the second the mean key.
    let (mut q, mut k, mut v) = (draw("q", n * d), draw("k", n * d), draw("v", n * d));
    let (walk, score) = (draw("walk", n * d), draw("score", n));
    let size = (d as f64).sqrt();
    let (keep, fresh) = (0.97, (1.0f64 - 0.97 * 0.97).sqrt());
    let mut state = vec![0.0; d];
    for i in 0..n {
        let row = i * d..(i + 1) * d;
        state.iter_mut().zip(&walk[row.clone()]).for_each(|(s, w)| *s = keep * *s + fresh * w);
        for (c, &s) in state.iter().enumerate() {
            q[i * d + c] = 0.5 * q[i * d + c] + 1.2 * s;
            k[i * d + c] = 0.5 * k[i * d + c] + 1.2 * s;
        }
        q[i * d] = 0.9 * size;
        k[i * d + 1] += 0.9 * size;
        // ⟨mean query, key⟩ / √d: squares of normal numbers have a heavy tail.
        k[i * d] = score[i] * score[i].abs() - 1.0;
    }
    k[0] = 9.0;
    v[..d].iter_mut().for_each(|x| *x *= 0.3);
    Case { problem: Problem::new(1, n, d).causal(), q, k, v, single: false }
}

/// The setting of the specification's table of reference accuracies, with exact outputs computed once.
#[cfg(test)]
pub(crate) mod table {
    use super::*;
    use crate::testkit::{How, run_with};
    use crate::{Calibration, Method, Options, metrics};
    use std::sync::OnceLock;

    /// A case with its exact output and log-sum-exp.
    pub(crate) struct Known {
        pub(crate) case: Case,
        pub(crate) o: Vec<f64>,
        pub(crate) lse: Vec<f64>,
    }

    /// Returns 2048 tokens of width 64, drawn from one of [`SEEDS`] streams.
    pub(crate) fn known(workload: Workload, seed: usize) -> &'static Known {
        static KNOWN: [[OnceLock<Known>; SEEDS]; 4] = [const { [const { OnceLock::new() }; SEEDS] }; 4];
        let slot = Workload::ALL.iter().position(|w| *w == workload).unwrap_or(0);
        KNOWN[slot][seed].get_or_init(|| {
            let case = workload.case(2048, 64, 1 + seed as u64);
            let exact = crate::registry::method("exact").unwrap();
            let plan = exact.plan(&case.problem, &Options::new()).unwrap();
            let ran = run_with(&*plan, &case, How::default()).unwrap();
            Known { case, o: ran.o, lse: ran.lse }
        })
    }

    /// Number of streams of [`known`], for figures that differ much between streams.
    pub(crate) const SEEDS: usize = 3;

    /// Computes the relative Frobenius error of a method on a workload, averaged over the first `seeds` streams.
    pub(crate) fn error_of(
        method: &Method,
        options: &[(&str, &str)],
        calibration: Option<&Calibration>,
        workload: Workload,
        seeds: usize,
    ) -> f64 {
        let options = options.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v));
        let error = |seed| {
            let known = known(workload, seed);
            let plan = method.plan_with(&known.case.problem, &options, calibration).unwrap();
            let ran = run_with(&*plan, &known.case, How { lse: false, ..How::default() }).unwrap();
            metrics::relative_frobenius(&ran.o, &known.o)
        };
        (0..seeds).map(error).sum::<f64>() / seeds as f64
    }

    /// Asserts that the error is the specified one within the 15 % by which random streams differ.
    pub(crate) fn assert_error(got: f64, want: f64, what: &str) {
        assert!((got / want - 1.0).abs() <= 0.15, "{what}: error {got:.4}, expected {want} ± 15 %");
    }

    #[test]
    fn the_mean_of_the_values_has_the_specified_error() {
        for (workload, want) in Workload::ALL.into_iter().zip([0.85, 0.82, 0.99, 1.0]) {
            let x = known(workload, 0);
            let mut mean = [0.0; 64];
            x.case.v.iter().enumerate().for_each(|(i, v)| mean[i % 64] += v / 2048.0);
            assert_error(
                metrics::relative_frobenius(&mean.repeat(2048), &x.o),
                want,
                &format!("{workload:?}"),
            );
        }
    }
}
