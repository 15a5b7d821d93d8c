//! Every instruction set against the scalar definition, and that against hand-computed blocks.

use super::*;
use crate::rng::StreamKey;

/// Returns random legal bytes whose scales are ordinary numbers.
pub(super) fn random_weights(format: Format, rows: usize, cols: usize, seed: u64) -> Vec<u8> {
    let mut rng = StreamKey::new(seed).named(format.name()).rng();
    let mut bytes: Vec<u8> =
        (0..format.bytes_of(rows * cols).unwrap()).map(|_| rng.next_u32() as u8).collect();
    let halves: &[usize] = match format {
        Format::F32 | Format::Q8K => &[],
        Format::F16 | Format::BF16 | Format::Q4_0 | Format::Q5_0 | Format::Q8_0 => &[0],
        Format::Iq4Nl | Format::Iq4Xs => &[0],
        Format::Mxfp4 => &[],
        Format::Q4_1 | Format::Q5_1 | Format::Q4K | Format::Q5K => &[0, 2],
        Format::Q2K => &[80, 82],
        Format::Q3K => &[108],
        Format::Q6K => &[208],
    };
    for block in bytes.chunks_exact_mut(format.block_bytes()) {
        if format == Format::Mxfp4 {
            block[0] = 120 + block[0] % 16;
        } else if halves.is_empty() {
            block[..4].copy_from_slice(&(rng.normal() as f32).to_le_bytes());
        }
        for &at in halves {
            let value = rng.normal() as f32;
            let bits = match format {
                Format::BF16 => half::bf16::from_f32(value).to_bits(),
                _ => half::f16::from_f32(value).to_bits(),
            };
            block[at..at + 2].copy_from_slice(&bits.to_le_bytes());
        }
    }
    bytes
}

pub(super) fn random_x(rows: usize, cols: usize, seed: u64) -> Vec<f32> {
    let mut x = vec![0.0; rows * cols];
    StreamKey::new(seed).named("x").rng().fill_normal(&mut x);
    x
}

/// Returns $X W^\top$ in f64, and for each element the sum of the magnitudes of its terms.
fn reference(x: &[f32], n: usize, w: WeightRef<'_>) -> Vec<(f64, f64)> {
    let mut out = vec![(0.0, 0.0); n * w.rows()];
    let mut row = vec![0.0; w.cols()];
    for r in 0..w.rows() {
        dequantise_into(Isa::Scalar, w.format(), w.row(r), &mut row);
        for i in 0..n {
            let terms =
                x[i * w.cols()..][..w.cols()].iter().zip(&row).map(|(a, b)| f64::from(*a) * f64::from(*b));
            out[i * w.rows() + r] = terms.fold((0.0, 0.0), |(s, m), t| (s + t, m + t.abs()));
        }
    }
    out
}

fn check_product(isa: Isa, format: Format, n: usize, rows: usize, cols: usize) {
    // One byte of offset: nothing may rely on alignment.
    let mut bytes = vec![0];
    bytes.extend(random_weights(format, rows, cols, 5));
    let w = WeightRef::new(&bytes[1..], format, rows, cols).unwrap();
    let x = random_x(n, cols, 9);
    let mut out = vec![f32::NAN; n * rows];
    let scratch = Scratch::poisoned();
    products(isa, MatRef::new(&x, n, cols), &mut [Job { weight: w, out: &mut out }], &scratch);
    let eps = f64::from(f32::EPSILON) / 2.0;
    for (i, (y, (want, size))) in out.iter().zip(reference(&x, n, w)).enumerate() {
        // Any order of `cols` additions and products, and one rounding of each weight.
        let tolerance = eps * (cols as f64 + 2.0) * size;
        assert!(
            (f64::from(*y) - want).abs() <= tolerance,
            "{isa:?} {format} {n}×{rows}×{cols} at {i}: {y} {want}"
        );
    }
}

#[test]
fn every_format_multiplies_on_every_instruction_set() {
    for &isa in Isa::available() {
        for format in Format::ALL {
            for n in [1, 2, 3, 4, 7, FUSED_ROWS, FUSED_ROWS + 1, 35] {
                check_product(isa, format, n, 67, 512);
            }
        }
    }
}

#[test]
fn depths_that_need_several_panels_add_up() {
    for &isa in Isa::available() {
        check_product(isa, Format::Q4K, 25, 35, 1792);
        check_product(isa, Format::Q4_1, 24, 33, 1568);
        check_product(isa, Format::Q4_1, 3, 33, 1568);
        check_product(isa, Format::F32, 34, 161, 1001);
        check_product(isa, Format::F16, 26, 3, 1024);
    }
}

