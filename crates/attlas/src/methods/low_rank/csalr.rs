//! CSALR, compressed self-attention with low-rank approximation: landmarks with a small matrix made invertible.
//!
//! **Idea.** Approximate self-attention through averages of queries and keys over parts of the sequence, and add one
//! wherever a query landmark and a key landmark average the same tokens, so that the small matrix can be inverted
//! directly.
//!
//! **Math.** With means $\bar Q, \bar K$ over the same $m$ parts, $C' = \operatorname{softmax}(\beta \bar Q \bar K^\top) + I$,
//! $U = \operatorname{attn}(\bar Q, K, V)$ and $T = C'^{-1} U$ by LU: $O_i = \operatorname{attn}(q_i, \bar K, T) + T_{s(i)}$, where
//! $s(i)$ is the part of token $i$; that is $F' = F + M$ with $M$ the membership indicator. Parts are consecutive
//! segments, or windows of a grid that the tokens fill row by row. Where LU's reciprocal condition estimate falls
//! below 1e-6 (single) or 1e-12 (double precision), the inverse uses singular values above this share of the largest,
//! and the figure `svd_fallback` reports it.
//!
//! **Reference.** chen2020csalr. The condition for the added one is garbled in the survey: it is that landmark $i$
//! of the queries and landmark $j$ of the keys average the same positions. The change to the first factor is
//! interpreted as membership, which keeps both exactness properties below; `first = none` leaves the factor unchanged
//! and loses them.
//!
//! **Cost.** $4 m n (d + d_v) + 2m^2(d + d_v) + \frac23 m^3$ operations; $O(m^2 + m(d + d_v))$ memory.
//!
//! **Guarantees.** $C$ is positive and its rows sum to one, so by Perron and Frobenius $-1$ is no eigenvalue and $C'$
//! is nonsingular; its condition is not bounded ($C = \begin{pmatrix} e & 1-e \\ 1-e & e \end{pmatrix}$ gives $1/e$). Exact when every token
//! is a landmark, and when queries are constant inside each part, for any keys and values. Weights may be negative and
//! sum to one, or to one half with `first = none`. Only self-attention without a causal mask. Query rows past the valid
//! length of a padded sequence are padding as well and give zero.
//!
//! **When to use.** As a better-conditioned, less accurate alternative to `nystromformer`; for images with
//! `pool = windows`.

use crate::engine::exact_group;
use crate::engine::landmarks::{landmark_attention, landmark_flops};
use crate::engine::pool::{Parts, Segments};
use crate::group::{Group, GroupPlan};
use crate::method::{
    Accepted, Budget, Claims, Cost, Family, Law, Method, RunInfo, Spec, Status, Support, Tunable,
};
use crate::{DType, Mask, Problem, Real, Result};
use attlas_num::Mat;
use attlas_num::kernels::axpy;
use attlas_num::linalg::{Lu, lu, matmul, pinv};

/// Registry entry.
pub static METHOD: Method = Method {
    id: "csalr",
    family: Family::LowRank,
    title: "CSALR: landmarks with an identity added to the small matrix",
    reference: "chen2020csalr",
    claims: Claims {
        causal: false,
        exact_at: &[("landmarks", Budget::NumTokens)],
        row_stochastic: false,
        lse: false,
        exponent: 1.0,
        except: &[
            (Law::KeyOrder, "landmarks are means of neighbouring keys"),
            (Law::QueriesAlone, "landmarks are means of queries, so every row depends on all of them"),
        ],
        ..Claims::BASE
    },
    probes: &[
        &[("landmarks", "8")],
        &[("landmarks", "13"), ("first", "none")],
        &[("landmarks", "12"), ("pool", "windows")],
        &[("landmarks", "9"), ("pool", "windows"), ("grid_width", "7")],
    ],
    tunable: &[Tunable::budget("landmarks")],
    ..Method::of::<Params>()
};

