//! Limits of a template (sizes of values, bytes written, time), and the filters and operators that enforce them.

use super::rewrite::{MUL, OPERAND, PLAIN, REM};
use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Steps that the engine may take.
const FUEL: u64 = 10_000_000;
/// Most bytes of a value beyond those of the conversation; every item of a list or map counts as [`ITEM`].
const VALUE: usize = 1 << 20;
/// Most bytes of text written, beyond 32 times those of the conversation.
const WRITTEN: usize = 4 << 20;
/// Most bytes of all values and all text together.
const TOTAL: usize = 1 << 30;
/// Bytes counted for an item of a list or map.
const ITEM: usize = 32;
/// Deepest nesting of lists and maps.
const DEPTH: usize = 64;
/// The longest padding, precision or number of columns.
const WIDTH: usize = 4096;
/// Time limit of a template.
pub(super) const TIME: Duration = Duration::from_secs(10);

type Made<T> = Result<T, Error>;

fn refused(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}

/// Remaining budget of one rendering.
#[derive(Debug)]
pub(super) struct Budget {
    /// Most bytes of a value.
    value: usize,
    left: AtomicUsize,
    /// Remaining bytes of text.
    unwritten: AtomicUsize,
    end: Instant,
}

impl Budget {
    /// Creates the budget for a conversation of `conversation` bytes.
    pub(super) fn new(conversation: usize) -> Arc<Self> {
        let value = VALUE.saturating_add(conversation.saturating_mul(2));
        let left = AtomicUsize::new(TOTAL.saturating_add(conversation.saturating_mul(64)));
        let unwritten = AtomicUsize::new(WRITTEN.saturating_add(conversation.saturating_mul(32)));
        Arc::new(Self { value, left, unwritten, end: Instant::now() + TIME })
    }