#[test]
fn lengths_that_fill_no_register_are_exact_to_rounding() {
    for &isa in Isa::available() {
        for format in [Format::F32, Format::F16, Format::BF16] {
            for cols in 0..=67 {
                check_product(isa, format, 1 + cols % 4, 5, cols);
                check_product(isa, format, FUSED_ROWS + 1 + cols % 13, 1 + cols % 7, cols);
            }
        }
    }
}

/// Checks that a row of the product depends neither on other rows, few or many, nor on the number of threads.
pub(super) fn check_company_and_threads<I: Copy + Sync>(isa: I, products: Products<I>) {
    let (rows, cols) = (300, 320);
    for format in [Format::Q4_1, Format::Q8_0] {
        let bytes = random_weights(format, rows, cols, 1);
        let w = WeightRef::new(&bytes, format, rows, cols).unwrap();
        let x = random_x(50, cols, 2);
        let run = |n: usize, threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut out = vec![0.0; n * rows];
            let mut jobs = [Job { weight: w, out: &mut out }];
            let x = MatRef::new(&x[..n * cols], n, cols);
            pool.install(|| products(isa, x, &mut jobs, &Scratch::new()));
            out
        };
        for sizes in [[1, 4, 17], [21, 34, 50]] {
            let outs = sizes.map(|n| run(n, 1));
            assert_eq!(outs[0][..rows], outs[1][..rows]);
            assert_eq!(outs[1][..], outs[2][..outs[1].len()]);
            for (n, out) in sizes.iter().zip(&outs) {
                assert!(*out == run(*n, 3) && *out == run(*n, 7), "{n} rows");
            }
        }
    }
}

#[test]
fn a_row_depends_neither_on_its_company_nor_on_the_thread_count() {
    check_company_and_threads(Isa::best(), products);
}

#[test]
fn several_products_at_once_equal_single_ones() {
    let scratch = Scratch::new();
    let a = random_weights(Format::Q4_1, 190, 64, 1);
    let b = random_weights(Format::F16, 3, 64, 2);
    let c = random_weights(Format::Q8_0, 0, 64, 3);
    let a = WeightRef::new(&a, Format::Q4_1, 190, 64).unwrap();
    let b = WeightRef::new(&b, Format::F16, 3, 64).unwrap();
    let c = WeightRef::new(&c, Format::Q8_0, 0, 64).unwrap();
    for n in [1, 3, 30] {
        let data = random_x(n, 80, 3);
        let x = MatRef::with_stride(&data, n, 64, 80).unwrap();
        let (mut ya, mut yb) = (vec![0.0; n * 190], vec![0.0; n * 3]);
        let mut jobs = [
            Job { weight: a, out: &mut ya },
            Job { weight: c, out: &mut [] },
            Job { weight: b, out: &mut yb },
        ];
        products(Isa::best(), x, &mut jobs, &scratch);
        let (mut za, mut zb) = (vec![0.0; n * 190], vec![0.0; n * 3]);
        product(x, a, &mut za, &scratch);
        product(x, b, &mut zb, &scratch);
        assert_eq!((ya, yb), (za, zb));
    }
}

#[test]
fn dequantised_values_have_the_same_bits_on_every_instruction_set() {
    // All byte values are legal, including scales that are infinite or NaN.
    for format in Format::ALL {
        let mut rng = StreamKey::new(11).named(format.name()).rng();
        let len = format.block_len() * 9;
        let bytes: Vec<u8> = (0..format.bytes_of(len).unwrap()).map(|_| rng.next_u32() as u8).collect();
        let run = |isa| {
            let mut y = vec![0.0f32; len];
            dequantise_into(isa, format, &bytes, &mut y);
            y.iter().map(|v| if v.is_nan() { u32::MAX } else { v.to_bits() }).collect::<Vec<_>>()
        };
        for &isa in Isa::available() {
            assert_eq!(run(Isa::Scalar), run(isa), "{isa:?} {format}");
        }
    }
}

/// A product kernel on one instruction set.
pub(super) type Products<I> = fn(I, MatRef<'_, f32>, &mut [Job<'_>], &Scratch);

/// Checks that infinite weights and a NaN in x affect only their own rows and columns of the product.
pub(super) fn check_infinities<I: Copy + std::fmt::Debug>(isas: &[I], products: Products<I>) {
    let scratch = Scratch::new();
    let (rows, cols) = (6, 64);
    for &isa in isas {
        for n in [2, 30] {
            let mut bytes = random_weights(Format::Q4_1, rows, cols, 4);
            bytes[40..42].copy_from_slice(&half::f16::INFINITY.to_bits().to_le_bytes());
            let w = WeightRef::new(&bytes, Format::Q4_1, rows, cols).unwrap();
            let mut x = random_x(n, cols, 4);
            x[3] = f32::NAN;
            let mut out = vec![0.0; n * rows];
            products(isa, MatRef::new(&x, n, cols), &mut [Job { weight: w, out: &mut out }], &scratch);
            for (i, y) in out.iter().enumerate() {
                let special = i / rows == 0 || i % rows == 1;
                assert_eq!(y.is_finite(), !special, "{isa:?} at {i}");
            }
        }
    }
}

