//! The gradient of attention to pairs of keys.
//!
//! With $u_{ij}$, $L_{ij}$ and $w_{ij}$ as in [`third`](super::third), $\bar o$ the gradient of the outputs and
//! $\delta_i = \langle \bar o_i, o_i \rangle$, the inner attention of first key $j$ receives the gradient
//! $w_{ij}\, \bar o_i \odot v^1_j$ at its outputs and $w_{ij} (\langle \bar o_i, u_{ij} \odot v^1_j \rangle - \delta_i)$ at its
//! log-sum-exps, so that [`AttendBackward`] gives the gradients of $a_{ij}$, of second keys and of second values, and
//! $\bar v^1_j = \sum_i w_{ij}\, \bar o_i \odot u_{ij}$. The gradient of $a_{ij}$ goes to queries and first keys by the form of
//! the scores. Time is $O(N^3 d)$, as that of the outputs (Liang et al. 2024 approximate both in almost linear time where
//! entries are bounded), and memory $O(N d)$.

use super::fold::attend;
use super::third::{Form, Pairwise};
use crate::workspace::Context;
use attlas_num::kernels::{AttendBackward, dot};
use attlas_num::par::*;
use attlas_num::{Mat, MatRef, Real};
use std::ops::Range;

/// Number of parts of the first keys, each with its own sums; fixed, so threads change no bit.
const PARTS: usize = 8;

/// Gradients of everything that a [`Pairwise`] reads.
#[derive(Clone, Debug)]
pub struct PairwiseGradients<T> {
    /// Of the queries.
    pub q: Mat<T>,
    /// Of the first keys.
    pub k1: Mat<T>,
    /// Of the second keys.
    pub k2: Mat<T>,
    /// Of the first values.
    pub v1: Mat<T>,
    /// Of the second values.
    pub v2: Mat<T>,
}

