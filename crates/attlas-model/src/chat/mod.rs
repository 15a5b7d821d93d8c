//! Rendering of conversations to the text a model was trained on, by its own Jinja template from GGUF metadata or
//! `tokenizer_config.json`.
//!
//! The environment is that of Hugging Face's `apply_chat_template`: blocks are trimmed and stripped, loops have
//! `break` and `continue`, strings and lists have their Python methods, `'%s' % x` formats, `tojson` writes like
//! `json.dumps`, `{% generation %}` marks the assistant's text and changes nothing, `raise_exception` refuses a
//! conversation, `messages`, `add_generation_prompt`, `bos_token` and `eos_token` are defined, and `tools` and
//! `documents` are none. The date is not defined: templates that use it test it with `is defined` and have a default.
//!
//! A template is untrusted code. Its length and the length of its tags are limited before it is parsed, it runs on a
//! thread with its own stack, and its steps, the bytes it builds and writes, and its running time are limited
//! (`limits.rs`; `rewrite.rs` puts a check before every operation that grows a value). Exceeding a limit is an error.

mod limits;
mod rewrite;

use crate::error::{Error, Result};
use crate::model::Model;
use crate::quiet;
use limits::Budget;
use minijinja::machinery::{CodeGenerator, Token, eval, make_string_output, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, ErrorKind, Value, context};
use serde::{Deserialize, Serialize};
use std::sync::mpsc;

/// Most bytes of a template.
const SOURCE: usize = 512 << 10;
/// Most tokens between `{{` and `}}` or `{%` and `%}`: the parser and the compiler recurse once per token.
const TAG: usize = 2048;
/// Most branches of all conditions; successive branches nest.
const BRANCHES: usize = 2048;
/// Stack of the thread that parses and runs a template.
const STACK: usize = 256 << 20;

const NAME: &str = "chat";

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, or another role of the template.
    pub role: String,
    /// Text of the message.
    pub content: String,
}

impl Message {
    /// Creates a message of any role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }

    /// Creates a message of the user.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new("user", content)
    }
}

/// A chat template with valid syntax.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    source: String,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// Parses `source`; `bos` and `eos` are the tokens it may put around texts, empty if there are none.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self> {
        if source.len() > SOURCE {
            let reason = format!("it has {} bytes; expected at most {SOURCE}", source.len());
            return Err(Error::ChatTemplate(reason));
        }
        let source = without_generation(source);
        check_tags(&source)?;
        let template = Self { source, bos: bos.to_owned(), eos: eos.to_owned() };
        let source = template.source.clone();
        apart(move || with_instructions(&source, |_, _| Ok(())))?;
        Ok(template)
    }

    /// Returns the template of a model; an error if it has none.
    pub fn of(model: &Model) -> Result<Self> {
        let source = model.chat_template.as_deref().ok_or_else(|| {
            Error::ChatTemplate("the model has none, so that it takes plain text only".into())
        })?;
        let token = |id: Option<u32>| id.and_then(|id| model.tokenizer.token(id)).unwrap_or_default();
        Self::new(source, &token(model.tokenizer.bos()), &token(model.tokenizer.eos()))
    }

    /// Renders a conversation, ending with the opening of the assistant's turn if `answer` is set. Encode the result
    /// without adding special tokens: the template writes them. The tokeniser also recognises special tokens that a
    /// message spells out.
    pub fn render(&self, messages: &[Message], answer: bool) -> Result<String> {
        let (template, messages) = (self.clone(), messages.to_vec());
        apart(move || template.run(&messages, answer))
    }

    fn run(&self, messages: &[Message], answer: bool) -> Result<String> {
        let turn = |m: &Message| context! { role => m.role.as_str(), content => m.content.as_str() };
        let values = context! {
            messages => messages.iter().map(turn).collect::<Vec<_>>(),
            add_generation_prompt => answer,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
            tools => Value::from(()),
            documents => Value::from(()),
        };
        let bytes = messages.iter().map(|m| m.role.len() + m.content.len()).sum();
        let budget = Budget::new(bytes);
        let mut environment = Environment::new();
        limits::install(&mut environment, &budget);
        environment.add_function(
            "raise_exception",
            |reason: String| -> std::result::Result<String, minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, reason))
            },
        );
        with_instructions(&self.source, |instructions, blocks| {
            let mut text = String::new();
            let mut out = make_string_output(&mut text);
            eval(&environment, instructions, values, blocks, &mut out, AutoEscape::None).map_err(failed)?;
            Ok(text)
        })
    }
}

type Compiled<'a> = minijinja::machinery::Instructions<'a>;
type Blocks<'a> = std::collections::BTreeMap<&'a str, Compiled<'a>>;

/// Compiles a template with checks on every growing expression, and passes it to `run`.
fn with_instructions<T>(
    source: &str,
    run: impl for<'a> FnOnce(&Compiled<'a>, &Blocks<'a>) -> Result<T>,
) -> Result<T> {
    let tree = parse(source, NAME, syntax()?).map_err(failed)?;
    let tree = rewrite::statement(&tree)
        .map_err(|name| Error::ChatTemplate(format!("the statement {name} is not supported")))?;
    let mut generator = CodeGenerator::new(NAME, source);
    generator.compile_stmt(&tree);
    let (instructions, blocks) = generator.finish();
    run(&instructions, &blocks)
}

