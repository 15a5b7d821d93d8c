//! Reading of `.npy`: one array of single- or double-precision numbers, from untrusted bytes.
//!
//! A file is `\x93NUMPY`, a version, the length of the header, a header that is a Python dictionary of `descr`,
//! `fortran_order` and `shape`, and the elements. Lengths are checked against the available bytes before any
//! allocation, and the header is parsed by position, never evaluated.
//!
//! Reference: NumPy, `numpy.lib.format`.

use attlas::Real;

/// Shape and elements, rows one after another.
#[derive(Debug, PartialEq)]
pub(crate) struct Npy<T> {
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<T>,
}

/// Contents of a header.
#[derive(Debug)]
pub(crate) struct Header {
    shape: Vec<usize>,
    big_endian: bool,
    /// Bytes of an element.
    width: usize,
    /// Bytes of everything before the elements.
    start: usize,
}

/// Longest header that is read, as in NumPy.
const MAX_HEADER: usize = 10_000;

impl Header {
    /// Reads the header from `input`, and no byte more.
    pub(crate) fn read(input: &mut impl std::io::Read) -> Result<Self, String> {
        let mut take = |bytes: &mut [u8], what: &str| {
            input.read_exact(bytes).map_err(|_| format!("the file ends in {what}"))
        };
        let mut first = [0; 8];
        take(&mut first, "its first bytes")?;
        if first[..6] != *b"\x93NUMPY" {
            return Err("the first bytes are not \\x93NUMPY".into());
        }
        let (len, start) = match first[6] {
            1 => {
                let mut n = [0; 2];
                take(&mut n, "the length of its header")?;
                (u16::from_le_bytes(n) as usize, 10)
            }
            2 | 3 => {
                let mut n = [0; 4];
                take(&mut n, "the length of its header")?;
                (u32::from_le_bytes(n) as usize, 12)
            }
            other => return Err(format!("version {other} is not known; 1, 2 and 3 are")),
        };
        if len > MAX_HEADER {
            return Err(format!("a header of {len} bytes; at most {MAX_HEADER} are read"));
        }
        let mut header = vec![0; len];
        take(&mut header, "its header")?;
        let header = std::str::from_utf8(&header).map_err(|_| "the header is no text")?;

        let kind = quoted(value(header, "descr")?).ok_or("descr is no text: only plain numbers are read")?;
        let (big_endian, width) = match kind {
            "<f4" | "=f4" => (false, 4),
            "<f8" | "=f8" => (false, 8),
            ">f4" => (true, 4),
            ">f8" => (true, 8),
            other => return Err(format!("elements of type {other:?}; f4 and f8 are read")),
        };
        let shape = numbers(value(header, "shape")?)?;
        match value(header, "fortran_order")? {
            text if text.starts_with("False") => {}
            // With one axis both orders are the same.
            text if text.starts_with("True") && shape.iter().filter(|&&n| n > 1).count() <= 1 => {}
            text if text.starts_with("True") => {
                return Err("columns are stored one after another; rows are expected (C order)".into());
            }
            _ => return Err("fortran_order is neither True nor False".into()),
        }
        Ok(Self { shape, big_endian, width, start: start + len })
    }

    /// Returns the size of the whole file in bytes, or none if it overflows.
    pub(crate) fn file_bytes(&self) -> Option<usize> {
        let count = self.shape.iter().try_fold(self.width, |n, &d| n.checked_mul(d));
        count.and_then(|n| n.checked_add(self.start))
    }

    /// Builds the array from its elements.
    pub(crate) fn array<T: Real>(self, elements: &[u8]) -> Result<Npy<T>, String> {
        let Self { shape, big_endian, width, start } = self;
        let count =
            shape.iter().try_fold(width, |n, &d| n.checked_mul(d)).filter(|n| n.checked_add(start).is_some());
        match count {
            Some(needed) if needed == elements.len() => {}
            Some(needed) if needed < elements.len() => {
                return Err(format!("{} bytes after the last element of {shape:?}", elements.len() - needed));
            }
            _ => return Err(format!("{} bytes of elements do not fill {shape:?}", elements.len())),
        }
        let data = if width == 4 {
            let read = if big_endian { f32::from_be_bytes } else { f32::from_le_bytes };
            elements.as_chunks::<4>().0.iter().map(|b| T::from_f64(f64::from(read(*b)))).collect()
        } else {
            let read = if big_endian { f64::from_be_bytes } else { f64::from_le_bytes };
            elements.as_chunks::<8>().0.iter().map(|b| T::from_f64(read(*b))).collect()
        };
        Ok(Npy { shape, data })
    }
}