crate::choices! {
    /// Tokens averaged into one landmark.
    pub enum Pool {
        /// Consecutive tokens.
        Segments = "segments",
        /// Windows of a grid that the tokens fill row by row.
        Windows = "windows",
    }
}

crate::choices! {
    /// Term added to the first factor.
    pub enum First {
        /// One where a token belongs to the landmark's part.
        Member = "member",
        /// Nothing.
        None = "none",
    }
}

crate::params! {
    /// Parameters of [`Csalr`].
    pub struct Params {
        /// Number of parts whose means are the landmarks (a maximum with windows); attention is exact if it reaches the
        /// number of tokens.
        landmarks: usize = 64, in 1..=1 << 20;
        /// Tokens averaged into one landmark: segments of consecutive tokens, or windows of a grid.
        pool: Pool = Pool::Segments;
        /// Columns of the grid; auto takes the square root of the number of tokens, rounded up. The last row may be
        /// incomplete. Used by windows only.
        grid_width: Option<usize> = None, in 1..=1 << 30;
        /// Term added to the first factor: member (one where the token belongs to the part), or none.
        first: First = First::Member;
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
        .and_unless(
            p.n_q != p.n_k,
            format!(
                "queries and keys must be the same tokens, here {} queries meet {} keys: use nystromformer for \
                 cross-attention",
                p.n_q, p.n_k
            ),
        )
    }

    fn build(self, _: Accepted<'_>) -> Result<impl GroupPlan> {
        Csalr::new(self)
    }
}

/// The plan: its parameters.
#[derive(Debug)]
pub struct Csalr {
    params: Params,
}

/// Windows of a grid that tokens fill row by row, as lists of tokens.
#[derive(Debug)]
struct Windows {
    members: Vec<Vec<usize>>,
    part_of: Vec<usize>,
}

impl Windows {
    /// Cuts the grid into at most `count` windows of nearly equal sides, as square as its proportions allow.
    fn new(n: usize, count: usize, width: usize) -> Self {
        let width = width.clamp(1, n.max(1));
        let height = n.div_ceil(width).max(1);
        let across =
            ((count as f64 * width as f64 / height as f64).sqrt() as usize).clamp(1, width.min(count));
        let down = (count / across).clamp(1, height);
        let (rows, cols) = (Segments::new(height, down), Segments::new(width, across));
        let cell = |i: usize| rows.part_of(i / width) * across + cols.part_of(i % width);
        let mut members = vec![Vec::new(); down * across];
        (0..n).for_each(|i| members[cell(i)].push(i));
        // Past the end of an incomplete last row a window may be empty.
        members.retain(|m| !m.is_empty());
        let mut part_of = vec![0; n];
        for (part, tokens) in members.iter().enumerate() {
            tokens.iter().for_each(|&i| part_of[i] = part);
        }
        Self { members, part_of }
    }
}

impl Parts for Windows {
    fn count(&self) -> usize {
        self.members.len()
    }

    fn tokens(&self, part: usize) -> impl Iterator<Item = usize> {
        self.members[part].iter().copied()
    }

    fn len_of(&self, part: usize) -> usize {
        self.members[part].len()
    }

    fn part_of(&self, token: usize) -> usize {
        self.part_of[token]
    }
}

impl Csalr {
    /// Creates a plan with these parameters.
    pub(crate) fn new(params: Params) -> Result<Self> {
        params.validate()?;
        Ok(Self { params })
    }

    /// Computes the approximation for any number of landmarks; needs at least one token.
    fn approximate<T: Real>(&self, g: &mut Group<'_, T>) -> Result<RunInfo> {
        let (n, p) = (g.n_k(), &self.params);
        match p.pool {
            Pool::Segments => self.run_parts(g, &Segments::new(n, p.landmarks)),
            Pool::Windows => {
                let width = p.grid_width.unwrap_or_else(|| (n as f64).sqrt().ceil() as usize);
                self.run_parts(g, &Windows::new(n, p.landmarks, width))
            }
        }
    }

