//! Random models of attention: small, seeded, each with one property of real heads.
//!
//! All draw single-precision queries, keys and values with scale $1/\sqrt d$ and no mask. $\xi$ is standard
//! normal, fresh at each occurrence; centres, directions and rotations are drawn once per key head, so query
//! heads of one group share them. The same seed gives the same bits.
//!
//! - `gaussian`: $q, k, v = \xi$. Attention is diffuse and the output nearly zero, so relative errors of sampling
//!   methods exceed 1. Use it for speed, never for quality.
//! - `clustered`: 64 centres $\mu_c, \nu_c = \xi$; $k = \mu_c + \xi/2$ and $v = \nu_c + \xi/2$ with $c$ uniform,
//!   $q = \mu_{c'} + \xi/2$ with $c'$ uniform. At 2048 tokens and $d = 64$ the 64 largest weights of a row hold 94 %.
//! - `heavy_hitters`: as `gaussian`, with a unit vector $u$: $q = \xi + \sqrt d\, u$; keys 0 to 3 are
//!   $\xi/10 + \sqrt d\, u$ and their values $\xi/10$. Attention sinks: much weight on small values.
//! - `low_rank`: $q, k = R\,\Lambda^{1/2}\xi$ with one random rotation $R$ and
//!   $\lambda_i \propto e^{-i/(0.28 d)}$, $\sum \lambda_i = 2.25\, d$; $v = \xi$. Decaying spectrum, peaked rows.
//! - `smooth`: $q$ and $k$ are stationary autoregressions along the sequence,
//!   $x_t = 0.98\, x_{t-1} + \sqrt{1 - 0.98^2}\,\xi$; $v = \xi$. The property that methods which pool neighbours need.
//! - `needle`: $k, v = \xi$; the query of token $i$ is $s\,k_{\pi(i)} + \xi$, where $\pi(i)$ lies half the sequence
//!   away, $\pi(i) = i - n/2$ in the second half and $i + n/2$ in the first. The strength $s$ solves
//!   $s\sqrt d - (s^2 + 1)/2 = \ln n + 4$ (smaller root; $\sqrt d$ if there is none): the one matching key outweighs
//!   all others by about $e^4$.

use crate::words::parse_count;
use crate::workload::{LayerData, Workload};
use crate::{Error, Result};
use attlas::{Mask, Problem};
use attlas_num::rng::{Rng, StreamKey};
use std::fmt;
use std::str::FromStr;

/// A random model with its sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Synthetic {
    /// The model.
    pub kind: Kind,
    /// Tokens.
    pub n: usize,
    /// Width of queries, keys and values.
    pub d: usize,
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// Seed of all random numbers.
    pub seed: u64,
}

impl Default for Synthetic {
    fn default() -> Self {
        Self { kind: Kind::Clustered, n: 2048, d: 64, heads: 1, kv_heads: 1, seed: 0 }
    }
}

/// The random models; the module's documentation defines each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Diffuse attention.
    Gaussian,
    /// Queries and keys around common centres.
    Clustered,
    /// Attention sinks.
    HeavyHitters,
    /// Decaying spectrum.
    LowRank,
    /// Similar neighbouring tokens.
    Smooth,
    /// One matching key, far away.
    Needle,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 6] =
        [Kind::Gaussian, Kind::Clustered, Kind::HeavyHitters, Kind::LowRank, Kind::Smooth, Kind::Needle];

    /// Returns the name used on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Gaussian => "gaussian",
            Kind::Clustered => "clustered",
            Kind::HeavyHitters => "heavy_hitters",
            Kind::LowRank => "low_rank",
            Kind::Smooth => "smooth",
            Kind::Needle => "needle",
        }
    }
}

impl fmt::Display for Synthetic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, n, d, heads, kv_heads, seed } = self;
        write!(f, "{},n={n},d={d},heads={heads},kv_heads={kv_heads},seed={seed}", kind.name())
    }
}

/// Returns the names of all kinds.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    Kind::ALL.iter().map(|k| k.name())
}

impl FromStr for Synthetic {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut parts = text.split(',');
        let name = parts.next().unwrap_or_default();
        let kind =
            Kind::ALL.into_iter().find(|k| k.name() == name).ok_or_else(|| {
                match crate::words::nearest(name, names()) {
                    Some(meant) => {
                        Error::Unknown { what: "synthetic source", found: name.into(), meant: meant.into() }
                    }
                    None => {
                        let expected = format!("one of {}", names().collect::<Vec<_>>().join(", "));
                        Error::argument("synthetic source", expected, format!("'{name}'"))
                    }
                }
            })?;
        let mut spec = Self { kind, ..Self::default() };
        let mut kv_heads = None;
        for part in parts {
            let wrong = |expected: &str| Error::argument("synthetic source", expected, format!("'{part}'"));
            let (key, value) = part.split_once('=').ok_or_else(|| wrong("settings of the form key=value"))?;
            let count = || parse_count(value).ok_or_else(|| wrong("a whole number such as 2048 or 2k"));
            match key {
                "n" => spec.n = count()?,
                "d" => spec.d = count()?,
                "heads" => spec.heads = count()?,
                "kv_heads" => kv_heads = Some(count()?),
                "seed" => spec.seed = value.parse().map_err(|_| wrong("a whole number as seed"))?,
                _ => return Err(wrong("n, d, heads, kv_heads or seed")),
            }
        }
        spec.kv_heads = kv_heads.unwrap_or(spec.heads);
        spec.problem().validate()?;
        Ok(spec)
    }
}

