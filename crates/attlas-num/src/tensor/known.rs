//! Test data with known answers: a fill that any language reproduces in a few lines of integer arithmetic.

use super::{Result, Tensor};

/// Entry `k` (from 0, row-major) of the fill with seed `s`: $2u - 1$, where $u \in [0, 1)$ holds the top 53
/// bits of SplitMix64's finaliser applied to $s\,\mathtt{9E3779B97F4A7C15}_{16} +
/// (k+1)\,\mathtt{BF58476D1CE4E5B9}_{16}$ in wrapping 64-bit arithmetic.
pub fn entry(k: usize, s: u64) -> f64 {
    const MIX: u64 = 0xbf58_476d_1ce4_e5b9;
    let mut z =
        s.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add((k as u64).wrapping_add(1).wrapping_mul(MIX));
    z = (z ^ (z >> 30)).wrapping_mul(MIX);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    2.0 * ((z >> 11) as f64 / (1u64 << 53) as f64) - 1.0
}

/// Returns a tensor of the given shape filled with [`entry`].
pub fn fill(shape: &[usize], s: u64) -> Result<Tensor<f64>> {
    Tensor::from_flat_fn(shape, |k| entry(k, s))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_entries_are_the_published_ones() {
        let t = fill(&[4], 1).unwrap();
        assert_eq!(
            t.data(),
            [0.7869509038368512, -0.9574411272066787, -0.5913902608422501, -0.6645245297741074]
        );
    }
}