    fn run_parts<T: Real>(&self, g: &mut Group<'_, T>, parts: &impl Parts) -> Result<RunInfo> {
        let (n, d_v) = (g.n_k(), g.d_v());
        landmark_attention(
            g,
            parts,
            parts,
            None,
            |c| {
                let (solver, info) = invert(c, T::DTYPE);
                (move |u: &Mat<f64>| solver.and_then(|solver| solver.solve(u)), info)
            },
            |block, t| {
                for (out, i) in block.out.chunks_exact_mut(d_v).zip(block.first..n) {
                    if self.params.first == First::Member {
                        axpy(T::ONE, t.row(parts.part_of(i)), out);
                    }
                }
            },
        )
    }
}

/// Solver that applies $(C + I)^{-1}$.
enum Solver {
    Factors(Lu),
    Inverse(Mat<f64>),
}

impl Solver {
    fn solve(&self, u: &Mat<f64>) -> Option<Mat<f64>> {
        match self {
            Self::Factors(factors) => factors.solve(u.as_ref()).ok(),
            Self::Inverse(inverse) => Some(matmul(inverse.as_ref(), u.as_ref())),
        }
    }
}

/// Inverts $C + I$; `None` if $C$ is not finite.
fn invert(c: &Mat<f64>, dtype: DType) -> (Option<Solver>, RunInfo) {
    let least = if dtype == DType::F32 { 1e-6 } else { 1e-12 };
    let mut shifted = c.clone();
    (0..c.rows()).for_each(|i| shifted[(i, i)] += 1.0);
    let failed = || (None, RunInfo { status: Status::StoppedEarly, ..RunInfo::default() });
    let Ok(factors) = lu(shifted.as_ref()) else { return failed() };
    let rcond = factors.rcond();
    if rcond >= least {
        let info = RunInfo {
            rank: Some(c.rows()),
            figures: [("condition", 1.0 / rcond), ("svd_fallback", 0.0)].into(),
            ..RunInfo::default()
        };
        return (Some(Solver::Factors(factors)), info);
    }
    match pinv(shifted.as_ref(), least) {
        Ok((inverse, rank)) => {
            let info =
                RunInfo { rank: Some(rank), figures: [("svd_fallback", 1.0)].into(), ..RunInfo::default() };
            (Some(Solver::Inverse(inverse)), info)
        }
        Err(_) => failed(),
    }
}

