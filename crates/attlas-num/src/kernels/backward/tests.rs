//! The gradient of exact attention: finite differences, instruction sets, pairs outside the band.

use super::*;
use crate::kernels::{Attend, Precision};
use crate::mat::Mat;
use crate::rng::StreamKey;

/// Queries, keys, values and the gradients with respect to outputs and log-sum-exps.
struct Data<T> {
    q: Mat<T>,
    k: Mat<T>,
    v: Mat<T>,
    g: Mat<T>,
    h: Vec<T>,
    band: Band,
}

const SCALE: f64 = 0.3;

impl<T: Real> Data<T> {
    fn new(rows: usize, n_k: usize, d: usize, d_v: usize, band: Band) -> Self {
        let mut rng = StreamKey::new(7).named("gradient").rng();
        let mut mat = |rows, cols| Mat::from_fn(rows, cols, |_, _| T::from_f64(rng.normal()));
        let (q, k, v, g) = (mat(rows, d), mat(n_k, d), mat(n_k, d_v), mat(rows, d_v));
        let h = mat(1, rows).into_vec();
        Self { q, k, v, g, h, band }
    }

    fn forward(&self, isa: Isa) -> (Vec<T>, Vec<T>) {
        let (mut out, mut lse) = (vec![T::NAN; self.g.data().len()], vec![T::NAN; self.q.rows()]);
        let job = Attend {
            q: self.q.as_ref(),
            k: self.k.as_ref(),
            v: self.v.as_ref(),
            scale: T::from_f64(SCALE),
            softcap: None,
            bias: None,
            band: self.band,
            tile_k: 0,
            isa,
            precision: Precision::Full,
            decode: false,
        };
        job.run(&Scratch::poisoned(), &mut out, &mut lse);
        (out, lse)
    }

    /// Returns the sum whose gradient is computed.
    fn loss(&self) -> f64 {
        let (out, lse) = self.forward(Isa::Scalar);
        let of = |a: &[T], b: &[T]| -> f64 { a.iter().zip(b).map(|(&a, &b)| (a * b).to_f64()).sum() };
        let seen: Vec<T> = lse.iter().map(|&l| if l == T::NEG_INFINITY { T::ZERO } else { l }).collect();
        of(&out, self.g.data()) + of(&seen, &self.h)
    }

    fn backward(&self, isa: Isa) -> [Vec<T>; 3] {
        let (out, lse) = self.forward(isa);
        let d_v = self.v.cols();
        let delta: Vec<T> = (0..lse.len())
            .map(|i| crate::kernels::scalar::dot(&out[i * d_v..(i + 1) * d_v], self.g.row(i)) - self.h[i])
            .collect();
        let job = AttendBackward {
            q: self.q.as_ref(),
            k: self.k.as_ref(),
            v: self.v.as_ref(),
            d_out: self.g.as_ref(),
            lse: &lse,
            delta: &delta,
            scale: T::from_f64(SCALE),
            band: self.band,
            isa,
        };
        let mut dq = vec![T::NAN; self.q.data().len()];
        let mut dk = vec![T::ZERO; self.k.data().len()];
        let mut dv = vec![T::ZERO; self.v.data().len()];
        job.run(&Scratch::poisoned(), &mut dq, &mut dk, &mut dv);
        [dq, dk, dv]
    }
}

#[test]
fn the_definition_agrees_with_finite_differences() {
    for band in [Band::ALL, Band::causal(2), Band::causal(-2), Band { lower: Some(-2), upper: Some(1) }] {
        let x = Data::<f64>::new(5, 7, 3, 2, band);
        let grads = x.backward(Isa::Scalar);
        for which in 0..3 {
            for at in 0..grads[which].len() {
                let moved = |step: f64| {
                    let mut y = Data::<f64>::new(5, 7, 3, 2, band);
                    [&mut y.q, &mut y.k, &mut y.v][which].data_mut()[at] += step;
                    y.loss()
                };
                let h = 1e-5;
                let slope = (moved(h) - moved(-h)) / (2.0 * h);
                assert!((slope - grads[which][at]).abs() < 1e-8, "{band:?} {which} {at}: {slope}");
            }
        }
    }
}

fn agrees<T: Real>(tolerance: f64) {
    let bands = |n: isize| [Band::ALL, Band::causal(n), Band { lower: Some(-9), upper: Some(2) }];
    for isa in [Isa::Avx512, Isa::Avx2, Isa::Neon].into_iter().filter(|i| i.is_available()) {
        for (rows, n_k, d, d_v) in [
            (1, 1, 1, 1),
            (2, 97, 5, 3),
            (49, 193, 16, 24),
            (113, 100, 17, 40),
            (300, 200, 64, 64),
            (3, 0, 4, 4),
        ] {
            for band in bands(n_k as isize - rows as isize) {
                let x = Data::<T>::new(rows, n_k, d, d_v, band);
                for (a, b) in x.backward(isa).iter().zip(&x.backward(Isa::Scalar)) {
                    let size = b.iter().map(|x| x.to_f64().abs()).fold(1e-30, f64::max);
                    for (a, b) in a.iter().zip(b) {
                        let error = (a.to_f64() - b.to_f64()).abs() / size;
                        assert!(error <= tolerance, "{isa:?} {rows}×{n_k}, {d}, {d_v}, {band:?}: {a} {b}");
                    }
                }
            }
        }
    }
}

#[test]
fn instruction_sets_agree_with_the_definition() {
    agrees::<f64>(1e-13);
    agrees::<f32>(3e-5);
}

#[test]
fn pairs_that_are_not_seen_add_nothing_not_even_nan() {
    let clean = Data::<f32>::new(60, 60, 16, 16, Band::causal(0)).backward(Isa::best());
    let mut x = Data::<f32>::new(60, 60, 16, 16, Band::causal(0));
    x.k.row_mut(50).fill(f32::NAN);
    x.v.row_mut(50).fill(f32::NAN);
    let spoiled = x.backward(Isa::best());
    let same = |which: usize, rows: Range<usize>| {
        let at = rows.start * 16..rows.end * 16;
        assert_eq!(clean[which][at.clone()], spoiled[which][at], "{which}");
    };
    same(0, 0..50);
    // Rows from 50 on see the NaN key, so their query gradients are NaN.
    assert!(spoiled[0][50 * 16..].iter().all(|x| x.is_nan()));
    let mut y = Data::<f32>::new(60, 60, 16, 16, Band::causal(0));
    y.q.row_mut(10).fill(f32::NAN);
    let spoiled = y.backward(Isa::best());
    for which in [1, 2] {
        assert_eq!(clean[which][11 * 16..], spoiled[which][11 * 16..], "later keys never meet the row");
        assert!(spoiled[which][..11 * 16].iter().all(|x| x.is_nan()));
    }
}
