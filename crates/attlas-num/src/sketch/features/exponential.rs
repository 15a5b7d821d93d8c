//! Positive features of the exponential kernel $e^{\langle x, y\rangle}$: one family for all of them.
//!
//! $f(\omega, x) = D \exp(\omega^\top A \omega + \omega^\top B x + x^\top C x)$ with $\omega \sim N(0, I_d)$ is
//! unbiased if $B_1^\top (I - 4A)^{-1} B_2 = I$, $C_k = -\frac12 B_k^\top (I - 4A)^{-1} B_k$,
//! $D = \det(I - 4A)^{1/4}$, where 1 is the query and 2 the key side; the variance is finite if $8A \prec I$.
//!
//! * [`Exponent::favor`]: $A = 0$, $B = I$; positive features, or hyperbolic ones with $\pm\omega$
//!   (Choromanski et al. 2021).
//! * [`Exponent::oprf`]: scalar $A$ (Likhosherstov et al. 2022). [`optimal_a`] minimises the average log
//!   second moment; for negative $A$ features are bounded.
//! * [`Exponent::sderf`], [`Exponent::aderf`], [`Exponent::saderf`]: matrices (Likhosherstov et al. 2023),
//!   optimal for the second moments of queries and keys. The last two differ between the sides.
//!
//! $C = -I/2$ belongs to this kernel; $-I$ would belong to the Gaussian one and re-weight keys.
//! Orthogonal and simplex directions and the $\pm\omega$ form of $A \ne 0$ are constructions of this project:
//! unbiased by the same argument, variances in [`variance`](crate::sketch::variance).

use super::{Constants, LogFeatures, MapOptions, Side, check_call, saturate};
use crate::kernels::{Isa, Op, gemm};
use crate::linalg::{Svd, dot, matmul, matmul_nt, svd};
use crate::mat::{Mat, MatRef, Real};
use crate::scratch::Scratch;
use crate::sketch::project::{Projection, needs_wide, norm2, project};
use crate::sketch::{SketchError, ensure, ensure_size};

/// Returns the $A \le 0$ of smallest average log second moment if $\|x + y\|^2$ averages `z`.
///
/// $u = [(d + 2z) + \sqrt{(d+2z)^2 + 8dz}]/(2d)$, $A = (1 - u)/8$. For one pair the exact minimiser.
pub fn optimal_a(z: f64, d: usize) -> f64 {
    let d = d as f64;
    // Above the bound, which no data reaches, the squares below would overflow.
    let z = z.clamp(0.0, 1e120);
    let s = d + 2.0 * z;
    // (1 − u)·2d = d − 2z − √(…) is a difference of near numbers at small z; this form is not.
    let root = (s * s + 8.0 * d * z).sqrt();
    -(2.0 * z + (8.0 * d * z + 4.0 * z * (d + z)) / (root + d)) / (16.0 * d)
}

/// Sums over the rows of one side, in f64; data in several pieces is added piece by piece.
#[derive(Clone, Debug)]
pub struct SideMoments {
    count: usize,
    sum: Vec<f64>,
    squares: Vec<f64>,
    outer: Option<Mat<f64>>,
}

impl SideMoments {
    /// Creates empty sums for means and mean squares of coordinates; enough for [`Exponent::saderf`] and
    /// [`Moments::mean_sum_norm2`].
    pub fn diagonal(d: usize) -> Self {
        Self { count: 0, sum: vec![0.0; d], squares: vec![0.0; d], outer: None }
    }

    /// Creates empty sums for all second moments, for [`Exponent::sderf`] and [`Exponent::aderf`].
    pub fn dense(d: usize) -> Self {
        Self { outer: Some(Mat::zeros(d, d)), ..Self::diagonal(d) }
    }

    /// Restores what [`means`](Self::means) returned, as if from one row with these means of products. Panics on wrong
    /// shapes.
    pub fn from_means(mean: Vec<f64>, outer: Mat<f64>) -> Self {
        assert!(outer.rows() == mean.len() && outer.cols() == mean.len(), "d × d second moments");
        let squares = (0..mean.len()).map(|i| outer[(i, i)]).collect();
        Self { count: 1, sum: mean, squares, outer: Some(outer) }
    }

