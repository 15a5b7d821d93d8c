//! Attention of a query to pairs of keys, exactly and without an $N \times N^2$ array.
//!
//! For scores $s_{ijk}$, $o_i = \sum_{jk} p_{ijk}\, v^1_j \odot v^2_k$ with one softmax over all pairs jointly. For
//! fixed $j$ every form here is linear in $k^2_k$: $s_{ijk} = \tau\langle a_{ij}, k^2_k\rangle + b_{ij}$, so that
//! ordinary attention with queries $a_{ij}$ gives $(u_{ij}, L_{ij})$, its output over $k$ and its log-sum-exp, and
//! $$o_i = \sum_j w_{ij}\, (u_{ij} \odot v^1_j), \qquad w_{ij} = \frac{e^{L_{ij} + b_{ij}}}{\sum_l e^{L_{il} + b_{il}}},$$
//! with an online softmax over $j$. The inner attention is the exact kernel; sums over $j$ are kept in double
//! precision, because there are $N$ times as many terms as the kernel ever adds.
//!
//! | form | $s_{ijk} / \tau$ | $a_{ij}$ | $b_{ij} / \tau$ |
//! |---|---|---|---|
//! | trilinear | $\sum_l q_l k^1_l k^2_l$ | $q_i \odot k^1_j$ | 0 |
//! | determinant | $\sum_c \det(q^{(c)}, k^{1(c)}, k^{2(c)})$, chunks of 3 | $q_i \times k^1_j$ | 0 |
//! | strassen | $q \cdot k^1 + k^1 \cdot k^2 + k^2 \cdot q$ | $q_i + k^1_j$ | $q_i \cdot k^1_j$ |
//!
//! Where every row sees all pairs, the last form is a product of matrices instead: with $X = e^{\tau Q K_1^\top}$, $Y =
//! e^{\tau K_1 K_2^\top}$, $Z = e^{\tau Q K_2^\top}$, a row of $X$ and $Z$ divided by its largest entry and $Y$ by its largest of
//! all,
//! $$o_{ie} = \frac{\sum_k \big[(X \operatorname{diag} v^1_e)\, Y\big]_{ik} v^2_{ke} Z_{ik}}{\sum_k [X Y]_{ik} Z_{ik}}:$$
//! $d_v + 1$ products of $2N^3$ operations and $3N^2$ exponentials, where the loop takes $4N^3 d$ and $N^3$. The
//! products can lose a row whose pairs are all far below the largest entry of $Y$; its denominator shows this, and the
//! loop then recomputes the row.

use super::fold::attend;
use crate::workspace::Context;
use attlas_num::kernels::{Band, Op, dot, exp_in_place, gemm, max};
use attlas_num::par::*;
use attlas_num::{DType, Mat, MatRef, Real};

/// Score of a pair of keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// $\sum_l q_l k^1_l k^2_l$ (Sanford, Hsu, Telgarsky 2023).
    #[default]
    Trilinear,
    /// A sum of 3 × 3 determinants over chunks of three features (Roy et al. 2025); widths divisible by 3.
    Determinant,
    /// The sum of the three inner products (Kozachinskiy et al. 2025).
    Strassen,
}

/// One third-order attention: every row of `q` over the pairs of keys it sees.
///
/// Row `i` sees the pair `(j, k)` if `band1` includes `j` and `band2` includes `k`. A row that sees no pair gives 0 and
/// a log-sum-exp of −∞.
#[derive(Clone, Copy, Debug)]
pub struct Pairwise<'a, T> {
    /// Queries.
    pub q: MatRef<'a, T>,
    /// First keys, as wide as queries.
    pub k1: MatRef<'a, T>,
    /// Second keys, as wide as queries.
    pub k2: MatRef<'a, T>,
    /// First values.
    pub v1: MatRef<'a, T>,
    /// Second values, as wide as first ones.
    pub v2: MatRef<'a, T>,
    /// Factor of the scores.
    pub scale: T,
    /// First keys that a row sees.
    pub band1: Band,
    /// Second keys that a row sees.
    pub band2: Band,
    /// Score of a pair.
    pub form: Form,
}

/// Query rows processed together: enough to amortise the packing of keys.
const ROWS: usize = 96;
/// With fewer query rows than this, first keys become the rows of the inner attention.
const FEW: usize = 8;
/// First keys of one task in that case; fixed, so that results do not depend on threads.
const FIRST_KEYS: usize = 256;

/// Features of values per product of the strassen form.
const FEATURES: usize = 8;
/// Pairs of keys above which the loop computes that form: the product of all keys is then not held.
const MOST_PAIRS: usize = 1 << 26;

