//! A search from screening to the recipe.

use super::candidates::Candidate;
use super::choose::{Point, choose};
use super::search::Search;
use super::{Check, Outcome, Phase, Pick, Replace, Round, SearchState, Settings, Tuned, curve, recipe};
use crate::Result;
use crate::crew::Crew;
use crate::hash::sha256;
use crate::run::Run;
use crate::table::{number, seconds};
use crate::text::Text;
use attlas_model::recipe::Recipe;

/// Ratio of a failing sum of divergences to one that meets the budget below which the search between them ends.
const CLOSE: f64 = 1.3;
/// Most reductions of a choice for the third text.
const SMALLER: usize = 3;

/// State of a search.
pub(super) struct Tuning<'r, 'a, 'w> {
    pub(super) model: &'r mut dyn Check,
    pub(super) text: &'r Text,
    pub(super) check: &'r Text,
    pub(super) settings: &'r Settings,
    pub(super) search: Search<'a>,
    pub(super) state: &'r mut SearchState,
    pub(super) crew: &'r dyn Crew,
    pub(super) run: &'r mut Run<'w>,
}

impl Tuning<'_, '_, '_> {
    /// Runs the whole search; `None` once a stop was requested.
    pub(super) fn whole(&mut self) -> Result<Option<Tuned>> {
        let mut tuned = Tuned {
            model: self.settings.model.clone(),
            text: self.text.source.clone(),
            tokens: self.text.tokens.len(),
            effort: self.settings.effort,
            measurements: 0,
            heads_per_second: None,
            fell_back: Vec::new(),
            candidates: Vec::new(),
            curve: Vec::new(),
            rounds: Vec::new(),
            answer: None,
            decoded: None,
            decode_from: None,
            decode_note: None,
            decodes_exactly: Vec::new(),
            chosen: None,
            picks: Vec::new(),
            note: None,
            recipe: None,
        };
        let Some(kept) = self.measured(Phase::Prompt)? else { return Ok(None) };
        tuned.candidates = kept.iter().map(Candidate::name).collect();
        let new = match self.settings.decode {
            true => match self.measured(Phase::Decode)? {
                Some(kept) => kept,
                None => return Ok(None),
            },
            false => Vec::new(),
        };
        tuned.measurements = self.state.len();
        let (heads, seconds) = self.search.pace;
        tuned.heads_per_second = (heads > 0).then(|| heads as f64 / seconds.max(1e-9));
        tuned.fell_back = self.state.fell_back();
        if self.settings.shard.is_some() {
            return Ok(Some(tuned));
        }
        let hulls = self.search.hulls(Phase::Prompt, &kept, self.state)?;
        tuned.curve = curve::curve(&hulls);
        let Some(best) = self.rounds(&hulls, &kept, &mut tuned)? else { return Ok(None) };
        let (mut picks, taken) = match best {
            Some(best) => best,
            None => (self.search.picks(Phase::Prompt, &[], &kept, self.state), 0.0),
        };
        if tuned.chosen.is_some() && tuned.note.is_none() {
            match self.answer(&hulls, &kept, picks, taken, &mut tuned)? {
                Some(found) => picks = found,
                None => return Ok(None),
            }
        }
        if tuned.note.is_some() {
            let exact = vec![Point::EXACT; self.search.units.len()];
            picks = self.search.picks(Phase::Prompt, &exact, &kept, self.state);
        }
        if self.settings.decode && !new.is_empty() && !self.new_tokens(&mut picks, &new, &mut tuned)? {
            return Ok(None);
        }
        tuned.picks = picks;
        let mut recipe = self.recipe(&tuned.picks);
        tuned.decodes_exactly = self.model.decodes_exactly(&recipe)?;
        recipe.decode_from = tuned.decode_from.unwrap_or(0);
        recipe.evidence = recipe::evidence(&tuned, self.text, self.check, self.settings, self.model.shape());
        recipe.tokens = (!recipe.rules.is_empty()).then_some(tuned.tokens);
        tuned.recipe = Some(recipe);
        Ok(Some(tuned))
    }

    fn recipe(&self, picks: &[Pick]) -> Recipe {
        let recipe = recipe::recipe(picks, &self.settings.model);
        recipe.with_calibrations(self.settings.calibrations.clone())
    }

    /// Screens and measures; returns the candidates tried on every key head.
    fn measured(&mut self, phase: Phase) -> Result<Option<Vec<Candidate>>> {
        let Some(kept) = self.search.screen(phase, self.state, self.run)? else {
            return Ok(None);
        };
        let mut replace = None;
        if phase == Phase::Prompt && self.settings.on_model() && !kept.is_empty() {
            self.run.at(0, 1, "reading the text for divergences");
            let rows = self.settings.effort.rows().min(self.text.tokens.len() / 2).max(1);
            replace = self.model.replace(self.text, rows, self.run.stop)?;
            if self.crew.any(self.run.stopped()) {
                return Ok(None);
            }
        }
        let asked = replace.as_mut().map(|r| &mut **r as &mut dyn Replace);
        let done = self.search.measure_all(phase, &kept, asked, self.state, self.run)?;
        Ok(done.then_some(kept))
    }

    /// Returns the results of a recipe on a text, from the state or newly measured; `None` after an interruption.
    fn checked(&mut self, recipe: &Recipe, text: &Text, what: &str) -> Result<Option<Outcome>> {
        self.checked_again("", recipe, text, what)
    }

    /// Returns the results of a recipe on a text, stored under another name.
    fn checked_again(
        &mut self,
        again: &str,
        recipe: &Recipe,
        text: &Text,
        what: &str,
    ) -> Result<Option<Outcome>> {
        let name = sha256(
            format!(
                "{} {} {} {:?}{again}",
                recipe.to_toml()?,
                text.sha256,
                text.source,
                (text.tokens.len(), self.settings.task)
            )
            .as_bytes(),
        );
        if let Some(known) = self.state.checked(&name) {
            return Ok(Some(known.clone()));
        }
        self.run.at(0, 1, what);
        let record = self.model.check(recipe, text, self.text.tokens.len(), self.run.stop)?;
        let Some(outcome) = record.as_ref().and_then(Outcome::new) else { return Ok(None) };
        self.state.push_check(&name, &outcome)?;
        Ok(Some(outcome))
    }

    /// Searches the sum of divergences on the second text. Returns the picks and the sum of the best one that met the
    /// budget; `Some(None)` if none did.
    #[allow(clippy::type_complexity)]
    fn rounds(
        &mut self,
        hulls: &[Vec<Point>],
        kept: &[Candidate],
        tuned: &mut Tuned,
    ) -> Result<Option<Option<(Vec<Pick>, f64)>>> {
        let most: f64 = hulls.iter().filter_map(|h| h.last()).map(|p| p.kl).sum();
        let budget = self.settings.max_kl.or(self.settings.max_ppl_increase.map(f64::ln_1p));
        let mut targets = Targets { holds: None, fails: None, last: most };
        let mut next = Some(budget.map_or(most, |b| b.min(most)));
        let mut best = None;
        let mut seen: Vec<(Recipe, Option<Outcome>)> = Vec::new();
        while let Some(target) = next.filter(|_| tuned.rounds.len() < self.settings.effort.rounds()) {
            let points = choose(hulls, target);
            let picks = self.search.picks(Phase::Prompt, &points, kept, self.state);
            let n = picks.len().max(1) as f64;
            let recipe = self.recipe(&picks);
            let changed = picks.iter().filter(|p| !p.is_exact()).count();
            let check = match seen.iter().find(|(other, _)| *other == recipe) {
                Some((_, known)) => known.clone(),
                None if changed == 0 => None,
                None => {
                    let what = format!("checking on other text, divergence {}", number(target));
                    let check = self.check.clone();
                    match self.checked(&recipe, &check, &what)? {
                        Some(outcome) => Some(outcome),
                        None => return Ok(None),
                    }
                }
            };
            seen.push((recipe, check.clone()));
            let holds = check.as_ref().is_none_or(|x| self.settings.holds(x));
            tuned.rounds.push(Round {
                target: budget.map(|_| target),
                changed: changed as f64 / n,
                cost: picks.iter().map(|p| p.cost).sum::<f64>() / n,
                check,
                holds,
            });
            if holds {
                best = Some((picks, target));
                tuned.chosen = Some(tuned.rounds.len() - 1);
            }
            next = budget.and_then(|_| targets.after(target, holds));
        }
        match (tuned.chosen, &best) {
            (Some(i), Some((picks, _))) => {
                let round = &mut tuned.rounds[i];
                if self.crew.any(objection(round).is_some()) && !self.time_again(picks, round)? {
                    return Ok(None);
                }
                tuned.note = objection(round);
            }
            _ => tuned.note = Some("no choice held the budget on the second text".into()),
        }
        Ok(Some(best))
    }

    /// Repeats the check of a round and keeps the smaller times: a single pass beside another process says little, and
    /// a recipe that is not faster is discarded. The state keeps both runs: the same measurements then lead to the same
    /// choice. `false` once a stop was requested.
    fn time_again(&mut self, picks: &[Pick], round: &mut Round) -> Result<bool> {
        let Some(first) = &mut round.check else { return Ok(true) };
        let recipe = self.recipe(picks);
        let what = "timing the recipe once more";
        let Some(second) = self.checked_again(" again", &recipe, self.check, what)? else {
            return Ok(false);
        };
        first.seconds = first.seconds.min(second.seconds);
        let both = first.exact_seconds.zip(second.exact_seconds);
        first.exact_seconds = both.map_or(first.exact_seconds, |(a, b)| Some(a.min(b)));
        Ok(true)
    }

    /// Checks on the third text, with smaller sums if the budget is exceeded there.
    fn answer(
        &mut self,
        hulls: &[Vec<Point>],
        kept: &[Candidate],
        mut picks: Vec<Pick>,
        mut target: f64,
        tuned: &mut Tuned,
    ) -> Result<Option<Vec<Pick>>> {
        let Some(text) = self.settings.answer.clone() else { return Ok(Some(picks)) };
        for smaller in 0..=SMALLER {
            let recipe = self.recipe(&picks);
            let Some(outcome) = self.checked(&recipe, &text, "running the third text")? else {
                return Ok(None);
            };
            let holds = self.settings.holds(&outcome);
            tuned.answer = Some(outcome);
            if holds {
                return Ok(Some(picks));
            }
            if smaller < SMALLER {
                target /= 2.0;
                picks = self.search.picks(Phase::Prompt, &choose(hulls, target), kept, self.state);
                if picks.iter().all(Pick::is_exact) {
                    break;
                }
            }
        }
        tuned.answer = None;
        tuned.note = Some("no choice held the budget on the third text".into());
        Ok(Some(picks))
    }

    /// Chooses methods for new tokens by their time; `false` once a stop was requested. Exact attention decodes if no
    /// choice both meets the budget and is faster in the model.
    fn new_tokens(&mut self, picks: &mut [Pick], kept: &[Candidate], tuned: &mut Tuned) -> Result<bool> {
        let hulls = self.search.hulls(Phase::Decode, kept, self.state)?;
        let budget = self.settings.max_kl.or(self.settings.max_ppl_increase.map(f64::ln_1p));
        let mut target = budget.unwrap_or(f64::INFINITY);
        for _ in 0..self.settings.effort.rounds().div_ceil(2) {
            let found = self.search.picks(Phase::Decode, &choose(&hulls, target), kept, self.state);
            for (pick, new) in picks.iter_mut().zip(&found) {
                pick.decode = Some(new.as_decode());
            }
            let changed = found.iter().any(|p| !p.is_exact());
            if !changed || budget.is_none() {
                return Ok(true);
            }
            self.run.at(0, 1, &format!("decoding other text, divergence {}", number(target)));
            // Exact attention reads the prompts: only new tokens differ.
            let alone: Vec<Pick> =
                picks.iter().map(|p| Pick { decode: p.decode.clone(), ..p.clone().exact() }).collect();
            let recipe = self.recipe(&alone);
            let steps = 2 * self.settings.effort.steps();
            let outcome =
                self.model.decode(&recipe, self.check, self.text.tokens.len(), steps, self.run.stop)?;
            if self.crew.any(self.run.stopped()) {
                return Ok(false);
            }
            let Some(outcome) = outcome else { return Ok(true) };
            // A few dozen tokens can bound a divergence, but not an increase of the perplexity.
            let holds = outcome.kl_mean <= budget.unwrap_or(f64::INFINITY);
            let slow = slower(&outcome);
            tuned.decoded = Some(outcome);
            if slow.is_some() {
                tuned.decode_note = slow;
                break;
            }
            if holds {
                tuned.decode_from = Some(self.decode_from(&recipe, steps)?);
                // An interruption would pass for slow decoding.
                return Ok(!self.crew.any(self.run.stopped()));
            }
            target /= 3.0;
        }
        if tuned.decode_note.is_none() {
            tuned.decode_note = Some("no choice held the budget".into());
        }
        tuned.decoded = None;
        picks.iter_mut().for_each(|p| p.decode = Some(p.clone().exact().as_decode()));
        Ok(true)
    }

    /// Returns the shortest length, of halves, quarters and eighths of the text's, from which on the model decodes faster
    /// with the recipe; it does at the whole length.
    fn decode_from(&mut self, recipe: &Recipe, steps: usize) -> Result<usize> {
        let whole = self.text.tokens.len().min(self.check.tokens.len());
        let mut from = whole;
        for part in [2, 4, 8] {
            self.run.at(0, 1, &format!("decoding behind {} tokens", whole / part));
            let outcome = self.model.decode(recipe, self.check, whole / part, steps, self.run.stop)?;
            match outcome {
                Some(outcome) if slower(&outcome).is_none() => from = whole / part,
                _ => break,
            }
        }
        Ok(from)
    }
}

