//! The Fourier transform of real data, any length.
//!
//! Forward: $F_k = \sum_j x_j e^{-2\pi i jk/n}$ for $k = 0, \dots, \lfloor n/2 \rfloor$; the other entries are the
//! conjugates of these. The inverse here divides by $n$, so it undoes the forward transform.

use std::fmt;
use std::sync::Arc;

use realfft::num_complex::Complex;
use realfft::{ComplexToReal, RealFftPlanner, RealToComplex};

/// Planned transform of one length.
#[derive(Clone)]
pub struct RealFft {
    forward: Arc<dyn RealToComplex<f64>>,
    inverse: Arc<dyn ComplexToReal<f64>>,
    len: usize,
}

impl fmt::Debug for RealFft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RealFft").field("len", &self.len).finish_non_exhaustive()
    }
}

impl RealFft {
    /// Plans transforms of `len` numbers. Panics if `len` is 0.
    pub fn new(len: usize) -> Self {
        assert!(len > 0, "a transform needs at least one number");
        let mut planner = RealFftPlanner::new();
        Self { forward: planner.plan_fft_forward(len), inverse: planner.plan_fft_inverse(len), len }
    }

    /// Numbers in the time domain.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns false: a plan has at least one number.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Numbers in the frequency domain, `len / 2 + 1`.
    pub fn spectrum_len(&self) -> usize {
        self.len / 2 + 1
    }

    /// Complex numbers of scratch that both directions need.
    pub fn scratch_len(&self) -> usize {
        self.forward.get_scratch_len().max(self.inverse.get_scratch_len())
    }

    /// Fills `spectrum` with the transform of `x`, which is overwritten. Panics on wrong lengths.
    pub fn forward_into(&self, x: &mut [f64], spectrum: &mut [Complex<f64>], scratch: &mut [Complex<f64>]) {
        self.forward.process_with_scratch(x, spectrum, scratch).expect("lengths match the plan");
    }

    /// Fills `x` with the inverse transform of `spectrum`, which is overwritten. Panics on wrong lengths.
    ///
    /// The imaginary parts of the first and (even length) last entry, zero for the transform of real data,
    /// are ignored.
    pub fn inverse_into(&self, spectrum: &mut [Complex<f64>], x: &mut [f64], scratch: &mut [Complex<f64>]) {
        spectrum[0].im = 0.0;
        if self.len.is_multiple_of(2) {
            spectrum[self.len / 2].im = 0.0;
        }
        self.inverse.process_with_scratch(spectrum, x, scratch).expect("lengths match the plan");
        let factor = 1.0 / self.len as f64;
        x.iter_mut().for_each(|v| *v *= factor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forward_is_the_defining_sum_and_inverse_undoes_it() {
        for n in [1usize, 2, 3, 7, 8, 30] {
            let plan = RealFft::new(n);
            let x: Vec<f64> = (0..n).map(|i| (1.3 * i as f64).sin() + 0.25).collect();
            let mut work = x.clone();
            let mut spectrum = vec![Complex::default(); plan.spectrum_len()];
            let mut scratch = vec![Complex::default(); plan.scratch_len()];
            plan.forward_into(&mut work, &mut spectrum, &mut scratch);
            let tol = 8.0 * f64::EPSILON * n as f64;
            for (k, f) in spectrum.iter().enumerate() {
                let direct: Complex<f64> = (0..n)
                    .map(|j| {
                        let angle = -std::f64::consts::TAU * (j * k % n) as f64 / n as f64;
                        Complex::from_polar(x[j], angle)
                    })
                    .sum();
                assert!((f - direct).norm() <= tol, "n = {n}, k = {k}");
            }
            plan.inverse_into(&mut spectrum, &mut work, &mut scratch);
            assert!(x.iter().zip(&work).all(|(a, b)| (a - b).abs() <= tol));
        }
    }
}
