//! Checkpoint folders that appear whole or not at all.
//!
//! A [`Folder`] is written beside its final path, as `NAME.part-` with a random number, and moved there once everything
//! is in it and on disk. Dropping it earlier removes the part, and an existing path is refused. The part is locked
//! while it is written: an unlocked one was left by a killed process, and the next process that writes to the same path
//! removes it. Tensors are written row by row, without a second copy of the model.

use crate::error::{Error, Result};
use crate::model::Model;
use crate::tensor::Tensor;
use attlas_num::kernels::quant::Format;
use serde_json::json;
use std::borrow::Cow;
use std::collections::hash_map::RandomState;
use std::fs::{File, TryLockError};
use std::hash::{BuildHasher, Hasher};
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Source of a tensor to be written.
#[derive(Clone, Debug)]
enum Values<'a> {
    /// As stored, if the file format supports it; quantised blocks in single precision.
    Stored(&'a Tensor),
    /// As stored, with quantised blocks as raw bytes.
    Blocks(&'a Tensor),
    /// Single precision.
    Dense(Cow<'a, [f32]>),
}

/// A tensor to write.
#[derive(Clone, Debug)]
pub struct NamedTensor<'a> {
    name: String,
    shape: Vec<usize>,
    values: Values<'a>,
}

impl<'a> NamedTensor<'a> {
    /// Wraps a tensor of a model, copied as stored; quantised blocks become single precision.
    pub fn stored(name: impl Into<String>, tensor: &'a Tensor) -> Self {
        Self { name: name.into(), shape: tensor.shape().to_vec(), values: Values::Stored(tensor) }
    }

    /// Wraps a tensor of a model, copied as stored; quantised blocks become bytes of shape `[rows, bytes of a row]`,
    /// which other programs cannot read.
    pub fn blocks(name: impl Into<String>, tensor: &'a Tensor) -> Self {
        if matches!(tensor.format(), Format::F32 | Format::F16 | Format::BF16) {
            return Self::stored(name, tensor);
        }
        let rows = tensor.rows();
        let shape = vec![rows, tensor.bytes().len() / rows.max(1)];
        Self { name: name.into(), shape, values: Values::Blocks(tensor) }
    }

    /// Wraps numbers in single precision. Panics if their number does not match the shape.
    pub fn dense(name: impl Into<String>, shape: Vec<usize>, values: impl Into<Cow<'a, [f32]>>) -> Self {
        let values = values.into();
        assert_eq!(values.len(), shape.iter().product::<usize>(), "the shape of a tensor to write");
        Self { name: name.into(), shape, values: Values::Dense(values) }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the element type in the file and its size in bytes.
    fn element(&self) -> (&'static str, usize) {
        match &self.values {
            Values::Stored(t) if t.format() == Format::F16 => ("F16", 2),
            Values::Stored(t) if t.format() == Format::BF16 => ("BF16", 2),
            Values::Blocks(_) => ("U8", 1),
            _ => ("F32", 4),
        }
    }

    fn len_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.element().1
    }

    fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        match &self.values {
            Values::Stored(t) if matches!(t.format(), Format::F32 | Format::F16 | Format::BF16) => {
                out.write_all(t.bytes())
            }
            Values::Stored(t) => {
                let mut row = vec![0.0; t.cols()];
                (0..t.rows()).try_for_each(|i| {
                    t.row_into(i, &mut row);
                    write_numbers(out, &row)
                })
            }
            Values::Blocks(t) => out.write_all(t.bytes()),
            Values::Dense(values) => write_numbers(out, values),
        }
    }
}

fn write_numbers(out: &mut impl Write, values: &[f32]) -> std::io::Result<()> {
    values.iter().try_for_each(|x| out.write_all(&x.to_le_bytes()))
}

/// Name of a GGUF file inside the part.
pub const GGUF: &str = "model.gguf";

/// File in every part that its writer locks.
const LOCK: &str = ".lock";

/// A folder that is being written.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    /// Path of the part; `None` once it has been moved.
    part: Option<PathBuf>,
    /// Lock that tells others that the part is being written.
    lock: Option<File>,
}

