//! Conversations as the text a model was trained on: its own Jinja template, from GGUF metadata or from
//! `tokenizer_config.json`.
//!
//! The environment is that of Hugging Face's `apply_chat_template`: blocks are trimmed and stripped, loops have
//! `break` and `continue`, strings and lists have their Python methods, `raise_exception` refuses a conversation, and
//! `messages`, `add_generation_prompt`, `bos_token` and `eos_token` are defined. The date is not: templates that
//! ask for it say so with `is defined` and have a default. A template is untrusted code, so its steps are counted
//! and limited.

use crate::error::{Error, Result};
use crate::model::Model;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, context};
use serde::{Deserialize, Serialize};

/// Steps a template may take.
const FUEL: u64 = 10_000_000;

const NAME: &str = "chat";

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`, or what else a template knows.
    pub role: String,
    /// What was said.
    pub content: String,
}

impl Message {
    /// A message of any role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }

    /// A message of the user.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }
}

/// A chat template, parsed.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// Parses `source`; `bos` and `eos` are the tokens it may put around texts, empty where there is none.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(failed)?;
        environment.set_syntax(syntax);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |reason: String| -> std::result::Result<String, minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, reason))
            },
        );
        environment.add_template_owned(NAME, source.to_owned()).map_err(failed)?;
        Ok(Self { environment, bos: bos.to_owned(), eos: eos.to_owned() })
    }

    /// The template of a model; an error if it has none.
    pub fn of(model: &Model) -> Result<Self> {
        let source = model.chat_template.as_deref().ok_or_else(|| {
            Error::ChatTemplate("the model has none, so that it takes plain text only".into())
        })?;
        let token = |id: Option<u32>| id.and_then(|id| model.tokenizer.token(id)).unwrap_or_default();
        Self::new(source, &token(model.tokenizer.bos()), &token(model.tokenizer.eos()))
    }

    /// The text of a conversation, ending with the opening of the assistant's turn if `answer` is set. Encode it
    /// without adding special tokens: the template writes them. Special tokens that a message spells out are
    /// recognised as such by the tokeniser, too.
    pub fn render(&self, messages: &[Message], answer: bool) -> Result<String> {
        let template = self.environment.get_template(NAME).map_err(failed)?;
        let turn = |m: &Message| context! { role => m.role.as_str(), content => m.content.as_str() };
        let values = context! {
            messages => messages.iter().map(turn).collect::<Vec<_>>(),
            add_generation_prompt => answer,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
        };
        template.render(values).map_err(failed)
    }
}

fn failed(error: minijinja::Error) -> Error {
    let line = error.line().map(|line| format!(" (line {line})")).unwrap_or_default();
    Error::ChatTemplate(format!("{}{line}", error.detail().unwrap_or(&error.kind().to_string())))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA2: &str = "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}\
        {{ raise_exception('roles must alternate') }}{% endif %}\
        {% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}\
        {% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}";

    #[test]
    fn tokens_methods_and_refusals_work_as_in_python() {
        let template = ChatTemplate::new(LLAMA2, "<s>", "</s>").unwrap();
        let turns = [Message::user("  Hi \n"), Message::new("assistant", "Hello"), Message::user("Bye")];
        let text = template.render(&turns, true).unwrap();
        assert_eq!(text, "<s>[INST] Hi [/INST] Hello </s><s>[INST] Bye [/INST]");
        let error = template.render(&turns[1..], true).unwrap_err().to_string();
        assert!(error.contains("roles must alternate"), "{error}");
    }

    #[test]
    fn blocks_on_lines_of_their_own_leave_no_lines_behind() {
        let source = "{% for m in messages %}\n    {% if loop.last %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n";
        let template = ChatTemplate::new(source, "", "").unwrap();
        assert_eq!(template.render(&[Message::user("a"), Message::user("b")], false).unwrap(), "b\n");
    }

    #[test]
    fn markup_is_not_escaped() {
        let template = ChatTemplate::new("{{ messages[0].content }}", "", "").unwrap();
        assert_eq!(template.render(&[Message::user("<b> & \"c\"")], false).unwrap(), "<b> & \"c\"");
    }

    #[test]
    fn malformed_and_endless_templates_are_errors() {
        for source in ["{% for", "{{ 1 +", "{% endif %}", "{{ messages | nothing_such }}"] {
            let rendered = ChatTemplate::new(source, "", "").and_then(|t| t.render(&[], true));
            assert!(matches!(rendered, Err(Error::ChatTemplate(_))), "{source}");
        }
        let long =
            "{% for a in range(9999) %}{% for b in range(9999) %}{% set c = a %}{% endfor %}{% endfor %}";
        let error = ChatTemplate::new(long, "", "").unwrap().render(&[], true).unwrap_err();
        assert!(matches!(error, Error::ChatTemplate(_)), "{error}");
    }
}
