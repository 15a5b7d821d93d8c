//! GGUF: the file format of llama.cpp, versions 2 and 3, little-endian.
//!
//! [`Gguf::parse`] is a plain function over bytes that trusts no field: counts are checked against the remaining bytes
//! before any allocation: a file of `n` bytes never costs more than a small multiple of `n`. Tensor data is described,
//! not copied.
//!
//! Reference: ggml, `docs/gguf.md`.

mod write;

pub use write::{Entries, write_file};

use crate::error::{Error, Result};
use attlas_num::kernels::quant::Format;
use std::collections::HashMap;
use std::ops::Range;

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// An unsigned integer of any width.
    Unsigned(u64),
    /// A signed integer of any width.
    Signed(i64),
    /// A number in single or double precision.
    Float(f64),
    /// True or false.
    Bool(bool),
    /// UTF-8 text.
    Text(String),
    /// A list of one type.
    Array(Array),
}

/// A list of metadata values, stored in its own width.
#[derive(Clone, Debug, PartialEq)]
pub enum Array {
    /// 8-bit.
    U8(Vec<u8>),
    /// 8-bit, signed.
    I8(Vec<i8>),
    /// 16-bit.
    U16(Vec<u16>),
    /// 16-bit, signed.
    I16(Vec<i16>),
    /// 32-bit.
    U32(Vec<u32>),
    /// 32-bit, signed.
    I32(Vec<i32>),
    /// 64-bit.
    U64(Vec<u64>),
    /// 64-bit, signed.
    I64(Vec<i64>),
    /// Single precision.
    F32(Vec<f32>),
    /// Double precision.
    F64(Vec<f64>),
    /// True or false.
    Bool(Vec<bool>),
    /// UTF-8 texts.
    Text(Vec<String>),
    /// Lists of lists.
    Nested(Vec<Array>),
}

impl Array {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::U8(v) => v.len(),
            Self::I8(v) => v.len(),
            Self::U16(v) => v.len(),
            Self::I16(v) => v.len(),
            Self::U32(v) => v.len(),
            Self::I32(v) => v.len(),
            Self::U64(v) => v.len(),
            Self::I64(v) => v.len(),
            Self::F32(v) => v.len(),
            Self::F64(v) => v.len(),
            Self::Bool(v) => v.len(),
            Self::Text(v) => v.len(),
            Self::Nested(v) => v.len(),
        }
    }

    /// Returns true if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements as integers, if they are integers.
    pub fn to_integers(&self) -> Option<Vec<i64>> {
        Some(match self {
            Self::Bool(v) => v.iter().map(|&x| i64::from(x)).collect(),
            Self::U8(v) => v.iter().map(|&x| i64::from(x)).collect(),
            Self::I8(v) => v.iter().map(|&x| i64::from(x)).collect(),
            Self::U16(v) => v.iter().map(|&x| i64::from(x)).collect(),
            Self::I16(v) => v.iter().map(|&x| i64::from(x)).collect(),
            Self::U32(v) => v.iter().map(|&x| i64::from(x)).collect(),
            Self::I32(v) => v.iter().map(|&x| i64::from(x)).collect(),
            Self::I64(v) => v.clone(),
            Self::U64(v) => v.iter().map(|&x| i64::try_from(x).ok()).collect::<Option<_>>()?,
            _ => return None,
        })
    }
}

/// Location and storage of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Outermost dimension first: a matrix is `[rows, columns]`, row-major. The file has it in reverse.
    pub shape: Vec<usize>,
    /// Block format.
    pub format: Format,
    /// Its bytes in the file.
    pub range: Range<usize>,
}

/// The header of a GGUF file.
#[derive(Clone, Debug)]
pub struct Gguf {
    version: u32,
    metadata: HashMap<String, Value>,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
    data_start: usize,
    /// Entries about the tokeniser, as in the file.
    tokenizer: Entries,
}