    /// Fails if writing this text would exceed the budget.
    fn write(&self, text: &str) -> Made<()> {
        let rest = |left: usize| left.checked_sub(text.len());
        match self.unwritten.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest) {
            Ok(_) => self.charge(text.len()),
            Err(_) => Err(refused("it writes more text than a conversation has")),
        }
    }

    fn charge(&self, bytes: usize) -> Made<()> {
        if Instant::now() > self.end {
            return Err(refused(format!("it ran for more than {} seconds", TIME.as_secs())));
        }
        let taken = |left: usize| left.checked_sub(bytes);
        match self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken) {
            Ok(_) => Ok(()),
            Err(_) => Err(refused("it builds more text than a conversation has")),
        }
    }

    /// Fails if a value of `bytes` is too large.
    fn make(&self, bytes: Option<usize>) -> Made<()> {
        match bytes.filter(|&b| b <= self.value) {
            Some(bytes) => self.charge(bytes),
            None => Err(refused(format!("it makes a value of more than {} bytes", self.value))),
        }
    }

    /// Counts the bytes of a value, shared parts at every occurrence; an error if they are too many or nested too deep.
    fn weigh(&self, value: &Value) -> Made<usize> {
        let mut bytes = 0usize;
        self.walk(value, 0, &mut bytes, &mut |_| Ok(()))?;
        Ok(bytes)
    }

    fn walk(
        &self,
        value: &Value,
        depth: usize,
        bytes: &mut usize,
        look: &mut dyn FnMut(&Value) -> Made<()>,
    ) -> Made<()> {
        look(value)?;
        *bytes += match value.as_str() {
            Some(text) => text.len() + ITEM,
            None => value.as_bytes().map_or(ITEM, |b| b.len() + ITEM),
        };
        if *bytes > self.value.saturating_mul(2) {
            return Err(refused(format!("it uses a value of more than {} bytes", self.value)));
        }
        if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
            return Ok(());
        }
        if depth == DEPTH {
            return Err(refused(format!("it nests values more than {DEPTH} deep")));
        }
        for item in value.try_iter()? {
            if value.kind() == ValueKind::Map {
                self.walk(&value.get_item(&item)?, depth + 1, bytes, look)?;
            }
            self.walk(&item, depth + 1, bytes, look)?;
        }
        Ok(())
    }

    fn operand(&self, value: Value) -> Made<Value> {
        let bytes = self.weigh(&value)?;
        // Lists are shared, texts are copied.
        self.charge(if value.as_str().is_some() { bytes } else { ITEM })?;
        Ok(value)
    }

    /// Checks that a value for a namespace contains no namespace: none can then contain itself.
    fn plain(&self, value: Value) -> Made<Value> {
        self.walk(&value, 0, &mut 0, &mut |v| {
            let namespace = v.as_object().is_some_and(|o| o.type_name().contains("Namespace"));
            if namespace { Err(refused("a namespace in a namespace")) } else { Ok(()) }
        })?;
        Ok(value)
    }

    fn mul(&self, a: Value, b: Value) -> Made<Value> {
        let number = |v: &Value| v.kind() == ValueKind::Number;
        if number(&a) && number(&b) {
            return arithmetic("*", &a, &b, i64::checked_mul, |x, y| x * y);
        }
        let (what, times) = if number(&b) { (&a, &b) } else { (&b, &a) };
        let times = usize::try_from(times.as_i64().unwrap_or(-1).max(0)).unwrap_or(usize::MAX);
        self.make(self.weigh(what)?.checked_mul(times))?;
        match (what.as_str(), what.kind()) {
            (Some(text), _) if number(&a) || number(&b) => Ok(Value::from(text.repeat(times))),
            (None, ValueKind::Seq) if number(&a) || number(&b) => {
                let items: Vec<Value> = what.try_iter()?.collect();
                Ok((0..times).flat_map(|_| items.iter().cloned()).collect())
            }
            _ => Err(refused(format!("{} * {} has no meaning", a.kind(), b.kind()))),
        }
    }

    fn rem(&self, a: Value, b: Value) -> Made<Value> {
        match a.as_str() {
            Some(text) => {
                let args = match b.kind() {
                    // A tuple holds several arguments; anything else is a single one.
                    ValueKind::Seq if text.matches('%').count() > 1 => b.try_iter()?.collect(),
                    _ => vec![b],
                };
                self.format(FormatStyle::Printf, text, &args)
            }
            None => arithmetic("%", &a, &b, floor_rem, |x, y| x - y * (x / y).floor()),
        }
    }

    /// Applies a format whose fields are at most [`WIDTH`] wide and do not repeat long arguments.
    fn format(&self, style: FormatStyle, text: &str, args: &[Value]) -> Made<Value> {
        let (mut fields, mut digits, mut number) = (0usize, 0usize, 0usize);
        for c in text.chars() {
            fields += usize::from(matches!(c, '%' | '{'));
            (digits, number) = match c.to_digit(10) {
                Some(d) => (digits + 1, number.saturating_mul(10).saturating_add(d as usize)),
                None => (0, 0),
            };
            if digits > 0 && number > WIDTH && fields > 0 || c == '*' && fields > 0 {
                return Err(refused(format!("it formats with a width of more than {WIDTH}")));
            }
        }
        let mut longest = WIDTH;
        for arg in args {
            longest = longest.max(self.weigh(arg)?);
        }
        let used = fields.checked_mul(longest).and_then(|n| n.checked_add(text.len()));
        // The bound is far above the usual length: only an excess over the limit counts.
        if used.is_none_or(|n| n > self.value.saturating_mul(8)) {
            self.make(used)?;
        }
        let made = format(style, text, args)?;
        self.make(Some(made.len()))?;
        Ok(Value::from(made))
    }

    fn replace(&self, text: &str, from: &str, to: &str, count: Option<i64>) -> Made<String> {
        let limit =
            count.filter(|&n| n >= 0).map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX));
        let found = text.matches(from).count().min(limit);
        self.make(found.checked_mul(to.len()).and_then(|n| n.checked_add(text.len())))?;
        Ok(text.replacen(from, to, limit))
    }

    fn join(&self, list: &Value, with: &str, attribute: Option<&str>) -> Made<String> {
        let mut out = String::new();
        for (i, item) in list.try_iter()?.enumerate() {
            let item = match attribute {
                Some(name) => item.get_attr(name)?,
                None => item,
            };
            let next = out.len().saturating_add(self.weigh(&item)?).saturating_add(with.len());
            if next > self.value {
                self.make(Some(next))?;
            }
            if i > 0 {
                out.push_str(with);
            }
            out.push_str(&python(&item));
        }
        self.charge(out.len())?;
        Ok(out)
    }

    fn indent(&self, text: &str, by: &str, first: bool, blank: bool) -> Made<String> {
        self.make(text.split('\n').count().checked_mul(by.len()).and_then(|n| n.checked_add(text.len())))?;
        let line = |(i, line): (usize, &str)| {
            let indented = if i == 0 { first } else { blank || !line.is_empty() };
            format!("{}{line}", if indented { by } else { "" })
        };
        Ok(text.split('\n').enumerate().map(line).collect::<Vec<_>>().join("\n"))
    }

    fn count(&self, n: usize) -> Made<usize> {
        if n > WIDTH { Err(refused(format!("it counts to more than {WIDTH}"))) } else { Ok(n) }
    }

    fn method(&self, state: &mut State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Made<Value> {
        let mut bytes = self.weigh(value)?;
        for arg in args {
            bytes = bytes.saturating_add(self.weigh(arg)?);
        }
        // In the worst case, splitting makes a value of every letter.
        self.charge(bytes.saturating_mul(if method.starts_with("split") { ITEM } else { 1 }))?;
        let text = |i: usize| args.get(i).and_then(Value::as_str);
        match (value.as_str(), method) {
            (Some(s), "replace") if text(0).is_some() && text(1).is_some() => {
                let (from, to) = (text(0).unwrap_or_default(), text(1).unwrap_or_default());
                Ok(Value::from(self.replace(s, from, to, args.get(2).and_then(Value::as_i64))?))
            }
            (Some(s), "join") if args.len() == 1 => Ok(Value::from(self.join(&args[0], s, None)?)),
            (Some(s), "format") => self.format(FormatStyle::StrFormat, s, args),
            _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
        }
    }
}

