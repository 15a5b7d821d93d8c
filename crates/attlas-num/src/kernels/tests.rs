//! Every instruction set of this machine against the scalar definition and against a two-pass reference
//! in f64.

use super::*;
use crate::mat::Mat;
use crate::rng::StreamKey;

const LENGTHS: std::ops::Range<usize> = 0..68;

fn normal<T: Real>(seed: u64, rows: usize, cols: usize) -> Mat<T> {
    let mut rng = StreamKey::new(seed).named("kernel tests").rng();
    Mat::from_fn(rows, cols, |_, _| T::from_f64(rng.normal()))
}

fn close<T: Real>(a: T, b: T, tol: f64) -> bool {
    (a.is_nan() && b.is_nan()) || a == b || (a.to_f64() - b.to_f64()).abs() <= tol
}

fn bits<T: Real>(x: &[T]) -> Vec<u64> {
    x.iter().map(|x| x.to_bits64()).collect()
}

/// Runs `check` for every vector length, instruction set and an aligned and an unaligned start, on normal
/// variates and on the same with one NaN or infinity.
fn for_vectors<T: Real>(mut check: impl FnMut(Isa, &[T], &[T])) {
    for isa in Isa::available() {
        for n in LENGTHS {
            for start in [0, 1, 3] {
                let a = normal::<T>(n as u64, 1, n + start);
                let b = normal::<T>(1000 + n as u64, 1, n + start);
                check(isa, &a.data()[start..], &b.data()[start..]);
                for special in [T::NAN, T::INFINITY, T::NEG_INFINITY] {
                    let mut a = a.clone();
                    if n > 0 {
                        a.data_mut()[start + (n * 7) / 11] = special;
                    }
                    check(isa, &a.data()[start..], &b.data()[start..]);
                }
            }
        }
    }
}

fn vectors_agree<T: Real>() {
    for_vectors::<T>(|isa, a, b| {
        let n = a.len();
        let size = |x: &[T]| x.iter().map(|x| x.to_f64().abs()).filter(|x| x.is_finite()).sum::<f64>();
        let products: Vec<T> = a.iter().zip(b).map(|(&x, &y)| x * y).collect();
        let tol = 2.0 * (n as f64 + 1.0) * T::ROUNDOFF * (size(&products) + 1.0);
        assert!(close(T::dot_on(isa, a, b), scalar::dot(a, b), tol), "dot {isa} {n}");
        let tol = 4.0 * (n as f64 + 1.0) * T::ROUNDOFF * (scalar::sq_dist(a, b).to_f64().min(1e4) + 1.0);
        assert!(close(T::sq_dist_on(isa, a, b), scalar::sq_dist(a, b), tol), "sq_dist {isa} {n}");
        let tol = 2.0 * (n as f64 + 1.0) * T::ROUNDOFF * (size(a) + 1.0);
        assert!(close(T::sum_on(isa, a), scalar::sum(a), tol), "sum {isa} {n}");
        assert!(close(T::max_on(isa, a), scalar::max(a), 0.0), "max {isa} {n}");

        let factor = T::from_f64(-0.37);
        let (mut y, mut z) = (b.to_vec(), b.to_vec());
        T::axpy_on(isa, factor, a, &mut y);
        scalar::axpy(factor, a, &mut z);
        assert!(y.iter().zip(&z).all(|(&y, &z)| close(y, z, 0.0)), "axpy {isa} {n}");
        T::scale_on(isa, factor, &mut y);
        scalar::scale(factor, &mut z);
        assert!(y.iter().zip(&z).all(|(&y, &z)| close(y, z, 0.0)), "scale {isa} {n}");

        let (mut y, mut z) = (a.to_vec(), a.to_vec());
        T::exp_in_place_on(isa, &mut y);
        scalar::exp_in_place(&mut z);
        let same = |(&y, &z): (&T, &T)| close(y, z, 4.0 * T::ROUNDOFF * z.to_f64().abs());
        assert!(y.iter().zip(&z).all(same), "exp {isa} {n}");
        let (mut y, mut z) = (a.to_vec(), a.to_vec());
        let got = T::exp_sum_on(isa, &mut y, factor);
        let want = scalar::exp_sum(&mut z, factor);
        assert!(y.iter().zip(&z).all(same), "exp_sum {isa} {n}");
        assert!(close(got, want, 2.0 * (n as f64 + 4.0) * T::ROUNDOFF * want.to_f64()), "exp_sum {isa} {n}");
    });
}

#[test]
fn vector_kernels_agree_with_the_scalar_definition() {
    vectors_agree::<f32>();
    vectors_agree::<f64>();
}

#[test]
fn exp_is_within_two_units_in_the_last_place() {
    fn check<T: Real>(from: f64, to: f64, smallest: f64) {
        for isa in Isa::available() {
            let n = 200_000;
            let x: Vec<T> =
                (0..n).map(|i| T::from_f64(from + (to - from) * f64::from(i) / f64::from(n))).collect();
            let mut y = x.clone();
            T::exp_in_place_on(isa, &mut y);
            for (&x, &y) in x.iter().zip(&y) {
                // The reference is libm in f64, which for f64 itself is accurate to one unit.
                let want = libm::exp(x.to_f64());
                let error = (y.to_f64() - want).abs();
                if want < smallest {
                    assert!(y == T::ZERO || error <= 4.0 * T::ROUNDOFF * smallest, "{isa} exp({x}) = {y}");
                } else {
                    assert!(error <= 4.0 * T::ROUNDOFF * want, "{isa} exp({x}) = {y}, not {want}");
                }
            }
            let mut ends = [T::NEG_INFINITY, T::from_f64(-1e30), T::INFINITY, T::NAN, T::ZERO, -T::ZERO];
            T::exp_in_place_on(isa, &mut ends);
            assert_eq!(ends[..3], [T::ZERO, T::ZERO, T::INFINITY]);
            assert!(ends[3].is_nan());
            assert_eq!(ends[4..], [T::ONE, T::ONE]);
        }
    }
    check::<f32>(-110.0, 88.7, f64::from(f32::MIN_POSITIVE));
    check::<f64>(-760.0, 709.7, f64::MIN_POSITIVE);
}

