//! Every instruction set against sums of integers, and the product against the unrounded one within its rounding.

use super::super::tests::{check_company_and_threads, check_infinities, random_weights, random_x};
use super::*;

const NARROW: [Format; 14] = [
    Format::Q4_0,
    Format::Q4_1,
    Format::Q5_0,
    Format::Q5_1,
    Format::Q8_0,
    Format::Q2K,
    Format::Q3K,
    Format::Q4K,
    Format::Q5K,
    Format::Q6K,
    Format::Q8K,
    Format::Iq4Nl,
    Format::Iq4Xs,
    Format::Mxfp4,
];

/// Returns the rounded row and its rounded errors as integers and scales.
fn rounded(x: &[f32]) -> [(Vec<i64>, Vec<f64>); 2] {
    let scratch = Scratch::poisoned();
    let rounded = Rounded::new(Isa::Scalar, MatRef::new(x, 1, x.len()), &scratch);
    [rounded.row(0), rounded.errors(0)].map(|row| {
        let blocks = x.len() / BLOCK;
        let numbers: &[i8] = bytemuck::cast_slice(&row[..blocks * at::SCALE]);
        let scales = &row[blocks * at::SCALE..blocks * at::MINUS];
        (
            numbers.iter().map(|a| i64::from(*a)).collect(),
            scales.iter().map(|s| f64::from(f32::from_bits(*s))).collect(),
        )
    })
}

/// Returns for each element: the sum over groups of scaled integer sums, in f64; the sum of the magnitudes of its
/// parts; the product with unrounded x; and the largest change that rounding x can make.
fn reference(x: &[f32], n: usize, w: WeightRef<'_>) -> Vec<[f64; 4]> {
    let (cols, f) = (w.cols(), form(w.format()).unwrap());
    let (mut u, mut d, mut m) = (vec![0; cols], vec![0.0; cols / f.group], vec![0.0; cols / f.group]);
    let mut values = vec![0.0; cols];
    let mut out = vec![[0.0; 4]; n * w.rows()];
    for r in 0..w.rows() {
        scalar::unpack(w.format(), w.row(r), &mut u, &mut d, &mut m);
        super::super::dequantise_into(super::super::Isa::Scalar, w.format(), w.row(r), &mut values);
        for i in 0..n {
            let x = &x[i * cols..][..cols];
            let rows = rounded(x);
            let out = &mut out[i * w.rows() + r];
            for g in 0..cols / f.group {
                let range = g * f.group..(g + 1) * f.group;
                let zero = f.zero.map_or(0, |z| 1i64 << z);
                for (a, s) in &rows {
                    let products: i64 = range.clone().map(|j| (i64::from(u[j]) - zero) * a[j]).sum();
                    let total: i64 = a[range.clone()].iter().sum();
                    let s = s[range.start / BLOCK];
                    let parts = [
                        s * f64::from(d[g]) * products as f64,
                        if f.zero.is_none() { s * f64::from(m[g]) * total as f64 } else { 0.0 },
                    ];
                    out[0] += parts[0] + parts[1];
                    out[1] += parts[0].abs() + parts[1].abs();
                }
                // The last rounding that touched the block.
                let s = rows.iter().map(|(_, s)| s[range.start / BLOCK]).rfind(|s| *s > 0.0).unwrap_or(0.0);
                out[3] += range.map(|j| 0.5 * s * f64::from(values[j].abs())).sum::<f64>();
            }
            out[2] = x.iter().zip(&values).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
        }
    }
    out
}

