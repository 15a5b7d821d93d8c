//! `attlas tune`.

use crate::args::{Common, TuneArgs};
use crate::interrupt;
use crate::progress::Progress;
use crate::report::command_line;
use crate::{Outcome, STOP, note, print, print_json};
use attlas_lab::table::{number, percent, wrap};
use attlas_lab::text::{Text, open_model};
use attlas_lab::tune::{Ended, Runtime, Settings, State, Tuned, extract_layers, key, tune};
use attlas_lab::{Error, output};
use attlas_model::Model;
use std::path::PathBuf;
use std::process::ExitCode;

/// Tokens that are tuned on where nothing is said.
const TOKENS: usize = 2048;
/// Fewest tokens that a check is made on.
const FEWEST: usize = 16;

pub(crate) fn run(args: &TuneArgs, common: &Common) -> Outcome {
    let settings = Settings {
        max_error: args.max_error,
        max_kl: args.max_kl,
        max_ppl_increase: args.max_ppl_increase,
        selection: args.methods.choice().resolve()?,
        layers: args.layers.clone(),
        effort: args.effort,
        shard: args.shard,
        seed: common.seed,
        threads: common.threads,
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
    output::check(&[("--out", &args.out), ("--state", &path)], &inputs)?;
    interrupt::catch(common);
    let model = open_model(&args.model.path)?;
    let (text, check) = texts(args, &model)?;
    let progress = Progress::new(common);
    let extracted = extract_layers(
        &model,
        &text,
        &settings,
        &mut |done, total| progress.at(done, total, "reading"),
        &STOP,
    );
    progress.end();
    let workload = extracted?;
    let mut state = State::open(Some(&path), &key(&workload, &settings)?)?;
    if !args.merge.is_empty() {
        args.merge.iter().try_for_each(|other| state.merge(other))?;
        state.rewrite()?;
    }
    if !state.is_empty() {
        note(common, &format!("{} measurements are known from {}", state.len(), path.display()));
    }
    let progress = Progress::new(common);
    let ended = tune(
        &mut Runtime { model: &model, threads: common.threads },
        &text,
        &check,
        &workload,
        &settings,
        &mut state,
        &mut |done, total, what| progress.at(done, total, what),
        &STOP,
    );
    progress.end();
    let tuned = match ended? {
        Ended::Done(tuned) => tuned,
        Ended::Interrupted(kept) => {
            let name = path.display();
            eprintln!("interrupted: {kept} measurements are kept in {name}; run the same command to go on");
            return Ok(ExitCode::from(130));
        }
    };
    if let Some(recipe) = &tuned.recipe {
        output::write(&args.out, recipe.to_toml()?.as_bytes())?;
    }
    show(&tuned, common);
    match &tuned.recipe {
        Some(_) => note(common, &format!("wrote {}; run it with --recipe", args.out.display())),
        None => note(common, &format!("measured one part; join the parts with --merge {}", path.display())),
    }
    Ok(ExitCode::SUCCESS)
}

/// `recipe.toml` keeps its measurements in `recipe.toml.jsonl`.
fn beside(out: &std::path::Path) -> PathBuf {
    let mut name = out.file_name().unwrap_or_default().to_os_string();
    name.push(".jsonl");
    out.with_file_name(name)
}

/// The text to tune on, and the one to check on: another, or what follows.
fn texts(args: &TuneArgs, model: &Model) -> Result<(Text, Text), Error> {
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
    text.tokens.truncate(n);
    check.tokens.truncate(args.check_tokens.unwrap_or(n));
    if check.tokens.len() < FEWEST {
        let expected =
            format!("a text with {FEWEST} tokens or more that were not used for tuning, or --check-text");
        return Err(Error::argument("--text", expected, check.tokens.len()));
    }
    Ok((text, check))
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
    } else if let Some(round) = tuned.chosen.map(|i| &tuned.rounds[i]) {
        note(
            common,
            &format!(
                "\n{} of the key heads changed within an error of {}; attention takes {} of exact attention's time there",
                percent(round.changed),
                number(round.target),
                percent(round.cost)
            ),
        );
    }
}
