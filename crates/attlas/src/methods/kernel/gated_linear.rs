//! Squared-ReLU attention with a linear far field: the attention inside GAU and FLASH.
//!
//! **Idea.** Inside a chunk, weights are squared rectified scores and are not normalised; everything outside goes
//! through one matrix, without features and without a normaliser. A gate outside the method compensates for the missing
//! softmax.
//!
//! **Math.** With chunks of $C$ positions, scores $x_{ij} = \tau \langle q_i, k_j\rangle$ and the chunk $g$ of row $i$:
//! $o_i = \sum_{j \in g} a_{ij} v_j + \tau\, \tilde q_i^\top M_i$. *Near*: $a = \mathrm{relu}(x/n + b)^2$ with a configured length $n$
//! (`scaling = paper_code`), or $\mathrm{relu}(x + b)^2 / (n\, d)$ with the number $n$ of chunk keys that the row sees
//! (`per_length`); the mask applies after the activation. *Far*: causally
//! $M_i = \sum_{j < gC} \tilde k_j v_j^\top / (gC)$, zero in the first chunk; without a mask
//! $\sum_j \tilde k_j v_j^\top / n_k$ over all keys. The last chunk is shorter, never padded. $\tau$ is the problem's
//! scale, 1 in the paper.
//!
//! Norm, projections with SiLU, the affine views of a shared $Z$, the gate $U \odot$ and the output projection are the layer
//! [`gau`](crate::layers::gau). The method takes the views as its inputs: with `views = split` the first half of the
//! columns of queries and keys is the quadratic view and the second half the linear one ($\tilde q$, $\tilde k$); with
//! `shared` the whole row serves as both. A constant bias is a parameter.
//!
//! **Reference.** hua2022. Only the far field is linear: squared ReLU has no small feature map. Public code divides the
//! causal far field by the chunk length instead of the running count.
//!
//! **Cost.** $n C (d + d_v)$ causally, twice that without a mask, plus $4 n\, d\, d_v$; state $d\, d_v$ and one chunk.
//!
//! **Guarantees.** Deterministic, equal to the definition up to rounding. With a causal mask, a single chunk of all
//! tokens has no far field (FLASH is GAU). Weights are not normalised: it does not approximate softmax.
//!
//! **When to use.** Inside layers trained with it.

use crate::engine::poly_state::ROWS;
use crate::group::{Group, GroupIndex, GroupPlan, GroupStream};
use crate::method::{Accepted, Claims, Cost, Family, Law, Method, Needs, RunInfo, Spec, Support, Tunable};
use crate::workspace::Context;
use crate::{Mask, MatRef, Problem, Real, Result};
use attlas_num::kernels::{Op, axpy, gemm};
use attlas_num::par::*;
use std::ops::Range;

/// Registry entry.
pub static METHOD: Method = Method {
    id: "gated_linear",
    family: Family::Kernel,
    title: "Squared-ReLU chunks with a linear far field (GAU, FLASH)",
    reference: "hua2022",
    claims: Claims {
        decode: true,
        row_stochastic: false,
        softmax: false,
        lse: false,
        exponent: 1.0,
        needs: Needs::Training,
        except: &[(Law::KeyOrder, "which keys are near depends on their positions")],
        ..Claims::BASE
    },
    probes: &[
        &[("block", "16")],
        &[("block", "11"), ("scaling", "per_length"), ("bias", "0.1")],
        &[("block", "32"), ("views", "split"), ("length", "8")],
        &[("block", "100"), ("far", "false")],
    ],
    tunable: &[Tunable::budget("block")],
    ..Method::of::<Params>()
};