fn check(isa: Isa, format: Format, n: usize, rows: usize, cols: usize) {
    // One byte of offset: nothing may rely on alignment.
    let mut bytes = vec![0];
    bytes.extend(random_weights(format, rows, cols, 5));
    let w = WeightRef::new(&bytes[1..], format, rows, cols).unwrap();
    let x = random_x(n, cols, 9);
    let mut out = vec![f32::NAN; n * rows];
    let scratch = Scratch::poisoned();
    products(isa, MatRef::new(&x, n, cols), &mut [Job { weight: w, out: &mut out }], &scratch);
    let eps = f64::from(f32::EPSILON) / 2.0;
    for (i, (y, [sum, size, unrounded, moved])) in out.iter().zip(reference(&x, n, w)).enumerate() {
        let y = f64::from(*y);
        // Sums inside a group are exact: three roundings of its parts, and any order of additions.
        let tolerance = eps * (cols as f64 / 8.0 + 4.0) * size;
        assert!((y - sum).abs() <= tolerance, "{isa:?} {format} {n}×{rows}×{cols} at {i}: {y} {sum}");
        // The whole differs from the unrounded product by at most the effect of rounding x.
        let most = moved * (1.0 + 1e-5) + tolerance;
        assert!((y - unrounded).abs() <= most, "{isa:?} {format} {n}×{rows}×{cols} at {i}: {y} {unrounded}");
    }
}

#[test]
fn every_format_multiplies_on_every_instruction_set() {
    assert_eq!(NARROW.len(), Format::ALL.iter().filter(|f| is_narrow(**f)).count());
    for &isa in Isa::available() {
        for format in NARROW {
            for n in [1, 2, 3, 4, 7, FUSED_ROWS, FUSED_ROWS + 1, 35] {
                check(isa, format, n, 67, 512);
            }
        }
    }
}

#[test]
fn depths_that_need_several_panels_and_odd_sizes_add_up() {
    for &isa in Isa::available() {
        check(isa, Format::Q4K, 25, 35, 1792);
        check(isa, Format::Q4_1, 24, 33, 1568);
        check(isa, Format::Q4_1, 3, 33, 1568);
        check(isa, Format::Q8_0, 22, 1, 32);
        check(isa, Format::Q8_0, 1, 1, 32);
        check(isa, Format::Q6K, 41, 9, 1024);
        check(isa, Format::Q5_0, 30, 161, 96);
    }
}

#[test]
fn a_row_alone_and_in_a_prompt_are_the_same_whole_numbers() {
    let cols = 1536;
    let x = random_x(FUSED_ROWS + 5, cols, 3);
    for format in NARROW {
        let bytes = random_weights(format, 40, cols, 8);
        let w = WeightRef::new(&bytes, format, 40, cols).unwrap();
        let run = |n: usize| {
            let mut out = vec![f32::NAN; n * 40];
            let jobs = &mut [Job { weight: w, out: &mut out }];
            products(Isa::best(), MatRef::new(&x[..n * cols], n, cols), jobs, &Scratch::poisoned());
            out
        };
        let sizes = reference(&x[..cols], 1, w);
        for ((alone, among), [_, size, ..]) in run(1).iter().zip(&run(FUSED_ROWS + 5)).zip(sizes) {
            // Only the order of groups differs; one number of x rounded differently would move the result by some 1e-5
            // of the size.
            let gap = f64::from((alone - among).abs());
            assert!(gap <= f64::from(f32::EPSILON) * size * 4.0, "{format}: {alone} {among}");
        }
    }
}

#[test]
fn whole_numbers_and_scales_make_the_stored_values() {
    for format in NARROW {
        let f = form(format).unwrap();
        let bytes = random_weights(format, 3, 512, 2);
        let (mut u, mut values) = (vec![0; 3 * 512], vec![0.0; 3 * 512]);
        let (mut d, mut m) = (vec![0.0; 3 * 512 / f.group], vec![0.0; 3 * 512 / f.group]);
        scalar::unpack(format, &bytes, &mut u, &mut d, &mut m);
        super::super::dequantise_into(super::super::Isa::Scalar, format, &bytes, &mut values);
        for (i, v) in values.iter().enumerate() {
            let zero = f.zero.map_or(0, |z| 1 << z);
            let part = d[i / f.group] * (i32::from(u[i]) - zero) as f32;
            let min = if f.zero.is_none() { m[i / f.group] } else { 0.0 };
            let size = part.abs() + min.abs();
            assert!((part + min - v).abs() <= 2.0 * f32::EPSILON * size, "{format} at {i}: {part} {min} {v}");
        }
    }
}

