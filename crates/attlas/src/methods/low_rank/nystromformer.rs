//! Nyströmformer: softmax attention through averaged queries and keys and a small pseudo-inverse.
//!
//! **Idea.** Average the queries and the keys over segments of the sequence and use the averages as landmarks of a
//! Nyström approximation of the attention weights.
//!
//! **Math.** With segment means $\bar Q, \bar K$ ($m$ rows each) and
//! $F = \operatorname{softmax}(\beta Q \bar K^\top)$, $C = \operatorname{softmax}(\beta \bar Q \bar K^\top)$,
//! $G = \operatorname{softmax}(\beta \bar Q K^\top)$: $O = F\,(C^+ (G V))$, multiplied from the right so that the work is
//! linear in the tokens. $C^+$ is reached by iterations of matrix products from
//! $Z_0 = C^\top / (\|C\|_1 \|C\|_\infty)$, with norms per matrix, or from singular values above `rcond` times the
//! largest. With `len_bias`, $\ln n_s$ is added to the logits of averaged key $s$ in $F$ and $C$, $n_s$ the length of
//! its segment. A trained model may add a convolution of the values,
//! $O_t \mathrel{+}= \sum_u w_{h,u} V_{t + u - \lfloor\kappa/2\rfloor}$, one filter of odd length per query head; a
//! calibration made by [`with_conv`] contains its weights.
//!
//! **Reference.** xiong2021. Landmarks are averages over all tokens, not selected tokens. The paper's iteration
//! (razavi2014) is of third order; its landmark formula must divide by the length of the segment; its complexity
//! must count the $m^3$ of the inverse. Segments here are disjoint when $m$ does not divide the length.
//!
//! **Cost.** $2m(n_q + n_k)(d + d_v) + 2m^2(d + d_v) + 8m^3\,\mathrm{iters}$ operations; $O(m^2 + m(d + d_v))$ memory.
//!
//! **Guarantees.** Exact when $m$ reaches the number of queries or keys, and when queries are constant inside each
//! segment and $C$ is nonsingular, for any keys and values. Weights may be negative; where $C$ is inverted
//! accurately they sum to one. A more accurate inverse is often a worse approximation: $C$ has condition numbers of
//! $10^3$ to $10^4$, and six steps of the iteration, or `rcond` of 1e-2, act as a filter. No causal form: averages mix
//! later tokens into earlier rows, and the inverse couples all landmarks.
//!
//! **When to use.** Encoders whose queries and keys vary slowly along the sequence, or models trained with it. Not for
//! data without locality, nor for keys after fast rotations, which averages cancel.

use crate::engine::exact_group;
use crate::engine::landmarks::{landmark_attention, landmark_flops};
use crate::engine::pool::{Segments, clip_rows, column_ranges, log_lens};
use crate::group::{Group, GroupPlan};
use crate::method::{
    Accepted, Budget, Calibration, Claims, Cost, Family, Law, Method, RunInfo, Spec, Status, Support, Tunable,
};
use crate::{Error, Mask, Problem, Real, Result};
use attlas_num::Mat;
use attlas_num::kernels::axpy;
use attlas_num::linalg::{Iteration, PinvStart, iterative_pinv, matmul, pinv};

/// Registry entry.
pub static METHOD: Method = Method {
    id: "nystromformer",
    family: Family::LowRank,
    title: "Nyströmformer: landmarks by segment means and a pseudo-inverse",
    reference: "xiong2021",
    claims: Claims {
        causal: false,
        exact_at: &[("landmarks", Budget::NumTokens)],
        row_stochastic: false,
        lse: false,
        exponent: 1.0,
        except: &[
            (Law::LinearInValues, "clip cuts outputs to the range of the values; linear without it"),
            (Law::KeyOrder, "landmarks are means of neighbouring keys"),
            (Law::QueriesAlone, "landmarks are means of queries, so every row depends on all of them"),
        ],
        ..Claims::BASE
    },
    probes: &[
        &[("landmarks", "8")],
        &[("landmarks", "13"), ("pinv", "svd"), ("len_bias", "true"), ("clip", "true")],
        &[("landmarks", "5"), ("pinv", "hyperpower7"), ("iters", "4")],
        &[("landmarks", "1"), ("pinv", "newton_schulz")],
        &[("landmarks", "30"), ("pinv", "chebyshev")],
    ],
    tunable: &[Tunable::budget("landmarks")],
    ..Method::of::<Params>()
};

