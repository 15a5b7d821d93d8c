//! A layer of the registry on data from a file: hidden states in, hidden states out.

use crate::decompose::{numbers, read_tensor};
use crate::output;
use crate::run::timed;
use crate::{Error, Result};
use attlas::layer::{Dense, LayerKind, LayerShape, Linear, WeightSpec, Weights};
use attlas::{Mask, Mat, MatRef, Options, Workspace};
use attlas_num::rng::StreamKey;
use attlas_num::tensor::Tensor;
use safetensors::SafeTensors;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Source of a layer's weights.
#[derive(Clone, Debug, PartialEq)]
pub enum WeightSource {
    /// A safetensors file: `NAME` or `NAME.weight`, `outputs × inputs`, and optionally `NAME.bias`.
    File(PathBuf),
    /// Normal numbers of variance one over the number of inputs, from this seed.
    Random(u64),
}

/// The layer to run, and its inputs.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Parameters of the layer.
    pub options: Options,
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// Width of one head's queries and keys; if absent, the input width divided by the number of heads.
    pub d: Option<usize>,
    /// Width of values of one head; `d` if absent.
    pub d_v: Option<usize>,
    /// With a causal mask, or without one.
    pub mask: Mask,
    /// Hidden states of another sequence, for keys and values; without a mask.
    pub context: Option<Tensor<f64>>,
    /// The weights.
    pub weights: WeightSource,
}

/// A weight that a layer takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WeightEntry {
    /// Its name.
    pub name: &'static str,
    /// Outputs and inputs.
    pub shape: [usize; 2],
    /// True if the layer works without it.
    pub optional: bool,
}

impl From<WeightSpec> for WeightEntry {
    fn from(w: WeightSpec) -> Self {
        Self { name: w.name, shape: [w.n_out, w.n_in], optional: w.optional }
    }
}

/// One run of a layer.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// The layer's id.
    pub layer: &'static str,
    /// Its parameters.
    pub params: String,
    /// Shape of input and output; the last number is the width of hidden states.
    pub shape: Vec<usize>,
    /// Tokens: the product of the other numbers.
    pub tokens: usize,
    /// Mask.
    pub mask: Mask,
    /// Tokens of the other sequence, if keys and values come from one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_tokens: Option<usize>,
    /// Query heads, key heads, widths of queries and values.
    pub heads: [usize; 4],
    /// The weights it takes.
    pub weights: Vec<WeightEntry>,
    /// Numbers in the weights given.
    pub parameters: usize,
    /// Numbers cached per token.
    pub cache_elements: usize,
    /// Counted operations, if the layer counts them.
    pub flops: Option<u64>,
    /// Norm of the output over that of the input.
    pub gain: f64,
    /// Seconds.
    pub seconds: f64,
}

/// Runs a layer on hidden states; the output has the shape of the input. A layer that folds its tokens into a grid takes
/// the grid from the shape of the input, unless the options name one.
pub fn run(
    kind: &'static LayerKind,
    x: &Tensor<f64>,
    settings: &Settings,
    ws: &mut Workspace,
) -> Result<(Record, Vec<f32>)> {
    let (grid, d_model) = match x.shape() {
        [grid @ .., d_model] if !grid.is_empty() && x.shape().iter().all(|&n| n > 0) => (grid, *d_model),
        other => {
            let expected = "hidden states: an array [tokens, width], or [grid …, width]";
            return Err(Error::argument("--input", expected, format!("shape {other:?}")));
        }
    };
    let d = match settings.d {
        Some(d) => d,
        None if settings.heads > 0 && d_model.is_multiple_of(settings.heads) => d_model / settings.heads,
        None => {
            let expected = format!("a number of heads that divides the width {d_model}, or --d");
            return Err(Error::argument("--heads", expected, settings.heads));
        }
    };
    let shape = LayerShape {
        d_model,
        n_heads: settings.heads,
        n_kv_heads: settings.kv_heads,
        d,
        d_v: settings.d_v.unwrap_or(d),
    };
    let mut options = settings.options.clone();
    if let Some(name) = kind.grid.filter(|name| grid.len() > 1 && options.get(name).is_none()) {
        options.set(name, grid.iter().map(usize::to_string).collect::<Vec<_>>().join("x"));
    }
    let specs = (kind.weights)(&shape, &options)?;
    let weights = match &settings.weights {
        WeightSource::Random(seed) => random(&specs, *seed),
        WeightSource::File(path) => read_weights(path, &specs)?,
    };
    let layer = kind.layer(&shape, &options, weights)?;
    let tokens = grid.iter().product();
    let context = settings.context.as_ref().map(|c| context_rows(c, d_model, settings.mask)).transpose()?;
    let data: Vec<f32> = x.data().iter().map(|&x| x as f32).collect();
    let mut out = vec![0.0f32; data.len()];
    let rows = MatRef::new(&data, tokens, d_model);
    let (ran, seconds) = timed(|| match (&context, settings.mask) {
        (Some(context), _) => layer.forward_cross(rows, context.as_ref(), &mut out, ws),
        (None, Mask::Causal) => layer.forward(rows, &mut *layer.new_cache(), &mut out, ws),
        (None, Mask::None) => layer.forward_all(rows, &mut out, ws),
    });
    ran?;
    let norm = |x: &[f32]| x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let record = Record {
        layer: kind.id,
        params: options.to_string(),
        shape: x.shape().to_vec(),
        tokens,
        mask: settings.mask,
        context_tokens: context.as_ref().map(Mat::rows),
        heads: [shape.n_heads, shape.n_kv_heads, shape.d, shape.d_v],
        weights: specs.into_iter().map(WeightEntry::from).collect(),
        parameters: layer.parameters(),
        cache_elements: layer.cache_elements(),
        flops: match context {
            Some(_) => None,
            None => layer.cost(settings.mask, 0, tokens).map(|c| c.flops()),
        },
        gain: norm(&out) / norm(&data).max(f64::MIN_POSITIVE),
        seconds,
    };
    Ok((record, out))
}

