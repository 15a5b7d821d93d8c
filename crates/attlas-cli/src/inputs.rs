//! Reading of the inputs that a command names.

use crate::STOP;
use crate::args::{Common, Inputs};
use crate::progress::Progress;
use attlas_lab::compare;
use attlas_lab::text::{Text, open_model};
use attlas_lab::{Error, Source, Workload, extract, output, task};
use attlas_model::recipe::Numbers;
use std::path::Path;

/// Treatment of non-finite numbers: an error, or left to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Numerals {
    Finite,
    Unchecked,
}

/// Fails if an output could not be written or would replace an input; `more` is a further input.
pub(crate) fn check_outputs(
    outputs: &[(&str, Option<&Path>)],
    inputs: &Inputs,
    more: Option<&Path>,
) -> Result<(), Error> {
    if crate::team::follows() {
        return Ok(());
    }
    let outputs: Vec<(&str, &Path)> =
        outputs.iter().filter_map(|(flag, path)| Some((*flag, (*path)?))).collect();
    let mut read: Vec<&Path> = match &inputs.source {
        Source::Model(path) => vec![path],
        Source::Files(paths) => paths.iter().map(|p| p.as_path()).collect(),
        _ => Vec::new(),
    };
    read.extend(inputs.text.as_deref());
    read.extend(more);
    output::check(&outputs, &read)
}

/// Draws the inputs, reads them, or takes them from a model that reads a text; from a model only the query heads
/// `heads`.
pub(crate) fn load(
    inputs: &Inputs,
    heads: Option<&Numbers>,
    numbers: Numerals,
    common: &Common,
) -> Result<Workload, Error> {
    let mut workload = match (&inputs.source, &inputs.text) {
        (Source::Model(path), Some(text)) => return read_by_model(path, text, inputs, heads, common),
        (source, Some(_)) => return Err(Error::argument("--text", "a model as the source", source)),
        (source, None) if heads.is_some() && !matches!(source, Source::Model(_)) => {
            return Err(Error::argument("--heads", "a model as the source", source));
        }
        (source, None) if numbers == Numerals::Unchecked => source.load_unchecked()?,
        (source, None) => source.load()?,
    };
    if let Some(layers) = &inputs.layers {
        workload.keep_layers(&layers.iter().collect::<Vec<_>>())?;
    }
    Ok(workload)
}

fn read_by_model(
    path: &Path,
    text: &Path,
    inputs: &Inputs,
    heads: Option<&Numbers>,
    common: &Common,
) -> Result<Workload, Error> {
    let model = open_model(path)?;
    let mut text = Text::read(text, &model, Some(inputs.tokens))?;
    let mut scored_from = None;
    if let Some(task) = inputs.task {
        let prompt = task::prompt(task, &model.tokenizer, &text, inputs.tokens, common.seed)?;
        // A token is predicted from the state of the token before it.
        scored_from = prompt.targets.first().map(|t| (task, t.start.saturating_sub(1)));
        text.tokens = prompt.tokens;
    }
    let settings = extract::Settings {
        layers: inputs.layers.clone(),
        heads: heads.cloned(),
        threads: common.threads,
        ..extract::Settings::default()
    };
    let progress = Progress::new(common);
    let extracted = extract::extract(
        &model,
        &text,
        &settings,
        &mut |done, total| progress.at(done, total, "reading"),
        &STOP,
    );
    progress.end();
    let mut workload = extracted?.workload;
    workload.source = format!("{} reading {}", path.display(), text.source);
    if let Some((task, first)) = scored_from {
        workload.source += &format!(", task {task}");
        workload.metadata.insert(compare::SCORED_FROM.into(), first.to_string());
    }
    Ok(workload)
}