crate::choices! {
    /// Inversion of the small matrix.
    pub enum Pinv {
        /// Third order, four products a step: the paper's.
        Razavi = "razavi",
        /// Second order, two products a step.
        NewtonSchulz = "newton_schulz",
        /// Third order, three products a step.
        Chebyshev = "chebyshev",
        /// Seventh order, five products a step.
        Hyperpower7 = "hyperpower7",
        /// Singular values above `rcond` times the largest.
        Svd = "svd",
    }
}

crate::params! {
    /// Parameters of [`Nystromformer`].
    pub struct Params {
        /// Number of segments whose means are the landmarks; attention is exact if it reaches the number of queries or
        /// keys.
        landmarks: usize = 64, in 1..=1 << 20;
        /// Inversion of the small matrix: razavi (the paper's), newton_schulz, chebyshev, hyperpower7 or svd.
        pinv: Pinv = Pinv::Razavi;
        /// Steps of the iteration. Few steps act as a spectral filter, many give an accurate inverse; iteration stops
        /// at 25 (razavi), 42, 26 or 15 steps, where rounding would dominate. Not used by svd.
        iters: usize = 6, in 1..=42;
        /// Drop singular values up to this share of the largest, at least landmarks times the unit roundoff. Used by
        /// svd only.
        rcond: f64 = 1e-2, in 0.0..=1.0;
        /// Add the logarithm of the segment's length to the logits of averaged keys. Matters only if the number of
        /// landmarks does not divide the number of keys.
        len_bias: bool = false;
        /// Clip outputs to the range of the values, column by column.
        clip: bool = false;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn supports(&self, p: &Problem) -> Support {
        Support::unless(
            p.mask == Mask::Causal,
            "landmarks average over later tokens, so a causal mask cannot be honoured: linformer pools \
             keys causally",
        )
    }

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        Nystromformer::new(x.problem, self, x.calibration)
    }
}

/// The plan: parameters, and the convolution filters of a calibration, if there are any.
#[derive(Debug)]
pub struct Nystromformer {
    params: Params,
    conv: Option<Mat<f64>>,
}

/// Name of the matrix of filters in a calibration, `n_heads × κ`.
const CONV: &str = "conv";

/// Makes a calibration for `problem` from trained filters of the convolution skip, one row of odd length per query
/// head.
pub fn with_conv(problem: &Problem, filters: &Mat<f64>) -> Result<Calibration> {
    let mut calibration = Calibration::new(METHOD.id, problem);
    calibration.insert(CONV.into(), filters);
    read_conv(problem, &calibration)?;
    Ok(calibration)
}

fn read_conv(problem: &Problem, calibration: &Calibration) -> Result<Mat<f64>> {
    let conv = calibration.matrix(CONV)?;
    if conv.rows() != problem.n_heads || conv.cols().is_multiple_of(2) {
        return Err(Error::Calibration {
            method: METHOD.id.into(),
            expected: format!("{} filters of odd length", problem.n_heads),
            found: format!("{} of length {}", conv.rows(), conv.cols()),
        });
    }
    Ok(conv)
}

impl Nystromformer {
    /// Creates a plan with these parameters and the calibration's convolution, if there is one.
    pub(crate) fn new(problem: &Problem, params: Params, calibration: Option<&Calibration>) -> Result<Self> {
        params.validate()?;
        let conv = calibration.map(|c| read_conv(problem, c)).transpose()?;
        if conv.is_some() && problem.n_q != problem.n_k {
            return Err(Error::Unsupported {
                method: METHOD.id.into(),
                reasons: vec![format!(
                    "the convolution runs along a sequence that attends to itself, here {} queries meet {} keys",
                    problem.n_q, problem.n_k
                )],
            });
        }
        Ok(Self { params, conv })
    }

