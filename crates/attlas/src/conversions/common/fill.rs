//! Ranks of many matrices under one budget.
//!
//! Rank $r$ of matrix $m$ costs $r(n_{out} + n_{in})$ numbers and loses $w_m \sum_{i > r} \sigma_{m,i}^2$; the
//! unfactored matrix costs $n_{out} n_{in}$ and loses nothing. One multiplier $\lambda$ trades the sums of both over
//! all matrices: for every matrix, the rank or the unfactored form minimises loss plus $\lambda$ times cost. Losses are
//! convex in the rank, so the rank is the number of $w_m \sigma_{m,i}^2$ above $\lambda (n_{out} + n_{in})$:
//! water-filling to one level over all spectra.

/// Spectrum of a matrix, which determines its loss at every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Spectrum {
    /// Squared singular values, the largest first.
    pub energies: Vec<f64>,
    /// Number of outputs.
    pub rows: usize,
    /// Number of inputs.
    pub cols: usize,
    /// Weight of one unit in the common loss.
    pub weight: f64,
}

/// Common budget of all matrices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// Maximum count of stored numbers.
    Numbers(usize),
    /// Maximum loss.
    Loss(f64),
}

/// Ranks within a budget.
#[derive(Clone, Debug, PartialEq)]
pub struct Filled {
    /// The rank of each matrix; `None` if it stays unfactored.
    pub ranks: Vec<Option<usize>>,
    /// The sum of all losses.
    pub loss: f64,
    /// Count of stored numbers.
    pub numbers: usize,
}

struct Side<'a> {
    spectrum: &'a Spectrum,
    /// Weighted loss at every rank.
    loss: Vec<f64>,
    /// The largest rank that stores fewer numbers than the matrix.
    most: usize,
}

impl Side<'_> {
    fn numbers(&self, rank: Option<usize>) -> usize {
        let s = self.spectrum;
        rank.map_or(s.rows * s.cols, |r| r * (s.rows + s.cols))
    }

    fn at(&self, multiplier: f64) -> Option<usize> {
        if self.most == 0 {
            return None;
        }
        let s = self.spectrum;
        let level = multiplier * (s.rows + s.cols) as f64;
        let rank = s.energies[..self.most].partition_point(|e| s.weight * e > level).max(1);
        let factored = self.loss[rank] + level * rank as f64;
        (factored < multiplier * (s.rows * s.cols) as f64).then_some(rank)
    }
}