    /// Returns the mean, and the mean of $x x^\top$ if it was collected.
    pub fn means(&self) -> (Vec<f64>, Option<Mat<f64>>) {
        let n = self.count.max(1) as f64;
        let outer = self.outer.as_ref().map(|m| Mat::from_fn(m.rows(), m.cols(), |i, j| m[(i, j)] / n));
        (self.sum.iter().map(|s| s / n).collect(), outer)
    }

    /// Adds rows. Panics if their length is wrong.
    pub fn add<T: Real>(&mut self, x: MatRef<'_, T>) {
        let d = self.sum.len();
        assert_eq!(x.cols(), d, "row length");
        self.count += x.rows();
        let scratch = Scratch::new();
        let mut wide = scratch.take::<f64>(x.rows().min(BLOCK) * d);
        for start in (0..x.rows()).step_by(BLOCK) {
            let n = (x.rows() - start).min(BLOCK);
            for (row, wide) in x.sub_rows(start..start + n).iter_rows().zip(wide.chunks_exact_mut(d.max(1))) {
                for (((&v, wide), sum), square) in
                    row.iter().zip(wide).zip(&mut self.sum).zip(&mut self.squares)
                {
                    *wide = v.to_f64();
                    *sum += *wide;
                    *square += *wide * *wide;
                }
            }
            if let Some(outer) = &mut self.outer {
                let rows = MatRef::new(&wide[..n * d], n, d);
                gemm(Isa::best(), 1.0, Op::T(rows), Op::N(rows), 1.0, outer.data_mut(), d, &scratch);
            }
        }
    }

    /// Adds the rows of other sums. Panics if their length or kind differs.
    pub fn merge(&mut self, other: &SideMoments) {
        assert!(self.sum.len() == other.sum.len() && self.outer.is_some() == other.outer.is_some());
        let add = |to: &mut [f64], from: &[f64]| to.iter_mut().zip(from).for_each(|(a, b)| *a += b);
        self.count += other.count;
        add(&mut self.sum, &other.sum);
        add(&mut self.squares, &other.squares);
        if let (Some(to), Some(from)) = (&mut self.outer, &other.outer) {
            add(to.data_mut(), from.data());
        }
    }
}

/// Rows whose second moments are computed together.
const BLOCK: usize = 256;

/// First and second moments of queries $x$ and keys $y$, scaled.
#[derive(Clone, Debug)]
pub struct Moments {
    mean: [Vec<f64>; 2],
    squares: [Vec<f64>; 2],
    outer: Option<[Mat<f64>; 2]>,
}

impl Moments {
    /// Builds the moments from the sums of both sides, for maps that multiply rows by $\sqrt{\mathrm{scale}}$. A side
    /// without rows counts as zero.
    pub fn new(query: &SideMoments, key: &SideMoments, scale: f64) -> Result<Self, SketchError> {
        ensure_size("row length of keys", query.sum.len(), key.sum.len())?;
        ensure(scale > 0.0 && scale.is_finite(), "scale", scale, "positive and finite")?;
        let per_row = |side: &SideMoments| 1.0 / side.count.max(1) as f64;
        let mean = |side: &SideMoments| -> Vec<f64> {
            side.sum.iter().map(|s| s * per_row(side) * scale.sqrt()).collect()
        };
        let squares = |side: &SideMoments| -> Vec<f64> {
            side.squares.iter().map(|s| s * per_row(side) * scale).collect()
        };
        let outer = |side: &SideMoments| {
            let outer = side.outer.as_ref()?;
            let factor = per_row(side) * scale;
            // Reads one triangle, so rounding cannot make it asymmetric.
            Some(Mat::from_fn(outer.rows(), outer.rows(), |i, j| factor * outer[(i.max(j), i.min(j))]))
        };
        let moments = Self {
            mean: [mean(query), mean(key)],
            squares: [squares(query), squares(key)],
            outer: outer(query).zip(outer(key)).map(|(q, k)| [q, k]),
        };
        let z = moments.mean_sum_norm2();
        ensure(z.is_finite(), "mean squared norm", z, "finite data")?;
        Ok(moments)
    }

    /// Row length.
    pub fn dim(&self) -> usize {
        self.mean[0].len()
    }

    /// Mean of $\langle x, y\rangle$ over all pairs.
    pub fn mean_score(&self) -> f64 {
        dot(&self.mean[0], &self.mean[1])
    }

    /// Mean of $\|x + y\|^2$ over all pairs, the $z$ of [`optimal_a`].
    pub fn mean_sum_norm2(&self) -> f64 {
        let squares: f64 = self.squares.iter().flatten().sum();
        (squares + 2.0 * self.mean_score()).max(0.0)
    }