/// Returns the denominator below which products of the strassen form lose digits of a row over this many pairs: 1e-30
/// in single and 1e-290 in double precision, or more if the pairs that vanished could together matter.
fn least_denominator<T: Real>(pairs: usize) -> T {
    let (floor, smallest, epsilon) = match T::DTYPE {
        DType::F32 => (1e-30, f64::from(f32::MIN_POSITIVE), f64::from(f32::EPSILON)),
        DType::F64 => (1e-290, f64::MIN_POSITIVE, f64::EPSILON),
    };
    T::from_f64(f64::max(floor, pairs as f64 * smallest / epsilon))
}

/// A running sum over first keys: greatest exponent, normaliser, unnormalised output.
#[derive(Clone)]
struct Running {
    m: f64,
    l: f64,
    acc: Vec<f64>,
}

impl Running {
    fn new(width: usize) -> Self {
        Self { m: f64::NEG_INFINITY, l: 0.0, acc: vec![0.0; width] }
    }

    /// Scales the sums so far to the exponent `m`.
    fn rescale(&mut self, m: f64) {
        if m > self.m {
            let c = (self.m - m).exp();
            self.l *= c;
            self.acc.iter_mut().for_each(|a| *a *= c);
            self.m = m;
        }
    }

    fn add<T: Real>(&mut self, lse: f64, u: &[T], v: &[T]) {
        if lse == f64::NEG_INFINITY {
            return;
        }
        self.rescale(lse);
        let p = (lse - self.m).exp();
        self.l += p;
        for ((a, &u), &v) in self.acc.iter_mut().zip(u).zip(v) {
            *a += p * (u * v).to_f64();
        }
    }

    fn merge(&mut self, other: &Self) {
        if other.m == f64::NEG_INFINITY && !other.l.is_nan() {
            return;
        }
        self.rescale(other.m);
        let p = (other.m - self.m).exp();
        self.l += p * other.l;
        self.acc.iter_mut().zip(&other.acc).for_each(|(a, b)| *a += p * b);
    }

    fn write<T: Real>(&self, out: &mut [T], lse: &mut T) {
        if self.l == 0.0 {
            out.fill(T::ZERO);
            *lse = T::NEG_INFINITY;
            return;
        }
        out.iter_mut().zip(&self.acc).for_each(|(o, a)| *o = T::from_f64(a / self.l));
        *lse = T::from_f64(self.m + self.l.ln());
    }
}

