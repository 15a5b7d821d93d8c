//! `polaformer`: powers of positive and negative parts, one map of queries for each half of the values.

use crate::Form;
use crate::methods::linear::FeatureMap;
use crate::methods::performer::TOO_MANY;
use crate::prims::features::{Features, Rows};
use crate::prims::positive::{Eps, MOST_FEATURES};
use attlas::Support;
use attlas::methods::kernel::polaformer::{METHOD, Params, Polarity};

pub(crate) static FORM: Form = Form {
    method: &METHOD,
    draws: false,
    decodes: true,
    supports: |p, _, _, _| Support::unless(2 * p.d > MOST_FEATURES, TOO_MANY),
    build: |r| {
        let (p, params) = (r.problem, Params::from_options(r.options)?);
        let eps = Eps { value: params.den_eps, per_key: true };
        let maps = Polarity::new(p, params, r.calibration)?;
        let [powers, logs] = [0, 1]
            .map(|i| -> Vec<f64> { maps.maps().iter().flat_map(|m| m.parts()[i].iter().copied()).collect() });
        let features = Features::pola(r.device, r.element, p.d, [&powers, &logs])?;
        let half = p.d_v / 2;
        let streams = vec![(Rows::Queries, 0..half), (Rows::Opposite, half..p.d_v)];
        Ok(Box::new(FeatureMap::new(METHOD.id, r, features, eps, Some(streams))?))
    },
};
