//! Closed forms of means and variances: they predict an estimator's error before it runs.
//!
//! With $v^2 = \|x + y\|^2$, $\delta^2 = \|x - y\|^2$ and $\mathrm{SM} = e^{\langle x, y\rangle}$, variances of
//! the exponential kernel are given **relative to $\mathrm{SM}^2$**; they then depend on $v^2$ (positive
//! features) or $\delta^2$ (trigonometric ones) alone, and stay finite as long as possible.
//!
//! For $M$ directions in blocks with $P = \sum_b n_b (n_b - 1)$ ordered pairs inside blocks
//! (Choromanski et al. 2021 for independent directions, Likhosherstov et al. 2022 for $A \ne 0$; the pair
//! terms are derived in this project and checked by simulation):
//!
//! * generalised exponential, parameter $A < 1/8$, one-sided:
//!   $\frac{1}{M^2}\left[M (Q e^{-v^2} - 1) - P (1 - \rho e^{-v^2})\right]$ with
//!   $Q = c\, e^{2(1-4A)v^2/(1-8A)}$, $c = (1-4A)^d (1-8A)^{-d/2}$; with features for $\pm\omega$, $Q$ becomes
//!   $(Q + c)/2$. $A = 0$ are the positive and the hyperbolic map.
//! * trigonometric: $\frac{1}{M^2}\left[M (\cosh \delta^2 - 1) - P (1 - \rho_t e^{\delta^2})\right]$.
//!
//! $\rho$ is the mean of $e^{(\omega_1 + \omega_2) \cdot v}$ over a pair of a block: ${}_1F_1(d; d/2; v^2/2)$ for
//! orthogonal pairs, and its average over the angle between lengths for a fixed cosine (simplex).

use super::directions::Coupling;
use super::features::{Exponent, Moments};
use super::project::{dot_wide, norm2_wide};

/// The three numbers of a pair of rows on which the formulas depend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pair {
    /// $\|x\|^2$.
    pub x2: f64,
    /// $\|y\|^2$.
    pub y2: f64,
    /// $\langle x, y \rangle$.
    pub xy: f64,
}

impl Pair {
    /// Computes the numbers of two rows, already scaled.
    pub fn of(x: &[f64], y: &[f64]) -> Self {
        Self { x2: norm2_wide(x), y2: norm2_wide(y), xy: dot_wide(x, y) }
    }

    /// Returns $\|x + y\|^2$.
    pub fn v2(&self) -> f64 {
        (self.x2 + self.y2 + 2.0 * self.xy).max(0.0)
    }

    /// Returns $\|x - y\|^2$.
    pub fn delta2(&self) -> f64 {
        (self.x2 + self.y2 - 2.0 * self.xy).max(0.0)
    }

    /// Returns $e^{\langle x, y\rangle}$.
    pub fn sm(&self) -> f64 {
        self.xy.exp()
    }

    /// Returns the angle between the rows; a right one if either is zero.
    pub fn angle(&self) -> f64 {
        let norm = (self.x2 * self.y2).sqrt();
        if norm > 0.0 { (self.xy / norm).clamp(-1.0, 1.0).acos() } else { std::f64::consts::FRAC_PI_2 }
    }
}

/// Returns the number of ordered pairs of directions that share a block of `d`.
pub fn block_pairs(directions: usize, d: usize) -> f64 {
    let pairs = |n: usize| n as f64 * (n as f64 - 1.0);
    (directions / d) as f64 * pairs(d) + pairs(directions % d)
}

/// Computes $\ln {}_1F_1(a; b; z)$ for $a, b > 0$ and $z \ge 0$, where all terms of the series are positive.
pub fn ln_hyp1f1(a: f64, b: f64, z: f64) -> f64 {
    if z.is_infinite() {
        return z;
    }
    if z > 1e5 {
        // Leading term of the expansion at infinity (DLMF 13.7.1).
        return libm::lgamma(b) - libm::lgamma(a) + z + (a - b) * z.ln() + ((b - a) * (1.0 - a) / z).ln_1p();
    }
    ln_series(|k| (a + k) / (b + k) * z / (k + 1.0))
}