    /// Returns the second moments with a ridge relative to their average eigenvalue.
    fn ridged(&self, ridge: f64) -> Result<[Mat<f64>; 2], SketchError> {
        ensure(ridge >= 0.0 && ridge.is_finite(), "ridge", ridge, "finite and not negative")?;
        let outer = self.outer.as_ref().ok_or(SketchError::InvalidParam {
            name: "moments",
            value: 0.0,
            expected: "dense second moments of both sides",
        })?;
        Ok(outer.clone().map(|mut m| {
            let d = m.rows();
            let trace: f64 = (0..d).map(|i| m[(i, i)]).sum();
            (0..d).for_each(|i| m[(i, i)] += ridge * trace / d.max(1) as f64);
            m
        }))
    }
}

/// $d \times d$ matrix with the structure of a variant.
#[derive(Clone, Debug)]
enum Linear {
    Scaled(f64),
    Diagonal(Vec<f64>),
    Dense(Mat<f64>),
}

impl Linear {
    /// Computes $L x$.
    fn apply(&self, x: &[f64]) -> Vec<f64> {
        match self {
            Self::Scaled(c) => x.iter().map(|x| c * x).collect(),
            Self::Diagonal(c) => c.iter().zip(x).map(|(c, x)| c * x).collect(),
            Self::Dense(m) => (0..m.rows()).map(|i| dot(m.row(i), x)).collect(),
        }
    }

    /// Computes $L^\top x$.
    fn apply_transposed(&self, x: &[f64]) -> Vec<f64> {
        match self {
            Self::Dense(m) => (0..m.cols()).map(|j| (0..m.rows()).map(|i| m[(i, j)] * x[i]).sum()).collect(),
            diagonal => diagonal.apply(x),
        }
    }

    /// Computes $\|L x\|^2$.
    fn norm2(&self, x: &[f64]) -> f64 {
        let y = self.apply(x);
        dot(&y, &y)
    }

    /// Computes $\|L x\|^2$ for every row of `x`.
    fn norms2<T: Real>(&self, x: MatRef<'_, T>) -> Vec<f64> {
        match self {
            Self::Scaled(c) => x.iter_rows().map(|row| c * c * norm2(row)).collect(),
            Self::Diagonal(c) => {
                let square = |row: &[T]| c.iter().zip(row).map(|(c, x)| (c * x.to_f64()).powi(2)).sum();
                x.iter_rows().map(square).collect()
            }
            Self::Dense(m) => {
                let mut wide = Mat::zeros(x.rows(), x.cols());
                for (i, row) in x.iter_rows().enumerate() {
                    // The bounds keep sums from overflowing with both signs; NaN stays.
                    let bounded = row.iter().map(|x| x.to_f64().clamp(-1e140, 1e140));
                    wide.row_mut(i).iter_mut().zip(bounded).for_each(|(w, x)| *w = x);
                }
                let mut y = Mat::zeros(x.rows(), m.rows());
                project(wide.as_ref(), m, y.data_mut(), m.rows());
                (0..x.rows()).map(|i| dot(y.row(i), y.row(i))).collect()
            }
        }
    }

    /// Computes $\mathrm{root} \cdot \Omega L$, rounded once.
    fn fold<T: Real>(&self, omega: &Mat<f64>, root: f64) -> Mat<T> {
        let entry = |f: &dyn Fn(usize, usize) -> f64| {
            Mat::from_fn(omega.rows(), omega.cols(), |l, j| T::from_f64(root * f(l, j)))
        };
        match self {
            Self::Scaled(c) => entry(&|l, j| c * omega[(l, j)]),
            Self::Diagonal(c) => entry(&|l, j| c[j] * omega[(l, j)]),
            Self::Dense(m) => {
                let product = matmul(omega.as_ref(), m.as_ref());
                entry(&|l, j| product[(l, j)])
            }
        }
    }

    /// Computes $E (Lx)_c^2$ for each $c$; `None` if it needs second moments that are missing.
    fn mean_squares(&self, moments: &Moments, side: usize) -> Option<Vec<f64>> {
        let squares = &moments.squares[side];
        Some(match self {
            Self::Scaled(c) => squares.iter().map(|s| c * c * s).collect(),
            Self::Diagonal(c) => c.iter().zip(squares).map(|(c, s)| c * c * s).collect(),
            Self::Dense(m) => {
                let outer = &moments.outer.as_ref()?[side];
                let product = matmul(m.as_ref(), outer.as_ref());
                (0..m.rows()).map(|i| dot(product.row(i), m.row(i))).collect()
            }
        })
    }
}