    /// Computes the approximation for any number of landmarks; keys and queries must not be empty.
    fn approximate<T: Real>(&self, g: &mut Group<'_, T>) -> Result<RunInfo> {
        let p = &self.params;
        let (q_parts, k_parts) = (Segments::new(g.n_q(), p.landmarks), Segments::new(g.n_k(), p.landmarks));
        let bias = p.len_bias.then(|| log_lens::<T>(&k_parts));
        let ranges = p.clip.then(|| column_ranges(g.v));
        landmark_attention(
            g,
            &q_parts,
            &k_parts,
            bias.as_deref(),
            |c| {
                let (inverse, info) = self.invert(c);
                (move |u: &Mat<f64>| inverse.map(|x| matmul(x.as_ref(), u.as_ref())), info)
            },
            |block, _| {
                if let Some(ranges) = &ranges {
                    clip_rows(block.out, ranges);
                }
            },
        )
    }

    /// Computes $C^+$; `None` if $C$ is not finite.
    fn invert(&self, c: &Mat<f64>) -> (Option<Mat<f64>>, RunInfo) {
        let p = &self.params;
        let iteration = match p.pinv {
            Pinv::Razavi => Iteration::Razavi,
            Pinv::NewtonSchulz => Iteration::NewtonSchulz,
            Pinv::Chebyshev => Iteration::Chebyshev,
            Pinv::Hyperpower7 => Iteration::Hyperpower7,
            Pinv::Svd => {
                let floor = c.rows() as f64 * f64::ROUNDOFF;
                if let Ok((inverse, rank)) = pinv(c.as_ref(), p.rcond.max(floor)) {
                    let info = RunInfo { rank: Some(rank), ..RunInfo::default() };
                    return (Some(inverse), info);
                }
                // Non-finite entries also end the iteration.
                Iteration::Hyperpower7
            }
        };
        match iterative_pinv(c.as_ref(), iteration, p.iters, 0.0, PinvStart::Scaled) {
            Ok(report) => {
                let status = if p.pinv == Pinv::Svd { Status::StoppedEarly } else { Status::Complete };
                let info = RunInfo {
                    rank: Some(c.rows()),
                    iterations: Some(report.steps),
                    figures: [("pinv_residual", report.residual)].into(),
                    status,
                    ..RunInfo::default()
                };
                (Some(report.inverse), info)
            }
            Err(_) => (None, RunInfo { status: Status::StoppedEarly, ..RunInfo::default() }),
        }
    }

    /// Adds the convolution of the values to every row.
    fn convolve<T: Real>(&self, g: &mut Group<'_, T>, filters: &Mat<f64>) -> Result<()> {
        let (v, first_head) = (g.v, g.index.kv_head * g.q.heads());
        let filters = filters.cast::<T>();
        let half = filters.cols() / 2;
        g.par_row_blocks(256, |block| {
            let filter = filters.row(first_head + block.head);
            for (out, t) in block.out.chunks_exact_mut(v.cols()).zip(block.first..) {
                for (u, &w) in filter.iter().enumerate() {
                    if let Some(j) = (t + u).checked_sub(half).filter(|&j| j < v.rows()) {
                        axpy(w, v.row(j), out);
                    }
                }
            }
            Ok(())
        })?;
        Ok(())
    }
}