/// Computes the logarithm of $1 + t_1 + t_2 + \dots$ with positive terms, $t_{k+1} = \mathrm{ratio}(k)\, t_k$, whose
/// ratios fall to zero.
fn ln_series(ratio: impl Fn(f64) -> f64) -> f64 {
    let (mut term, mut sum, mut log) = (1.0f64, 1.0f64, 0.0);
    let mut k = 0.0;
    loop {
        let factor = ratio(k);
        term *= factor;
        sum += term;
        k += 1.0;
        if sum > 1e200 {
            log += sum.ln();
            term /= sum;
            sum = 1.0;
        }
        // Past the largest term the rest is below a geometric series.
        if factor.is_nan() || (factor <= 0.5 && term <= f64::EPSILON * 1e-2 * sum) {
            return log + sum.ln();
        }
    }
}

/// Computes ${}_1F_1(-d/2; d/2; z)$ for $z \ge 0$, a polynomial for even $d$.
fn kummer_polynomial(d: usize, z: f64) -> f64 {
    let h = d as f64 / 2.0;
    let (mut term, mut sum) = (1.0f64, 1.0);
    let mut k = 0.0;
    while term != 0.0 && (k < h + z || term.abs() > f64::EPSILON * 1e-2 * sum) && k < 1e6 {
        term *= (k - h) / (h + k) * z / (k + 1.0);
        sum += term;
        k += 1.0;
    }
    sum
}

/// Computes $1 - \rho\, e^{-v^2}$ for two directions of a block at cosine `cosine`, with independent $\chi_d$ lengths:
/// the reduction per ordered pair of the variance of one-sided features, relative to $\mathrm{SM}^2$.
pub fn pair_gain(d: usize, v2: f64, cosine: f64) -> f64 {
    let n = d as f64;
    let at = |u: f64| ln_hyp1f1(n, n / 2.0, 0.5 * v2 * (1.0 + cosine * u)) - v2;
    if cosine == 0.0 {
        return -at(0.0).exp_m1();
    }
    // With lengths n₁, n₂: s = n₁² + n₂² is χ²_{2d}, independent of u = 2n₁n₂/s = sin ψ, whose density is
    // proportional to sin^{d−1} ψ on (0, π). The trapezoidal rule after a substitution that flattens both ends.
    const POINTS: usize = 512;
    let (mut total, mut weight) = (0.0, 0.0);
    for i in 1..POINTS {
        let t = i as f64 / POINTS as f64;
        let psi = std::f64::consts::PI * t * t * t * (10.0 - 15.0 * t + 6.0 * t * t);
        let sine = psi.sin().abs();
        let w = sine.powf(n - 1.0) * (t * (1.0 - t)).powi(2);
        total -= w * at(sine).exp_m1();
        weight += w;
    }
    total / weight
}

/// Returns the variance that a coupling removes per ordered pair; `even` for features of both $\pm\omega$.
fn coupling_gain(coupling: Coupling, d: usize, v2: f64, even: bool) -> f64 {
    match coupling {
        Coupling::Iid => 0.0,
        Coupling::Simplex if d >= 2 => {
            let c = -1.0 / (d as f64 - 1.0);
            let one = pair_gain(d, v2, c);
            if even { 0.5 * (one + pair_gain(d, v2, -c)) } else { one }
        }
        _ => pair_gain(d, v2, 0.0),
    }
}

/// Returns the relative variance of generalised exponential features with parameter $A$, `directions` directions, and
/// features for both $\pm\omega$ if `antithetic`.
///
/// $A = 0$ gives the positive (one-sided) and the hyperbolic map (antithetic). Infinite for $A \ge 1/8$.
/// Couplings other than independent and simplex count as orthogonal.
pub fn exp_relative_variance(
    pair: &Pair,
    d: usize,
    directions: usize,
    coupling: Coupling,
    a: f64,
    antithetic: bool,
) -> f64 {
    if a >= 0.125 {
        return f64::INFINITY;
    }
    let (n, m, v2) = (d as f64, directions as f64, pair.v2());
    let log_c = n * (-4.0 * a).ln_1p() - 0.5 * n * (-8.0 * a).ln_1p();
    let t = (1.0 - 4.0 * a) / (1.0 - 8.0 * a) * v2;
    // log of c·e^{t − v²}; t − v² without cancellation.
    let s = log_c + 4.0 * a / (1.0 - 8.0 * a) * v2;
    let single =
        if antithetic { s.exp_m1() + 2.0 * s.exp() * (0.5 * t).sinh().powi(2) } else { (s + t).exp_m1() };
    let gain = coupling_gain(coupling, d, v2, antithetic);
    coupled(single, gain, m, block_pairs(directions, d))
}

