//! Gaussian product sketches of $\langle x, y\rangle^h$ (Kacham, Mirrokni, Zhong 2024; Ahle et al. 2020).
//!
//! $\mathrm{half}(x, 1) = x$, and $\mathrm{half}(x, h) = r^{-1/2} (G_1 u) \odot (G_2 w)$ with $u$, $w$ **independent**
//! sketches of degree $\lceil h/2 \rceil$ and $\lfloor h/2 \rfloor$ and fresh Gaussian $G_1$, $G_2$ of $r$ rows. The
//! same matrices serve both sides. One sketch used for both branches would be biased.
//!
//! With `self_tensored` and even $p$, the features are the symmetric square of a sketch of degree $p/2$.

use super::{normalise_into, row_scale, symmetric_square_into, symmetric_square_len};
use crate::kernels::{Isa, Op, gemm};
use crate::mat::{Mat, MatRef, Real};
use crate::rng::StreamKey;
use crate::scratch::Scratch;
use crate::sketch::features::{MapOptions, Side, SignedFeatures, check_signed_call};
use crate::sketch::project::project;
use crate::sketch::{SketchError, ensure};

/// Scaling of products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ProductScale {
    /// $r^{-1/2}$ for each product: unbiased.
    #[default]
    Unbiased,
    /// $r^{-1}$, as in the published code: a degree-4 kernel comes out divided by $r^2$.
    ReferenceCode,
}

/// Tree of products.
#[derive(Clone, Debug)]
enum Node<T> {
    Leaf,
    Product { left: Box<Node<T>>, right: Box<Node<T>>, g1: Mat<T>, g2: Mat<T> },
}

impl<T: Real> Node<T> {
    fn draw(d: usize, degree: u32, r: usize, factor: f64, key: StreamKey) -> Self {
        if degree <= 1 {
            return Self::Leaf;
        }
        let (h1, h2) = (degree.div_ceil(2), degree / 2);
        // One of the two matrices takes the factor of the product.
        let gaussian = |h: u32, branch: u64, factor: f64| {
            let mut rng = key.with(branch).rng();
            let cols = if h == 1 { d } else { r };
            Mat::from_fn(r, cols, |_, _| T::from_f64(factor * rng.normal()))
        };
        Self::Product {
            left: Box::new(Self::draw(d, h1, r, factor, key.with(2))),
            right: Box::new(Self::draw(d, h2, r, factor, key.with(3))),
            g1: gaussian(h1, 0, factor),
            g2: gaussian(h2, 1, 1.0),
        }
    }

    fn cast<U: Real>(&self) -> Node<U> {
        match self {
            Self::Leaf => Node::Leaf,
            Self::Product { left, right, g1, g2 } => Node::Product {
                left: Box::new(left.cast()),
                right: Box::new(right.cast()),
                g1: g1.cast(),
                g2: g2.cast(),
            },
        }
    }

    /// [`apply`](Self::apply) with the fast product kernel: `out` is `rows × r`.
    fn apply_into(&self, x: MatRef<'_, T>, isa: Isa, scratch: &Scratch, out: &mut [T]) {
        let Self::Product { left, right, g1, g2 } = self else {
            return x.iter_rows().zip(out.chunks_exact_mut(x.cols())).for_each(|(x, o)| o.copy_from_slice(x));
        };
        let r = g1.rows();
        let branch = |node: &Self, g: &Mat<T>, out: &mut [T]| {
            if let Self::Leaf = node {
                return gemm(isa, T::ONE, Op::N(x), Op::T(g.as_ref()), T::ZERO, out, r, scratch);
            }
            let mut inner = scratch.take::<T>(x.rows() * r);
            node.apply_into(x, isa, scratch, &mut inner);
            let inner = MatRef::new(&inner, x.rows(), r);
            gemm(isa, T::ONE, Op::N(inner), Op::T(g.as_ref()), T::ZERO, out, r, scratch);
        };
        branch(left, g1, out);
        let mut other = scratch.take::<T>(x.rows() * r);
        branch(right, g2, &mut other);
        out.iter_mut().zip(other.iter()).for_each(|(a, b)| *a *= *b);
    }

    /// Computes the sketches of all rows of `x`.
    fn apply(&self, x: MatRef<'_, T>) -> Mat<T> {
        match self {
            Self::Leaf => x.to_mat(),
            Self::Product { left, right, g1, g2 } => {
                let r = g1.rows();
                let branch = |node: &Self, g: &Mat<T>| {
                    let mut out = Mat::zeros(x.rows(), r);
                    if let Self::Leaf = node {
                        project(x, g, out.data_mut(), r);
                    } else {
                        project(node.apply(x).as_ref(), g, out.data_mut(), r);
                    }
                    out
                };
                let mut out = branch(left, g1);
                let other = branch(right, g2);
                out.data_mut().iter_mut().zip(other.data()).for_each(|(a, b)| *a *= *b);
                out
            }
        }
    }
}

