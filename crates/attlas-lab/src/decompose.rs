//! Decompositions of a tensor from a file: canonical polyadic, Tucker, and block terms.

use crate::npy;
use crate::output;
use crate::run::timed;
use crate::{Error, Result};
use attlas_num::Mat;
use attlas_num::tensor::{Tensor, block_terms, cp, curve, tucker};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde::Serialize;
use std::io::Read;
use std::path::Path;

/// The form of a decomposition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Form {
    /// A sum of outer products (CP, PARAFAC), by alternating least squares.
    Cp,
    /// A core and one orthonormal basis per mode, improved by HOOI.
    Tucker,
    /// The same by one pass of singular value decompositions (ST-HOSVD).
    Hosvd,
    /// A sum of small Tucker forms (block terms).
    Btd,
}

/// Size of a decomposition.
#[derive(Clone, Debug, PartialEq)]
pub enum Size {
    /// Ranks: one number for all modes, or one per mode.
    Ranks(Vec<usize>),
    /// The smallest decomposition that reaches this relative error.
    Error(f64),
}

/// Settings of a decomposition.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The form.
    pub form: Form,
    /// Its size.
    pub size: Size,
    /// Block terms: number of blocks.
    pub blocks: usize,
    /// Number of starts; the best result is kept.
    pub restarts: usize,
    /// Seed of random starts.
    pub seed: u64,
}

/// Figures of a decomposition.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// Shape of the tensor.
    pub shape: Vec<usize>,
    /// Form of the decomposition.
    pub form: Form,
    /// Ranks: the number of terms for `cp`, one number per mode otherwise.
    pub ranks: Vec<usize>,
    /// Blocks of `btd`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocks: Option<usize>,
    /// Number of entries of the tensor.
    pub entries: usize,
    /// Numbers stored.
    pub parameters: usize,
    /// `‖T − T̂‖ / ‖T‖`.
    pub rel_error: f64,
    /// Status at the end of the iteration.
    pub status: String,
    /// Warnings, such as terms that cancel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// Seconds.
    pub seconds: f64,
}

/// A named factor.
#[derive(Clone, Debug, PartialEq)]
pub struct Factor {
    /// Its name in the file.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its entries, the last index contiguous.
    pub data: Vec<f64>,
}

impl Factor {
    fn matrix(name: impl Into<String>, m: &Mat<f64>) -> Self {
        Self { name: name.into(), shape: vec![m.rows(), m.cols()], data: m.data().to_vec() }
    }

    fn tensor(name: impl Into<String>, t: &Tensor<f64>) -> Self {
        Self { name: name.into(), shape: t.shape().to_vec(), data: t.data().to_vec() }
    }
}

/// Reads a tensor from a `.npy`, `.npz` or `.safetensors` file; `name` selects one of several.
pub fn read_tensor(path: &Path, name: Option<&str>) -> Result<Tensor<f64>> {
    let bytes = std::fs::read(path).map_err(|e| Error::reading(path, e))?;
    let malformed =
        |format: &'static str| move |reason: String| Error::Malformed { path: path.into(), format, reason };
    let (shape, data) = match path.extension().and_then(|e| e.to_str()) {
        Some("npy") => {
            let array = npy::parse::<f64>(&bytes).map_err(malformed("npy"))?;
            (array.shape, array.data)
        }
        Some("npz") => {
            let malformed = malformed("npz");
            let failed = |e: zip::result::ZipError| malformed(e.to_string());
            let mut file = zip::ZipArchive::new(std::io::Cursor::new(bytes)).map_err(failed)?;
            let mut names = Vec::new();
            for name in file.file_names() {
                names.push(name.map_err(failed)?.trim_end_matches(".npy").to_string());
            }
            let name = pick(path, name, names)?;
            let member = file.by_name(&format!("{name}.npy")).map_err(failed)?;
            let (mut whole, declared) = (Vec::new(), member.size());
            member.take(declared).read_to_end(&mut whole).map_err(|e| malformed(e.to_string()))?;
            let array = npy::parse::<f64>(&whole).map_err(malformed)?;
            (array.shape, array.data)
        }
        Some("safetensors") => {
            let malformed = malformed("safetensors");
            let file = SafeTensors::deserialize(&bytes).map_err(|e| malformed(e.to_string()))?;
            let names = file.names().into_iter().map(|n| n.to_string()).collect();
            let name = pick(path, name, names)?;
            let view = file.tensor(&name).map_err(|e| malformed(e.to_string()))?;
            (view.shape().to_vec(), numbers(path, &name, &view)?)
        }
        _ => {
            let expected = "a file that ends in .npy, .npz or .safetensors";
            return Err(Error::argument("the tensor", expected, path.display()));
        }
    };
    Tensor::new(&shape, data).map_err(|e| refused(&e))
}