#[test]
fn ln_is_within_two_units_in_the_last_place_and_the_same_everywhere() {
    fn check<T: Real>(smallest: f64, largest: f64) {
        let (low, high) = (smallest.ln(), largest.ln());
        let steps = 40_000;
        let spread = (0..=steps).map(|i| (low + (high - low) * i as f64 / steps as f64).exp());
        let near_one = (0..=steps).map(|i| 0.5 + 1.6 * i as f64 / steps as f64);
        let x: Vec<T> = spread.chain(near_one).map(T::from_f64).filter(|x| x.is_finite()).collect();
        let mut first: Option<Vec<T>> = None;
        for isa in Isa::available() {
            let mut y = x.clone();
            T::ln_in_place_on(isa, &mut y);
            for (x, y) in x.iter().zip(&y) {
                let want = x.to_f64().ln();
                // Where the result is near zero the argument is within a rounding error of one, which is exact.
                let unit = 2.0 * T::ROUNDOFF * want.abs();
                assert!((y.to_f64() - want).abs() <= 2.0 * unit, "{isa}: ln {x} = {y}");
            }
            let same = first.get_or_insert_with(|| y.clone());
            assert_eq!(bits(same), bits(&y), "{isa}");
            let mut special = [T::ZERO, -T::ZERO, T::ONE, T::INFINITY, T::NAN, -T::ONE, T::NEG_INFINITY];
            T::ln_in_place_on(isa, &mut special);
            assert!(special[..2].iter().all(|&y| y == T::NEG_INFINITY));
            assert!(special[2] == T::ZERO && special[3] == T::INFINITY);
            assert!(special[4..].iter().all(|y| y.is_nan()), "{special:?}");
        }
    }
    check::<f32>(1.5e-45, 3.4e38);
    check::<f64>(1e-307, 1e308);
}

#[test]
fn softmax_handles_empty_hidden_and_nan_rows() {
    fn check<T: Real>() {
        assert_eq!(softmax_in_place::<T>(&mut []), T::NEG_INFINITY);
        let mut x = [T::NEG_INFINITY; 5];
        assert_eq!(softmax_in_place(&mut x), T::NEG_INFINITY);
        assert_eq!(x, [T::ZERO; 5]);
        let mut x = [T::NAN, T::NEG_INFINITY];
        assert!(softmax_in_place(&mut x).is_nan() && x.iter().all(|x| x.is_nan()));
        let mut x = [T::NAN, T::ONE, T::ZERO];
        assert!(softmax_in_place(&mut x).is_nan() && x.iter().all(|x| x.is_nan()));
        let mut x = [T::from_f64(1e4); 4];
        let lse = softmax_in_place(&mut x);
        assert!(close(lse, T::from_f64(1e4 + 4f64.ln()), 1e4 * 4.0 * T::ROUNDOFF));
        assert_eq!(x, [T::from_f64(0.25); 4]);
    }
    check::<f32>();
    check::<f64>();
}

#[test]
fn products_with_several_vectors_have_the_bits_of_single_ones() {
    fn check<T: Real>() {
        for isa in Isa::available() {
            for (rows, cols) in [(0, 3), (1, 1), (5, 7), (37, 64), (16, 33), (67, 64), (3, 0)] {
                let a = normal::<T>(5, rows.max(1), cols + 1);
                let a = MatRef::with_stride(a.data(), rows, cols, cols + 1).unwrap();
                for count in 1..=9 {
                    let x = normal::<T>(6, count, cols);
                    let (mut each, mut one) = (vec![T::NAN; count * rows], vec![T::NAN; rows]);
                    T::matvec_each_on(isa, a, x.as_ref(), &mut each);
                    for (r, each) in each.chunks_exact(rows.max(1)).enumerate() {
                        T::matvec_on(isa, a, x.row(r), &mut one);
                        let same = each.iter().zip(&one).all(|(a, b)| a.to_bits64() == b.to_bits64());
                        assert!(same, "{isa} {rows}×{cols}, vector {r} of {count}");
                    }
                }
            }
        }
    }
    check::<f32>();
    check::<f64>();
}

#[test]
fn matvec_is_a_dot_product_per_row_for_any_stride() {
    fn check<T: Real>() {
        for isa in Isa::available() {
            for (rows, cols, stride) in
                [(0, 3, 3), (1, 1, 1), (5, 7, 9), (9, 33, 33), (67, 64, 65), (3, 0, 2)]
            {
                let data = normal::<T>(5, rows.max(1), stride);
                let a = MatRef::with_stride(data.data(), rows, cols, stride).unwrap();
                let x = normal::<T>(6, 1, cols);
                let mut out = vec![T::NAN; rows];
                T::matvec_on(isa, a, x.data(), &mut out);
                for (i, &o) in out.iter().enumerate() {
                    let size: f64 =
                        a.row(i).iter().zip(x.data()).map(|(&a, &x)| (a * x).to_f64().abs()).sum();
                    let tol = 2.0 * (cols as f64 + 1.0) * T::ROUNDOFF * size;
                    assert!(close(o, scalar::dot(a.row(i), x.data()), tol), "{isa} {rows}×{cols} row {i}");
                }
            }
        }
    }
    check::<f32>();
    check::<f64>();
}