/// Computes $[M \cdot \mathrm{single} - P \cdot \mathrm{gain}] / M^2$, not below zero.
fn coupled(single: f64, gain: f64, m: f64, pairs: f64) -> f64 {
    if single.is_infinite() { single } else { ((single - pairs / m * gain) / m).max(0.0) }
}

/// Returns the relative variance of trigonometric features.
///
/// Assumes independent directions, or orthogonal blocks for every other coupling. Simplex blocks have no closed form
/// here: their pair term is taken as zero.
pub fn trig_relative_variance(pair: &Pair, d: usize, directions: usize, coupling: Coupling) -> f64 {
    let delta2 = pair.delta2();
    let single = 2.0 * (0.5 * delta2).sinh().powi(2);
    let gain = match coupling {
        Coupling::Iid | Coupling::Simplex => 0.0,
        _ if single.is_infinite() => 0.0,
        _ => 1.0 - (0.5 * delta2).exp() * kummer_polynomial(d, 0.5 * delta2),
    };
    coupled(single, gain, directions as f64, block_pairs(directions, d))
}

/// Returns the mean of positive features whose orthogonal directions all have length $\sqrt d$:
/// $e^{-(\|x\|^2+\|y\|^2)/2}\, {}_0F_1(; d/2; d v^2/4)$, at most $\mathrm{SM}$.
pub fn regularised_mean(pair: &Pair, d: usize) -> f64 {
    let h = d as f64 / 2.0;
    let z = 0.5 * h * pair.v2();
    (ln_series(|k| z / ((h + k) * (k + 1.0))) - 0.5 * (pair.x2 + pair.y2)).exp()
}

/// Returns the relative covariance of the hyperbolic and the trigonometric estimate from the same independent
/// directions, $(\cos(\|x\|^2 - \|y\|^2) - 1)/M$: never positive, so sharing directions never hurts.
pub fn hyp_trig_relative_covariance(pair: &Pair, directions: usize) -> f64 {
    ((pair.x2 - pair.y2).cos() - 1.0) / directions as f64
}

/// Returns the variance of $\hat\lambda H + (1 - \hat\lambda) T$, where $\hat\lambda$ with mean `weight` and variance
/// `weight_variance` is independent of the two unbiased estimates.
pub fn hybrid_variance(weight: f64, weight_variance: f64, var_h: f64, var_t: f64, covariance: f64) -> f64 {
    let rest = 1.0 - weight;
    (weight * weight + weight_variance) * var_h
        + (rest * rest + weight_variance) * var_t
        + 2.0 * (weight * rest - weight_variance) * covariance
}

/// Returns the relative variance of angular hybrid features from independent directions: `directions` shared by both
/// bases, `weights` sign features (Choromanski et al. 2022).
pub fn angular_hybrid_relative_variance(pair: &Pair, d: usize, directions: usize, weights: usize) -> f64 {
    let lambda = pair.angle() / std::f64::consts::PI;
    let iid = Coupling::Iid;
    hybrid_variance(
        lambda,
        lambda * (1.0 - lambda) / weights as f64,
        exp_relative_variance(pair, d, directions, iid, 0.0, true),
        trig_relative_variance(pair, d, directions, iid),
        hyp_trig_relative_covariance(pair, directions),
    )
}

/// Returns the relative variance of Gaussian hybrid features: weight $e^{-\delta^2/(2\tau^2)}$ on the trigonometric
/// estimate, itself from `weights` trigonometric features.
pub fn gaussian_hybrid_relative_variance(
    pair: &Pair,
    d: usize,
    directions: usize,
    weights: usize,
    tau: f64,
) -> f64 {
    let ratio = pair.delta2() / (tau * tau);
    let weight_variance = 0.5 * (-ratio).exp_m1().powi(2) / weights as f64;
    hybrid_variance(
        -(-0.5 * ratio).exp_m1(),
        weight_variance,
        exp_relative_variance(pair, d, directions, Coupling::Iid, 0.0, true),
        trig_relative_variance(pair, d, directions, Coupling::Iid),
        hyp_trig_relative_covariance(pair, directions),
    )
}