impl Synthetic {
    fn problem(&self) -> Problem {
        Problem::new(self.heads, self.n, self.d).with_kv_heads(self.kv_heads)
    }

    /// Draws the inputs.
    pub fn generate(&self) -> Result<Workload> {
        let problem = self.problem();
        problem.validate()?;
        // Drawn in double precision, group by group.
        let sizes = [self.heads + 2 * self.kv_heads, self.n, self.d, size_of::<f32>()];
        crate::machine::check_room(&format!("synthetic:{self}"), &sizes)?;
        let root = StreamKey::new(self.seed).named("synthetic").named(self.kind.name());
        let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
        for g in 0..self.kv_heads {
            let group = root.with(g as u64);
            let heads = (0..problem.group_size()).map(|h| group.named("q").with(h as u64).rng()).collect();
            let drawn = match self.kind {
                Kind::Gaussian => self.gaussian(group, heads),
                Kind::Clustered => self.clustered(group, heads),
                Kind::HeavyHitters => self.heavy_hitters(group, heads),
                Kind::LowRank => self.low_rank(group, heads),
                Kind::Smooth => self.smooth(group, heads),
                Kind::Needle => self.needle(group, heads),
            };
            let store = |to: &mut Vec<f32>, from: Vec<f64>| to.extend(from.into_iter().map(|x| x as f32));
            store(&mut q, drawn.q);
            store(&mut k, drawn.k);
            store(&mut v, drawn.v);
        }
        Ok(Workload {
            source: format!("synthetic:{self}"),
            mask: Mask::None,
            metadata: Default::default(),
            layers: vec![LayerData { layer: None, problem, q, k, v }],
        })
    }

    fn noise(&self, mut rng: Rng) -> Vec<f64> {
        (0..self.n * self.d).map(|_| rng.normal()).collect()
    }

    /// Draws keys, values and queries of pure noise, from which the other models start.
    fn gaussian(&self, key: StreamKey, heads: Vec<Rng>) -> Drawn {
        Drawn {
            q: heads.into_iter().flat_map(|rng| self.noise(rng)).collect(),
            k: self.noise(key.named("k").rng()),
            v: self.noise(key.named("v").rng()),
        }
    }

    fn clustered(&self, key: StreamKey, heads: Vec<Rng>) -> Drawn {
        const CENTRES: usize = 64;
        let d = self.d;
        let centres = |name: &str| {
            let mut rng = key.named(name).rng();
            (0..CENTRES * d).map(|_| rng.normal()).collect::<Vec<f64>>()
        };
        let (mu, nu) = (centres("mu"), centres("nu"));
        let labels = |mut rng: Rng| (0..self.n).map(|_| rng.below(CENTRES)).collect::<Vec<usize>>();
        let around = |x: &mut [f64], centres: &[f64], labels: &[usize]| {
            for (row, &c) in x.chunks_exact_mut(d).zip(labels) {
                row.iter_mut().zip(&centres[c * d..]).for_each(|(x, m)| *x = m + 0.5 * *x);
            }
        };
        let size = heads.len();
        let mut x = self.gaussian(key, heads);
        let of_keys = labels(key.named("key labels").rng());
        around(&mut x.k, &mu, &of_keys);
        around(&mut x.v, &nu, &of_keys);
        for (h, q) in x.q.chunks_exact_mut((self.n * d).max(1)).enumerate().take(size) {
            around(q, &mu, &labels(key.named("query labels").with(h as u64).rng()));
        }
        x
    }

    fn heavy_hitters(&self, key: StreamKey, heads: Vec<Rng>) -> Drawn {
        const SINKS: usize = 4;
        let d = self.d;
        let mut rng = key.named("direction").rng();
        let mut u: Vec<f64> = (0..d).map(|_| rng.normal()).collect();
        let size = u.iter().map(|x| x * x).sum::<f64>().sqrt();
        u.iter_mut().for_each(|x| *x *= (d as f64).sqrt() / size);
        let mut x = self.gaussian(key, heads);
        x.q.chunks_exact_mut(d).for_each(|q| q.iter_mut().zip(&u).for_each(|(q, u)| *q += u));
        for k in x.k.chunks_exact_mut(d).take(SINKS) {
            k.iter_mut().zip(&u).for_each(|(k, u)| *k = 0.1 * *k + u);
        }
        x.v.iter_mut().take(SINKS * d).for_each(|v| *v *= 0.1);
        x
    }

