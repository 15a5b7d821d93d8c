//! `performer`: random features, drawn by the host's streams.

use crate::methods::hyper::groups;
use crate::methods::linear::FeatureMap;
use crate::plan::Request;
use crate::prims::features::Random;
use crate::prims::positive::MOST_FEATURES;
use crate::prims::signed::{Directions, Kind, Policy, Signed};
use crate::{Form, Result};
use attlas::Support;
use attlas::engine::linear::{DenominatorPolicy, Source};
use attlas::methods::kernel::performer::{METHOD, Map, Params, Performer, RELU_EPS};
use attlas_num::sketch::features::{ExpFeatures, ExpParts, Exponent};
use attlas_num::sketch::{MapOptions, Side};

pub(crate) static FORM: Form = Form {
    method: &METHOD,
    draws: true,
    decodes: true,
    supports: |p, options, _, _| {
        let params = Params::from_options(options).unwrap_or_default();
        Support::unless(
            params.map == Map::Trig && params.denominator == DenominatorPolicy::ExactRow,
            NO_EXACT_ROWS,
        )
        .and_unless(
            params.feature_eps > 0.0,
            "feature_eps is relative to the largest feature of all keys, which the device form does not look for: set it to 0",
        )
        .and_unless(Performer::new(params).num_features(p.d) > MOST_FEATURES, TOO_MANY)
    },
    build: |r| {
        let params = Params::from_options(r.options)?;
        if params.map == Map::Trig {
            return Ok(Box::new(trig(r, params)?));
        }
        let map = params.map;
        let source = Performer::new(params);
        let exponent = Exponent::favor(r.problem.d);
        let parts = parts(r, |index| {
            let omega = source.draw(r.problem.d, index)?;
            let options = MapOptions { scale: r.problem.scale, ..MapOptions::default() };
            let features = ExpFeatures::<f64>::new(&exponent, &omega, map == Map::Hyp, options);
            Ok(features.map_err(attlas::Error::from)?.parts(Side::Query))
        })?;
        let relu = (map == Map::Relu).then_some(RELU_EPS);
        let random = Random { queries: &parts, keys: None, opposite: map == Map::Hyp, relu, lengths: None };
        Ok(Box::new(FeatureMap::random(METHOD.id, r, random)?))
    },
};

fn trig(r: &Request<'_>, params: Params) -> Result<FeatureMap> {
    let (policy, least, root) = (policy(params.denominator), params.den_floor, r.problem.scale.sqrt());
    let source = Performer::new(params);
    let (mut map, mut bases) = (Vec::new(), 0);
    for index in groups(r) {
        let omega = source.draw(r.problem.d, index)?;
        bases = omega.rows();
        map.extend(
            (0..r.problem.d).flat_map(|c| (0..bases).map(move |l| (c, l))).map(|(c, l)| root * omega[(l, c)]),
        );
    }
    let directions = Directions { kind: Kind::Trig, map, bases, weights: 0 };
    let signed = Signed::new(r.device, r.problem, r.element, &directions, policy, least)?;
    Ok(FeatureMap::signed(METHOD.id, r, signed))
}

/// Reason for refusing to recompute rows.
pub(crate) const NO_EXACT_ROWS: &str =
    "denominator = exact_row computes rows again on the host alone: take clamp, strict or zero_row";

/// Returns the number of a policy with a device form.
pub(crate) fn policy(policy: DenominatorPolicy) -> Policy {
    match policy {
        DenominatorPolicy::Strict => Policy::Strict,
        DenominatorPolicy::Clamp | DenominatorPolicy::ExactRow => Policy::Clamp,
        DenominatorPolicy::ZeroRow => Policy::ZeroRow,
    }
}

/// Reason for refusing too many features.
pub(crate) const TOO_MANY: &str = "the device form has room for 1024 features: ask for fewer";

/// Computes one value for every sequence and key head of a request.
pub(crate) fn parts(
    r: &Request<'_>,
    make: impl Fn(attlas::group::GroupIndex) -> Result<ExpParts>,
) -> Result<Vec<ExpParts>> {
    groups(r).map(make).collect()
}
