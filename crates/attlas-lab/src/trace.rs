//! Traces: queries, keys and values of a model in a file.
//!
//! - **safetensors**: tensors `layer{l}.q`, `layer{l}.k`, `layer{l}.v` of shape `[heads, n, d]`, in F32, F64, F16 or
//!   BF16, keys as they enter the inner product. Metadata `scale` (a number; $1/\sqrt d$ if absent), `softcap` (caps
//!   the logits; none if absent) and `mask` (`causal`, the default, or `none`) are used; all other metadata are kept.
//! - **npz**: arrays with the same names, or `q`, `k`, `v` for one layer; `[n, d]` stands for one head.
//! - **npy**: three files `q.npy,k.npy,v.npy` in this order, or one file that stacks them, `[3, n, d]` or
//!   `[3, heads, n, d]`.
//!
//! Every number is checked to be finite when it is read.

use crate::extract::Extra;
use crate::npy::{self, Header, Npy};
use crate::output;
use crate::words::nearest;
use crate::workload::{LayerData, Workload};
use crate::{Error, Result};
use attlas::{Mask, Problem};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Arrays by name, with their shapes.
type Arrays = BTreeMap<String, Array>;

/// Numbers with a shape.
#[derive(Debug)]
struct Array {
    shape: Vec<usize>,
    data: Vec<f32>,
}

/// Reads one trace, or three `.npy` files of queries, keys and values. A non-finite number is an error.
pub fn read(paths: &[PathBuf]) -> Result<Workload> {
    read_with(paths, Numbers::Finite)
}

/// Reads like [`read`] but accepts non-finite numbers; the caller must find heads that contain them.
pub fn read_unchecked(paths: &[PathBuf]) -> Result<Workload> {
    read_with(paths, Numbers::Any)
}

/// Numbers that a trace may contain.
#[derive(Clone, Copy, PartialEq)]
enum Numbers {
    Finite,
    Any,
}

fn read_with(paths: &[PathBuf], numbers: Numbers) -> Result<Workload> {
    let kind = |p: &Path| p.extension().and_then(|e| e.to_str()).unwrap_or_default().to_ascii_lowercase();
    let mut metadata = BTreeMap::new();
    let (path, arrays) = match paths {
        [path] if kind(path) == "npz" => (path, read_npz(path)?),
        [path] if kind(path) == "npy" => (path, unstack(path, read_npy(path)?)?),
        [path] if kind(path) == "safetensors" => {
            let (arrays, meta) = read_safetensors(path)?;
            metadata = meta;
            (path, arrays)
        }
        [q, k, v] if [q, k, v].iter().all(|p| kind(p) == "npy") => {
            let mut arrays = Arrays::new();
            for (name, path) in [("q", q), ("k", k), ("v", v)] {
                arrays.insert(name.into(), read_npy(path)?);
            }
            (q, arrays)
        }
        _ => {
            let names: Vec<String> = paths.iter().map(|p| p.display().to_string()).collect();
            let meant = ["demo", "synthetic"].into_iter().chain(crate::synthetic::names());
            if let Some(meant) = nearest(&names.join(","), meant) {
                let meant = if matches!(meant, "demo" | "synthetic") {
                    meant.into()
                } else {
                    format!("synthetic:{meant}")
                };
                return Err(Error::Unknown { what: "source", found: names.join(","), meant });
            }
            return Err(Error::argument(
                "source",
                "demo, synthetic:KIND,n=…,d=…, a trace (.safetensors, .npz or .npy), q.npy,k.npy,v.npy, or a \
                 model (.gguf or a folder) with --text",
                format!("'{}'", names.join(",")),
            ));
        }
    };
    assemble(path, arrays, metadata, numbers)
}

fn bytes_of(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|e| Error::reading(path, e))
}

/// Reads the bytes of a safetensors trace; `path` names them in errors.
pub fn read_bytes(bytes: &[u8], path: &Path) -> Result<Workload> {
    let (arrays, metadata) = parse_safetensors(path, bytes)?;
    assemble(path, arrays, metadata, Numbers::Finite)
}

fn read_safetensors(path: &Path) -> Result<(Arrays, BTreeMap<String, String>)> {
    parse_safetensors(path, &bytes_of(path)?)
}

