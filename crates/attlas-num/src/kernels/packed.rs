//! Keys and values of a cache in packed form, and attention that reads them where they lie.

use super::quant::{self, Format};
use super::{Attend, Band, Isa, Precision, dispatch, scalar};
use crate::mat::MatRef;
use crate::scratch::Scratch;

/// Storage of a packed row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowFormat {
    /// bfloat16.
    Bf16,
    /// 8-bit integers: each block of 32, or what is left of a row, behind its scale in single precision.
    Q8,
}

impl RowFormat {
    /// Returns the bytes of a row.
    pub fn row_bytes(self, cols: usize) -> usize {
        match self {
            Self::Bf16 => 2 * cols,
            Self::Q8 => cols + 4 * cols.div_ceil(32),
        }
    }

    /// Packs rows, one behind the other. Panics if `out` has another length than they take.
    pub fn pack_into(self, rows: MatRef<'_, f32>, out: &mut [u8]) {
        match self {
            Self::Bf16 => quant::pack_halves(quant::Isa::best(), rows, out),
            Self::Q8 => quant::pack_scaled_rows(quant::Isa::best(), rows, out),
        }
    }
}

/// Packed rows, one behind the other.
#[derive(Clone, Copy, Debug)]
pub struct PackedRows<'a> {
    bytes: &'a [u8],
    format: RowFormat,
    cols: usize,
}

impl<'a> PackedRows<'a> {
    /// Views bytes as rows of `cols` numbers. Panics if there are no columns or the bytes are not whole rows.
    pub fn new(bytes: &'a [u8], format: RowFormat, cols: usize) -> Self {
        assert!(cols > 0 && bytes.len().is_multiple_of(format.row_bytes(cols)), "whole rows");
        Self { bytes, format, cols }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.bytes.len() / self.format.row_bytes(self.cols)
    }

    /// Numbers in a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Storage of a row.
    pub fn format(&self) -> RowFormat {
        self.format
    }

    #[inline(always)]
    pub(super) fn row(&self, i: usize) -> &'a [u8] {
        let bytes = self.format.row_bytes(self.cols);
        &self.bytes[i * bytes..][..bytes]
    }

    /// Unpacks all rows. Panics if `out` has another length.
    pub fn unpack_into(&self, out: &mut [f32]) {
        assert_eq!(out.len(), self.rows() * self.cols);
        match self.format {
            RowFormat::Bf16 => quant::dequantise_into(quant::Isa::best(), Format::BF16, self.bytes, out),
            RowFormat::Q8 => quant::unpack_scaled_rows(quant::Isa::best(), self.cols, self.bytes, out),
        }
    }
}

/// Exact attention of a few rows that see every key of a packed cache, as in decoding.
///
/// Keys and values are read once, in place, and unpacked in registers. The arithmetic is that of [`Attend`] with
/// `decode` on the unpacked numbers, bit for bit.
#[derive(Clone, Copy, Debug)]
pub struct AttendPacked<'a> {
    /// Queries, one per row; columns `d`.
    pub q: MatRef<'a, f32>,
    /// Keys, `n_k × d`.
    pub k: PackedRows<'a>,
    /// Values, `n_k × d_v`.
    pub v: PackedRows<'a>,
    /// Factor of the dot products.
    pub scale: f32,
    /// Caps the products smoothly: $c \tanh(s / c)$ for $c$ positive.
    pub softcap: Option<f32>,
    /// Instruction set; [`Isa::Scalar`] replaces one that the machine lacks.
    pub isa: Isa,
}

