//! Two real models against published figures.

mod common;

use attlas_model::checkpoint::{open_gguf, open_safetensors};
use attlas_model::{Architecture, Model, Tokenizer, Weights};
use attlas_num::kernels::quant::Format;
use attlas_num::rng::StreamKey;
use attlas_num::rope::{Layout, Scaling};
use attlas_num::{MatRef, Scratch};
use common::{Writer, alice, minilm, models, smollm2};

#[test]
fn the_header_of_smollm2_is_read() {
    let (gguf, tensors) = open_gguf(&smollm2()).unwrap();
    assert_eq!((gguf.version(), gguf.tensors().len(), gguf.metadata().len()), (3, 272, 33));
    assert_eq!(gguf.data_start(), 1_785_664);
    assert_eq!(gguf.text("general.name").unwrap(), Some("Smollm2 135M 8k Lc100K Mix1 Ep2"));
    let count = |f: Format| gguf.tensors().iter().filter(|t| t.format == f).count();
    assert_eq!((count(Format::Q4_1), count(Format::F32), count(Format::Q8_0)), (210, 61, 1));
    let parameters: usize = gguf.tensors().iter().map(|t| t.shape.iter().product::<usize>()).sum();
    assert_eq!(parameters, 134_515_008);
    assert_eq!(gguf.tensor("token_embd.weight").unwrap().shape, [49152, 576]);
    assert_eq!(tensors.len(), 272);
}

#[test]
fn smollm2_opens_as_a_tied_llama() {
    let model = Model::open(&smollm2()).unwrap();
    let c = &model.config;
    assert_eq!((c.architecture, c.hidden, c.intermediate, c.n_layers), (Architecture::Llama, 576, 1536, 30));
    assert_eq!((c.n_heads, c.n_kv_heads, c.head_dim, c.vocab, c.max_positions), (9, 3, 64, 49152, 8192));
    assert!((c.norm_eps - 1e-5).abs() < 1e-12);
    let rope = c.rope.as_ref().unwrap();
    assert_eq!(
        (rope.dim, rope.base, rope.layout, &rope.scaling),
        (64, 1e5, Layout::Interleaved, &Scaling::None)
    );
    assert_eq!(c.eos, [2]);
    assert!(model.chat_template.as_ref().is_some_and(|t| t.contains("SmolLM")));
    let Weights::Decoder(w) = &model.weights else { panic!("a decoder") };
    assert_eq!(w.layers.len(), 30);
    assert_eq!(w.output.weight().bytes().as_ptr(), w.embedding.bytes().as_ptr(), "tied storage is shared");
    let mut row = vec![0.0; 576];
    w.embedding.row_into(0, &mut row);
    for (got, want) in row.iter().zip([-0.10654449, 0.03297806, 0.0481987, -0.02283096]) {
        assert!((got - want).abs() < 1e-7);
    }
    w.layers[0].q.weight().row_into(0, &mut row);
    for (got, want) in row.iter().zip([-0.09631348, 0.15734863, -0.09631348, -0.730_468_75, 1.1719971]) {
        assert!((got - want).abs() < 1e-6);
    }
}

#[test]
fn linear_layers_of_smollm2_multiply_what_is_stored() {
    let model = Model::open(&smollm2()).unwrap();
    let Weights::Decoder(w) = &model.weights else { panic!("a decoder") };
    let layer = &w.layers[7].down;
    let (n, d) = (3, layer.inputs());
    let mut x = vec![0.0f32; n * d];
    StreamKey::new(1).rng().fill_normal(&mut x);
    let mut out = vec![0.0; n * layer.outputs()];
    layer.apply(MatRef::new(&x, n, d), &mut out, &Scratch::new());
    let dense = layer.weight().to_f32();
    for i in 0..n {
        for (r, row) in dense.chunks_exact(d).enumerate() {
            let terms = row.iter().zip(&x[i * d..]).map(|(a, b)| f64::from(*a) * f64::from(*b));
            let (sum, size) = terms.fold((0.0, 0.0), |(s, m), t| (s + t, m + t.abs()));
            let got = f64::from(out[i * layer.outputs() + r]);
            assert!((got - sum).abs() <= d as f64 * f64::from(f32::EPSILON) / 2.0 * size);
        }
    }
}