/// Deepest nesting of metadata arrays that is read.
const MAX_DEPTH: usize = 4;
/// Longest tensor name, as in ggml without the terminator.
const MAX_NAME: usize = 63;

impl Gguf {
    /// Reads and checks the header of `bytes`, a whole file.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let mut r = Reader { bytes, at: 0 };
        let magic: [u8; 4] = r.array("the magic")?;
        if &magic != b"GGUF" {
            return Err(Error::invalid("the magic", format!("{magic:02x?}"), "the four letters GGUF"));
        }
        let version = u32::from_le_bytes(r.array("the version")?);
        if !(2..=3).contains(&version) {
            let expected = if (1..=3).contains(&version.swap_bytes()) {
                "a little-endian file (this one is big-endian)"
            } else {
                "2 or 3"
            };
            return Err(Error::invalid("the GGUF version", version, expected));
        }
        // An info is at least a name length, a dimension count, a type and an offset.
        let n_tensors = r.count("the tensor count", 24)?;
        // An entry is at least a key length, a type and one byte.
        let n_metadata = r.count("the metadata count", 13)?;

        let mut metadata = HashMap::with_capacity(n_metadata);
        let mut tokenizer = Entries::default();
        for _ in 0..n_metadata {
            let start = r.at;
            let key = r.text("a metadata key")?;
            let kind = u32::from_le_bytes(r.array("a metadata type")?);
            let value = r.value(kind, &key)?;
            if key.starts_with("tokenizer.") {
                tokenizer.push_raw(&bytes[start..r.at]);
            }
            if metadata.contains_key(&key) {
                return Err(Error::invalid("a metadata key", format!("{key:?} twice"), "distinct keys"));
            }
            metadata.insert(key, value);
        }

        let alignment = match metadata.get("general.alignment") {
            None => 32,
            Some(Value::Unsigned(a)) if a.is_power_of_two() && *a <= 1 << 20 => *a as usize,
            Some(other) => {
                return Err(Error::invalid(
                    "general.alignment",
                    format!("{other:?}"),
                    "a power of two up to 1048576",
                ));
            }
        };

        let mut raw = Vec::with_capacity(n_tensors);
        for _ in 0..n_tensors {
            raw.push(r.tensor_info(alignment)?);
        }
        let data_start = if n_tensors == 0 {
            r.at
        } else {
            r.at.checked_next_multiple_of(alignment).unwrap_or(usize::MAX)
        };
        let mut tensors = Vec::with_capacity(n_tensors);
        let mut by_name = HashMap::with_capacity(n_tensors);
        for (i, raw) in raw.into_iter().enumerate() {
            let start = usize::try_from(raw.offset).ok().and_then(|o| o.checked_add(data_start));
            let end = start.and_then(|s| s.checked_add(raw.len_bytes));
            let (Some(start), Some(end)) = (start, end.filter(|&e| e <= bytes.len())) else {
                return Err(Error::Truncated {
                    what: "the data of a tensor",
                    offset: data_start.saturating_add(usize::try_from(raw.offset).unwrap_or(usize::MAX)),
                    needed: raw.len_bytes as u64,
                    len: bytes.len(),
                });
            };
            if by_name.insert(raw.name.clone(), i).is_some() {
                return Err(Error::invalid(
                    "a tensor name",
                    format!("{:?} twice", raw.name),
                    "distinct names",
                ));
            }
            tensors.push(TensorInfo {
                name: raw.name,
                shape: raw.shape,
                format: raw.format,
                range: start..end,
            });
        }
        check_disjoint(&tensors)?;
        Ok(Self { version, metadata, tensors, by_name, data_start, tokenizer })
    }

    /// Version of the format.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// First byte of the tensor data.
    pub fn data_start(&self) -> usize {
        self.data_start
    }

    /// All metadata.
    pub fn metadata(&self) -> &HashMap<String, Value> {
        &self.metadata
    }

    /// The entries that describe the tokeniser, for another file.
    pub fn tokenizer_entries(&self) -> &Entries {
        &self.tokenizer
    }

    /// All tensors, in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&i| &self.tensors[i])
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    fn mistyped(key: &str, value: &Value, expected: &str) -> Error {
        let found = match value {
            Value::Array(a) => format!("an array of {}", a.len()),
            other => format!("{other:?}"),
        };
        Error::invalid(key, found, expected)
    }

    /// A non-negative integer, if the key is there.
    pub fn integer(&self, key: &str) -> Result<Option<usize>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => {
                let n = match value {
                    Value::Unsigned(n) => usize::try_from(*n).ok(),
                    Value::Signed(n) => usize::try_from(*n).ok(),
                    _ => None,
                };
                n.map(Some).ok_or_else(|| Self::mistyped(key, value, "a non-negative integer"))
            }
        }
    }

    /// A number, if the key is there.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Float(x)) if x.is_finite() => Ok(Some(*x)),
            Some(Value::Unsigned(n)) => Ok(Some(*n as f64)),
            Some(Value::Signed(n)) => Ok(Some(*n as f64)),
            Some(value) => Err(Self::mistyped(key, value, "a finite number")),
        }
    }

    /// A truth value, if the key is there.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(value) => Err(Self::mistyped(key, value, "a boolean")),
        }
    }

    /// A text, if the key is there.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Text(s)) => Ok(Some(s)),
            Some(value) => Err(Self::mistyped(key, value, "a text")),
        }
    }

    /// A list of texts, if the key is there.
    pub fn texts(&self, key: &str) -> Result<Option<&[String]>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::Text(v))) => Ok(Some(v)),
            Some(value) => Err(Self::mistyped(key, value, "an array of texts")),
        }
    }
}

