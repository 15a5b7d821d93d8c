//! Stored outputs of independent implementations; `goldens/model/make_goldens.py` wrote them.

mod common;

use attlas_model::Tokenizer;
use attlas_model::tokenizer::SentencePiece;
use attlas_num::kernels::quant::{Format, Isa, dequantise_into};
use common::golden;

fn unhex(s: &str) -> Vec<u8> {
    (0..s.len()).step_by(2).map(|i| u8::from_str_radix(&s[i..i + 2], 16).unwrap()).collect()
}

#[test]
fn every_block_format_reads_as_the_numpy_reference_reads_it() {
    let all = golden("quants.json");
    for format in Format::ALL {
        if format == Format::Q8K {
            continue; // ggml's own intermediate format: the reference does not read it from files.
        }
        let entry = &all[format.name()];
        let bytes = unhex(entry["bytes"].as_str().unwrap());
        let want: Vec<f32> = unhex(entry["values"].as_str().unwrap())
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect();
        for &isa in Isa::available() {
            let mut got = vec![0.0; want.len()];
            dequantise_into(isa, format, &bytes, &mut got);
            for (i, (g, w)) in got.iter().zip(&want).enumerate() {
                let same = g.to_bits() == w.to_bits() || g.is_nan() && w.is_nan() || *g == 0.0 && *w == 0.0;
                assert!(same, "{format} {isa:?} at {i}: {g} instead of {w}");
            }
        }
    }
}

#[test]
fn sentencepiece_gives_the_tokens_of_the_reference_and_decodes_them() {
    let all = golden("sentencepiece.json");
    let list = |key: &str| all[key].as_array().unwrap().clone();
    let tokens: Vec<String> = list("tokens").iter().map(|t| t.as_str().unwrap().to_owned()).collect();
    let scores = list("scores").iter().map(|s| s.as_f64().unwrap() as f32).collect();
    let types: Vec<i64> = list("types").iter().map(|t| t.as_i64().unwrap()).collect();
    let sp = SentencePiece::new(tokens, scores, &types, 0, true);
    let written = Tokenizer::from_json(&serde_json::to_vec(&sp.to_json()).unwrap()).unwrap();
    for entry in list("texts") {
        let text = entry["text"].as_str().unwrap();
        let want: Vec<u32> =
            entry["ids"].as_array().unwrap().iter().map(|i| i.as_u64().unwrap() as u32).collect();
        let got = sp.encode(text);
        assert_eq!(got, want, "{text:?}");
        assert_eq!(sp.decode(&got, true), text);
        assert_eq!(written.encode(text, false).unwrap(), want, "{text:?} by the written file");
        assert_eq!(written.decode(&got, true).unwrap(), text);
    }
}

#[test]
fn control_tokens_in_a_text_are_found_before_merging() {
    let names = ["<unk>", "<s>", "<s>>", "\u{2581}", "a", "\u{2581}a", "<", "s", ">", "<0x41>"];
    let tokens: Vec<String> = names.map(str::to_owned).to_vec();
    let types = [2, 3, 4, 1, 1, 1, 1, 1, 1, 6];
    let sp = SentencePiece::new(tokens, vec![0.0; 10], &types, 0, true);
    assert_eq!(sp.encode("a<s>a"), [5, 1, 5], "a prefix space on either side of a control token");
    assert_eq!(sp.encode("<s>>a"), [2, 5], "the longest one wins");
    assert_eq!(sp.encode("A\u{e9}"), [3, 9, 0, 0], "bytes, and unknown where a byte has no token");
    assert_eq!(sp.decode(&[1, 5, 4], true), "aa");
    assert_eq!(sp.decode(&[1, 5, 4], false), "<s> aa");
}
