//! Queries, keys and values of a model reading a text: causal models while they read, encoders in one pass over the
//! whole text, with the tokens they expect around it.

use crate::text::Text;
use crate::workload::{LayerData, Workload};
use crate::{Error, Result};
use attlas::{Mask, Options, Problem, Schedule, TensorRef, Workspace, registry};
use attlas_model::bert::Batch;
use attlas_model::decoder::Observer;
use attlas_model::recipe::Numbers;
use attlas_model::{Decoder, Encoder, Model, Recipe, Rows};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Settings of an extraction.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Layers, counted from 0; all if absent.
    pub layers: Option<Numbers>,
    /// Query heads, counted from 0; all if absent. Key heads that keep any must all keep the same number.
    pub heads: Option<Numbers>,
    /// Also extract queries and keys before rotation.
    pub before_rotation: bool,
    /// Put the beginning-of-text token before the text.
    pub bos: bool,
    /// Threads; 0 uses all that the machine offers.
    pub threads: usize,
}

/// A further tensor of a trace, beside queries, keys and values.
#[derive(Clone, Debug)]
pub struct Extra {
    /// Its name, such as `layer3.k_pre`.
    pub name: String,
    /// `[heads, n, d]`.
    pub shape: [usize; 3],
    /// Contiguous.
    pub data: Vec<f32>,
}

/// Result of an extraction.
#[derive(Clone, Debug)]
pub struct Extracted {
    /// Queries, keys after rotation, and values.
    pub workload: Workload,
    /// `layer{l}.q_pre` and `layer{l}.k_pre`, where requested.
    pub extra: Vec<Extra>,
}

/// Runs the model over the text. `progress` receives layers done and layers in all.
pub fn extract(
    model: &Arc<Model>,
    text: &Text,
    settings: &Settings,
    progress: &mut (dyn FnMut(usize, usize) + Send),
    stop: &AtomicBool,
) -> Result<Extracted> {
    let c = &model.config;
    if model.weights.has_other_attention() {
        let what = "extracting queries, keys and values of layers that attend as a whole".into();
        return Err(attlas_model::Error::Unsupported { what }.into());
    }
    let layers: Vec<usize> = match &settings.layers {
        Some(layers) => {
            layers.check("a layer", c.n_layers)?;
            layers.iter().collect()
        }
        None => (0..c.n_layers).collect(),
    };
    let heads = Heads::choose(settings.heads.as_ref(), c.n_heads, c.n_kv_heads)?;
    let mut tokens = text.tokens.clone();
    let encoder = c.architecture.is_encoder();
    if encoder {
        // Tokens that the model expects around a text, such as [CLS] and [SEP].
        if let [before, .., after] = model.tokenizer.encode("", true)?[..] {
            tokens.insert(0, before);
            tokens.push(after);
        }
    } else if settings.bos {
        tokens.insert(0, bos(model)?);
    }
    let schedule = Schedule { threads: settings.threads, ..Schedule::default() };
    let n = tokens.len();
    let take = |heads: &[usize]| vec![0.0f32; heads.len() * n * c.head_dim];
    let collected = layers
        .iter()
        .map(|&l| {
            let pre = settings.before_rotation;
            let layer = Collected {
                q: take(&heads.query),
                k: take(&heads.key),
                v: take(&heads.key),
                q_pre: pre.then(|| take(&heads.query)),
                k_pre: pre.then(|| take(&heads.key)),
            };
            (l, layer)
        })
        .collect();
    let mut collector = Collector {
        layers: collected,
        heads: &heads,
        d: c.head_dim,
        n,
        sizes: (c.n_heads, c.n_kv_heads),
        done: 0,
        progress,
        stop,
    };
    if encoder {
        encode(model, &tokens, Workspace::new(schedule)?, &mut collector)?;
    } else {
        let mut decoder = Decoder::new(model.clone(), &Recipe::default(), schedule)?;
        decoder.forward_observed(&tokens, Rows::None, &mut Vec::new(), &mut collector)?;
    }

    let problem = Problem::new(heads.query.len(), n, c.head_dim).with_kv_heads(heads.key.len());
    let problem = problem.with_softcap(c.attention_softcap);
    let mut extra = Vec::new();
    let mut data = Vec::new();
    for (l, x) in collector.layers {
        for (name, heads, part) in [("q_pre", &heads.query, x.q_pre), ("k_pre", &heads.key, x.k_pre)] {
            extra.extend(part.map(|data| Extra {
                name: format!("layer{l}.{name}"),
                shape: [heads.len(), n, c.head_dim],
                data,
            }));
        }
        data.push(LayerData { layer: Some(l), problem, q: x.q, k: x.k, v: x.v });
    }
    let workload = Workload {
        source: text.source.clone(),
        mask: if encoder { Mask::None } else { Mask::Causal },
        metadata: metadata(model, text, n, settings, &heads),
        layers: data,
    };
    Ok(Extracted { workload, extra })
}

/// Runs an encoder and shows every layer to `collector`.
fn encode(model: &Model, tokens: &[u32], mut ws: Workspace, collector: &mut Collector<'_>) -> Result<()> {
    let encoder = Encoder::new(model)?;
    let batch = Batch::new(&[tokens])?;
    let plans = encoder.plans(&batch, registry::baseline(), &Options::new())?;
    encoder.forward(&batch, &plans, &mut ws, |layer, x| {
        let rows = |x: &TensorRef<'_, f32>| -> Vec<f32> {
            let tokens = (0..x.dims()[2]).flat_map(|i| (0..x.dims()[1]).map(move |h| (h, i)));
            tokens.flat_map(|(h, i)| x.head(0, h).row(i).to_vec()).collect()
        };
        let (q, k, v) = (rows(&x.q), rows(&x.k), rows(&x.v));
        collector.before_rotation(layer, 0, &q, &k);
        collector.projected(layer, 0, &q, &k, &v);
        if layer < collector.layers() {
            collector.attended(layer, 0, &q);
        }
    })?;
    Ok(())
}

