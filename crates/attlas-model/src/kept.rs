//! Keys and values that a layer stores between calls, in single precision or packed.
//!
//! A single token attends to packed rows where they lie. For prompts, and for methods other than exact attention, packed rows are unpacked
//! for the attending layer, into storage that all layers share: memory then has the packed rows of every layer and the
//! numbers of one. New rows are packed before they are attended to: the keys of a token do not depend on when it was
//! read.

use crate::error::{Error, Result};
use attlas::cache::KvCache;
use attlas::{MatRef, Schedule, TensorRef};
use attlas_num::Scratch;
use attlas_num::kernels::{AttendPacked, PackedRows, RowFormat, merge_lse};
use attlas_num::par::*;
use std::ops::Range;

/// Storage format of cached keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheFormat {
    /// Single precision.
    #[default]
    F32,
    /// Eight significant bits.
    Bf16,
    /// 8-bit integers, with one scale per 32 numbers of a row.
    Q8,
}

impl CacheFormat {
    /// Every format.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::Q8];

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Q8 => "q8",
        }
    }

    /// Returns the packed form; none for single precision.
    fn packed(self) -> Option<RowFormat> {
        match self {
            Self::F32 => None,
            Self::Bf16 => Some(RowFormat::Bf16),
            Self::Q8 => Some(RowFormat::Q8),
        }
    }
}

fn pack(format: RowFormat, row: &[f32], out: &mut Vec<u8>) {
    let at = out.len();
    out.resize(at + format.row_bytes(row.len()), 0);
    let out = &mut out[at..];
    match format {
        RowFormat::Bf16 => {
            let halves = out.as_chunks_mut::<2>().0.iter_mut();
            halves.zip(row).for_each(|(out, &x)| *out = half::bf16::from_f32(x).to_le_bytes());
        }
        RowFormat::Q8 => {
            for (block, out) in row.chunks(BLOCK).zip(out.chunks_mut(BLOCK + 4)) {
                // Magnitudes in the order of their bits, which puts NaN and infinity last.
                let most = block.iter().fold(0, |most: u32, x| most.max(x.to_bits() & 0x7fff_ffff));
                let most = f32::from_bits(most);
                // A block with NaN or infinity becomes NaN.
                let scale = if most.is_finite() { most / 127.0 } else { f32::NAN };
                let factor = if scale > 0.0 { 1.0 / scale } else { 0.0 };
                let (head, numbers) = out.split_at_mut(4);
                head.copy_from_slice(&scale.to_le_bytes());
                // Added to 1.5 · 2^23, a number is rounded to an integer, ties to even, in the low bits of the sum.
                const SHIFT: f32 = 12_582_912.0;
                numbers.iter_mut().zip(block).for_each(|(n, &x)| *n = (x * factor + SHIFT).to_bits() as u8);
            }
        }
    }
}

impl std::str::FromStr for CacheFormat {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|f| f.name() == text);
        found.ok_or_else(|| Error::invalid("the cache", text, Self::ALL.map(Self::name).join(", ")))
    }
}

/// Numbers with one scale.
const BLOCK: usize = 32;

/// Keys of a piece, which one task attends to.
const PIECE: usize = 512;

/// Packed rows of keys and values, for each head token after token.
#[derive(Clone, Debug)]
pub(crate) struct Packed {
    format: RowFormat,
    width: usize,
    len: usize,
    heads: Vec<Rows>,
}

/// Rows of a head.
#[derive(Clone, Debug, Default)]
struct Rows {
    k: Vec<u8>,
    v: Vec<u8>,
}

impl Packed {
    /// Creates an empty store; none for single precision.
    pub(crate) fn new(format: CacheFormat, heads: usize, width: usize) -> Option<Self> {
        let format = format.packed()?;
        Some(Self { format, width, len: 0, heads: vec![Rows::default(); heads] })
    }