impl GroupPlan for Nystromformer {
    fn cost(&self, p: &Problem) -> Cost {
        let heads = (p.batch * p.n_heads) as u64;
        let m = self.params.landmarks;
        let width = (p.d + p.d_v) as u64;
        let taps = self.conv.as_ref().map_or(0, |c| c.cols() as u64);
        let conv = 2 * heads * p.n_q as u64 * taps * p.d_v as u64;
        let bytes = 4 * (p.batch * (p.n_heads * p.n_q + p.n_kv_heads * p.n_k)) as u64 * width;
        if m >= p.n_q.min(p.n_k) {
            return Cost { setup_flops: 0, run_flops: 2 * p.visible_pairs() * width + conv, bytes };
        }
        let products = match self.params.pinv {
            Pinv::Razavi => 4 * self.params.iters,
            Pinv::NewtonSchulz => 2 * self.params.iters,
            Pinv::Chebyshev => 3 * self.params.iters,
            Pinv::Hyperpower7 => 5 * self.params.iters,
            Pinv::Svd => 11,
        };
        let (setup, run) = landmark_flops(p, m);
        let solve = heads * 2 * (m * m * m * products + m * m * p.d_v) as u64;
        Cost { setup_flops: setup + solve, run_flops: run + conv, bytes: 2 * bytes }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        let info = if self.params.landmarks >= g.n_q().min(g.n_k()) {
            RunInfo { status: Status::Exact, ..exact_group(&mut g)? }
        } else {
            self.approximate(&mut g)?
        };
        if let Some(filters) = &self.conv {
            self.convolve(&mut g, filters)?;
        }
        Ok(info)
    }

