//! `attlas convert`.

use crate::args::{Common, ConvertArgs, RecipeName, Target};
use crate::interrupt;
use crate::progress::Progress;
use crate::{Outcome, STOP, note, print, print_json, verdict};
use attlas::Options;
use attlas::conversions::mla::{Params, Stage};
use attlas_lab::Error;
use attlas_lab::convert::{FEWEST, Origin, Record, Settings, convert, model_files};
use attlas_lab::table::{bytes, number, wrap};
use attlas_lab::text::{Text, model_size, open_model};
use attlas_model::Model;
use attlas_model::save::Folder;
use std::process::ExitCode;

/// Tokens to calibrate on by default.
const TOKENS: usize = 8192;
/// Tokens to check on by default.
const CHECK_TOKENS: usize = 2048;

pub(crate) fn run(args: &ConvertArgs, common: &Common) -> Outcome {
    let Target::Mla = args.to;
    // What can be known to fail is known before a model is opened.
    Folder::check(&args.out.path)?;
    let (params, search_fold) = params(args)?;
    interrupt::catch(common);
    let model = open_model(&args.model.path)?;
    // Refuse before reading a long text, too.
    let params = attlas_model::convert::check(&model, &kept(params, args.keep, &model)?)?;
    let (text, check) = texts(args, &model)?;
    let settings = Settings {
        params,
        until: args.until.unwrap_or(Stage::LowRankQueries),
        measured: match &args.stages {
            Some(list) => list.clone(),
            None => Stage::ALL.to_vec(),
        },
        recalibrate: args.recalibrate || args.recipe == RecipeName::Published,
        search_fold,
        max_kl: args.max_kl,
        elements: args.dtype.map(Into::into),
        calibration_window: 256,
        check_window: args.context,
        threads: common.threads,
    };
    let origin = Origin {
        model: args
            .model
            .path
            .file_name()
            .unwrap_or(args.model.path.as_os_str())
            .to_string_lossy()
            .into_owned(),
        model_sha256: if args.model.path.exists() { model_files(&args.model.path)? } else { Vec::new() },
        model_bytes: model_size(&args.model.path)?.1,
        text: text.source.clone(),
        text_sha256: text.sha256.clone(),
        check_text: check.source.clone(),
    };
    let progress = Progress::new(common);
    let record = convert(
        &model,
        &text.tokens,
        &check.tokens,
        &settings,
        origin,
        &args.out.path,
        &mut |what, done, all| progress.at(done, all, what),
        &STOP,
    );
    progress.end();
    let record = record?;
    let (judged, within) = verdict::of(&record.written, args.limit, None);
    // What is no number is past every limit.
    let close = args.max_kl.is_none_or(|most| record.written.kl_mean <= most);
    show(&record, &judged, &model, args, common);
    if within && !close {
        note(
            common,
            "over --max-kl on the text of the check; a smaller --max-kl leaves room for other texts",
        );
        return Ok(ExitCode::from(1));
    }
    Ok(verdict::status(within, common))
}

/// The parameters with the rank that leaves this share of the cache.
fn kept(params: Params, share: Option<f64>, model: &Model) -> Result<Params, Error> {
    let Some(share) = share else { return Ok(params) };
    let resolved = attlas_model::convert::check(model, &params)?;
    let shape = attlas_model::convert::layer_shape(&model.config);
    let (cache, rotated) = (shape.n_kv_heads * (shape.d + shape.d_v), resolved.rope_dim.unwrap_or(0));
    // The rotated key, and the constant of the written latent, are cached beside it.
    let rank = ((share * cache as f64) as usize).saturating_sub(rotated + 1);
    if rank == 0 || share > 1.0 {
        let least = 100.0 * (rotated + 2) as f64 / cache as f64;
        let expected = format!("more than {least:.1}%, the rotated key of {rotated}, and at most 100%");
        return Err(Error::argument("--keep", expected, format!("{:.1}%", 100.0 * share)));
    }
    Ok(Params { rank: Some(rank.min(cache - rotated)), ..params })
}

/// The parameters of the conversion, and whether the fold is searched for.
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
        let (name, value) = text.split_once('=').ok_or_else(|| {
            Error::argument("--set", "parameter=value, such as balance=0.5", format!("'{text}'"))
        })?;
        options.set(name, value);
    }
    Ok((Params::from_options(&options)?, search))
}

/// The text to calibrate on, and the one to check on: another, or what follows.
fn texts(args: &ConvertArgs, model: &Model) -> Result<(Text, Text), Error> {
    let mut text = Text::read(&args.text, model, None)?;
    let all = text.tokens.len();
    let share = if args.check_text.is_some() { all } else { all / 4 * 3 };
    let n = args.tokens.unwrap_or(TOKENS.min(share));
    let mut check = match &args.check_text {
        Some(path) => Text::read(path, model, None)?,
        None => {
            let tokens = text.tokens[n.min(all)..].to_vec();
            Text { source: format!("{} after its first {n} tokens", text.source), tokens, ..text.clone() }
        }
    };
    if n > all || check.tokens.len() < FEWEST {
        let expected = format!(
            "{n} tokens to calibrate on and {FEWEST} or more after them to check on, or --check-text"
        );
        return Err(Error::argument("--text", expected, format!("{all} tokens")));
    }
    text.tokens.truncate(n);
    check.tokens.truncate(args.check_tokens.unwrap_or(CHECK_TOKENS));
    Ok((text, check))
}

fn show(r: &Record, judged: &str, model: &Model, args: &ConvertArgs, common: &Common) {
    if common.json {
        return print_json(r);
    }
    if common.csv {
        return print(&r.table().csv());
    }
    let q = &r.written;
    let heading = format!(
        "{} to mla ({}), calibrated on {} tokens of {}, checked on {} of {}",
        r.origin.model, r.params, r.calibration_tokens, r.origin.text, q.scored, r.origin.check_text
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
        bytes(r.origin.model_bytes),
        bytes(r.written_bytes),
        share(r.origin.model_bytes, r.written_bytes),
        r.dtype,
        number(r.rounding_diff),
        number(r.written_diff),
    ));
    if r.cache_bytes_after >= r.cache_bytes_before {
        print("nothing is saved: this rank keeps everything; give a smaller --rank\n");
    }
    let loaded = if attlas_model::export::is_gguf(&args.out.path) {
        "llama.cpp loads it as deepseek2"
    } else if attlas_model::convert::has_mlp_biases(model) {
        "transformers loads it with trust_remote_code=True, for its own class has no biases in feed-forward layers"
    } else {
        "transformers loads it as it is"
    };
    note(common, &format!("wrote {}; {loaded}", args.out.path.display()));
}
