//! The only lists of methods, layers and conversions.

use crate::layer::{Conversion, LayerKind};
use crate::methods::{clustering, exact, kernel, low_rank};
use crate::{Error, Method, Options, Result};

/// Every method, in the order of the survey.
pub static METHODS: &[&Method] = &[
    &exact::naive::METHOD,
    &exact::exact::METHOD,
    &exact::sink_window::METHOD,
    &exact::top_k::METHOD,
    &clustering::reformer::METHOD,
    &clustering::routing::METHOD,
    &clustering::smyrf::METHOD,
    &clustering::kdeformer::METHOD,
    &clustering::multipole::METHOD,
    &clustering::anna::METHOD,
    &clustering::hyper::METHOD,
    &clustering::prescored_hyper::METHOD,
    &low_rank::loki::METHOD,
    &low_rank::skyformer::METHOD,
    &low_rank::lifted_nystrom::METHOD,
    &low_rank::linformer::METHOD,
    &low_rank::wildcat::METHOD,
    &low_rank::nystromformer::METHOD,
    &low_rank::csalr::METHOD,
    &kernel::performer::METHOD,
    &kernel::gated_linear::METHOD,
    &kernel::polynomial::METHOD,
    &kernel::lev::METHOD,
    &kernel::polysketch::METHOD,
    &kernel::tensor_sketch::METHOD,
];

/// Every layer.
pub static LAYERS: &[&LayerKind] = &[&crate::layers::grouped_query::LAYER];

/// Every conversion of a layer's weights into another form.
pub static CONVERSIONS: &[&Conversion] = &[];

/// The method called `id`, or an error that lists all of them.
pub fn method(id: &str) -> Result<&'static Method> {
    find("method", METHODS, id, |m| m.id)
}

/// Exact attention: what every method is measured against, and what stands in where one has no form.
pub fn baseline() -> &'static Method {
    &exact::exact::METHOD
}

/// Exact attention in which each query sees its own and the `window - 1` keys before it, with its settings.
pub fn sliding_window(window: usize) -> (&'static Method, Options) {
    (&exact::sink_window::METHOD, Options::new().with("sinks", 0usize).with("window", window.max(1)))
}

/// The layer called `id`, or an error that lists all of them.
pub fn layer(id: &str) -> Result<&'static LayerKind> {
    find("layer", LAYERS, id, |l| l.id)
}

/// The conversion called `id`, or an error that lists all of them.
pub fn conversion(id: &str) -> Result<&'static Conversion> {
    find("conversion", CONVERSIONS, id, |c| c.id)
}

fn find<T>(
    kind: &'static str,
    list: &[&'static T],
    id: &str,
    name: fn(&T) -> &'static str,
) -> Result<&'static T> {
    list.iter().copied().find(|x| name(x) == id).ok_or_else(|| Error::UnknownId {
        kind,
        id: id.into(),
        known: list.iter().map(|x| name(x).to_string()).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_unique_and_found() {
        let ids: std::collections::BTreeSet<&str> = METHODS.iter().map(|m| m.id).collect();
        assert_eq!(ids.len(), METHODS.len());
        assert!(METHODS.iter().all(|m| std::ptr::eq(method(m.id).unwrap(), *m)));
        assert!(
            matches!(method("nonsense"), Err(Error::UnknownId { known, .. }) if known.len() == METHODS.len())
        );
        assert!(layer("grouped_query").is_ok() && conversion("nonsense").is_err());
    }

    #[test]
    fn every_file_under_methods_is_listed() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/methods");
        for family in std::fs::read_dir(root).unwrap().map(|e| e.unwrap()) {
            let name = family.file_name().into_string().unwrap();
            if !family.path().is_dir() || name == "common" {
                continue;
            }
            for file in std::fs::read_dir(family.path()).unwrap().map(|e| e.unwrap()) {
                let id = file.file_name().into_string().unwrap().trim_end_matches(".rs").to_string();
                if id == "mod" {
                    continue;
                }
                let listed = METHODS.iter().find(|m| m.id == id);
                let family = listed.map(|m| m.family.name());
                assert_eq!(
                    family,
                    Some(name.as_str()),
                    "methods/{name}/{id} has no registry line in its family"
                );
            }
        }
    }
}