impl AttendPacked<'_> {
    /// Computes `out` (`rows × d_v`, contiguous) and `lse` (`rows`, natural logarithm), on this thread.
    ///
    /// # Panics
    ///
    /// If the shapes or formats do not fit together.
    pub fn run(&self, scratch: &Scratch, out: &mut [f32], lse: &mut [f32]) {
        assert_eq!(self.q.cols(), self.k.cols(), "queries and keys of different width");
        assert!(self.v.rows() == self.k.rows() && self.v.format == self.k.format, "as many values as keys");
        assert_eq!(out.len(), self.q.rows() * self.v.cols(), "one output row per query");
        assert_eq!(lse.len(), self.q.rows(), "one log-sum-exp per query");
        dispatch::attend_packed_on(self, scratch, out, lse);
    }

    /// Unpacks all keys and values, and attends by the scalar definition.
    pub(super) fn run_scalar(&self, scratch: &Scratch, out: &mut [f32], lse: &mut [f32]) {
        let mut k = scratch.take(self.k.rows() * self.k.cols());
        let mut v = scratch.take(self.v.rows() * self.v.cols());
        self.k.unpack_into(&mut k);
        self.v.unpack_into(&mut v);
        let job = Attend {
            q: self.q,
            k: MatRef::new(&k, self.k.rows(), self.k.cols()),
            v: MatRef::new(&v, self.v.rows(), self.v.cols()),
            scale: self.scale,
            softcap: self.softcap,
            bias: None,
            band: Band::ALL,
            tile_k: 0,
            isa: Isa::Scalar,
            precision: Precision::Full,
            decode: true,
        };
        scalar::attend(&job, scratch, out, lse);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Packs rows of numbers between −2 and 2, a few of them zero.
    fn pack(format: RowFormat, rows: usize, cols: usize, seed: usize) -> Vec<u8> {
        let number = |i: usize| ((i * 7919 + seed * 104_729) % 257) as f32 / 64.0 - 2.0;
        let mut bytes = Vec::new();
        for row in 0..rows {
            let row: Vec<f32> = (0..cols).map(|j| number(row * cols + j)).collect();
            match format {
                RowFormat::Bf16 => row.iter().for_each(|x| bytes.extend(&x.to_le_bytes()[2..])),
                RowFormat::Q8 => row.chunks(32).enumerate().for_each(|(b, block)| {
                    bytes.extend((0.01 + b as f32 / 500.0).to_le_bytes());
                    bytes.extend(block.iter().map(|x| (x * 60.0) as i8 as u8));
                }),
            }
        }
        bytes
    }

    #[test]
    fn rows_are_packed_alike_on_every_instruction_set() {
        let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 1e-42, f32::MAX, f32::MIN_POSITIVE];
        for cols in [1, 31, 32, 64, 100] {
            // Rows of one head among three.
            let number = |i: usize| match i % 211 {
                i if i < special.len() => special[i],
                _ => ((i * 7919 % 4001) as f32 - 2000.0) / 300.0,
            };
            let x: Vec<f32> = (0..3 * cols * 9).map(number).collect();
            let rows = MatRef::with_stride(&x[cols..], 9, cols, 3 * cols).unwrap();
            let packed = |format: RowFormat, isa: quant::Isa| {
                let mut out = vec![0x55; 9 * format.row_bytes(cols)];
                match format {
                    RowFormat::Bf16 => quant::pack_halves(isa, rows, &mut out),
                    RowFormat::Q8 => quant::pack_scaled_rows(isa, rows, &mut out),
                }
                out
            };
            for &isa in quant::Isa::available() {
                let halves = packed(RowFormat::Bf16, isa);
                let want = rows.iter_rows().flatten().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes());
                assert!(want.eq(halves), "{isa:?} {cols}");
                // NaN in a scale has no fixed bits; its numbers are those of the other instruction sets.
                let (ours, scalar) = (packed(RowFormat::Q8, isa), packed(RowFormat::Q8, quant::Isa::Scalar));
                let mut numbers = [vec![0.0f32; 9 * cols], vec![0.0; 9 * cols]];
                for (out, bytes) in numbers.iter_mut().zip([&ours, &scalar]) {
                    PackedRows::new(bytes, RowFormat::Q8, cols).unpack_into(out);
                }
                let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                assert!(numbers[0].iter().zip(&numbers[1]).all(same), "{isa:?} {cols}");
                for (row, got) in rows.iter_rows().zip(numbers[0].chunks_exact(cols)) {
                    for (block, got) in row.chunks(32).zip(got.chunks(32)) {
                        let most = block.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                        let near = |(x, y): (&f32, &f32)| (x - y).abs() <= most / 254.0 * 1.001;
                        let finite = block.iter().all(|x| x.is_finite());
                        let fits = if finite {
                            block.iter().zip(got).all(near)
                        } else {
                            got.iter().all(|y| y.is_nan())
                        };
                        assert!(fits || most < 1e-30, "{isa:?} {cols}: {block:?} {got:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn packed_rows_attend_as_their_numbers_do_bit_for_bit() {
        for format in [RowFormat::Bf16, RowFormat::Q8] {
            for (rows, n, d, d_v) in [(1, 1, 1, 3), (3, 300, 64, 64), (2, 17, 37, 100), (9, 261, 33, 8)] {
                let (k, v) = (pack(format, n, d, 1), pack(format, n, d_v, 2));
                let (k, v) = (PackedRows::new(&k, format, d), PackedRows::new(&v, format, d_v));
                let q: Vec<f32> = (0..rows * d).map(|i| (i * 31 % 19) as f32 / 9.0 - 1.0).collect();
                let (mut keys, mut values) = (vec![f32::NAN; n * d], vec![f32::NAN; n * d_v]);
                k.unpack_into(&mut keys);
                v.unpack_into(&mut values);
                assert!(
                    keys.iter().chain(&values).all(|x| x.is_finite()) && (n == 1 || values[5] != values[6])
                );
                for isa in [Isa::Scalar, Isa::best()] {
                    let scratch = Scratch::poisoned();
                    for softcap in [None, Some(3.0)] {
                        let (mut out, mut lse) = (vec![f32::NAN; rows * d_v], vec![f32::NAN; rows]);
                        let q = MatRef::new(&q, rows, d);
                        AttendPacked { q, k, v, scale: 0.3, softcap, isa }.run(&scratch, &mut out, &mut lse);
                        for first in (0..rows).step_by(8) {
                            let some = first..(first + 8).min(rows);
                            let job = Attend {
                                q: q.sub_rows(some.clone()),
                                k: MatRef::new(&keys, n, d),
                                v: MatRef::new(&values, n, d_v),
                                scale: 0.3,
                                softcap,
                                bias: None,
                                band: Band::ALL,
                                tile_k: 0,
                                isa,
                                precision: Precision::Full,
                                decode: true,
                            };
                            let (mut o, mut l) =
                                (vec![f32::NAN; some.len() * d_v], vec![f32::NAN; some.len()]);
                            job.run(&scratch, &mut o, &mut l);
                            assert_eq!(
                                out[some.start * d_v..some.end * d_v],
                                o,
                                "{format:?} {isa:?} {n}×{d}"
                            );
                            assert_eq!(lse[some], l);
                        }
                    }
                }
            }
        }
    }
}
