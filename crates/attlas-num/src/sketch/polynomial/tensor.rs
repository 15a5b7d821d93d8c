//! Tensor Sketch (Pham, Pagh 2013): the count sketch of $x^{\otimes p}$ as a circular convolution of $p$ count
//! sketches.
//!
//! With $x' = [x; \sqrt c]$, buckets $h_t$ and signs $s_t$: $C_t[h_t(i)] \mathrel{+}= s_t(i) x'_i$ and
//! $F = \prod_t \mathrm{rfft}(C_t)$. The sketch is $\mathrm{irfft}(F)$; by Parseval the $r$ real numbers
//! $[\mathrm{Re} F_0, \sqrt2\,\mathrm{Re} F_1, \sqrt2\,\mathrm{Im} F_1, \dots, \mathrm{Re} F_{r/2}] / \sqrt r$ (the last
//! for even $r$ only) have the same inner products and save the inverse transform.
//!
//! Tables of buckets and signs are fully random; hashes computed on the fly need no memory and are 2-wise (buckets) and
//! 4-wise (signs) independent, which is enough for mean and variance.

use realfft::num_complex::Complex;

use super::{normalise_into, row_scale, symmetric_square_into, symmetric_square_len};
use crate::mat::{MatRef, Real};
use crate::rng::{Rng, StreamKey};
use crate::sketch::features::{MapOptions, Side, SignedFeatures, check_signed_call};
use crate::sketch::{SketchError, ensure};
use crate::transform::RealFft;

/// Source of buckets and signs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Hashing {
    /// Stored, fully random.
    #[default]
    Tables,
    /// Polynomials modulo $2^{61} - 1$, evaluated when used.
    OnTheFly,
}

/// Form of the features; the two forms are equivalent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Domain {
    /// The real and imaginary parts of the transform.
    #[default]
    Fourier,
    /// The sketch itself.
    Plain,
}

const MERSENNE_61: u64 = (1 << 61) - 1;

/// `(a · b + c) mod (2⁶¹ − 1)` for arguments below the modulus.
fn mul_add_mod(a: u64, b: u64, c: u64) -> u64 {
    let product = u128::from(a) * u128::from(b) + u128::from(c);
    let folded = (product as u64 & MERSENNE_61) + (product >> 61) as u64;
    if folded >= MERSENNE_61 { folded - MERSENNE_61 } else { folded }
}

/// Draws a uniform number below `2⁶¹ − 1`.
fn residue(rng: &mut Rng) -> u64 {
    loop {
        let bits = rng.next_u64() >> 3;
        if bits < MERSENNE_61 {
            return bits;
        }
    }
}

/// Bucket and sign of every coordinate, for one factor of the convolution.
#[derive(Clone, Debug)]
enum Hash {
    Table { buckets: Vec<u32>, negative: Vec<bool> },
    Polynomial { bucket: [u64; 2], sign: [u64; 4], r: u64 },
}

impl Hash {
    fn draw(hashing: Hashing, inputs: usize, r: usize, key: StreamKey) -> Self {
        let mut rng = key.rng();
        match hashing {
            Hashing::Tables => Self::Table {
                buckets: (0..inputs).map(|_| rng.below(r) as u32).collect(),
                negative: (0..inputs).map(|_| rng.sign() < 0.0).collect(),
            },
            Hashing::OnTheFly => Self::Polynomial {
                bucket: std::array::from_fn(|_| residue(&mut rng)),
                sign: std::array::from_fn(|_| residue(&mut rng)),
                r: r as u64,
            },
        }
    }

    /// Returns the bucket of coordinate `i`, and true if its sign is minus.
    fn at(&self, i: usize) -> (usize, bool) {
        match self {
            Self::Table { buckets, negative } => (buckets[i] as usize, negative[i]),
            Self::Polynomial { bucket: [a, b], sign, r } => {
                let i = i as u64;
                let cubic = sign[1..].iter().fold(sign[0], |v, &c| mul_add_mod(v, i, c));
                ((mul_add_mod(*a, i, *b) % r) as usize, cubic >> 60 == 1)
            }
        }
    }
}

