//! Export of models as GGUF files that llama.cpp runs: decoders of the Llama and Qwen families under their own names,
//! and latent attention as `deepseek2`. Products of factors are multiplied out; everything else is copied as stored.
//!
//! llama.cpp normalises every latent and has no biases in that layer: a constant cannot be put beside a latent as in
//! [`convert::write`](crate::convert::write). The epsilon of the norm replaces it: with
//! $\operatorname{norm}(x) = w \odot x / \sqrt{\operatorname{mean}(x^2) + \epsilon}$, a latent scaled down until
//! $\operatorname{mean}(x^2) \le 2^{-24}\,\epsilon$ is divided by $\sqrt\epsilon$ to rounding, and $w$ undoes both
//! scales. The bound holds for every token: the input of a layer is a normalised vector $u$ with
//! $\lVert u \rVert^2 \le d$, times the weight $D$ of its norm, hence
//! $\lVert A D u \rVert^2 \le d\,\lVert A D \rVert_F^2$.

use crate::compress::Elements;
use crate::config::{Architecture, LatentConfig, ModelConfig};
use crate::error::{Error, Result};
use crate::gguf::{Entries, write_file};
use crate::linear::Linear;
use crate::model::Model;
use crate::tensor::Tensor;
use crate::weights::{DecoderLayer, DecoderWeights, GGUF_DECODER, LatentAttention, Weights, join_kv_b};
use attlas_num::rope::{Layout, Rope, Scaling};
use std::borrow::Cow;
use std::path::Path;

/// Largest mean square of a scaled latent over the epsilon of its norm.
const NEGLIGIBLE: f64 = 1.0 / (1 << 24) as f64;

/// Returns true if the name of the output is that of a GGUF file.
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"))
}

fn refuse<T>(what: &str) -> Result<T> {
    let what = format!("{what} in a GGUF file");
    Err(Error::UseInstead { what, instead: "a folder (--out without .gguf)".into() })
}

/// Fails if [`write_gguf`] would refuse the model.
pub fn check_gguf(model: &Model) -> Result<()> {
    metadata(model)?;
    model.tokenizer.to_gguf(model.config.vocab).map(drop)
}

/// Fails if [`write_gguf`] would refuse the result of [`convert`](crate::convert::convert) for the model, with or
/// without a latent of queries.
pub fn check_latent_gguf(model: &Model, rank_q: Option<usize>) -> Result<()> {
    let Weights::Decoder(weights) = &model.weights else { return refuse("an encoder") };
    plain_rotation(&model.config)?;
    query_latent(rank_q, model.config.n_layers)?;
    unbiased(weights)?;
    model.tokenizer.to_gguf(model.config.vocab).map(drop)
}

/// Refuses depths for which llama.cpp ignores the latent of queries in the file.
fn query_latent(rank_q: Option<usize>, n_layers: usize) -> Result<()> {
    if rank_q.is_some() && matches!(n_layers, 26 | 27 | 48) {
        return refuse(&format!("a latent of queries in a model of {n_layers} layers"));
    }
    Ok(())
}

/// Writes a model as a GGUF file. Multiplied-out products, and the maps of latents, whose form differs in the file, are
/// stored as `elements`.
pub fn write_gguf(model: &Model, elements: Elements, path: &Path) -> Result<()> {
    let mut entries = metadata(model)?;
    entries.extend(&model.tokenizer.to_gguf(model.config.vocab)?);
    // A model from a GGUF file has its template among the entries of its tokeniser.
    if let (Some(template), Some(_)) = (&model.chat_template, &model.folder) {
        entries.text("tokenizer.chat_template", template);
    }
    write_file(path, &entries, &tensors(model, elements)?)
}

/// Returns the name of the model's architecture in llama.cpp, and the layout of rotated pairs there.
fn family(c: &ModelConfig) -> Result<(&'static str, Layout)> {
    if c.windows.iter().any(Option::is_some) {
        return refuse("sliding windows");
    }
    match c.architecture {
        Architecture::DeepseekV2 | Architecture::DeepseekV3 if c.experts.is_none() => {
            Ok(("deepseek2", Layout::Interleaved))
        }
        Architecture::Llama | Architecture::Mistral if c.is_plain() => Ok(("llama", Layout::Interleaved)),
        Architecture::Qwen2 if c.is_plain() => Ok(("qwen2", Layout::Half)),
        Architecture::Qwen3 if c.is_plain() => Ok(("qwen3", Layout::Half)),
        other => refuse(&format!("a {} model", other.name())),
    }
}

/// Returns the rotation of latent attention, which llama.cpp can scale only as DeepSeek does.
fn plain_rotation(c: &ModelConfig) -> Result<&Rope> {
    match &c.rope {
        Some(rope) if matches!(rope.scaling, Scaling::None) => Ok(rope),
        Some(_) => refuse("latent attention with scaled rotary frequencies"),
        None => refuse("a model without rotary positions"),
    }
}