/// Parses a whole file into the element type `T`; the error says what is wrong with it.
pub(crate) fn parse<T: Real>(bytes: &[u8]) -> Result<Npy<T>, String> {
    let mut rest = bytes;
    let header = Header::read(&mut rest)?;
    header.array(rest)
}

/// Returns the text after `'key':` in the header.
fn value<'a>(header: &'a str, key: &str) -> Result<&'a str, String> {
    ['\'', '"']
        .iter()
        .find_map(|quote| header.split_once(&format!("{quote}{key}{quote}")))
        .and_then(|(_, rest)| rest.trim_start().strip_prefix(':'))
        .map(str::trim_start)
        .ok_or_else(|| format!("the header has no {key}"))
}

fn quoted(text: &str) -> Option<&str> {
    let quote = text.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    text[1..].split_once(quote).map(|(inside, _)| inside)
}

/// Parses a tuple of sizes.
fn numbers(text: &str) -> Result<Vec<usize>, String> {
    let wrong = || format!("shape is {:?}, not a tuple of sizes", text.chars().take(40).collect::<String>());
    let inside = text.strip_prefix('(').and_then(|t| t.split_once(')')).ok_or_else(wrong)?.0;
    let parts: Vec<&str> = inside.split(',').map(str::trim).collect();
    // A comma may follow the last size.
    let parts = if parts.last() == Some(&"") { &parts[..parts.len() - 1] } else { &parts[..] };
    // NumPy 1 on Python 2 wrote long integers with an L.
    parts.iter().map(|p| p.trim_end_matches('L').parse().map_err(|_| wrong())).collect()
}

#[cfg(test)]
mod tests {
    use super::{Npy, parse as parse_as};

    fn parse(bytes: &[u8]) -> Result<Npy<f32>, String> {
        parse_as(bytes)
    }

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        let mut out = b"\x93NUMPY\x01\x00".to_vec();
        out.extend((header.len() as u16).to_le_bytes());
        out.extend(header.as_bytes());
        out.extend(data);
        out
    }

    fn dict(descr: &str, order: &str, shape: &str) -> String {
        format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}   \n")
    }

    #[test]
    fn both_widths_and_byte_orders_are_read() {
        let single: Vec<u8> = [1.0f32, -2.5].iter().flat_map(|x| x.to_le_bytes()).collect();
        let npy = parse(&file(&dict("<f4", "False", "(2, 1)"), &single)).unwrap();
        assert_eq!(npy, Npy { shape: vec![2, 1], data: vec![1.0, -2.5] });
        let double: Vec<u8> = [1.0f64, -2.5].iter().flat_map(|x| x.to_be_bytes()).collect();
        assert_eq!(parse(&file(&dict(">f8", "True", "(2,)"), &double)).unwrap().data, [1.0, -2.5]);
        assert_eq!(parse(&file(&dict("<f4", "False", "()"), &single[..4])).unwrap().shape, [0; 0]);
        assert_eq!(parse(&file(&dict("<f4", "False", "(3L, 0)"), &[])).unwrap().shape, [3, 0]);
    }

    #[test]
    fn lies_are_named() {
        let message = |descr: &str, order: &str, shape: &str| {
            parse(&file(&dict(descr, order, shape), &[0; 16])).unwrap_err()
        };
        assert!(message("<f4", "False", "(5,)").contains("do not fill"));
        assert!(message("<f4", "False", "(3,)").contains("after the last"));
        assert!(message("<f4", "False", "(4294967296, 4294967296, 4)").contains("do not fill"));
        assert!(message("<f4", "False", "(-1,)").contains("tuple"));
        assert!(message("<f4", "False", "4").contains("tuple"));
        assert!(message("<i8", "False", "(2,)").contains("<i8"));
        assert!(message("<f4", "True", "(2, 2)").contains("C order"));
        assert!(message("<f4", "Maybe", "(2, 2)").contains("neither"));
        assert!(parse(b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}").unwrap_err().contains("4294967295"));
        assert!(parse(b"\x93NUMPY\x09\x00\x00\x00").unwrap_err().contains("version 9"));
        assert!(parse(b"PK").is_err() && parse(b"\x93NUMPY\x01").is_err());
        assert!(parse(&file("{'descr': [('a', '<f4')]}", &[])).unwrap_err().contains("descr"));
    }
}