/// Returns the beginning-of-text token; an error if the model has none.
pub(crate) fn bos(model: &Model) -> Result<u32> {
    model
        .tokenizer
        .bos()
        .ok_or_else(|| Error::argument("--bos", "a model with a token that begins a text", "one without"))
}

fn metadata(
    model: &Model,
    text: &Text,
    n: usize,
    settings: &Settings,
    heads: &Heads,
) -> BTreeMap<String, String> {
    let c = &model.config;
    let list = |x: &[usize]| x.iter().copied().collect::<Numbers>().to_string();
    let mut out: BTreeMap<String, String> = [
        ("architecture", c.architecture.name().to_string()),
        ("text", text.source.clone()),
        ("text_sha256", text.sha256.clone()),
        ("tokens", n.to_string()),
        ("bos", settings.bos.to_string()),
        ("heads", list(&heads.query)),
        ("kv_heads", list(&heads.key)),
        ("model_layers", c.n_layers.to_string()),
        ("model_heads", c.n_heads.to_string()),
        ("model_kv_heads", c.n_kv_heads.to_string()),
        ("producer", concat!("attlas ", env!("CARGO_PKG_VERSION")).to_string()),
    ]
    .into_iter()
    .map(|(k, v)| (k.to_string(), v))
    .collect();
    if let Some(rope) = &c.rope {
        let layout = format!("{:?}", rope.layout).to_ascii_lowercase();
        out.insert(
            "rope".into(),
            format!("base {}, dim {}, {layout}, {:?}", rope.base, rope.dim, rope.scaling),
        );
    }
    out
}

/// Heads to keep.
#[derive(Debug)]
struct Heads {
    query: Vec<usize>,
    key: Vec<usize>,
}

impl Heads {
    fn choose(wanted: Option<&Numbers>, n_heads: usize, n_kv_heads: usize) -> Result<Self> {
        let Some(wanted) = wanted else {
            return Ok(Self { query: (0..n_heads).collect(), key: (0..n_kv_heads).collect() });
        };
        wanted.check("a head", n_heads)?;
        let size = n_heads / n_kv_heads;
        let query: Vec<usize> = wanted.iter().collect();
        let mut key: Vec<usize> = query.iter().map(|h| h / size).collect();
        key.dedup();
        let uneven =
            key.iter().any(|g| query.iter().filter(|h| *h / size == *g).count() * key.len() != query.len());
        if query.is_empty() || uneven {
            let expected =
                format!("as many of every key head; each has {size} query heads, such as 0-{}", size - 1);
            return Err(Error::argument("heads", expected, wanted));
        }
        Ok(Self { query, key })
    }
}

struct Collected {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    q_pre: Option<Vec<f32>>,
    k_pre: Option<Vec<f32>>,
}

struct Collector<'a> {
    layers: BTreeMap<usize, Collected>,
    heads: &'a Heads,
    d: usize,
    n: usize,
    /// Query and key heads of the model.
    sizes: (usize, usize),
    done: usize,
    progress: &'a mut (dyn FnMut(usize, usize) + Send),
    stop: &'a AtomicBool,
}

/// Copies `heads` of `[tokens, n_heads, d]` to rows from `first` on of `[heads, n, d]`.
fn gather(x: &[f32], n_heads: usize, heads: &[usize], d: usize, first: usize, n: usize, out: &mut [f32]) {
    for (out, &h) in out.chunks_exact_mut(n * d).zip(heads) {
        let rows = out[first * d..].chunks_exact_mut(d);
        rows.zip(x.chunks_exact(n_heads * d))
            .for_each(|(row, token)| row.copy_from_slice(&token[h * d..][..d]));
    }
}

impl Observer for Collector<'_> {
    fn layers(&self) -> usize {
        self.layers.keys().last().map_or(0, |l| l + 1)
    }

    fn interrupted(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn before_rotation(&mut self, layer: usize, first: usize, q: &[f32], k: &[f32]) {
        let (h, g) = self.sizes;
        let Some(x) = self.layers.get_mut(&layer) else { return };
        if let (Some(q_pre), Some(k_pre)) = (&mut x.q_pre, &mut x.k_pre) {
            gather(q, h, &self.heads.query, self.d, first, self.n, q_pre);
            gather(k, g, &self.heads.key, self.d, first, self.n, k_pre);
        }
    }

    fn projected(&mut self, layer: usize, first: usize, q: &[f32], k: &[f32], v: &[f32]) {
        let (h, g) = self.sizes;
        if let Some(x) = self.layers.get_mut(&layer) {
            gather(q, h, &self.heads.query, self.d, first, self.n, &mut x.q);
            gather(k, g, &self.heads.key, self.d, first, self.n, &mut x.k);
            gather(v, g, &self.heads.key, self.d, first, self.n, &mut x.v);
        }
    }

    fn attended(&mut self, _: usize, _: usize, o: &[f32]) {
        let tokens = o.len() / (self.sizes.0 * self.d).max(1);
        self.done += tokens;
        let total = self.layers() * self.n;
        (self.progress)(self.done.min(total), total);
    }
}