    fn has_lse(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit::heads::{Workload, table};
    use crate::testkit::{
        Case, How, assert_rows_close, assert_same_bits, check_method, golden, reference, run_method, run_with,
    };
    use crate::{MatRef, Options, Workspace, metrics};

    fn options(pairs: &[(&str, &str)]) -> Options {
        pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v))
    }

    #[test]
    fn honours_the_contract() {
        check_method(&METHOD);
    }

    #[test]
    fn reproduces_the_golden_values() {
        let x = golden::inputs();
        let (o, _) =
            run_method(&METHOD, &options(&[("landmarks", "3"), ("pinv", "svd"), ("rcond", "0")]), &x);
        golden::assert_row(&o, 0, &[0.7016710678, 0.5015510713, 0.2314335962]);
        golden::assert_fro(&o, 2.3736317737);
        let (o, _) = run_method(&METHOD, &options(&[("landmarks", "3")]), &x);
        golden::assert_row(&o, 0, &[0.7016710679, 0.5015510714, 0.2314335963]);
        golden::assert_fro(&o, 2.3736317736);
    }

    #[test]
    fn the_small_matrix_has_its_golden_row() {
        use crate::engine::pool::{landmark_weights, pool_rows};
        let x = golden::inputs();
        let (mut q, mut k) = ([0.0; 12], [0.0; 12]);
        let ws = Workspace::single().unwrap();
        ws.install(|cx| {
            pool_rows(MatRef::new(&x.q, 6, 4), &Segments::new(6, 3), cx, &mut q);
            pool_rows(MatRef::new(&x.k, 6, 4), &Segments::new(6, 3), cx, &mut k);
        });
        let c = landmark_weights(MatRef::new(&q, 3, 4), MatRef::new(&k, 3, 4), None, 0.5);
        golden::assert_close(c.row(0), &[0.5161223522, 0.2484335732, 0.2354440747]);
    }

    /// Uses the landmarks even if the budget covers everything.
    #[derive(Debug)]
    struct Forced(Nystromformer);

    impl GroupPlan for Forced {
        fn cost(&self, p: &Problem) -> Cost {
            self.0.cost(p)
        }
        fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
            self.0.approximate(&mut g)
        }
        fn has_lse(&self) -> bool {
            false
        }
    }

    fn forced(x: &Case, pairs: &[(&str, &str)]) -> Vec<f64> {
        let params = Params::from_options(&options(pairs)).unwrap();
        let plan = {
            let forced = Forced(Nystromformer::new(&x.problem, params.clone(), None).unwrap());
            crate::group::boxed(params, forced, &x.problem)
        };
        run_with(&*plan, x, How { lse: false, ..How::default() }).unwrap().o
    }

    #[test]
    fn as_many_landmarks_as_tokens_are_exact_if_the_inverse_is() {
        let x = Case::gaussian(Problem { d_v: 5, ..Problem::new(1, 96, 16) }, 1);
        let (want, _) = reference(&x);
        let svd = forced(&x, &[("landmarks", "96"), ("pinv", "svd"), ("rcond", "0")]);
        assert_rows_close(&svd, &want, 1e-12, "singular values");
        // Six steps do not invert this matrix, which is why the budget rule calls exact attention instead.
        let error = metrics::relative_frobenius(&forced(&x, &[("landmarks", "96")]), &want);
        assert!((0.01..0.3).contains(&error), "razavi(6): {error}");
    }

    /// Queries that are constant inside each of `m` segments.
    fn stepwise(problem: Problem, m: usize, seed: u64) -> Case {
        use crate::engine::pool::Parts;
        let mut x = Case::gaussian(problem, seed);
        let parts = Segments::new(problem.n_q, m);
        for (row, q) in x.q.chunks_exact_mut(problem.d).enumerate() {
            let step =
                Case::gaussian(Problem::new(1, 1, problem.d), 100 + parts.part_of(row % problem.n_q) as u64);
            q.copy_from_slice(&step.q);
        }
        x
    }

    #[test]
    fn queries_constant_inside_segments_are_answered_exactly() {
        for (n_q, n_k, m) in [(60, 60, 6), (67, 97, 7), (97, 61, 9)] {
            let problem = Problem { d_v: 3, ..Problem::new(2, 1, 8).with_kv_heads(1).with_lens(n_q, n_k) };
            let x = stepwise(problem, m, 2);
            let (want, _) = reference(&x);
            let m = m.to_string();
            for bias in ["false", "true"] {
                let set = [("landmarks", m.as_str()), ("pinv", "svd"), ("rcond", "0"), ("len_bias", bias)];
                let (o, _) = run_method(&METHOD, &options(&set), &x);
                assert_rows_close(&o, &want, 1e-9, &format!("{n_q} × {n_k}, {m} landmarks, len_bias {bias}"));
            }
        }
    }

    #[test]
    fn constant_values_are_reproduced_by_an_accurate_inverse_alone() {
        let mut x = Case::gaussian(Problem::new(1, 97, 8), 3);
        x.v.fill(1.5);
        let accurate = [("landmarks", "16"), ("pinv", "svd"), ("rcond", "0")];
        let (o, _) = run_method(&METHOD, &options(&accurate), &x);
        assert_rows_close(&o, &vec![1.5; o.len()], 1e-9, "singular values");
        let (o, _) = run_method(&METHOD, &options(&[("landmarks", "16"), ("iters", "2")]), &x);
        assert!(o.iter().any(|o| (o - 1.5).abs() > 1e-3), "two steps converged");
    }

    #[test]
    fn outputs_are_linear_in_the_values_without_clipping() {
        let p = Problem::new(1, 97, 8);
        let (a, b) = (Case::gaussian(p, 4), Case::gaussian(p, 5));
        let set = options(&[("landmarks", "8")]);
        let with = |v: Vec<f64>| run_method(&METHOD, &set, &Case { v, ..a.clone() }).0;
        let mix = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x - 2.0 * y).collect::<Vec<f64>>();
        let want = mix(&with(a.v.clone()), &with(b.v.clone()));
        assert_rows_close(&with(mix(&a.v, &b.v)), &want, 1e-11, "a − 2b");
    }

    #[test]
    fn clipping_moves_only_what_leaves_the_range_of_the_values() {
        let mut x = Case::gaussian(Problem { d_v: 2, ..Problem::new(1, 97, 8) }, 6);
        x.q.iter_mut().for_each(|q| *q *= 3.0);
        x.v.iter_mut().for_each(|v| *v = v.signum());
        let wild = [("landmarks", "40"), ("pinv", "hyperpower7"), ("iters", "12")];
        let (free, _) = run_method(&METHOD, &options(&wild), &x);
        let (cut, _) = run_method(&METHOD, &options(&wild).with("clip", true), &x);
        let ranges = column_ranges(MatRef::new(&x.v, 97, 2));
        let mut moved = 0;
        for (i, (f, c)) in free.iter().zip(&cut).enumerate() {
            let (low, high) = ranges[i % 2];
            assert_eq!(*c, f.clamp(low, high));
            moved += usize::from(f != c);
        }
        assert!(moved > 0, "nothing was out of range");
    }

    #[test]
    fn the_convolution_adds_filtered_values_of_the_heads_own_group() {
        let p = Problem { d_v: 3, batch: 2, ..Problem::new(4, 21, 8).with_kv_heads(2) };
        let x = Case::gaussian(p, 7);
        let filters = Mat::from_fn(4, 5, |h, u| 1.0 + h as f64 - 0.3 * u as f64);
        let calibration = with_conv(&p, &filters).unwrap();
        let saved = serde_json::to_string(&calibration).unwrap();
        let loaded: Calibration = serde_json::from_str(&saved).unwrap();
        for set in [options(&[("landmarks", "6")]), options(&[("landmarks", "21")])] {
            let run = |c: Option<&Calibration>| {
                let plan = METHOD.plan_with(&p, &set, c).unwrap();
                run_with(&*plan, &x, How { lse: false, ..How::default() }).unwrap().o
            };
            let mut want = run(None);
            for (row, o) in want.chunks_exact_mut(3).enumerate() {
                let (b, h, t) = (row / 84, row / 21 % 4, row % 21);
                for u in 0..5 {
                    let j = t as isize + u as isize - 2;
                    if (0..21).contains(&j) {
                        let v = &x.v[((b * 2 + h / 2) * 21 + j as usize) * 3..][..3];
                        o.iter_mut().zip(v).for_each(|(o, v)| *o += filters[(h, u)] * v);
                    }
                }
            }
            let got = run(Some(&calibration));
            assert_rows_close(&got, &want, 1e-13, "convolution");
            assert_same_bits(&run(Some(&loaded)), &got, "after saving and loading");
        }
    }

    #[test]
    fn a_convolution_for_another_shape_is_refused() {
        let p = Problem::new(4, 21, 8);
        assert!(with_conv(&p, &Mat::zeros(3, 5)).is_err());
        assert!(with_conv(&p, &Mat::zeros(4, 4)).is_err());
        let made = with_conv(&p, &Mat::zeros(4, 5)).unwrap();
        let plan = |p: &Problem| METHOD.plan_with(p, &Options::new(), Some(&made)).map(|_| ());
        assert!(plan(&p).is_ok());
        assert!(matches!(plan(&Problem::new(2, 21, 8)), Err(Error::Calibration { .. })));
        assert!(matches!(plan(&p.with_lens(5, 21)), Err(Error::Unsupported { .. })));
    }

    #[test]
    fn errors_on_synthetic_heads_are_the_specified_ones() {
        let wanted = [
            (Workload::Iid, 0.84, 0.74),
            (Workload::Smooth, 0.29, 0.16),
            (Workload::Clustered, 0.88, 1.66),
            (Workload::Decaying, 0.98, 1.02),
        ];
        for (workload, few, many) in wanted {
            for (m, want) in [("64", few), ("256", many)] {
                // If the error exceeds one, seeds differ by more than the tolerance.
                let seeds = if want > 1.1 { table::SEEDS } else { 1 };
                let error = table::error_of(&METHOD, &[("landmarks", m)], None, workload, seeds);
                table::assert_error(error, want, &format!("{workload:?}, {m} landmarks"));
            }
        }
    }

    #[test]
    fn dropping_small_singular_values_keeps_the_approximation_usable() {
        let error = |workload, m, rcond| {
            let set = [("landmarks", m), ("pinv", "svd"), ("rcond", rcond)];
            table::error_of(&METHOD, &set, None, workload, table::SEEDS)
        };
        table::assert_error(error(Workload::Iid, "64", "1e-2"), 0.84, "iid, 64");
        table::assert_error(error(Workload::Smooth, "64", "1e-2"), 0.36, "smooth, 64");
        table::assert_error(error(Workload::Smooth, "256", "1e-2"), 0.11, "smooth, 256");
        // An accurate inverse is worse than an output of zero.
        assert!(error(Workload::Smooth, "64", "0") > 1.0);
    }
}