/// Returns the rows of the other sequence.
fn context_rows(context: &Tensor<f64>, d_model: usize, mask: Mask) -> Result<Mat<f32>> {
    if mask == Mask::Causal {
        let expected = "no causal mask: the tokens of another sequence come neither before nor after";
        return Err(Error::argument("--context", expected, "--causal"));
    }
    match context.shape() {
        [grid @ .., width] if *width == d_model => {
            let rows = grid.iter().product();
            Ok(Mat::from_vec(context.data().iter().map(|&x| x as f32).collect(), rows, d_model))
        }
        other => {
            let expected = format!("hidden states as wide as those of --input, [tokens, {d_model}]");
            Err(Error::argument("--context", expected, format!("shape {other:?}")))
        }
    }
}

/// Reads hidden states from a `.npy`, `.npz` or `.safetensors` file.
pub fn read_states(path: &Path, name: Option<&str>) -> Result<Tensor<f64>> {
    read_tensor(path, name)
}

/// Draws the weights that a layer requires; optional ones are left out.
fn random(specs: &[WeightSpec], seed: u64) -> Weights {
    let needed = specs.iter().filter(|w| !w.optional);
    needed
        .map(|w| {
            let mut rng = StreamKey::new(seed).named(w.name).rng();
            let size = 1.0 / (w.n_in as f64).sqrt();
            let weight = Mat::from_fn(w.n_out, w.n_in, |_, _| (size * rng.normal()) as f32);
            (w.name.to_string(), Box::new(Dense::new(weight)) as Box<dyn Linear>)
        })
        .collect()
}

/// Reads weights from a safetensors file; a tensor that the layer does not take is an error.
fn read_weights(path: &Path, specs: &[WeightSpec]) -> Result<Weights> {
    let bytes = std::fs::read(path).map_err(|e| Error::reading(path, e))?;
    let malformed = |reason: String| Error::Malformed { path: path.into(), format: "safetensors", reason };
    let file = SafeTensors::deserialize(&bytes).map_err(|e| malformed(e.to_string()))?;
    let mut found: BTreeMap<String, (Vec<usize>, Vec<f32>)> = BTreeMap::new();
    for (name, view) in file.tensors() {
        let data = numbers(path, &name, &view)?.into_iter().map(|x| x as f32).collect();
        found.insert(name.clone(), (view.shape().to_vec(), data));
    }
    let names: Vec<String> = found.keys().cloned().collect();
    let mut weights = Weights::new();
    for w in specs {
        let Some((shape, data)) =
            found.remove(w.name).or_else(|| found.remove(&format!("{}.weight", w.name)))
        else {
            if w.optional {
                continue;
            }
            return Err(Error::MissingTensor {
                path: path.into(),
                expected: format!("tensor {} of shape [{}, {}]", w.name, w.n_out, w.n_in),
                found: names,
            });
        };
        let fits = shape == [w.n_out, w.n_in] || (w.n_in == 1 && shape.iter().product::<usize>() == w.n_out);
        let wrong = |tensor: String, expected: String, found: &[usize]| Error::TensorShape {
            path: path.into(),
            tensor,
            expected,
            found: format!("{found:?}"),
        };
        if !fits {
            return Err(wrong(w.name.into(), format!("[{}, {}]", w.n_out, w.n_in), &shape));
        }
        let bias = found.remove(&format!("{}.bias", w.name));
        if let Some((shape, _)) = bias.as_ref().filter(|(shape, _)| *shape != [w.n_out]) {
            return Err(wrong(format!("{}.bias", w.name), format!("[{}]", w.n_out), shape));
        }
        let weight = Mat::from_vec(data, w.n_out, w.n_in);
        weights.insert(w.name.into(), Box::new(Dense { weight, bias: bias.map(|(_, b)| b) }));
    }
    if let Some(name) = found.keys().next() {
        let known: Vec<&str> = specs.iter().map(|w| w.name).collect();
        return Err(Error::TensorShape {
            path: path.into(),
            tensor: name.clone(),
            expected: format!("weights of the layer alone: {}", known.join(", ")),
            found: "one more".into(),
        });
    }
    Ok(weights)
}

