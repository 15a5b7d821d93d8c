//! `attlas calibrate`.

use crate::args::{CalibrateArgs, Common};
use crate::interrupt;
use crate::progress::Progress;
use crate::{Outcome, STOP, note, print, print_json};
use attlas_lab::calibrate::{Settings, calibrate, learners};
use attlas_lab::calibration::SUFFIX;
use attlas_lab::table::wrap;
use attlas_lab::text::{Text, open_model};
use attlas_lab::{Error, output};
use std::process::ExitCode;

/// Tokens to learn from by default.
const TOKENS: usize = 2048;

pub(crate) fn run(args: &CalibrateArgs, common: &Common) -> Outcome {
    let selection = learners(&args.methods.choice().resolve()?)?;
    output::check(&[("--out", &args.out)], &[&args.model.path, &args.text])?;
    if args.out.exists() && !args.out.is_dir() {
        return Err(Error::argument("--out", "a folder", "a file"));
    }
    interrupt::catch(common);
    let model = open_model(&args.model.path)?;
    let mut text = Text::read(&args.text, &model, None)?;
    let (all, longest) = (text.tokens.len(), model.config.max_positions);
    let tokens = args.tokens.unwrap_or(TOKENS.min(all / 2).min(longest / 2));
    let most = tokens.saturating_add(args.check_tokens.unwrap_or(tokens));
    if most > longest {
        let expected = format!("at most {longest} with --tokens together, the context of the model");
        return Err(Error::argument("--check-tokens", expected, most));
    }
    text.tokens.truncate(most);
    let settings = Settings {
        selection,
        layers: args.layers.clone(),
        tokens,
        seed: common.seed,
        threads: common.threads,
    };
    let progress = Progress::new(common);
    let found =
        calibrate(&model, &text, &settings, &mut |done, total, what| progress.at(done, total, what), &STOP);
    progress.end();
    let found = found?;
    std::fs::create_dir_all(&args.out).map_err(|e| Error::writing(&args.out, e))?;
    for chosen in &settings.selection {
        let id = chosen.method.id;
        if found.learnt.has(id) {
            found.learnt.of(id).write(&args.out.join(format!("{id}{SUFFIX}")))?;
        }
    }
    let path = args.out.join("errors.json");
    let text = serde_json::to_string_pretty(&found).map_err(|e| Error::writing(&path, e.into()))?;
    output::write(&path, text.as_bytes())?;
    if common.json {
        print_json(&found);
    } else if common.csv {
        print(&found.table().csv());
    } else {
        let heading = format!(
            "{}: learnt from {} tokens, relative errors on the {} that follow",
            found.text, found.tokens, found.check_tokens
        );
        let table = if common.md { found.table().markdown() } else { found.table().text() };
        print(&format!("{heading}\n\n{table}"));
    }
    for (id, why) in &found.refused {
        note(common, &wrap(&format!("{id} learnt nothing that a causal model can use: {why}")));
    }
    note(common, &format!("wrote {}; use it with --calibration", args.out.display()));
    Ok(ExitCode::SUCCESS)
}