/// Gaussian product sketch of a power of the inner product.
#[derive(Clone, Debug)]
pub struct ProductSketch<T> {
    root: Node<T>,
    d: usize,
    degree: u32,
    sketch_len: usize,
    self_tensored: bool,
    options: MapOptions,
}

impl<T: Real> ProductSketch<T> {
    /// Draws a sketch of size `r` of degree 1 to 64 for rows of length `d`. With `self_tensored`, `degree` must
    /// be even and the features are `r(r+1)/2` products, with a non-negative kernel.
    pub fn new(
        d: usize,
        degree: u32,
        r: usize,
        self_tensored: bool,
        scaling: ProductScale,
        key: StreamKey,
        options: MapOptions,
    ) -> Result<Self, SketchError> {
        ensure(options.scale > 0.0 && options.scale.is_finite(), "scale", options.scale, "positive")?;
        ensure((1..=64).contains(&degree), "degree", f64::from(degree), "1 to 64")?;
        ensure(!self_tensored || degree.is_multiple_of(2), "degree", f64::from(degree), "even")?;
        ensure(r > 0, "r", 0.0, "at least 1")?;
        ensure(d > 0, "d", 0.0, "at least 1")?;
        let half = if self_tensored { degree / 2 } else { degree };
        let factor = match scaling {
            ProductScale::Unbiased => 1.0 / (r as f64).sqrt(),
            ProductScale::ReferenceCode => 1.0 / r as f64,
        };
        let root = Node::draw(d, half, r, factor, key);
        let sketch_len = if half == 1 { d } else { r };
        Ok(Self { root, d, degree, sketch_len, self_tensored, options })
    }

    /// Converts to another element type, with the result of drawing in that type from the same stream.
    pub fn cast<U: Real>(&self) -> ProductSketch<U> {
        ProductSketch {
            root: self.root.cast(),
            d: self.d,
            degree: self.degree,
            sketch_len: self.sketch_len,
            self_tensored: self.self_tensored,
            options: self.options,
        }
    }

    /// Writes the sketches of rows before squaring; the rows are neither divided by their lengths nor multiplied by the
    /// root of the scale. Takes a few buffers of the output's size from `scratch`.
    ///
    /// # Panics
    ///
    /// If rows have the wrong length or `out` is not `rows × sketch_len`.
    pub fn sketch_into(&self, x: MatRef<'_, T>, isa: Isa, scratch: &Scratch, out: &mut [T]) {
        assert_eq!(x.cols(), self.d, "row length");
        assert_eq!(out.len(), x.rows() * self.sketch_len, "rows × sketch");
        self.root.apply_into(x, isa, scratch, out);
    }

    /// Returns the length of the sketch before it is squared.
    pub fn sketch_len(&self) -> usize {
        self.sketch_len
    }
}

impl<T: Real> SignedFeatures<T> for ProductSketch<T> {
    fn input_dim(&self) -> usize {
        self.d
    }

    fn num_features(&self) -> usize {
        if self.self_tensored { symmetric_square_len(self.sketch_len) } else { self.sketch_len }
    }