/// Returns the array to read: the one named, or the only one.
fn pick(path: &Path, name: Option<&str>, mut found: Vec<String>) -> Result<String> {
    found.sort();
    match (name, &*found) {
        (Some(name), all) if all.iter().any(|n| n == name) => Ok(name.into()),
        (None, [only]) => Ok(only.clone()),
        (Some(name), _) => {
            Err(Error::MissingTensor { path: path.into(), expected: format!("tensor {name}"), found })
        }
        (None, _) => Err(Error::MissingTensor {
            path: path.into(),
            expected: "--tensor with one of its names".into(),
            found,
        }),
    }
}

pub(crate) fn numbers(path: &Path, name: &str, view: &TensorView<'_>) -> Result<Vec<f64>> {
    let words = |size: usize| view.data().chunks_exact(size);
    Ok(match view.dtype() {
        Dtype::F64 => words(8).filter_map(|b| b.try_into().ok()).map(f64::from_le_bytes).collect(),
        Dtype::F32 => {
            words(4).filter_map(|b| b.try_into().ok()).map(|b| f64::from(f32::from_le_bytes(b))).collect()
        }
        Dtype::F16 => words(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f64()).collect(),
        Dtype::BF16 => words(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f64()).collect(),
        other => {
            return Err(Error::TensorShape {
                path: path.into(),
                tensor: name.into(),
                expected: "elements in F32, F64, F16 or BF16".into(),
                found: format!("{other:?}"),
            });
        }
    })
}

fn refused(e: &attlas_num::tensor::Error) -> Error {
    Error::argument("the decomposition", "a tensor and ranks that fit", e)
}

/// Decomposes `t`.
pub fn decompose(t: &Tensor<f64>, settings: &Settings) -> Result<(Record, Vec<Factor>)> {
    let (outcome, seconds) = timed(|| match &settings.size {
        Size::Ranks(ranks) => fixed(t, settings, ranks),
        Size::Error(error) => smallest(t, settings, *error),
    });
    let (mut record, factors) = outcome?;
    record.seconds = seconds;
    Ok((record, factors))
}

/// Returns one rank per mode: a single number is capped at each mode's size.
fn per_mode(t: &Tensor<f64>, ranks: &[usize]) -> Result<Vec<usize>> {
    match ranks {
        [one] => Ok(t.shape().iter().map(|&n| (*one).min(n)).collect()),
        all if all.len() == t.order() => Ok(all.to_vec()),
        all => {
            let expected = format!("one number, or {} for a tensor of shape {:?}", t.order(), t.shape());
            Err(Error::argument("--rank", expected, format!("{all:?}")))
        }
    }
}

