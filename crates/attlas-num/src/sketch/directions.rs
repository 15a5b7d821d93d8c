//! Random directions: the rows $\omega_l$ of an $m \times d$ matrix, each (nearly) standard normal.
//!
//! An estimator $\frac1m \sum_l f(\omega_l)$ is unbiased as soon as every row alone is $N(0, I_d)$; the dependence
//! between rows only changes its variance. Coupled rows come in blocks of $d$, the last one cut short.
//!
//! * [`Coupling::Orthogonal`] (Yu et al. 2016): a Haar rotation times independent $\chi_d$ lengths.
//! * [`Coupling::Simplex`] (Reid et al. 2023): unit vectors with pairwise inner product $-1/(d-1)$, rotated,
//!   times independent $\chi_d$ lengths. Smallest variance for maps that are one-sided in $\omega$; worse than
//!   orthogonal for even ones.
//! * [`Coupling::OrthogonalRegularised`]: lengths $\sqrt d$ instead. **Biased**: see
//!   [`variance::regularised_mean`](super::variance::regularised_mean). For comparison with older code only.
//! * [`Coupling::Hadamard`]: $H D_1 H D_2 H D_3 / d^{3/2}$ with random signs in place of the rotation; `d` a
//!   power of two; nearly but not exactly unbiased.

use super::haar::haar;
use super::{SketchError, ensure};
use crate::mat::Mat;
use crate::par::*;
use crate::rng::{Rng, StreamKey};
use crate::transform::walsh_hadamard_in_place;

/// Dependence between directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Coupling {
    /// Independent normal rows.
    Iid,
    /// Orthogonal blocks with $\chi_d$ lengths.
    #[default]
    Orthogonal,
    /// Orthogonal blocks with all lengths $\sqrt d$; biased.
    OrthogonalRegularised,
    /// Simplex blocks with $\chi_d$ lengths; needs `d ≥ 2`.
    Simplex,
    /// Blocks of randomised Hadamard matrices with $\chi_d$ lengths; needs `d` a power of two.
    Hadamard,
}

/// Draws `m` directions of length `d`, in f64. Block `b` uses the stream `key.with(b)`, so a longer draw from the same
/// key begins with a shorter one; blocks are drawn in parallel.
pub fn draw_directions(
    coupling: Coupling,
    m: usize,
    d: usize,
    key: StreamKey,
) -> Result<Mat<f64>, SketchError> {
    ensure(d >= 1, "d", d as f64, "at least 1")?;
    match coupling {
        Coupling::Simplex => ensure(d >= 2, "d", d as f64, "at least 2 for simplex directions")?,
        Coupling::Hadamard => {
            ensure(d.is_power_of_two(), "d", d as f64, "a power of two for Hadamard directions")?;
        }
        _ => {}
    }
    let mut out = Mat::zeros(m, d);
    out.data_mut().par_chunks_mut(d * d).with_max_len(1).enumerate().for_each(|(b, rows)| {
        let mut rng = key.with(b as u64).rng();
        if coupling == Coupling::Iid {
            rng.fill_normal(rows);
            return;
        }
        let block = match coupling {
            Coupling::Simplex => simplex_block(d, &mut rng),
            Coupling::Hadamard => hadamard_block(d, &mut rng),
            _ => haar(d, &mut rng).transpose(),
        };
        for (row, unit) in rows.chunks_exact_mut(d).zip(block.data().chunks_exact(d)) {
            // Drawn on its own: a length from the factorised matrix would depend on the rotation.
            let length = match coupling {
                Coupling::OrthogonalRegularised => (d as f64).sqrt(),
                _ => rng.chi(d),
            };
            row.iter_mut().zip(unit).for_each(|(o, u)| *o = length * u);
        }
    });
    Ok(out)
}

/// Draws unit rows of a regular simplex, turned by a Haar rotation.
fn simplex_block(d: usize, rng: &mut Rng) -> Mat<f64> {
    let rotation = haar(d, rng);
    // S·R row by row: S has an identity and a constant part, so no product of matrices is needed.
    let n = d as f64;
    let on_axis = (n / (n - 1.0)).sqrt();
    let common = (n.sqrt() + 1.0) / (n - 1.0).powf(1.5);
    let mut sums = vec![0.0; d];
    for i in 0..d - 1 {
        sums.iter_mut().zip(rotation.row(i)).for_each(|(s, r)| *s += r);
    }
    Mat::from_fn(d, d, |i, j| {
        if i + 1 < d { on_axis * rotation[(i, j)] - common * sums[j] } else { sums[j] / (n - 1.0).sqrt() }
    })
}