impl<T: Real> Pairwise<'_, T> {
    /// Computes `out` (`rows × d_v`, contiguous) and `lse` (`rows`).
    ///
    /// # Panics
    ///
    /// If the shapes do not fit together, or the width is not divisible by 3 in the determinant form.
    pub fn run(&self, out: &mut [T], lse: &mut [T], cx: Context<'_>) {
        let (rows, d, d_v) = (self.q.rows(), self.q.cols(), self.v1.cols());
        assert!(self.k1.cols() == d && self.k2.cols() == d, "queries and keys of different width");
        assert!(
            self.v1.rows() == self.k1.rows() && self.v2.rows() == self.k2.rows(),
            "as many values as keys"
        );
        assert!(
            self.v2.cols() == d_v && out.len() == rows * d_v && lse.len() == rows,
            "outputs of another size"
        );
        assert!(self.form != Form::Determinant || d.is_multiple_of(3), "determinants need chunks of three");
        if rows == 0 {
            return;
        }
        if d_v == 0 {
            lse.fill(T::NEG_INFINITY);
            return;
        }
        let widest = |band: &Band, n: usize| (0..rows).map(|i| band.range(i, n).len()).max().unwrap_or(0);
        // The outer loop walks over single rows, so it gets the shorter range.
        let swapped = widest(&self.band1, self.k1.rows()) > widest(&self.band2, self.k2.rows());
        let side = if swapped { Side::second(self) } else { Side::first(self) };
        let dense = self.form == Form::Strassen && self.band1 == Band::ALL && self.band2 == Band::ALL;
        if dense && rows >= FEW && (1..=MOST_PAIRS).contains(&(self.k1.rows() * self.k2.rows())) {
            self.run_products(&side, out, lse, cx);
            return;
        }
        if rows < FEW {
            for (i, (out, lse)) in out.chunks_exact_mut(d_v).zip(lse).enumerate() {
                side.row(i, cx).write(out, lse);
            }
            return;
        }
        out.par_chunks_mut(ROWS * d_v).zip(lse.par_chunks_mut(ROWS)).enumerate().for_each(
            |(b, (out, lse))| {
                let sums = side.block(b * ROWS..b * ROWS + lse.len(), cx);
                for ((sum, out), lse) in sums.iter().zip(out.chunks_exact_mut(d_v)).zip(lse) {
                    sum.write(out, lse);
                }
            },
        );
    }

    /// Computes all pairs in the strassen form by products of matrices, and the rows that these lose by the loop of
    /// `side`.
    fn run_products(&self, side: &Side<'_, T>, out: &mut [T], lse: &mut [T], cx: Context<'_>) {
        let (n1, n2, d_v) = (self.k1.rows(), self.k2.rows(), self.v1.cols());
        let isa = cx.schedule.isa;
        let scores = |a: MatRef<'_, T>, b: MatRef<'_, T>| {
            let mut s = vec![T::ZERO; a.rows() * b.rows()];
            gemm(isa, self.scale, Op::N(a), Op::T(b), T::ZERO, &mut s, b.rows(), cx.scratch);
            s
        };
        // Computes e^{s - top} in place and returns the top.
        let raise = |s: &mut [T]| {
            let top = max(s);
            s.iter_mut().for_each(|s| *s -= top);
            exp_in_place(s);
            top.to_f64()
        };
        let mut y = scores(self.k1, self.k2);
        let top_y = raise(&mut y);
        // Values as rows, so that a feature of all keys is contiguous.
        let [v1, v2] = [self.v1, self.v2].map(|v| Mat::from_fn(d_v, v.rows(), |e, j| v.at(j, e)));
        let least = least_denominator::<T>(n1 * n2);
        out.par_chunks_mut(ROWS * d_v).zip(lse.par_chunks_mut(ROWS)).enumerate().for_each(
            |(b, (out, lse))| {
                let (first, rows) = (b * ROWS, lse.len());
                let q = self.q.sub_rows(first..first + rows);
                let (mut x, mut z) = (scores(q, self.k1), scores(q, self.k2));
                let tops: Vec<f64> = x
                    .chunks_exact_mut(n1)
                    .zip(z.chunks_exact_mut(n2))
                    .map(|(x, z)| raise(x) + raise(z))
                    .collect();
                let mut weighted = vec![T::ZERO; FEATURES * rows * n1];
                let mut sums = vec![T::ZERO; FEATURES * rows * n2];
                let mut denominators = vec![T::ZERO; rows];
                // The features of values, and last the denominator, whose values are 1.
                for start in (0..=d_v).step_by(FEATURES) {
                    let group = start..(start + FEATURES).min(d_v + 1);
                    let (weighted, sums) =
                        (&mut weighted[..group.len() * rows * n1], &mut sums[..group.len() * rows * n2]);
                    for (e, weighted) in group.clone().zip(weighted.chunks_exact_mut(rows * n1)) {
                        weighted.copy_from_slice(&x);
                        if e < d_v {
                            for row in weighted.chunks_exact_mut(n1) {
                                row.iter_mut().zip(v1.row(e)).for_each(|(w, &v)| *w *= v);
                            }
                        }
                    }
                    let left = MatRef::new(&*weighted, group.len() * rows, n1);
                    gemm(
                        isa,
                        T::ONE,
                        Op::N(left),
                        Op::N(MatRef::new(&y, n1, n2)),
                        T::ZERO,
                        sums,
                        n2,
                        cx.scratch,
                    );
                    for (e, sums) in group.zip(sums.chunks_exact_mut(rows * n2)) {
                        for (i, (sum, z)) in sums.chunks_exact_mut(n2).zip(z.chunks_exact(n2)).enumerate() {
                            if e < d_v {
                                sum.iter_mut().zip(v2.row(e)).for_each(|(s, &v)| *s *= v);
                                out[i * d_v + e] = dot(sum, z);
                            } else {
                                denominators[i] = dot(sum, z);
                            }
                        }
                    }
                }
                for (i, (out, lse)) in out.chunks_exact_mut(d_v).zip(lse).enumerate() {
                    let total = denominators[i];
                    out.iter_mut().for_each(|o| *o /= total);
                    *lse = T::from_f64(tops[i] + top_y + total.to_f64().ln());
                    let kept = total >= least && total.is_finite() && out.iter().all(|o| o.is_finite());
                    if !kept {
                        side.row(first + i, cx).write(out, lse);
                    }
                }
            },
        );
    }

    /// Counts the pairs that are scored.
    pub fn pairs(&self) -> u64 {
        let seen = |i: usize| {
            self.band1.range(i, self.k1.rows()).len() as u64
                * self.band2.range(i, self.k2.rows()).len() as u64
        };
        (0..self.q.rows()).map(seen).sum()
    }
}