/// Computes $\sum_i x_i^2 y_i^2$.
fn squares_product(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(a, b)| (a * b).powi(2)).sum()
}

/// Quantities that determine the variance of a tensor sketch of $(\langle x, y\rangle + c)^p$.
///
/// For $x' = [x; \sqrt c]$: $\xi = \langle x', y'\rangle^2$, $\beta = \|x'\|^2\|y'\|^2 - \varsigma$,
/// $\gamma = \xi - \varsigma$ with $\varsigma = \sum x_i'^2 y_i'^2$.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SketchedPair {
    xi: f64,
    beta: f64,
    gamma: f64,
}

impl SketchedPair {
    /// Computes the quantities of these rows.
    pub fn of(x: &[f64], y: &[f64], c: f64) -> Self {
        let pair = Pair::of(x, y);
        let xi = (pair.xy + c).powi(2);
        let sigma = squares_product(x, y) + c * c;
        Self { xi, beta: (pair.x2 + c) * (pair.y2 + c) - sigma, gamma: xi - sigma }
    }

    /// Returns $\xi$: its $p$-th power is the squared kernel.
    pub fn second_power(&self) -> f64 {
        self.xi
    }

    /// Returns the variance for a sketch of size `r`: $[(\xi+\beta)^p + (\xi+\gamma)^p - 2\xi^p]/r +
    /// \kappa[(\xi+\beta+\gamma)^p - (\xi+\beta)^p - (\xi+\gamma)^p + \xi^p]$ with $\kappa = 1/r^2$ for odd and $2/r^2$
    /// for even $r$ (derived in this project).
    pub fn variance(&self, degree: u32, r: usize) -> f64 {
        let Self { xi, beta, gamma } = *self;
        let power = |base: f64| base.powi(degree as i32);
        let size = r as f64;
        let kappa = if r.is_multiple_of(2) { 2.0 } else { 1.0 } / (size * size);
        (power(xi + beta) + power(xi + gamma) - 2.0 * power(xi)) / size
            + kappa * (power(xi + beta + gamma) - power(xi + beta) - power(xi + gamma) + power(xi))
    }
}

/// Computes $E\langle a, b\rangle^2$ and $E\|a\|^2\|b\|^2$ for Gaussian product sketches $a$, $b$ of degree `degree`
/// and size `r`, by recursion over the tree of branches.
pub fn product_sketch_moments(pair: &Pair, degree: u32, r: usize) -> (f64, f64) {
    if degree <= 1 {
        return (pair.xy * pair.xy, pair.x2 * pair.y2);
    }
    let (s1, t1) = product_sketch_moments(pair, degree.div_ceil(2), r);
    let (s2, t2) = product_sketch_moments(pair, degree / 2, r);
    let size = r as f64;
    let shared = (t1 + 2.0 * s1) * (t2 + 2.0 * s2) / size;
    ((1.0 - 1.0 / size) * s1 * s2 + shared, (1.0 - 1.0 / size) * t1 * t2 + shared)
}

/// Returns the variance of a Gaussian product sketch of $\langle x, y\rangle^{\mathrm{degree}}$.
pub fn product_sketch_variance(pair: &Pair, degree: u32, r: usize) -> f64 {
    product_sketch_moments(pair, degree, r).0 - pair.xy.powi(2 * degree as i32)
}

/// Returns the mean of the squared half-degree sketch, which estimates $\langle x, y\rangle^p$ with `degree` = $p$
/// even: the kernel plus the variance of the half sketch, always too large.
pub fn self_tensored_mean(pair: &Pair, degree: u32, r: usize) -> f64 {
    product_sketch_moments(pair, degree / 2, r).0
}

/// Returns the smallest number $m \ge 1$ with `variance(m)` at most `error²`, if any up to $2^{40}$; `variance` falls
/// with its argument and is relative to the squared target.
pub fn features_needed(error: f64, variance: impl Fn(usize) -> f64) -> Option<usize> {
    let enough = |m: usize| variance(m) <= error * error;
    let mut high = 1usize;
    while !enough(high) {
        if high >= 1 << 40 {
            return None;
        }
        high *= 2;
    }
    let mut low = high / 2;
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if enough(middle) { high = middle } else { low = middle }
    }
    Some(high)
}