    fn signed_features(&self, x: MatRef<'_, T>, side: Side, out: &mut [T], log_scale: &mut [T]) {
        let m = SignedFeatures::<T>::num_features(self);
        check_signed_call(x, self.d, out, m, log_scale);
        let mut units = Mat::<T>::zeros(x.rows(), self.d);
        let mut unit = vec![0.0; self.d];
        for (i, row) in x.iter_rows().enumerate() {
            let log = normalise_into(row, 0.0, &mut unit) + 0.5 * self.options.scale.ln();
            units.row_mut(i).iter_mut().zip(&unit).for_each(|(o, u)| *o = T::from_f64(*u));
            log_scale[i] = row_scale(f64::from(self.degree) * log, side, self.options.constants);
        }
        let sketch = self.root.apply(units.as_ref());
        for (row, out) in sketch.as_ref().iter_rows().zip(out.chunks_exact_mut(m)) {
            if self.self_tensored {
                symmetric_square_into(row, out);
            } else {
                out.copy_from_slice(row);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sketch::testing::{check_moments, signed_kernel_of};
    use crate::sketch::variance::{Pair, product_sketch_variance, self_tensored_mean};

    const X: [f64; 3] = [1.0, 0.5, -0.3];
    const Y: [f64; 3] = [0.8, 0.9, 0.2];

    fn sketch(degree: u32, r: usize, self_tensored: bool, seed: u64) -> ProductSketch<f64> {
        let key = StreamKey::new(seed);
        ProductSketch::new(3, degree, r, self_tensored, ProductScale::Unbiased, key, MapOptions::default())
            .unwrap()
    }

    #[test]
    fn powers_are_unbiased_with_the_variance_of_the_recursion() {
        let pair = Pair::of(&X, &Y);
        // Products of Gaussians have heavy tails, which larger sketches reduce.
        for (degree, r, seeds, sharpness) in
            [(2, 16, 40_000, 0.15), (3, 24, 20_000, 0.25), (4, 32, 20_000, 0.3)]
        {
            let variance = product_sketch_variance(&pair, degree, r);
            let name = format!("degree {degree}");
            check_moments(&name, seeds, pair.xy.powi(degree as i32), variance, sharpness, |seed| {
                signed_kernel_of(&sketch(degree, r, false, seed), &X, &Y)
            });
        }
    }

    #[test]
    fn self_tensoring_is_biased_upwards_by_the_stated_amount() {
        let pair = Pair::of(&X, &Y);
        let (r, n) = (8, 20_000u32);
        let values: Vec<f64> =
            (0..n).map(|t| signed_kernel_of(&sketch(4, r, true, u64::from(t)), &X, &Y)).collect();
        assert!(values.iter().all(|v| *v >= -1e-12));
        let mean = values.iter().sum::<f64>() / f64::from(n);
        let spread = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / f64::from(n);
        let error = (spread / f64::from(n)).sqrt();
        let target = self_tensored_mean(&pair, 4, r);
        assert!((mean - target).abs() < 5.0 * error, "{mean}, {target}");
        assert!(mean - pair.xy.powi(4) > 10.0 * error);
    }

    #[test]
    fn one_branch_used_twice_would_be_biased() {
        // (Gx)⊙(Gx)/√r with the same G: mean ⟨x,y⟩² + (‖x‖²‖y‖² + ⟨x,y⟩²) instead of ⟨x,y⟩².
        let pair = Pair::of(&X, &Y);
        let (r, n) = (8, 4000u32);
        let mean = (0..n)
            .map(|t| {
                let mut rng = StreamKey::new(u64::from(t)).rng();
                let g = Mat::from_fn(r, 3, |_, _| rng.normal());
                let side = |x: &[f64]| -> Vec<f64> {
                    (0..r).map(|l| crate::linalg::dot(g.row(l), x).powi(2)).collect()
                };
                side(&X).iter().zip(side(&Y)).map(|(a, b)| a * b).sum::<f64>() / r as f64
            })
            .sum::<f64>()
            / f64::from(n);
        assert!(mean > 2.0 * pair.xy.powi(2));
    }

    #[test]
    fn low_degrees_are_exact_and_the_square_is_the_square() {
        let inner: f64 = X.iter().zip(&Y).map(|(a, b)| a * b).sum();
        assert!((signed_kernel_of(&sketch(1, 5, false, 0), &X, &Y) - inner).abs() < 1e-15);
        // Half of degree 2 is the row itself.
        assert!((signed_kernel_of(&sketch(2, 5, true, 0), &X, &Y) - inner * inner).abs() < 1e-14);
        let half = signed_kernel_of(&sketch(2, 5, false, 3), &X, &Y);
        assert!((signed_kernel_of(&sketch(4, 5, true, 3), &X, &Y) - half * half).abs() < 1e-13);
    }

    #[test]
    fn sketches_by_the_fast_kernel_are_the_same() {
        for degree in 1..=7 {
            let map = sketch(degree, 5, false, 2);
            let rows = [[0.6, 0.0, -0.8], [1.0, 0.0, 0.0]].concat();
            let x = MatRef::new(&rows, 2, 3);
            let mut fast = vec![f64::NAN; 2 * map.sketch_len()];
            map.sketch_into(x, Isa::best(), &Scratch::poisoned(), &mut fast);
            let (mut slow, mut log) = (fast.clone(), [f64::NAN; 2]);
            map.signed_features(x, Side::Key, &mut slow, &mut log);
            assert!(fast.iter().zip(&slow).all(|(a, b)| (a - b).abs() < 1e-13), "{degree}");
        }
    }

    #[test]
    fn the_published_scaling_divides_by_the_squared_size() {
        let build = |scaling| {
            ProductSketch::<f64>::new(3, 4, 8, true, scaling, StreamKey::new(5), MapOptions::default())
                .unwrap()
        };
        let ratio = signed_kernel_of(&build(ProductScale::Unbiased), &X, &Y)
            / signed_kernel_of(&build(ProductScale::ReferenceCode), &X, &Y);
        assert!((ratio / 64.0 - 1.0).abs() < 1e-12);
    }

    #[test]
    fn a_scaled_row_scales_the_kernel_and_extremes_are_finite() {
        let map = sketch(6, 4, false, 1);
        let triple = X.map(|x| 3.0 * x);
        let ratio = signed_kernel_of(&map, &triple, &Y) / signed_kernel_of(&map, &X, &Y);
        assert!((ratio / 729.0 - 1.0).abs() < 1e-12);
        let key = StreamKey::new(1);
        let map =
            ProductSketch::<f32>::new(2, 16, 4, true, ProductScale::Unbiased, key, MapOptions::default())
                .unwrap();
        let (mut out, mut scale) = ([f32::NAN; 20], [f32::NAN; 2]);
        map.signed_features(MatRef::new(&[0.0, 0.0, 3e38, -3e38], 2, 2), Side::Key, &mut out, &mut scale);
        assert!(out.iter().chain(&scale).all(|v| v.is_finite()));
        let odd =
            ProductSketch::<f32>::new(2, 3, 4, true, ProductScale::Unbiased, key, MapOptions::default());
        assert!(odd.is_err());
    }
}