/// One third-order attention with the side of its outer loop chosen.
#[derive(Clone, Copy)]
struct Side<'a, T> {
    q: MatRef<'a, T>,
    outer_k: MatRef<'a, T>,
    outer_v: MatRef<'a, T>,
    outer: Band,
    inner_k: MatRef<'a, T>,
    inner_v: MatRef<'a, T>,
    inner: Band,
    scale: T,
    form: Form,
    /// Exchanging the keys negates a determinant.
    flip: bool,
}

impl<'a, T: Real> Side<'a, T> {
    fn first(p: &Pairwise<'a, T>) -> Self {
        Self {
            q: p.q,
            outer_k: p.k1,
            outer_v: p.v1,
            outer: p.band1,
            inner_k: p.k2,
            inner_v: p.v2,
            inner: p.band2,
            scale: p.scale,
            form: p.form,
            flip: false,
        }
    }

    fn second(p: &Pairwise<'a, T>) -> Self {
        let Pairwise { k1, k2, v1, v2, band1, band2, .. } = *p;
        let swapped = Pairwise { k1: k2, k2: k1, v1: v2, v2: v1, band1: band2, band2: band1, ..*p };
        Self { flip: true, ..Self::first(&swapped) }
    }

    /// Computes the inner query of row `i` and outer key `j`.
    fn query(&self, i: usize, j: usize, a: &mut [T]) {
        let (q, k) = (self.q.row(i), self.outer_k.row(j));
        match self.form {
            Form::Trilinear => a.iter_mut().zip(q).zip(k).for_each(|((a, &q), &k)| *a = q * k),
            Form::Strassen => a.iter_mut().zip(q).zip(k).for_each(|((a, &q), &k)| *a = q + k),
            Form::Determinant => {
                let chunks = a.as_chunks_mut::<3>().0.iter_mut().zip(q.as_chunks::<3>().0);
                for ((a, q), k) in chunks.zip(k.as_chunks::<3>().0) {
                    let (q, k) = if self.flip { (k, q) } else { (q, k) };
                    *a = [q[1] * k[2] - q[2] * k[1], q[2] * k[0] - q[0] * k[2], q[0] * k[1] - q[1] * k[0]];
                }
            }
        }
    }

    /// Returns the contribution of outer key `j` to all logits of row `i`.
    fn offset(&self, i: usize, j: usize) -> f64 {
        match self.form {
            Form::Strassen => (self.scale * dot(self.q.row(i), self.outer_k.row(j))).to_f64(),
            _ => 0.0,
        }
    }

    /// Computes the rows of a block, one outer key after another.
    fn block(&self, rows: std::ops::Range<usize>, cx: Context<'_>) -> Vec<Running> {
        let (d, d_v) = (self.q.cols(), self.outer_v.cols());
        let (n_outer, n_inner) = (self.outer_k.rows(), self.inner_k.rows());
        let mut sums = vec![Running::new(d_v); rows.len()];
        let mut a = vec![T::ZERO; rows.len() * d];
        let first = self.outer.range(rows.start, n_outer).start;
        let last = self.outer.range(rows.end - 1, n_outer).end;
        for j in first..last {
            // Bands are monotone, so the rows that see j are neighbours.
            let sees = |i: &usize| self.outer.range(*i, n_outer).contains(&j);
            let Some(from) = rows.clone().find(sees) else { continue };
            let to = (from..rows.end).take_while(sees).count() + from;
            let a = &mut a[..(to - from) * d];
            for (i, a) in (from..to).zip(a.chunks_exact_mut(d)) {
                self.query(i, j, a);
            }
            let keys = self.inner.range(from, n_inner).start..self.inner.range(to - 1, n_inner).end;
            let keys = keys.start..keys.end.max(keys.start);
            let (u, lse) = attend(
                MatRef::new(a, to - from, d),
                self.inner_k.sub_rows(keys.clone()),
                self.inner_v.sub_rows(keys.clone()),
                self.scale,
                None,
                self.inner.from_row(from).from_key(keys.start),
                cx,
            );
            let v = self.outer_v.row(j);
            for (i, (u, lse)) in (from..to).zip(u.chunks_exact(d_v).zip(lse)) {
                sums[i - rows.start].add(lse.to_f64() + self.offset(i, j), u, v);
            }
        }
        sums
    }