    fn low_rank(&self, key: StreamKey, heads: Vec<Rng>) -> Drawn {
        let d = self.d;
        let lambda: Vec<f64> = (0..d).map(|i| (-(i as f64) / (0.28 * d as f64)).exp()).collect();
        let total: f64 = lambda.iter().sum();
        let basis = rotation(key.named("rotation").rng(), d);
        // Row i of the factor is the i-th axis, scaled: x = ξᵀ factor.
        let factor: Vec<f64> = basis
            .chunks_exact(d)
            .zip(&lambda)
            .flat_map(|(axis, l)| {
                let size = (2.25 * d as f64 * l / total).sqrt();
                axis.iter().map(move |a| a * size)
            })
            .collect();
        let colour = |x: &mut [f64]| {
            let mut sum = vec![0.0; d];
            for row in x.chunks_exact_mut(d) {
                sum.fill(0.0);
                for (xi, axis) in row.iter().zip(factor.chunks_exact(d)) {
                    sum.iter_mut().zip(axis).for_each(|(s, a)| *s += xi * a);
                }
                row.copy_from_slice(&sum);
            }
        };
        let mut x = self.gaussian(key, heads);
        colour(&mut x.q);
        colour(&mut x.k);
        x
    }

    fn smooth(&self, key: StreamKey, heads: Vec<Rng>) -> Drawn {
        const KEPT: f64 = 0.98;
        let fresh = (1.0 - KEPT * KEPT).sqrt();
        let d = self.d;
        let smooth = |x: &mut [f64]| {
            for t in d..x.len() {
                x[t] = KEPT * x[t - d] + fresh * x[t];
            }
        };
        let mut x = self.gaussian(key, heads);
        x.q.chunks_exact_mut((self.n * d).max(1)).for_each(smooth);
        smooth(&mut x.k);
        x
    }

    fn needle(&self, key: StreamKey, heads: Vec<Rng>) -> Drawn {
        let (n, d) = (self.n, self.d);
        let root = (d as f64).sqrt();
        let strength = root - (d as f64 - 2.0 * ((n.max(1) as f64).ln() + 4.5)).max(0.0).sqrt();
        let mut x = self.gaussian(key, heads);
        let half = n / 2;
        for (r, q) in x.q.chunks_exact_mut(d).enumerate() {
            let i = r % n;
            let match_of = if i >= half { i - half } else { i + half };
            q.iter_mut().zip(&x.k[match_of * d..]).for_each(|(q, k)| *q += strength * k);
        }
        x
    }
}

/// Random objects of one key head and its query heads.
struct Drawn {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
}

