//! The only lists of methods, layers and conversions.

use crate::conversions::Conversion;
use crate::layer::LayerKind;
use crate::methods::{clustering, exact, kernel, low_rank};
use crate::{Error, Method, Options, Result};
use crate::{conversions, layers};

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
    &clustering::sampled_columns::METHOD,
    &clustering::block_sparse::METHOD,
    &clustering::quest::METHOD,
    &clustering::snap::METHOD,
    &clustering::h2o::METHOD,
    &low_rank::loki::METHOD,
    &low_rank::skyformer::METHOD,
    &low_rank::lifted_nystrom::METHOD,
    &low_rank::linformer::METHOD,
    &low_rank::wildcat::METHOD,
    &low_rank::nystromformer::METHOD,
    &low_rank::csalr::METHOD,
    &kernel::linear::METHOD,
    &kernel::polaformer::METHOD,
    &kernel::performer::METHOD,
    &kernel::crt::METHOD,
    &kernel::hybrid_features::METHOD,
    &kernel::gated_linear::METHOD,
    &kernel::polynomial::METHOD,
    &kernel::lev::METHOD,
    &kernel::polysketch::METHOD,
    &kernel::tensor_sketch::METHOD,
    &kernel::scatterbrain::METHOD,
];

/// Every layer.
pub static LAYERS: &[&LayerKind] = &[
    &layers::grouped_query::LAYER,
    &layers::latent::LAYER,
    &layers::tensor_product::LAYER,
    &layers::collaborative::LAYER,
    &layers::tensorized::LAYER,
    &layers::third_order::LAYER,
    &layers::two_simplicial::LAYER,
    &layers::mode_wise::LAYER,
    &layers::higher_order::LAYER,
    &layers::axial::LAYER,
    &layers::teaformer::LAYER,
    &layers::feature_wise::LAYER,
    &layers::gau::LAYER,
];

/// Every conversion of a layer's weights into another form.
pub static CONVERSIONS: &[&Conversion] = &[
    &conversions::collaborative::CONVERSION,
    &conversions::svd::CONVERSION,
    &conversions::shared_factor::CONVERSION,
    &conversions::tucker::CONVERSION,
    &conversions::trawl::CONVERSION,
    &conversions::tensor_product::CONVERSION,
    &conversions::mla::CONVERSION,
];

/// Returns the method called `id`, or an error that lists all ids.
pub fn method(id: &str) -> Result<&'static Method> {
    find("method", METHODS, id, |m| m.id)
}

/// Returns the layer called `id`, or an error that lists all ids.
pub fn layer(id: &str) -> Result<&'static LayerKind> {
    find("layer", LAYERS, id, |l| l.id)
}

/// Returns the conversion called `id`, or an error that lists all ids.
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

/// Returns exact attention: the reference for every method, and the substitute where a method has no form.
pub fn baseline() -> &'static Method {
    &exact::exact::METHOD
}

/// Returns exact attention in which each query sees its own key and the `window - 1` before it, with its settings.
pub fn sliding_window(window: usize) -> (&'static Method, Options) {
    (&exact::sink_window::METHOD, Options::new().with("sinks", 0usize).with("window", window.max(1)))
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
    fn every_file_under_layers_and_conversions_is_listed() {
        let ids = |folder: &str| -> Vec<String> {
            let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(folder);
            let names =
                std::fs::read_dir(root).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
            let others = ["mod", "common", "testing"];
            names
                .map(|n| n.trim_end_matches(".rs").to_string())
                .filter(|n| !others.contains(&n.as_str()))
                .collect()
        };
        for id in ids("layers") {
            assert_eq!(layer(&id).unwrap().id, id);
        }
        for id in ids("conversions") {
            assert_eq!(conversion(&id).unwrap().id, id);
        }
        for c in CONVERSIONS {
            assert!(layer(c.from).is_ok() && layer(c.to).is_ok(), "{}: {} to {}", c.id, c.from, c.to);
        }
    }

    #[test]
    fn every_file_under_methods_is_listed() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/methods");
        for family in std::fs::read_dir(root).unwrap().map(|e| e.unwrap()) {
            let name = family.file_name().into_string().unwrap();
            if !family.path().is_dir() {
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

    #[test]
    fn a_sliding_window_is_exact_attention_where_it_covers_everything() {
        use crate::testkit::{Case, run_method};
        let case = Case::gaussian(crate::Problem::new(2, 30, 8).causal(), 1);
        let run = |(method, options): (&Method, Options)| run_method(method, &options, &case).0;
        assert_eq!(run(sliding_window(30)), run((baseline(), Options::new())));
        let narrow = run(sliding_window(1));
        assert_eq!(narrow, case.v, "a window of one is the query's own value");
    }
}
