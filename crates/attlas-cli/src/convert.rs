//! `attlas convert`.

use crate::args::{Common, ConvertArgs, RecipeName};
use crate::{Outcome, note, print, print_json, verdict};
use attlas::Options;
use attlas::conversions::mla::{Params, Stage};
use attlas_lab::Error;
use attlas_lab::rewrite::latents::{Record, Settings};
use attlas_lab::table::{bytes, number, wrap};
use attlas_lab::words::setting;
use std::process::ExitCode;

pub(crate) fn run(args: &ConvertArgs, common: &Common) -> Outcome {
    let record = verdict::rewritten(&settings(args, common)?, common)?;
    let (judged, within) = verdict::of(&record.written, args.limit, None);
    // NaN is past every limit.
    let close = args.max_kl.is_none_or(|most| record.written.kl_mean <= most);
    show(&record, &judged, args, common);
    if within && !close {
        note(
            common,
            "over --max-kl on the text of the check; a smaller --max-kl leaves room for other texts",
        );
        return Ok(ExitCode::from(1));
    }
    Ok(verdict::status(within, common))
}

fn settings(args: &ConvertArgs, common: &Common) -> Result<Settings, Error> {
    let (params, search_fold) = params(args)?;
    Ok(Settings {
        model: args.model.path.clone(),
        conversion: args.to,
        params,
        keep: args.keep,
        until: args.until.unwrap_or(Stage::LowRankQueries),
        measured: args.stages.clone().unwrap_or_else(|| Stage::ALL.to_vec()),
        recalibrate: args.recalibrate || args.recipe == RecipeName::Published,
        search_fold,
        max_kl: args.max_kl,
        elements: args.dtype.map(Into::into),
        out: args.out.path.clone(),
        text: args.text.clone(),
        tokens: args.tokens,
        check_text: args.check_text.clone(),
        check_tokens: args.check_tokens,
        window: args.context,
        threads: common.threads,
    })
}

/// Returns the parameters of the conversion, and true if the fold is to be searched for.
fn params(args: &ConvertArgs) -> Result<(Params, bool), Error> {
    let mut options = match args.recipe {
        RecipeName::Improved => Options::new(),
        RecipeName::Published => Options::new().with("rotate", "real").with("pca", "activation"),
    };
    for (name, value) in [("rank", args.rank), ("rank_q", args.rank_q), ("rope_dim", args.rope_dim)] {
        if let Some(value) = value {
            options.set(name, value);
        }
    }
    let search = args.fold.as_deref() == Some("search");
    if let Some(fold) = args.fold.as_deref().filter(|_| !search) {
        options.set("fold", fold);
    }
    for text in &args.set {
        let (name, value) = setting(text, "balance=0.5")?;
        options.set(name, value);
    }
    Ok((Params::from_options(&options)?, search))
}

fn show(r: &Record, judged: &str, args: &ConvertArgs, common: &Common) {
    if common.json {
        return print_json(r);
    }
    if common.csv {
        return print(&r.table().csv());
    }
    let q = &r.written;
    let heading = format!(
        "{} to {} ({}), calibrated on {} tokens of {}, checked on {} of {}",
        r.model, r.conversion, r.params, r.calibration_tokens, r.text, q.scored, r.check_text
    );
    let table = if common.md { r.table().markdown() } else { r.table().text() };
    print(&format!("{heading}\n\n{table}\n"));
    if !r.fold_search.is_empty() {
        let tried: Vec<String> = r.fold_search.iter().map(|(f, ppl)| format!("{f}: {ppl:.3}")).collect();
        print(&format!("folds tried, with their perplexities: {}\n", tried.join(", ")));
    }
    if !r.rank_search.is_empty() {
        let tried = r.rank_search.iter().map(|(rank, kl)| format!("{rank}: {}", number(*kl)));
        let tried = tried.collect::<Vec<_>>().join(", ");
        print(&format!(
            "{}\n",
            wrap(&format!("ranks tried, with their divergences on text set aside: {tried}"))
        ));
    }
    print(&format!("{}\n", wrap(judged)));
    let share = |before: usize, after: usize| 100.0 * after as f64 / before.max(1) as f64;
    print(&format!(
        "KL {} nats, largest difference of a logit {}\n\
         cache {} -> {} a token ({:.1} %)\n\
         weights {} -> {} ({:.1} %), new matrices in {}, which moves a logit by at most {}\n\
         what was written differs from the model in memory, rounded alike, by at most {} in a logit\n",
        number(q.kl_mean),
        number(q.max_logit_diff),
        bytes(r.cache_bytes_before),
        bytes(r.cache_bytes_after),
        share(r.cache_bytes_before, r.cache_bytes_after),
        bytes(r.model_bytes),
        bytes(r.written_bytes),
        share(r.model_bytes, r.written_bytes),
        r.dtype,
        number(r.rounding_diff),
        number(r.written_diff),
    ));
    if r.cache_bytes_after >= r.cache_bytes_before {
        print("nothing is saved: this rank keeps everything; give a smaller --rank\n");
    }
    let loaded = if attlas_model::export::is_gguf(&args.out.path) {
        "llama.cpp loads it as deepseek2"
    } else if r.own_class {
        "transformers loads it with trust_remote_code=True, for its own class has no biases in feed-forward layers"
    } else {
        "transformers loads it as it is"
    };
    note(common, &format!("wrote {}; {loaded}", args.out.path.display()));
}