impl<T: Real> Pairwise<'_, T> {
    /// Computes the gradients from outputs (`rows × d_v`), log-sum-exps and the gradient of the outputs.
    ///
    /// # Panics
    ///
    /// If the shapes do not fit together.
    pub fn backward(
        &self,
        out: &[T],
        lse: &[T],
        d_out: MatRef<'_, T>,
        cx: Context<'_>,
    ) -> PairwiseGradients<T> {
        let (rows, d, d_v) = (self.q.rows(), self.q.cols(), self.v1.cols());
        assert!(out.len() == rows * d_v && lse.len() == rows, "outputs of another size");
        assert!(d_out.rows() == rows && d_out.cols() == d_v, "a gradient for every output");
        let zeros = |m: MatRef<'_, T>| Mat::from_fn(m.rows(), m.cols(), |_, _| T::ZERO);
        let delta: Vec<T> = (0..rows).map(|i| dot(&out[i * d_v..(i + 1) * d_v], d_out.row(i))).collect();
        let n1 = self.k1.rows();
        let parts = PARTS.min(n1).max(1);
        let sums: Vec<PairwiseGradients<T>> = (0..parts)
            .into_par_iter()
            .with_max_len(1)
            .map(|part| {
                let mut sums = PairwiseGradients {
                    q: zeros(self.q),
                    k1: zeros(self.k1),
                    k2: zeros(self.k2),
                    v1: zeros(self.v1),
                    v2: zeros(self.v2),
                };
                for j in n1 * part / parts..n1 * (part + 1) / parts {
                    self.add_first_key(j, lse, d_out, &delta, &mut sums, cx);
                }
                sums
            })
            .collect();
        debug_assert!(d == self.k2.cols());
        let mut total = None::<PairwiseGradients<T>>;
        for part in sums {
            match &mut total {
                None => total = Some(part),
                Some(total) => {
                    let pairs = [
                        (&mut total.q, &part.q),
                        (&mut total.k1, &part.k1),
                        (&mut total.k2, &part.k2),
                        (&mut total.v1, &part.v1),
                        (&mut total.v2, &part.v2),
                    ];
                    for (sum, x) in pairs {
                        sum.data_mut().iter_mut().zip(x.data()).for_each(|(s, &x)| *s += x);
                    }
                }
            }
        }
        total.unwrap_or_else(|| unreachable!("there is at least one part"))
    }

    /// Adds the contribution of the pairs with first key `j`.
    fn add_first_key(
        &self,
        j: usize,
        lse: &[T],
        d_out: MatRef<'_, T>,
        delta: &[T],
        sums: &mut PairwiseGradients<T>,
        cx: Context<'_>,
    ) {
        let (rows, d, d_v) = (self.q.rows(), self.q.cols(), self.v1.cols());
        let sees = |i: &usize| self.band1.range(*i, self.k1.rows()).contains(&j);
        let Some(from) = (0..rows).find(sees) else { return };
        let to = (from..rows).take_while(sees).count() + from;
        let n = to - from;
        let (k1, v1) = (self.k1.row(j), self.v1.row(j));
        let mut a = vec![T::ZERO; n * d];
        for (i, a) in (from..to).zip(a.chunks_exact_mut(d)) {
            inner_query(self.form, self.q.row(i), k1, a);
        }
        let Range { start, .. } = self.band2.range(from, self.k2.rows());
        let end = self.band2.range(to - 1, self.k2.rows()).end.max(start);
        let (k2, v2) = (self.k2.sub_rows(start..end), self.v2.sub_rows(start..end));
        let band = self.band2.from_row(from).from_key(start);
        let rows_of = MatRef::new(&a, n, d);
        let (u, inner) = attend(rows_of, k2, v2, self.scale, None, band, cx);

        let mut d_inner = vec![T::ZERO; n * d_v];
        let mut inner_delta = vec![T::ZERO; n];
        for t in 0..n {
            let i = from + t;
            if inner[t] == T::NEG_INFINITY {
                continue;
            }
            let offset = match self.form {
                Form::Strassen => self.scale * dot(self.q.row(i), k1),
                _ => T::ZERO,
            };
            let w = (inner[t] + offset - lse[i]).exp();
            let (g, u) = (d_out.row(i), &u[t * d_v..(t + 1) * d_v]);
            let mut along = T::ZERO;
            for c in 0..d_v {
                d_inner[t * d_v + c] = w * g[c] * v1[c];
                sums.v1.row_mut(j)[c] += w * g[c] * u[c];
                along += g[c] * u[c] * v1[c];
            }
            inner_delta[t] = w * delta[i];
            if self.form == Form::Strassen {
                let up = self.scale * w * (along - delta[i]);
                for c in 0..d {
                    sums.q.row_mut(i)[c] += up * k1[c];
                    sums.k1.row_mut(j)[c] += up * self.q.row(i)[c];
                }
            }
        }
        let mut da = vec![T::ZERO; n * d];
        let job = AttendBackward {
            q: rows_of,
            k: k2,
            v: v2,
            d_out: MatRef::new(&d_inner, n, d_v),
            lse: &inner,
            delta: &inner_delta,
            scale: self.scale,
            band,
            isa: cx.schedule.isa,
        };
        let dk2 = &mut sums.k2.data_mut()[start * d..end * d];
        let dv2 = &mut sums.v2.data_mut()[start * d_v..end * d_v];
        job.run(cx.scratch, &mut da, dk2, dv2);
        for (i, da) in (from..to).zip(da.chunks_exact(d)) {
            pull_back(self.form, self.q.row(i), k1, da, sums.q.row_mut(i), sums.k1.row_mut(j));
        }
    }
}

/// Computes the inner query of a row and a first key.
fn inner_query<T: Real>(form: Form, q: &[T], k: &[T], a: &mut [T]) {
    match form {
        Form::Trilinear => a.iter_mut().zip(q.iter().zip(k)).for_each(|(a, (&q, &k))| *a = q * k),
        Form::Strassen => a.iter_mut().zip(q.iter().zip(k)).for_each(|(a, (&q, &k))| *a = q + k),
        Form::Determinant => {
            for c in (0..a.len()).step_by(3) {
                a[c..c + 3].copy_from_slice(&cross(&q[c..c + 3], &k[c..c + 3]));
            }
        }
    }
}