impl GroupPlan for Csalr {
    fn cost(&self, p: &Problem) -> Cost {
        let m = self.params.landmarks;
        let width = (p.d + p.d_v) as u64;
        let bytes = 4 * (p.batch * (p.n_heads * p.n_q + p.n_kv_heads * p.n_k)) as u64 * width;
        if m >= p.n_k {
            return Cost { setup_flops: 0, run_flops: 2 * p.visible_pairs() * width, bytes };
        }
        let (setup, run) = landmark_flops(p, m);
        let solve = (p.batch * p.n_heads * (2 * m * m * m / 3 + 2 * m * m * p.d_v)) as u64;
        Cost { setup_flops: setup + solve, run_flops: run, bytes: 2 * bytes }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        if g.n_k() == 0 {
            return Ok(g.fill_empty());
        }
        let mut info = if self.params.landmarks >= g.n_k() {
            RunInfo { status: Status::Exact, ..exact_group(&mut g)? }
        } else {
            self.approximate(&mut g)?
        };
        let padded = g.n_q() - g.n_k().min(g.n_q());
        if padded > 0 {
            let (n_q, d_v) = (g.n_q(), g.d_v());
            g.out.chunks_mut(n_q * d_v).for_each(|head| head[(n_q - padded) * d_v..].fill(T::ZERO));
            info.empty_rows += (padded * g.q.heads()) as u64;
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
        Case, How, assert_rows_close, check_method, golden, reference, run_method, run_with,
    };
    use crate::{Inputs, Options, Out, Qkv, TensorMut, TensorRef, Workspace, metrics};

    fn options(pairs: &[(&str, &str)]) -> Options {
        pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v))
    }

    #[test]
    fn honours_the_contract() {
        check_method(&METHOD);
    }

    #[test]
    fn reproduces_the_golden_values() {
        let (o, _) = run_method(&METHOD, &options(&[("landmarks", "3")]), &golden::inputs());
        golden::assert_row(&o, 0, &[0.7107147152, 0.5388178140, 0.2520968566]);
        golden::assert_fro(&o, 2.3234427499);
    }

    /// Uses the landmarks even if the budget covers everything.
    #[derive(Debug)]
    struct Forced(Csalr);

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

    #[test]
    fn as_many_landmarks_as_tokens_are_exact_through_the_landmarks() {
        let x = Case::gaussian(Problem { d_v: 5, ..Problem::new(2, 96, 16).with_kv_heads(1) }, 1);
        let (want, _) = reference(&x);
        for pool in ["segments", "windows"] {
            let params =
                Params::from_options(&options(&[("landmarks", "96"), ("pool", pool), ("grid_width", "12")]))
                    .unwrap();
            let plan = crate::group::boxed(params.clone(), Forced(Csalr::new(params).unwrap()), &x.problem);
            let o = run_with(&*plan, &x, How { lse: false, ..How::default() }).unwrap().o;
            assert_rows_close(&o, &want, 1e-12, pool);
        }
    }

    /// Queries that are constant inside each part.
    fn stepwise(problem: Problem, parts: &impl Parts) -> Case {
        let mut x = Case::gaussian(problem, 2);
        for (row, q) in x.q.chunks_exact_mut(problem.d).enumerate() {
            let part = parts.part_of(row % problem.n_q) as u64;
            q.copy_from_slice(&Case::gaussian(Problem::new(1, 1, problem.d), 100 + part).q);
        }
        x
    }

    #[test]
    fn queries_constant_inside_parts_are_answered_exactly() {
        let p = Problem { d_v: 3, ..Problem::new(2, 77, 8).with_kv_heads(1) };
        let segments = [("landmarks", "6")];
        let windows = [("landmarks", "6"), ("pool", "windows"), ("grid_width", "11")];
        for (x, own, other) in [
            (stepwise(p, &Segments::new(77, 6)), &segments[..], &windows[..]),
            (stepwise(p, &Windows::new(77, 6, 11)), &windows[..], &segments[..]),
        ] {
            let (want, _) = reference(&x);
            let (o, _) = run_method(&METHOD, &options(own), &x);
            assert_rows_close(&o, &want, 1e-11, "queries constant inside parts");
            let error = |set: Options| metrics::relative_frobenius(&run_method(&METHOD, &set, &x).0, &want);
            assert!(error(options(own).with("first", "none")) > 0.05, "membership is not needed");
            assert!(error(options(other)) > 0.05, "the other parts are as good");
        }
    }

    #[test]
    fn windows_tile_the_grid() {
        let w = Windows::new(24, 6, 6);
        assert_eq!(w.count(), 6);
        assert_eq!(w.members[0], [0, 1, 6, 7]);
        assert_eq!(w.members[5], [16, 17, 22, 23]);
        for (n, count, width) in [(97, 12, 10), (97, 9, 7), (5, 4, 4), (1, 3, 9), (50, 50, 7), (10, 3, 1)] {
            let w = Windows::new(n, count, width);
            let mut all: Vec<usize> = w.members.concat();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..n) && w.count() <= count, "{n} {count} {width}");
            assert!((0..n).all(|i| w.members[w.part_of(i)].contains(&i)));
            assert!((0..w.count()).all(|s| w.len_of(s) > 0));
        }
    }

    #[test]
    fn weights_sum_to_one_with_membership_and_to_one_half_without() {
        let mut x = Case::gaussian(Problem::new(1, 97, 8), 3);
        x.v.fill(3.0);
        for (first, want) in [("member", 3.0), ("none", 1.5)] {
            let (o, _) = run_method(&METHOD, &options(&[("landmarks", "16"), ("first", first)]), &x);
            assert_rows_close(&o, &vec![want; o.len()], 1e-12, first);
        }
    }

    #[test]
    fn the_condition_of_the_shifted_matrix_is_not_bounded() {
        let u = Mat::from_vec(vec![1.0, 2.0], 2, 1);
        for e in [0.3f64, 1e-3, 1e-9] {
            let c = Mat::from_vec(vec![e, 1.0 - e, 1.0 - e, e], 2, 2);
            let (solver, info) = invert(&c, DType::F64);
            // cond₁ = cond₂ for this matrix, 1/e.
            assert!((info.figures["condition"] * e - 1.0).abs() < 1e-6, "{info:?}");
            let t = solver.unwrap().solve(&u).unwrap();
            assert!(((1.0 + e) * t[(0, 0)] + (1.0 - e) * t[(1, 0)] - 1.0).abs() < 1e-15 / e);
        }
    }

    #[test]
    fn a_swap_of_two_landmarks_is_solved_by_singular_values() {
        let swap = Mat::from_vec(vec![0.0, 1.0, 1.0, 0.0], 2, 2);
        let (solver, info) = invert(&swap, DType::F64);
        assert_eq!((info.figures["svd_fallback"], info.rank), (1.0, Some(1)));
        // The least-squares solution of least norm of t₀ + t₁ = 1, t₀ + t₁ = 2.
        let t = solver.unwrap().solve(&Mat::from_vec(vec![1.0, 2.0], 2, 1)).unwrap();
        assert!((t[(0, 0)] - 0.75).abs() < 1e-14 && (t[(1, 0)] - 0.75).abs() < 1e-14);
    }

    #[test]
    fn padded_rows_are_zero_and_the_rest_is_the_shorter_sequence() {
        let long = Problem::new(1, 40, 8);
        let x = Case::gaussian(long, 4);
        let short = Case { problem: Problem::new(1, 33, 8), q: x.q[..33 * 8].to_vec(), ..x.with_keys(33) };
        let short = Case { problem: Problem { n_q: 33, ..short.problem }, ..short };
        for m in ["5", "36"] {
            let set = options(&[("landmarks", m)]);
            let (want, _) = run_method(&METHOD, &set, &short);
            let view = |x| TensorRef::bhnd(x, [1, 1, 40, 8]).unwrap();
            let qkv = Qkv { key_lens: Some(&[33]), ..Qkv::new(view(&x.q), view(&x.k), view(&x.v)) };
            let mut o = vec![f64::NAN; 320];
            let out = Out::new(TensorMut::bhnd(&mut o, [1, 1, 40, 8]).unwrap());
            let mut ws = Workspace::single().unwrap();
            let plan = METHOD.plan(&long, &set).unwrap();
            let info = plan.execute(&Inputs::F64(qkv), &mut out.into(), &mut ws).unwrap();
            assert_eq!(info.empty_rows, 7);
            assert_rows_close(&o[..264], &want, 1e-14, "padded");
            assert!(o[264..].iter().all(|&o| o == 0.0));
        }
    }

    #[test]
    fn errors_on_synthetic_heads_are_the_specified_ones() {
        let wanted = [
            (Workload::Iid, 0.84, 0.81),
            (Workload::Smooth, 0.41, 0.22),
            (Workload::Clustered, 0.98, 0.96),
            (Workload::Decaying, 1.00, 1.00),
        ];
        for (workload, few, many) in wanted {
            for (m, want) in [("64", few), ("256", many)] {
                let error = table::error_of(&METHOD, &[("landmarks", m)], None, workload, 1);
                table::assert_error(error, want, &format!("{workload:?}, {m} landmarks"));
            }
        }
    }
}