fn gemm_agrees<T: Real>() {
    let scratch = Scratch::poisoned();
    let sizes = [
        (1, 1, 1),
        (0, 4, 3),
        (3, 4, 0),
        (2, 3, 5),
        (12, 32, 16),
        (13, 33, 17),
        (11, 31, 1),
        (25, 65, 70),
        (1, 130, 40),
        (97, 1, 33),
        (64, 64, 64),
        (37, 100, 300),
        (130, 70, 513),
    ];
    for isa in Isa::available() {
        for (case, (m, n, depth)) in sizes.into_iter().enumerate() {
            for ops in 0..4 {
                let (ta, tb) = (ops & 1 == 1, ops & 2 == 2);
                let pad = case % 3;
                let shape = |t: bool, r: usize, c: usize| if t { (c, r) } else { (r, c) };
                let ((ar, ac), (br, bc)) = (shape(ta, m, depth), shape(tb, depth, n));
                let (a, b) = (normal::<T>(1, ar, ac + pad), normal::<T>(2, br, bc + pad));
                let a = MatRef::with_stride(a.data(), ar, ac, ac + pad).unwrap();
                let b = MatRef::with_stride(b.data(), br, bc, bc + pad).unwrap();
                let op = |t: bool, x| if t { Op::T(x) } else { Op::N(x) };
                let (a, b) = (op(ta, a), op(tb, b));
                for (alpha, beta) in [(1.0, 0.0), (-0.5, 1.0), (2.0, 0.75), (0.0, 0.5)] {
                    let (alpha, beta) = (T::from_f64(alpha), T::from_f64(beta));
                    let stride = n + pad;
                    let start = normal::<T>(3, m, stride);
                    let mut c = start.clone();
                    if beta == T::ZERO {
                        c.data_mut().fill(T::NAN);
                    }
                    gemm(isa, alpha, a, b, beta, c.data_mut(), stride, &scratch);
                    if beta == T::ZERO && depth <= 256 {
                        let mut packed = vec![T::NAN; packed_len::<T>(isa, depth, n)];
                        pack_right(isa, b, &mut packed);
                        for some in [n, n.div_ceil(2)] {
                            let mut again = vec![T::NAN; m * stride];
                            gemm_packed(isa, alpha, a, &packed, some, &mut again, stride, &scratch);
                            for i in 0..m {
                                let (got, want) = (&again[i * stride..][..some], &c.row(i)[..some]);
                                assert!(
                                    got == want,
                                    "{isa} {m}×{n}×{depth}: row {i} of {some} packed columns"
                                );
                                assert!(
                                    again[i * stride + some..(i + 1) * stride].iter().all(|x| x.is_nan())
                                );
                            }
                        }
                    }
                    for i in 0..m {
                        for j in 0..stride {
                            if j >= n {
                                assert!(beta == T::ZERO || c[(i, j)] == start[(i, j)], "padding written");
                                continue;
                            }
                            let terms = (0..depth).map(|l| a.at(i, l).to_f64() * b.at(l, j).to_f64());
                            let (s, size) = terms.fold((0.0, 0.0), |(s, z), t| (s + t, z + t.abs()));
                            let old = if beta == T::ZERO { 0.0 } else { start[(i, j)].to_f64() };
                            let want = alpha.to_f64() * s + beta.to_f64() * old;
                            let tol = (depth as f64 + 4.0)
                                * T::ROUNDOFF
                                * (alpha.to_f64().abs() * size + old.abs());
                            let got = c[(i, j)].to_f64();
                            assert!(
                                (got - want).abs() <= tol,
                                "{isa} {m}×{n}×{depth} ({i}, {j}): {got} {want}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn gemm_agrees_with_the_naive_product_for_odd_sizes_strides_and_transposes() {
    gemm_agrees::<f32>();
    gemm_agrees::<f64>();
}

#[test]
fn fma_burn_counts_its_operations_on_every_instruction_set() {
    for isa in Isa::available() {
        let (flops, sink) = fma_burn::<f32>(isa, 10);
        assert!(flops > 0 && flops % 20 == 0 && sink.is_finite());
        assert_eq!(fma_burn::<f64>(isa, 20).0, 2 * fma_burn::<f64>(isa, 10).0);
    }
}

/// An attention problem that owns its data.
#[derive(Clone)]
struct Case<T> {
    q: Mat<T>,
    k: Mat<T>,
    v: Mat<T>,
    scale: f64,
    bias: Option<Vec<T>>,
    softcap: Option<f64>,
    band: Band,
    tile_k: usize,
    precision: Precision,
}

impl<T: Real> Case<T> {
    fn new(seed: u64, rows: usize, n_k: usize, d: usize, d_v: usize) -> Self {
        Self {
            q: normal(10 * seed, rows, d),
            k: normal(10 * seed + 1, n_k, d),
            v: normal(10 * seed + 2, n_k, d_v),
            scale: 1.0 / (d.max(1) as f64).sqrt(),
            bias: None,
            softcap: None,
            band: Band::ALL,
            tile_k: 0,
            precision: Precision::Full,
        }
    }

    fn causal(mut self) -> Self {
        self.band = Band::causal(self.k.rows() as isize - self.q.rows() as isize);
        self
    }

    fn run(&self, isa: Isa) -> (Mat<T>, Vec<T>) {
        let mut out =
            Mat::from_vec(vec![T::NAN; self.q.rows() * self.v.cols()], self.q.rows(), self.v.cols());
        let mut lse = vec![T::NAN; self.q.rows()];
        let job = Attend {
            q: self.q.as_ref(),
            k: self.k.as_ref(),
            v: self.v.as_ref(),
            scale: T::from_f64(self.scale),
            bias: self.bias.as_deref(),
            band: self.band,
            tile_k: self.tile_k,
            isa,
            precision: self.precision,
            decode: true,
            softcap: self.softcap.map(T::from_f64),
        };
        job.run(&Scratch::poisoned(), out.data_mut(), &mut lse);
        (out, lse)
    }

    /// Returns the same case with the queries `range` only.
    fn rows(&self, range: std::ops::Range<usize>) -> Self {
        let q = self.q.as_ref().sub_rows(range.clone()).to_mat();
        Self { q, band: self.band.from_row(range.start), ..self.clone() }
    }

    fn sees(&self, i: usize, j: usize) -> bool {
        self.band.range(i, self.k.rows()).contains(&j)
            && self.bias.as_ref().is_none_or(|b| b[j] != T::NEG_INFINITY)
    }

    /// Two passes in f64: output row, log-sum-exp, range of the visible values and the bound on the
    /// perturbation of the logits, `(d + 2) u τ max_j Σ |q||k|`.
    fn reference(&self, i: usize) -> (Vec<f64>, f64, Vec<f64>, f64) {
        let scale = T::from_f64(self.scale).to_f64();
        let seen: Vec<usize> = (0..self.k.rows()).filter(|&j| self.sees(i, j)).collect();
        let mut spread = 0f64;
        let logits: Vec<f64> = seen
            .iter()
            .map(|&j| {
                let terms =
                    self.q.row(i).iter().zip(self.k.row(j)).map(|(q, k)| q.to_f64() * k.to_f64() * scale);
                let (s, size) = terms.fold((0.0, 0.0), |(s, z), t| (s + t, z + t.abs()));
                let bias = self.bias.as_ref().map_or(0.0, |b| b[j].to_f64());
                spread = spread.max(size + bias.abs() + self.softcap.unwrap_or(0.0));
                self.softcap.map_or(s, |c| c * (s / c).tanh()) + bias
            })
            .collect();
        let m = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let l: f64 = logits.iter().map(|s| (s - m).exp()).sum();
        let column = |c: usize| {
            let o: f64 =
                seen.iter().zip(&logits).map(|(&j, s)| (s - m).exp() / l * self.v[(j, c)].to_f64()).sum();
            let values = seen.iter().map(|&j| self.v[(j, c)].to_f64());
            let (lo, hi) =
                values.fold((f64::INFINITY, f64::NEG_INFINITY), |(lo, hi), v| (lo.min(v), hi.max(v)));
            (o, if seen.is_empty() { 0.0 } else { (hi - lo).max(hi.abs().max(lo.abs())) })
        };
        let (o, range) = (0..self.v.cols()).map(column).unzip();
        let lse = if seen.is_empty() { f64::NEG_INFINITY } else { m + l.ln() };
        (o, lse, range, (self.q.cols() as f64 + 2.0) * T::ROUNDOFF * spread)
    }

    /// Checks the result of every instruction set against the reference: within the guaranteed bound, and within the
    /// practical one.
    fn check(&self, name: &str) {
        for isa in Isa::available() {
            let (out, lse) = self.run(isa);
            let practical = if T::DTYPE == crate::DType::F32 { 2e-5 } else { 1e-12 };
            for i in 0..self.q.rows() {
                let (o, l, range, delta) = self.reference(i);
                for c in 0..o.len() {
                    let error = (out[(i, c)].to_f64() - o[c]).abs();
                    let bound = range[c] * (delta + 32.0 * T::ROUNDOFF).min(practical);
                    assert!(error <= bound, "{name} {isa} ({i}, {c}): {} not {}", out[(i, c)], o[c]);
                }
                let got = lse[i].to_f64();
                let tol = delta + 16.0 * T::ROUNDOFF * (1.0 + l.abs());
                assert!(got == l || (got - l).abs() <= tol, "{name} {isa} lse {i}: {got} not {l}");
            }
        }
    }
}

fn shapes_agree<T: Real>() {
    let mut seed = 0;
    for (rows, n_k) in [
        (0, 3),
        (3, 0),
        (1, 1),
        (1, 37),
        (2, 5),
        (7, 129),
        (8, 64),
        (9, 64),
        (12, 32),
        (13, 33),
        (24, 257),
        (31, 128),
        (37, 131),
        (101, 127),
        (61, 521),
        (200, 300),
    ] {
        for (d, d_v) in [(1, 1), (3, 5), (16, 16), (17, 32), (64, 33), (32, 70), (40, 0)] {
            seed += 1;
            let case = Case::<T>::new(seed, rows, n_k, d, d_v);
            case.check(&format!("{rows}×{n_k} d {d} d_v {d_v}"));
            case.clone().causal().check(&format!("causal {rows}×{n_k} d {d} d_v {d_v}"));
        }
    }
    Case::<T>::new(900, 15, 70, 520, 515).causal().check("wide");
    Case::<T>::new(901, 4, 300, 128, 128).check("decode");
    Case::<T>::new(902, 5, 300, 130, 131).check("decode, odd width");
}

#[test]
fn attention_agrees_with_two_passes_in_f64_for_all_shapes() {
    shapes_agree::<f32>();
    shapes_agree::<f64>();
}

#[test]
fn bands_biases_and_tiles_agree_with_two_passes_in_f64() {
    fn check<T: Real>() {
        let bands = [
            Band { lower: Some(-5), upper: Some(3) },
            Band { lower: Some(-40), upper: Some(0) },
            Band { lower: Some(2), upper: None },
            Band { lower: Some(-64), upper: Some(-20) },
            Band { lower: Some(3), upper: Some(1) },
            Band { lower: None, upper: Some(-10) },
            Band { lower: Some(isize::MIN), upper: Some(isize::MAX) },
            Band::causal(90),
        ];
        for (n, band) in bands.into_iter().enumerate() {
            for tile_k in [0, 1, 32, 100, 10_000] {
                for rows in [1, 5, 77] {
                    let mut case = Case::<T>::new(n as u64 + 50, rows, 150, 24, 20);
                    case.band = band;
                    case.tile_k = tile_k;
                    case.check(&format!("{band:?} tile {tile_k}"));
                    let mut rng = StreamKey::new(n as u64).rng();
                    let mut bias: Vec<T> = (0..150).map(|_| T::from_f64(3.0 * rng.normal())).collect();
                    bias.iter_mut().step_by(4).for_each(|b| *b = T::NEG_INFINITY);
                    bias[30..70].fill(T::NEG_INFINITY);
                    case.bias = Some(bias);
                    case.check(&format!("{band:?} tile {tile_k} with bias"));
                }
            }
        }
    }
    check::<f32>();
    check::<f64>();
}

#[test]
fn softcaps_agree_with_two_passes_in_f64() {
    fn check<T: Real>() {
        for (rows, cap) in [(1, 0.5), (5, 2.0), (40, 30.0), (70, 0.01)] {
            let mut case = Case::<T>::new(rows as u64 + 77, rows, 300, 24, 20);
            case.scale = 3.0;
            case.softcap = Some(cap);
            case.check("softcap");
            case.bias = Some((0..300).map(|j| T::from_f64((j % 7) as f64 - 3.0)).collect());
            case.causal().check("softcap, causal, bias");
        }
        // Logits far outside land on the cap, whatever their size.
        for isa in Isa::available() {
            let mut case = Case::<T>::new(3, 3, 1, 4, 2);
            (case.scale, case.softcap) = (1e30, Some(5.0));
            assert!(case.run(isa).1.iter().all(|l| (l.to_f64().abs() - 5.0).abs() < 1e-5), "{isa}");
        }
    }
    check::<f32>();
    check::<f64>();
}

#[test]
fn golden_values_are_reproduced() {
    fn check<T: Real>(tol: f64) {
        let case = Case::<T> {
            q: Mat::from_fn(6, 4, |i, j| {
                T::from_f64((0.7 * ((i + 1) * (j + 1)) as f64 + 0.1 * i as f64).sin())
            }),
            k: Mat::from_fn(6, 4, |i, j| T::from_f64((0.5 * (i * (j + 1)) as f64 + 0.3 * j as f64).cos())),
            v: Mat::from_fn(6, 3, |i, j| T::from_f64((0.3 * (i * (j + 1)) as f64 + 0.4).sin())),
            scale: 0.5,
            bias: None,
            softcap: None,
            band: Band::ALL,
            tile_k: 0,
            precision: Precision::Full,
        };
        let near = |a: T, b: f64| (a.to_f64() - b).abs() <= tol;
        let all = |a: &[T], b: &[f64]| a.iter().zip(b).all(|(&a, &b)| near(a, b));
        let mut short = case.clone();
        short.k = case.k.as_ref().sub_rows(0..4).to_mat();
        short.v = case.v.as_ref().sub_rows(0..4).to_mat();
        for isa in Isa::available() {
            let (o, lse) = case.run(isa);
            assert!(all(o.row(0), &[0.6572051421, 0.4608600799, 0.1648587091]), "{isa} {o:?}");
            assert!((o.frobenius() - 2.3654611302).abs() <= 4.0 * tol);
            let golden = [2.0567296516, 2.0159919823, 1.9997967711, 1.9227142930, 1.7378044153, 1.8838552797];
            assert!(all(&lse, &golden), "{isa} {lse:?}");

            let (o, lse) = case.clone().causal().run(isa);
            assert!(all(o.row(3), &[0.7070584823, 0.7650313262, 0.5754746598]), "{isa} {o:?}");
            assert!((o.frobenius() - 2.6371664850).abs() <= 4.0 * tol);
            let golden = [1.2531615897, 1.3081550853, 1.3105764748, 1.3476206365, 1.3514916333, 1.8838552797];
            assert!(all(&lse, &golden), "{isa} {lse:?}");

            let (o, lse) = short.clone().causal().run(isa);
            assert_eq!(o.data()[..6], [T::ZERO; 6]);
            assert_eq!(lse[..2], [T::NEG_INFINITY; 2]);
            assert!(all(o.row(2), &[0.3894183423; 3]), "{isa} {o:?}");
            assert!((o.frobenius() - 2.1254241812).abs() <= 4.0 * tol);
        }
    }
    check::<f32>(5e-7);
    check::<f64>(1e-10);
}

#[test]
fn known_answers_are_given() {
    fn check<T: Real>() {
        let u = T::ROUNDOFF;
        for isa in Isa::available() {
            let mut zero = Case::<T>::new(1, 40, 75, 20, 9).causal();
            zero.q.data_mut().fill(T::ZERO);
            let (o, lse) = zero.run(isa);
            for i in 0..40 {
                let seen = zero.band.range(i, 75).len() as f64;
                assert!(close(lse[i], T::from_f64(seen.ln()), 8.0 * u * (1.0 + seen.ln())), "{isa}");
                for c in 0..9 {
                    let mean = (0..seen as usize).map(|j| zero.v[(j, c)].to_f64()).sum::<f64>() / seen;
                    assert!(close(o[(i, c)], T::from_f64(mean), 40.0 * u * 4.0), "{isa}");
                }
            }

            let one = Case::<T>::new(2, 3, 1, 7, 5);
            let (o, lse) = one.run(isa);
            for (i, &l) in lse.iter().enumerate() {
                assert_eq!(bits(o.row(i)), bits(one.v.row(0)), "{isa}: one key gives its value");
                let s = scalar::dot(one.q.row(i), one.k.row(0)).to_f64() * one.scale;
                assert!(close(l, T::from_f64(s), 32.0 * u), "{isa}");
            }

            let mut constant = Case::<T>::new(3, 50, 200, 16, 16);
            constant.v.data_mut().fill(T::from_f64(0.7));
            let (o, _) = constant.run(isa);
            assert!(o.data().iter().all(|&o| close(o, T::from_f64(0.7), 0.7 * 2.0 * 200.0 * u)), "{isa}");

            for rows in [3, 20] {
                let mut huge = Case::<T>::new(4, rows, 90, 8, 6);
                huge.scale = 1.0;
                huge.q.data_mut().iter_mut().for_each(|x| *x *= T::from_f64(1e4));
                let (o, lse) = huge.run(isa);
                assert!(o.data().iter().chain(&lse).all(|x| x.is_finite()), "{isa}: logits of 1e4");
            }
        }
    }
    check::<f32>();
    check::<f64>();
}

#[test]
fn invariances_hold_up_to_rounding() {
    fn check<T: Real>() {
        let (rows, n_k, d, d_v) = (30, 150, 24, 18);
        let base = Case::<T>::new(7, rows, n_k, d, d_v);
        let tol = if T::DTYPE == crate::DType::F32 { 2e-5 } else { 1e-12 };
        let tol = tol * 8.0;
        for isa in Isa::available() {
            let (o, lse) = base.run(isa);
            let same = |name: &str, (o2, lse2): (Mat<T>, Vec<T>), shift: &dyn Fn(usize) -> f64| {
                assert!(o.data().iter().zip(o2.data()).all(|(&a, &b)| close(a, b, tol)), "{isa} {name}");
                for i in 0..rows {
                    assert!(close(lse2[i], lse[i] + T::from_f64(shift(i)), tol), "{isa} {name}");
                }
            };
            let order = StreamKey::new(1).rng().permutation(n_k);
            let mut permuted = base.clone();
            base.k.as_ref().gather_into(order.iter().copied(), permuted.k.data_mut());
            base.v.as_ref().gather_into(order.iter().copied(), permuted.v.data_mut());
            same("permutation", permuted.run(isa), &|_| 0.0);

            let c = normal::<T>(99, 1, d);
            let mut shifted = base.clone();
            shifted.k = Mat::from_fn(n_k, d, |j, l| base.k[(j, l)] + c[(0, l)]);
            same("shift of the keys", shifted.run(isa), &|i| {
                base.scale * scalar::dot(base.q.row(i), c.data()).to_f64()
            });

            let mut scaled = base.clone();
            scaled.q.data_mut().iter_mut().for_each(|x| *x *= T::from_f64(4.0));
            scaled.k.data_mut().iter_mut().for_each(|x| *x *= T::from_f64(0.25));
            same("scaling", scaled.run(isa), &|_| 0.0);

            let mut twice = base.clone();
            twice.k = Mat::from_fn(2 * n_k, d, |j, l| base.k[(j / 2, l)]);
            twice.v = Mat::from_fn(2 * n_k, d_v, |j, l| base.v[(j / 2, l)]);
            same("every key twice", twice.run(isa), &|_| 2f64.ln());

            let other = normal::<T>(98, n_k, d_v);
            let with = |f: &dyn Fn(usize, usize) -> T| {
                Case { v: Mat::from_fn(n_k, d_v, f), ..base.clone() }.run(isa).0
            };
            let o_other = with(&|j, c| other[(j, c)]);
            let o_sum = with(&|j, c| base.v[(j, c)] + other[(j, c)]);
            for (n, &x) in o_sum.data().iter().enumerate() {
                assert!(close(x, o.data()[n] + o_other.data()[n], 2.0 * tol), "{isa} linear in V");
            }
        }
    }
    check::<f32>();
    check::<f64>();
}

#[test]
fn outputs_stay_inside_the_values() {
    fn check<T: Real>() {
        let case = Case::<T>::new(8, 40, 100, 8, 12);
        for isa in Isa::available() {
            let (o, _) = case.run(isa);
            for c in 0..12 {
                let column = || (0..100).map(|j| case.v[(j, c)].to_f64());
                let (lo, hi) =
                    (column().fold(f64::INFINITY, f64::min), column().fold(f64::NEG_INFINITY, f64::max));
                let slack = 8.0 * T::ROUNDOFF * hi.max(-lo);
                assert!((0..40).all(|i| (lo - slack..=hi + slack).contains(&o[(i, c)].to_f64())));
            }
        }
    }
    check::<f32>();
    check::<f64>();
}

#[test]
fn the_bits_of_a_row_do_not_depend_on_the_other_rows() {
    fn check<T: Real>() {
        let bands = [Band::ALL, Band::causal(-20), Band { lower: Some(-50), upper: Some(9) }];
        for (isa, band) in Isa::available().into_iter().flat_map(|isa| bands.map(|b| (isa, b))) {
            for precision in [Precision::Full, Precision::Bf16] {
                let mut case = Case::<T>::new(9, 230, 290, 19, 37);
                case.band = band;
                case.precision = precision;
                let (o, lse) = case.run(isa);
                // From nine rows on, the tiled path runs whatever the band.
                for (start, end) in [(0, 9), (1, 230), (5, 16), (7, 31), (100, 225), (190, 230), (221, 230)] {
                    let (o2, lse2) = case.rows(start..end).run(isa);
                    assert_eq!(bits(&lse[start..end]), bits(&lse2), "{isa} {band:?} {start}..{end}");
                    assert_eq!(bits(&o.data()[start * 37..end * 37]), bits(o2.data()), "{isa} {band:?}");
                }
            }
        }
    }
    check::<f32>();
    check::<f64>();
}

#[test]
fn rows_of_a_small_group_do_not_depend_on_each_other() {
    fn check<T: Real>() {
        for isa in Isa::available() {
            let case = Case::<T>::new(10, 8, 700, 33, 40);
            let (o, lse) = case.run(isa);
            for (start, end) in [(0, 1), (1, 3), (2, 5), (3, 8), (7, 8)] {
                let (o2, lse2) = case.rows(start..end).run(isa);
                assert_eq!(bits(&lse[start..end]), bits(&lse2), "{isa} {start}..{end}");
                assert_eq!(bits(&o.data()[start * 40..end * 40]), bits(o2.data()), "{isa} {start}..{end}");
            }
        }
    }
    check::<f32>();
    check::<f64>();
}

#[test]
fn chosen_keys_are_attended_as_if_they_lay_together() {
    fn check<T: Real>() {
        for (isa, rows) in Isa::available().into_iter().flat_map(|isa| [1, 3, 8, 11].map(|r| (isa, r))) {
            for (count, with_bias) in [(0, false), (1, true), (15, false), (300, true), (300, false)] {
                // Keys and values are parts of the same wider rows.
                let (d, d_v, n_k) = (21, 35, 400);
                let wide = normal::<T>(15, n_k, d + d_v);
                let view = |from: usize, cols: usize| {
                    MatRef::with_stride(&wide.data()[from..], n_k, cols, d + d_v).unwrap()
                };
                let (k, v) = (view(0, d), view(d, d_v));
                let chosen: Vec<u32> = (0..count).map(|i| (i * 37 + 5) % 397).collect();
                let mut case = Case::<T>::new(16, rows, 0, d, d_v);
                let gather = |x: MatRef<'_, T>| {
                    Mat::from_fn(chosen.len(), x.cols(), |i, j| x.at(chosen[i] as usize, j))
                };
                (case.k, case.v) = (gather(k), gather(v));
                if with_bias {
                    let bias = normal::<T>(17, 1, chosen.len());
                    let hide = |(i, &b): (usize, &T)| if i % 7 == 3 { T::NEG_INFINITY } else { b };
                    case.bias = Some(bias.data().iter().enumerate().map(hide).collect());
                }
                let bias = case.bias.as_deref();
                let scale = T::from_f64(case.scale);
                let job = AttendChosen { q: case.q.as_ref(), k, v, chosen: &chosen, scale, bias, isa };
                let (mut o, mut lse) = (vec![T::NAN; rows * d_v], vec![T::NAN; rows]);
                job.run(&Scratch::poisoned(), &mut o, &mut lse);
                if isa != Isa::Scalar && rows <= 8 {
                    let (want, want_lse) = case.run(isa);
                    assert_eq!(bits(&o), bits(want.data()), "{isa} {rows} {count}");
                    assert_eq!(bits(&lse), bits(&want_lse), "{isa} {rows} {count}");
                    continue;
                }
                for (i, (o, lse)) in o.chunks_exact(d_v).zip(&lse).enumerate() {
                    let (want, want_lse, range, delta) = case.reference(i);
                    for c in 0..d_v {
                        let error = (o[c].to_f64() - want[c]).abs();
                        assert!(error <= range[c] * (delta + 32.0 * T::ROUNDOFF), "{isa} {rows} {count}");
                    }
                    let tol = delta + 16.0 * T::ROUNDOFF * (1.0 + want_lse.abs());
                    assert!(close(*lse, T::from_f64(want_lse), tol), "{isa} {rows} {count}");
                }
            }
        }
    }
    check::<f32>();
    check::<f64>();
}

#[test]
fn keys_without_columns_leave_the_logits_to_the_bias() {
    fn check<T: Real>() {
        for isa in Isa::available() {
            let mut case = Case::<T>::new(18, 2, 300, 0, 20);
            case.bias = Some(normal::<T>(19, 1, 300).into_vec());
            case.check("no columns");
            let (o, lse) = case.run(isa);
            assert!(o.data().iter().chain(&lse).all(|x| x.is_finite()), "{isa}");
        }
    }
    check::<f32>();
    check::<f64>();
}

#[test]
fn what_the_band_hides_cannot_change_a_bit() {
    fn check<T: Real>() {
        for (isa, rows) in Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 6), (isa, 90)]) {
            for precision in [Precision::Full, Precision::Bf16] {
                for band in [Band::causal(20), Band { lower: Some(-9), upper: Some(30) }] {
                    let mut case = Case::<T>::new(11, rows, 110, 21, 35);
                    case.band = band;
                    case.precision = precision;
                    let (o, lse) = case.run(isa);
                    for (j, bad) in
                        [(0, T::NAN), (21, T::INFINITY), (40, T::NAN), (95, T::NEG_INFINITY), (109, T::NAN)]
                    {
                        let mut changed = case.clone();
                        changed.k.row_mut(j).fill(bad);
                        changed.v.row_mut(j).fill(bad);
                        let (o2, lse2) = changed.run(isa);
                        for i in 0..rows {
                            if case.sees(i, j) {
                                assert!(o2.row(i).iter().all(|x| x.is_nan()), "{isa} row {i} sees key {j}");
                            } else {
                                assert_eq!(bits(o.row(i)), bits(o2.row(i)), "{isa} row {i} key {j}");
                                assert_eq!(lse[i].to_bits64(), lse2[i].to_bits64(), "{isa} row {i} key {j}");
                            }
                        }
                    }
                }
            }
        }
    }
    check::<f32>();
    check::<f64>();
}

#[test]
fn keys_hidden_by_their_bias_cannot_change_a_bit() {
    fn check<T: Real>() {
        for (isa, rows) in Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 5), (isa, 30)]) {
            for precision in [Precision::Full, Precision::Bf16] {
                let mut case = Case::<T>::new(12, rows, 100, 20, 20);
                case.precision = precision;
                let mut bias = vec![T::from_f64(0.5); 100];
                [0, 17, 50, 51, 99].iter().for_each(|&j| bias[j] = T::NEG_INFINITY);
                case.bias = Some(bias);
                let (o, lse) = case.run(isa);
                let mut changed = case.clone();
                for (j, bad) in
                    [(0, T::NAN), (17, T::INFINITY), (51, T::from_f64(1e30)), (99, T::NEG_INFINITY)]
                {
                    changed.k.row_mut(j).fill(bad);
                    changed.v.row_mut(j).fill(bad);
                }
                let (o2, lse2) = changed.run(isa);
                assert_eq!(bits(o.data()), bits(o2.data()), "{isa} {rows}");
                assert_eq!(bits(&lse), bits(&lse2), "{isa} {rows}");

                case.bias = Some(vec![T::NEG_INFINITY; 100]);
                let (o, lse) = case.run(isa);
                assert!(o.data().iter().all(|&o| o == T::ZERO) && lse.iter().all(|&l| l == T::NEG_INFINITY));
            }
        }
    }
    check::<f32>();
    check::<f64>();
}