crate::params! {
    /// Parameters of [`GatedLinear`].
    pub struct Params {
        /// Positions per chunk.
        block: usize = 256, in 1..=1 << 30;
        /// Map from scores to weights.
        scaling: Scaling = Scaling::PaperCode;
        /// Length that divides the scores with `paper_code`; auto is the chunk.
        length: Option<usize> = None, in 1..=1 << 30;
        /// Added to scores before the rectifier.
        bias: f64 = 0.0, in -1e6..=1e6;
        /// Columns of the quadratic and the linear view: the whole row for both, or one half each.
        views: Views = Views::Shared;
        /// Add the linear far field.
        far: bool = true;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn supports(&self, p: &Problem) -> Support {
        Support::unless(
            self.views == Views::Split && !p.d.is_multiple_of(2),
            "split views need an even width of queries and keys",
        )
    }

    fn build(self, x: Accepted<'_>) -> Result<impl GroupPlan> {
        GatedLinear::new(x.problem, self)
    }
}

crate::choices! {
    /// Map from scores to weights.
    pub enum Scaling {
        /// Divided by a configured length, then rectified and squared.
        PaperCode = "paper_code",
        /// Rectified and squared, then divided by the width and the number of chunk keys that the row sees.
        PerLength = "per_length",
    }
}

crate::choices! {
    /// Columns of the two views.
    pub enum Views {
        /// All columns serve both views.
        Shared = "shared",
        /// The first half is quadratic, the second linear.
        Split = "split",
    }
}

/// The plan.
#[derive(Clone, Debug)]
pub struct GatedLinear {
    params: Params,
    scale: f64,
}

impl GatedLinear {
    /// Creates a plan with these parameters.
    pub(crate) fn new(problem: &Problem, params: Params) -> Result<Self> {
        params.validate()?;
        Ok(Self { params, scale: problem.scale })
    }

    /// Returns the columns of the quadratic and of the linear view.
    fn columns(&self, d: usize) -> (Range<usize>, Range<usize>) {
        match self.params.views {
            Views::Shared => (0..d, 0..d),
            Views::Split => (0..d / 2, d / 2..d),
        }
    }

    /// Adds the keys of a chunk to the far state, `width × d_v`.
    fn absorb<T: Real>(&self, k: MatRef<'_, T>, v: MatRef<'_, T>, state: &mut [T], cx: Context<'_>) {
        let k = columns_of(k, self.columns(k.cols()).1);
        gemm(cx.schedule.isa, T::ONE, Op::T(k), Op::N(v), T::ONE, state, v.cols(), cx.scratch);
    }

    /// Writes rows: the far field from `state` over `count` keys, plus the first `seen(i)` near keys for row `i`.
    #[allow(clippy::too_many_arguments)]
    fn attend<T: Real>(
        &self,
        q: MatRef<'_, T>,
        state: &[T],
        count: usize,
        near: &NearChunk<'_, T>,
        seen: &dyn Fn(usize) -> usize,
        out: &mut [T],
        cx: Context<'_>,
    ) {
        let (rows, n, d_v) = (q.rows(), near.k.rows(), near.v.cols());
        let (quadratic, linear) = self.columns(q.cols());
        let isa = cx.schedule.isa;
        if self.params.far && count > 0 {
            let state = MatRef::new(state, linear.len(), d_v);
            let factor = T::from_f64(self.scale / count as f64);
            gemm(isa, factor, Op::N(columns_of(q, linear)), Op::N(state), T::ZERO, out, d_v, cx.scratch);
        } else {
            out.fill(T::ZERO);
        }
        if n == 0 {
            return;
        }
        let width = quadratic.len() as f64;
        let (before, per_key) = match self.params.scaling {
            Scaling::PaperCode => (self.scale / self.params.length.unwrap_or(self.params.block) as f64, 0.0),
            Scaling::PerLength => (self.scale, 1.0 / width),
        };
        let mut weights = cx.scratch.take::<T>(rows * n);
        let (q, k) = (columns_of(q, quadratic.clone()), columns_of(near.k, quadratic));
        gemm(isa, T::from_f64(before), Op::N(q), Op::T(k), T::ZERO, &mut weights, n, cx.scratch);
        let bias = T::from_f64(self.params.bias);
        for (i, row) in weights.chunks_exact_mut(n).enumerate() {
            let seen = seen(i);
            row[seen..].fill(T::ZERO);
            let after = if per_key > 0.0 { T::from_f64(per_key / seen.max(1) as f64) } else { T::ONE };
            for x in &mut row[..seen] {
                let y = *x + bias;
                // Not `max`, which would turn NaN into 0.
                *x = if y < T::ZERO { T::ZERO } else { y * y * after };
            }
        }
        let weights = MatRef::new(&weights, rows, n);
        let finite = MatRef::new(near.finite, n, d_v);
        gemm(isa, T::ONE, Op::N(weights), Op::N(finite), T::ONE, out, d_v, cx.scratch);
        for &j in near.spoiled {
            for (i, out) in out.chunks_exact_mut(d_v).enumerate().filter(|(i, _)| j < seen(*i)) {
                axpy(weights.at(i, j), near.v.row(j), out);
            }
        }
    }
}

/// Keys of a chunk, and its values with non-finite rows set to zero, because a weight of zero would still spread them.
struct NearChunk<'a, T> {
    k: MatRef<'a, T>,
    v: MatRef<'a, T>,
    finite: &'a [T],
    spoiled: &'a [usize],
}