fn syntax() -> Result<SyntaxConfig> {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(failed)
}

/// Runs `work` on a thread with a large stack. After the time limit it is not awaited: its own clock ends it soon.
fn apart<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let (send, receive) = mpsc::channel();
    let run = move || {
        let broken = || Err(Error::ChatTemplate("it is inconsistent".into()));
        // The receiver is gone if the time limit passed.
        let _ = send.send(quiet::catch(work).unwrap_or_else(broken));
    };
    let thread = std::thread::Builder::new().name(NAME.into()).stack_size(STACK).spawn(run);
    thread.map_err(|e| Error::ChatTemplate(format!("no thread to run it on: {e}")))?;
    receive.recv_timeout(2 * limits::TIME).unwrap_or_else(|_| {
        Err(Error::ChatTemplate(format!("it ran for more than {} seconds", 2 * limits::TIME.as_secs())))
    })
}

/// Replaces the tags of `generation` blocks by conditions that are always true, with the same handling of white space.
fn without_generation(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        out.push_str(before);
        rest = tag;
        let Some(end) = tag.find("%}") else { break };
        let name = tag[..end].trim_matches(['-', '+']).trim();
        let condition = match name {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => continue,
        };
        out.push_str(&tag[..end].replacen(name, condition, 1));
        rest = &tag[end..];
    }
    out.push_str(rest);
    out
}

