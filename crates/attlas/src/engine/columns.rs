//! Columns sampled by weight, and rows divided by a separate normaliser.

use crate::Real;
use attlas_num::MatRef;
use attlas_num::hash::kde::log_sum_exp;
use attlas_num::hash::sample::AliasTable;
use attlas_num::rng::StreamKey;

/// Keys drawn independently with probabilities $p_l$, with the terms that make sums over them unbiased.
#[derive(Debug)]
pub struct Columns {
    /// The keys, in the order of drawing.
    pub index: Vec<usize>,
    /// $-\ln(m\, p_l)$ of each key, which is added to its logit.
    pub bias: Vec<f64>,
    /// $\ln \sum_t 1/(m\, p_{l_t})$.
    pub log_total: f64,
}

impl Columns {
    /// Draws `m` of the keys in proportion to `weights`; uniformly if these are no distribution, for example all zero
    /// or with an infinity.
    pub fn draw(weights: &[f64], m: usize, key: StreamKey) -> Self {
        let n = weights.len();
        let m = if n == 0 { 0 } else { m };
        let largest = weights.iter().copied().fold(0.0, f64::max);
        let total: f64 = weights.iter().map(|w| w / largest).filter(|w| *w > 0.0).sum();
        let (index, bias): (Vec<usize>, Vec<f64>) = match AliasTable::new(weights) {
            Some(table) => {
                let bias = |l: usize| (total / (weights[l] / largest) / m as f64).ln();
                table.draws(m, key).into_iter().map(|l| (l, bias(l))).unzip()
            }
            None => {
                let mut rng = key.rng();
                (0..m).map(|_| (rng.below(n), (n as f64 / m as f64).ln())).unzip()
            }
        };
        Self { log_total: log_sum_exp(&bias), index, bias }
    }
}

/// Returns the squared norms of rows relative to the largest entry, which cannot overflow; NaN if all entries are zero.
pub fn relative_squares<T: Real>(x: MatRef<'_, T>) -> Vec<f64> {
    let largest = x.iter_rows().flatten().fold(0.0, |a: f64, v| a.max(v.to_f64().abs()));
    let square = |row: &[T]| row.iter().map(|v| (v.to_f64() / largest).powi(2)).sum::<f64>();
    x.iter_rows().map(square).collect()
}

/// Divides a softmax over weighted columns, an unbiased numerator, by a separate normaliser: `out` and `lse` come from
/// the kernel with the columns' biases, `log_z` is the normaliser. Returns the log-sum-exp of the row.
///
/// The largest logit among the columns is at least `lse - log_total`, and the true normaliser at least its exponential:
/// a smaller estimate is raised to it, since otherwise one large column could overflow.
pub fn divide_by<T: Real>(out: &mut [T], lse: T, log_z: T, log_total: T) -> T {
    let seen = lse - log_total;
    let log_z = if log_z < seen { seen } else { log_z };
    let share = if lse == T::NEG_INFINITY { T::ZERO } else { (lse - log_z).exp() };
    out.iter_mut().for_each(|o| *o *= share);
    log_z
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn biases_make_sums_over_draws_unbiased() {
        let weights = [1.0, 0.0, 3.0, 1e-3, 4.0];
        let value = [2.0, 7.0, -1.0, 30.0, 0.5];
        let runs = 4000;
        let sums: Vec<f64> = (0..runs)
            .map(|seed| {
                let c = Columns::draw(&weights, 8, StreamKey::new(seed));
                assert!((c.log_total - c.bias.iter().map(|b| b.exp()).sum::<f64>().ln()).abs() < 1e-12);
                c.index.iter().zip(&c.bias).map(|(&l, b)| value[l] * weights[l] * b.exp()).sum()
            })
            .collect();
        let truth: f64 = weights.iter().zip(value).map(|(w, v)| w * v).sum();
        let mean = sums.iter().sum::<f64>() / runs as f64;
        let spread = sums.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / runs as f64;
        assert!((mean - truth).abs() < 5.0 * (spread / runs as f64).sqrt(), "{mean} for {truth}");
    }

    #[test]
    fn weights_without_mass_are_drawn_uniformly() {
        for weights in [[0.0; 4], [f64::NAN; 4], [1.0, f64::INFINITY, 1.0, 1.0]] {
            let c = Columns::draw(&weights, 16, StreamKey::new(1));
            assert!(c.index.len() == 16 && c.bias.iter().all(|b| *b == -(4f64.ln())));
        }
        assert!(Columns::draw(&[], 3, StreamKey::new(1)).index.is_empty());
        assert_eq!(relative_squares(MatRef::new(&[1e300f64, 0.0, -1e300, 1e300], 2, 2)), [1.0, 2.0]);
    }

    #[test]
    fn a_normaliser_below_what_was_seen_is_raised() {
        let mut out = [2.0, -4.0];
        assert_eq!(divide_by(&mut out, 3.0f64, 3.0 + 2f64.ln(), 0.0), 3.0 + 2f64.ln());
        assert!((out[0] - 1.0).abs() < 1e-15 && (out[1] + 2.0).abs() < 1e-15);
        let mut out = [1.0];
        assert_eq!(divide_by(&mut out, 1e4f64, f64::NEG_INFINITY, 1.5), 1e4 - 1.5);
        assert!((out[0] - 1.5f64.exp()).abs() < 1e-9);
    }
}