#[test]
fn the_tokeniser_of_smollm2_gives_the_published_tokens() {
    let (gguf, _) = open_gguf(&smollm2()).unwrap();
    let t = Tokenizer::from_gguf(&gguf).unwrap();
    assert_eq!((t.vocab_size(), t.bos(), t.eos()), (49152, Some(1), Some(2)));
    let check = |text: &str, ids: &[u32]| {
        assert_eq!(t.encode(text, true).unwrap(), ids, "{text:?}");
        assert_eq!(t.decode(ids, false).unwrap(), text);
    };
    check("Hello world", &[19556, 905]);
    check("The capital of France is", &[504, 3575, 282, 4649, 314]);
    check(
        "In 2024, 3.14159 is pi.\n\n  def f(x): return x**2",
        &[
            788, 216, 34, 32, 34, 36, 28, 216, 35, 30, 33, 36, 33, 37, 41, 314, 16916, 30, 8866, 753, 275,
            24, 104, 727, 1003, 1792, 828, 34,
        ],
    );
    check("naïve café — 北京 🙂", &[3546, 46494, 37366, 1841, 13223, 230, 241, 16736, 122, 47526]);
    check("<|im_start|>user\n", &[1, 4093, 198]);
    let licence = std::fs::read_to_string(models().join("smollm2/LICENSE")).unwrap();
    let ids = t.encode(&licence, false).unwrap();
    assert_eq!((ids.len(), &ids[..6]), (2215, &[12427, 16797, 6966, 16299, 13867, 216][..]));
}

#[test]
fn alice_in_wonderland_has_its_published_tokens_and_comes_back() {
    let (gguf, _) = open_gguf(&smollm2()).unwrap();
    let t = Tokenizer::from_gguf(&gguf).unwrap();
    let text = alice();
    let ids = t.encode(&text, true).unwrap();
    assert_eq!(ids.len(), 39_356);
    assert_eq!(ids[..12], [1116, 10459, 9206, 15799, 23, 67, 5236, 48932, 42606, 5622, 408, 2154]);
    assert_eq!(t.decode(&ids, false).unwrap(), text);
}

#[test]
fn random_texts_survive_byte_level_bpe() {
    let (gguf, _) = open_gguf(&smollm2()).unwrap();
    let t = Tokenizer::from_gguf(&gguf).unwrap();
    // Some bytes have no token in this vocabulary; texts with them cannot be restored.
    let known = |c: &char| {
        let mut buffer = [0; 4];
        t.decode(&t.encode(c.encode_utf8(&mut buffer), true).unwrap(), false).unwrap() == c.to_string()
    };
    let mut rng = StreamKey::new(8).named("texts").rng();
    for _ in 0..300 {
        let text: String = (0..rng.below(40))
            .map(|_| match rng.below(4) {
                0 => char::from(32 + rng.below(95) as u8),
                1 => [' ', '\n', '\t', '\r', '\u{a0}', '\u{3000}'][rng.below(6)],
                2 => char::from_u32(0x80 + rng.below(0x2000) as u32).unwrap_or('?'),
                _ => char::from_u32(rng.below(0x11_0000) as u32).unwrap_or('7'),
            })
            .filter(known)
            .collect();
        assert_eq!(t.decode(&t.encode(&text, true).unwrap(), false).unwrap(), text);
    }
}

#[test]
fn minilm_opens_as_an_encoder() {
    let tensors = open_safetensors(&minilm()).unwrap();
    assert_eq!(tensors.len(), 103, "104 tensors, of which one holds integers");
    let model = Model::open(&minilm()).unwrap();
    let c = &model.config;
    assert_eq!((c.architecture, c.hidden, c.intermediate, c.n_layers), (Architecture::Bert, 384, 1536, 6));
    assert_eq!((c.n_heads, c.n_kv_heads, c.head_dim, c.vocab, c.max_positions), (12, 12, 32, 30522, 512));
    assert_eq!((c.norm_eps, c.token_types, c.rope.is_none()), (1e-12, 2, true));
    let Weights::Encoder(w) = &model.weights else { panic!("an encoder") };
    assert_eq!((w.layers.len(), w.layers[5].up.outputs()), (6, 1536));
}