/// Fails if a map has a bias, for which llama.cpp's `deepseek2` has no tensor.
fn unbiased(weights: &DecoderWeights) -> Result<()> {
    let attention = |l: &DecoderLayer| {
        let maps = match &l.latent {
            Some(latent) => {
                let m = latent.maps();
                vec![Some(&m.q), m.q_a.as_ref(), Some(&m.kv_a), Some(&m.kv_b), Some(&m.o)]
            }
            None => vec![Some(&l.q), Some(&l.k), Some(&l.v), Some(&l.o)],
        };
        maps.into_iter().flatten().any(|m| m.bias().is_some())
    };
    let feed_forward = |l: &DecoderLayer| [&l.gate, &l.up, &l.down].iter().any(|m| m.bias().is_some());
    let no_place = |of: &str| refuse(&format!("biases of {of}, for which deepseek2 has no tensors,"));
    if weights.layers.iter().any(attention) {
        return no_place("latent attention");
    }
    if weights.layers.iter().any(feed_forward) {
        return no_place("feed-forward layers beside latent attention");
    }
    Ok(())
}

fn metadata(model: &Model) -> Result<Entries> {
    let c = &model.config;
    let Weights::Decoder(weights) = &model.weights else { return refuse("an encoder") };
    if weights.layers.iter().any(|l| l.attention.is_some()) {
        return refuse("attention of another kind");
    }
    let (name, layout) = family(c)?;
    let Some(rope) = &c.rope else { return refuse("a model without rotary positions") };
    if name == "llama" && rope.dim != c.head_dim {
        return refuse("a Llama that rotates a part of its heads");
    }
    let mut out = Entries::default();
    out.text("general.architecture", name);
    out.integer("general.quantization_version", 2)?;
    let key = |suffix: &str| format!("{name}.{suffix}");
    for (suffix, value) in [
        ("block_count", c.n_layers),
        ("context_length", c.max_positions),
        ("embedding_length", c.hidden),
        ("feed_forward_length", c.intermediate),
        ("vocab_size", c.vocab),
        ("attention.head_count", c.n_heads),
        ("rope.dimension_count", rope.dim),
    ] {
        out.integer(&key(suffix), value)?;
    }
    out.number(&key("attention.layer_norm_rms_epsilon"), c.norm_eps);
    out.number(&key("rope.freq_base"), rope.base);
    let Some(l) = c.latent else {
        let biased = |m: &Linear| m.bias().is_some();
        let others = |l: &DecoderLayer| [&l.o, &l.gate, &l.up, &l.down].into_iter().any(biased);
        if name != "llama" && weights.layers.iter().any(others) {
            let what = "biases of feed-forward layers or attention's output";
            return refuse(&format!("{what}, for which {name} has no tensors,"));
        }
        for suffix in ["key_length", "value_length"] {
            out.integer(&key(&format!("attention.{suffix}")), c.head_dim)?;
        }
        out.integer(&key("attention.head_count_kv"), c.n_kv_heads)?;
        match &rope.scaling {
            Scaling::None => {}
            Scaling::Linear { factor } => {
                out.text(&key("rope.scaling.type"), "linear");
                out.number(&key("rope.scaling.factor"), *factor);
            }
            // Stored as divisors in a tensor.
            Scaling::Llama3 { .. } | Scaling::Divisors(_) if layout == Layout::Interleaved => {}
            _ => return refuse("this scaling of rotary frequencies"),
        }
        return Ok(out);
    };
    plain_rotation(c)?;
    unbiased(weights)?;
    if rope.layout != layout {
        return refuse("latent attention that rotates halves of a key");
    }
    query_latent(l.rank_q, c.n_layers)?;
    for (suffix, value) in [
        // Heads share the cached latent and rotated key as one key head.
        ("attention.head_count_kv", 1),
        ("attention.key_length", l.rank + rope.dim),
        ("attention.value_length", l.rank),
        ("attention.key_length_mla", c.head_dim),
        ("attention.value_length_mla", l.v_dim),
        ("attention.kv_lora_rank", l.rank),
        ("attention.q_lora_rank", l.rank_q.unwrap_or(0)),
        ("leading_dense_block_count", c.n_layers),
        ("expert_feed_forward_length", c.intermediate),
        ("expert_shared_count", 0),
    ] {
        out.integer(&key(suffix), value)?;
    }
    Ok(out)
}

type Named<'a> = (String, Cow<'a, Tensor>);

/// Makes a tensor in single precision.
fn dense(name: &str, values: &[f32], shape: Vec<usize>) -> Result<Tensor> {
    let wrong = || Error::invalid(format!("the size of {name}"), values.len(), "that of its shape");
    Tensor::from_f32(values, shape).ok_or_else(wrong)
}