/// Computes the singular value decomposition of moments.
fn decomposed(a: &Mat<f64>) -> Result<Svd, SketchError> {
    let refused = SketchError::InvalidParam { name: "moments", value: f64::NAN, expected: "finite numbers" };
    svd(a.as_ref()).map_err(|_| refused)
}

/// $B$ and $C$ of one side; $x^\top C x = -\frac12 \|L x\|^2$.
#[derive(Clone, Debug)]
struct SideForm {
    b: Linear,
    l: Linear,
}

/// The parameters $A$, $B$, $C$, $D$ of exponential features, in f64.
#[derive(Clone, Debug)]
pub struct Exponent {
    /// The diagonal of $A$.
    a: Vec<f64>,
    query: SideForm,
    /// The key side, if it differs.
    key: Option<SideForm>,
    /// $\ln D$.
    log_d: f64,
}

impl Exponent {
    /// $A = 0$: the positive and hyperbolic maps of FAVOR+.
    pub fn favor(d: usize) -> Self {
        let form = SideForm { b: Linear::Scaled(1.0), l: Linear::Scaled(1.0) };
        Self { a: vec![0.0; d], query: form, key: None, log_d: 0.0 }
    }

    /// Scalar $A < 1/8$: $B = \sqrt{1 - 4A}$, $D = (1 - 4A)^{d/4}$.
    pub fn oprf(d: usize, a: f64) -> Result<Self, SketchError> {
        ensure(a < 0.125 && a.is_finite(), "A", a, "finite and below 1/8")?;
        let b = (1.0 - 4.0 * a).sqrt();
        Ok(Self {
            a: vec![a; d],
            query: SideForm { b: Linear::Scaled(b), l: Linear::Scaled(1.0) },
            key: None,
            log_d: 0.25 * d as f64 * (-4.0 * a).ln_1p(),
        })
    }

    /// Scalar $A$, optimal on average for data with these moments.
    pub fn oprf_auto(moments: &Moments) -> Result<Self, SketchError> {
        Self::oprf(moments.dim(), optimal_a(moments.mean_sum_norm2(), moments.dim()))
    }

    /// Symmetric dense: $A$ diagonal in the eigenbasis of the second moment of $x + y$. `ridge` is relative.
    pub fn sderf(moments: &Moments, ridge: f64) -> Result<Self, SketchError> {
        let [m1, m2] = moments.ridged(ridge)?;
        let [mu1, mu2] = &moments.mean;
        let d = moments.dim();
        let total = Mat::from_fn(d, d, |i, j| m1[(i, j)] + m2[(i, j)] + mu1[i] * mu2[j] + mu2[i] * mu1[j]);
        // Positive semi-definite, so singular values are eigenvalues.
        let Svd { sigma, v, .. } = decomposed(&total)?;
        let a: Vec<f64> = sigma.iter().map(|&lambda| optimal_a(lambda, 1)).collect();
        let b = Mat::from_fn(d, d, |i, j| (1.0 - 4.0 * a[i]).sqrt() * v[(j, i)]);
        let log_d = 0.25 * a.iter().map(|a| (-4.0 * a).ln_1p()).sum::<f64>();
        Ok(Self { a, query: SideForm { b: Linear::Dense(b), l: Linear::Scaled(1.0) }, key: None, log_d })
    }