/// Predicted error of a map on given data, from the average logarithm of the second moment of one feature pair.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Diagnostic {
    /// Mean log second moment minus twice the mean score: $\ln(1 + M \cdot \text{relative variance})$ of a typical
    /// pair.
    pub log_rel2: f64,
}

impl Diagnostic {
    /// Predicts the error of exponential features on data with these moments.
    ///
    /// `None` if the features need second moments that were not collected. With features for $\pm\omega$ the two halves
    /// of the second moment are averaged in the logarithm before they are added, which predicts slightly too little for
    /// spread-out data.
    pub fn of_exponent(exponent: &Exponent, moments: &Moments, antithetic: bool) -> Option<Self> {
        let same = exponent.mean_log_second_moment(moments)? - 2.0 * moments.mean_score();
        if !antithetic {
            return Some(Self { log_rel2: same });
        }
        let opposite = exponent.mean_log_opposite_moment(moments)? - 2.0 * moments.mean_score();
        let (low, high) = (same.min(opposite), same.max(opposite));
        Some(Self { log_rel2: high + (low - high).exp().ln_1p() - std::f64::consts::LN_2 })
    }

    /// Predicts the error of trigonometric features on data with these moments: $\ln \cosh$ of the mean $\|x - y\|^2$.
    pub fn of_trig(moments: &Moments) -> Self {
        let delta2 = (moments.mean_sum_norm2() - 4.0 * moments.mean_score()).max(0.0);
        Self { log_rel2: delta2 + (-2.0 * delta2).exp().ln_1p() - std::f64::consts::LN_2 }
    }

    /// Returns the predicted relative standard deviation of one kernel entry with `directions` independent directions.
    pub fn relative_sd(&self, directions: usize) -> f64 {
        (self.log_rel2.exp_m1().max(0.0) / directions as f64).sqrt()
    }

    /// Returns the number of independent directions for this relative standard deviation; infinite beyond the
    /// range of `f64`.
    pub fn directions_needed(&self, error: f64) -> f64 {
        (self.log_rel2.exp_m1().max(0.0) / (error * error)).ceil().max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // The pair of known values: d = 4, already scaled.
    const X: [f64; 4] = [0.5, 0.0, 0.0, 0.0];
    const Y: [f64; 4] = [0.3, 0.4, 0.0, 0.0];

    #[track_caller]
    fn close(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 1e-9, "found {found}, expected {expected}");
    }

    #[test]
    fn confluent_series_have_their_known_values() {
        close(ln_hyp1f1(4.0, 2.0, 0.4).exp(), 2.128336569);
        close((-0.1f64).exp() * kummer_polynomial(4, 0.1), 0.8158617386);
        // ₁F₁(1; 1; z) = e^z, ₁F₁(2; 1; z) = (1 + z) e^z, also past the switch to the asymptotic form.
        for z in [0.0, 1e-3, 1.0, 50.0, 900.0, 9.9e4, 1.1e5, 1e7] {
            assert!((ln_hyp1f1(1.0, 1.0, z) - z).abs() <= 1e-12 * z.max(1.0), "{z}");
            assert!((ln_hyp1f1(2.0, 1.0, z) - z - z.ln_1p()).abs() <= 1e-11 * z.max(1.0), "{z}");
        }
        assert_eq!(ln_hyp1f1(2.0, 1.0, f64::INFINITY), f64::INFINITY);
        // Odd d: Kummer's transformation of the series with positive terms, ₁F₁(a;b;z) = e^z ₁F₁(b−a;b;−z).
        let direct: f64 = {
            let (mut term, mut sum) = (1.0, 1.0);
            for k in 0..60 {
                let k = f64::from(k);
                term *= (5.0 + k) / (2.5 + k) * -0.7 / (k + 1.0);
                sum += term;
            }
            sum
        };
        close((-0.7f64).exp() * kummer_polynomial(5, 0.7), direct);
    }