/// Settings of a tensor sketch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TensorSketchSpec {
    /// Power of the kernel, 1 to 64.
    pub degree: u32,
    /// Added to the inner product.
    pub c: f64,
    /// Size of the sketch.
    pub r: usize,
    /// Source of buckets and signs.
    pub hashing: Hashing,
    /// The form of the features.
    pub domain: Domain,
    /// True for features that are the symmetric square of a sketch of half the degree; the degree must then be even.
    pub self_tensored: bool,
}

impl Default for TensorSketchSpec {
    fn default() -> Self {
        Self {
            degree: 2,
            c: 0.0,
            r: 512,
            hashing: Hashing::Tables,
            domain: Domain::Fourier,
            self_tensored: false,
        }
    }
}

/// Tensor sketch of $(\mathrm{scale}\,\langle q, k\rangle + c)^p$.
#[derive(Clone, Debug)]
pub struct TensorSketch {
    spec: TensorSketchSpec,
    hashes: Vec<Hash>,
    fft: RealFft,
    d: usize,
    options: MapOptions,
}

impl TensorSketch {
    /// Draws a sketch for rows of length `d`.
    pub fn new(
        d: usize,
        spec: TensorSketchSpec,
        key: StreamKey,
        options: MapOptions,
    ) -> Result<Self, SketchError> {
        let TensorSketchSpec { degree, c, r, hashing, self_tensored, .. } = spec;
        ensure(options.scale > 0.0 && options.scale.is_finite(), "scale", options.scale, "positive")?;
        ensure((1..=64).contains(&degree), "degree", f64::from(degree), "1 to 64")?;
        ensure(!self_tensored || degree.is_multiple_of(2), "degree", f64::from(degree), "even")?;
        ensure(c >= 0.0 && c.is_finite(), "c", c, "finite and not negative")?;
        ensure((1..=1 << 24).contains(&r), "r", r as f64, "1 to 2²⁴")?;
        let factors = if self_tensored { degree / 2 } else { degree };
        let inputs = d + usize::from(c > 0.0);
        let hashes = (0..factors).map(|t| Hash::draw(hashing, inputs, r, key.with(u64::from(t)))).collect();
        Ok(Self { spec, hashes, fft: RealFft::new(r), d, options })
    }

    /// Writes the sketch of one row of unit length.
    fn sketch_into(&self, x: &[f64], work: &mut Work, out: &mut [f64]) {
        work.product.fill(Complex::new(1.0, 0.0));
        for hash in &self.hashes {
            work.counts.fill(0.0);
            for (i, &v) in x.iter().enumerate() {
                let (bucket, negative) = hash.at(i);
                work.counts[bucket] += if negative { -v } else { v };
            }
            self.fft.forward_into(&mut work.counts, &mut work.spectrum, &mut work.scratch);
            work.product.iter_mut().zip(&work.spectrum).for_each(|(p, s)| *p *= s);
        }
        match self.spec.domain {
            Domain::Plain => self.fft.inverse_into(&mut work.product, out, &mut work.scratch),
            Domain::Fourier => {
                let r = self.spec.r;
                let single = 1.0 / (r as f64).sqrt();
                let double = (2.0 / r as f64).sqrt();
                out[0] = single * work.product[0].re;
                for k in 1..r.div_ceil(2) {
                    out[2 * k - 1] = double * work.product[k].re;
                    out[2 * k] = double * work.product[k].im;
                }
                if r.is_multiple_of(2) {
                    out[r - 1] = single * work.product[r / 2].re;
                }
            }
        }
    }
}

/// Buffers of one call.
struct Work {
    counts: Vec<f64>,
    spectrum: Vec<Complex<f64>>,
    product: Vec<Complex<f64>>,
    scratch: Vec<Complex<f64>>,
}

impl Work {
    fn new(fft: &RealFft) -> Self {
        let complex = |n| vec![Complex::default(); n];
        Self {
            counts: vec![0.0; fft.len()],
            spectrum: complex(fft.spectrum_len()),
            product: complex(fft.spectrum_len()),
            scratch: complex(fft.scratch_len()),
        }
    }
}