#[test]
fn nan_reaches_the_rows_that_see_it() {
    fn check<T: Real>() {
        // Integer arithmetic on the exponent can lose a NaN with all payload bits set.
        let nan = bytemuck::cast_slice::<u64, T>(&[u64::MAX])[0];
        assert!(nan.is_nan());
        for (isa, rows) in Isa::available().into_iter().flat_map(|isa| [(isa, 2), (isa, 30)]) {
            let case = Case::<T>::new(13, rows, 70, 20, 20);
            let mut bad = case.clone();
            bad.q.row_mut(1)[3] = nan;
            let (o, lse) = bad.run(isa);
            assert!(o.row(1).iter().all(|x| x.is_nan()) && lse[1].is_nan(), "{isa} {rows}: query");
            assert!(o.row(0).iter().all(|x| x.is_finite()), "{isa} {rows}");
            let mut bad = case.clone();
            bad.k.row_mut(69)[19] = nan;
            let (o, lse) = bad.run(isa);
            assert!(o.data().iter().chain(&lse).all(|x| x.is_nan()), "{isa} {rows}: key");
            let mut bad = case.clone();
            bad.v.row_mut(42)[7] = nan;
            let (o, lse) = bad.run(isa);
            for i in 0..rows {
                assert!(
                    o[(i, 7)].is_nan() && o[(i, 6)].is_finite() && lse[i].is_finite(),
                    "{isa} {rows}: value"
                );
            }
        }
    }
    check::<f32>();
    check::<f64>();
}

