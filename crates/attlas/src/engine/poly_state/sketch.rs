//! Maps to short rows, and the features made of these.
//!
//! A row $x$ becomes a short row $a$ of length about 1 with a logarithm $e$, and the kernel is
//! $e^{e_q + e_k} \langle a, b\rangle$ ([`Form::Direct`]) or $e^{e_q + e_k} \langle a, b\rangle^2$ ([`Form::Squared`]), whose features are
//! the symmetric square of $a$: $\langle a, b\rangle^2 = \sum_{i \le j} c_{ij}\, a_i a_j\, b_i b_j$ with $c_{ij} = 1$ on the diagonal and 2 off it.

use crate::workspace::Context;
use crate::{MatRef, Real};
use attlas_num::kernels;
use attlas_num::sketch::features::{Side, SignedFeatures};
use attlas_num::sketch::polynomial::{symmetric_square_into, symmetric_square_len};

/// A map to short rows whose inner product, or its square, is a kernel.
pub trait HalfSketch<T: Real>: Send + Sync + std::fmt::Debug {
    /// Returns the length of the rows.
    fn width(&self) -> usize;

    /// Writes the short rows of `x`, of length about 1, and the logarithm of the kernel's factor for each of them.
    fn sketch_into(&self, x: MatRef<'_, T>, cx: Context<'_>, out: &mut [T], log: &mut [f64]);
}

/// Rows divided by their lengths, followed by a constant: the kernel $(\tau\langle q, k\rangle + \sigma)^{2}$ as a
/// square of inner products, without error.
#[derive(Clone, Debug)]
pub struct UnitRows {
    /// Length of the rows.
    pub d: usize,
    /// $\tau$.
    pub scale: f64,
    /// $\sigma \ge 0$.
    pub shift: f64,
    /// The power $p$ of the kernel.
    pub power: f64,
}

impl<T: Real> HalfSketch<T> for UnitRows {
    fn width(&self) -> usize {
        self.d + usize::from(self.shift > 0.0)
    }

    fn sketch_into(&self, x: MatRef<'_, T>, _: Context<'_>, out: &mut [T], log: &mut [f64]) {
        let width = HalfSketch::<T>::width(self);
        let (root, extra) = (self.scale.sqrt(), self.shift.sqrt());
        for ((row, out), log) in x.iter_rows().zip(out.chunks_exact_mut(width)).zip(log) {
            *log = self.power * unit_into(row, root, extra, out);
        }
    }
}

/// Writes `[root · x, extra]` divided by its length and returns the logarithm of the length; `extra` only if `out` has
/// room for it. A zero row stays zero with logarithm 0.
pub fn unit_into<T: Real>(x: &[T], root: f64, extra: f64, out: &mut [T]) -> f64 {
    let room = out.len() > x.len();
    let extra = if room { extra } else { 0.0 };
    let top = x.iter().fold(extra, |m, v| m.max(root * v.to_f64().abs()));
    if top == 0.0 {
        out.iter_mut().zip(x).for_each(|(o, &v)| *o = v);
        if room {
            out[x.len()] = T::ZERO;
        }
        return 0.0;
    }
    let sum: f64 = x.iter().map(|v| (root * v.to_f64() / top).powi(2)).sum::<f64>() + (extra / top).powi(2);
    let length = top * sum.sqrt();
    out.iter_mut().zip(x).for_each(|(o, v)| *o = T::from_f64(root * v.to_f64() / length));
    if room {
        out[x.len()] = T::from_f64(extra / length);
    }
    length.ln()
}

/// A map of signed features with one logarithmic scale per row.
#[derive(Clone, Debug)]
pub struct Signed<M>(pub M);

impl<T: Real, M: SignedFeatures<T>> HalfSketch<T> for Signed<M> {
    fn width(&self) -> usize {
        self.0.num_features()
    }

    fn sketch_into(&self, x: MatRef<'_, T>, cx: Context<'_>, out: &mut [T], log: &mut [f64]) {
        let mut scales = cx.scratch.take::<T>(x.rows());
        // The key side on both sides: where parts are merged, constants must be kept.
        self.0.signed_features(x, Side::Key, out, &mut scales);
        log.iter_mut().zip(scales.iter()).for_each(|(l, s)| *l = s.to_f64());
    }
}

/// Construction of features from short rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The rows are the features: the kernel is their inner product, of either sign.
    Direct,
    /// The symmetric square: the kernel is the square of the inner product of the rows.
    Squared,
}

impl Form {
    /// Returns the number of features for short rows of this length.
    pub fn features(self, width: usize) -> usize {
        match self {
            Form::Direct => width,
            Form::Squared => symmetric_square_len(width),
        }
    }

    pub(super) fn expand<T: Real>(self, short: &[T], out: &mut [T]) {
        match self {
            Form::Direct => out.copy_from_slice(short),
            Form::Squared => symmetric_square_into(short, out),
        }
    }

    /// Multiplies a short row so that its features are multiplied by $e^{\log}$.
    pub(super) fn scale_row<T: Real>(self, short: &mut [T], log: f64) {
        let log = if self == Form::Squared { 0.5 * log } else { log };
        kernels::scale(T::from_f64(log.exp()), short);
    }
}
