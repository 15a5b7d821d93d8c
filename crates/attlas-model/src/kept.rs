//! Keys and values that a layer stores between calls, in single precision or packed.
//!
//! Packed rows are unpacked for the attending layer, into storage that all layers share: memory then has the packed
//! rows of every layer and the numbers of one. New rows are packed before they are attended to: the keys of a token do
//! not depend on when it was read.

use crate::error::{Error, Result};
use attlas::TensorRef;
use attlas::cache::KvCache;

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

    /// Returns the bytes of a row of `width` numbers.
    fn row_bytes(self, width: usize) -> usize {
        match self {
            Self::F32 => 4 * width,
            Self::Bf16 => 2 * width,
            Self::Q8 => width + 4 * width.div_ceil(BLOCK),
        }
    }

    fn pack(self, row: &[f32], out: &mut Vec<u8>) {
        match self {
            Self::F32 => row.iter().for_each(|x| out.extend(x.to_le_bytes())),
            Self::Bf16 => row.iter().for_each(|&x| out.extend(half::bf16::from_f32(x).to_le_bytes())),
            Self::Q8 => {
                for block in row.chunks(BLOCK) {
                    let most = block.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                    // A block with NaN or infinity becomes NaN.
                    let odd = block.iter().any(|x| !x.is_finite());
                    let scale = if odd { f32::NAN } else { most / 127.0 };
                    let factor = if scale > 0.0 { 1.0 / scale } else { 0.0 };
                    out.extend(scale.to_le_bytes());
                    out.extend(block.iter().map(|x| (x * factor).round_ties_even() as i8 as u8));
                }
            }
        }
    }

    fn unpack(self, bytes: &[u8], row: &mut [f32]) {
        match self {
            Self::F32 => {
                row.iter_mut().zip(bytes.as_chunks::<4>().0).for_each(|(x, b)| *x = f32::from_le_bytes(*b));
            }
            Self::Bf16 => {
                let halves = bytes.as_chunks::<2>().0;
                row.iter_mut().zip(halves).for_each(|(x, b)| *x = half::bf16::from_le_bytes(*b).to_f32());
            }
            Self::Q8 => {
                for (block, bytes) in row.chunks_mut(BLOCK).zip(bytes.chunks(BLOCK + 4)) {
                    let Some((scale, numbers)) = bytes.split_first_chunk::<4>() else { return };
                    let scale = f32::from_le_bytes(*scale);
                    block.iter_mut().zip(numbers).for_each(|(x, n)| *x = scale * f32::from(*n as i8));
                }
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

/// Packed rows of keys and values, token after token, heads side by side.
#[derive(Clone, Debug)]
pub(crate) struct Packed {
    format: CacheFormat,
    heads: usize,
    width: usize,
    len: usize,
    k: Vec<u8>,
    v: Vec<u8>,
}

impl Packed {
    pub(crate) fn new(format: CacheFormat, heads: usize, width: usize) -> Self {
        Self { format, heads, width, len: 0, k: Vec::new(), v: Vec::new() }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.k.len() + self.v.len()
    }

    pub(crate) fn truncate(&mut self, len: usize) {
        let len = len.min(self.len);
        let bytes = len * self.heads * self.format.row_bytes(self.width);
        self.k.truncate(bytes);
        self.v.truncate(bytes);
        self.len = len;
    }

    /// Unpacks all rows into `numbers`, which is emptied first.
    pub(crate) fn unpack_into(&self, numbers: &mut KvCache<f32>) -> Result<()> {
        numbers.truncate(0);
        self.append_to(numbers, 0)
    }

    /// Packs the rows of `[tokens, heads, width]`, and appends their unpacked values to `numbers`.
    pub(crate) fn take(&mut self, k: &[f32], v: &[f32], numbers: &mut KvCache<f32>) -> Result<()> {
        let first = self.len;
        for (rows, store) in [(k, &mut self.k), (v, &mut self.v)] {
            rows.chunks_exact(self.width.max(1)).for_each(|row| self.format.pack(row, store));
        }
        self.len += k.len() / (self.heads * self.width).max(1);
        self.append_to(numbers, first)
    }

    fn append_to(&self, numbers: &mut KvCache<f32>, first: usize) -> Result<()> {
        const TOKENS: usize = 256;
        let (row, width) = (self.format.row_bytes(self.width), self.heads * self.width);
        let mut buffers = [vec![0.0; TOKENS * width], vec![0.0; TOKENS * width]];
        for from in (first..self.len).step_by(TOKENS) {
            let tokens = TOKENS.min(self.len - from);
            for (store, buffer) in [&self.k, &self.v].into_iter().zip(&mut buffers) {
                let bytes = &store[from * self.heads * row..(from + tokens) * self.heads * row];
                for (bytes, out) in bytes.chunks_exact(row).zip(buffer.chunks_exact_mut(self.width)) {
                    self.format.unpack(bytes, out);
                }
            }
            let dims = [1, self.heads, tokens, self.width];
            let [k, v] = &buffers;
            let view = |x| TensorRef::bnhd(x, dims);
            numbers.append(view(&k[..tokens * width])?, view(&v[..tokens * width])?)?;
        }
        Ok(())
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
        for (format, error) in
            [(CacheFormat::F32, 0.0), (CacheFormat::Bf16, 1.0 / 256.0), (CacheFormat::Q8, 1.0 / 254.0)]
        {
            let mut packed = Packed::new(format, heads, width);
            let mut seen = KvCache::new(1, heads, width, width, 0);
            let cut = 2 * heads * width;
            packed.take(&k[..cut], &v[..cut], &mut seen).unwrap();
            packed.take(&k[cut..], &v[cut..], &mut seen).unwrap();
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
            assert_eq!(packed.bytes(), 2 * tokens * heads * format.row_bytes(width));
            packed.truncate(1);
            packed.unpack_into(&mut again).unwrap();
            assert_eq!(again.len(), 1);
        }
        assert!("int4".parse::<CacheFormat>().unwrap_err().to_string().contains("bf16"));
    }
}