#[test]
fn strided_inputs_give_the_bits_of_contiguous_ones() {
    fn check<T: Real>() {
        // No bias, one that hides no key and one that hides a few: each takes a different path through the kernel.
        let shift: Vec<T> = (0..90).map(|j| T::from_f64(f64::from(j % 7) * 0.3 - 1.0)).collect();
        let hiding: Vec<T> =
            shift.iter().enumerate().map(|(j, &b)| if j % 11 == 4 { T::NEG_INFINITY } else { b }).collect();
        let biases = [None, Some(&shift), Some(&hiding)];
        let jobs = biases.into_iter().flat_map(|bias| [(3, bias), (25, bias)]);
        for (isa, (rows, bias)) in
            Isa::available().into_iter().flat_map(|isa| jobs.clone().map(move |job| (isa, job)))
        {
            let case = Case::<T> { bias: bias.cloned(), ..Case::new(14, rows, 90, 18, 23) };
            let (o, lse) = case.run(isa);
            let widen = |a: &Mat<T>, by: usize| {
                Mat::from_fn(a.rows(), a.cols() + by, |i, j| if j < a.cols() { a[(i, j)] } else { T::NAN })
            };
            let (q, k, v) = (widen(&case.q, 3), widen(&case.k, 1), widen(&case.v, 30));
            let (mut o2, mut lse2) = (vec![T::NAN; o.data().len()], vec![T::NAN; rows]);
            let view = |a, n, c, s| MatRef::with_stride(a, n, c, s).unwrap();
            Attend {
                q: view(&q.data()[..q.data().len() - 3], rows, 18, 21),
                k: view(&k.data()[..k.data().len() - 1], 90, 18, 19),
                v: view(&v.data()[..v.data().len() - 30], 90, 23, 53),
                scale: T::from_f64(case.scale),
                bias: case.bias.as_deref(),
                band: Band::ALL,
                tile_k: 0,
                isa,
                precision: Precision::Full,
                decode: true,
                softcap: None,
            }
            .run(&Scratch::poisoned(), &mut o2, &mut lse2);
            assert_eq!(bits(o.data()), bits(&o2), "{isa}");
            assert_eq!(bits(&lse), bits(&lse2), "{isa}");
        }
    }
    check::<f32>();
    check::<f64>();
}