impl Folder {
    /// Begins a folder for `path`, which must not exist. Removes parts that a killed process left.
    pub fn create(path: &Path) -> Result<Self> {
        Self::check(path)?;
        parts_of(path).iter().filter(|part| state_of(part) == PartState::Left).for_each(|part| {
            // A leftover that cannot be removed does no harm.
            let _ = std::fs::remove_dir_all(part);
        });
        loop {
            let mut name = path.file_name().unwrap_or_default().to_os_string();
            name.push(format!(".part-{:016x}", RandomState::new().build_hasher().finish()));
            let part = path.with_file_name(name);
            let failed = |source| Error::Io { path: part.clone(), source };
            match std::fs::create_dir(&part) {
                Err(e) if e.kind() == ErrorKind::AlreadyExists => continue,
                other => other.map_err(failed)?,
            }
            let lock = File::create_new(part.join(LOCK)).map_err(failed)?;
            // Before the lock existed, another process may have removed the part as a leftover.
            match lock.lock() {
                Ok(()) if !part.join(LOCK).exists() => continue,
                Ok(()) => {}
                Err(e) if e.kind() == ErrorKind::Unsupported => {}
                Err(e) => return Err(failed(e)),
            }
            return Ok(Self { path: path.to_path_buf(), part: Some(part), lock: Some(lock) });
        }
    }

    /// Fails if [`create`](Self::create) would refuse `path`; call it before long work.
    pub fn check(path: &Path) -> Result<()> {
        if path.file_name().is_none() {
            let found = format!("{:?}", path.display().to_string());
            return Err(Error::invalid("the output folder", found, "the name of a new folder"));
        }
        // A dangling link exists, too.
        if path.symlink_metadata().is_ok() {
            return Err(Error::Exists { path: path.to_path_buf() });
        }
        let parent = parent_of(path);
        if !parent.is_dir() {
            return Err(Error::Io { path: parent.to_path_buf(), source: ErrorKind::NotFound.into() });
        }
        if let Some(part) = parts_of(path).into_iter().find(|part| state_of(part) == PartState::Written) {
            return Err(Error::BeingWritten { path: path.to_path_buf(), part });
        }
        // Only writing shows that the folder is writable.
        let name = format!(".attlas-{:016x}", RandomState::new().build_hasher().finish());
        let probe = parent.join(name);
        std::fs::create_dir(&probe)
            .and_then(|()| std::fs::remove_dir(&probe))
            .map_err(|source| Error::Io { path: parent.to_path_buf(), source })
    }

    /// Returns the path of the files until they are moved.
    pub fn path(&self) -> &Path {
        self.part.as_ref().unwrap_or(&self.path)
    }

    fn place(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// Writes a small file.
    pub fn file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.place(name);
        let write = || {
            let mut file = File::create(&path)?;
            file.write_all(bytes)?;
            file.sync_all()
        };
        write().map_err(|source| Error::Io { path: path.clone(), source })
    }

    /// Writes a JSON file, indented.
    pub fn json(&self, name: &str, value: &impl serde::Serialize) -> Result<()> {
        let mut text = serde_json::to_string_pretty(value)?;
        text.push('\n');
        self.file(name, text.as_bytes())
    }