#[test]
fn minilm_tokenises_without_its_baked_in_padding() {
    let t = Model::open(&minilm()).unwrap().tokenizer;
    let encode = |text: &str| t.encode(text, true).unwrap();
    assert_eq!(encode("This is an example sentence"), [101, 2023, 2003, 2019, 2742, 6251, 102]);
    assert_eq!(encode("Each sentence is converted"), [101, 2169, 6251, 2003, 4991, 102]);
    assert_eq!(t.encode("This is an example sentence", false).unwrap(), [2023, 2003, 2019, 2742, 6251]);
    assert!(encode(&"word ".repeat(300)).len() > 300, "no truncation");
}

#[test]
fn a_written_tokenizer_makes_the_tokens_of_the_gguf_file() {
    let model = Model::open(&smollm2()).unwrap();
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("written-tokenizer");
    let _ = std::fs::remove_dir_all(&path);
    let folder = attlas_model::save::Folder::create(&path).unwrap();
    folder.tokenizer(&model).unwrap();
    folder.finish().unwrap();
    let written = Tokenizer::from_json(&std::fs::read(path.join("tokenizer.json")).unwrap()).unwrap();
    for text in ["naïve café — 北京 🙂 <|im_start|>user\n 2024", &alice()[..20_000]] {
        let ids = model.tokenizer.encode(text, true).unwrap();
        assert_eq!(written.encode(text, true).unwrap(), ids);
        assert_eq!(written.decode(&ids, false).unwrap(), text);
    }
    let settings: serde_json::Value =
        serde_json::from_slice(&std::fs::read(path.join("tokenizer_config.json")).unwrap()).unwrap();
    assert_eq!(
        (&settings["bos_token"], &settings["eos_token"]),
        (&"<|im_start|>".into(), &"<|im_end|>".into())
    );
    assert!(settings["chat_template"].as_str().is_some_and(|t| t.contains("SmolLM")));
}

#[test]
fn word_pieces_from_gguf_metadata_equal_those_of_the_folder() {
    let vocab = std::fs::read_to_string(minilm().join("vocab.txt")).unwrap();
    // As in llama.cpp's converter, continuations lose their marks and word starts get one.
    let special = |t: &str| t.starts_with('[') && t.ends_with(']');
    let spelled: Vec<String> = vocab
        .lines()
        .map(|t| match t.strip_prefix("##") {
            Some(rest) => rest.to_owned(),
            None if special(t) => t.to_owned(),
            None => format!("\u{2581}{t}"),
        })
        .collect();
    let types: Vec<i32> = vocab
        .lines()
        .map(|t| {
            if t == "[UNK]" {
                2
            } else if special(t) {
                3
            } else {
                1
            }
        })
        .collect();
    let bytes = Writer::default()
        .text("tokenizer.ggml.model", "bert")
        .texts("tokenizer.ggml.tokens", &spelled)
        .i32s("tokenizer.ggml.token_type", &types)
        .u32("tokenizer.ggml.bos_token_id", 101)
        .u32("tokenizer.ggml.seperator_token_id", 102)
        .bytes();
    let ours = Tokenizer::from_gguf(&attlas_model::gguf::Gguf::parse(&bytes).unwrap()).unwrap();
    let theirs = Model::open(&minilm()).unwrap().tokenizer;
    let written = Tokenizer::from_json(&ours.to_json().unwrap()).unwrap();
    for text in ["This is an example sentence", "Café naïve: 北京, don't! xyzzyqwrt ⟦", &alice()[..5000]]
    {
        assert_eq!(ours.encode(text, true).unwrap(), theirs.encode(text, true).unwrap());
        assert_eq!(written.encode(text, true).unwrap(), theirs.encode(text, true).unwrap());
    }
}
