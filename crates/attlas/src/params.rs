//! Parameters declared once: documentation, type, default and range.
//!
//! [`params!`](crate::params!) declares a struct from a list of fields and derives the rest: [`Default`], the table
//! `SPECS` that help texts quote, `from_options` that reads untyped [`Options`], and `validate`.
//! [`choices!`](crate::choices!) declares a parameter that is one of a few words.

use crate::{Error, Result};
use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::RangeInclusive;

/// An untyped parameter value, as written on a command line, in a recipe or in a record.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(untagged)]
pub enum Value {
    /// `true` or `false`.
    Bool(bool),
    /// A whole number.
    Int(u64),
    /// A real number.
    Float(f64),
    /// A word.
    Text(String),
}

impl Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Value::Bool(x) => x.fmt(f),
            Value::Int(x) => x.fmt(f),
            Value::Float(x) => x.fmt(f),
            Value::Text(x) => x.fmt(f),
        }
    }
}

impl From<&str> for Value {
    /// Reads a number or a truth value if the text is one, and a word otherwise.
    fn from(text: &str) -> Self {
        let plain = text.replace('_', "");
        match text {
            "true" => Value::Bool(true),
            "false" => Value::Bool(false),
            _ => plain
                .parse()
                .map(Value::Int)
                .or_else(|_| plain.parse().map(Value::Float))
                .unwrap_or_else(|_| Value::Text(text.into())),
        }
    }
}

macro_rules! value_from {
    ($($t:ty => $variant:ident as $to:ty),*) => { $(
        impl From<$t> for Value {
            fn from(x: $t) -> Self { Value::$variant(x as $to) }
        }
    )* };
}
value_from!(usize => Int as u64, u64 => Int as u64, u32 => Int as u64, f64 => Float as f64, bool => Bool as bool);

macro_rules! value_from_signed {
    ($($t:ty),*) => { $(
        impl From<$t> for Value {
            /// Keeps a negative number as a real one, as reading it from text does, so no parameter takes it for a
            /// large whole number.
            fn from(x: $t) -> Self {
                u64::try_from(x).map_or(Value::Float(x as f64), Value::Int)
            }
        }
    )* };
}
value_from_signed!(i32, i64, isize);

impl From<f32> for Value {
    /// Converts through the shortest decimal that reads back as `x`: `0.1f32` is 0.1, not 0.10000000149.
    fn from(x: f32) -> Self {
        Value::Float(x.to_string().parse().unwrap_or(f64::from(x)))
    }
}

impl From<String> for Value {
    fn from(x: String) -> Self {
        Value::from(x.as_str())
    }
}

/// Untyped parameters by name.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Options(BTreeMap<String, Value>);

impl Options {
    /// Makes options without any parameter: all defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the options with `name` set to `value`.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.set(name, value);
        self
    }

    /// Sets `name` to `value`.
    pub fn set(&mut self, name: &str, value: impl Into<Value>) {
        self.0.insert(name.into(), value.into());
    }

    /// Returns the value of `name`, if set.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }

    /// Iterates over the set parameters, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(k, v)| (k.as_str(), v))
    }

    /// Returns true if nothing is set.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Display for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts: Vec<String> = self.0.iter().map(|(k, v)| format!("{k}={v}")).collect();
        f.write_str(&parts.join(","))
    }
}

/// Description of a parameter.
#[derive(Clone, Copy)]
pub struct ParamSpec {
    /// Its name.
    pub name: &'static str,
    /// Its documentation.
    pub doc: &'static str,
    /// "integer", "number", "boolean", "choice" or "sizes".
    pub kind: &'static str,
    /// Its default.
    pub default: fn() -> Value,
    /// Returns the accepted values, in words.
    pub accepted: fn() -> String,
}

impl std::fmt::Debug for ParamSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ParamSpec")
            .field("name", &self.name)
            .field("kind", &self.kind)
            .field("default", &format_args!("{}", (self.default)()))
            .field("accepted", &format_args!("{}", (self.accepted)()))
            .finish_non_exhaustive()
    }
}

/// A struct of parameters, as [`params!`](crate::params!) declares it.
pub trait ParamSet: Clone + std::fmt::Debug + Default + PartialEq + Send + Sync + 'static {
    /// Descriptions of the parameters, in order of declaration.
    const SPECS: &'static [ParamSpec];

    /// Overrides the defaults by `options` and checks them.
    fn from_options(options: &Options) -> Result<Self>;

    /// Checks every range.
    fn validate(&self) -> Result<()>;

    /// Returns every parameter by name.
    fn to_options(&self) -> Options;
}

