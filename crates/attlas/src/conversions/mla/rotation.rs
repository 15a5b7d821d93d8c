//! RoRoPE: an orthogonal change of basis of all key heads together that commutes with rotary positions, and
//! concentrates the keys' energy in few rotated pairs.
//!
//! Pair $l$ of key head $g$ is a complex number $k_{g,l}$ that rotary positions multiply by a phase that does not
//! depend on $g$. Any unitary mixture over $g$ at fixed $l$, applied to both keys and queries, leaves every score
//! unchanged. The mixture that puts most energy in its first component consists of the eigenvectors of
//! $\sum \bar k_l k_l^\top$ over calibration tokens (complex), or of its real part. Folding treats $F$ neighbouring
//! frequencies as one: the mixture is then over $GF$ numbers, and $F/C$ of them keep their rotation; the price is that
//! unequal frequencies are mixed.

use super::{CONVERSION, Rotate};
use crate::conversions::common::refused;
use crate::{Mat, Result};
use attlas_num::linalg::symmetric_eigen;
use attlas_num::rope::Layout;

/// Sizes of a rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Widths {
    /// Number of key heads.
    pub groups: usize,
    /// Width of a head, even.
    pub d: usize,
    /// Number of neighbouring frequencies that are mixed; a multiple of `collapse` that divides `d / 2`.
    pub fold: usize,
    /// Number of frequencies per kept one.
    pub collapse: usize,
}

impl Widths {
    /// Returns the width that stays rotated.
    pub fn kept(&self) -> usize {
        self.d / self.collapse
    }
}

/// The change of basis.
#[derive(Clone, Debug)]
pub struct Rotation {
    /// Orthogonal, all key features × new features: pairs of neighbouring columns, those that stay rotated first.
    pub basis: Mat<f64>,
    /// Frequency of each pair of columns; pairs past the kept ones use it only if everything stays rotated.
    pub frequency: Vec<usize>,
    /// Number of columns that stay rotated.
    pub kept: usize,
    /// Share of the keys' energy in these columns.
    pub energy: f64,
}

impl Rotation {
    /// Computes the change of basis for keys; their second moments over calibration tokens are the leading block of
    /// `gram`.
    pub fn new(w: Widths, how: Rotate, layout: Layout, gram: &Mat<f64>) -> Result<Self> {
        let width = w.groups * w.d;
        let parts = |g: usize, l: usize| match layout {
            Layout::Half => (g * w.d + l, g * w.d + l + w.d / 2),
            Layout::Interleaved => (g * w.d + 2 * l, g * w.d + 2 * l + 1),
        };
        let n = w.groups * w.fold;
        let kept_each = w.fold / w.collapse;
        let mut pairs: Vec<Pair> = Vec::new();
        for first in (0..w.d / 2).step_by(w.fold) {
            // Kept frequencies come first, so that without a mixture they are those of head 0.
            let order = |a: usize| (a % kept_each) * w.collapse + a / kept_each;
            let features: Vec<(usize, (usize, usize))> = (0..n)
                .map(|s| {
                    let l = first + order(s % w.fold);
                    (l, parts(s / w.fold, l))
                })
                .collect();
            let moment = |s: usize, t: usize| {
                let ((a, b), (c, d)) = (features[s].1, features[t].1);
                [gram[(a, c)] + gram[(b, d)], gram[(a, d)] - gram[(b, c)]]
            };
            let (values, vectors): Eigen = match how {
                Rotate::None => {
                    let unit = |m: usize| (0..n).map(|s| [f64::from(u8::from(s == m)), 0.0]).collect();
                    ((0..n).map(|s| moment(s, s)[0]).collect(), (0..n).map(unit).collect())
                }
                Rotate::Real => {
                    let eigen = symmetric_eigen(Mat::from_fn(n, n, |s, t| moment(s, t)[0]).as_ref())
                        .map_err(|e| refused(CONVERSION.id, e))?;
                    let column = |m: usize| (0..n).map(|s| [eigen.vectors[(s, m)], 0.0]).collect();
                    (eigen.values.clone(), (0..n).map(column).collect())
                }
                Rotate::Complex => hermitian_eigen(n, moment)?,
            };
            for (m, (value, vector)) in values.into_iter().zip(vectors).enumerate() {
                let frequency =
                    if how == Rotate::None { features[m].0 } else { first + m % kept_each * w.collapse };
                let mixture = features.iter().map(|f| f.1).zip(vector).collect();
                pairs.push(Pair { kept: m < kept_each, frequency, mixture, energy: value.max(0.0) });
            }
        }
        // Stable: kept pairs stay in the order of their frequencies.
        pairs.sort_by_key(|p| !p.kept);
        let mut basis = Mat::zeros(width, width);
        let (mut kept, mut total) = (0.0, 0.0);
        for (p, pair) in pairs.iter().enumerate() {
            for &((re, im), [x, y]) in &pair.mixture {
                basis[(re, 2 * p)] = x;
                basis[(im, 2 * p)] = -y;
                basis[(re, 2 * p + 1)] = y;
                basis[(im, 2 * p + 1)] = x;
            }
            total += pair.energy;
            kept += if pair.kept { pair.energy } else { 0.0 };
        }
        let energy = if total > 0.0 { kept / total } else { 1.0 };
        Ok(Self { basis, frequency: pairs.iter().map(|p| p.frequency).collect(), kept: w.kept(), energy })
    }
}