fn fixed(t: &Tensor<f64>, settings: &Settings, ranks: &[usize]) -> Result<(Record, Vec<Factor>)> {
    let failed = |e: attlas_num::tensor::Error| refused(&e);
    let seed = settings.seed;
    let restarts = settings.restarts.max(1);
    let blank = Record {
        shape: t.shape().to_vec(),
        form: settings.form,
        ranks: Vec::new(),
        blocks: None,
        entries: t.data().len(),
        parameters: 0,
        rel_error: 0.0,
        status: String::new(),
        warning: None,
        seconds: 0.0,
    };
    match settings.form {
        Form::Cp => {
            let &[rank] = ranks else {
                return Err(Error::argument("--rank", "one number of terms for cp", format!("{ranks:?}")));
            };
            let fit = cp::decompose(t, rank, &cp::Options { restarts, seed, ..Default::default() })
                .map_err(failed)?;
            let weights = Factor { name: "weights".into(), shape: vec![rank], data: fit.cp.weights.clone() };
            let modes = fit.cp.factors.iter().enumerate();
            let factors =
                std::iter::once(weights).chain(modes.map(|(m, f)| Factor::matrix(format!("factor{m}"), f)));
            let record = Record {
                ranks: vec![rank],
                parameters: fit.cp.parameters(),
                rel_error: fit.rel_error,
                status: format!("{:?}", fit.status).to_lowercase(),
                warning: fit.degeneracy.map(|d| d.to_string()),
                ..blank
            };
            Ok((record, factors.collect()))
        }
        Form::Tucker | Form::Hosvd => {
            let ranks = tucker::Ranks::Given(per_mode(t, ranks)?);
            tucker_of(t, settings, &ranks, blank)
        }
        Form::Btd => {
            let ranks = per_mode(t, ranks)?;
            let options = block_terms::Options { restarts, seed, ..Default::default() };
            let fit = block_terms::decompose(t, settings.blocks, &ranks, &options).map_err(failed)?;
            let mut factors = Vec::new();
            for (b, block) in fit.terms.blocks.iter().enumerate() {
                factors.push(Factor::tensor(format!("block{b}.core"), &block.core));
                let modes = block.factors.iter().enumerate();
                let named = |(m, f): (usize, &Option<Mat<f64>>)| {
                    f.as_ref().map(|f| Factor::matrix(format!("block{b}.factor{m}"), f))
                };
                factors.extend(modes.filter_map(named));
            }
            let record = Record {
                ranks,
                blocks: Some(settings.blocks),
                parameters: fit.terms.parameters(),
                rel_error: fit.rel_error,
                status: format!("{:?}", fit.status).to_lowercase(),
                ..blank
            };
            Ok((record, factors))
        }
    }
}

fn tucker_options(settings: &Settings) -> tucker::Options {
    let method = if settings.form == Form::Hosvd { tucker::Method::StHosvd } else { tucker::Method::Hooi };
    // ST-HOSVD's bases are the first start.
    let restarts = settings.restarts.saturating_sub(1);
    tucker::Options { method, restarts, seed: settings.seed, iters: 500, ..Default::default() }
}

fn tucker_of(
    t: &Tensor<f64>,
    settings: &Settings,
    ranks: &tucker::Ranks,
    blank: Record,
) -> Result<(Record, Vec<Factor>)> {
    let fit = tucker::decompose(t, ranks, &tucker_options(settings)).map_err(|e| refused(&e))?;
    let mut factors = vec![Factor::tensor("core", &fit.tucker.core)];
    let modes = fit.tucker.factors.iter().enumerate();
    factors.extend(modes.filter_map(|(m, f)| f.as_ref().map(|f| Factor::matrix(format!("factor{m}"), f))));
    let record = Record {
        ranks: fit.tucker.ranks().to_vec(),
        parameters: fit.tucker.parameters(),
        rel_error: fit.rel_error,
        status: format!("{:?}", fit.status).to_lowercase(),
        ..blank
    };
    Ok((record, factors))
}