    #[test]
    fn the_exponential_maps_have_the_known_variances() {
        let pair = Pair::of(&X, &Y);
        close(pair.v2(), 0.8);
        close(pair.sm(), 1.161834243);
        let sm2 = pair.sm() * pair.sm();
        let var = |c, a, even| exp_relative_variance(&pair, 4, 4, c, a, even) * sm2;
        let (iid, orth) = (Coupling::Iid, Coupling::Orthogonal);
        close(var(iid, 0.0, false), 0.4135768041);
        close(var(orth, 0.0, false), 0.3693587357);
        close(var(Coupling::Simplex, 0.0, false), 0.1830182270);
        close((1.0 - pair_gain(4, 0.8, -1.0 / 3.0)) * 0.8f64.exp(), 1.718705155);
        close(var(iid, 0.0, true), 0.1138723836);
        close(var(orth, 0.0, true), 0.06965431518);
        let a = super::super::features::optimal_a(0.8, 4);
        close(a, -0.08042476415);
        close(var(iid, a, false), 0.2829556278);
        close(var(orth, a, false), 0.2387375594);
        close(var(orth, a, true), 0.01419320426);
        close(trig_relative_variance(&pair, 4, 4, iid) * sm2, 0.006771821703);
        close(trig_relative_variance(&pair, 4, 4, orth) * sm2, 0.003224167801);
        close(pair.angle() / std::f64::consts::PI, 0.2951672353);
        close(angular_hybrid_relative_variance(&pair, 4, 4, 4) * sm2, 0.01955996292);
    }

    #[test]
    fn the_sketches_have_the_known_variances() {
        let (x, y) = ([1.0, 2.0], [3.0, 1.0]);
        for (p, r, expected) in [(1, 8, 6.125), (2, 8, 523.125), (2, 7, 584.2653061), (3, 16, 17138.40625)] {
            close(SketchedPair::of(&x, &y, 0.0).variance(p, r), expected);
        }
        let pair = Pair::of(&x, &y);
        close(product_sketch_variance(&pair, 2, 8), 1171.875);
        close(product_sketch_variance(&pair, 4, 8), 8614349.365);
        close(self_tensored_mean(&pair, 4, 8), 1796.875);
        close(self_tensored_mean(&pair, 8, 8), 9004974.365);
        // Unit q = k: variance 8/r, and mean 2 instead of 1 at p = 4, r = 8.
        let unit = Pair { x2: 1.0, y2: 1.0, xy: 1.0 };
        close(product_sketch_variance(&unit, 2, 16), 0.5);
        close(self_tensored_mean(&unit, 4, 8), 2.0);
    }

    #[test]
    fn tensor_sketch_variance_keeps_below_its_bound() {
        let (x, y) = ([1.0, -2.0, 0.5], [3.0, 1.0, 0.25]);
        let pair = Pair::of(&x, &y);
        for p in 1..6 {
            for r in [3, 4, 64] {
                let bound = (3f64.powi(p) - 1.0) / r as f64 * (pair.x2 * pair.y2).powi(p);
                assert!(SketchedPair::of(&x, &y, 0.0).variance(p as u32, r) <= bound);
            }
        }
    }

    #[test]
    fn special_cases_of_the_papers_agree() {
        for (x2, y2, xy) in [(0.5, 0.7, 0.1), (2.0, 1.0, -0.9), (1e-5, 1e-5, 0.0)] {
            let pair = Pair { x2, y2, xy };
            let v2 = pair.v2();
            let pos = exp_relative_variance(&pair, 6, 10, Coupling::Iid, 0.0, false);
            close(pos, v2.exp_m1() / 10.0);
            let hyp = exp_relative_variance(&pair, 6, 10, Coupling::Iid, 0.0, true);
            close(hyp, -0.5 * (-v2).exp_m1() * pos);
            let d2 = pair.delta2();
            let trig = trig_relative_variance(&pair, 6, 10, Coupling::Iid);
            close(trig, d2.exp() * (-d2).exp_m1().powi(2) / 20.0);
        }
    }

