//! Tensors in stored form: a range of bytes of a mapped file, with its format.

use crate::error::{Error, Result};
use attlas_num::kernels::quant::{Format, WeightRef};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// The bytes of a file, mapped or in memory.
#[derive(Debug)]
pub enum Source {
    /// A mapped file.
    Mapped(memmap2::Mmap),
    /// Bytes in memory.
    Owned(Vec<u8>),
}

impl Source {
    /// Maps the file at `path`.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |source| Error::Io { path: path.to_path_buf(), source };
        let file = std::fs::File::open(path).map_err(io)?;
        if file.metadata().map_err(io)?.len() == 0 {
            return Ok(Self::Owned(Vec::new()));
        }
        // SAFETY: the map is read-only, and its bytes are untrusted numbers to every reader. Rust asks that nobody
        // changes them meanwhile, which no program can know of a file that others may write: this relies on nobody
        // doing so, as every program does that maps its weights. Shortened, the file stops the process with a bus error;
        // changed while a header is read, what was checked as UTF-8 may no longer be so.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(io)?;
        Ok(Self::Mapped(map))
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Owned(bytes) => bytes,
        }
    }
}

/// A tensor of floating-point numbers, quantised or not. Cloning it copies no weights.
#[derive(Clone, Debug)]
pub struct Tensor {
    source: Arc<Source>,
    range: Range<usize>,
    format: Format,
    shape: Vec<usize>,
}

impl Tensor {
    /// Creates a tensor from `range` of `source`; `shape` is outermost first. `None` if the range does not have exactly
    /// the tensor's length, or exceeds the source.
    pub fn new(source: Arc<Source>, range: Range<usize>, format: Format, shape: Vec<usize>) -> Option<Self> {
        let (cols, outer) = shape.split_last()?;
        let rows = outer.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
        WeightRef::new(source.bytes().get(range.clone())?, format, rows, *cols)?;
        Some(Self { source, range, format, shape })
    }

    /// Creates a matrix or vector in memory.
    pub fn from_f32(values: &[f32], shape: Vec<usize>) -> Option<Self> {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let range = 0..bytes.len();
        Self::new(Arc::new(Source::Owned(bytes)), range, Format::F32, shape)
    }

    /// Creates a tensor from bytes in memory; `None` if their number is not exactly the tensor's.
    pub fn owned(bytes: Vec<u8>, format: Format, shape: Vec<usize>) -> Option<Self> {
        let range = 0..bytes.len();
        Self::new(Arc::new(Source::Owned(bytes)), range, format, shape)
    }

    /// Dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns its storage format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The stored bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.source.bytes()[self.range.clone()]
    }

    /// Length of a row: the last dimension.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(0)
    }

    /// Number of rows: all other dimensions together.
    pub fn rows(&self) -> usize {
        self.shape[..self.shape.len() - 1].iter().product()
    }

    /// Returns it as a matrix of rows.
    pub fn as_weight(&self) -> WeightRef<'_> {
        WeightRef::new(self.bytes(), self.format, self.rows(), self.cols())
            .expect("the constructor checked that the bytes fit the shape")
    }

    /// Writes row `i` to `out` in single precision.
    pub fn row_into(&self, i: usize, out: &mut [f32]) {
        self.as_weight().row_into(i, out);
    }

    /// Returns the rows in `range` as a matrix that shares the bytes; `None` if there are fewer.
    pub fn row_range(&self, range: Range<usize>) -> Option<Self> {
        let rows = self.rows();
        if range.start > range.end || range.end > rows {
            return None;
        }
        let row = self.bytes().len().checked_div(rows).unwrap_or(0);
        let bytes = self.range.start + range.start * row..self.range.start + range.end * row;
        Self::new(self.source.clone(), bytes, self.format, vec![range.len(), self.cols()])
    }

    /// Returns a matrix of the given rows, copied as stored; `None` if one does not exist.
    pub fn some_rows(&self, rows: impl ExactSizeIterator<Item = usize>) -> Option<Self> {
        let (count, size) = (rows.len(), self.bytes().len().checked_div(self.rows()).unwrap_or(0));
        let mut bytes = Vec::with_capacity(count * size);
        for i in rows {
            bytes.extend_from_slice(self.bytes().get(i * size..(i + 1) * size)?);
        }
        Self::owned(bytes, self.format, vec![count, self.cols()])
    }

    /// All values in single precision.
    pub fn to_f32(&self) -> Vec<f32> {
        let weight = self.as_weight();
        let mut out = vec![0.0; self.rows() * self.cols()];
        if self.cols() > 0 {
            out.chunks_exact_mut(self.cols()).enumerate().for_each(|(i, row)| weight.row_into(i, row));
        }
        out
    }
}