    /// Returns the number of tokens.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn bytes(&self) -> usize {
        self.heads.iter().map(|rows| rows.k.len() + rows.v.len()).sum()
    }

    /// Reserves memory for `tokens` tokens in all.
    pub(crate) fn reserve(&mut self, tokens: usize) {
        let bytes = tokens * self.format.row_bytes(self.width);
        let stores = self.heads.iter_mut().flat_map(|rows| [&mut rows.k, &mut rows.v]);
        stores.for_each(|x| x.reserve_exact(bytes.saturating_sub(x.len())));
    }

    pub(crate) fn truncate(&mut self, len: usize) {
        self.len = len.min(self.len);
        let bytes = self.len * self.format.row_bytes(self.width);
        for rows in &mut self.heads {
            rows.k.truncate(bytes);
            rows.v.truncate(bytes);
        }
    }

    /// Unpacks all rows into `numbers`, which is emptied first.
    pub(crate) fn unpack_into(&self, numbers: &mut KvCache<f32>) -> Result<()> {
        numbers.truncate(0);
        self.append_to(numbers, 0)
    }

    /// Packs the rows of `[tokens, heads, width]`, and appends their unpacked values to `numbers` if it is given.
    pub(crate) fn take(&mut self, k: &[f32], v: &[f32], numbers: Option<&mut KvCache<f32>>) -> Result<()> {
        let (first, format, heads) = (self.len, self.format, self.heads.len());
        let rows = k.chunks_exact(self.width.max(1)).zip(v.chunks_exact(self.width.max(1)));
        for (i, (k, v)) in rows.enumerate() {
            let Rows { k: keys, v: values } = &mut self.heads[i % heads];
            pack(format, k, keys);
            pack(format, v, values);
        }
        self.len += k.len() / (heads * self.width).max(1);
        numbers.map_or(Ok(()), |numbers| self.append_to(numbers, first))
    }

    /// Returns keys and values of consecutive tokens of a head.
    fn rows(&self, head: usize, tokens: Range<usize>) -> [PackedRows<'_>; 2] {
        let row = self.format.row_bytes(self.width);
        let Rows { k, v } = &self.heads[head];
        [k, v].map(|x| PackedRows::new(&x[tokens.start * row..tokens.end * row], self.format, self.width))
    }

    fn append_to(&self, numbers: &mut KvCache<f32>, first: usize) -> Result<()> {
        let (heads, width) = (self.heads.len(), self.width);
        let mut buffers = [(); 2].map(|()| vec![0.0; heads * PIECE.min(self.len - first) * width]);
        for from in (first..self.len).step_by(PIECE) {
            let tokens = PIECE.min(self.len - from);
            let [k, v] = buffers.each_mut().map(|x| &mut x[..heads * tokens * width]);
            let of_head = k.chunks_exact_mut(tokens * width).zip(v.chunks_exact_mut(tokens * width));
            for (h, (k, v)) in of_head.enumerate() {
                let [keys, values] = self.rows(h, from..from + tokens);
                keys.unpack_into(k);
                values.unpack_into(v);
            }
            let dims = [1, heads, tokens, width];
            numbers.append(TensorRef::bhnd(k, dims)?, TensorRef::bhnd(v, dims)?)?;
        }
        Ok(())
    }

    /// Computes exact attention of one token, whose queries are `[heads, width]`, to the tokens `seen`, with the
    /// log-sum-exp of every head. The pieces have a fixed length, so the number of threads cannot change a bit.
    pub(crate) fn attend(
        &self,
        q: &[f32],
        seen: Range<usize>,
        softcap: Option<f64>,
        (schedule, scratch): (&Schedule, &Scratch),
        out: &mut [f32],
        lse: &mut [f32],
    ) {
        let (width, group) = (self.width, lse.len() / self.heads.len().max(1));
        let pieces = seen.len().div_ceil(PIECE);
        let mut part_out = scratch.take::<f32>(self.heads.len() * pieces * group * width);
        let mut part_lse = scratch.take::<f32>(self.heads.len() * pieces * group);
        let parts = part_out.par_chunks_exact_mut(group * width).zip(part_lse.par_chunks_exact_mut(group));
        parts.with_max_len(1).enumerate().for_each(|(i, (out, lse))| {
            let (head, start) = (i / pieces, seen.start + i % pieces * PIECE);
            let [k, v] = self.rows(head, start..(start + PIECE).min(seen.end));
            let q = MatRef::new(&q[head * group * width..][..group * width], group, width);
            let (scale, softcap) = (1.0 / (width as f32).sqrt(), softcap.map(|cap| cap as f32));
            AttendPacked { q, k, v, scale, softcap, isa: schedule.isa }.run(scratch, out, lse);
        });
        out.fill(0.0);
        lse.fill(f32::NEG_INFINITY);
        for (i, (o, l)) in part_out.chunks_exact(width).zip(&*part_lse).enumerate() {
            let h = i / (pieces * group) * group + i % group;
            merge_lse(&mut out[h * width..][..width], &mut lse[h], o, *l);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_rows_come_back_within_their_rounding() {
        let (heads, width, tokens) = (2, 37, 5);
        let k: Vec<f32> = (0..heads * width * tokens).map(|i| ((i * 29) % 101) as f32 / 7.0 - 6.0).collect();
        let v: Vec<f32> = k.iter().map(|x| x * x - 3.0).collect();
        assert!(Packed::new(CacheFormat::F32, heads, width).is_none());
        for (format, error) in [(CacheFormat::Bf16, 1.0 / 256.0), (CacheFormat::Q8, 1.0 / 254.0)] {
            let mut packed = Packed::new(format, heads, width).unwrap();
            let mut seen = KvCache::new(1, heads, width, width, 0);
            let cut = 2 * heads * width;
            packed.take(&k[..cut], &v[..cut], Some(&mut seen)).unwrap();
            packed.take(&k[cut..], &v[cut..], Some(&mut seen)).unwrap();
            let mut again = KvCache::new(1, heads, width, width, 0);
            packed.unpack_into(&mut again).unwrap();
            for (cache, source) in [(seen.keys(), &k), (again.values(), &v), (again.keys(), &k)] {
                let cache = cache.unwrap();
                for h in 0..heads {
                    for t in 0..tokens {
                        let want = &source[(t * heads + h) * width..][..width];
                        let most = want.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                        for (got, want) in cache.head(0, h).row(t).iter().zip(want) {
                            assert!((got - want).abs() <= error * most * 1.01, "{format:?}: {got} {want}");
                        }
                    }
                }
            }
            assert_eq!(packed.bytes(), 2 * tokens * heads * format.packed().unwrap().row_bytes(width));
            packed.truncate(1);
            packed.unpack_into(&mut again).unwrap();
            assert_eq!(again.len(), 1);
        }
        assert!("int4".parse::<CacheFormat>().unwrap_err().to_string().contains("bf16"));
    }
}