fn tensors(model: &Model, elements: Elements) -> Result<Vec<Named<'_>>> {
    let c = &model.config;
    let Weights::Decoder(weights) = &model.weights else { return refuse("an encoder") };
    let (_, layout) = family(c)?;
    let n = &GGUF_DECODER;
    let vector = |name: String, values: &[f32]| -> Result<Named<'_>> {
        let tensor = dense(&name, values, vec![values.len()])?;
        Ok((name, Cow::Owned(tensor)))
    };
    let mut list: Vec<Named<'_>> = vec![(n.embedding.into(), Cow::Borrowed(&weights.embedding))];
    list.push(vector(n.final_norm.into(), &weights.final_norm)?);
    if !weights.is_tied() {
        list.push(("output.weight".into(), Cow::Borrowed(weights.output.weight())));
    }
    if let Some(rope) = c.rope.as_ref().filter(|_| c.latent.is_none()) {
        let plain = Rope { scaling: Scaling::None, ..rope.clone() }.frequencies(1);
        let divisors = match &rope.scaling {
            Scaling::Divisors(divisors) => Some(divisors.iter().map(|&x| x as f32).collect()),
            Scaling::Llama3 { .. } => {
                let pairs = plain.iter().zip(rope.frequencies(1));
                Some(pairs.map(|(a, b)| (a / b) as f32).collect::<Vec<f32>>())
            }
            _ => None,
        };
        if let Some(divisors) = divisors {
            list.push(vector("rope_freqs.weight".into(), &divisors)?);
        }
    }
    for (i, layer) in weights.layers.iter().enumerate() {
        let name = |part: &str| format!("{}.{part}", (n.layer)(i));
        let norms = [
            (n.attention_norm, &layer.attention_norm),
            (n.ffn_norm, &layer.ffn_norm),
            (n.q_norm, &layer.q_norm),
            (n.k_norm, &layer.k_norm),
        ];
        for (part, norm) in norms {
            if let Some(norm) = norm {
                list.push(vector(name(part), norm)?);
            }
        }
        let mut maps = vec![(n.o, &layer.o, None), (n.gate, &layer.gate, None), (n.up, &layer.up, None)];
        maps.push((n.down, &layer.down, None));
        match (&layer.latent, c.latent) {
            (Some(latent), Some(l)) => latent_tensors(c, l, layer, latent, elements, &name, &mut list)?,
            _ => {
                let order = |heads: usize| pair_order(c, layout, heads);
                maps.push((n.q, &layer.q, order(c.n_heads)));
                maps.push((n.k, &layer.k, order(c.n_kv_heads)));
                maps.push((n.v, &layer.v, None));
            }
        }
        for (part, map, order) in maps {
            linear(&name(part), map, order.as_deref(), elements, &mut list)?;
        }
    }
    Ok(list)
}

/// Returns the weight of a map and its bias, with rows in the given order.
fn linear<'a>(
    name: &str,
    map: &'a Linear,
    order: Option<&[usize]>,
    elements: Elements,
    list: &mut Vec<Named<'a>>,
) -> Result<()> {
    let full = format!("{name}.weight");
    let missing = || Error::MissingTensor { name: full.clone() };
    let mut weight = if map.is_product() {
        let shape = vec![map.outputs(), map.inputs()];
        Cow::Owned(elements.encode(&full, &map.multiplied_out(), shape)?)
    } else {
        Cow::Borrowed(map.weight())
    };
    if let Some(order) = order {
        weight = Cow::Owned(weight.some_rows(order.iter().copied()).ok_or_else(missing)?);
    }
    list.push((full, weight));
    if let Some(bias) = map.bias() {
        let bias: Vec<f32> = match order {
            Some(order) => order.iter().map(|&i| bias[i]).collect(),
            None => bias.to_vec(),
        };
        let bias_name = format!("{name}.bias");
        let tensor = dense(&bias_name, &bias, vec![bias.len()])?;
        list.push((bias_name, Cow::Owned(tensor)));
    }
    Ok(())
}

/// Returns for each row of queries or keys in this layout of pairs the row of the model; `None` if the orders agree.
pub(crate) fn pair_order(c: &ModelConfig, layout: Layout, heads: usize) -> Option<Vec<usize>> {
    let rope = c.rope.as_ref().filter(|r| r.layout != layout)?;
    let (half, d) = (rope.dim / 2, c.head_dim);
    let within = move |i: usize| match layout {
        _ if i >= 2 * half => i,
        Layout::Interleaved => i / 2 + half * (i % 2),
        Layout::Half if i < half => 2 * i,
        Layout::Half => 2 * (i - half) + 1,
    };
    Some((0..heads).flat_map(|h| (0..d).map(move |i| h * d + within(i))).collect())
}