/// Copies the finite rows of `v`; the others become zero and are returned.
fn finite_into<T: Real>(v: MatRef<'_, T>, out: &mut [T]) -> Vec<usize> {
    let mut spoiled = Vec::new();
    for (j, (row, out)) in v.iter_rows().zip(out.chunks_exact_mut(v.cols())).enumerate() {
        if row.iter().all(|x| x.is_finite()) {
            out.copy_from_slice(row);
        } else {
            out.fill(T::ZERO);
            spoiled.push(j);
        }
    }
    spoiled
}

/// Returns some columns of a matrix.
fn columns_of<T: Real>(x: MatRef<'_, T>, columns: Range<usize>) -> MatRef<'_, T> {
    if x.rows() == 0 {
        return MatRef::new(&[], 0, columns.len());
    }
    MatRef::with_stride(&x.data()[columns.start..], x.rows(), columns.len(), x.stride())
        .unwrap_or_else(|| unreachable!("columns of a matrix lie inside it"))
}

/// Some rows of one chunk of one head.
struct Job<'a, T> {
    q: MatRef<'a, T>,
    position: usize,
    out: &'a mut [T],
}

impl GroupPlan for GatedLinear {
    fn cost(&self, p: &Problem) -> Cost {
        let rows = (p.batch * p.n_heads * p.n_q) as u64;
        let keys = (p.batch * p.n_kv_heads * p.n_k) as u64;
        let sides = if p.mask == Mask::Causal { 1 } else { 2 };
        let near = sides * self.params.block.min(p.n_k) * (p.d + p.d_v);
        let far = if self.params.far { 2 * p.d * p.d_v } else { 0 };
        Cost {
            setup_flops: keys * far as u64,
            run_flops: rows * (near + far) as u64,
            bytes: 4 * (rows + keys) * (p.d + p.d_v) as u64,
        }
    }

    fn has_lse(&self) -> bool {
        false
    }

    fn run<T: Real>(&self, g: Group<'_, T>) -> Result<RunInfo> {
        let mut g = g;
        let (k, v, cx) = (g.k, g.v, g.cx);
        let (n_q, n_k, d_v, heads) = (g.n_q(), k.rows(), g.d_v(), g.q.heads());
        if n_k == 0 {
            return Ok(g.fill_empty());
        }
        g.lse.fill(T::NEG_INFINITY);
        if n_q == 0 {
            return Ok(RunInfo::default());
        }
        let block = self.params.block.min(n_k);
        let causal = g.mask == Mask::Causal;
        let chunks = n_k.div_ceil(block);
        let keys_of = |c: usize| c * block..((c + 1) * block).min(n_k);
        let len = self.columns(k.cols()).1.len() * d_v;

        // The state of each chunk, then the state before each chunk (causal) or, in the last place, of all chunks.
        let mut states = cx.scratch.take_zeroed::<T>(chunks * len);
        if self.params.far {
            states.par_chunks_mut(len).with_max_len(1).enumerate().for_each(|(c, state)| {
                if let Some(own) = if causal { c.checked_sub(1) } else { Some(c) } {
                    self.absorb(k.sub_rows(keys_of(own)), v.sub_rows(keys_of(own)), state, cx);
                }
            });
            for c in 1..chunks {
                let (before, own) = states.split_at_mut(c * len);
                axpy(T::ONE, &before[(c - 1) * len..], &mut own[..len]);
            }
        }

        // Rows are at key positions; without a mask, rows before the first key belong to the first chunk.
        let early = n_q.saturating_sub(n_k);
        let unseen_rows = if causal { early } else { 0 };
        let first = n_k.saturating_sub(n_q);
        let mut jobs: Vec<Vec<Job<'_, T>>> = (0..chunks).map(|_| Vec::new()).collect();
        for (h, out) in g.out.chunks_exact_mut(n_q * d_v).enumerate() {
            let (zero, mut rest) = out.split_at_mut(unseen_rows * d_v);
            zero.fill(T::ZERO);
            let q = g.q.head(h);
            let mut row = unseen_rows;
            while row < n_q {
                let position = (row + first).saturating_sub(early);
                let chunk = position / block;
                let left = if row < early { early - row } else { keys_of(chunk).end - position };
                let rows = left.min(ROWS).min(n_q - row);
                let (own, tail) = std::mem::take(&mut rest).split_at_mut(rows * d_v);
                rest = tail;
                jobs[chunk].push(Job { q: q.sub_rows(row..row + rows), position, out: own });
                row += rows;
            }
        }
        let states = &states;
        let visited: u64 = jobs
            .into_par_iter()
            .with_max_len(1)
            .enumerate()
            .map(|(c, jobs)| {
                let keys = keys_of(c);
                let (k, v) = (k.sub_rows(keys.clone()), v.sub_rows(keys.clone()));
                let mut finite = cx.scratch.take::<T>(keys.len() * d_v);
                let spoiled = finite_into(v, &mut finite);
                let near = NearChunk { k, v, finite: &finite, spoiled: &spoiled };
                let last = if causal { c } else { chunks - 1 };
                let state = &states[last * len..(last + 1) * len];
                let count = if causal { keys.start } else { n_k };
                let mut visited = 0;
                for job in jobs {
                    let from = job.position - keys.start;
                    let seen = |i: usize| if causal { from + i + 1 } else { keys.len() };
                    visited += (0..job.q.rows()).map(|i| seen(i) as u64).sum::<u64>();
                    self.attend(job.q, state, count, &near, &seen, job.out, cx);
                }
                visited
            })
            .sum();
        let cached = len + self.params.block * (k.cols() + d_v);
        Ok(RunInfo {
            keys_visited: visited,
            empty_rows: (unseen_rows * heads) as u64,
            figures: [("decode_bytes", (cached * size_of::<T>()) as f64)].into(),
            ..RunInfo::default()
        })
    }