    /// Computes one row, with its outer keys as rows of the inner attention.
    fn row(&self, i: usize, cx: Context<'_>) -> Running {
        let (d, d_v) = (self.q.cols(), self.outer_v.cols());
        let outer = self.outer.range(i, self.outer_k.rows());
        let inner = self.inner.range(i, self.inner_k.rows());
        let starts: Vec<usize> = outer.clone().step_by(FIRST_KEYS).collect();
        let parts: Vec<Running> = starts
            .into_par_iter()
            .map(|start| {
                let part = start..(start + FIRST_KEYS).min(outer.end);
                let mut a = vec![T::ZERO; part.len() * d];
                part.clone().zip(a.chunks_exact_mut(d)).for_each(|(j, a)| self.query(i, j, a));
                let (k, v) = (self.inner_k.sub_rows(inner.clone()), self.inner_v.sub_rows(inner.clone()));
                let (u, lse) = attend(MatRef::new(&a, part.len(), d), k, v, self.scale, None, Band::ALL, cx);
                let mut sum = Running::new(d_v);
                for (j, (u, lse)) in part.zip(u.chunks_exact(d_v).zip(lse)) {
                    sum.add(lse.to_f64() + self.offset(i, j), u, self.outer_v.row(j));
                }
                sum
            })
            .collect();
        let mut total = Running::new(d_v);
        parts.iter().for_each(|part| total.merge(part));
        total
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::Workspace;
    use attlas_num::Mat;
    use attlas_num::tensor::known;

    pub(crate) fn fill(rows: usize, cols: usize, seed: u64, factor: f64) -> Mat<f64> {
        Mat::from_fn(rows, cols, |i, j| factor * known::entry(i * cols + j, seed))
    }

    /// The matrices of the known answers: `factor · fill((n, d), 1…5)`.
    pub(crate) fn known_inputs(n: usize, d: usize, factor: f64) -> Vec<Mat<f64>> {
        (1..=5).map(|s| fill(n, d, s, factor)).collect()
    }

    pub(crate) fn pairwise(x: &[Mat<f64>], scale: f64) -> Pairwise<'_, f64> {
        Pairwise {
            q: x[0].as_ref(),
            k1: x[1].as_ref(),
            k2: x[2].as_ref(),
            v1: x[3].as_ref(),
            v2: x[4].as_ref(),
            scale,
            band1: Band::ALL,
            band2: Band::ALL,
            form: Form::Trilinear,
        }
    }

    pub(crate) fn run(p: &Pairwise<'_, f64>) -> (Mat<f64>, Vec<f64>) {
        let ws = Workspace::single().unwrap();
        let mut out = Mat::from_fn(p.q.rows(), p.v1.cols(), |_, _| f64::NAN);
        let mut lse = vec![f64::NAN; p.q.rows()];
        ws.install(|cx| p.run(out.data_mut(), &mut lse, cx));
        (out, lse)
    }

    /// Evaluates the definition: all logits of all pairs, one softmax.
    fn explicit(p: &Pairwise<'_, f64>) -> (Mat<f64>, Vec<f64>) {
        let mut out = Mat::zeros(p.q.rows(), p.v1.cols());
        let mut lses = Vec::new();
        for i in 0..p.q.rows() {
            let mut logits = Vec::new();
            for j in p.band1.range(i, p.k1.rows()) {
                for k in p.band2.range(i, p.k2.rows()) {
                    let (q, a, b) = (p.q.row(i), p.k1.row(j), p.k2.row(k));
                    let s: f64 = match p.form {
                        Form::Trilinear => (0..q.len()).map(|l| q[l] * a[l] * b[l]).sum(),
                        Form::Strassen => (0..q.len()).map(|l| q[l] * a[l] + a[l] * b[l] + b[l] * q[l]).sum(),
                        Form::Determinant => (0..q.len() / 3)
                            .map(|c| {
                                let (q, a, b) = (&q[3 * c..], &a[3 * c..], &b[3 * c..]);
                                q[0] * (a[1] * b[2] - a[2] * b[1]) - q[1] * (a[0] * b[2] - a[2] * b[0])
                                    + q[2] * (a[0] * b[1] - a[1] * b[0])
                            })
                            .sum(),
                    };
                    logits.push((j, k, p.scale * s));
                }
            }
            let m = logits.iter().map(|x| x.2).fold(f64::NEG_INFINITY, f64::max);
            let l: f64 = logits.iter().map(|x| (x.2 - m).exp()).sum();
            for (j, k, s) in logits {
                for e in 0..p.v1.cols() {
                    out[(i, e)] += (s - m).exp() / l * p.v1.at(j, e) * p.v2.at(k, e);
                }
            }
            lses.push(if l > 0.0 { m + l.ln() } else { f64::NEG_INFINITY });
        }
        (out, lses)
    }

    pub(crate) fn assert_close(a: &Mat<f64>, b: &Mat<f64>, tol: f64) {
        assert_eq!((a.rows(), a.cols()), (b.rows(), b.cols()));
        let worst = a.data().iter().zip(b.data()).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
        assert!(worst <= tol, "largest difference {worst}");
        assert!(a.data().iter().all(|x| !x.is_nan()));
    }