#[test]
fn infinities_and_nans_stay_in_their_rows() {
    check_infinities(Isa::available(), products);
}

#[test]
fn halves_convert_as_the_standard_says() {
    for bits in 0..=u16::MAX {
        let (ours, theirs) = (scalar::half_to_f32(bits), half::f16::from_bits(bits).to_f32_const());
        assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "{bits:#x}");
    }
}

#[test]
fn the_first_block_of_a_published_model_reads_as_published() {
    // `blk.0.attn_q.weight` of SmolLM2-135M-Instruct, Q4_1.
    let bytes = [
        0x0f, 0x30, 0xd8, 0xb9, 0x45, 0x87, 0x65, 0x40, 0x6f, 0x65, 0x16, 0x4b, 0x67, 0x76, 0x64, 0x50, 0x22,
        0x67, 0x65, 0x5a,
    ];
    let mut y = [0.0; 32];
    dequantise_into(Isa::best(), Format::Q4_1, &bytes, &mut y);
    let want =
        [-0.09631348, 0.15734863, -0.09631348, -0.730_468_75, 1.1719971, -0.09631348, 0.03051758, 0.66467285];
    assert!(y.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-7), "{y:?}");
}

#[test]
fn views_that_do_not_fit_are_refused() {
    assert!(WeightRef::new(&[0; 20], Format::Q4_1, 1, 31).is_none());
    assert!(WeightRef::new(&[0; 20], Format::Q4_1, 2, 32).is_none());
    assert!(WeightRef::new(&[0; 20], Format::F32, usize::MAX, usize::MAX).is_none());
    assert!(WeightRef::new(&[], Format::Q6K, 0, 256).is_some());
}

#[test]
fn products_in_bf16_are_those_of_rounded_operands() {
    let eps = f64::from(f32::EPSILON) / 2.0;
    for &isa in Isa::available() {
        for format in Format::ALL {
            for (n, rows, cols) in [(1, 5, 512), (3, 33, 256), (21, 67, 1024), (35, 9, 256)] {
                check_bf16(isa, format, n, rows, cols, eps);
            }
        }
        for format in [Format::F32, Format::F16, Format::BF16] {
            for cols in [1, 15, 33, 67, 801] {
                check_bf16(isa, format, 1 + cols % 4, 5, cols, eps);
                check_bf16(isa, format, 22 + cols % 13, 1 + cols % 7, cols, eps);
            }
        }
    }
}

fn check_bf16(isa: Isa, format: Format, n: usize, rows: usize, cols: usize, eps: f64) {
    let bytes = random_weights(format, rows, cols, 5);
    let w = WeightRef::new(&bytes, format, rows, cols).unwrap();
    let x = random_x(n, cols, 9);
    let mut out = vec![f32::NAN; n * rows];
    let jobs = &mut [Job { weight: w, out: &mut out }];
    half_width::products(isa, MatRef::new(&x, n, cols), jobs, &Scratch::poisoned());
    let round = |x: f32| f64::from(half::bf16::from_f32(x).to_f32());
    let mut values = vec![0.0; cols];
    for r in 0..rows {
        dequantise_into(Isa::Scalar, format, w.row(r), &mut values);
        for i in 0..n {
            let terms = x[i * cols..][..cols].iter().zip(&values).map(|(x, w)| round(*x) * round(*w));
            let (want, size) = terms.fold((0.0, 0.0), |(s, m), t| (s + t, m + t.abs()));
            let got = f64::from(out[i * rows + r]);
            assert!(
                (got - want).abs() <= eps * (cols as f64 + 2.0) * size,
                "{isa:?} {format} {n}×{rows}×{cols}: {got} {want}"
            );
        }
    }
}

#[test]
fn numbers_of_eight_bits_are_the_nearest() {
    for bits in (0..=u32::MAX).step_by(65_521) {
        let x = f32::from_bits(bits);
        let (ours, theirs) = (half_width::rounded(x), half::bf16::from_f32(x).to_f32());
        assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "{bits:#x}");
    }
    assert_eq!("int8".parse(), Ok(Compute::Int8));
    assert!("int4".parse::<Compute>().unwrap_err().to_string().contains("bf16"));
}