    /// Asymmetric dense: scalar $A$, different $B$ on the two sides. `ridge` is relative; data that is zero on
    /// one side gives [`oprf_auto`](Self::oprf_auto).
    pub fn aderf(moments: &Moments, ridge: f64) -> Result<Self, SketchError> {
        ensure(ridge > 0.0 && ridge.is_finite(), "ridge", ridge, "positive and finite")?;
        let outer = moments.ridged(ridge)?;
        let d = moments.dim();
        if outer.iter().any(|m| (0..d).all(|i| m[(i, i)] == 0.0)) {
            return Self::oprf_auto(moments);
        }
        // M_k = Q_k Λ_k Q_kᵀ; row i of `roots` is √λ_i times eigenvector i.
        let eigen = [decomposed(&outer[0])?, decomposed(&outer[1])?];
        let roots = eigen.each_ref().map(|e| Mat::from_fn(d, d, |i, j| e.sigma[i].sqrt() * e.v[(j, i)]));
        let Svd { u, sigma, v } = decomposed(&matmul_nt(roots[0].as_ref(), roots[1].as_ref()))?;
        let z = 2.0 * (sigma.iter().sum::<f64>() + moments.mean_score());
        let a = optimal_a(z, d);
        let scalar = Self::oprf(d, a)?;
        let side = |k: usize, u: &Mat<f64>| {
            let whitened = Mat::from_fn(d, d, |i, j| eigen[k].v[(j, i)] / eigen[k].sigma[i].sqrt());
            let turned = Mat::from_fn(d, d, |i, j| sigma[i].sqrt() * u[(j, i)]);
            let l = matmul(turned.as_ref(), whitened.as_ref());
            let b = Mat::from_fn(d, d, |i, j| (1.0 - 4.0 * a).sqrt() * l[(i, j)]);
            SideForm { b: Linear::Dense(b), l: Linear::Dense(l) }
        };
        Ok(Self { query: side(0, &u), key: Some(side(1, &v)), ..scalar })
    }

    /// Asymmetric diagonal: [`oprf`](Self::oprf) after $x \to \psi x$, $y \to y/\psi$ with
    /// $\psi_c = (E y_c^2 / E x_c^2)^{1/4}$, 1 where either is zero.
    pub fn saderf(moments: &Moments) -> Result<Self, SketchError> {
        let psi: Vec<f64> = moments.squares[0]
            .iter()
            .zip(&moments.squares[1])
            .map(|(x, y)| if *x > 0.0 && *y > 0.0 { (y.sqrt() / x.sqrt()).sqrt() } else { 1.0 })
            .collect();
        let squares: f64 = (0..psi.len())
            .map(|c| psi[c] * psi[c] * moments.squares[0][c] + moments.squares[1][c] / (psi[c] * psi[c]))
            .sum();
        let d = psi.len();
        let a = optimal_a(squares + 2.0 * moments.mean_score(), d);
        let b = (1.0 - 4.0 * a).sqrt();
        let side = |factors: Vec<f64>| SideForm {
            b: Linear::Diagonal(factors.iter().map(|f| b * f).collect()),
            l: Linear::Diagonal(factors),
        };
        let key = side(psi.iter().map(|p| 1.0 / p).collect());
        Ok(Self { query: side(psi), key: Some(key), ..Self::oprf(d, a)? })
    }

    /// Row length.
    pub fn dim(&self) -> usize {
        self.a.len()
    }

    /// The diagonal of $A$.
    pub fn a(&self) -> &[f64] {
        &self.a
    }

    fn side(&self, side: Side) -> &SideForm {
        match side {
            Side::Query => &self.query,
            Side::Key => self.key.as_ref().unwrap_or(&self.query),
        }
    }

    /// $4 \ln D - \frac12 \ln\det(I - 8A)$.
    fn log_constant(&self) -> f64 {
        4.0 * self.log_d - 0.5 * self.a.iter().map(|a| (-8.0 * a).ln_1p()).sum::<f64>()
    }

    /// Computes $\ln E[f(\omega, x)^2 f(\omega, y)^2]$ for scaled rows.
    pub fn log_second_moment(&self, x: &[f64], y: &[f64]) -> f64 {
        let (q, k) = (self.side(Side::Query), self.side(Side::Key));
        let (u, w) = (q.b.apply(x), k.b.apply(y));
        let sum: f64 =
            self.a.iter().zip(u.iter().zip(&w)).map(|(a, (u, w))| (u + w).powi(2) / (1.0 - 8.0 * a)).sum();
        self.log_constant() - q.l.norm2(x) - k.l.norm2(y) + 2.0 * sum
    }

    /// Returns the variance of the estimate from independent directions, relative to $e^{2\langle x, y\rangle}$.
    pub fn relative_variance(&self, x: &[f64], y: &[f64], directions: usize) -> f64 {
        let log = self.log_second_moment(x, y) - 2.0 * dot(x, y);
        log.exp_m1().max(0.0) / directions as f64
    }