/// Finds the smallest decomposition within `error`: by the truncation rule of Tucker, otherwise by doubling and
/// bisection of the rank (or of the number of blocks).
fn smallest(t: &Tensor<f64>, settings: &Settings, error: f64) -> Result<(Record, Vec<Factor>)> {
    if matches!(settings.form, Form::Tucker | Form::Hosvd) {
        let ranks = tucker::Ranks::RelError(error);
        let (record, _) = fixed(t, &Settings { restarts: 1, ..settings.clone() }, &[1])?;
        return tucker_of(t, settings, &ranks, record);
    }
    let at = |size: usize| match settings.form {
        Form::Btd => {
            let block: Vec<usize> = t.shape().iter().map(|&n| n.min(2)).collect();
            fixed(t, &Settings { blocks: size, ..settings.clone() }, &block)
        }
        _ => fixed(t, settings, &[size]),
    };
    let longest = t.shape().iter().copied().max().unwrap_or(1).max(1);
    let most = (t.data().len() / longest).max(1);
    let (mut below, mut size) = (0, 1);
    let mut best = at(size)?;
    while best.0.rel_error > error {
        if size >= most {
            let found = format!("{:.3e} at size {size}", best.0.rel_error);
            return Err(Error::argument("--error", "an error that the form can reach", found));
        }
        below = size;
        size = (2 * size).min(most);
        best = at(size)?;
    }
    while size - below > 1 {
        let middle = below + (size - below) / 2;
        let fit = at(middle)?;
        if fit.0.rel_error <= error {
            (size, best) = (middle, fit);
        } else {
            below = middle;
        }
    }
    Ok(best)
}

/// Returns the error against numbers stored, for ranks 1, 2, 4, … up to `most`.
pub fn error_curve(t: &Tensor<f64>, settings: &Settings, most: usize) -> Result<Vec<curve::Point>> {
    let mut ranks: Vec<usize> =
        std::iter::successors(Some(1usize), |r| Some(2 * r)).take_while(|&r| r < most).collect();
    ranks.push(most.max(1));
    let failed = |e: attlas_num::tensor::Error| refused(&e);
    match settings.form {
        Form::Cp => {
            let options =
                cp::Options { restarts: settings.restarts.max(1), seed: settings.seed, ..Default::default() };
            curve::polyadic(t, &ranks, &options).map_err(failed)
        }
        Form::Tucker | Form::Hosvd => {
            let mut lists: Vec<Vec<usize>> = Vec::new();
            for rank in ranks {
                lists.push(per_mode(t, &[rank])?);
            }
            lists.dedup();
            curve::tucker(t, &lists, &tucker_options(settings)).map_err(failed)
        }
        Form::Btd => ranks
            .into_iter()
            .map(|blocks| {
                let block: Vec<usize> = t.shape().iter().map(|&n| n.min(2)).collect();
                let (r, _) = fixed(t, &Settings { blocks, ..settings.clone() }, &block)?;
                Ok(curve::Point {
                    ranks: vec![blocks],
                    parameters: r.parameters,
                    rel_error: r.rel_error,
                    degenerate: false,
                })
            })
            .collect(),
    }
}