#[test]
fn rounded_products_stay_within_their_precision() {
    for isa in Isa::available() {
        for (rows, n_k, d, d_v) in [(40, 300, 64, 64), (4, 300, 64, 48), (33, 130, 17, 21)] {
            for causal in [false, true] {
                let mut case = Case::<f32>::new(15, rows, n_k, d, d_v);
                if causal {
                    case = case.causal();
                }
                case.precision = Precision::Bf16;
                let (o, lse) = case.run(isa);
                for i in 0..rows {
                    let (want, l, range, delta) = case.reference(i);
                    // Each logit moves by at most twice the rounding of its factors, weights and values by
                    // one rounding each.
                    let rounding = 2f64.powi(-8);
                    let logit = 2.0 * rounding * delta / ((d as f64 + 2.0) * f32::ROUNDOFF) + delta;
                    assert!((f64::from(lse[i]) - l).abs() <= logit + 1e-5, "{isa} {i}");
                    for c in 0..d_v {
                        let bound = range[c] * ((logit / 2.0).tanh() * 2.0 + 3.0 * rounding);
                        assert!((f64::from(o[(i, c)]) - want[c]).abs() <= bound, "{isa} ({i}, {c})");
                    }
                }
            }
        }
    }
}

#[test]
fn extra_memory_does_not_grow_with_the_keys() {
    for isa in Isa::available() {
        for (rows, n_k, d) in [(400, 300, 128), (20, 5000, 64), (4, 20_000, 8), (10, 600, 600)] {
            let case = Case::<f32>::new(16, rows, n_k, d, d);
            let scratch = Scratch::new();
            let (mut out, mut lse) = (vec![0.0; rows * d], vec![0.0; rows]);
            let job = Attend {
                q: case.q.as_ref(),
                k: case.k.as_ref(),
                v: case.v.as_ref(),
                scale: 0.1,
                bias: None,
                band: Band::ALL,
                tile_k: 0,
                isa,
                precision: Precision::Full,
                decode: true,
                softcap: None,
            };
            job.run(&scratch, &mut out, &mut lse);
            assert!(scratch.peak_bytes() <= 1 << 20, "{isa} {rows}×{n_k}: {} bytes", scratch.peak_bytes());
        }
    }
}