/// Returns the ranks of least loss within a storage budget, or of least storage within a loss. If even rank 1
/// everywhere stores too much, returns rank 1 everywhere.
pub fn fill(list: &[Spectrum], budget: Budget) -> Filled {
    let sides: Vec<Side<'_>> = list
        .iter()
        .map(|s| {
            let mut loss = vec![0.0; s.energies.len() + 1];
            for (i, e) in s.energies.iter().enumerate().rev() {
                loss[i] = loss[i + 1] + s.weight * e;
            }
            let most = (s.rows * s.cols).saturating_sub(1) / (s.rows + s.cols).max(1);
            Side { spectrum: s, loss, most: most.min(s.energies.len()) }
        })
        .collect();
    let total = |ranks: Vec<Option<usize>>| {
        let each = || sides.iter().zip(&ranks);
        let loss = each().map(|(s, r)| r.map_or(0.0, |r| s.loss[r])).sum();
        let numbers = each().map(|(s, r)| s.numbers(*r)).sum();
        Filled { ranks, loss, numbers }
    };
    let at = |multiplier: f64| total(sides.iter().map(|s| s.at(multiplier)).collect());
    let whole = total(vec![None; sides.len()]);
    let largest = sides.iter().filter(|s| s.most > 0).map(|s| s.loss[0]).fold(0.0f64, f64::max);
    // No form has any loss: take the smallest.
    if largest <= 0.0 {
        return total(sides.iter().map(|s| (s.most > 0).then_some(1)).collect());
    }
    let fits = |f: &Filled| match budget {
        Budget::Numbers(n) => f.numbers <= n,
        Budget::Loss(l) => f.loss <= l,
    };
    // Numbers fall and losses rise with the multiplier.
    let (mut low, mut high) = ((largest * 1e-30).ln(), (largest * 4.0).ln());
    match budget {
        Budget::Numbers(_) if fits(&whole) => return whole,
        Budget::Loss(_) if fits(&at(high.exp())) => return at(high.exp()),
        _ => {}
    }
    for _ in 0..120 {
        let middle = 0.5 * (low + high);
        let inside = fits(&at(middle.exp()));
        match budget {
            Budget::Numbers(_) if inside => high = middle,
            Budget::Loss(_) if !inside => high = middle,
            _ => low = middle,
        }
    }
    let mut best = match budget {
        Budget::Numbers(_) => at(high.exp()).ranks,
        Budget::Loss(_) => at(low.exp()).ranks,
    };
    // A matrix that switches to factors leaves a gap in the budget: spend the rest where it helps most.
    if let Budget::Numbers(n) = budget {
        let mut left = n.saturating_sub(total(best.clone()).numbers);
        loop {
            let gain = |(i, s): (usize, &Side<'_>)| {
                let rank = best[i].filter(|r| *r < s.most)?;
                let step = s.spectrum.rows + s.spectrum.cols;
                (step <= left).then(|| (s.spectrum.weight * s.spectrum.energies[rank] / step as f64, i, step))
            };
            let most = sides.iter().enumerate().filter_map(gain).max_by(|a, b| a.0.total_cmp(&b.0));
            let Some((_, i, step)) = most else { break };
            best[i] = best[i].map(|r| r + 1);
            left -= step;
        }
    }
    total(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spectra() -> Vec<Spectrum> {
        let decay = |base: f64, n: usize| (0..n).map(|i| base.powi(i as i32)).collect::<Vec<f64>>();
        vec![
            Spectrum { energies: decay(0.5, 6), rows: 6, cols: 8, weight: 1.0 },
            Spectrum { energies: decay(0.8, 8), rows: 8, cols: 8, weight: 3.0 },
            Spectrum { energies: decay(0.99, 5), rows: 5, cols: 40, weight: 1.0 },
        ]
    }

    /// All choices of ranks.
    fn all() -> Vec<(Vec<Option<usize>>, f64, usize)> {
        let list = spectra();
        let options = |s: &Spectrum| {
            let most = (s.rows * s.cols - 1) / (s.rows + s.cols);
            (1..=most.min(s.energies.len())).map(Some).chain([None]).collect::<Vec<_>>()
        };
        let mut out = Vec::new();
        for a in options(&list[0]) {
            for b in options(&list[1]) {
                for c in options(&list[2]) {
                    let ranks = vec![a, b, c];
                    let mut loss = 0.0;
                    let mut numbers = 0;
                    for (s, r) in list.iter().zip(&ranks) {
                        match r {
                            None => numbers += s.rows * s.cols,
                            Some(r) => {
                                loss += s.weight * s.energies[*r..].iter().sum::<f64>();
                                numbers += r * (s.rows + s.cols);
                            }
                        }
                    }
                    out.push((ranks, loss, numbers));
                }
            }
        }
        out
    }

    #[test]
    fn no_other_choice_is_better_on_both_sides() {
        for numbers in [80, 120, 170, 220, 280, 312] {
            let f = fill(&spectra(), Budget::Numbers(numbers));
            assert!(f.numbers <= numbers, "{f:?}");
            // No smaller choice beats the loss by more than the step between two neighbours on the hull.
            let best =
                all().into_iter().filter(|x| x.2 <= numbers).map(|x| x.1).fold(f64::INFINITY, f64::min);
            let jump = all().iter().filter(|x| x.2 + 312 / 3 >= numbers).map(|x| x.1).fold(0.0, f64::max);
            assert!(f.loss >= best - 1e-12 && f.loss <= best + jump, "{numbers}: {} beside {best}", f.loss);
        }
        // On the hull itself the choice is the best one.
        for multiplier in [0.002, 0.01, 0.03] {
            let of = |x: &(Vec<Option<usize>>, f64, usize)| x.1 + multiplier * x.2 as f64;
            let best = all().into_iter().min_by(|a, b| of(a).total_cmp(&of(b))).unwrap();
            let f = fill(&spectra(), Budget::Numbers(best.2));
            assert!((f.loss - best.1).abs() < 1e-12, "{f:?} {best:?}");
            let f = fill(&spectra(), Budget::Loss(best.1 + 1e-12));
            assert_eq!((f.numbers, &f.ranks), (best.2, &best.0));
        }
    }

    #[test]
    fn ends_of_the_range_are_reached() {
        let list = spectra();
        let whole: usize = list.iter().map(|s| s.rows * s.cols).sum();
        let f = fill(&list, Budget::Numbers(whole));
        assert_eq!((f.ranks, f.loss), (vec![None; 3], 0.0));
        assert_eq!(fill(&list, Budget::Loss(0.0)).ranks, [None; 3]);
        assert_eq!(fill(&list, Budget::Loss(1e9)).ranks, [Some(1); 3]);
        assert_eq!(fill(&list, Budget::Numbers(0)).ranks, [Some(1); 3]);
        let nothing = vec![Spectrum { energies: vec![0.0; 4], rows: 4, cols: 9, weight: 1.0 }];
        assert_eq!(fill(&nothing, Budget::Loss(0.0)).ranks, [Some(1)]);
        let thin = vec![Spectrum { energies: vec![1.0], rows: 1, cols: 9, weight: 1.0 }];
        assert_eq!(fill(&thin, Budget::Loss(5.0)).ranks, [None], "factors would store more");
    }

    #[test]
    fn a_larger_weight_keeps_more() {
        let mut list = vec![spectra()[1].clone(), spectra()[1].clone()];
        list[1].weight *= 10.0;
        let f = fill(&list, Budget::Numbers(64));
        assert!(f.ranks[1] > f.ranks[0], "{f:?}");
    }
}