/// Writes factors to a `.npz` or `.safetensors` file, in double precision.
pub fn write_factors(path: &Path, factors: &[Factor]) -> Result<()> {
    let failed = |e: &dyn std::fmt::Display| Error::writing(path, std::io::Error::other(e.to_string()));
    let bytes = match path.extension().and_then(|e| e.to_str()) {
        Some("npz") => {
            use npyz::WriterBuilder;
            let mut archive = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
            let plain = zip::write::SimpleFileOptions::default()
                .compression_method(zip::CompressionMethod::Stored)
                .large_file(true);
            for f in factors {
                archive.start_file(format!("{}.npy", f.name), plain).map_err(|e| failed(&e))?;
                let shape: Vec<u64> = f.shape.iter().map(|&n| n as u64).collect();
                let options = npyz::WriteOptions::new().default_dtype().shape(&shape);
                let mut writer = options.writer(&mut archive).begin_nd().map_err(|e| failed(&e))?;
                writer.extend(f.data.iter().copied()).map_err(|e| failed(&e))?;
                writer.finish().map_err(|e| failed(&e))?;
            }
            archive.finish().map_err(|e| failed(&e))?.into_inner()
        }
        Some("safetensors") => {
            let stored: Vec<(String, Vec<usize>, Vec<u8>)> = factors
                .iter()
                .map(|f| {
                    (f.name.clone(), f.shape.clone(), f.data.iter().flat_map(|x| x.to_le_bytes()).collect())
                })
                .collect();
            let views: std::result::Result<Vec<_>, _> = stored
                .iter()
                .map(|(name, shape, bytes)| {
                    TensorView::new(Dtype::F64, shape.clone(), bytes).map(|view| (name.as_str(), view))
                })
                .collect();
            safetensors::serialize(views.map_err(|e| failed(&e))?, None).map_err(|e| failed(&e))?
        }
        _ => {
            return Err(Error::argument("--out", "a name that ends in .npz or .safetensors", path.display()));
        }
    };
    output::write(path, &bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(form: Form, size: Size) -> Settings {
        Settings { form, size, blocks: 1, restarts: 3, seed: 1 }
    }

    /// A tensor of rank two.
    fn rank_two() -> Tensor<f64> {
        let entry = |flat: usize| {
            let (i, j, k) = ((flat / 12) as f64, (flat / 3 % 4) as f64, (flat % 3) as f64);
            (i + 1.0) * (j + 1.0) * (k + 1.0) + (i * i - 2.0) * (j - 1.5) * (2.0 - k)
        };
        Tensor::from_flat_fn(&[5, 4, 3], entry).unwrap()
    }

    #[test]
    fn an_error_gives_the_smallest_rank_that_reaches_it() {
        let t = rank_two();
        let (cp, factors) = decompose(&t, &settings(Form::Cp, Size::Error(1e-6))).unwrap();
        assert_eq!((cp.ranks.as_slice(), cp.parameters), (&[2][..], 26));
        assert_eq!(
            factors.iter().map(|f| f.name.as_str()).collect::<Vec<_>>(),
            ["weights", "factor0", "factor1", "factor2"]
        );
        let (tucker, factors) = decompose(&t, &settings(Form::Tucker, Size::Error(1e-6))).unwrap();
        assert_eq!(tucker.ranks, [2, 2, 2]);
        assert_eq!(factors[0].shape, [2, 2, 2]);
    }

    #[test]
    fn factors_written_and_read_again_are_the_same() {
        let folder = std::env::temp_dir().join(format!("attlas-decompose-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (_, factors) = decompose(&rank_two(), &settings(Form::Hosvd, Size::Ranks(vec![2]))).unwrap();
        for name in ["f.npz", "f.safetensors"] {
            let path = folder.join(name);
            write_factors(&path, &factors).unwrap();
            for f in &factors {
                let back = read_tensor(&path, Some(&f.name)).unwrap();
                assert_eq!((back.shape(), back.data()), (&*f.shape, &*f.data));
            }
            let error = read_tensor(&path, None).unwrap_err().to_string();
            assert!(error.contains("--tensor") && error.contains("core"), "{error}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn curves_fall_and_ranks_that_do_not_fit_are_refused() {
        let t = rank_two();
        for form in [Form::Cp, Form::Tucker, Form::Btd] {
            let points = error_curve(&t, &settings(form, Size::Ranks(vec![1])), 3).unwrap();
            assert!(
                points.windows(2).all(|p| p[1].rel_error <= p[0].rel_error + 1e-6),
                "{form:?} {points:?}"
            );
        }
        let error = decompose(&t, &settings(Form::Tucker, Size::Ranks(vec![1, 2]))).unwrap_err().to_string();
        assert!(error.contains("one number, or 3"), "{error}");
    }
}