/// Returns the maps of latent attention; those from the latent are separate for keys (transposed) and values.
fn latent_tensors<'a>(
    c: &ModelConfig,
    l: LatentConfig,
    layer: &DecoderLayer,
    latent: &'a LatentAttention,
    elements: Elements,
    name: &dyn Fn(&str) -> String,
    list: &mut Vec<Named<'a>>,
) -> Result<()> {
    let maps = latent.maps();
    let Some(input_norm) = &layer.attention_norm else { return refuse("layers without norms") };
    // Rows of the latent, which the norm acts on, come first.
    let mut normed = |part: &str, map: &'a Linear, rank: usize, norm: &Option<Vec<f32>>| {
        let weight_name = format!("{}.weight", name(part));
        let norm_name = format!("{}_norm.weight", name(part.trim_end_matches("_mqa")));
        let (weight, norm) = match norm {
            Some(norm) => (Cow::Borrowed(map.weight()), norm.clone()),
            None => {
                let mut weight = map.multiplied_out();
                let down = neutral_scale(&weight[..rank * c.hidden], input_norm, rank, c.norm_eps);
                weight[..rank * c.hidden].iter_mut().for_each(|w| *w *= down);
                let up = f64::from(c.norm_eps as f32).sqrt() / f64::from(down);
                let shape = vec![map.outputs(), map.inputs()];
                let weight = latent_elements(elements).encode(&weight_name, &weight, shape)?;
                (Cow::Owned(weight), vec![up as f32; rank])
            }
        };
        list.push((weight_name, weight));
        let tensor = dense(&norm_name, &norm, vec![rank])?;
        list.push((norm_name, Cow::Owned(tensor)));
        Ok::<_, Error>(())
    };
    normed("attn_kv_a_mqa", &maps.kv_a, l.rank, &maps.kv_a_norm)?;
    let query = match &maps.q_a {
        Some(q_a) => {
            normed("attn_q_a", q_a, q_a.outputs(), &maps.q_a_norm)?;
            "attn_q_b"
        }
        None => "attn_q",
    };
    linear(&name(query), &maps.q, None, elements, list)?;
    let [keys, values] = split_kv_b(&maps.kv_b.multiplied_out(), l);
    for (part, numbers, shape) in [
        ("attn_k_b", keys, vec![c.n_heads, l.rank, l.nope]),
        ("attn_v_b", values, vec![c.n_heads, l.v_dim, l.rank]),
    ] {
        let full = format!("{}.weight", name(part));
        let tensor = elements.encode(&full, &numbers, shape)?;
        list.push((full, Cow::Owned(tensor)));
    }
    Ok(())
}

/// Splits the joint map into keys, transposed, and values of all heads.
fn split_kv_b(both: &[f32], l: LatentConfig) -> [Vec<f32>; 2] {
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for head in both.chunks_exact((l.nope + l.v_dim) * l.rank) {
        let (k, v) = head.split_at(l.nope * l.rank);
        keys.extend((0..l.rank).flat_map(|r| (0..l.nope).map(move |i| k[i * l.rank + r])));
        values.extend_from_slice(v);
    }
    [keys, values]
}

/// Returns the element type for a map to a latent with a neutral norm: its numbers are too small for half precision and
/// blocks scaled with it.
pub(crate) fn latent_elements(elements: Elements) -> Elements {
    if elements == Elements::F32 { Elements::F32 } else { Elements::Bf16 }
}

/// Returns the map to keys and values as read back from a file with these elements.
pub(crate) fn rounded_kv_b(both: &[f32], l: LatentConfig, elements: Elements) -> Result<Vec<f32>> {
    let read = |name: &str, numbers: &[f32], width: usize| -> Result<Vec<f32>> {
        Ok(elements.encode(name, numbers, vec![numbers.len() / width.max(1), width])?.to_f32())
    };
    let [keys, values] = split_kv_b(both, l);
    let (keys, values) = (read("attn_k_b", &keys, l.nope)?, read("attn_v_b", &values, l.rank)?);
    Ok(join_kv_b(&keys, &values, l))
}

/// Returns the power of two that scales the map `a` to a latent of `rank` so far down that its norm is a plain
/// division.
fn neutral_scale(a: &[f32], input_norm: &[f32], rank: usize, eps: f64) -> f32 {
    let d = input_norm.len();
    let square = |row: &[f32]| -> f64 {
        row.iter().zip(input_norm).map(|(a, w)| (f64::from(*a) * f64::from(*w)).powi(2)).sum()
    };
    let largest = d as f64 * a.chunks_exact(d.max(1)).map(square).sum::<f64>() / rank.max(1) as f64;
    let scale = (NEGLIGIBLE * eps / largest.max(f64::MIN_POSITIVE)).sqrt();
    scale.log2().floor().clamp(-60.0, 0.0).exp2() as f32
}