/// Draws an orthogonal `d × d` matrix: Gaussian rows, orthonormalised twice against rounding.
fn rotation(mut rng: Rng, d: usize) -> Vec<f64> {
    let mut rows: Vec<Vec<f64>> = Vec::with_capacity(d);
    while rows.len() < d {
        let mut row: Vec<f64> = (0..d).map(|_| rng.normal()).collect();
        for _ in 0..2 {
            for done in &rows {
                let dot: f64 = row.iter().zip(done).map(|(a, b)| a * b).sum();
                row.iter_mut().zip(done).for_each(|(a, b)| *a -= dot * b);
            }
            let size = row.iter().map(|a| a * a).sum::<f64>().sqrt();
            row.iter_mut().for_each(|a| *a /= size);
        }
        rows.push(row);
    }
    rows.concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(spec: &str) -> LayerData {
        spec.parse::<Synthetic>().unwrap().generate().unwrap().layers.remove(0)
    }

    /// Weights of one unmasked row, in double precision.
    fn weights(x: &LayerData, row: usize) -> Vec<f64> {
        let p = &x.problem;
        let q = &x.q[row * p.d..][..p.d];
        let logits: Vec<f64> =
            x.k.chunks_exact(p.d)
                .map(|k| p.scale * q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>())
                .collect();
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = logits.iter().map(|s| (s - max).exp()).sum();
        logits.iter().map(|s| (s - max).exp() / total).collect()
    }

    fn top_mass(x: &LayerData, keys: usize) -> f64 {
        let rows: Vec<f64> = (0..64)
            .map(|r| {
                let mut w = weights(x, r * x.problem.n_q / 64);
                w.sort_by(|a, b| b.total_cmp(a));
                w[..keys].iter().sum()
            })
            .collect();
        crate::stats::mean(&rows)
    }

    #[test]
    fn sixty_four_keys_hold_94_percent_of_clustered_attention() {
        let masses: Vec<f64> = (0..3).map(|s| top_mass(&draw(&format!("clustered,seed={s}")), 64)).collect();
        let mass = crate::stats::mean(&masses);
        assert!((mass - 0.94).abs() < 0.02, "{mass}");
        let flat = top_mass(&draw("gaussian"), 64);
        assert!(flat < 0.5, "{flat}");
    }

    #[test]
    fn sinks_take_weight_and_carry_small_values() {
        let x = draw("heavy_hitters,seed=3");
        let sunk =
            crate::stats::mean(&(0..64).map(|r| weights(&x, r * 32)[..4].iter().sum()).collect::<Vec<f64>>());
        // The figures of the page: without the sinks 0.70 of the mass at 128 keys is lost; they have well over half.
        assert!(sunk > 0.5 && sunk < 1.0, "{sunk}");
        let size = |r: std::ops::Range<usize>| {
            x.v[r.start * 64..r.end * 64].iter().map(|v| f64::from(*v).powi(2)).sum::<f64>()
                / (r.len() * 64) as f64
        };
        assert!((size(0..4) - 0.01).abs() < 0.005 && (size(4..2048) - 1.0).abs() < 0.02);
    }

    #[test]
    fn low_rank_queries_have_the_stated_spectrum() {
        let x = draw("low_rank,n=4096");
        let energy = x.q.iter().map(|q| f64::from(*q).powi(2)).sum::<f64>() / 4096.0;
        assert!((energy / (2.25 * 64.0) - 1.0).abs() < 0.05, "{energy}");
        // Σλ² of the sample covariance against the stated eigenvalues.
        let mut gram = vec![0.0; 64 * 64];
        for row in x.q.chunks_exact(64) {
            for (i, a) in row.iter().enumerate() {
                row.iter().enumerate().for_each(|(j, b)| gram[i * 64 + j] += f64::from(a * b) / 4096.0);
            }
        }
        let found: f64 = gram.iter().map(|g| g * g).sum();
        let lambda: Vec<f64> = (0..64).map(|i| (-f64::from(i) / (0.28 * 64.0)).exp()).collect();
        let total: f64 = lambda.iter().sum();
        let wanted: f64 = lambda.iter().map(|l| (2.25 * 64.0 * l / total).powi(2)).sum();
        assert!((found / wanted - 1.0).abs() < 0.1, "{found} {wanted}");
    }

    #[test]
    fn smooth_neighbours_are_alike() {
        let x = draw("smooth,n=8192,d=32");
        let (mut lag, mut own) = (0.0, 0.0);
        for t in 32..x.k.len() {
            lag += f64::from(x.k[t] * x.k[t - 32]);
            own += f64::from(x.k[t]).powi(2);
        }
        assert!((lag / own - 0.98).abs() < 0.005, "{}", lag / own);
        // Effective sample 8192 · 32 · (1 − ρ)/(1 + ρ) ≈ 2650: standard error of the variance 0.03.
        assert!((own / x.k.len() as f64 - 1.0).abs() < 0.12);
    }

    #[test]
    fn the_needle_outweighs_everything_else() {
        let x = draw("needle,n=2048");
        let mut found: Vec<f64> = (0..64).map(|r| weights(&x, 1024 + 16 * r)[16 * r]).collect();
        found.sort_by(f64::total_cmp);
        assert!(found[32] > 0.9, "median {}", found[32]);
        assert!(weights(&x, 5)[1029] > 0.5);
    }

    #[test]
    fn bad_specifications_say_what_is_accepted() {
        for (bad, word) in [
            ("nonsense", "heavy_hitters"),
            ("gaussian,n", "key=value"),
            ("gaussian,n=x", "2k"),
            ("gaussian,heads=3,kv_heads=2", "multiple"),
            ("gaussian,width=2", "kv_heads"),
            ("gaussian,d=0", "at least 1"),
        ] {
            let message = bad.parse::<Synthetic>().unwrap_err().to_string();
            assert!(message.contains(word), "{bad}: {message}");
        }
    }

    #[test]
    fn every_kind_draws_finite_numbers_at_any_size() {
        for kind in Kind::ALL {
            for (n, d) in [(0, 4), (1, 1), (3, 5), (70, 2)] {
                let spec = Synthetic { kind, n, d, heads: 4, kv_heads: 2, seed: 1 };
                let x = spec.generate().unwrap().layers.remove(0);
                assert_eq!((x.q.len(), x.k.len(), x.v.len()), (4 * n * d, 2 * n * d, 2 * n * d), "{spec}");
                assert!(x.q.iter().chain(&x.k).chain(&x.v).all(|v| v.is_finite()), "{spec}");
                assert_eq!(x.q, spec.generate().unwrap().layers[0].q);
            }
        }
    }
}