/// A type that a parameter can have.
pub trait ParamValue: Sized + Clone {
    /// Type of its range.
    type Bound: PartialOrd + Display + Copy;
    /// "integer", "number", "boolean", "choice" or "sizes".
    const KIND: &'static str;
    /// Reads an untyped value; `None` if it is not of this type.
    fn from_value(value: &Value) -> Option<Self>;
    /// Returns the untyped value.
    fn to_value(&self) -> Value;
    /// Returns true if it lies in `range`.
    fn within(&self, range: &RangeInclusive<Self::Bound>) -> bool;
    /// Returns the accepted values, in words.
    fn accepted(range: Option<&RangeInclusive<Self::Bound>>) -> String;
}

macro_rules! integer_param {
    ($($t:ty),*) => { $(
        impl ParamValue for $t {
            type Bound = $t;
            const KIND: &'static str = "integer";
            fn from_value(value: &Value) -> Option<Self> {
                match *value {
                    Value::Int(x) => <$t>::try_from(x).ok(),
                    Value::Float(x) if x >= 0.0 && x.fract() == 0.0 && x < 9e15 => <$t>::try_from(x as u64).ok(),
                    _ => None,
                }
            }
            fn to_value(&self) -> Value {
                Value::Int(*self as u64)
            }
            fn within(&self, range: &RangeInclusive<Self::Bound>) -> bool {
                range.contains(self)
            }
            fn accepted(range: Option<&RangeInclusive<Self::Bound>>) -> String {
                match range {
                    Some(r) if *r.end() == <$t>::MAX => format!("a whole number from {}", r.start()),
                    Some(r) => format!("a whole number from {} to {}", r.start(), r.end()),
                    None => "a whole number".into(),
                }
            }
        }
    )* };
}
integer_param!(usize, u64);

impl ParamValue for f64 {
    type Bound = f64;
    const KIND: &'static str = "number";
    fn from_value(value: &Value) -> Option<Self> {
        match *value {
            Value::Int(x) => Some(x as f64),
            Value::Float(x) => Some(x),
            _ => None,
        }
    }
    fn to_value(&self) -> Value {
        Value::Float(*self)
    }
    fn within(&self, range: &RangeInclusive<f64>) -> bool {
        range.contains(self)
    }
    fn accepted(range: Option<&RangeInclusive<f64>>) -> String {
        match range {
            Some(r) => format!("a number from {} to {}", r.start(), r.end()),
            None => "a number".into(),
        }
    }
}

impl ParamValue for bool {
    type Bound = u8;
    const KIND: &'static str = "boolean";
    fn from_value(value: &Value) -> Option<Self> {
        match *value {
            Value::Bool(x) => Some(x),
            _ => None,
        }
    }
    fn to_value(&self) -> Value {
        Value::Bool(*self)
    }
    fn within(&self, _: &RangeInclusive<u8>) -> bool {
        true
    }
    fn accepted(_: Option<&RangeInclusive<u8>>) -> String {
        "true or false".into()
    }
}

/// Sizes of the modes of a tensor or grid, spelt `3x4x5`; a single size is a plain number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Sizes(pub Vec<usize>);

impl Sizes {
    /// Returns the product of the sizes, or `None` on overflow.
    pub fn product(&self) -> Option<usize> {
        self.0.iter().try_fold(1usize, |a, &b| a.checked_mul(b))
    }
}

impl ParamValue for Sizes {
    type Bound = usize;
    const KIND: &'static str = "sizes";
    fn from_value(value: &Value) -> Option<Self> {
        let sizes: Option<Vec<usize>> = value.to_string().split('x').map(|part| part.parse().ok()).collect();
        sizes.map(Self)
    }
    fn to_value(&self) -> Value {
        let words: Vec<String> = self.0.iter().map(usize::to_string).collect();
        Value::Text(words.join("x"))
    }
    fn within(&self, range: &RangeInclusive<usize>) -> bool {
        self.0.iter().all(|n| range.contains(n))
    }
    fn accepted(range: Option<&RangeInclusive<usize>>) -> String {
        format!("sizes such as 16x32, each {}", usize::accepted(range))
    }
}

/// `None` is spelt `auto`: the method decides from the problem, as the parameter's documentation says.
impl<P: ParamValue> ParamValue for Option<P> {
    type Bound = P::Bound;
    const KIND: &'static str = P::KIND;
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Text(word) if word == "auto" => Some(None),
            other => P::from_value(other).map(Some),
        }
    }
    fn to_value(&self) -> Value {
        self.as_ref().map_or(Value::Text("auto".into()), P::to_value)
    }
    fn within(&self, range: &RangeInclusive<P::Bound>) -> bool {
        self.as_ref().is_none_or(|x| x.within(range))
    }
    fn accepted(range: Option<&RangeInclusive<P::Bound>>) -> String {
        format!("auto or {}", P::accepted(range))
    }
}

