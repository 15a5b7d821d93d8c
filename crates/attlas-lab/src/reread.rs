//! Deserialisation of records: names of the registry as static strings, and numbers that JSON cannot express as NaN.

use serde::{Deserialize, Deserializer};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

/// A name from the registry or from this program.
pub(crate) type Name = &'static str;

/// Interned names; there are few.
static NAMES: Mutex<BTreeSet<Name>> = Mutex::new(BTreeSet::new());

fn fixed(name: String) -> Name {
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = names.get(name.as_str()) {
        return known;
    }
    let name: Name = Box::leak(name.into_boxed_str());
    names.insert(name);
    name
}

pub(crate) fn name<'de, D: Deserializer<'de>>(from: D) -> Result<Name, D::Error> {
    String::deserialize(from).map(fixed)
}

pub(crate) fn names<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Name>, D::Error> {
    Ok(Vec::<String>::deserialize(from)?.into_iter().map(fixed).collect())
}

pub(crate) fn number<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(from)?.unwrap_or(f64::NAN))
}

pub(crate) fn pair<'de, D: Deserializer<'de>>(from: D) -> Result<[f64; 2], D::Error> {
    Ok(<[Option<f64>; 2]>::deserialize(from)?.map(|x| x.unwrap_or(f64::NAN)))
}

pub(crate) fn figures<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<Name, f64>, D::Error> {
    let read = BTreeMap::<String, Option<f64>>::deserialize(from)?;
    Ok(read.into_iter().map(|(name, x)| (fixed(name), x.unwrap_or(f64::NAN))).collect())
}