/// Search for the next sum.
struct Targets {
    /// The largest sum that met the budget.
    holds: Option<f64>,
    /// The smallest sum that did not.
    fails: Option<f64>,
    /// Upper limit of any sum.
    last: f64,
}

impl Targets {
    fn after(&mut self, target: f64, holds: bool) -> Option<f64> {
        if holds {
            self.holds = Some(self.holds.map_or(target, |h| h.max(target)));
        } else {
            self.fails = Some(self.fails.map_or(target, |f| f.min(target)));
        }
        match (self.holds, self.fails) {
            (None, Some(fails)) => Some(fails / 2.0),
            (Some(holds), None) if holds < self.last => Some((2.0 * holds).min(self.last)),
            (Some(holds), Some(fails)) if fails > CLOSE * holds => Some((holds * fails).sqrt()),
            _ => None,
        }
    }
}

/// Returns the reason to reject the best choice, if there is one.
fn objection(round: &Round) -> Option<String> {
    if round.changed == 0.0 {
        return Some("no method was both accurate enough and faster".into());
    }
    slower(round.check.as_ref()?)
}

/// Returns the times if the recipe was not faster.
fn slower(outcome: &Outcome) -> Option<String> {
    let exact = outcome.exact_seconds?;
    (outcome.seconds >= exact).then(|| {
        let [ours, exact] = [outcome.seconds, exact].map(seconds);
        format!("the best recipe took {ours} where exact attention took {exact}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_doubled_while_they_hold_and_halved_until_they_do() {
        let path = |holds: &dyn Fn(f64) -> bool| {
            let mut targets = Targets { holds: None, fails: None, last: 0.8 };
            let mut seen = vec![0.2];
            while let Some(next) = targets.after(*seen.last().unwrap(), holds(*seen.last().unwrap())) {
                seen.push(next);
                if seen.len() == 9 {
                    break;
                }
            }
            (seen, targets.holds)
        };
        let (seen, best) = path(&|t| t < 0.06);
        assert_eq!(&seen[..3], &[0.2, 0.1, 0.05]);
        // Then geometric means of a sum that passes and one that fails: 0.0707 fails, 0.0595 passes, and they are
        // close.
        let best = best.unwrap();
        assert!((best - 0.05f64.powf(0.75) * 0.1f64.powf(0.25)).abs() < 1e-12 && seen.len() == 5, "{seen:?}");
        assert_eq!(path(&|_| true), (vec![0.2, 0.4, 0.8], Some(0.8)));
        assert_eq!(path(&|_| false).1, None);
    }

    #[test]
    fn a_recipe_is_worth_having_only_where_it_is_faster() {
        let took = |seconds: f64, exact_seconds: Option<f64>| {
            slower(&Outcome {
                scored: 100,
                ppl: 10.0,
                exact_ppl: 10.0,
                ppl_increase: 0.0,
                ppl_increase_upper: 0.0,
                kl_mean: 0.0,
                kl_se: 0.0,
                same_top: 1.0,
                keys_share: 0.1,
                seconds,
                exact_seconds,
            })
        };
        assert_eq!(took(0.8, Some(1.0)), None);
        assert_eq!(took(0.8, None), None, "nothing to compare with");
        // A tenth of the scores is no reason to decode with a slower method.
        assert!(took(1.07, Some(1.06)).unwrap().contains("exact attention took 1.06s"));
    }
}