fn floor_rem(a: i64, b: i64) -> Option<i64> {
    let r = a.checked_rem(b)?;
    Some(if r != 0 && (r < 0) != (b < 0) { r + b } else { r })
}

fn arithmetic(
    sign: &str,
    a: &Value,
    b: &Value,
    whole: fn(i64, i64) -> Option<i64>,
    real: fn(f64, f64) -> f64,
) -> Made<Value> {
    let failed = || refused(format!("unable to calculate {} {sign} {}", a.kind(), b.kind()));
    if a.is_integer() && b.is_integer() {
        let (a, b) = (a.as_i64().ok_or_else(failed)?, b.as_i64().ok_or_else(failed)?);
        return whole(a, b).map(Value::from).ok_or_else(failed);
    }
    let number = |v: &Value| f64::try_from(v.clone()).map_err(|_| failed());
    let result = real(number(a)?, number(b)?);
    if result.is_nan() { Err(failed()) } else { Ok(Value::from(result)) }
}

/// Formats a value as Python does.
fn python(value: &Value) -> String {
    match value.kind() {
        ValueKind::None => "None".into(),
        ValueKind::Bool if value.is_true() => "True".into(),
        ValueKind::Bool => "False".into(),
        _ => value.to_string(),
    }
}

/// Writer of JSON in the form of Python's `json.dumps`, without escapes for HTML or non-ASCII letters.
struct Json<'a> {
    out: String,
    budget: &'a Budget,
    indent: Option<usize>,
    sorted: bool,
    /// After an item and after a key.
    separators: [String; 2],
}

impl Json<'_> {
    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn text(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' => {
                    let _ = write!(self.out, "\\u{:04x}", c as u32);
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }

    fn value(&mut self, value: &Value, depth: usize) -> Made<()> {
        // Punctuation and line breaks come on top of the counted bytes of the values.
        if self.out.len() > self.budget.value.saturating_mul(2) {
            return Err(refused("its JSON is too long"));
        }
        if let Some(text) = value.as_str() {
            self.text(text);
            return Ok(());
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Undefined => return Err(refused("an undefined value has no JSON")),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                self.list('{', '}', &keys, depth, |json, key| {
                    json.text(&match key.as_str() {
                        Some(text) => text.to_owned(),
                        None => key.to_string(),
                    });
                    json.out.push_str(&json.separators[1].clone());
                    json.value(&value.get_item(key)?, depth + 1)
                })?;
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list('[', ']', &items, depth, |json, item| json.value(item, depth + 1))?;
            }
            _ => self.out.push_str(&value.to_string()),
        }
        Ok(())
    }

    fn list(
        &mut self,
        open: char,
        close: char,
        items: &[Value],
        depth: usize,
        mut write: impl FnMut(&mut Self, &Value) -> Made<()>,
    ) -> Made<()> {
        self.out.push(open);
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                self.out.push_str(&self.separators[0].clone());
            }
            self.line(depth + 1);
            write(self, item)?;
        }
        if !items.is_empty() {
            self.line(depth);
        }
        self.out.push(close);
        Ok(())
    }
}

fn to_json(budget: &Budget, value: &Value, indent: Option<usize>, kwargs: &Kwargs) -> Made<Value> {
    budget.weigh(value)?;
    let indent = match kwargs.get::<Option<usize>>("indent")?.or(indent) {
        Some(n) => Some(budget.count(n)?),
        None => None,
    };
    let given: Option<Vec<String>> = kwargs.get("separators")?;
    // As in Python, nothing follows a comma that ends a line.
    let usual = [if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()];
    let separators = match given.as_deref() {
        None => usual,
        Some([item, key]) => [item.clone(), key.clone()],
        Some(_) => return Err(refused("separators are two texts")),
    };
    let sorted = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let _ = kwargs.get::<Option<bool>>("ensure_ascii")?;
    kwargs.assert_all_used()?;
    let mut json = Json { out: String::new(), budget, indent, sorted, separators };
    json.value(value, 0)?;
    budget.charge(json.out.len())?;
    Ok(Value::from(json.out))
}

