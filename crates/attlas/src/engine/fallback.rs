//! The output of a row without keys.

use super::attend_subset;
use attlas_num::{MatRef, Real};

crate::choices! {
    /// Output of a causal row that sees no key; without a mask it is always zero.
    pub enum Fallback {
        /// Zero, with log-sum-exp −∞.
        Zero = "zero",
        /// The value of its own token.
        SelfKey = "self_key",
        /// Attention to the first 4 and the last 64 keys it sees.
        SinkWindow = "sink_window",
    }
}

const SINKS: usize = 4;
const WINDOW: usize = 64;

impl Fallback {
    /// Computes a row that sees the keys `0..visible`; returns its log-sum-exp, −∞ if there is none.
    pub fn answer<T: Real>(
        self,
        q: &[T],
        k: MatRef<'_, T>,
        v: MatRef<'_, T>,
        visible: usize,
        scale: T,
        out: &mut [T],
    ) -> T {
        let index: Vec<usize> = match self {
            _ if visible == 0 => Vec::new(),
            Fallback::Zero => Vec::new(),
            Fallback::SelfKey => vec![visible - 1],
            Fallback::SinkWindow => {
                let start = visible.saturating_sub(WINDOW).max(SINKS.min(visible));
                (0..SINKS.min(visible)).chain(start..visible).collect()
            }
        };
        attend_subset(q, k, v, &index, scale, &mut vec![T::ZERO; index.len()], out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fallback_sees_its_own_keys() {
        let k = vec![0.0f64; 100];
        let v: Vec<f64> = (0..100).map(f64::from).collect();
        let (k, v) = (MatRef::new(&k, 100, 1), MatRef::new(&v, 100, 1));
        let run = |fallback: Fallback, visible: usize| {
            let mut out = [f64::NAN];
            (fallback.answer(&[1.0], k, v, visible, 1.0, &mut out), out[0])
        };
        assert_eq!(run(Fallback::Zero, 9), (f64::NEG_INFINITY, 0.0));
        assert_eq!(run(Fallback::SelfKey, 9), (0.0, 8.0));
        assert_eq!(run(Fallback::SelfKey, 0), (f64::NEG_INFINITY, 0.0));
        let close = |(lse, o): (f64, f64), n: f64, mean: f64| {
            assert!((lse - n.ln()).abs() < 1e-14 && (o - mean).abs() < 1e-12, "{lse} {o}");
        };
        close(run(Fallback::SinkWindow, 3), 3.0, 1.0);
        close(run(Fallback::SinkWindow, 50), 50.0, 24.5);
        close(run(Fallback::SinkWindow, 100), 68.0, (6.0 + (36..100).sum::<i32>() as f64) / 68.0);
    }
}