/// Fails if two tensors share a byte; gaps between tensors are allowed.
fn check_disjoint(tensors: &[TensorInfo]) -> Result<()> {
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|t| (t.range.start, t.range.end));
    for pair in order.windows(2) {
        if pair[0].range.end > pair[1].range.start {
            return Err(Error::invalid(
                "the data of two tensors",
                format!("shared between {} and {}", pair[0].name, pair[1].name),
                "disjoint ranges",
            ));
        }
    }
    Ok(())
}

/// Returns the format of a ggml type number; the error is the name of an unsupported one.
pub fn format_of(id: u32) -> std::result::Result<Format, String> {
    Ok(match id {
        0 => Format::F32,
        1 => Format::F16,
        2 => Format::Q4_0,
        3 => Format::Q4_1,
        6 => Format::Q5_0,
        7 => Format::Q5_1,
        8 => Format::Q8_0,
        10 => Format::Q2K,
        11 => Format::Q3K,
        12 => Format::Q4K,
        13 => Format::Q5K,
        14 => Format::Q6K,
        15 => Format::Q8K,
        20 => Format::Iq4Nl,
        23 => Format::Iq4Xs,
        30 => Format::BF16,
        39 => Format::Mxfp4,
        other => {
            let name = match other {
                9 => "Q8_1",
                16 => "IQ2_XXS",
                17 => "IQ2_XS",
                18 => "IQ3_XXS",
                19 => "IQ1_S",
                21 => "IQ3_S",
                22 => "IQ2_S",
                24 => "I8",
                25 => "I16",
                26 => "I32",
                27 => "I64",
                28 => "F64",
                29 => "IQ1_M",
                34 => "TQ1_0",
                35 => "TQ2_0",
                40 => "NVFP4",
                _ => return Err(format!("number {other}")),
            };
            return Err(name.to_owned());
        }
    })
}

/// A tensor info before its data range is known.
struct RawTensor {
    name: String,
    shape: Vec<usize>,
    format: Format,
    offset: u64,
    len_bytes: usize,
}