    /// Writes a safetensors file. Names must differ.
    pub fn tensors(&self, name: &str, tensors: &[NamedTensor<'_>]) -> Result<()> {
        let mut order: Vec<&NamedTensor<'_>> = tensors.iter().collect();
        // Wide elements first, which aligns all of them; by name among equals, for a reproducible file.
        order.sort_by_key(|t| (std::cmp::Reverse(t.element().1), t.name()));
        let mut header = serde_json::Map::new();
        header.insert("__metadata__".into(), json!({"format": "pt"}));
        let mut end = 0;
        for t in &order {
            let start = end;
            end += t.len_bytes();
            let entry = json!({"dtype": t.element().0, "shape": t.shape, "data_offsets": [start, end]});
            if header.insert(t.name.clone(), entry).is_some() {
                return Err(Error::invalid("a tensor name", format!("{:?} twice", t.name), "distinct names"));
            }
        }
        let mut header = serde_json::to_vec(&header)?;
        header.resize(header.len().next_multiple_of(8), b' ');
        let path = self.place(name);
        let write = || {
            let mut out = BufWriter::with_capacity(1 << 20, File::create(&path)?);
            out.write_all(&(header.len() as u64).to_le_bytes())?;
            out.write_all(&header)?;
            order.iter().try_for_each(|t| t.write(&mut out))?;
            out.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()
        };
        write().map_err(|source| Error::Io { path: path.clone(), source })
    }

    /// Writes the tokeniser: the files of the model's folder, or a `tokenizer.json` and a `tokenizer_config.json` made
    /// from a GGUF file's entries.
    pub fn tokenizer(&self, model: &Model) -> Result<()> {
        const FILES: [&str; 5] = [
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "chat_template.jinja",
            "generation_config.json",
        ];
        if let Some(folder) = &model.folder {
            for name in FILES {
                let from = folder.join(name);
                if from.is_file() {
                    let bytes = crate::checkpoint::read_file(&from)?;
                    self.file(name, &bytes)?;
                }
            }
            return Ok(());
        }
        let t = &model.tokenizer;
        self.file("tokenizer.json", &t.to_json()?)?;
        let token = |id: Option<u32>| id.and_then(|id| t.token(id));
        let settings = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": token(t.bos()),
            "eos_token": token(t.eos()),
            "chat_template": model.chat_template,
            "clean_up_tokenization_spaces": false,
            "model_max_length": model.config.max_positions,
        });
        self.json("tokenizer_config.json", &settings)
    }

    /// Moves the complete folder to its path.
    pub fn finish(self) -> Result<()> {
        self.move_part(|part, place| {
            std::fs::remove_file(part.join(LOCK))?;
            sync_folder(part)?;
            std::fs::rename(part, place)
        })
    }

    /// Moves a single file to the path instead of the folder, and removes the rest.
    pub fn finish_file(self, name: &str) -> Result<()> {
        self.move_part(|part, place| {
            std::fs::rename(part.join(name), place)?;
            // A leftover that cannot be removed does no harm.
            let _ = std::fs::remove_dir_all(part);
            Ok(())
        })
    }

    fn move_part(mut self, to: impl FnOnce(&Path, &Path) -> std::io::Result<()>) -> Result<()> {
        // The path must still be free.
        if self.path.symlink_metadata().is_ok() {
            return Err(Error::Exists { path: self.path.clone() });
        }
        let Some(part) = self.part.take() else { return Ok(()) };
        let moved = to(&part, &self.path);
        self.lock = None;
        match moved {
            Ok(()) => sync_folder(parent_of(&self.path))
                .map_err(|source| Error::Io { path: self.path.clone(), source }),
            Err(source) => {
                let path = self.path.clone();
                self.part = Some(part);
                Err(Error::Io { path, source })
            }
        }
    }
}