#[test]
fn merging_parts_reproduces_the_whole() {
    fn check<T: Real>() {
        let (rows, n_k) = (12, 60);
        let case = Case::<T>::new(17, rows, n_k, 16, 10);
        let (o, lse) = case.run(Isa::best());
        let part = |from: usize, to: usize| {
            let rows = |a: &Mat<T>| a.as_ref().sub_rows(from..to).to_mat();
            Case { k: rows(&case.k), v: rows(&case.v), ..case.clone() }.run(Isa::best())
        };
        let u = T::ROUNDOFF;
        for width in [1, 7, 30, 60] {
            let (mut o2, mut lse2) = (Mat::<T>::zeros(rows, 10), vec![T::NEG_INFINITY; rows]);
            let mut parts = 0.0;
            for from in (0..n_k).step_by(width) {
                let (op, lp) = part(from, (from + width).min(n_k));
                (0..rows).for_each(|i| merge_lse(o2.row_mut(i), &mut lse2[i], op.row(i), lp[i]));
                parts += 1.0;
            }
            for i in 0..rows {
                assert!(close(lse2[i], lse[i], (4.0 * parts + 64.0) * u * 8.0));
                assert!(o.row(i).iter().zip(o2.row(i)).all(|(&a, &b)| close(
                    a,
                    b,
                    (4.0 * parts + 64.0) * u * 8.0
                )));
            }
        }
    }
    check::<f32>();
    check::<f64>();
}