    pub(crate) fn assert_known(out: &Mat<f64>, first: &[f64], last: &[f64], sum: f64) {
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-10, "{a} against {b}");
        first.iter().zip(out.row(0)).for_each(|(&w, &g)| near(g, w));
        last.iter().zip(out.row(out.rows() - 1)).for_each(|(&w, &g)| near(g, w));
        near(out.data().iter().sum(), sum);
    }

    const LAST: [f64; 4] = [1.694897969279, 0.001634378757, 1.153566185230, -0.992485282725];
    const CAUSAL_FIRST: [f64; 4] = [1.654033187653, -1.237363047565, -0.220074659761, 0.468124513859];

    fn window(w: isize) -> Band {
        Band { lower: Some(1 - w), upper: Some(0) }
    }

    #[test]
    fn known_answers_without_mask_causal_and_in_windows() {
        let x = known_inputs(6, 4, 2.0);
        let p = pairwise(&x, 0.5);
        let first = [0.978903464889, 0.091171839529, -1.011137991224, -0.387556252559];
        assert_known(&run(&p).0, &first, &LAST, 3.646672548902);
        let causal = Pairwise { band1: Band::causal(0), band2: Band::causal(0), ..p };
        assert_known(&run(&causal).0, &CAUSAL_FIRST, &LAST, 8.400789358734);
        let windows = Pairwise { band1: window(4), band2: window(2), ..p };
        let last = [2.319624401799, 1.193611720329, -0.808020854290, 2.451385807207];
        assert_known(&run(&windows).0, &CAUSAL_FIRST, &last, 4.379754448444);
        let shift = |m: &Mat<f64>, b: f64| Mat::from_fn(m.rows(), m.cols(), |i, j| m[(i, j)] + b);
        let (k2, v2) = (shift(&x[2], 0.25), shift(&x[4], 1.0));
        let biased = Pairwise { k2: k2.as_ref(), v2: v2.as_ref(), ..windows };
        let first = [0.291454072739, 0.387870514658, -0.049914546826, 0.219674733173];
        let last = [1.093543095219, 2.447968639502, -1.008674892050, 3.993292896683];
        assert_known(&run(&biased).0, &first, &last, -0.086583142319);
    }

    #[test]
    fn known_answers_of_the_strassen_and_determinant_forms() {
        let x = known_inputs(6, 4, 2.0);
        let strassen = Pairwise { form: Form::Strassen, ..pairwise(&x, 0.5) };
        let first = [0.994178933426, 0.997410062839, 0.370242088111, 0.652955317934];
        let last = [0.577524108324, -0.201430135256, -0.440996744061, 1.140501561358];
        assert_known(&run(&strassen).0, &first, &last, 13.182462338164);
        let x = known_inputs(6, 6, 2.0);
        let det = Pairwise { form: Form::Determinant, ..pairwise(&x, 1.0 / 6f64.sqrt()) };
        let first = [-0.789661125381, -0.456375291350, 0.011653856006, -0.539779023758];
        assert_known(&run(&det).0, &first, &[], 4.240556700444);
    }

    #[test]
    fn blocks_equal_the_explicit_formula_for_every_form_and_band() {
        for (rows, n1, n2) in [(3, 11, 7), (9, 5, 13), (100, 20, 20), (7, 300, 2), (1, 1, 1), (8, 0, 4)] {
            let x = [
                fill(rows, 6, 1, 2.0),
                fill(n1, 6, 2, 2.0),
                fill(n2, 6, 3, 2.0),
                fill(n1, 5, 4, 1.0),
                fill(n2, 5, 5, 1.0),
            ];
            for form in [Form::Trilinear, Form::Determinant, Form::Strassen] {
                for (b1, b2) in [
                    (Band::ALL, Band::ALL),
                    (Band::causal(n1 as isize - rows as isize), Band::causal(n2 as isize - rows as isize)),
                    (window(4), window(2)),
                    (window(1), window(9)),
                ] {
                    let p = Pairwise { form, band1: b1, band2: b2, ..pairwise(&x, 0.7) };
                    let (got, want) = (run(&p), explicit(&p));
                    assert_close(&got.0, &want.0, 1e-13 * 40.0);
                    for (a, b) in got.1.iter().zip(&want.1) {
                        assert!(a == b || (a - b).abs() < 1e-12, "{a} against {b}");
                    }
                }
            }
        }
    }

    #[test]
    fn products_of_the_strassen_form_equal_its_loop_where_they_lose_rows_too() {
        // Key lengths at which the largest pair of keys dwarfs the pairs that most queries prefer.
        for (factor, lost) in [(1.0, false), (6.0, false), (40.0, true)] {
            let x = [
                fill(21, 6, 1, factor),
                fill(19, 6, 2, factor),
                fill(23, 6, 3, factor),
                fill(19, 17, 4, 1.0),
                fill(23, 17, 5, 1.0),
            ];
            let p = Pairwise { form: Form::Strassen, ..pairwise(&x, 0.7) };
            let (want, want_lse) = explicit(&p);
            let (got, lse) = run(&p);
            let size = 0.7 * 3.0 * 6.0 * factor * factor;
            assert_close(&got, &want, 16.0 * f64::EPSILON * size.max(1.0));
            assert!(lse.iter().zip(&want_lse).all(|(a, b)| (a - b).abs() < 16.0 * f64::EPSILON * size));
            // The same in single precision, against the definition on the rounded inputs.
            let short: Vec<Mat<f32>> = x.iter().map(Mat::cast).collect();
            let rounded: Vec<Mat<f64>> = short.iter().map(Mat::cast).collect();
            let want = explicit(&Pairwise { form: Form::Strassen, ..pairwise(&rounded, 0.7) }).0;
            let view = |i: usize| short[i].as_ref();
            let p = Pairwise {
                q: view(0),
                k1: view(1),
                k2: view(2),
                v1: view(3),
                v2: view(4),
                scale: 0.7f32,
                band1: Band::ALL,
                band2: Band::ALL,
                form: Form::Strassen,
            };
            let ws = Workspace::single().unwrap();
            let (mut out, mut lse) = (Mat::from_fn(21, 17, |_, _| f32::NAN), vec![f32::NAN; 21]);
            ws.install(|cx| p.run(out.data_mut(), &mut lse, cx));
            assert_close(&out.cast(), &want, 16.0 * f64::from(f32::EPSILON) * size.max(1.0));
            // Denominators of the products, from the definition with their shifts.
            let least = f64::from(least_denominator::<f32>(19 * 23));
            let top = |a: &Mat<f64>, b: &Mat<f64>, rows: std::ops::Range<usize>| {
                let of = |i: usize, j: usize| 0.7 * dot(a.row(i), b.row(j));
                rows.flat_map(|i| (0..b.rows()).map(move |j| (i, j)))
                    .map(|(i, j)| of(i, j))
                    .fold(f64::MIN, f64::max)
            };
            let all = top(&x[1], &x[2], 0..19);
            let below = (0..21).filter(|&i| {
                let shifts = all + top(&x[0], &x[1], i..i + 1) + top(&x[0], &x[2], i..i + 1);
                (want_lse[i] - shifts).exp() < least
            });
            assert_eq!(below.count() > 0, lost, "factor {factor}");
        }
    }

    #[test]
    fn ones_as_second_keys_and_values_leave_ordinary_attention() {
        let x = [
            fill(40, 5, 1, 2.0),
            fill(40, 5, 2, 2.0),
            fill(40, 5, 3, 0.0),
            fill(40, 3, 4, 1.0),
            fill(40, 3, 5, 0.0),
        ];
        let ones = |w| Mat::from_fn(40, w, |_, _| 1.0);
        let (k2, v2) = (ones(5), ones(3));
        for band in [Band::ALL, Band::causal(0)] {
            let p =
                Pairwise { k2: k2.as_ref(), v2: v2.as_ref(), band1: band, band2: band, ..pairwise(&x, 0.6) };
            let ws = Workspace::single().unwrap();
            let plain = attend(p.q, p.k1, p.v1, 0.6, None, band, ws.context()).0;
            assert_close(&run(&p).0, &Mat::from_vec(plain, 40, 3), 1e-14 * 10.0);
        }
        // The same of the strassen form with second keys 0.
        let zero = Pairwise { v2: v2.as_ref(), form: Form::Strassen, ..pairwise(&x, 0.6) };
        let ws = Workspace::single().unwrap();
        let plain = attend(zero.q, zero.k1, zero.v1, 0.6, None, Band::ALL, ws.context()).0;
        assert_close(&run(&zero).0, &Mat::from_vec(plain, 40, 3), 1e-14 * 10.0);
    }

    #[test]
    fn exchanging_the_sides_and_permuting_keys_change_nothing() {
        let x = known_inputs(23, 6, 1.5);
        let p = pairwise(&x, 0.5);
        let swapped = Pairwise { k1: p.k2, k2: p.k1, v1: p.v2, v2: p.v1, ..p };
        assert_close(&run(&p).0, &run(&swapped).0, 1e-13);
        let order: Vec<usize> = (0..23).map(|i| (i * 7 + 3) % 23).collect();
        let permute = |m: &Mat<f64>| Mat::from_fn(23, 6, |i, j| m[(order[i], j)]);
        let (k1, v1) = (permute(&x[1]), permute(&x[3]));
        let permuted = Pairwise { k1: k1.as_ref(), v1: v1.as_ref(), ..p };
        assert_close(&run(&p).0, &run(&permuted).0, 1e-13);
        // Determinants change their sign, so the exchange needs the opposite query.
        let minus = Mat::from_fn(23, 6, |i, j| -x[0][(i, j)]);
        let det = Pairwise { form: Form::Determinant, ..p };
        let other = Pairwise { form: Form::Determinant, q: minus.as_ref(), ..swapped };
        assert_close(&run(&det).0, &run(&other).0, 1e-13);
    }

    #[test]
    fn simple_cases_have_simple_answers() {
        let x = known_inputs(9, 4, 1.0);
        let zero = Mat::zeros(9, 4);
        let p = Pairwise { q: zero.as_ref(), ..pairwise(&x, 0.5) };
        let mean = |m: &Mat<f64>, e: usize| (0..9).map(|i| m[(i, e)]).sum::<f64>() / 9.0;
        let want = Mat::from_fn(9, 4, |_, e| mean(&x[3], e) * mean(&x[4], e));
        assert_close(&run(&p).0, &want, 1e-14);
        let one = pairwise(&x, 0.5);
        let one = Pairwise {
            k1: one.k1.sub_rows(0..1),
            v1: one.v1.sub_rows(0..1),
            k2: one.k2.sub_rows(0..1),
            v2: one.v2.sub_rows(0..1),
            ..one
        };
        let want = Mat::from_fn(9, 4, |_, e| x[3][(0, e)] * x[4][(0, e)]);
        assert_close(&run(&one).0, &want, 1e-14);
    }

    #[test]
    fn a_constant_on_all_logits_of_a_row_changes_nothing() {
        let x = known_inputs(15, 4, 1.0);
        let wide = |m: &Mat<f64>, last: f64| Mat::from_fn(15, 5, |i, j| if j < 4 { m[(i, j)] } else { last });
        let (q, k1, k2) = (wide(&x[0], 37.0), wide(&x[1], 1.0), wide(&x[2], 1.0));
        let p = pairwise(&x, 0.5);
        let shifted = Pairwise { q: q.as_ref(), k1: k1.as_ref(), k2: k2.as_ref(), ..p };
        let (a, b) = (run(&p), run(&shifted));
        assert_close(&a.0, &b.0, 64.0 * f64::EPSILON * 37.0);
        assert!(a.1.iter().zip(&b.1).all(|(a, b)| (b - a - 18.5).abs() < 1e-13));
    }

    #[test]
    fn determinants_vanish_for_parallel_keys_and_keep_under_common_rotations() {
        let x = known_inputs(12, 3, 1.0);
        let parallel = Mat::from_fn(12, 3, |_, j| 3.0 * x[1][(0, j)]);
        let one = fill(12, 3, 4, 1.0);
        let p = Pairwise { form: Form::Determinant, ..pairwise(&x, 2.0) };
        // One first key, all second keys parallel to it: all logits 0, so the log-sum-exp counts pairs.
        let flat =
            Pairwise { k1: p.k1.sub_rows(0..1), v1: one.as_ref().sub_rows(0..1), k2: parallel.as_ref(), ..p };
        assert!(run(&flat).1.iter().all(|l| (l - 12f64.ln()).abs() < 1e-14));
        let (c, s) = (0.8, 0.6);
        let turn = |m: &Mat<f64>| {
            Mat::from_fn(12, 3, |i, j| match j {
                0 => c * m[(i, 0)] - s * m[(i, 2)],
                1 => m[(i, 1)],
                _ => s * m[(i, 0)] + c * m[(i, 2)],
            })
        };
        let (q, k1, k2) = (turn(&x[0]), turn(&x[1]), turn(&x[2]));
        let turned = Pairwise { q: q.as_ref(), k1: k1.as_ref(), k2: k2.as_ref(), ..p };
        assert_close(&run(&p).0, &run(&turned).0, 1e-14 * 10.0);
    }

    #[test]
    fn logits_of_thousands_neither_overflow_nor_lose_the_winner() {
        let x = known_inputs(11, 4, 60.0);
        for form in [Form::Trilinear, Form::Strassen] {
            let p = Pairwise { form, ..pairwise(&x, 0.5) };
            // Rounding of logits up to 4·60³/2 moves weights of products up to 60².
            assert_close(&run(&p).0, &explicit(&p).0, 4.0 * f64::EPSILON * 432e3 * 3600.0);
        }
    }
}