impl<T: Real> SignedFeatures<T> for TensorSketch {
    fn input_dim(&self) -> usize {
        self.d
    }

    fn num_features(&self) -> usize {
        if self.spec.self_tensored { symmetric_square_len(self.spec.r) } else { self.spec.r }
    }

    fn signed_features(&self, x: MatRef<'_, T>, side: Side, out: &mut [T], log_scale: &mut [T]) {
        let m = SignedFeatures::<T>::num_features(self);
        check_signed_call(x, self.d, out, m, log_scale);
        let mut work = Work::new(&self.fft);
        let mut unit = vec![0.0; self.d + usize::from(self.spec.c > 0.0)];
        let mut sketch = vec![0.0; self.spec.r];
        let mut narrow = vec![T::ZERO; self.spec.r];
        // √scale goes into the logarithm, so √c must be divided by it.
        let extra = (self.spec.c / self.options.scale).sqrt();
        for ((row, out), log_scale) in x.iter_rows().zip(out.chunks_exact_mut(m)).zip(log_scale) {
            let log = normalise_into(row, extra, &mut unit) + 0.5 * self.options.scale.ln();
            self.sketch_into(&unit, &mut work, &mut sketch);
            narrow.iter_mut().zip(&sketch).for_each(|(n, s)| *n = T::from_f64(*s));
            if self.spec.self_tensored {
                symmetric_square_into(&narrow, out);
            } else {
                out.copy_from_slice(&narrow);
            }
            *log_scale = row_scale(f64::from(self.spec.degree) * log, side, self.options.constants);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sketch::testing::{check_moments, signed_kernel_of};
    use crate::sketch::variance::SketchedPair;

    const X: [f64; 3] = [1.0, -0.4, 0.7];
    const Y: [f64; 3] = [0.6, 0.5, 0.9];

    fn draw(d: usize, spec: TensorSketchSpec, seed: u64) -> TensorSketch {
        TensorSketch::new(d, spec, StreamKey::new(seed), MapOptions::default()).unwrap()
    }

    #[test]
    fn the_known_sketches_of_two_rows() {
        let hash = |buckets: [u32; 2], negative: [bool; 2]| Hash::Table {
            buckets: buckets.to_vec(),
            negative: negative.to_vec(),
        };
        let mut sketch =
            draw(2, TensorSketchSpec { r: 4, domain: Domain::Plain, ..TensorSketchSpec::default() }, 0);
        sketch.hashes = vec![hash([0, 1], [false, true]), hash([2, 3], [false, false])];
        for (row, expected) in [([1.0, 2.0], [-4.0, 0.0, 1.0, 0.0]), ([3.0, 1.0], [-1.0, 0.0, 9.0, 0.0])] {
            let (mut out, mut scale) = ([f64::NAN; 4], [f64::NAN]);
            sketch.signed_features(MatRef::new(&row, 1, 2), Side::Key, &mut out, &mut scale);
            for (o, e) in out.iter().zip(expected) {
                assert!((o * scale[0].exp() - e).abs() < 1e-13);
            }
        }
        assert!((signed_kernel_of(&sketch, &[1.0, 2.0], &[3.0, 1.0]) - 13.0).abs() < 1e-12);
        sketch.spec.domain = Domain::Fourier;
        assert!((signed_kernel_of(&sketch, &[1.0, 2.0], &[3.0, 1.0]) - 13.0).abs() < 1e-12);
    }

    #[test]
    fn powers_are_unbiased_with_the_stated_variance_for_both_hashings() {
        let inner: f64 = X.iter().zip(&Y).map(|(a, b)| a * b).sum();
        for (hashing, degree, c, r) in [
            (Hashing::Tables, 1, 0.0, 8),
            (Hashing::Tables, 2, 0.0, 8),
            (Hashing::Tables, 2, 0.3, 7),
            (Hashing::Tables, 3, 0.0, 16),
            (Hashing::OnTheFly, 2, 0.0, 8),
            (Hashing::OnTheFly, 2, 0.3, 7),
            (Hashing::OnTheFly, 3, 0.0, 16),
        ] {
            let spec = TensorSketchSpec { degree, c, r, hashing, ..TensorSketchSpec::default() };
            let variance = SketchedPair::of(&X, &Y, c).variance(degree, r);
            let name = format!("{spec:?}");
            let sharpness = if degree == 3 { 0.2 } else { 0.12 };
            check_moments(&name, 20_000, (inner + c).powi(degree as i32), variance, sharpness, |seed| {
                signed_kernel_of(&draw(3, spec, seed), &X, &Y)
            });
        }
    }

    #[test]
    fn both_domains_have_the_same_inner_products() {
        for r in [1, 2, 3, 7, 8, 30] {
            for seed in 0..5 {
                let spec = TensorSketchSpec { degree: 3, c: 0.5, r, ..TensorSketchSpec::default() };
                let fourier = signed_kernel_of(&draw(3, spec, seed), &X, &Y);
                let plain = signed_kernel_of(
                    &draw(3, TensorSketchSpec { domain: Domain::Plain, ..spec }, seed),
                    &X,
                    &Y,
                );
                assert!((fourier - plain).abs() < 1e-12, "r = {r}: {fourier}, {plain}");
            }
        }
    }

    #[test]
    fn one_coordinate_is_exact_for_all_seeds() {
        for seed in 0..20 {
            for hashing in [Hashing::Tables, Hashing::OnTheFly] {
                let spec = TensorSketchSpec { degree: 3, r: 5, hashing, ..TensorSketchSpec::default() };
                assert!((signed_kernel_of(&draw(1, spec, seed), &[1.5], &[-2.0]) + 27.0).abs() < 1e-12);
            }
        }
    }

    #[test]
    fn a_scaled_row_scales_the_kernel_and_the_square_is_the_square() {
        let spec = TensorSketchSpec { degree: 4, r: 9, ..TensorSketchSpec::default() };
        let map = draw(3, spec, 2);
        let double = X.map(|x| -2.0 * x);
        let ratio = signed_kernel_of(&map, &double, &Y) / signed_kernel_of(&map, &X, &Y);
        assert!((ratio / 16.0 - 1.0).abs() < 1e-11);
        let half = signed_kernel_of(&draw(3, TensorSketchSpec { degree: 2, ..spec }, 2), &X, &Y);
        let square = signed_kernel_of(&draw(3, TensorSketchSpec { self_tensored: true, ..spec }, 2), &X, &Y);
        assert!((square - half * half).abs() < 1e-12);
    }

    #[test]
    fn arithmetic_modulo_the_mersenne_prime_is_right() {
        let p = u128::from(MERSENNE_61);
        let mut rng = StreamKey::new(3).rng();
        for _ in 0..1000 {
            let [a, b, c] = std::array::from_fn(|_| residue(&mut rng));
            let exact = (u128::from(a) * u128::from(b) + u128::from(c)) % p;
            assert_eq!(u128::from(mul_add_mod(a, b, c)), exact);
        }
        let top = MERSENNE_61 - 1;
        assert_eq!(
            u128::from(mul_add_mod(top, top, top)),
            (u128::from(top) * u128::from(top) + u128::from(top)) % p
        );
        assert_eq!(mul_add_mod(1, top, 1), 0);
    }

    #[test]
    fn extremes_are_finite_and_bad_parameters_refused() {
        let spec = TensorSketchSpec { degree: 8, r: 6, self_tensored: true, ..TensorSketchSpec::default() };
        let map = draw(2, spec, 1);
        let (mut out, mut scale) = ([f32::NAN; 42], [f32::NAN; 2]);
        map.signed_features(MatRef::new(&[0.0, 0.0, 3e38, -3e38], 2, 2), Side::Key, &mut out, &mut scale);
        assert!(out.iter().chain(&scale).all(|v| v.is_finite()));
        let refuse = |spec| TensorSketch::new(2, spec, StreamKey::new(1), MapOptions::default()).is_err();
        assert!(refuse(TensorSketchSpec { c: -0.1, ..spec }));
        assert!(refuse(TensorSketchSpec { degree: 3, ..spec }));
        assert!(refuse(TensorSketchSpec { r: 0, ..spec }));
    }
}