fn parse_safetensors(path: &Path, bytes: &[u8]) -> Result<(Arrays, BTreeMap<String, String>)> {
    let malformed = |e: safetensors::SafeTensorError| Error::Malformed {
        path: path.into(),
        format: "safetensors",
        reason: e.to_string(),
    };
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(malformed)?;
    let metadata = header.metadata().clone().unwrap_or_default().into_iter().collect();
    let file = SafeTensors::deserialize(bytes).map_err(malformed)?;
    let mut arrays = Arrays::new();
    for (name, view) in file.iter() {
        if layer_of(name).is_some() {
            arrays.insert(name.into(), from_view(path, name, &view)?);
        }
    }
    if arrays.is_empty() {
        let found = file.names().into_iter().map(|n| n.to_string()).collect();
        return Err(missing(path, "tensors layer{l}.q, layer{l}.k and layer{l}.v", found));
    }
    Ok((arrays, metadata))
}

fn from_view(path: &Path, name: &str, view: &TensorView<'_>) -> Result<Array> {
    let bytes = view.data();
    let words = |size: usize| bytes.chunks_exact(size);
    let data = match view.dtype() {
        Dtype::F32 => words(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        Dtype::F64 => words(8)
            .map(|b| f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]) as f32)
            .collect(),
        Dtype::F16 => words(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        Dtype::BF16 => words(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        other => return Err(shape(path, name, "elements in F32, F64, F16 or BF16", format!("{other:?}"))),
    };
    Ok(Array { shape: view.shape().to_vec(), data })
}

/// Arrays of a packed file may always take this many bytes,
const UNPACKED: usize = 4 << 20;
/// and this many times the bytes of the file. Numbers of attention hardly compress.
const UNPACKED_RATIO: usize = 64;

fn read_npz(path: &Path) -> Result<Arrays> {
    let malformed = |reason: String| Error::Malformed { path: path.into(), format: "npz", reason };
    let bytes = bytes_of(path)?;
    let bytes_packed = bytes.len();
    let mut room = UNPACKED.saturating_add(bytes.len().saturating_mul(UNPACKED_RATIO));
    let mut file = zip::ZipArchive::new(std::io::Cursor::new(bytes)).map_err(|e| malformed(e.to_string()))?;
    let mut names: Vec<String> = Vec::new();
    for name in file.file_names() {
        let name = name.map_err(|e| malformed(e.to_string()))?;
        names.push(name.trim_end_matches(".npy").to_string());
    }
    let mut arrays = Arrays::new();
    for name in names.iter().filter(|n| layer_of(n).is_some()) {
        let mut member = file.by_name(&format!("{name}.npy")).map_err(|e| malformed(e.to_string()))?;
        let wrong = |e: String| malformed(format!("{name}: {e}"));
        let size = usize::try_from(member.size()).unwrap_or(usize::MAX);
        let header = Header::read(&mut member).map_err(wrong)?;
        // The directory, the header and the bytes of the file must agree before anything is unpacked.
        match header.file_bytes() {
            Some(needed) if needed == size => {}
            _ => return Err(wrong(format!("{size} bytes, which is not what its shape needs"))),
        }
        room = room.checked_sub(size).ok_or_else(|| {
            let (file, most) = (bytes_packed, UNPACKED_RATIO);
            wrong(format!("its arrays unpack to more than {most} times the {file} bytes of the file"))
        })?;
        let mut elements = Vec::new();
        // Reading one byte more than needed detects a member longer than the directory says.
        let limit = member.size().saturating_add(1);
        (&mut member).take(limit).read_to_end(&mut elements).map_err(|e| wrong(e.to_string()))?;
        let Npy { shape, data } = header.array(&elements).map_err(wrong)?;
        arrays.insert(name.clone(), Array { shape, data });
    }
    if arrays.is_empty() {
        return Err(missing(path, "arrays q, k and v, or layer{l}.q and so on", names));
    }
    Ok(arrays)
}

fn read_npy(path: &Path) -> Result<Array> {
    let malformed = |reason| Error::Malformed { path: path.into(), format: "npy", reason };
    let Npy { shape, data } = npy::parse(&bytes_of(path)?).map_err(malformed)?;
    Ok(Array { shape, data })
}

/// Splits an array that stacks queries, keys and values.
fn unstack(path: &Path, array: Array) -> Result<Arrays> {
    if array.shape.first() != Some(&3) || !(3..=4).contains(&array.shape.len()) {
        let expected = "[3, n, d] or [3, heads, n, d], or three files q.npy,k.npy,v.npy";
        return Err(shape(path, "array", expected, format!("{:?}", array.shape)));
    }
    let size = array.data.len() / 3;
    let part = |i: usize| Array {
        shape: array.shape[1..].to_vec(),
        data: array.data[i * size..(i + 1) * size].to_vec(),
    };
    Ok(["q", "k", "v"].iter().enumerate().map(|(i, name)| (name.to_string(), part(i))).collect())
}

/// Splits a tensor name into its layer (`None` for a bare name) and `q`, `k` or `v`.
fn layer_of(name: &str) -> Option<(Option<usize>, &str)> {
    match name.split_once('.') {
        None => matches!(name, "q" | "k" | "v").then_some((None, name)),
        Some((layer, part)) => {
            let number = layer.strip_prefix("layer")?.parse().ok()?;
            matches!(part, "q" | "k" | "v").then_some((Some(number), part))
        }
    }
}

fn missing(path: &Path, expected: impl ToString, found: Vec<String>) -> Error {
    let mut found = found;
    found.sort();
    Error::MissingTensor { path: path.into(), expected: expected.to_string(), found }
}

fn shape(path: &Path, tensor: &str, expected: impl ToString, found: impl ToString) -> Error {
    Error::TensorShape {
        path: path.into(),
        tensor: tensor.into(),
        expected: expected.to_string(),
        found: found.to_string(),
    }
}

fn assemble(
    path: &Path,
    mut arrays: Arrays,
    metadata: BTreeMap<String, String>,
    accept: Numbers,
) -> Result<Workload> {
    let names: Vec<String> = arrays.keys().cloned().collect();
    let wrong = |what: &str, expected: &str, found: &str| {
        Error::argument(format!("{}: metadata {what}", path.display()), expected, format!("'{found}'"))
    };
    let mask = match metadata.get("mask").map(String::as_str) {
        None | Some("causal") => Mask::Causal,
        Some("none") => Mask::None,
        Some(other) => return Err(wrong("mask", "causal or none", other)),
    };
    let scale = match metadata.get("scale") {
        None => None,
        Some(text) => match text.parse::<f64>() {
            Ok(x) if x.is_finite() => Some(x),
            _ => return Err(wrong("scale", "a finite number", text)),
        },
    };
    let softcap = match metadata.get("softcap") {
        None => None,
        Some(text) => match text.parse::<f64>() {
            Ok(x) if x.is_finite() && x > 0.0 => Some(x),
            _ => return Err(wrong("softcap", "a positive number", text)),
        },
    };
    let mut numbers: Vec<Option<usize>> = names.iter().filter_map(|n| layer_of(n)).map(|(l, _)| l).collect();
    numbers.sort();
    numbers.dedup();
    let mut layers = Vec::new();
    for layer in numbers {
        let mut take = |part: &str| -> Result<(String, [usize; 3], Vec<f32>)> {
            let name = layer.map_or(part.to_string(), |l| format!("layer{l}.{part}"));
            let array = arrays.remove(&name).ok_or_else(|| missing(path, &name, names.clone()))?;
            let wrong = array.data.iter().position(|x| !x.is_finite());
            if let Some(index) = wrong.filter(|_| accept == Numbers::Finite) {
                let value = f64::from(array.data[index]);
                return Err(Error::NonFinite { path: path.into(), tensor: name, index, value });
            }
            let dims = match *array.shape {
                [h, n, d] => [h, n, d],
                [n, d] => [1, n, d],
                _ => return Err(shape(path, &name, "[heads, n, d] or [n, d]", format!("{:?}", array.shape))),
            };
            Ok((name, dims, array.data))
        };
        let (q_name, [heads, n_q, d], q) = take("q")?;
        let (k_name, [kv_heads, n_k, d_k], k) = take("k")?;
        let (v_name, [v_heads, n_v, d_v], v) = take("v")?;
        if d_k != d {
            let expected = format!("width {d} as in {q_name}");
            return Err(shape(path, &k_name, expected, format!("[{kv_heads}, {n_k}, {d_k}]")));
        }
        if (v_heads, n_v) != (kv_heads, n_k) {
            let expected = format!("{kv_heads} heads of {n_k} rows as in {k_name}");
            return Err(shape(path, &v_name, expected, format!("[{v_heads}, {n_v}, {d_v}]")));
        }
        let base = Problem::new(heads, n_q, d).with_softcap(softcap);
        let problem = Problem { n_kv_heads: kv_heads, n_k, d_v, scale: scale.unwrap_or(base.scale), ..base };
        problem.validate().map_err(|e| shape(path, &q_name, "sizes that fit together", e))?;
        layers.push(LayerData { layer, problem, q, k, v });
    }
    Ok(Workload { source: path.display().to_string(), mask, metadata, layers })
}

/// Element type of a written trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Elements {
    /// Single precision.
    #[default]
    F32,
    /// IEEE half precision: 11 significant bits; numbers of 65520 and above overflow.
    F16,
    /// Upper 16 bits of single precision: 8 significant bits.
    Bf16,
}

