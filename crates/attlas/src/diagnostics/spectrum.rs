//! Singular values of everything in a head, and the ranks they imply.

use super::{Head, Scores, Settings, WeightProfile, Weights, centred, failed};
use crate::{Result, Workspace};
use attlas_num::MatRef;
use attlas_num::linalg::{
    entropy_rank, eps_rank, matmul_nt, singular_values, singular_values_of_product, variance_rank,
};
use attlas_num::randla::{LinearOperator, RandomizedSvd, randomized_svd};
use attlas_num::rng::StreamKey;

/// Singular values and ranks of the matrices of a head.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Spectra {
    /// Spectrum of the queries.
    pub q: Spectrum,
    /// Spectrum of the keys.
    pub k: Spectrum,
    /// Spectrum of the values.
    pub v: Spectrum,
    /// Spectrum of $QK^\top$, without scale and mask.
    pub qk: Spectrum,
    /// Spectrum of the scores $A$, masked, divided by $e^{\max S}$.
    pub scores: Spectrum,
    /// Spectrum of the weights $P = Z^{-1} A$, masked.
    pub weights: Spectrum,
    /// Principal components of the keys.
    pub key_components: KeyComponents,
}

/// Singular values, descending, and ranks.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Spectrum {
    /// The computed singular values: all of them if `complete`.
    pub values: Vec<f64>,
    /// True if all singular values were computed.
    pub complete: bool,
    /// Share of $\|\cdot\|_F^2$ in the computed values.
    pub captured: f64,
    /// $\|\cdot\|_F^2 / \sigma_1^2$; 0 for a zero matrix.
    pub stable_rank: f64,
    /// Least number of singular values that hold the share [`Settings::share`] of $\|\cdot\|_F^2$.
    pub variance_rank: AtLeast,
    /// $e^{-\sum p \ln p}$ with $p = \sigma / \sum\sigma$, if the spectrum is complete.
    pub entropy_rank: Option<f64>,
    /// Number of singular values above [`Settings::eps`] times the largest.
    pub eps_rank: AtLeast,
}

/// A number, or a lower bound if too few singular values were computed to determine it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct AtLeast {
    /// The number.
    pub value: usize,
    /// True if the number may be larger.
    pub open: bool,
}

impl Spectrum {
    /// Creates the spectrum of a matrix with squared Frobenius norm `energy` from its leading singular values.
    fn new(values: Vec<f64>, complete: bool, energy: f64, settings: &Settings) -> Self {
        let top = values.first().copied().unwrap_or(0.0);
        let squares: f64 = values.iter().map(|s| (s / top) * (s / top)).sum();
        // Rounding may leave the norm below what the values hold.
        let energy = if top == 0.0 { 0.0 } else { (energy / top / top).max(squares) };
        let mut sum = 0.0;
        let reached = values.iter().position(|s| {
            sum += (s / top) * (s / top);
            sum >= settings.share * energy
        });
        let variance_rank = match reached {
            _ if complete => AtLeast { value: variance_rank(&values, settings.share), open: false },
            Some(i) => AtLeast { value: i + 1, open: false },
            None if top == 0.0 => AtLeast { value: 0, open: false },
            None => AtLeast { value: values.len(), open: true },
        };
        let above = eps_rank(&values, settings.eps);
        Self {
            complete,
            captured: if energy == 0.0 { 1.0 } else { squares / energy },
            stable_rank: energy,
            variance_rank,
            entropy_rank: complete.then(|| entropy_rank(&values)),
            eps_rank: AtLeast { value: above, open: !complete && top > 0.0 && above == values.len() },
            values,
        }
    }

    fn dense(x: MatRef<'_, f64>, what: &'static str, settings: &Settings) -> Result<Self> {
        Self::whole(singular_values(x).map_err(failed(what))?, settings)
    }

    /// Creates the spectrum from all singular values of a matrix.
    fn whole(values: Vec<f64>, settings: &Settings) -> Result<Self> {
        let energy = values.iter().map(|s| s * s).sum();
        Ok(Self::new(values, true, energy, settings))
    }
}