    /// Returns the average of [`log_second_moment`](Self::log_second_moment) over all pairs of data with these moments;
    /// `None` if it needs dense moments that were not collected.
    pub fn mean_log_second_moment(&self, moments: &Moments) -> Option<f64> {
        let (q, k) = (self.side(Side::Query), self.side(Side::Key));
        let (u2, w2) = (q.b.mean_squares(moments, 0)?, k.b.mean_squares(moments, 1)?);
        let (u, w) = (q.b.apply(&moments.mean[0]), k.b.apply(&moments.mean[1]));
        let sum: f64 =
            (0..self.dim()).map(|c| (u2[c] + w2[c] + 2.0 * u[c] * w[c]) / (1.0 - 8.0 * self.a[c])).sum();
        Some(self.mean_log_opposite_moment(moments)? + 2.0 * sum)
    }

    /// Returns the average of $\ln E[f(\omega, x) f(-\omega, x) f(\omega, y) f(-\omega, y)]$ over all pairs.
    pub fn mean_log_opposite_moment(&self, moments: &Moments) -> Option<f64> {
        let norm =
            |side: Side, k: usize| Some(self.side(side).l.mean_squares(moments, k)?.iter().sum::<f64>());
        Some(self.log_constant() - norm(Side::Query, 0)? - norm(Side::Key, 1)?)
    }
}

/// One side of the map, ready to apply: $\sqrt{\mathrm{scale}}\,\Omega B$ and $L$.
#[derive(Clone, Debug)]
struct SideMap<T> {
    omega: Projection<T>,
    l: Linear,
}

/// Exponential features; with `antithetic`, $M$ directions give $2M$ features, those of $-\omega$ last.
#[derive(Clone, Debug)]
pub struct ExpFeatures<T> {
    query: SideMap<T>,
    key: Option<SideMap<T>>,
    /// $\omega_l^\top A \omega_l$, also rounded to the element type.
    offsets: Vec<f64>,
    short_offsets: Vec<T>,
    /// $\ln D - \frac12 \ln m$.
    log_constant: f64,
    antithetic: bool,
    options: MapOptions,
}

impl<T: Real> ExpFeatures<T> {
    /// Builds the map from parameters and the rows of `directions`.
    pub fn new(
        exponent: &Exponent,
        directions: &Mat<f64>,
        antithetic: bool,
        options: MapOptions,
    ) -> Result<Self, SketchError> {
        options.validate()?;
        ensure_size("length of directions", exponent.dim(), directions.cols())?;
        ensure(directions.rows() > 0, "directions", 0.0, "at least one")?;
        let root = options.scale.sqrt();
        let side = |form: &SideForm| SideMap {
            omega: Projection::new(form.b.fold(directions, root)),
            l: form.l.clone(),
        };
        let offsets: Vec<f64> = (0..directions.rows())
            .map(|l| directions.row(l).iter().zip(&exponent.a).map(|(w, a)| a * w * w).sum())
            .collect();
        let m = directions.rows() * if antithetic { 2 } else { 1 };
        Ok(Self {
            query: side(&exponent.query),
            key: exponent.key.as_ref().map(side),
            short_offsets: offsets.iter().map(|&x| T::from_f64(x)).collect(),
            offsets,
            log_constant: exponent.log_d - 0.5 * (m as f64).ln(),
            antithetic,
            options,
        })
    }
}

/// Constants of one side of exponential features. The logarithm of feature $l$ of $x$ is
/// $c_l + \langle \Omega_l, x \rangle - \frac12 \|N x\|^2$; for $-\omega_l$ the inner product has the opposite sign.
#[derive(Clone, Debug)]
pub struct ExpParts {
    /// $\Omega$, one direction per row.
    pub directions: Mat<f64>,
    /// $c$.
    pub constants: Vec<f64>,
    /// $N$; if `None`, a multiple of the identity.
    pub norm: Option<Mat<f64>>,
    /// The square of that multiple.
    pub norm_scale: f64,
}

impl ExpFeatures<f64> {
    /// Returns the constants of one side, for maps that run elsewhere. None of them is dropped.
    pub fn parts(&self, side: Side) -> ExpParts {
        let map = match side {
            Side::Query => &self.query,
            Side::Key => self.key.as_ref().unwrap_or(&self.query),
        };
        let (d, root) = (map.omega.dim(), self.options.scale.sqrt());
        let (norm, norm_scale) = match &map.l {
            Linear::Scaled(c) => (None, c * c * self.options.scale),
            Linear::Diagonal(c) => {
                (Some(Mat::from_fn(d, d, |i, j| if i == j { root * c[i] } else { 0.0 })), 1.0)
            }
            Linear::Dense(m) => (Some(Mat::from_fn(m.rows(), d, |i, j| root * m[(i, j)])), 1.0),
        };
        ExpParts {
            directions: map.omega.directions().clone(),
            constants: self.offsets.iter().map(|o| self.log_constant + o).collect(),
            norm,
            norm_scale,
        }
    }
}