impl Elements {
    fn bytes(self, x: &[f32]) -> Vec<u8> {
        match self {
            Self::F32 => x.iter().flat_map(|v| v.to_le_bytes()).collect(),
            Self::F16 => x.iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes()).collect(),
            Self::Bf16 => x.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect(),
        }
    }

    fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::F16 => Dtype::F16,
            Self::Bf16 => Dtype::BF16,
        }
    }
}

/// A tensor by name: shape and elements.
type Named<'a> = (String, [usize; 3], &'a [f32]);

/// Returns the tensors of a workload in the order of writing.
fn tensors(workload: &Workload) -> impl Iterator<Item = Named<'_>> {
    workload.layers.iter().enumerate().flat_map(|(i, x)| {
        let l = x.layer.unwrap_or(i);
        let p = &x.problem;
        [
            (format!("layer{l}.q"), [p.n_heads, p.n_q, p.d], &x.q[..]),
            (format!("layer{l}.k"), [p.n_kv_heads, p.n_k, p.d], &x.k[..]),
            (format!("layer{l}.v"), [p.n_kv_heads, p.n_k, p.d_v], &x.v[..]),
        ]
    })
}

/// Writes a workload as a trace in single precision; see [`write_as`].
pub fn write(workload: &Workload, path: &Path) -> Result<()> {
    write_as(workload, &[], Elements::F32, path)
}