    fn stream<T: Real>(&self, p: &Problem, _: GroupIndex) -> Option<Box<dyn GroupStream<T>>> {
        let len = self.columns(p.d).1.len() * p.d_v;
        Some(Box::new(ChunkStream {
            plan: self.clone(),
            d: p.d,
            d_v: p.d_v,
            state: vec![T::ZERO; len],
            folded: 0,
            k: Vec::new(),
            v: Vec::new(),
        }))
    }
}

/// The far state and the current chunk.
#[derive(Debug)]
struct ChunkStream<T> {
    plan: GatedLinear,
    d: usize,
    d_v: usize,
    state: Vec<T>,
    folded: usize,
    k: Vec<T>,
    v: Vec<T>,
}

impl<T: Real> GroupStream<T> for ChunkStream<T> {
    fn push(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, cx: Context<'_>) -> Result<()> {
        for (k, v) in k.iter_rows().zip(v.iter_rows()) {
            let n = self.v.len() / self.d_v;
            if n == self.plan.params.block {
                let (k, v) = (MatRef::new(&self.k, n, self.d), MatRef::new(&self.v, n, self.d_v));
                self.plan.absorb(k, v, &mut self.state, cx);
                self.folded += n;
                self.k.clear();
                self.v.clear();
            }
            self.k.extend_from_slice(k);
            self.v.extend_from_slice(v);
        }
        Ok(())
    }

    fn attend(
        &mut self,
        q: MatRef<'_, T>,
        _: T,
        out: &mut [T],
        lse: &mut [T],
        cx: Context<'_>,
    ) -> Result<RunInfo> {
        lse.fill(T::NEG_INFINITY);
        let n = self.v.len() / self.d_v;
        let (k, v) = (MatRef::new(&self.k, n, self.d), MatRef::new(&self.v, n, self.d_v));
        let mut finite = cx.scratch.take::<T>(n * self.d_v);
        let spoiled = finite_into(v, &mut finite);
        let near = NearChunk { k, v, finite: &finite, spoiled: &spoiled };
        self.plan.attend(q, &self.state, self.folded, &near, &|_| n, out, cx);
        Ok(RunInfo::visited((q.rows() * n) as u64))
    }

    fn state_bytes(&self) -> usize {
        (self.state.len() + self.k.len() + self.v.len()) * size_of::<T>()
    }
}

#[cfg(test)]
mod tests {
    use super::METHOD;
    use crate::testkit::{Case, assert_rows_close, check_method, run_method};
    use crate::{Mask, Options, Problem};

    #[test]
    fn honours_the_contract() {
        check_method(&METHOD);
    }

    fn run(x: &Case, options: &Options) -> Vec<f64> {
        run_method(&METHOD, options, x).0
    }