impl<T: Real> LogFeatures<T> for ExpFeatures<T> {
    fn input_dim(&self) -> usize {
        self.query.omega.dim()
    }

    fn num_features(&self) -> usize {
        self.offsets.len() * if self.antithetic { 2 } else { 1 }
    }

    fn log_features(&self, x: MatRef<'_, T>, side: Side, out: &mut [T]) {
        let m = LogFeatures::<T>::num_features(self);
        let map = match side {
            Side::Query => &self.query,
            Side::Key => self.key.as_ref().unwrap_or(&self.query),
        };
        check_call(x, map.omega.dim(), out, m);
        let constant = if self.options.constants == Constants::Keep { self.log_constant } else { 0.0 };
        let mut norms = map.l.norms2(x);
        norms.iter_mut().for_each(|n| *n *= self.options.scale);
        let count = self.offsets.len();
        map.omega.rows(
            x,
            out,
            m,
            |i| needs_wide::<T>(norms[i]),
            |i, projections, row| {
                let common = if self.options.drops(side) { 0.0 } else { constant - 0.5 * norms[i] };
                let (plus, minus) = row.split_at_mut(count);
                if let Some(projections) = projections {
                    for (l, (&p, offset)) in projections.iter().zip(&self.offsets).enumerate() {
                        plus[l] = log_value(p, common + offset);
                        if self.antithetic {
                            minus[l] = log_value(-p, common + offset);
                        }
                    }
                    return;
                }
                // Rows of moderate length stay inside the range of the type.
                let common = T::from_f64(common);
                if self.antithetic {
                    for ((plus, minus), &offset) in plus.iter_mut().zip(minus).zip(&self.short_offsets) {
                        let (p, base) = (*plus, common + offset);
                        *plus = base + p;
                        *minus = base - p;
                    }
                } else {
                    plus.iter_mut().zip(&self.short_offsets).for_each(|(p, &offset)| *p += common + offset);
                }
            },
        );
    }

    fn has_gradient(&self) -> bool {
        true
    }

    fn pull_back(&self, x: MatRef<'_, T>, side: Side, g: &[T], dx: &mut [T]) {
        let (m, d) = (LogFeatures::<T>::num_features(self), LogFeatures::<T>::input_dim(self));
        let map = match side {
            Side::Query => &self.query,
            Side::Key => self.key.as_ref().unwrap_or(&self.query),
        };
        check_call(x, d, g, m);
        assert_eq!(dx.len(), x.rows() * d, "one gradient per entry");
        for ((row, g), dx) in x.iter_rows().zip(g.chunks_exact(m)).zip(dx.chunks_exact_mut(d)) {
            dx.fill(T::ZERO);
            let (plus, minus) = g.split_at(self.offsets.len());
            for (l, &up) in plus.iter().enumerate() {
                let g = if self.antithetic { up - minus[l] } else { up };
                crate::kernels::axpy(g, map.omega.directions().row(l), dx);
            }
            if !self.options.drops(side) {
                // −½ s‖Lx‖² has the gradient −s LᵀLx.
                let total = g.iter().map(|g| g.to_f64()).sum::<f64>() * self.options.scale;
                let wide: Vec<f64> = row.iter().map(|x| x.to_f64()).collect();
                let back = map.l.apply_transposed(&map.l.apply(&wide));
                dx.iter_mut().zip(&back).for_each(|(d, b)| *d -= T::from_f64(total * b));
            }
        }
    }
}

/// Returns `projection + base` as a log-feature: an exact zero below the range of the type, the largest number above
/// it.
fn log_value<T: Real>(projection: f64, base: f64) -> T {
    if base == f64::NEG_INFINITY && !projection.is_nan() {
        return T::NEG_INFINITY;
    }
    let log = projection + base;
    if log > 0.0 { saturate(log) } else { T::from_f64(log) }
}

#[cfg(test)]
mod tests;