/// Writes a workload and further tensors as a trace, in the format given by the name's ending: `.safetensors`, `.npz`,
/// or `.npy` for a single head, stacked as `[3, n, d]`. NumPy files hold single precision. The file is written whole or
/// not at all ([`output`]).
pub fn write_as(workload: &Workload, extra: &[Extra], elements: Elements, path: &Path) -> Result<()> {
    let all: Vec<Named<'_>> =
        tensors(workload).chain(extra.iter().map(|e| (e.name.clone(), e.shape, &e.data[..]))).collect();
    check_name(path, elements)?;
    match extension(path) {
        "npz" => write_npz(&all, path),
        "npy" => write_npy(&all, path),
        _ => write_safetensors(workload, &all, elements, path),
    }
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|e| e.to_str()).unwrap_or_default()
}

/// Fails if a trace with these elements cannot be written under that name; call it before long work.
pub fn check_name(path: &Path, elements: Elements) -> Result<()> {
    match extension(path) {
        "safetensors" => Ok(()),
        "npz" | "npy" if elements == Elements::F32 => Ok(()),
        "npz" | "npy" => {
            Err(Error::argument("--dtype", "f32 for NumPy files", format!("{elements:?}").to_lowercase()))
        }
        other => Err(Error::argument("--out", "a name in .safetensors, .npz or .npy", format!("'.{other}'"))),
    }
}