    /// FLASH by its definition, chunks of `c`, paper scaling; the far field is divided by the running count.
    fn by_definition(x: &Case, c: usize, bias: f64, split: bool) -> Vec<f64> {
        let p = &x.problem;
        let causal = p.mask == Mask::Causal;
        let (near, far) = if split { (0..p.d / 2, p.d / 2..p.d) } else { (0..p.d, 0..p.d) };
        let mut o = vec![0.0; p.n_q * p.d_v];
        for (i, out) in o.chunks_exact_mut(p.d_v).enumerate() {
            let start = i / c * c;
            for j in 0..p.n_k {
                let score = |cols: std::ops::Range<usize>| {
                    let (q, k) = (&x.q[i * p.d..][cols.clone()], &x.k[j * p.d..][cols]);
                    p.scale * q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>()
                };
                let mut w = 0.0;
                if (start..start + c).contains(&j) && (!causal || j <= i) {
                    w += (score(near.clone()) / c as f64 + bias).max(0.0).powi(2);
                }
                if !causal {
                    w += score(far.clone()) / p.n_k as f64;
                } else if j < start {
                    w += score(far.clone()) / start as f64;
                }
                out.iter_mut().zip(&x.v[j * p.d_v..]).for_each(|(o, v)| *o += w * v);
            }
        }
        o
    }

    #[test]
    fn chunks_and_far_field_follow_the_definition() {
        for n in [1, 2, 63, 64, 65, 203] {
            for p in [
                Problem { d_v: 3, ..Problem::new(1, n, 6) },
                Problem { d_v: 3, ..Problem::new(1, n, 6).causal() },
            ] {
                let x = Case::gaussian(p, 1);
                for c in [1, 7, 64] {
                    for (bias, split) in [(0.0, false), (0.2, true)] {
                        let views = if split { "split" } else { "shared" };
                        let options = Options::new()
                            .with("block", c)
                            .with("length", c)
                            .with("bias", bias)
                            .with("views", views);
                        let want = by_definition(&x, c, bias, split);
                        assert_rows_close(
                            &run(&x, &options),
                            &want,
                            1e-12,
                            &format!("{n} tokens, chunks of {c}"),
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_causal_chunk_of_all_tokens_has_no_far_field() {
        let x = Case::gaussian(Problem::new(1, 50, 8).causal(), 2);
        let options = Options::new().with("block", 50usize);
        assert_eq!(run(&x, &options), run(&x, &options.clone().with("far", false)));
        let short = options.with("block", 16usize).with("length", 50usize);
        assert_ne!(run(&x, &short), run(&x, &short.clone().with("far", false)));
    }

    #[test]
    fn negative_scores_give_nothing() {
        let mut x = Case::gaussian(Problem::new(1, 30, 4), 3);
        x.q.iter_mut().for_each(|q| *q = q.abs());
        x.k.iter_mut().for_each(|k| *k = -k.abs());
        assert!(run(&x, &Options::new().with("far", false)).iter().all(|&o| o == 0.0));
        // With a bias they would differ: padding keys with zeros would add relu(b)².
        assert!(run(&x, &Options::new().with("far", false).with("bias", 1.0)).iter().any(|&o| o != 0.0));
    }

    #[test]
    fn longer_queries_weigh_quadratically() {
        for scaling in ["paper_code", "per_length"] {
            let x = Case::gaussian(Problem::new(1, 40, 5).causal(), 4);
            let long = Case { q: x.q.iter().map(|q| 3.0 * q).collect(), ..x.clone() };
            let options = Options::new().with("far", false).with("scaling", scaling);
            let want: Vec<f64> = run(&x, &options).iter().map(|o| 9.0 * o).collect();
            assert_rows_close(&run(&long, &options), &want, 1e-13, scaling);
        }
    }

    #[test]
    fn one_chunk_without_a_mask_ignores_the_order_of_keys() {
        let x = Case::gaussian(Problem::new(1, 40, 5), 5);
        let reverse = |v: &[f64]| v.chunks(5).rev().flatten().copied().collect::<Vec<f64>>();
        let turned = Case { k: reverse(&x.k), v: reverse(&x.v), ..x.clone() };
        let options = Options::new().with("block", 40usize);
        assert_rows_close(&run(&turned, &options), &run(&x, &options), 1e-12, "reversed");
    }

    #[test]
    fn per_length_weights_do_not_grow_with_the_sequence() {
        let constant = |n: usize| {
            let p = Problem { scale: 1.0, ..Problem::new(1, n, 2) };
            let x = Case {
                q: vec![1.0; 2 * n],
                k: vec![1.0; 2 * n],
                v: vec![1.0; 2 * n],
                ..Case::gaussian(p, 0)
            };
            run(&x, &Options::new().with("far", false).with("scaling", "per_length"))[0]
        };
        // ⟨q, k⟩²/(n d) summed over n keys: 4/2.
        assert!((constant(10) - 2.0).abs() < 1e-12 && (constant(100) - 2.0).abs() < 1e-12);
    }

    #[test]
    fn odd_widths_cannot_be_split() {
        assert!(METHOD.plan(&Problem::new(1, 8, 5), &Options::new().with("views", "split")).is_err());
    }
}
