//! `attlas tune`.

use crate::args::{Common, TuneArgs};
use crate::interrupt;
use crate::progress::{Progress, measured};
use crate::report::command_line;
use crate::{Outcome, STOP, note, print, print_json, team};
use attlas_lab::crew::Crew;
use attlas_lab::table::{percent, wrap};
use attlas_lab::text::{Text, open_model};
use attlas_lab::tune::{Ended, Runtime, SearchState, Settings, Tuned, curve, extract_layers, key, tune_with};
use attlas_lab::{Calibrations, Error, Run, output, task};
use attlas_model::Model;
use attlas_model::recipe::Numbers;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

/// Tokens to tune on by default.
const TOKENS: usize = 2048;
/// Fewest tokens of a check.
const FEWEST: usize = 16;

pub(crate) fn run(args: &TuneArgs, common: &Common) -> Outcome {
    team::crewed(|crew| run_on(crew, args, common))
}

fn run_on(crew: &dyn Crew, args: &TuneArgs, common: &Common) -> Outcome {
    let learnt = args.calibration.as_deref().map(Calibrations::read).transpose()?.unwrap_or_default();
    let mut settings = Settings {
        max_error: args.max_error,
        max_kl: args.max_kl,
        max_ppl_increase: args.max_ppl_increase,
        selection: args.methods.choice().resolve()?,
        calibrations: Arc::new(learnt),
        answer: None,
        task: args.task,
        decode: !args.no_decode,
        layers: args.layers.clone(),
        effort: args.effort,
        shard: args.shard,
        model: args
            .model
            .path
            .file_name()
            .unwrap_or(args.model.path.as_os_str())
            .to_string_lossy()
            .into_owned(),
        command: Some(command_line()),
    };
    let path = args.state.clone().unwrap_or_else(|| beside(&args.out));
    let mut inputs = vec![args.model.path.as_path(), args.text.as_path()];
    inputs.extend(args.check_text.as_deref());
    inputs.extend(args.answer_text.as_deref());
    let mut outputs = vec![("--out", args.out.as_path()), ("--state", path.as_path())];
    outputs.extend(args.curve.as_deref().map(|c| ("--curve", c)));
    if crew.leads() {
        output::check(&outputs, &inputs)?;
    }
    interrupt::catch(common);
    let model = open_model(&args.model.path)?;
    let (text, check, answer) = texts(args, &model, common.seed)?;
    if answer.is_none() && args.max_error.is_none() {
        note(common, "note: no third text is left for the answer; --answer-text names one");
    }
    settings.answer = answer;
    let progress = Progress::new(common);
    let extracted = extract_layers(
        &model,
        &text,
        &settings,
        common.threads,
        &mut |done, total| progress.at(done, total, "reading"),
        &STOP,
    );
    progress.end();
    let workload = extracted?;
    let key = Run::silent(common.threads, common.seed, |run| key(&workload, &settings, run))?;
    let mut state = SearchState::open_with(&path, &key, &args.merge, args.mixed, crew)?;
    if !state.is_empty() {
        note(common, &format!("{} measurements are known from {}", state.len(), path.display()));
    }
    let mut runtime = Runtime::new(&model, common.threads, args.task, common.seed).with_crew(crew);
    let ended = measured(common, "", |run| {
        tune_with(&mut runtime, &text, &check, &workload, &settings, &mut state, crew, run)
    })?;
    if !crew.leads() {
        return Ok(ExitCode::SUCCESS);
    }
    let tuned = match ended {
        Ended::Done(tuned) => tuned,
        Ended::Interrupted(kept) => {
            let name = path.display();
            tell!("interrupted: {kept} measurements are kept in {name}; run the same command to go on");
            return Ok(ExitCode::from(130));
        }
    };
    if let Some(recipe) = &tuned.recipe {
        let mut recipe = recipe.clone();
        // The full path lets the recipe find its calibrations from any working directory.
        recipe.calibration = match &args.calibration {
            Some(path) if uses_calibration(&recipe) => {
                Some(path.canonicalize().map_err(|e| Error::reading(path, e))?)
            }
            _ => None,
        };
        output::write(&args.out, recipe.to_toml()?.as_bytes())?;
    }
    if let (Some(path), false) = (&args.curve, tuned.curve.is_empty()) {
        output::write_figure(path, &curve::picture(&tuned))?;
        note(common, &format!("wrote {}", path.display()));
    }
    show(&tuned, common);
    match &tuned.recipe {
        Some(_) => note(common, &format!("wrote {}; run it with --recipe", args.out.display())),
        None => note(common, &format!("measured one part; join the parts with --merge {}", path.display())),
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the file of measurements beside a recipe: `recipe.toml.jsonl` for `recipe.toml`.
fn beside(out: &std::path::Path) -> PathBuf {
    let mut name = out.file_name().unwrap_or_default().to_os_string();
    name.push(".jsonl");
    out.with_file_name(name)
}

/// Returns true if a method of the recipe has a calibration.
fn uses_calibration(recipe: &attlas_model::Recipe) -> bool {
    let decodes = recipe.rules.iter().filter_map(|r| r.decode.as_ref()).map(|d| &d.method);
    let mut ids = recipe.rules.iter().map(|r| &r.method).chain(decodes);
    ids.any(|id| recipe.calibrations.has(id))
}

/// Returns the text to tune on; the one to check on, which is another text or the following tokens; and the one for the
/// reported result, if enough tokens follow.
fn texts(args: &TuneArgs, model: &Model, seed: u64) -> Result<(Text, Text, Option<Text>), Error> {
    let mut text = Text::read(&args.text, model, None)?;
    let all = text.tokens.len();
    let longest = model.config.max_positions;
    let share = if args.check_text.is_some() { all } else { all / 2 };
    let n = args.tokens.unwrap_or(TOKENS.min(longest).min(share));
    if n > longest {
        return Err(Error::argument("--tokens", format!("at most {longest}, the context of the model"), n));
    }
    if n == 0 || n > all {
        return Err(Error::argument("--text", format!("at least {} tokens", n.max(2 * FEWEST)), all));
    }
    let mut check = match &args.check_text {
        Some(path) => Text::read(path, model, None)?,
        None => {
            let tokens = text.tokens[n..].to_vec();
            Text { source: format!("{} after its first {n} tokens", text.source), tokens, ..text.clone() }
        }
    };
    let m = args.check_tokens.unwrap_or(n);
    let mut answer = match &args.answer_text {
        Some(path) => Some(Text::read(path, model, None)?),
        None if check.tokens.len() >= m.saturating_mul(2) => {
            let tokens = check.tokens[m..].to_vec();
            let source = match &args.check_text {
                Some(_) => format!("{} after its first {m} tokens", check.source),
                None => format!("{} after its first {} tokens", text.source, n + m),
            };
            Some(Text { source, tokens, ..check.clone() })
        }
        None => None,
    };
    answer.iter_mut().for_each(|a| a.tokens.truncate(m));
    text.tokens.truncate(n);
    check.tokens.truncate(m);
    if check.tokens.len() < FEWEST {
        let expected =
            format!("a text with {FEWEST} tokens or more that were not used for tuning, or --check-text");
        return Err(Error::argument("--text", expected, check.tokens.len()));
    }
    if let Some(task) = args.task {
        // Built like the prompts of the check.
        text.tokens = task::prompt(task, &model.tokenizer, &text, n, seed)?.tokens;
    }
    Ok((text, check, answer))
}

fn show(tuned: &Tuned, common: &Common) {
    if common.json {
        return print_json(tuned);
    }
    if common.csv {
        return print(&tuned.table().csv());
    }
    let heading = format!("{} reading {}, {} tokens", tuned.model, tuned.text, tuned.tokens);
    if common.md {
        print(&format!("{heading}\n\n{}\n{}", tuned.round_table().markdown(), tuned.table().markdown()));
    } else {
        print(&format!("{heading}\n\n{}\n{}", tuned.round_table().text(), tuned.table().text()));
    }
    if !tuned.fell_back.is_empty() {
        let ids = tuned.fell_back.join(", ");
        note(common, &wrap(&format!("exact at this length, and so no choice of their own: {ids}")));
    }
    if let Some(why) = &tuned.note {
        print(&format!("\nexact attention everywhere: {why}\n"));
    } else {
        let changed = tuned.picks.iter().filter(|p| p.cost < 1.0).count();
        let mut line = format!(
            "\n{changed} of {} key heads changed; attention of a prompt takes {} of exact attention's time",
            tuned.picks.len(),
            percent(tuned.cost())
        );
        if let Some(cost) = tuned.decode_cost() {
            line += &format!(", of a new token {}", percent(cost));
        }
        note(common, &line);
    }
    if let Some(from) = tuned.decode_from {
        note(common, &format!("new tokens use it behind {from} tokens and more"));
    }
    if let Some(why) = &tuned.decode_note {
        note(common, &wrap(&format!("exact attention for new tokens: {why}")));
    }
    if !tuned.decodes_exactly.is_empty() {
        let layers: Numbers = tuned.decodes_exactly.iter().copied().collect();
        note(common, &format!("exact attention decodes in layers {layers}: a method there has no stream"));
    }
}