/// Fails if a tag is so long that parsing it could exhaust the stack.
fn check_tags(source: &str) -> Result<()> {
    let (mut tag, mut branches) = (0, 0);
    for token in tokenize(source, false, syntax()?) {
        match token.map_err(failed)?.0 {
            Token::VariableStart | Token::BlockStart => tag = 0,
            Token::Ident(name) if name.starts_with(rewrite::RESERVED) => {
                return Err(Error::ChatTemplate(format!("the name {name} is reserved")));
            }
            Token::Ident("elif") => branches += 1,
            _ => {}
        }
        tag += 1;
        if tag > TAG {
            return Err(Error::ChatTemplate(format!("a tag has more than {TAG} words and signs")));
        }
        if branches > BRANCHES {
            return Err(Error::ChatTemplate(format!("it has more than {BRANCHES} branches")));
        }
    }
    Ok(())
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

    fn refused(source: &str) -> String {
        let start = std::time::Instant::now();
        let result = ChatTemplate::new(source, "", "").and_then(|t| t.render(&[Message::user("x")], true));
        let shown: String = source.chars().take(60).collect();
        assert!(start.elapsed() < 2 * limits::TIME, "{shown}");
        match result {
            Err(Error::ChatTemplate(reason)) => reason,
            Err(other) => panic!("{shown}: {other}"),
            Ok(text) => panic!("{shown}: {} bytes", text.len()),
        }
    }

    #[test]
    fn long_chains_do_not_exhaust_the_stack() {
        for source in [
            format!("{{{{ {}1 }}}}", "-".repeat(20_400)),
            format!("{{{{ {}1 }}}}", "not ".repeat(20_400)),
            format!("{{{{ a{} }}}}", ".b".repeat(36_000)),
            format!("{{{{ 1{} }}}}", "|string".repeat(10_000)),
            format!("{{{{ 'a'{} }}}}", "~'a'".repeat(10_000)),
            format!("{{{{ {}1{} }}}}", "(".repeat(1000), ")".repeat(1000)),
            format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(20_000)),
            " ".repeat(SOURCE + 1),
        ] {
            refused(&source);
        }
        // Everything below the limits runs.
        for source in [
            format!("{{{{ {}1 }}}}", "-".repeat(2000)),
            format!("{{{{ 'a'{} }}}}", "~'a'".repeat(1000)),
            format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(2000)),
        ] {
            ChatTemplate::new(&source, "", "").unwrap().render(&[], true).unwrap();
        }
    }

    #[test]
    fn values_that_grow_without_end_are_refused() {
        let doubled = |n: usize, step: &str| {
            format!(
                "{{% set ns = namespace(x='ab') %}}{{% for i in range({n}) %}}{step}{{% endfor %}}{{{{ ns.x|length }}}}"
            )
        };
        for step in [
            "{% set ns.x = ns.x ~ ns.x %}",
            "{% set ns.x = ns.x + ns.x %}",
            "{% set ns.x = ns.x * 2 %}",
            "{% set ns.x = [ns.x, ns.x] %}",
            "{% set ns.x = (ns.x, ns.x) %}",
            "{% set ns.x = {'a': ns.x, 'b': ns.x} %}",
            "{% set ns.x = [ns.x] %}",
            "{% set ns.x = ns.x.replace('a', 'aa') %}",
            "{% set ns.x = ns.x|replace('a', 'aa') %}",
            "{% set ns.x = [ns.x, ns.x]|join %}",
            "{% set ns.x = ''.join([ns.x, ns.x]) %}",
            "{% set ns.x = '%s%s' % (ns.x, ns.x) %}",
            "{% set ns.x = '{0}{0}'.format(ns.x) %}",
            "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}",
            "{% set ns.x = ns %}{{ ns }}",
        ] {
            refused(&doubled(100, step));
        }
        let raw = format!(
            "{{% set y %}}{{% for i in range(99999) %}}{}{{% endfor %}}{{% endset %}}",
            "r".repeat(60_000)
        );
        let long = format!("{{% for i in range(99999) %}}{}{{% endfor %}}", "r".repeat(100));
        assert!(refused(&long).contains("writes more text"));
        for source in [
            "{{ '%1000000000d'|format(1) }}",
            "{{ '%1000000000d' % 1 }}",
            "{{ '%*d'|format(1000000000, 1) }}",
            "{{ '{:1000000000}'.format(1) }}",
            "{{ range(99999)|slice(1000000000)|list }}",
            "{{ [1]|batch(1000000000, 0)|list }}",
            "{{ 'a\nb'|indent(4000000000) }}",
            "{{ [1]|tojson(indent=1000000000) }}",
            "{{ ['a', 'b']|map('indent', 4000000000)|list }}",
            "{{ range(99999)|join('x' * 99999) }}",
            "{{ 'a' * 100000000 ~ 'a' * 100000000 }}",
            "{{ ([0] * 100000000)|length }}",
            "{% macro m(x) %}{{ m(x ~ x) }}{% endmacro %}{{ m('ab') }}",
            "{% for a in ['x' * 99999] %}{% for i in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
            "{% set __attlas_operand = 1 %}",
            &raw,
        ] {
            refused(source);
        }
    }

    #[test]
    fn templates_render_as_in_transformers() {
        // Results of Jinja 2 with the filters, tests and extensions of transformers.
        let cases = [
            ("{% generation %}\n  a{% endgeneration %}\nb", "  ab"),
            ("x {%- generation -%} a {%- endgeneration %} b", "xa b"),
            (
                "{{ {'a': \"<b> & 'c'\", 'd': [1, 2.5, true, none]}|tojson }}",
                "{\"a\": \"<b> & 'c'\", \"d\": [1, 2.5, true, null]}",
            ),
            (
                "{{ {'b': 1, 'a': {'c': []}}|tojson(indent=2) }}",
                "{\n  \"b\": 1,\n  \"a\": {\n    \"c\": []\n  }\n}",
            ),
            ("{{ {'é': '\\n'}|tojson }}", "{\"é\": \"\\n\"}"),
            ("{{ '%s and %d' % ('x', 3) }} {{ '%s' % 'y' }} {{ 7 % 3 }} {{ -7 % 3 }}", "x and 3 y 1 2"),
            ("{{ '%05.1f|%s' % (3.14159, 'z') }} {{ '%s-%s'|format(1, 2) }}", "003.1|z 1-2"),
            (
                "{{ tools is none }} {{ documents is none }} {{ tools is defined }} {{ x is defined }}",
                "True True True False",
            ),
            ("{% if tools %}t{% endif %}{% if not documents %}d{% endif %}", "d"),
            (
                "{{ none }} {{ true }} {{ 1.0 }} {{ 3 * 2.5 }} {{ 'ab' * 2 }} {{ x }}",
                "None True 1.0 7.5 abab ",
            ),
            ("{{ messages|map(attribute='content')|join(', ') }}", "Hi, Ho"),
            ("{{ messages|selectattr('role', 'equalto', 'user')|list|length }}", "1"),
            ("{{ 'a b'.split(' ')[1] ~ 'c'.upper() ~ messages[-1].content }}", "bCHo"),
            ("{{ ' x '|trim ~ 'aXbX'|replace('X', '-') }} {{ 'a\nb'|indent(2) }}", "xa-b- a\n  b"),
            ("{% macro m(a, b='q') %}{{ a ~ b }}{% endmacro %}{{ m('p') }}{{ m('p', b='r') }}", "pqpr"),
            (
                "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}{% else %}-{% endfor %}",
                "1Hi",
            ),
            ("{% set a, b = [1, 2] %}{{ b }}{% with c = 3 %}{{ c }}{% endwith %}", "23"),
        ];
        let turns = [Message::user("Hi"), Message::new("assistant", "Ho")];
        for (source, want) in cases {
            let text = ChatTemplate::new(source, "<s>", "</s>").and_then(|t| t.render(&turns, true)).unwrap();
            assert_eq!(text, want, "{source}");
        }
    }

    #[test]
    fn long_conversations_are_no_bombs() {
        let turns: Vec<Message> = (0..2000).map(|i| Message::user(format!("{i} ").repeat(500))).collect();
        let source = "{% set ns = namespace(t='') %}{% for m in messages %}{{ '<' ~ m['content'] ~ '>' }}\
            {% set ns.t = ns.t ~ m.content[:3] %}{% endfor %}{{ messages|tojson }}";
        let text = ChatTemplate::new(source, "", "").unwrap().render(&turns, true).unwrap();
        assert!(text.len() > 2 * turns.iter().map(|m| m.content.len()).sum::<usize>());
    }
}