/// Adds the gradient of an inner query to those of the row and the first key.
fn pull_back<T: Real>(form: Form, q: &[T], k: &[T], da: &[T], dq: &mut [T], dk: &mut [T]) {
    match form {
        Form::Trilinear => {
            for c in 0..da.len() {
                dq[c] += da[c] * k[c];
                dk[c] += da[c] * q[c];
            }
        }
        Form::Strassen => {
            for c in 0..da.len() {
                dq[c] += da[c];
                dk[c] += da[c];
            }
        }
        Form::Determinant => {
            for c in (0..da.len()).step_by(3) {
                // ⟨g, q × k⟩ = ⟨q, k × g⟩ = ⟨k, g × q⟩.
                let (q, k, g) = (&q[c..c + 3], &k[c..c + 3], &da[c..c + 3]);
                let (to_q, to_k) = (cross(k, g), cross(g, q));
                for l in 0..3 {
                    dq[c + l] += to_q[l];
                    dk[c + l] += to_k[l];
                }
            }
        }
    }
}

fn cross<T: Real>(a: &[T], b: &[T]) -> [T; 3] {
    [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::common::third::tests::fill;
    use crate::{Schedule, Workspace};
    use attlas_num::kernels::Band;

    /// Queries, first and second keys, first and second values.
    fn data(n: usize, d: usize) -> [Mat<f64>; 5] {
        let sizes = [(n, d), (n + 1, d), (n - 1, d), (n + 1, 4), (n - 1, 4)];
        let mut seed = 40;
        sizes.map(|(rows, cols)| {
            seed += 1;
            fill(rows, cols, seed, 0.8)
        })
    }

    fn pairwise<'a>(x: &'a [Mat<f64>; 5], form: Form, bands: [Band; 2]) -> Pairwise<'a, f64> {
        let [q, k1, k2, v1, v2] = x.each_ref().map(Mat::as_ref);
        Pairwise { q, k1, k2, v1, v2, scale: 0.7, band1: bands[0], band2: bands[1], form }
    }

    fn run(p: &Pairwise<'_, f64>, threads: usize) -> (Vec<f64>, Vec<f64>) {
        let ws = Workspace::new(Schedule { threads, ..Schedule::default() }).unwrap();
        let (mut out, mut lse) = (vec![f64::NAN; p.q.rows() * p.v1.cols()], vec![f64::NAN; p.q.rows()]);
        ws.install(|cx| p.run(&mut out, &mut lse, cx));
        (out, lse)
    }

    #[test]
    fn gradients_agree_with_finite_differences_in_every_form() {
        let bands = [
            [Band::ALL; 2],
            [Band::causal(1), Band::causal(-1)],
            [Band { lower: Some(-3), upper: Some(0) }, Band::ALL],
        ];
        for form in [Form::Trilinear, Form::Determinant, Form::Strassen] {
            for bands in bands {
                let x = data(6, 6);
                let g = fill(6, 4, 77, 1.0);
                let loss = |x: &[Mat<f64>; 5]| -> f64 {
                    run(&pairwise(x, form, bands), 1).0.iter().zip(g.data()).map(|(o, g)| o * g).sum()
                };
                let p = pairwise(&x, form, bands);
                let (out, lse) = run(&p, 1);
                let of = |threads: usize| {
                    let ws = Workspace::new(Schedule { threads, ..Schedule::default() }).unwrap();
                    ws.install(|cx| p.backward(&out, &lse, g.as_ref(), cx))
                };
                let PairwiseGradients { q, k1, k2, v1, v2 } = of(1);
                let got = [q, k1, k2, v1, v2];
                for (which, gradient) in got.iter().enumerate() {
                    for at in 0..gradient.data().len() {
                        let moved = |step: f64| {
                            let mut y = x.clone();
                            y[which].data_mut()[at] += step;
                            loss(&y)
                        };
                        let slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                        let found = gradient.data()[at];
                        assert!(
                            (slope - found).abs() < 1e-8,
                            "{form:?} {bands:?} {which} {at}: {found} {slope}"
                        );
                    }
                }
                assert_eq!(of(3).q.data(), got[0].data(), "threads change no bit");
            }
        }
    }
}