/// Computes singular values and ranks of $Q$, $K$, $V$, $QK^\top$, $A$ and $P$. `profile` is the head's
/// [`weight_profile`], which contains log-sum-exp and Frobenius norms.
///
/// Up to [`Settings::dense_limit`] it computes all singular values, at cubic cost. Above it, the leading
/// [`Settings::rank`] of $A$ and $P$, never overestimated beyond rounding, from $2q + 2$ products for $q$ power steps:
/// about $8(q+1)\,n_q n_k (\text{rank} + d)$ operations for both and a few matrices of $n \times$ rank.
///
/// [`weight_profile`]: super::weight_profile
pub fn spectra(head: &Head, profile: &WeightProfile, settings: &Settings, ws: &Workspace) -> Result<Spectra> {
    let (n_q, n_k, d) = (head.q.rows(), head.k.rows(), head.q.cols());
    let qk = if n_q.min(n_k) < d {
        singular_values(matmul_nt(head.q(), head.k()).as_ref())
    } else {
        singular_values_of_product(head.q(), head.k())
    };
    let shift = if profile.max_logit.is_finite() { profile.max_logit } else { 0.0 };
    let (scores, weights) = ws.install(|cx| {
        let scores = Scores::new(head, &profile.lse, shift, cx);
        let weights = Weights::new(head, &profile.lse, cx);
        let key = StreamKey::new(settings.seed).named("spectra");
        (
            leading(&scores, "scores", profile.scores_energy, key.named("scores"), settings),
            leading(&weights, "weights", profile.weights_energy, key.named("weights"), settings),
        )
    });
    Ok(Spectra {
        q: Spectrum::dense(head.q(), "queries", settings)?,
        k: Spectrum::dense(head.k(), "keys", settings)?,
        v: Spectrum::dense(head.v(), "values", settings)?,
        qk: Spectrum::whole(qk.map_err(failed("products of queries and keys"))?, settings)?,
        scores: scores?,
        weights: weights?,
        key_components: key_components(head.k(), settings.share)?,
    })
}

/// Computes all singular values of a small operator, the leading ones of a large one.
fn leading(
    a: &dyn LinearOperator,
    what: &'static str,
    energy: f64,
    key: StreamKey,
    settings: &Settings,
) -> Result<Spectrum> {
    let side = a.rows().min(a.cols());
    let params = RandomizedSvd { power: settings.power, ..RandomizedSvd::rank(settings.rank) };
    if side <= settings.dense_limit || params.rank + params.oversampling >= side {
        return Spectrum::dense(a.to_dense().as_ref(), what, settings);
    }
    let values = randomized_svd(a, params, key).map_err(failed(what))?.sigma;
    Ok(Spectrum::new(values, false, energy, settings))
}

/// Principal components of keys, by which `loki` ranks them.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct KeyComponents {
    /// Eigenvalues of the centred covariance, divided by one less than the number of keys, descending.
    pub eigenvalues: Vec<f64>,
    /// Least number of components that hold the given share of the variance; 0 if the keys do not vary.
    pub rank: usize,
}

/// Computes principal components of keys, before or after their rotary embedding, and the number that holds `share` of
/// the variance.
pub fn key_components(k: MatRef<'_, f64>, share: f64) -> Result<KeyComponents> {
    let n = k.rows();
    let mut sigma = singular_values(centred(k).as_ref()).map_err(failed("keys"))?;
    // For equal keys, centring leaves only rounding errors.
    let size = k.iter_rows().flatten().fold(0.0, |a: f64, x| a.max(x.abs()));
    let noise = 4.0 * f64::EPSILON * ((n * k.cols()) as f64).sqrt() * size;
    sigma.iter_mut().filter(|s| **s <= noise).for_each(|s| *s = 0.0);
    let divisor = n.saturating_sub(1).max(1) as f64;
    Ok(KeyComponents {
        rank: variance_rank(&sigma, share),
        eigenvalues: sigma.iter().map(|s| s * s / divisor).collect(),
    })
}