#[test]
fn merging_is_commutative_associative_and_has_an_identity() {
    fn check<T: Real>() {
        let x: Vec<T> = normal::<T>(20, 3, 9).into_vec();
        let (a, b, c) = (&x[..9], &x[9..18], &x[18..]);
        let (la, lb, lc) = (T::from_f64(0.3), T::from_f64(-1.2), T::from_f64(2.0));
        let merged = |o: &[T], l: T, o2: &[T], l2: T| {
            let (mut o, mut l) = (o.to_vec(), l);
            merge_lse(&mut o, &mut l, o2, l2);
            (o, l)
        };
        let near = |(x, lx): (Vec<T>, T), (y, ly): (Vec<T>, T)| {
            close(lx, ly, 4.0 * T::ROUNDOFF * 2.0)
                && x.iter().zip(&y).all(|(&x, &y)| close(x, y, 4.0 * T::ROUNDOFF * 4.0))
        };
        assert!(near(merged(a, la, b, lb), merged(b, lb, a, la)));
        let (ab, lab) = merged(a, la, b, lb);
        let (bc, lbc) = merged(b, lb, c, lc);
        assert!(near(merged(&ab, lab, c, lc), merged(a, la, &bc, lbc)));
        let (same, l) = merged(a, la, a, la);
        assert!(near((same, l), (a.to_vec(), la + T::from_f64(2f64.ln()))));
        let empty = vec![T::ZERO; 9];
        assert_eq!(merged(a, la, &empty, T::NEG_INFINITY), (a.to_vec(), la));
        assert_eq!(merged(&empty, T::NEG_INFINITY, a, la), (a.to_vec(), la));
        assert_eq!(
            merged(&empty, T::NEG_INFINITY, &empty, T::NEG_INFINITY),
            (empty.clone(), T::NEG_INFINITY)
        );
    }
    check::<f32>();
    check::<f64>();
}

#[test]
fn band_ranges_are_what_the_definition_says() {
    for (lower, upper) in
        [(None, None), (Some(-3), Some(2)), (Some(1), None), (None, Some(-4)), (Some(5), Some(4))]
    {
        let band = Band { lower, upper };
        for i in 0..12usize {
            let seen = |j: usize| {
                let gap = j as isize - i as isize;
                lower.is_none_or(|l| l <= gap) && upper.is_none_or(|u| gap <= u)
            };
            let range = band.range(i, 9);
            assert!((0..9).all(|j| range.contains(&j) == seen(j)), "{band:?} row {i}");
            assert!((0..9).all(|j| band.rows(j).contains(&i) == seen(j)), "{band:?} row {i}");
            if i >= 4 {
                assert_eq!(band.from_row(4).range(i - 4, 9), range);
            }
            let shifted = band.from_key(3).range(i, 6);
            assert!((3..9).all(|j| shifted.contains(&(j - 3)) == seen(j)));
        }
    }
}

#[test]
#[should_panic(expected = "the result does not fit")]
fn a_product_whose_rows_lie_beyond_memory_is_refused() {
    let a = Mat::<f64>::zeros(3, 1);
    let stride = usize::MAX / 2 + 1;
    gemm(Isa::best(), 1.0, Op::N(a.as_ref()), Op::T(a.as_ref()), 0.0, &mut [0.0; 9], stride, &Scratch::new());
}