    #[test]
    fn couplings_are_ordered_as_proven() {
        for d in [2, 3, 8, 63] {
            for v2 in [0.1, 1.29, 6.0] {
                let orth = pair_gain(d, v2, 0.0);
                let c = 1.0 / (d as f64 - 1.0);
                let (simplex, mirrored) = (pair_gain(d, v2, -c), pair_gain(d, v2, c));
                assert!(simplex > orth && orth > 0.0, "{d}, {v2}");
                assert!(0.5 * (simplex + mirrored) <= orth, "{d}, {v2}");
            }
        }
    }

    #[test]
    fn simplex_directions_gain_what_was_measured() {
        // d = M = 8, ‖x + y‖² = 1.29: variances 0.231 independent, 0.190 orthogonal, 0.107 simplex, given to
        // three digits.
        let pair = Pair { x2: 0.645, y2: 0.645, xy: 0.0 };
        let var = |c| exp_relative_variance(&pair, 8, 8, c, 0.0, false);
        let iid = var(Coupling::Iid);
        assert!((var(Coupling::Orthogonal) / iid - 0.190 / 0.231).abs() < 0.01);
        assert!((var(Coupling::Simplex) / iid - 0.107 / 0.231).abs() < 0.01);
    }

    #[test]
    fn the_simplex_moment_is_its_series() {
        // ρ_c = Σ_k (v²)^k Γ(d/2) / (4^k k! Γ(k+d/2)) E[(n₁²+n₂²+2c n₁n₂)^k], term by term.
        let ln_moment = |d: f64, a: f64| {
            0.5 * a * std::f64::consts::LN_2 + libm::lgamma(0.5 * (d + a)) - libm::lgamma(0.5 * d)
        };
        for (d, v2, c) in [(2.0, 0.7, -1.0), (3.0, 0.7, -0.5), (5.0, 1.0, -0.25), (8.0, 1.29, -1.0 / 7.0)] {
            let mut rho = 0.0;
            for k in 0..40u32 {
                let choose = |n: u32, j: u32| {
                    (libm::lgamma(f64::from(n) + 1.0)
                        - libm::lgamma(f64::from(j) + 1.0)
                        - libm::lgamma(f64::from(n - j) + 1.0))
                    .exp()
                };
                let mut inner = 0.0;
                for j in 0..=k {
                    for i in 0..=k - j {
                        let (a1, a2) = (f64::from(2 * i + j), f64::from(2 * (k - j - i) + j));
                        inner += choose(k, j)
                            * choose(k - j, i)
                            * (2.0f64 * c).powi(j as i32)
                            * (ln_moment(d, a1) + ln_moment(d, a2)).exp();
                    }
                }
                let kf = f64::from(k);
                let outer = libm::lgamma(0.5 * d) - libm::lgamma(kf + 1.0) - libm::lgamma(kf + 0.5 * d);
                rho += (outer + kf * (v2 / 4.0f64).ln()).exp() * inner;
            }
            let quadrature = (1.0 - pair_gain(d as usize, v2, c)) * f64::exp(v2);
            assert!((quadrature / rho - 1.0).abs() < 1e-8, "d = {d}: {quadrature}, {rho}");
        }
    }

    #[test]
    fn the_orthogonality_bound_of_the_paper_is_the_leading_term() {
        // Gain ≥ 2(M−1)/(M(d+2))·(SM − e^{−(‖x‖²+‖y‖²)/2})², for one block of M ≤ d directions.
        let pair = Pair { x2: 0.02, y2: 0.02, xy: 0.01 };
        let (d, m) = (8, 5);
        let gain = exp_relative_variance(&pair, d, m, Coupling::Iid, 0.0, false)
            - exp_relative_variance(&pair, d, m, Coupling::Orthogonal, 0.0, false);
        let bound = 2.0 * 4.0 / (5.0 * 10.0) * (1.0 - (-pair.v2() / 2.0).exp()).powi(2);
        assert!(gain >= bound && gain < 1.1 * bound, "{gain}, {bound}");
    }

