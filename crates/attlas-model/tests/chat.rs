//! The chat template in SmolLM2's file.

mod common;

use attlas_model::{ChatTemplate, Error, Message, Model};
use common::{minilm, smollm2};

#[test]
fn smollm2_writes_conversations_as_chatml() {
    let model = Model::open(&smollm2()).unwrap();
    let template = ChatTemplate::of(&model).unwrap();
    let text = template.render(&[Message::user("Hello <|x|> & you")], true).unwrap();
    assert_eq!(
        text,
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
         <|im_start|>user\nHello <|x|> & you<|im_end|>\n<|im_start|>assistant\n"
    );
    let turns = [
        Message::new("system", "Be brief."),
        Message::user("1 + 1?"),
        Message::new("assistant", "2"),
        Message::user("And {{ 1 + 2 }}?"),
    ];
    let text = template.render(&turns, false).unwrap();
    assert_eq!(
        text,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1?<|im_end|>\n\
         <|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\nAnd {{ 1 + 2 }}?<|im_end|>\n"
    );
    let ids = model.tokenizer.encode(&text, false).unwrap();
    assert_eq!(ids.iter().filter(|id| **id == 1).count(), 4, "the marks of turns are single tokens");
    assert_eq!(ids[0], 1);
}

#[test]
fn a_model_without_a_template_says_so() {
    let model = Model::open(&minilm()).unwrap();
    assert!(matches!(ChatTemplate::of(&model), Err(Error::ChatTemplate(_))));
}
