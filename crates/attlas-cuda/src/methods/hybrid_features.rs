//! `hybrid_features`: hyperbolic and trigonometric features mixed by angle or distance, drawn by the host's streams.

use crate::Form;
use crate::methods::hyper::groups;
use crate::methods::linear::FeatureMap;
use crate::methods::performer::{NO_EXACT_ROWS, policy};
use crate::prims::signed::{Directions, Kind, MOST_DIRECTIONS, MOST_FEATURES, Signed};
use attlas::Support;
use attlas::engine::linear::DenominatorPolicy;
use attlas::methods::kernel::hybrid_features::{Kind as Mixture, METHOD, Params};
use attlas_num::sketch::{Coupling, draw_directions};

pub(crate) static FORM: Form = Form {
    method: &METHOD,
    draws: true,
    decodes: true,
    supports: |_, options, _, _| {
        let params = Params::from_options(options).unwrap_or_default();
        let (bases, weights) = (params.bases, params.weights);
        let features = Directions { kind: kind(params.kind), map: Vec::new(), bases, weights }.features();
        Support::unless(
            params.kind == Mixture::Clusters,
            "kind = clusters needs the clusters of all queries and keys, which are found on the host alone",
        )
        .and_unless(params.denominator == DenominatorPolicy::ExactRow, NO_EXACT_ROWS)
        .and_unless(
            bases + weights > MOST_DIRECTIONS || features > MOST_FEATURES,
            "the device form has room for 1200 features of 512 directions: ask for fewer bases or weights",
        )
    },
    build: |r| {
        let params = Params::from_options(r.options)?;
        let Params { bases, weights, directions, denominator, den_floor, seed, .. } = params;
        let kind = kind(params.kind);
        let width = if kind == Kind::Gaussian { params.tau } else { 1.0 };
        let (d, root) = (r.problem.d, r.problem.scale.sqrt());
        let draw =
            |coupling, count, key| draw_directions(coupling, count, d, key).map_err(attlas::Error::from);
        let mut map = Vec::new();
        for index in groups(r) {
            let key = index.stream_key(seed);
            let base = draw(directions.coupling(), bases, key.named("directions"))?;
            let weight = draw(Coupling::Iid, weights, key.named("weights"))?;
            for c in 0..d {
                map.extend((0..bases).map(|l| root * base[(l, c)]));
                map.extend((0..weights).map(|l| root / width * weight[(l, c)]));
            }
        }
        let directions = Directions { kind, map, bases, weights };
        let signed =
            Signed::new(r.device, r.problem, r.element, &directions, policy(denominator), den_floor)?;
        Ok(Box::new(FeatureMap::signed(METHOD.id, r, signed)))
    },
};

/// The mixture in the kernel; clusters have none.
fn kind(mixture: Mixture) -> Kind {
    match mixture {
        Mixture::Gaussian => Kind::Gaussian,
        Mixture::Angular | Mixture::Clusters => Kind::Angular,
    }
}
