//! `crt`: positive random features with an exponent that is fixed, calibrated, or, without a mask, fitted to the data.

use crate::methods::hyper::groups;
use crate::methods::linear::FeatureMap;
use crate::methods::performer::{TOO_MANY, parts};
use crate::plan::{Request, unsupported};
use crate::prims::features::Random;
use crate::prims::positive::MOST_FEATURES;
use crate::{Form, Result};
use attlas::engine::linear::{Shape, Source};
use attlas::methods::kernel::crt::{Crt, METHOD, Params, Variant};
use attlas::{Mask, Support};
use attlas_num::sketch::features::{ExpFeatures, ExpParts, Exponent};
use attlas_num::sketch::{MapOptions, Side};

pub(crate) static FORM: Form = Form {
    method: &METHOD,
    draws: true,
    decodes: true,
    supports: |p, options, _, _| {
        let params = Params::from_options(options).unwrap_or_default();
        let features =
            params.features.unwrap_or_else(|| attlas_num::sketch::features::default_num_features(p.d));
        Support::unless(features > MOST_FEATURES, TOO_MANY)
    },
    build: |r| Ok(Box::new(build(r)?)),
};

fn build(r: &Request<'_>) -> Result<FeatureMap> {
    let (p, params) = (r.problem, Params::from_options(r.options)?);
    // Without a mask the exponent is fitted to the data of the run, unless it is given.
    let fitted = p.mask == Mask::None && params.a.is_none() && r.calibration.is_none();
    if fitted && params.variant != Variant::Oprf {
        let reason = "without a mask the moments that this variant is fitted to are taken on the host alone: pass a \
                      calibration, or take variant = oprf";
        return Err(unsupported(METHOD.id, reason));
    }
    let antithetic = params.antithetic;
    let source = Crt::new(p, params, r.calibration)?;
    let side = |side: Side| {
        parts(r, |index| {
            let omega = source.draw(p.d, index)?;
            let shape = Shape { d: p.d, d_v: p.d_v, scale: p.scale, index };
            // Fitting starts from the features of exponent 0.
            let exponent =
                if fitted { Exponent::favor(p.d) } else { source.exponent::<f64>(&shape, None)? };
            let options = MapOptions { scale: p.scale, ..MapOptions::default() };
            let features = ExpFeatures::<f64>::new(&exponent, &omega, antithetic, options);
            Ok(features.map_err(attlas::Error::from)?.parts(side))
        })
    };
    let (queries, keys) = (side(Side::Query)?, side(Side::Key)?);
    let lengths = if fitted {
        let mut all = Vec::new();
        for index in groups(r) {
            let omega = source.draw(p.d, index)?;
            all.extend((0..omega.rows()).map(|l| omega.row(l).iter().map(|w| w * w).sum::<f64>()));
        }
        Some(all)
    } else {
        None
    };
    // Most variants have one map for both sides.
    let same = |(a, b): (&ExpParts, &ExpParts)| {
        a.directions == b.directions && a.norm == b.norm && a.norm_scale == b.norm_scale
    };
    let keys = if queries.iter().zip(&keys).all(same) { None } else { Some(&keys[..]) };
    let random = Random { queries: &queries, keys, opposite: antithetic, relu: None, lengths };
    FeatureMap::random(METHOD.id, r, random)
}