/// Draws $H D_1 H D_2 H D_3 / d^{3/2}$.
fn hadamard_block(d: usize, rng: &mut Rng) -> Mat<f64> {
    let signs: Vec<f64> = (0..3 * d).map(|_| rng.sign()).collect();
    // Row i of the block is (D₃ H D₂ H D₁ H e_i)ᵀ because H and D are symmetric.
    let mut block = Mat::identity(d);
    for row in block.data_mut().chunks_exact_mut(d) {
        for diagonal in signs.chunks_exact(d) {
            walsh_hadamard_in_place(row);
            row.iter_mut().zip(diagonal).for_each(|(x, s)| *x *= s);
        }
        row.iter_mut().for_each(|x| *x /= (d as f64).powf(1.5));
    }
    block
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linalg::dot;

    const ALL: [Coupling; 5] = [
        Coupling::Iid,
        Coupling::Orthogonal,
        Coupling::OrthogonalRegularised,
        Coupling::Simplex,
        Coupling::Hadamard,
    ];

    fn cosine(a: &[f64], b: &[f64]) -> f64 {
        dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
    }

    #[test]
    fn rows_of_a_block_keep_their_angle_and_blocks_are_independent() {
        for (coupling, expected) in [
            (Coupling::Orthogonal, 0.0),
            (Coupling::OrthogonalRegularised, 0.0),
            (Coupling::Hadamard, 0.0),
            (Coupling::Simplex, -1.0 / 7.0),
        ] {
            let omega = draw_directions(coupling, 19, 8, StreamKey::new(1)).unwrap();
            let mut different = 0;
            for i in 0..19 {
                for j in 0..i {
                    let c = cosine(omega.row(i), omega.row(j));
                    if i / 8 == j / 8 {
                        assert!((c - expected).abs() < 1e-13, "{coupling:?}: {i}, {j}: {c}");
                    } else {
                        different += u32::from((c - expected).abs() > 1e-9);
                    }
                }
            }
            // Cosines between Hadamard blocks take few values, zero among them.
            assert!(different > 60, "{coupling:?}: {different} of 112");
        }
    }

    #[test]
    fn two_dimensional_simplex_rows_are_opposite() {
        let omega = draw_directions(Coupling::Simplex, 2, 2, StreamKey::new(1)).unwrap();
        assert!((cosine(omega.row(0), omega.row(1)) + 1.0).abs() < 1e-14);
    }

    #[test]
    fn every_coordinate_has_mean_zero_and_variance_one() {
        let (d, m, draws) = (4usize, 6usize, 8000u64);
        for coupling in ALL {
            let mut first = vec![0.0; m * d];
            let mut second = vec![0.0; m * d];
            for t in 0..draws {
                let omega = draw_directions(coupling, m, d, StreamKey::new(t)).unwrap();
                for (i, &w) in omega.data().iter().enumerate() {
                    first[i] += w;
                    second[i] += w * w;
                }
            }
            let n = draws as f64;
            for i in 0..m * d {
                assert!((first[i] / n).abs() < 5.0 / n.sqrt(), "{coupling:?}, {i}: {}", first[i] / n);
                // The variance of the square of a normal number is 2; the couplings have no more.
                assert!((second[i] / n - 1.0).abs() < 5.0 * (2.0 / n).sqrt(), "{coupling:?}, {i}");
            }
        }
    }

    #[test]
    fn lengths_are_chi_distributed_or_constant() {
        let d = 16;
        for coupling in ALL {
            let omega = draw_directions(coupling, 4000, d, StreamKey::new(9)).unwrap();
            let squares: Vec<f64> = (0..4000).map(|i| dot(omega.row(i), omega.row(i))).collect();
            let mean = squares.iter().sum::<f64>() / 4000.0;
            let var = squares.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / 4000.0;
            if coupling == Coupling::OrthogonalRegularised {
                assert!(squares.iter().all(|s| (s - 16.0).abs() < 1e-12));
            } else {
                // χ²: mean d, variance 2d = 32; the sample variance has s.d. 32·√((2 + 12/d)/4000) ≈ 0.84.
                assert!((mean - 16.0).abs() < 5.0 * (32.0f64 / 4000.0).sqrt(), "{coupling:?}: {mean}");
                assert!((var - 32.0).abs() < 4.2, "{coupling:?}: {var}");
            }
        }
    }

    #[test]
    fn draws_depend_on_the_key_alone_and_grow_without_changing() {
        for coupling in ALL {
            let few = draw_directions(coupling, 5, 4, StreamKey::new(3)).unwrap();
            let many = draw_directions(coupling, 11, 4, StreamKey::new(3)).unwrap();
            assert_eq!(few.data(), &many.data()[..20], "{coupling:?}");
            assert_ne!(few, draw_directions(coupling, 5, 4, StreamKey::new(4)).unwrap());
        }
    }

    #[test]
    fn impossible_sizes_are_refused_and_small_ones_work() {
        let key = StreamKey::new(0);
        assert!(draw_directions(Coupling::Simplex, 3, 1, key).is_err());
        assert!(draw_directions(Coupling::Hadamard, 3, 6, key).is_err());
        assert!(draw_directions(Coupling::Iid, 3, 0, key).is_err());
        for coupling in [Coupling::Iid, Coupling::Orthogonal, Coupling::Hadamard] {
            let omega = draw_directions(coupling, 3, 1, key).unwrap();
            assert!(omega.data().iter().all(|w| w.is_finite() && *w != 0.0));
        }
        assert_eq!(draw_directions(Coupling::Orthogonal, 0, 5, key).unwrap().rows(), 0);
    }
}