#[test]
fn rounding_keeps_extremes_and_says_what_is_not_finite() {
    let mut x = vec![0.0f32; 4 * BLOCK];
    x[3] = -2.0;
    x[5] = 1.0;
    x[BLOCK] = f32::INFINITY;
    x[2 * BLOCK] = 1e-42;
    x[3 * BLOCK] = f32::MAX;
    for &isa in Isa::available() {
        let scratch = Scratch::poisoned();
        let rounded = Rounded::new(isa, MatRef::new(&x, 1, x.len()), &scratch);
        let row = rounded.row(0);
        let numbers: &[i8] = bytemuck::cast_slice(&row[..4 * at::SCALE]);
        assert_eq!((numbers[3], numbers[5], numbers[0]), (-127, 64, 0), "63.5 rounds to the even neighbour");
        let scale = |b: usize| f32::from_bits(row[4 * at::SCALE + b]);
        assert_eq!(scale(0), 2.0 / 127.0);
        assert!(scale(1).is_nan() && numbers[BLOCK] == 0);
        assert_eq!((scale(2), numbers[2 * BLOCK]), (0.0, 0));
        assert_eq!((scale(3), numbers[3 * BLOCK]), (f32::MAX / 127.0, 127));
        assert_eq!(row[4 * at::MINUS] as i32, 63);
        assert_eq!(row[4 * at::MINUS_HALVES] as i32, 63);
        assert_eq!((row[4 * at::LANES] as i32, row[4 * at::LANES + 1] as i32), (127, -64));
    }
}

#[test]
fn blocks_with_outliers_are_rounded_twice() {
    let mut x = random_x(1, 8 * BLOCK, 6);
    x[3 * BLOCK + 7] = 40.0;
    let scratch = Scratch::poisoned();
    for &isa in Isa::available() {
        let rounded = Rounded::new(isa, MatRef::new(&x, 1, x.len()), &scratch);
        let scales =
            |row: &[u32]| row[8 * at::SCALE..8 * at::MINUS].iter().map(|s| f32::from_bits(*s)).collect();
        let (once, twice): (Vec<f32>, Vec<f32>) = (scales(rounded.row(0)), scales(rounded.errors(0)));
        for (b, (once, twice)) in once.iter().zip(&twice).enumerate() {
            match b {
                3 => assert!(*twice > 0.0 && *twice <= 0.51 / 127.0 * once, "{isa:?}: {once} {twice}"),
                _ => assert_eq!(*twice, 0.0, "{isa:?}: block {b}"),
            }
        }
    }
}

#[test]
fn infinities_and_nans_stay_in_their_rows() {
    check_infinities(Isa::available(), products);
}

#[test]
fn a_row_depends_neither_on_its_company_nor_on_the_thread_count() {
    check_company_and_threads(Isa::best(), products);
}

#[test]
fn formats_without_whole_numbers_go_through_f32_beside_the_others() {
    use super::super::{Compute, product, products_in};
    let scratch = Scratch::new();
    let (a, b) = (random_weights(Format::F16, 20, 64, 1), random_weights(Format::Q8_0, 30, 64, 2));
    let a = WeightRef::new(&a, Format::F16, 20, 64).unwrap();
    let b = WeightRef::new(&b, Format::Q8_0, 30, 64).unwrap();
    for n in [2, 30] {
        let x = random_x(n, 64, 3);
        let x = MatRef::new(&x, n, 64);
        let (mut ya, mut yb) = (vec![0.0; n * 20], vec![0.0; n * 30]);
        let mut jobs = [Job { weight: a, out: &mut ya }, Job { weight: b, out: &mut yb }];
        products_in(Compute::Int8, x, &mut jobs, &scratch);
        let (mut za, mut zb) = (vec![0.0; n * 20], vec![0.0; n * 30]);
        product(x, a, &mut za, &scratch);
        products(Isa::best(), x, &mut [Job { weight: b, out: &mut zb }], &scratch);
        assert_eq!((ya, yb), (za, zb));
        assert_eq!(Compute::Int8.of(Format::F16), Compute::F32);
    }
}

#[test]
fn sums_on_registers_alone_are_counted() {
    for &isa in Isa::available() {
        let (operations, _) = burn(isa, 10);
        assert!(operations >= 160, "{isa:?}");
    }
}
