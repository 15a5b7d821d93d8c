//! The Walsh–Hadamard transform.
//!
//! $H_1 = 1$, $H_{2n} = \begin{pmatrix} H_n & H_n \\ H_n & -H_n \end{pmatrix}$, so $H_{ij} = (-1)^{\mathrm{popcount}(i \wedge j)}$
//! and $H^2 = n I$. The factorisation into $\log_2 n$ butterfly stages costs $n \log_2 n$ additions.

use crate::mat::Real;

/// Replaces `x` by `H·x`, not normalised. Panics unless the length is a power of two.
pub fn walsh_hadamard_in_place<T: Real>(x: &mut [T]) {
    assert!(x.len().is_power_of_two(), "the length {} is not a power of two", x.len());
    let mut half = 1;
    while half < x.len() {
        for block in x.chunks_exact_mut(2 * half) {
            let (low, high) = block.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_multiplies_by_the_matrix_of_parities() {
        for n in [1usize, 2, 4, 32] {
            // Small integers: every sum is exact.
            let x: Vec<f64> = (0..n).map(|i| ((i * 7 + 3) % 11) as f64 - 5.0).collect();
            let mut fast = x.clone();
            walsh_hadamard_in_place(&mut fast);
            for (i, &f) in fast.iter().enumerate() {
                let direct: f64 =
                    (0..n).map(|j| if (i & j).count_ones() % 2 == 0 { x[j] } else { -x[j] }).sum();
                assert_eq!(f, direct, "n = {n}, row {i}");
            }
        }
    }

    #[test]
    fn twice_is_n_times_the_identity() {
        let x: Vec<f32> = (0..64).map(|i| (i as f32).sin()).collect();
        let mut y = x.clone();
        walsh_hadamard_in_place(&mut y);
        walsh_hadamard_in_place(&mut y);
        let bound = 64.0 * 12.0 * f32::EPSILON;
        assert!(x.iter().zip(&y).all(|(a, b)| (64.0 * a - b).abs() <= bound));
    }

    #[test]
    #[should_panic(expected = "not a power of two")]
    fn other_lengths_are_refused() {
        walsh_hadamard_in_place(&mut [0.0f32; 6]);
    }
}