/// A new pair, as a mixture of old pairs.
struct Pair {
    kept: bool,
    frequency: usize,
    /// Real and imaginary feature of an old pair, and its complex weight.
    mixture: Vec<((usize, usize), [f64; 2])>,
    energy: f64,
}

/// Eigenvalues and eigenvectors.
type Eigen = (Vec<f64>, Vec<Vec<[f64; 2]>>);

/// Computes the eigenvalues, descending, and orthonormal eigenvectors of a Hermitian matrix given by the real and
/// imaginary parts of its entries.
///
/// $A + iB$ is diagonalised through the symmetric $\begin{pmatrix} A & -B \\ B & A \end{pmatrix}$, whose eigenvalues
/// come twice, with vectors for $u$ and $iu$. Within a run of equal eigenvalues the real vectors form an arbitrary
/// basis. Each step therefore takes the remaining complex vector with the largest component outside the span of those
/// taken, and removes the component inside.
fn hermitian_eigen(n: usize, entry: impl Fn(usize, usize) -> [f64; 2]) -> Result<Eigen> {
    let symmetric = Mat::from_fn(2 * n, 2 * n, |i, j| {
        let [re, im] = entry(i % n, j % n);
        match (i < n, j < n) {
            (true, false) => -im,
            (false, true) => im,
            _ => re,
        }
    });
    let eigen = symmetric_eigen(symmetric.as_ref()).map_err(|e| refused(CONVERSION.id, e))?;
    let size = eigen.values.iter().fold(0f64, |m, v| m.max(v.abs()));
    let slack = 64.0 * f64::EPSILON * size * n as f64;
    let mut left: Vec<Vec<[f64; 2]>> = (0..2 * n)
        .map(|c| (0..n).map(|s| [eigen.vectors[(s, c)], eigen.vectors[(s + n, c)]]).collect())
        .collect();
    let mut taken: Vec<Vec<[f64; 2]>> = Vec::with_capacity(n);
    let norm = |v: &[[f64; 2]]| v.iter().map(|[x, y]| x * x + y * y).sum::<f64>();
    let mut used = vec![false; 2 * n];
    for j in 0..n {
        let value = eigen.values[2 * j];
        let candidates = (0..2 * n).filter(|&c| !used[c] && eigen.values[c] >= value - slack);
        let best = candidates.max_by(|&a, &b| norm(&left[a]).total_cmp(&norm(&left[b])));
        let Some(best) = best else { unreachable!("more columns than were taken") };
        used[best] = true;
        let mut vector = left[best].clone();
        // Remove the taken vectors once more: rounding grows if little is left.
        for other in &taken {
            remove(&mut vector, other);
        }
        let length = norm(&vector).sqrt();
        vector.iter_mut().for_each(|v| *v = v.map(|x| x / length));
        for (c, other) in left.iter_mut().enumerate() {
            if !used[c] {
                remove(other, &vector);
            }
        }
        taken.push(vector);
    }
    Ok(((0..n).map(|j| eigen.values[2 * j]).collect(), taken))
}