/// Reads the value given for `name`; called by [`params!`](crate::params!).
pub fn read_param<P: ParamValue>(
    name: &str,
    value: &Value,
    range: Option<&RangeInclusive<P::Bound>>,
) -> Result<P> {
    P::from_value(value).ok_or_else(|| Error::param(name, value, P::accepted(range)))
}

/// Checks the range of a value; called by [`params!`](crate::params!).
pub fn check_param<P: ParamValue>(
    name: &str,
    value: &P,
    range: Option<&RangeInclusive<P::Bound>>,
) -> Result<()> {
    match range {
        Some(r) if !value.within(r) => Err(Error::param(name, value.to_value(), P::accepted(range))),
        _ => Ok(()),
    }
}

/// Declares the parameters of a method.
///
/// ```
/// attlas::params! {
///     /// Parameters of an example.
///     pub struct Params {
///         /// Keys kept.
///         samples: usize = 256, in 1..=1 << 20;
///         /// Share of them that is drawn at random; decided from the problem where it is auto.
///         share: Option<f64> = None, in 0.0..=1.0;
///         /// Whether to clip.
///         clip: bool = false;
///     }
/// }
/// let options = attlas::Options::new().with("samples", 12).with("share", 0.5);
/// let params = Params::from_options(&options).unwrap();
/// assert_eq!((params.samples, params.share, params.clip), (12, Some(0.5), false));
/// let error = Params::from_options(&attlas::Options::new().with("samples", 0)).unwrap_err();
/// assert!(error.to_string().contains("a whole number from 1 to 1048576"));
/// ```
#[macro_export]
macro_rules! params {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident {
            $( $(#[doc = $doc:literal])* $field:ident : $type:ty = $default:expr $(, in $range:expr)? ; )*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq)]
        $vis struct $name {
            $( $(#[doc = $doc])* pub $field: $type, )*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $( $field: $default, )* }
            }
        }

        impl $name {
            /// Descriptions of the parameters, in order of declaration.
            $vis const SPECS: &'static [$crate::params::ParamSpec] = &[ $(
                $crate::params::ParamSpec {
                    name: stringify!($field),
                    doc: concat!($($doc, "\n",)* ""),
                    kind: <$type as $crate::params::ParamValue>::KIND,
                    default: || {
                        let value: $type = $default;
                        $crate::params::ParamValue::to_value(&value)
                    },
                    accepted: || <$type as $crate::params::ParamValue>::accepted($crate::params!(@range $type $(, $range)?).as_ref()),
                },
            )* ];

            /// Overrides the defaults by `options` and checks them.
            $vis fn from_options(options: &$crate::Options) -> $crate::Result<Self> {
                #[allow(unused_mut)]
                let mut params = Self::default();
                for (name, value) in options.iter() {
                    match name {
                        $( stringify!($field) => {
                            params.$field = $crate::params::read_param(
                                name, value, $crate::params!(@range $type $(, $range)?).as_ref())?;
                        } )*
                        _ => {
                            let _ = value;
                            return Err($crate::Error::UnknownParam {
                                name: name.into(),
                                accepted: vec![ $( stringify!($field).into() ),* ],
                            });
                        }
                    }
                }
                params.validate()?;
                Ok(params)
            }

            /// Checks the range of every parameter.
            $vis fn validate(&self) -> $crate::Result<()> {
                $( $crate::params::check_param(
                    stringify!($field), &self.$field, $crate::params!(@range $type $(, $range)?).as_ref())?; )*
                Ok(())
            }
        }

        impl $crate::params::ParamSet for $name {
            const SPECS: &'static [$crate::params::ParamSpec] = $name::SPECS;
            fn from_options(options: &$crate::Options) -> $crate::Result<Self> {
                $name::from_options(options)
            }
            fn validate(&self) -> $crate::Result<()> {
                $name::validate(self)
            }
            fn to_options(&self) -> $crate::Options {
                $crate::Options::new()
                    $( .with(stringify!($field), $crate::params::ParamValue::to_value(&self.$field)) )*
            }
        }
    };
    (@range $type:ty, $range:expr) => {{
        let range: std::ops::RangeInclusive<<$type as $crate::params::ParamValue>::Bound> = $range;
        Some(range)
    }};
    (@range $type:ty) => {
        None::<std::ops::RangeInclusive<<$type as $crate::params::ParamValue>::Bound>>
    };
}

/// Declares a parameter type that is one of a few words.
///
/// ```
/// attlas::choices! {
///     /// How keys are drawn.
///     pub enum Sampling {
///         /// Every key at most once.
///         WithoutReplacement = "without_replacement",
///         /// Independently.
///         WithReplacement = "with_replacement",
///     }
/// }
/// use attlas::params::{ParamValue, Value};
/// assert_eq!(Sampling::from_value(&Value::from("with_replacement")), Some(Sampling::WithReplacement));
/// assert_eq!(Sampling::accepted(None), "one of without_replacement, with_replacement");
/// ```
#[macro_export]
macro_rules! choices {
    (
        $(#[$meta:meta])*
        $vis:vis enum $name:ident { $( $(#[$vmeta:meta])* $variant:ident = $word:literal ),* $(,)? }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        $vis enum $name { $( $(#[$vmeta])* $variant ),* }

        impl $crate::params::ParamValue for $name {
            type Bound = u8;
            const KIND: &'static str = "choice";
            fn from_value(value: &$crate::params::Value) -> Option<Self> {
                match value.to_string().as_str() {
                    $( $word => Some(Self::$variant), )*
                    _ => None,
                }
            }
            fn to_value(&self) -> $crate::params::Value {
                $crate::params::Value::Text(match self { $( Self::$variant => $word ),* }.into())
            }
            fn within(&self, _: &std::ops::RangeInclusive<u8>) -> bool {
                true
            }
            fn accepted(_: Option<&std::ops::RangeInclusive<u8>>) -> String {
                format!("one of {}", [ $( $word ),* ].join(", "))
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    params! {
        /// For the tests.
        struct Params {
            /// A count.
            /// Two lines.
            samples: usize = 8, in 1..=100;
            /// A share.
            share: Option<f64> = None, in 0.0..=1.0;
            /// A switch.
            clip: bool = true;
            /// A stream.
            seed: u64 = 0, in 0..=u64::MAX;
        }
    }

    #[test]
    fn options_override_defaults_and_are_checked() {
        let read = |pairs: &[(&str, &str)]| {
            Params::from_options(&pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v)))
        };
        let p = read(&[("samples", "1_0"), ("share", "1"), ("clip", "false")]).unwrap();
        assert_eq!(p, Params { samples: 10, share: Some(1.0), clip: false, seed: 0 });
        assert_eq!(read(&[("share", "auto")]).unwrap().share, None);
        for bad in
            [("samples", "101"), ("samples", "-1"), ("samples", "1.5"), ("share", "nan"), ("clip", "1")]
        {
            assert!(matches!(read(&[bad]), Err(Error::InvalidParam { .. })), "{bad:?}");
        }
        match read(&[("sample", "3")]) {
            Err(Error::UnknownParam { accepted, .. }) => {
                assert_eq!(accepted, ["samples", "share", "clip", "seed"])
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn negative_numbers_are_refused_as_they_were_written() {
        let values = [Value::from(-1i32), Value::from(-1i64), Value::from(-1isize), Value::from("-1")];
        for value in values {
            let error = Params::from_options(&Options::new().with("seed", value)).unwrap_err();
            assert_eq!(
                error.to_string(),
                "parameter seed = -1 is not accepted; expected a whole number from 0"
            );
        }
        assert_eq!((Value::from(7i64), Value::from(7u32)), (Value::Int(7), Value::Int(7)));
        assert_eq!(Value::from(i64::MAX), Value::Int(i64::MAX as u64));
        assert_eq!(Value::from(0.1f32), Value::Float(0.1));
    }

    #[test]
    fn specs_print_their_values() {
        assert_eq!(
            format!("{:?}", Params::SPECS[0]),
            "ParamSpec { name: \"samples\", kind: \"integer\", default: 8, accepted: a whole number from 1 to 100, .. }"
        );
    }

    #[test]
    fn sizes_are_read_and_written_with_crosses() {
        assert_eq!(Sizes::from_value(&Value::from("3x4x5")), Some(Sizes(vec![3, 4, 5])));
        assert_eq!(Sizes::from_value(&Value::from("7")), Some(Sizes(vec![7])));
        for bad in ["", "3x", "axb", "3.5", "-1x2"] {
            assert_eq!(Sizes::from_value(&Value::from(bad)), None, "{bad}");
        }
        assert_eq!(Sizes(vec![3, 4]).to_value(), Value::Text("3x4".into()));
        assert_eq!((Sizes(vec![3, 4]).product(), Sizes(vec![usize::MAX, 2]).product()), (Some(12), None));
        assert!(Sizes(vec![1, 2]).within(&(1..=2)) && !Sizes(vec![0, 2]).within(&(1..=2)));
    }

    #[test]
    fn specs_quote_the_declaration() {
        let spec = &Params::SPECS[0];
        assert_eq!((spec.name, spec.kind), ("samples", "integer"));
        assert_eq!((spec.default)(), Value::Int(8));
        assert_eq!((spec.accepted)(), "a whole number from 1 to 100");
        assert_eq!(spec.doc, " A count.\n Two lines.\n");
    }
}