fn parent_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns all parts of the folder at `path`, of any process.
fn parts_of(path: &Path) -> Vec<PathBuf> {
    let Some(name) = path.file_name().and_then(|n| n.to_str()) else { return Vec::new() };
    let prefix = format!("{name}.part-");
    let is_part = |name: &str| {
        name.strip_prefix(&prefix).is_some_and(|n| n.len() == 16 && n.chars().all(|c| c.is_ascii_hexdigit()))
    };
    let entries = std::fs::read_dir(parent_of(path)).into_iter().flatten().flatten();
    entries.filter(|e| e.file_name().to_str().is_some_and(is_part)).map(|e| e.path()).collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PartState {
    /// Being written by a running process.
    Written,
    /// Left by a process that has ended.
    Left,
    /// Something else of that name, or a file system without locks.
    Unknown,
}

fn state_of(part: &Path) -> PartState {
    let Ok(lock) = File::options().write(true).open(part.join(LOCK)) else { return PartState::Unknown };
    match lock.try_lock() {
        Ok(()) => PartState::Left,
        Err(TryLockError::WouldBlock) => PartState::Written,
        Err(TryLockError::Error(_)) => PartState::Unknown,
    }
}

/// Syncs a folder, which lets a rename in it survive a power failure.
fn sync_folder(folder: &Path) -> std::io::Result<()> {
    if !cfg!(unix) {
        return Ok(());
    }
    let expected = [ErrorKind::InvalidInput, ErrorKind::Unsupported, ErrorKind::PermissionDenied];
    match File::open(folder).and_then(|f| f.sync_all()) {
        // Some file systems do not sync folders, and a folder may be writable but not readable.
        Err(e) if expected.contains(&e.kind()) => Ok(()),
        other => other,
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Some(part) = &self.part {
            // An error cannot be reported from here.
            let _ = std::fs::remove_dir_all(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Tensors;
    use crate::tensor::Source;
    use std::sync::Arc;

    /// Returns a free path in the system's temporary folder.
    fn place(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("attlas-save-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        path
    }

    #[test]
    fn what_is_written_is_read_again() {
        let path = place("read");
        let half: Vec<u8> =
            [1.0f32, -2.5].iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect();
        let stored = Tensor::new(Arc::new(Source::Owned(half)), 0..4, Format::BF16, vec![2]).unwrap();
        // One block of 32 values: 0.5 · q.
        let mut block = half::f16::from_f32(0.5).to_le_bytes().to_vec();
        block.extend((0..32).map(|i| (i as i8 - 16) as u8));
        let quantised =
            Tensor::new(Arc::new(Source::Owned(block)), 0..34, Format::Q8_0, vec![1, 32]).unwrap();
        let folder = Folder::create(&path).unwrap();
        let list = [
            NamedTensor::stored("a", &stored),
            NamedTensor::stored("b", &quantised),
            NamedTensor::dense("c", vec![2, 1], vec![3.0, 4.0]),
            NamedTensor::blocks("d", &quantised),
        ];
        folder.tensors("model.safetensors", &list).unwrap();
        folder.file("note", b"text").unwrap();
        assert!(!path.exists() && parts_of(&path).len() == 1);
        folder.finish().unwrap();
        assert!(parts_of(&path).is_empty() && !path.join(LOCK).exists());
        assert_eq!(std::fs::read(path.join("note")).unwrap(), b"text");
        let bytes = std::fs::read(path.join("model.safetensors")).unwrap();
        let raw = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(raw.tensor("d").unwrap().data(), quantised.bytes());
        assert_eq!(raw.tensor("d").unwrap().shape(), [1, 34]);
        let read = Tensors::from_safetensors(&Arc::new(Source::Owned(bytes))).unwrap();
        assert_eq!(read.len(), 3);
        let a = read.get("a").unwrap();
        assert_eq!((a.format(), a.to_f32()), (Format::BF16, vec![1.0, -2.5]));
        assert_eq!(read.get("b").unwrap().to_f32(), quantised.to_f32());
        assert_eq!(read.get("c").unwrap().shape(), [2, 1]);
        std::fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn a_folder_that_is_not_finished_leaves_nothing() {
        let path = place("unfinished");
        let folder = Folder::create(&path).unwrap();
        folder.file("x", b"1").unwrap();
        assert!(matches!(Folder::create(&path), Err(Error::BeingWritten { .. })), "two writers of one place");
        let twice =
            [NamedTensor::dense("a", vec![1], vec![0.0]), NamedTensor::dense("a", vec![1], vec![0.0])];
        assert!(folder.tensors("model.safetensors", &twice).is_err());
        drop(folder);
        assert!(!path.exists() && parts_of(&path).is_empty());
    }

    #[test]
    fn a_part_that_a_killed_process_left_is_removed_and_others_are_not() {
        let path = place("killed");
        let folder = Folder::create(&path).unwrap();
        folder.file("x", b"1").unwrap();
        let part = folder.path().to_path_buf();
        // As after kill -9: the files without the lock.
        let Folder { lock, .. } = &mut *std::mem::ManuallyDrop::new(folder);
        drop(lock.take());
        let own = path.with_file_name(format!("{}.part", path.file_name().unwrap().to_string_lossy()));
        std::fs::create_dir_all(&own).unwrap();
        let next = Folder::create(&path).unwrap();
        assert!(!part.exists() && own.is_dir());
        assert_eq!(parts_of(&path), [next.path()]);
        next.finish().unwrap();
        std::fs::remove_dir(&own).unwrap();
        std::fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn nothing_is_overwritten() {
        let path = place("taken");
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("mine"), "1").unwrap();
        assert!(matches!(Folder::create(&path), Err(Error::Exists { .. })));
        assert!(matches!(Folder::create(&path.join("mine")), Err(Error::Exists { .. })));
        assert!(matches!(Folder::create(&path.join("no/deeper")), Err(Error::Io { .. })));
        assert!(matches!(Folder::create(&path.join("..")), Err(Error::Invalid { .. })));
        // Another process was faster.
        let late = place("late");
        let folder = Folder::create(&late).unwrap();
        std::fs::create_dir(&late).unwrap();
        assert!(folder.finish().is_err());
        assert!(late.is_dir() && parts_of(&late).is_empty());
        std::fs::remove_dir(&late).unwrap();
        std::fs::remove_dir_all(&path).unwrap();
    }
}