/// Computes $v \leftarrow v - u\,(u^* v)$ for a unit vector $u$.
fn remove(v: &mut [[f64; 2]], u: &[[f64; 2]]) {
    let (mut re, mut im) = (0.0, 0.0);
    for ([a, b], [x, y]) in v.iter().zip(u) {
        re += x * a + y * b;
        im += x * b - y * a;
    }
    for ([a, b], [x, y]) in v.iter_mut().zip(u) {
        *a -= x * re - y * im;
        *b -= x * im + y * re;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::testing::random;
    use attlas_num::linalg::{matmul, matmul_tn};
    use attlas_num::rope::{Angles, Rope, Scaling, Table};

    const W: Widths = Widths { groups: 3, d: 8, fold: 1, collapse: 1 };

    fn gram(width: usize) -> Mat<f64> {
        // Correlated keys, so that there is energy to concentrate.
        let mix = random("mix", width, width).cast::<f64>();
        let keys = matmul(random("keys", 60, width).cast::<f64>().as_ref(), mix.as_ref());
        matmul_tn(keys.as_ref(), keys.as_ref())
    }

    #[test]
    fn the_basis_is_orthogonal_in_every_variant() {
        for how in [Rotate::None, Rotate::Real, Rotate::Complex] {
            for layout in [Layout::Half, Layout::Interleaved] {
                for (fold, collapse) in [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 4)] {
                    let r = Rotation::new(Widths { fold, collapse, ..W }, how, layout, &gram(24)).unwrap();
                    let square = matmul_tn(r.basis.as_ref(), r.basis.as_ref());
                    for i in 0..24 {
                        for j in 0..24 {
                            let want = f64::from(u8::from(i == j));
                            assert!((square[(i, j)] - want).abs() < 64.0 * f64::EPSILON);
                        }
                    }
                    // Kept frequencies are those of a narrower rotation with the same base.
                    assert_eq!(r.kept, 8 / collapse);
                    let kept: Vec<usize> = (0..4 / collapse).map(|p| p * collapse).collect();
                    assert_eq!(r.frequency[..4 / collapse], kept);
                }
            }
        }
    }

    #[test]
    fn scores_with_all_rotations_kept_are_unchanged() {
        for layout in [Layout::Half, Layout::Interleaved] {
            let rope = Rope { dim: 8, base: 1e4, layout, scaling: Scaling::None };
            let table = Table::<f64>::new(&rope, 50, Angles::Double);
            let theta = rope.frequencies(1);
            for how in [Rotate::None, Rotate::Real, Rotate::Complex] {
                let r = Rotation::new(W, how, layout, &gram(24)).unwrap();
                let (q, k) = (random("q", 1, 8).cast::<f64>(), random("k", 1, 24).cast::<f64>());
                for (n, m, g) in [(0, 0, 0), (31, 7, 1), (12, 49, 2)] {
                    let (mut a, mut b) = (q.row(0).to_vec(), k.row(0)[g * 8..(g + 1) * 8].to_vec());
                    table.rotate_in_place(n, &mut a);
                    table.rotate_in_place(m, &mut b);
                    let want: f64 = a.iter().zip(&b).map(|(x, y)| x * y).sum();
                    let new = |x: &dyn Fn(usize) -> f64, at: usize| -> Vec<f64> {
                        let mut y: Vec<f64> =
                            (0..24).map(|c| (0..24).map(|i| r.basis[(i, c)] * x(i)).sum()).collect();
                        for (p, pair) in y.chunks_exact_mut(2).enumerate() {
                            let (sin, cos) = (at as f64 * theta[r.frequency[p]]).sin_cos();
                            (pair[0], pair[1]) =
                                (pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin);
                        }
                        y
                    };
                    let query = new(&|i| if i / 8 == g { q[(0, i % 8)] } else { 0.0 }, n);
                    let key = new(&|i| k[(0, i)], m);
                    let got: f64 = query.iter().zip(&key).map(|(x, y)| x * y).sum();
                    assert!((got - want).abs() < 1e-13, "{how:?} {layout:?}: {got} against {want}");
                }
            }
        }
    }

    #[test]
    fn complex_gathers_most_and_less_is_gathered_in_fewer_pairs() {
        let gram = gram(24);
        let energy = |how, fold, collapse| {
            Rotation::new(Widths { fold, collapse, ..W }, how, Layout::Half, &gram).unwrap().energy
        };
        for (fold, collapse) in [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)] {
            let of = |how| energy(how, fold, collapse);
            assert!(of(Rotate::Complex) > of(Rotate::Real) && of(Rotate::Real) > of(Rotate::None));
        }
        for how in [Rotate::Real, Rotate::Complex] {
            assert!(energy(how, 4, 1) > energy(how, 4, 2) && energy(how, 4, 2) > energy(how, 4, 4));
            // The energy is that of the kept columns.
            let r = Rotation::new(Widths { fold: 2, ..W }, how, Layout::Half, &gram).unwrap();
            let moved = matmul_tn(r.basis.as_ref(), matmul(gram.as_ref(), r.basis.as_ref()).as_ref());
            let trace = |n: usize| (0..n).map(|i| moved[(i, i)]).sum::<f64>();
            assert!((trace(r.kept) / trace(24) - r.energy).abs() < 1e-12);
        }
    }

    #[test]
    fn one_key_head_is_left_as_it_is() {
        for how in [Rotate::Real, Rotate::Complex] {
            let w = Widths { groups: 1, ..W };
            let r = Rotation::new(w, how, Layout::Interleaved, &gram(8)).unwrap();
            assert!((r.energy - 1.0).abs() < 1e-14);
            for (i, c) in (0..8).flat_map(|i| (0..8).map(move |c| (i, c))) {
                // Only the phase of each pair is free.
                assert!(i / 2 == c / 2 || r.basis[(i, c)] == 0.0);
                assert!(how == Rotate::Complex || i == c || r.basis[(i, c)] == 0.0);
            }
        }
    }

    #[test]
    fn equal_eigenvalues_give_orthonormal_vectors() {
        // A multiple of the identity, and a projector with two eigenvalues of multiplicity three.
        let (values, vectors) = hermitian_eigen(6, |s, t| [f64::from(u8::from(s == t)), 0.0]).unwrap();
        assert!(values.iter().all(|v| (v - 1.0).abs() < 1e-14));
        check_unitary(&vectors);
        let random = random("u", 6, 6).cast::<f64>();
        let entry = |s: usize, t: usize| {
            let [mut re, mut im] = [random[(s, t)] + random[(t, s)], random[(s, t)] - random[(t, s)]];
            if s == t {
                (re, im) = (re + 2.0, 0.0);
            }
            [re, im]
        };
        let (_, basis) = hermitian_eigen(6, entry).unwrap();
        check_unitary(&basis);
        let projector = |s: usize, t: usize| {
            basis[..3].iter().fold([0.0, 0.0], |[re, im], u| {
                let ([a, b], [c, d]) = (u[s], u[t]);
                [re + a * c + b * d, im + b * c - a * d]
            })
        };
        let (values, vectors) = hermitian_eigen(6, projector).unwrap();
        check_unitary(&vectors);
        for (v, want) in values.iter().zip([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]) {
            assert!((v - want).abs() < 1e-13);
        }
        // Each is an eigenvector.
        for (value, u) in values.iter().zip(&vectors) {
            for s in 0..6 {
                let image = (0..6).fold([0.0, 0.0], |[re, im], t| {
                    let ([a, b], [c, d]) = (projector(s, t), u[t]);
                    [re + a * c - b * d, im + a * d + b * c]
                });
                assert!((0..2).all(|i| (image[i] - value * u[s][i]).abs() < 1e-13));
            }
        }
    }

    fn check_unitary(vectors: &[Vec<[f64; 2]>]) {
        for (i, u) in vectors.iter().enumerate() {
            for (j, v) in vectors.iter().enumerate() {
                let (mut re, mut im) = (0.0, 0.0);
                for ([a, b], [c, d]) in u.iter().zip(v) {
                    re += a * c + b * d;
                    im += a * d - b * c;
                }
                assert!((re - f64::from(u8::from(i == j))).abs() < 1e-14 && im.abs() < 1e-14);
            }
        }
    }
}