/// Replaces operators, filters and methods of `environment` by versions that respect `budget`.
pub(super) fn install(environment: &mut Environment<'_>, budget: &Arc<Budget>) {
    environment.set_fuel(Some(FUEL));
    environment.remove_global("debug");
    let b = budget.clone();
    environment.add_function(OPERAND, move |value: Value| b.operand(value));
    let b = budget.clone();
    environment.add_function(PLAIN, move |value: Value| b.plain(value));
    let b = budget.clone();
    environment.add_function(MUL, move |x: Value, y: Value| b.mul(x, y));
    let b = budget.clone();
    environment.add_function(REM, move |x: Value, y: Value| b.rem(x, y));
    let b = budget.clone();
    environment
        .set_unknown_method_callback(move |state, value, method, args| b.method(state, value, method, args));
    let b = budget.clone();
    environment.set_formatter(move |out, _, value| {
        b.weigh(value)?;
        if value.is_undefined() {
            return Ok(());
        }
        let text = python(value);
        b.write(&text)?;
        out.write_str(&text).map_err(|_| refused("its text is too long"))
    });

    let b = budget.clone();
    environment.add_filter("replace", move |text: String, from: String, to: String, count: Option<i64>| {
        b.replace(&text, &from, &to, count)
    });
    let b = budget.clone();
    environment.add_filter(
        "join",
        move |list: Value, with: Option<String>, attribute: Option<String>, kwargs: Kwargs| {
            let with = kwargs.get::<Option<String>>("d")?.or(with).unwrap_or_default();
            let attribute = kwargs.get::<Option<String>>("attribute")?.or(attribute);
            kwargs.assert_all_used()?;
            b.join(&list, &with, attribute.as_deref())
        },
    );
    let b = budget.clone();
    environment.add_filter(
        "indent",
        move |text: String,
              width: Option<Value>,
              first: Option<bool>,
              blank: Option<bool>,
              kwargs: Kwargs| {
            let by = match kwargs.get::<Option<Value>>("width")?.or(width) {
                None => "    ".to_owned(),
                Some(text) if text.as_str().is_some() => text.to_string(),
                Some(n) => " ".repeat(b.count(usize::try_from(n)?)?),
            };
            let first = kwargs.get::<Option<bool>>("first")?.or(first).unwrap_or(false);
            let blank = kwargs.get::<Option<bool>>("blank")?.or(blank).unwrap_or(false);
            kwargs.assert_all_used()?;
            b.indent(&text, &by, first, blank)
        },
    );
    let b = budget.clone();
    environment.add_filter(
        "slice",
        move |state: &State<'_, '_>, list: Value, count: usize, fill: Option<Value>| {
            minijinja::filters::slice(state, list, b.count(count)?, fill)
        },
    );
    let b = budget.clone();
    environment.add_filter(
        "batch",
        move |state: &State<'_, '_>, list: Value, count: usize, fill: Option<Value>| {
            minijinja::filters::batch(state, list, b.count(count)?, fill)
        },
    );
    let b = budget.clone();
    environment.add_filter("format", move |text: String, args: Rest<Value>| {
        b.format(FormatStyle::Printf, &text, &args)
    });
    let b = budget.clone();
    environment.add_filter("tojson", move |value: Value, indent: Option<usize>, kwargs: Kwargs| {
        to_json(&b, &value, indent, &kwargs)
    });
    // These can make a value of every letter.
    for name in ["list", "split", "lines"] {
        let b = budget.clone();
        let inner: fn(&mut State<'_, '_>, &[Value]) -> Made<Value> = match name {
            "list" => |state, args| state_filter(state, "__attlas_list", args),
            "split" => |state, args| state_filter(state, "__attlas_split", args),
            _ => |state, args| state_filter(state, "__attlas_lines", args),
        };
        environment.add_filter(name, move |state: &mut State<'_, '_>, args: Rest<Value>| {
            let text = args.first().and_then(Value::as_str).map_or(0, str::len);
            b.charge(text.saturating_mul(ITEM))?;
            inner(state, &args)
        });
    }
    environment.add_filter("__attlas_list", minijinja::filters::list);
    environment.add_filter("__attlas_split", minijinja::filters::split);
    environment.add_filter("__attlas_lines", minijinja::filters::lines);
}

fn state_filter(state: &mut State<'_, '_>, name: &str, args: &[Value]) -> Made<Value> {
    state.apply_filter(name, args)
}
