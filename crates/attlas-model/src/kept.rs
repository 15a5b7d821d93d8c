//! Keys and values that a layer stores between calls, in single precision or packed.
//!
//! Exact attention of a single token reads packed rows where they lie. For prompts, and to fill the streams of other
//! methods, the rows of the attending layer are unpacked into storage that all layers share: memory then has the packed
//! rows of every layer and the numbers of one. New rows are packed before they are attended to: the keys of a token do
//! not depend on when it was read.

use crate::error::{Error, Result};
use attlas::cache::KvCache;
use attlas::{MatRef, Schedule};
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

    /// Returns the bytes of a row of `width` numbers.
    pub fn row_bytes(self, width: usize) -> usize {
        self.packed().map_or(4 * width, |format| format.row_bytes(width))
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

impl std::str::FromStr for CacheFormat {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|f| f.name() == text);
        found.ok_or_else(|| Error::invalid("the cache", text, Self::ALL.map(Self::name).join(", ")))
    }
}

/// Keys of a piece, which one task attends to.
const PIECE: usize = 512;

/// Most numbers that the calling thread packs alone: to hand out the rows of a few tokens takes longer.
const PACKED_ON_CALLER: usize = 1 << 13;

/// Packed rows of keys and values.
#[derive(Clone, Debug)]
pub(crate) struct Packed {
    format: RowFormat,
    width: usize,
    len: usize,
    /// The keys of each head, token after token, each followed by its values.
    stores: Vec<Vec<u8>>,
}

impl Packed {
    /// Creates an empty store; none for single precision.
    pub(crate) fn new(format: CacheFormat, heads: usize, width: usize) -> Option<Self> {
        let format = format.packed()?;
        Some(Self { format, width, len: 0, stores: vec![Vec::new(); 2 * heads] })
    }

    /// Returns the number of tokens.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn bytes(&self) -> usize {
        self.stores.iter().map(Vec::len).sum()
    }

    /// Reserves memory for `tokens` tokens in all.
    pub(crate) fn reserve(&mut self, tokens: usize) {
        let bytes = tokens * self.format.row_bytes(self.width);
        self.stores.iter_mut().for_each(|x| x.reserve_exact(bytes.saturating_sub(x.len())));
    }

    pub(crate) fn truncate(&mut self, len: usize) {
        self.len = len.min(self.len);
        let bytes = self.len * self.format.row_bytes(self.width);
        self.stores.iter_mut().for_each(|x| x.truncate(bytes));
    }

    /// Appends the unpacked rows from token `first` on to `numbers`.
    pub(crate) fn unpack_into(&self, first: usize, numbers: &mut KvCache<f32>) {
        numbers.append_with(self.len - first, |head, tokens, k, v| {
            let [keys, values] = self.rows(head, first + tokens.start..first + tokens.end);
            keys.unpack_into(k);
            values.unpack_into(v);
        });
    }

    /// Packs the rows of `[tokens, heads, width]`.
    pub(crate) fn take(&mut self, k: &[f32], v: &[f32]) {
        let (format, width, stride) = (self.format, self.width, self.stores.len() / 2 * self.width);
        let tokens = k.len() / stride.max(1);
        let pack = |(i, store): (usize, &mut Vec<u8>)| {
            let x = if i % 2 == 0 { k } else { v };
            let rows = MatRef::with_stride(&x[i / 2 * width..], tokens, width, stride);
            let Some(rows) = rows else { unreachable!("both have {tokens} tokens") };
            let at = store.len();
            store.resize(at + tokens * format.row_bytes(width), 0);
            format.pack_into(rows, &mut store[at..]);
        };
        if tokens > 0 && k.len() <= PACKED_ON_CALLER {
            self.stores.iter_mut().enumerate().for_each(pack);
        } else if tokens > 0 {
            self.stores.par_iter_mut().with_max_len(1).enumerate().for_each(pack);
        }
        self.len += tokens;
    }

    /// Returns keys and values of consecutive tokens of a head.
    fn rows(&self, head: usize, tokens: Range<usize>) -> [PackedRows<'_>; 2] {
        let row = self.format.row_bytes(self.width);
        let bytes = tokens.start * row..tokens.end * row;
        [0, 1].map(|i| PackedRows::new(&self.stores[2 * head + i][bytes.clone()], self.format, self.width))
    }

    /// Computes exact attention of one token to the tokens `seen`, for the queries `[heads, width]` that read the key
    /// heads `groups`, with the log-sum-exp of every head. The pieces have a fixed length, so the number of threads
    /// cannot change a bit.
    pub(crate) fn attend(
        &self,
        q: &[f32],
        (groups, seen): (Range<usize>, Range<usize>),
        softcap: Option<f64>,
        (schedule, scratch): (&Schedule, &Scratch),
        out: &mut [f32],
        lse: &mut [f32],
    ) {
        let (width, group) = (self.width, lse.len() / groups.len().max(1));
        let pieces = seen.len().div_ceil(PIECE);
        let mut part_out = scratch.take::<f32>(groups.len() * pieces * group * width);
        let mut part_lse = scratch.take::<f32>(groups.len() * pieces * group);
        let parts = part_out.par_chunks_exact_mut(group * width).zip(part_lse.par_chunks_exact_mut(group));
        parts.enumerate().for_each_in_runs(|(i, (out, lse))| {
            let (head, start) = (i / pieces, seen.start + i % pieces * PIECE);
            let [k, v] = self.rows(groups.start + head, start..(start + PIECE).min(seen.end));
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
    fn many_rows_are_those_taken_one_by_one() {
        let (heads, width, tokens) = (3, 40, 601);
        let numbers = heads * width * tokens;
        assert!(numbers > PACKED_ON_CALLER);
        let k: Vec<f32> = (0..numbers).map(|i| ((i * 37) % 1009) as f32 / 50.0 - 9.0).collect();
        let v: Vec<f32> = k.iter().map(|x| 3.0 - x / 7.0).collect();
        for format in [CacheFormat::Bf16, CacheFormat::Q8] {
            let new = || Packed::new(format, heads, width).unwrap();
            let (mut whole, mut single) = (new(), new());
            whole.take(&k, &v);
            let rows = k.chunks_exact(heads * width).zip(v.chunks_exact(heads * width));
            rows.for_each(|(k, v)| single.take(k, v));
            assert_eq!((&whole.stores, whole.len), (&single.stores, tokens));
            // Unpacked in blocks, from any token on.
            for first in [0, 1, tokens - 1, tokens] {
                let mut cache = KvCache::new(1, heads, width, width, 0);
                whole.unpack_into(first, &mut cache);
                assert_eq!(cache.len(), tokens - first);
                for h in 0..heads {
                    let rows = whole.rows(h, first..tokens);
                    for (rows, cache) in rows.iter().zip([cache.keys(), cache.values()]) {
                        let mut want = vec![f32::NAN; (tokens - first) * width];
                        rows.unpack_into(&mut want);
                        assert!(
                            cache.unwrap().head(0, h).iter_rows().flatten().eq(&want),
                            "{format:?} {first}"
                        );
                    }
                }
            }
        }
    }

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
            packed.take(&k[..cut], &v[..cut]);
            packed.unpack_into(0, &mut seen);
            packed.take(&k[cut..], &v[cut..]);
            packed.unpack_into(2, &mut seen);
            let mut again = KvCache::new(1, heads, width, width, 0);
            packed.unpack_into(0, &mut again);
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
            packed.unpack_into(0, &mut again);
            assert_eq!(again.len(), tokens + 1);
        }
        assert!("int4".parse::<CacheFormat>().unwrap_err().to_string().contains("bf16"));
    }
}