/// A position in untrusted bytes.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: u64, what: &'static str) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        match usize::try_from(n).ok().filter(|&n| n <= rest.len()) {
            Some(n) => {
                self.at += n;
                Ok(&rest[..n])
            }
            None => Err(Error::Truncated { what, offset: self.at, needed: n, len: self.bytes.len() }),
        }
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    /// Reads a count of items of at least `min_bytes` each; more than fit in the rest of the file is an error before
    /// any allocation.
    fn count(&mut self, what: &'static str, min_bytes: usize) -> Result<usize> {
        let n = u64::from_le_bytes(self.array(what)?);
        let left = (self.bytes.len() - self.at) as u64;
        match n.checked_mul(min_bytes as u64) {
            Some(needed) if needed <= left => Ok(n as usize),
            needed => Err(Error::Truncated {
                what,
                offset: self.at,
                needed: needed.unwrap_or(u64::MAX),
                len: self.bytes.len(),
            }),
        }
    }

    fn text(&mut self, what: &'static str) -> Result<String> {
        let n = self.count(what, 1)?;
        let at = self.at;
        let bytes = self.take(n as u64, what)?;
        match std::str::from_utf8(bytes) {
            Ok(s) => Ok(s.to_owned()),
            Err(e) => {
                Err(Error::invalid(what, format!("not UTF-8 at byte {}", at + e.valid_up_to()), "UTF-8"))
            }
        }
    }

    fn value(&mut self, kind: u32, key: &str) -> Result<Value> {
        const WHAT: &str = "a metadata value";
        Ok(match kind {
            0 => Value::Unsigned(u64::from(u8::from_le_bytes(self.array(WHAT)?))),
            1 => Value::Signed(i64::from(i8::from_le_bytes(self.array(WHAT)?))),
            2 => Value::Unsigned(u64::from(u16::from_le_bytes(self.array(WHAT)?))),
            3 => Value::Signed(i64::from(i16::from_le_bytes(self.array(WHAT)?))),
            4 => Value::Unsigned(u64::from(u32::from_le_bytes(self.array(WHAT)?))),
            5 => Value::Signed(i64::from(i32::from_le_bytes(self.array(WHAT)?))),
            6 => Value::Float(f64::from(f32::from_le_bytes(self.array(WHAT)?))),
            7 => Value::Bool(self.boolean()?),
            8 => Value::Text(self.text(WHAT)?),
            9 => Value::Array(self.list(key, 0)?),
            10 => Value::Unsigned(u64::from_le_bytes(self.array(WHAT)?)),
            11 => Value::Signed(i64::from_le_bytes(self.array(WHAT)?)),
            12 => Value::Float(f64::from_le_bytes(self.array(WHAT)?)),
            other => return Err(Error::invalid(format!("the type of {key:?}"), other, "0 to 12")),
        })
    }

    fn boolean(&mut self) -> Result<bool> {
        match self.array("a boolean")? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(Error::invalid("a boolean", other, "0 or 1")),
        }
    }

    fn numbers<const N: usize, T>(&mut self, from: impl Fn([u8; N]) -> T) -> Result<Vec<T>> {
        const WHAT: &str = "a metadata array";
        let n = self.count(WHAT, N)?;
        let bytes = self.take((n * N) as u64, WHAT)?;
        Ok(bytes.as_chunks::<N>().0.iter().map(|b| from(*b)).collect())
    }

    fn list(&mut self, key: &str, depth: usize) -> Result<Array> {
        let kind = u32::from_le_bytes(self.array("an array's type")?);
        Ok(match kind {
            0 => Array::U8(self.numbers(u8::from_le_bytes)?),
            1 => Array::I8(self.numbers(i8::from_le_bytes)?),
            2 => Array::U16(self.numbers(u16::from_le_bytes)?),
            3 => Array::I16(self.numbers(i16::from_le_bytes)?),
            4 => Array::U32(self.numbers(u32::from_le_bytes)?),
            5 => Array::I32(self.numbers(i32::from_le_bytes)?),
            6 => Array::F32(self.numbers(f32::from_le_bytes)?),
            7 => {
                let n = self.count("an array of booleans", 1)?;
                Array::Bool((0..n).map(|_| self.boolean()).collect::<Result<_>>()?)
            }
            8 => {
                let n = self.count("an array of texts", 8)?;
                let mut texts = Vec::with_capacity(n);
                for _ in 0..n {
                    texts.push(self.text("a text of an array")?);
                }
                Array::Text(texts)
            }
            9 if depth + 1 == MAX_DEPTH => {
                return Err(Error::invalid(
                    format!("the nesting of {key:?}"),
                    "deeper",
                    format!("at most {MAX_DEPTH}"),
                ));
            }
            9 => {
                // An inner array is at least a type and a count.
                let n = self.count("an array of arrays", 12)?;
                Array::Nested((0..n).map(|_| self.list(key, depth + 1)).collect::<Result<_>>()?)
            }
            10 => Array::U64(self.numbers(u64::from_le_bytes)?),
            11 => Array::I64(self.numbers(i64::from_le_bytes)?),
            12 => Array::F64(self.numbers(f64::from_le_bytes)?),
            other => return Err(Error::invalid(format!("the element type of {key:?}"), other, "0 to 12")),
        })
    }

    fn tensor_info(&mut self, alignment: usize) -> Result<RawTensor> {
        let name = self.text("a tensor name")?;
        if name.len() > MAX_NAME {
            return Err(Error::invalid(
                "the length of a tensor name",
                name.len(),
                format!("at most {MAX_NAME} bytes"),
            ));
        }
        let n_dims = u32::from_le_bytes(self.array("a dimension count")?);
        if n_dims == 0 || n_dims > 4 {
            return Err(Error::invalid(format!("the dimension count of {name}"), n_dims, "1 to 4"));
        }
        let mut shape = Vec::with_capacity(4);
        let mut len = Some(1usize);
        for _ in 0..n_dims {
            let dim = u64::from_le_bytes(self.array("a dimension")?);
            let dim = usize::try_from(dim).ok().filter(|&d| d > 0 && i64::try_from(d).is_ok());
            let dim = dim
                .ok_or_else(|| Error::invalid(format!("a dimension of {name}"), "0 or huge", "1 or more"))?;
            len = len.and_then(|l| l.checked_mul(dim));
            shape.push(dim);
        }
        let id = u32::from_le_bytes(self.array("a tensor type")?);
        let offset = u64::from_le_bytes(self.array("a tensor offset")?);
        let format = format_of(id).map_err(|format| Error::UnsupportedFormat {
            tensor: name.clone(),
            format,
            supported: Format::ALL.map(Format::name).join(" "),
        })?;
        if !shape[0].is_multiple_of(format.block_len()) {
            return Err(Error::invalid(
                format!("the row length of {name}"),
                shape[0],
                format!("a multiple of {}, the block of {format}", format.block_len()),
            ));
        }
        let len_bytes = len.and_then(|l| format.bytes_of(l)).ok_or_else(|| {
            Error::invalid(format!("the size of {name}"), "more than the address space", "less")
        })?;
        if !offset.is_multiple_of(alignment as u64) {
            return Err(Error::invalid(
                format!("the offset of {name}"),
                offset,
                format!("a multiple of the alignment {alignment}"),
            ));
        }
        shape.reverse();
        Ok(RawTensor { name, shape, format, offset, len_bytes })
    }
}

/// Returns the names of all parts of a split file, `…-00001-of-0000N.gguf`, or `None` if `file_name` is not of that
/// form.
pub fn split_names(file_name: &str, count: usize) -> Option<Vec<String>> {
    let stem = file_name.strip_suffix(".gguf")?;
    let (rest, total) = stem.rsplit_once("-of-")?;
    let (base, number) = rest.rsplit_once('-')?;
    let digits = |s: &str| s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit());
    if !digits(total) || !digits(number) || total.parse() != Ok(count) {
        return None;
    }
    Some((1..=count).map(|i| format!("{base}-{i:05}-of-{count:05}.gguf")).collect())
}
