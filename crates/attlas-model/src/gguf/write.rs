//! Writing of GGUF files.

use super::format_of;
use crate::error::{Error, Result};
use crate::tensor::Tensor;
use attlas_num::kernels::quant::Format;
use std::borrow::Cow;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Data of tensors begins at multiples of this.
const ALIGNMENT: usize = 32;

/// Metadata in the form of the file.
#[derive(Clone, Debug, Default)]
pub struct Entries {
    bytes: Vec<u8>,
    count: u64,
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Entries {
    /// Returns true if there are no entries.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Appends an encoded entry: key, type and value.
    pub(super) fn push_raw(&mut self, entry: &[u8]) {
        self.bytes.extend(entry);
        self.count += 1;
    }

    fn push(&mut self, key: &str, kind: u32, value: impl IntoIterator<Item = u8>) {
        put_text(&mut self.bytes, key);
        self.bytes.extend(kind.to_le_bytes());
        self.bytes.extend(value);
        self.count += 1;
    }

    /// Adds an unsigned integer.
    pub fn integer(&mut self, key: &str, value: usize) -> Result<()> {
        let value = u32::try_from(value).map_err(|_| Error::invalid(key, value, "at most 4294967295"))?;
        self.push(key, 4, value.to_le_bytes());
        Ok(())
    }

    /// Adds a number in single precision.
    pub fn number(&mut self, key: &str, value: f64) {
        self.push(key, 6, (value as f32).to_le_bytes());
    }

    /// Adds a truth value.
    pub fn flag(&mut self, key: &str, value: bool) {
        self.push(key, 7, [u8::from(value)]);
    }

    /// Adds a text.
    pub fn text(&mut self, key: &str, value: &str) {
        let mut bytes = Vec::new();
        put_text(&mut bytes, value);
        self.push(key, 8, bytes);
    }

    fn array(&mut self, key: &str, kind: u32, len: usize, elements: Vec<u8>) {
        let head = kind.to_le_bytes().into_iter().chain((len as u64).to_le_bytes());
        self.push(key, 9, head.chain(elements));
    }

    /// Adds a list of texts.
    pub fn texts(&mut self, key: &str, values: &[impl AsRef<str>]) {
        let mut bytes = Vec::new();
        values.iter().for_each(|v| put_text(&mut bytes, v.as_ref()));
        self.array(key, 8, values.len(), bytes);
    }

    /// Adds a list of signed integers.
    pub fn integers(&mut self, key: &str, values: &[i32]) {
        self.array(key, 5, values.len(), values.iter().flat_map(|v| v.to_le_bytes()).collect());
    }

    /// Appends other entries.
    pub fn extend(&mut self, others: &Self) {
        self.bytes.extend(&others.bytes);
        self.count += others.count;
    }
}

/// Returns the number of a format in ggml.
fn type_of(format: Format) -> u32 {
    // All supported formats have numbers below 64.
    (0..64).find(|&id| format_of(id) == Ok(format)).unwrap_or_default()
}

/// Writes a file with this metadata and these tensors, as stored.
pub fn write_file(path: &Path, metadata: &Entries, tensors: &[(String, Cow<'_, Tensor>)]) -> Result<()> {
    let mut head = b"GGUF".to_vec();
    head.extend(3u32.to_le_bytes());
    head.extend((tensors.len() as u64).to_le_bytes());
    head.extend(metadata.count.to_le_bytes());
    head.extend(&metadata.bytes);
    let mut offset = 0usize;
    for (name, tensor) in tensors {
        put_text(&mut head, name);
        head.extend((tensor.shape().len() as u32).to_le_bytes());
        tensor.shape().iter().rev().for_each(|&d| head.extend((d as u64).to_le_bytes()));
        head.extend(type_of(tensor.format()).to_le_bytes());
        head.extend((offset as u64).to_le_bytes());
        offset += tensor.bytes().len().next_multiple_of(ALIGNMENT);
    }
    head.resize(head.len().next_multiple_of(ALIGNMENT), 0);
    let write = || {
        let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
        out.write_all(&head)?;
        for (_, tensor) in tensors {
            let bytes = tensor.bytes();
            out.write_all(bytes)?;
            out.write_all(&[0; ALIGNMENT][..bytes.len().next_multiple_of(ALIGNMENT) - bytes.len()])?;
        }
        out.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()
    };
    write().map_err(|source| Error::Io { path: path.to_path_buf(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_has_its_number() {
        for format in Format::ALL {
            assert_eq!(format_of(type_of(format)), Ok(format));
        }
    }
}
