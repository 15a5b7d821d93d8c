//! Choice of a point for every key head: least time for a sum of divergences.

/// One candidate of a key head, by cost and divergence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    /// Index of the candidate; none for exact attention.
    pub(super) candidate: Option<usize>,
    /// Time over exact attention's.
    pub(super) cost: f64,
    /// Divergence of the model with only this change.
    pub(super) kl: f64,
}

impl Point {
    pub(super) const EXACT: Point = Point { candidate: None, cost: 1.0, kl: 0.0 };
}

/// Returns the lower convex hull of points, ordered by divergence; points that cost no less than a more accurate one
/// are left out.
pub(super) fn hull(points: &[Point]) -> Vec<Point> {
    let mut sorted: Vec<Point> =
        points.iter().filter(|p| p.kl.is_finite() && p.cost.is_finite()).copied().collect();
    sorted.sort_by(|a, b| a.kl.total_cmp(&b.kl).then(a.cost.total_cmp(&b.cost)));
    let mut hull: Vec<Point> = Vec::new();
    for p in sorted {
        if hull.last().is_some_and(|last| p.cost >= last.cost) {
            continue;
        }
        while let [.., a, b] = hull[..] {
            // b lies on or above the line from a to p.
            if (b.cost - a.cost) * (p.kl - a.kl) >= (p.cost - a.cost) * (b.kl - a.kl) {
                hull.pop();
            } else {
                break;
            }
        }
        hull.push(p);
    }
    hull
}

/// Chooses a point for every key head by one Lagrange multiplier, the price of a nat: least time while the divergences
/// add up to at most `budget`.
pub(super) fn choose(hulls: &[Vec<Point>], budget: f64) -> Vec<Point> {
    let at = |price: f64| -> Vec<Point> {
        let best = |h: &Vec<Point>| {
            let value = |p: &Point| p.cost + price * p.kl;
            h.iter().copied().min_by(|a, b| value(a).total_cmp(&value(b)).then(a.kl.total_cmp(&b.kl)))
        };
        hulls.iter().map(|h| best(h).unwrap_or(Point::EXACT)).collect()
    };
    let total = |picks: &[Point]| picks.iter().map(|p| p.kl).sum::<f64>();
    let free = at(0.0);
    if total(&free) <= budget {
        return free;
    }
    // Prices of every step of any key head; the smallest that keeps the budget is used.
    let mut prices: Vec<f64> = hulls
        .iter()
        .flat_map(|h| h.windows(2).map(|w| (w[0].cost - w[1].cost) / (w[1].kl - w[0].kl)))
        .filter(|p| p.is_finite() && *p > 0.0)
        .collect();
    prices.sort_by(f64::total_cmp);
    // Just above a price its step is no longer taken.
    let above = |price: f64| at(price * (1.0 + 1e-9));
    let first = prices.partition_point(|&price| total(&above(price)) > budget);
    let mut picks = match prices.get(first) {
        Some(&price) => above(price),
        None => hulls.iter().map(|h| h.first().copied().unwrap_or(Point::EXACT)).collect(),
    };
    // The rest of the budget goes to single steps, those that save the most time per nat first.
    loop {
        let left = budget - total(&picks);
        let mut best: Option<(usize, Point, f64)> = None;
        for (i, h) in hulls.iter().enumerate() {
            let next = h.iter().find(|p| p.kl > picks[i].kl && p.cost < picks[i].cost);
            if let Some(&next) = next.filter(|p| p.kl - picks[i].kl <= left) {
                let worth = (picks[i].cost - next.cost) / (next.kl - picks[i].kl);
                if best.as_ref().is_none_or(|b| worth > b.2) {
                    best = Some((i, next, worth));
                }
            }
        }
        match best {
            Some((i, next, _)) => picks[i] = next,
            None => return picks,
        }
    }
}

/// Estimates the divergence at an error from those measured at other errors of the same key head: it grows with the
/// square of the error, from the measured error nearest in ratio. None without measurements.
pub(super) fn interpolate(known: &[(f64, f64)], error: f64) -> Option<f64> {
    if error <= 0.0 {
        return Some(0.0);
    }
    let far = |e: f64| (e / error).ln().abs();
    let usable = known.iter().filter(|(e, kl)| *e > 0.0 && *kl >= 0.0);
    let &(e, kl) = usable.min_by(|a, b| far(a.0).total_cmp(&far(b.0)))?;
    Some(kl * (error / e).powi(2))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn p(cost: f64, kl: f64) -> Point {
        Point { candidate: Some(0), cost, kl }
    }

    #[test]
    fn a_hull_keeps_what_no_mixture_beats() {
        let points =
            [Point::EXACT, p(0.5, 0.01), p(0.9, 0.009), p(0.6, 0.02), p(0.1, 0.1), p(f64::MAX, f64::NAN)];
        let found: Vec<f64> = hull(&points).iter().map(|p| p.cost).collect();
        assert_eq!(found, [1.0, 0.5, 0.1]);
        assert_eq!(hull(&[p(0.4, 0.0), Point::EXACT]).len(), 1, "as accurate as exact attention and faster");
    }

    #[test]
    fn the_choice_is_the_least_time_of_all_within_the_budget() {
        // Compares with all choices for three key heads with up to four points.
        let hulls: Vec<Vec<Point>> = [
            vec![Point::EXACT, p(0.5, 0.001), p(0.2, 0.004), p(0.1, 0.02)],
            vec![Point::EXACT, p(0.6, 0.0001), p(0.3, 0.03)],
            vec![Point::EXACT, p(0.3, 0.002)],
        ]
        .iter()
        .map(|h| hull(h))
        .collect();
        for budget in [0.0, 0.0005, 0.002, 0.0035, 0.0071, 0.02, 0.04, 1.0] {
            let picks = choose(&hulls, budget);
            let sum = |f: fn(&Point) -> f64, x: &[Point]| x.iter().map(f).sum::<f64>();
            assert!(sum(|p| p.kl, &picks) <= budget + 1e-15);
            let mut best = f64::INFINITY;
            for a in &hulls[0] {
                for b in &hulls[1] {
                    for c in &hulls[2] {
                        if a.kl + b.kl + c.kl <= budget {
                            best = best.min(a.cost + b.cost + c.cost);
                        }
                    }
                }
            }
            // One multiplier and single steps: within one step of the best, and the best here.
            let found = sum(|p| p.cost, &picks);
            assert!(found <= best + 0.35 && found >= best - 1e-12, "{budget}: {found} for {best}");
        }
        assert_eq!(choose(&hulls, 1.0).iter().map(|p| p.cost).collect::<Vec<_>>(), [0.1, 0.3, 0.3]);
        assert_eq!(choose(&hulls, 0.0), vec![Point::EXACT; 3]);
    }

    #[test]
    fn divergences_grow_with_the_square_of_the_error() {
        let known = [(0.1, 0.001), (0.4, 0.032)];
        assert!((interpolate(&known, 0.05).unwrap() - 0.00025).abs() < 1e-12);
        assert!((interpolate(&known, 0.8).unwrap() - 0.128).abs() < 1e-12);
        assert_eq!((interpolate(&known, 0.0), interpolate(&[], 0.3)), (Some(0.0), None));
    }
}