    #[test]
    fn the_table_of_relative_errors_is_reproduced() {
        // d = 64, 256 features in total, orthogonal blocks: Pos, Hyp, Trig, OPRF, OPRF±. Printed figures are
        // rounded, hence one unit of their last digit.
        let table = [
            (0.5, 0.0, [(0.070, 1e-3), (0.025, 1e-3), (0.020, 1e-3), (0.068, 1e-3), (0.019, 1e-3)]),
            (0.5, 1.0, [(0.134, 1e-3), (0.088, 1e-3), (0.0, 1e-9), (0.122, 1e-3), (0.069, 1e-3)]),
            (1.0, -0.5, [(0.070, 1e-3), (0.025, 1e-3), (0.188, 1e-3), (0.068, 1e-3), (0.019, 1e-3)]),
            (1.0, 0.5, [(0.244, 1e-3), (0.202, 1e-3), (0.020, 1e-3), (0.207, 1e-3), (0.156, 1e-3)]),
            (2.0, 0.0, [(0.43, 0.01), (0.39, 0.01), (0.38, 0.01), (0.34, 0.01), (0.29, 0.01)]),
            (2.0, -1.0, [(0.0, 1e-9), (0.0, 1e-9), (3.4, 0.1), (0.0, 1e-9), (0.0, 1e-9)]),
            (4.0, 0.5, [(25.0, 1.0), (25.0, 1.0), (0.38, 0.01), (6.4, 0.1), (6.4, 0.1)]),
            (8.0, 0.0, [(186.0, 1.0), (186.0, 1.0), (186.0, 1.0), (20.8, 0.1), (20.8, 0.1)]),
        ];
        for (r2, cosine, expected) in table {
            let pair = Pair { x2: r2, y2: r2, xy: r2 * cosine };
            let a = super::super::features::optimal_a(pair.v2(), 64);
            let orth = Coupling::Orthogonal;
            let found = [
                exp_relative_variance(&pair, 64, 256, orth, 0.0, false),
                exp_relative_variance(&pair, 64, 128, orth, 0.0, true),
                trig_relative_variance(&pair, 64, 128, orth),
                exp_relative_variance(&pair, 64, 256, orth, a, false),
                exp_relative_variance(&pair, 64, 128, orth, a, true),
            ];
            for (i, (f, (e, tol))) in found.iter().zip(expected).enumerate() {
                assert!((f.sqrt() - e).abs() <= tol, "r² {r2}, c {cosine}, map {i}: {} {e}", f.sqrt());
            }
        }
    }

    #[test]
    fn regularised_directions_underestimate() {
        let pair = Pair { x2: 1.0, y2: 1.0, xy: 0.5 };
        // d = 1: directions ±1, mean e^{−(x²+y²)/2} cosh v.
        close(regularised_mean(&pair, 1), (-1.0f64).exp() * 3f64.sqrt().cosh());
        let mut last = 0.0;
        for d in [1, 2, 4, 64] {
            let mean = regularised_mean(&pair, d);
            assert!(mean > last && mean < pair.sm());
            last = mean;
        }
    }

    #[test]
    fn needed_features_are_the_smallest_that_suffice() {
        assert_eq!(features_needed(0.1, |m| 5.0 / m as f64), Some(500));
        assert_eq!(features_needed(0.1, |_| 0.0), Some(1));
        assert_eq!(features_needed(0.1, |_| 1.0), None);
        let pair = Pair { x2: 1.0, y2: 1.0, xy: 0.0 };
        let var = |m| exp_relative_variance(&pair, 64, m, Coupling::Orthogonal, 0.0, true);
        let m = features_needed(0.05, var).unwrap();
        assert!(var(m) <= 0.0025 && var(m - 1) > 0.0025);
    }

    #[test]
    fn extreme_rows_give_no_nan() {
        for (x2, y2, xy) in [(0.0, 0.0, 0.0), (1e3, 1e3, 1e3), (1e3, 1e3, -1e3), (1e6, 1e6, 0.0)] {
            let pair = Pair { x2, y2, xy };
            for coupling in [Coupling::Iid, Coupling::Orthogonal, Coupling::Simplex] {
                for d in [2, 5, 64] {
                    for a in [0.0, -0.5, 0.1, 0.2] {
                        for even in [false, true] {
                            let v = exp_relative_variance(&pair, d, 7, coupling, a, even);
                            assert!(v >= 0.0, "{pair:?} {coupling:?} {d} {a} {even}: {v}");
                        }
                    }
                    assert!(trig_relative_variance(&pair, d, 7, coupling) >= 0.0);
                }
            }
            assert!(!regularised_mean(&pair, 4).is_nan(), "{pair:?}");
        }
    }
}
