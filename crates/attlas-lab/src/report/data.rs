//! Data of the figures of a report, as one JSON document inside the page.

use super::Report;
use super::recipe::RecipeMap;
use crate::compare::{Comparison, Summary, front};
use crate::figures::{heat_address, named_spectra};
use crate::inspect::{FIGURES, Inspected};
use attlas::diagnostics::Spectrum;
use serde_json::{Value, json};

/// The document.
pub(super) fn data(report: &Report<'_>, recipe: Option<&RecipeMap>) -> Value {
    let c = report.comparison;
    let figures: Vec<Value> = FIGURES.iter().map(|f| json!({ "name": f.name, "kind": f.kind })).collect();
    let (methods, exact) = c.objects();
    json!({
        "figures": figures,
        "heads": report.inspection.heads.iter().map(head).collect::<Vec<_>>(),
        "methods": methods.into_iter().map(rounded).collect::<Vec<_>>(),
        "exact": rounded(exact),
        "fronts": fronts(c),
        "recipe": recipe.map(RecipeMap::data),
    })
}

/// Returns the methods on the front for each cost, computed once for table, picture and page.
fn fronts(c: &Comparison) -> Value {
    let costs: [(&str, fn(&Summary) -> f64, f64); 3] = [
        ("seconds", Summary::seconds, c.exact.run_seconds),
        ("bytes", |s| s.peak_bytes as f64, c.exact.peak_bytes as f64),
        ("keys", |s| s.keys_share, 1.0),
    ];
    let whole = |s: &&Summary| s.heads == c.exact.heads.len();
    let mut all = serde_json::Map::new();
    for (cost_name, cost, of_exact) in costs {
        let ranked: Vec<&Summary> = c.summary.iter().filter(whole).filter(|s| !s.fell_back()).collect();
        let mut points = vec![(0.0, of_exact)];
        points.extend(ranked.iter().map(|s| (s.rel_fro.mean, cost(s))));
        let names = std::iter::once(c.exact.method).chain(ranked.iter().map(|s| s.method));
        let on: Vec<&str> = names.zip(front(&points)).filter(|(_, on)| *on).map(|(name, _)| name).collect();
        all.insert(cost_name.into(), on.into());
    }
    all.into()
}

fn head(h: &Inspected) -> Value {
    let r = &h.report;
    let w = &r.weights;
    let spectra: Vec<Value> = named_spectra(&r.spectra)
        .iter()
        .map(|(name, colour, s)| {
            json!({ "name": name, "colour": colour, "rank": s.variance_rank.value, "open": s.variance_rank.open,
                "stable": round(s.stable_rank), "points": points(s) })
        })
        .collect();
    json!({
        "layer": h.layer,
        "head": h.head,
        "tokens": r.n_k,
        "figures": FIGURES.iter().map(|f| round((f.of)(r))).collect::<Vec<_>>(),
        "open": FIGURES.iter().map(|f| (f.open)(r)).collect::<Vec<_>>(),
        "spectra": spectra,
        "mass": w.mass_of_top.iter().map(|t| [t.keys as f64, round(t.mass.mean)]).collect::<Vec<_>>(),
        "keys": w.keys_for_mass.iter().map(|m| [m.mass, round(m.keys.mean)]).collect::<Vec<_>>(),
        "sinks": w.sinks.iter().take(4).map(|s| json!({ "key": s.key, "weight": round(s.weight) })).collect::<Vec<_>>(),
        "leading": { "size": w.leading.cols, "image": heat_address(&w.leading) },
        "map": { "size": r.n_k, "image": heat_address(&w.map) },
    })
}

/// Returns singular values relative to the largest, with their indices, thinned evenly in logarithms.
fn points(s: &Spectrum) -> Vec<[f64; 2]> {
    let first = s.values.first().copied().filter(|v| *v > 0.0).unwrap_or(1.0);
    let mut next = 0;
    let mut out = Vec::new();
    for (i, value) in s.values.iter().enumerate() {
        // Steps of a sixth are finer than a line shows.
        if (i >= next || i + 1 == s.values.len()) && value / first > 1e-8 {
            out.push([(i + 1) as f64, round(value / first)]);
            next = i + 1 + i / 6;
        }
    }
    out
}

/// Rounds the numbers of an object to four digits.
fn rounded(mut object: Value) -> Value {
    for value in object.as_object_mut().into_iter().flat_map(|o| o.values_mut()) {
        if let Some(x) = value.as_f64().filter(|_| value.is_f64()) {
            *value = round(x).into();
        }
    }
    object
}

/// Rounds to four digits: a page shows fewer.
fn round(x: f64) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let unit = 10f64.powi(3 - x.abs().log10().floor() as i32);
    let rounded = (x * unit).round() / unit;
    if rounded.is_finite() { rounded } else { x }
}

#[cfg(test)]
mod tests {
    use super::round;

    #[test]
    fn numbers_keep_four_digits() {
        assert_eq!(
            [12345.6, 0.00123456, -9.99999, 0.0, 1.0].map(round),
            [12350.0, 0.001235, -10.0, 0.0, 1.0]
        );
        assert!(round(f64::NAN).is_nan() && round(1e-310).is_finite());
    }
}