fn write_safetensors(workload: &Workload, all: &[Named<'_>], elements: Elements, path: &Path) -> Result<()> {
    let invalid = |e: safetensors::SafeTensorError| Error::Malformed {
        path: path.into(),
        format: "safetensors",
        reason: e.to_string(),
    };
    let bytes: Vec<Vec<u8>> = all.iter().map(|(_, _, data)| elements.bytes(data)).collect();
    let views: Result<Vec<(&str, TensorView<'_>)>> = all
        .iter()
        .zip(&bytes)
        .map(|((name, shape, _), data)| {
            Ok((name.as_str(), TensorView::new(elements.dtype(), shape.to_vec(), data).map_err(invalid)?))
        })
        .collect();
    let mut metadata = workload.metadata.clone();
    metadata.insert("mask".into(), workload.mask.to_string());
    if let Some(x) = workload.layers.first() {
        metadata.insert("scale".into(), x.problem.scale.to_string());
        if let Some(cap) = x.problem.softcap {
            metadata.insert("softcap".into(), cap.to_string());
        }
    }
    let bytes = safetensors::serialize(views?, Some(metadata.into_iter().collect())).map_err(invalid)?;
    output::write(path, &bytes)
}

/// Writes one array in NumPy's format.
fn npy_into(
    shape: &[u64],
    data: impl Iterator<Item = f32>,
    out: &mut impl std::io::Write,
) -> std::io::Result<()> {
    use npyz::WriterBuilder;
    let mut writer = npyz::WriteOptions::new().default_dtype().shape(shape).writer(out).begin_nd()?;
    writer.extend(data)?;
    writer.finish()
}

fn write_npz(all: &[Named<'_>], path: &Path) -> Result<()> {
    let failed = |e: &dyn std::fmt::Display| Error::writing(path, std::io::Error::other(e.to_string()));
    let mut archive = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    let options = zip::write::SimpleFileOptions::default()
        .compression_method(zip::CompressionMethod::Stored)
        .large_file(true);
    for (name, shape, data) in all {
        archive.start_file(format!("{name}.npy"), options).map_err(|e| failed(&e))?;
        npy_into(&shape.map(|n| n as u64), data.iter().copied(), &mut archive).map_err(|e| failed(&e))?;
    }
    output::write(path, archive.finish().map_err(|e| failed(&e))?.get_ref())
}

fn write_npy(all: &[Named<'_>], path: &Path) -> Result<()> {
    let [q, k, v] = all else {
        return Err(Error::argument(
            "--out",
            "a single layer in a .npy file; use .npz or .safetensors",
            "several",
        ));
    };
    if [q, k, v].iter().any(|(_, shape, _)| shape[0] != 1 || *shape != q.1) {
        let found = format!("{} query heads, {} key heads", q.1[0], k.1[0]);
        return Err(Error::argument("--out", "a single head in a .npy file; use --heads or .npz", found));
    }
    let mut bytes = Vec::new();
    let data = [q, k, v].into_iter().flat_map(|(_, _, data)| data.iter().copied());
    npy_into(&[3, q.1[1] as u64, q.1[2] as u64], data, &mut bytes).map_err(|e| Error::writing(path, e))?;
    output::write(path, &bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Source;
    use npyz::WriterBuilder;

    /// A folder that is removed at the end of the test.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("attlas-lab-{}-{name}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn file(&self, name: &str) -> PathBuf {
            self.0.join(name)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn sample() -> Workload {
        let mut w =
            "synthetic:clustered,n=20,d=4,heads=4,kv_heads=2".parse::<Source>().unwrap().load().unwrap();
        w.layers[0].layer = Some(3);
        w.mask = Mask::Causal;
        w.metadata.insert("model".into(), "a test".into());
        w
    }

    fn read_one(path: &Path) -> Result<Workload> {
        read(&[path.to_path_buf()])
    }

    #[test]
    fn a_trace_comes_back_as_it_was_written() {
        let folder = Folder::new("round");
        let path = folder.file("t.safetensors");
        let w = sample();
        write(&w, &path).unwrap();
        let back = read_one(&path).unwrap();
        assert_eq!((back.mask, back.layers[0].layer), (Mask::Causal, Some(3)));
        assert_eq!(back.layers[0].problem, w.layers[0].problem);
        assert_eq!((&back.layers[0].q, &back.layers[0].v), (&w.layers[0].q, &w.layers[0].v));
        assert_eq!(back.metadata["model"], "a test");
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1, "a temporary file was left");
    }

    #[test]
    fn every_format_comes_back_as_it_was_written_up_to_its_rounding() {
        let folder = Folder::new("formats");
        let w = sample();
        let x = &w.layers[0];
        let extra = Extra { name: "layer3.k_pre".into(), shape: [2, 20, 4], data: x.k.clone() };
        for (name, elements, unit) in [
            ("t.safetensors", Elements::F16, 2f32.powi(-11)),
            ("b.safetensors", Elements::Bf16, 2f32.powi(-8)),
            ("t.npz", Elements::F32, 0.0),
        ] {
            let path = folder.file(name);
            write_as(&w, std::slice::from_ref(&extra), elements, &path).unwrap();
            let back = read_one(&path).unwrap();
            assert_eq!(back.layers[0].layer, Some(3));
            for (a, b) in x.q.iter().chain(&x.v).zip(back.layers[0].q.iter().chain(&back.layers[0].v)) {
                assert!((a - b).abs() <= unit * a.abs(), "{name}: {a} {b}");
            }
        }
        let one = LayerData {
            problem: Problem::new(1, 20, 4),
            q: x.q[..80].to_vec(),
            k: x.k[..80].to_vec(),
            v: x.v[..80].to_vec(),
            ..x.clone()
        };
        let single = Workload { layers: vec![one], ..w.clone() };
        write(&single, &folder.file("one.npy")).unwrap();
        let back = read_one(&folder.file("one.npy")).unwrap();
        assert_eq!((&back.layers[0].k, &back.layers[0].v), (&single.layers[0].k, &single.layers[0].v));
        assert!(write(&w, &folder.file("many.npy")).is_err(), "several heads in one .npy");
        assert!(write_as(&w, &[], Elements::F16, &folder.file("half.npz")).is_err());
        assert!(write(&w, &folder.file("trace.txt")).is_err());
        assert!(!folder.file("trace.txt").exists());
    }

    #[test]
    fn truncated_and_foreign_files_are_malformed() {
        let folder = Folder::new("cut");
        let path = folder.file("t.safetensors");
        write(&sample(), &path).unwrap();
        let whole = std::fs::read(&path).unwrap();
        for len in [0, 5, 8, 100, whole.len() / 2, whole.len() - 1] {
            std::fs::write(&path, &whole[..len]).unwrap();
            assert!(matches!(read_one(&path), Err(Error::Malformed { .. })), "{len} bytes");
        }
        for name in ["t.npy", "t.npz"] {
            std::fs::write(folder.file(name), b"not an array").unwrap();
            assert!(matches!(read_one(&folder.file(name)), Err(Error::Malformed { .. })), "{name}");
        }
        assert!(matches!(read_one(&folder.file("none.npz")), Err(Error::Io { .. })));
        assert!(matches!(read_one(&folder.file("model.gguf")), Err(Error::Argument { .. })));
    }

    #[test]
    fn wrong_shapes_and_values_are_named() {
        let folder = Folder::new("wrong");
        let path = folder.file("t.safetensors");
        let mut w = sample();
        w.layers[0].v[7] = f32::NAN;
        write(&w, &path).unwrap();
        match read_one(&path) {
            Err(Error::NonFinite { tensor, index: 7, .. }) => assert_eq!(tensor, "layer3.v"),
            other => panic!("{other:?}"),
        }
        let zeros = |n: usize| vec![0u8; 4 * n];
        let save = |tensors: &[(&str, Vec<usize>)], meta: &[(&str, &str)]| {
            let data: Vec<Vec<u8>> = tensors.iter().map(|(_, s)| zeros(s.iter().product())).collect();
            let views: Vec<_> = tensors
                .iter()
                .zip(&data)
                .map(|((n, s), d)| (n.to_string(), TensorView::new(Dtype::F32, s.clone(), d).unwrap()))
                .collect();
            let meta = meta.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
            std::fs::write(&path, safetensors::serialize(views, Some(meta)).unwrap()).unwrap();
            read_one(&path)
        };
        let q = ("layer0.q", vec![4, 6, 8]);
        let k = ("layer0.k", vec![2, 6, 8]);
        let v = ("layer0.v", vec![2, 6, 5]);
        assert_eq!(save(&[q.clone(), k.clone(), v.clone()], &[]).unwrap().layers[0].problem.d_v, 5);
        let refused =
            |tensors: &[(&str, Vec<usize>)]| matches!(save(tensors, &[]), Err(Error::TensorShape { .. }));
        assert!(refused(&[q.clone(), ("layer0.k", vec![2, 6, 7]), v.clone()]));
        assert!(refused(&[q.clone(), k.clone(), ("layer0.v", vec![2, 5, 5])]));
        assert!(refused(&[("layer0.q", vec![3, 6, 8]), k.clone(), v.clone()]));
        assert!(refused(&[("layer0.q", vec![48]), k.clone(), v.clone()]));
        assert!(matches!(save(&[q.clone(), k.clone()], &[]), Err(Error::MissingTensor { .. })));
        assert!(matches!(save(&[("other", vec![2])], &[]), Err(Error::MissingTensor { .. })));
        let all = [q, k, v];
        assert!(matches!(save(&all, &[("scale", "big")]), Err(Error::Argument { .. })));
        assert!(matches!(save(&all, &[("mask", "diagonal")]), Err(Error::Argument { .. })));
        assert_eq!(save(&all, &[("scale", "0.5"), ("mask", "none")]).unwrap().layers[0].problem.scale, 0.5);
    }

    #[test]
    fn numpy_files_are_read() {
        let folder = Folder::new("npy");
        let numbers: Vec<f64> = (0..30).map(f64::from).collect();
        let save = |name: &str, shape: &[u64], data: &[f64]| {
            let file = std::fs::File::create(folder.file(name)).unwrap();
            let mut writer =
                npyz::WriteOptions::new().default_dtype().shape(shape).writer(file).begin_nd().unwrap();
            writer.extend(data.iter().copied()).unwrap();
            writer.finish().unwrap();
        };
        save("q.npy", &[5, 2], &numbers[..10]);
        save("k.npy", &[5, 2], &numbers[10..20]);
        save("v.npy", &[5, 2], &numbers[20..]);
        save("all.npy", &[3, 5, 2], &numbers);
        let names: Vec<PathBuf> = ["q.npy", "k.npy", "v.npy"].iter().map(|n| folder.file(n)).collect();
        let three = read(&names).unwrap();
        let one = read_one(&folder.file("all.npy")).unwrap();
        for w in [&three, &one] {
            assert_eq!((w.layers[0].problem.n_q, w.layers[0].problem.d), (5, 2));
            assert_eq!((w.layers[0].q[1], w.layers[0].k[0], w.layers[0].v[9]), (1.0, 10.0, 29.0));
        }
        save("flat.npy", &[30], &numbers);
        assert!(matches!(read_one(&folder.file("flat.npy")), Err(Error::TensorShape { .. })));
        let whole = std::fs::read(folder.file("all.npy")).unwrap();
        std::fs::write(folder.file("all.npy"), &whole[..whole.len() - 3]).unwrap();
        assert!(matches!(read_one(&folder.file("all.npy")), Err(Error::Malformed { .. })));
    }

    #[test]
    fn npz_archives_are_read() {
        let folder = Folder::new("npz");
        let path = folder.file("head.npz");
        let mut archive = zip::ZipWriter::new(std::fs::File::create(&path).unwrap());
        for (name, start, method) in [
            ("q", 0u8, zip::CompressionMethod::Stored),
            ("k", 10, zip::CompressionMethod::Deflated),
            ("v", 20, zip::CompressionMethod::Stored),
        ] {
            let options = zip::write::SimpleFileOptions::default().compression_method(method);
            archive.start_file(format!("{name}.npy"), options).unwrap();
            let to = npyz::WriteOptions::new().default_dtype().shape(&[1, 5, 2]).writer(&mut archive);
            let mut writer = to.begin_nd().unwrap();
            writer.extend((start..start + 10).map(f32::from)).unwrap();
            writer.finish().unwrap();
        }
        archive.finish().unwrap();
        let w = read_one(&path).unwrap();
        assert_eq!((w.layers[0].problem.n_heads, w.layers[0].k[3]), (1, 13.0));
    }

    #[test]
    fn packed_files_that_unpack_to_far_more_are_refused() {
        let folder = Folder::new("bomb");
        let file = |name: &str, shape: &str, zeros: usize| {
            let path = folder.file(name);
            let mut archive = zip::ZipWriter::new(std::fs::File::create(&path).unwrap());
            let options =
                zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Deflated);
            for member in ["q", "k", "v"] {
                archive.start_file(format!("{member}.npy"), options).unwrap();
                let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n");
                let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
                bytes.extend((header.len() as u16).to_le_bytes());
                bytes.extend(header.as_bytes());
                bytes.resize(bytes.len() + zeros, 0);
                std::io::Write::write_all(&mut archive, &bytes).unwrap();
            }
            archive.finish().unwrap();
            read_one(&path)
        };
        assert!(file("small.npz", "(1, 5, 2)", 40).is_ok());
        let error = file("shape.npz", "(1, 5, 2)", 200 << 20).unwrap_err().to_string();
        assert!(error.contains("what its shape needs"), "{error}");
        let error = file("honest.npz", "(1, 5242880, 10)", 200 << 20).unwrap_err().to_string();
        assert!(error.contains("unpack to more than 64 times"), "{error}");
    }
}