/// Writes an array as `.npy`.
pub fn write_npy(path: &Path, shape: &[usize], data: &[f32]) -> Result<()> {
    use npyz::WriterBuilder;
    let failed = |e: std::io::Error| Error::writing(path, e);
    let shape: Vec<u64> = shape.iter().map(|&n| n as u64).collect();
    let mut bytes = Vec::new();
    let options = npyz::WriteOptions::new().default_dtype().shape(&shape);
    let mut writer = options.writer(&mut bytes).begin_nd().map_err(failed)?;
    writer.extend(data.iter().copied()).map_err(failed)?;
    writer.finish().map_err(failed)?;
    output::write(path, &bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use attlas::registry;

    fn settings(mask: Mask, options: Options) -> Settings {
        Settings {
            options,
            heads: 4,
            kv_heads: 4,
            d: None,
            d_v: None,
            mask,
            context: None,
            weights: WeightSource::Random(1),
        }
    }

    fn states(shape: &[usize]) -> Tensor<f64> {
        let n: usize = shape.iter().product();
        Tensor::new(shape, (0..n).map(|i| (i as f64 * 0.37).sin()).collect()).unwrap()
    }

    #[test]
    fn every_layer_runs_on_data_with_or_without_a_mask() {
        let mut ws = Workspace::single().unwrap();
        for kind in registry::LAYERS {
            let options = crate::atlas::example_options(kind);
            let x = states(&[4, 6, 64]);
            let ran: Vec<_> = [Mask::None, Mask::Causal]
                .map(|mask| run(kind, &x, &settings(mask, options.clone()), &mut ws))
                .into_iter()
                .collect();
            assert!(ran.iter().any(Result::is_ok), "{}: {ran:?}", kind.id);
            for (record, out) in ran.into_iter().flatten() {
                assert_eq!((record.shape, out.len()), (vec![4, 6, 64], 4 * 6 * 64));
                assert!(out.iter().all(|y| y.is_finite()) && record.gain > 0.0, "{}", kind.id);
            }
        }
    }

    #[test]
    fn keys_and_values_of_another_sequence_have_any_length() {
        let kind = registry::layer("feature_wise").unwrap();
        let mut ws = Workspace::single().unwrap();
        let x = states(&[6, 64]);
        let with = |mask, context: Option<&[usize]>| Settings {
            context: context.map(states),
            ..settings(mask, Options::new())
        };
        let own = run(kind, &x, &with(Mask::None, None), &mut ws).unwrap().1;
        let (record, same) = run(kind, &x, &with(Mask::None, Some(&[6, 64])), &mut ws).unwrap();
        assert_eq!((same, record.context_tokens), (own, Some(6)));
        let (record, out) = run(kind, &x, &with(Mask::None, Some(&[3, 5, 64])), &mut ws).unwrap();
        assert_eq!((out.len(), record.context_tokens), (6 * 64, Some(15)));
        for (mask, shape, words) in [(Mask::Causal, [6, 64], "causal"), (Mask::None, [6, 32], "as wide")] {
            let error = run(kind, &x, &with(mask, Some(&shape)), &mut ws).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn a_grid_comes_from_the_shape_unless_it_is_named() {
        let kind = registry::layer("axial").unwrap();
        let mut ws = Workspace::single().unwrap();
        let (record, first) =
            run(kind, &states(&[4, 6, 64]), &settings(Mask::None, Options::new()), &mut ws).unwrap();
        assert!(record.params.contains("dims=4x6"), "{}", record.params);
        let named = Options::new().with("dims", "4x6");
        let (_, flat) = run(kind, &states(&[24, 64]), &settings(Mask::None, named), &mut ws).unwrap();
        assert_eq!(first, flat);
    }
}
