//! `attlas extract`, `attlas perplexity` and `attlas generate`.

use crate::args::{Common, ExtractArgs, GenerateArgs, PerplexityArgs, ProtocolName, SpreadName};
use crate::interrupt;
use crate::progress::{Progress, measured};
use crate::{Outcome, STOP, note, print, print_json, team};
use attlas_lab::crew::Crew;
use attlas_lab::hash::sha256_of;
use attlas_lab::perplexity::{Record, Sharing};
use attlas_lab::table::{Table, bytes, count, csv_lines, number, raw, seconds};
use attlas_lab::text::{Text, check_recipe, open_model, open_model_for, past_recipe};
use attlas_lab::trace::{check_name, write_as};
use attlas_lab::{Error, extract, generate, output, perplexity};
use attlas_model::kept::CacheFormat;
use attlas_model::perplexity::Protocol;
use attlas_model::recipe::Numbers;
use attlas_model::sample::Sampling;
use attlas_model::{ChatTemplate, Compute, Message, Model};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::process::ExitCode;

/// Tokens of a window by default.
const CONTEXT: usize = 2048;

pub(crate) fn extract(args: &ExtractArgs, common: &Common) -> Outcome {
    check_name(&args.out, args.dtype)?;
    output::check(&[("--out", &args.out)], &[&args.model.path, &args.text.path])?;
    interrupt::catch(common);
    let model = open_model(&args.model.path)?;
    let text = Text::read(&args.text.path, &model, args.text.tokens)?;
    let settings = extract::Settings {
        layers: args.layers.clone(),
        heads: args.heads.clone(),
        before_rotation: args.pre_rope,
        bos: args.text.bos,
        threads: common.threads,
    };
    let progress = Progress::new(common);
    let mut extracted = extract::extract(
        &model,
        &text,
        &settings,
        &mut |done, total| progress.at(done, total, "reading"),
        &STOP,
    )
    .inspect_err(|_| progress.end())?;
    progress.end();
    let name = args.model.path.file_name().unwrap_or(args.model.path.as_os_str());
    extracted.workload.metadata.insert("model".into(), name.to_string_lossy().into_owned());
    write_as(&extracted.workload, &extracted.extra, args.dtype, &args.out)?;
    let layers = &extracted.workload.layers;
    let p = layers
        .first()
        .map(|l| l.problem)
        .ok_or_else(|| Error::argument("--layers", "one or more", "none"))?;
    let size = std::fs::metadata(&args.out).map_err(|e| Error::reading(&args.out, e))?.len();
    let rows = [
        ("out", args.out.display().to_string()),
        ("tokens", p.n_q.to_string()),
        ("layers", layers.iter().filter_map(|l| l.layer).collect::<Numbers>().to_string()),
        ("heads", format!("{} query, {} key, width {}", p.n_heads, p.n_kv_heads, p.d)),
        ("bytes", size.to_string()),
    ];
    if common.json {
        let record = serde_json::json!({
            "out": args.out.display().to_string(),
            "bytes": size,
            "tokens": p.n_q,
            "layers": layers.iter().map(|l| l.layer).collect::<Vec<_>>(),
            "heads": p.n_heads,
            "kv_heads": p.n_kv_heads,
            "d": p.d,
            "metadata": extracted.workload.metadata,
        });
        print_json(&record);
    } else {
        print_pairs(&rows, common);
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints names and values as two columns.
fn print_pairs(rows: &[(&'static str, String)], common: &Common) {
    let mut table = Table::new(&["<what", "<value"]);
    rows.iter().for_each(|(k, v)| table.push(vec![(*k).to_string(), v.clone()]));
    if common.csv {
        print(&table.csv());
    } else if common.md {
        print(&table.markdown());
    } else {
        let width = rows.iter().map(|(k, _)| k.len()).max().unwrap_or(0);
        rows.iter().for_each(|(k, v)| print(&format!("{k:width$}  {v}\n")));
    }
}

pub(crate) fn perplexity(args: &PerplexityArgs, common: &Common) -> Outcome {
    team::crewed(|crew| perplexity_on(crew, args, common))
}

fn perplexity_on(crew: &dyn Crew, args: &PerplexityArgs, common: &Common) -> Outcome {
    if let (Some(path), true) = (&args.state, crew.leads()) {
        output::check(&[("--state", path)], &[&args.model.path, &args.text.path])?;
    }
    let recipe = args.attention.attention().resolve()?;
    interrupt::catch(common);
    let (model, trained) = open_model_for(&args.model.path, args.context)?;
    recipe.as_ref().map_or(Ok(()), |r| check_recipe(r, &model))?;
    let text = Text::read(&args.text.path, &model, args.text.tokens)?;
    let window = args.context.unwrap_or_else(|| trained.min(CONTEXT));
    note_past(common, window, trained);
    if let Some(warning) = recipe.as_ref().and_then(|r| past_recipe(r, window)).filter(|_| crew.leads()) {
        tell!("warning: {warning}");
    }
    let protocol = match args.protocol {
        ProtocolName::Strided => Protocol::Strided { window, stride: args.stride.unwrap_or(window) },
        ProtocolName::Llamacpp => Protocol::SecondHalf { window },
        ProtocolName::Windows => Protocol::Disjoint { window },
    };
    if args.stride.is_some() && args.protocol != ProtocolName::Strided {
        return Err(Error::argument("--stride", "the protocol strided", "another one"));
    }
    if let Some(stride) = args.stride.filter(|s| *s > window) {
        return Err(Error::argument("--stride", format!("1 to {window}, the tokens of a window"), stride));
    }
    if !args.text.bos
        && model.tokenizer.encode("", true)?.first().is_some_and(|id| Some(*id) == model.tokenizer.bos())
    {
        note(common, "note: this model was made to see a token at the beginning of a text; --bos adds it");
    }
    let settings = perplexity::Settings {
        protocol,
        bos: args.text.bos,
        task: args.task,
        recipe,
        cache: args.cache,
        compute: args.compute,
        sharing: match args.spread {
            Some(SpreadName::Windows) => Sharing::Windows,
            Some(SpreadName::Keys) => Sharing::Keys,
            None => Sharing::Fewer,
        },
    };
    let key = || {
        let path = &args.model.path;
        // If it is no path, it is the name of a model elsewhere.
        let weights = if path.exists() { sha256_of(path) } else { Ok(path.display().to_string()) };
        perplexity::key(&weights.map_err(|e| Error::reading(path, e))?, &text, &settings, common.seed)
    };
    let mut ledger = team::ledger(args.state.as_deref(), "perplexity", key, common)?;
    let record = measured(common, "", |run| {
        perplexity::perplexity_with(&model, &text, &settings, crew, &mut ledger, None, run)
    })?;
    if !crew.leads() {
        return Ok(ExitCode::SUCCESS);
    }
    if common.json {
        print_json(&record);
    } else if common.csv {
        print(&csv(&record)?);
    } else {
        print_pairs(&rows(&record), common);
    }
    if record.interrupted {
        tell!("interrupted: the figures are those of the finished windows");
        return Ok(ExitCode::from(130));
    }
    Ok(ExitCode::SUCCESS)
}

/// Formats a flat record as two CSV lines: names, and values with all digits.
fn csv(record: &impl serde::Serialize) -> Result<String, Error> {
    use serde_json::Value;
    let value = serde_json::to_value(record)
        .map_err(|e| Error::argument("--csv", "a record that can be written", e))?;
    let Value::Object(fields) = value else {
        return Err(Error::argument("--csv", "a record of named fields", "another"));
    };
    Ok(csv_lines(&[fields.keys().cloned().collect(), fields.values().map(raw).collect()]))
}

fn rows(r: &Record) -> Vec<(&'static str, String)> {
    let fixed = |x: f64| format!("{x:.4}");
    let mut rows = vec![
        ("text", format!("{}, {} tokens", r.text, r.tokens)),
        (
            "protocol",
            format!(
                "{}, window {}, stride {}, {} BOS; {}, {} scored",
                r.protocol,
                r.context,
                r.stride,
                if r.bos { "with" } else { "no" },
                count(r.windows, "window"),
                count(r.scored as usize, "token")
            ),
        ),
        ("attention", attention(r)),
        ("products", products(r.compute, &r.in_f32)),
        (
            if r.task.is_some() { "perplexity of the far tokens" } else { "perplexity" },
            format!("{} +- {}", fixed(r.ppl), fixed(r.ppl_se)),
        ),
        ("nll", format!("{} +- {} nats a token", fixed(r.nll), fixed(r.nll_se))),
    ];
    if let Some(x) = &r.against_exact {
        let quantile = |q: Option<f64>| q.map_or("-".into(), number);
        rows.extend([
            (
                "exact perplexity",
                format!(
                    "{}, increase {:+.2} %{}",
                    fixed(x.exact_ppl),
                    100.0 * x.ppl_increase,
                    x.nll_increase_se.map_or(String::new(), |se| format!(" +- {:.2} %", 100.0 * se))
                ),
            ),
            (
                "KL to exact",
                format!(
                    "{} +- {} nats; median {}, 90 % {}, 99 % {}, most {}",
                    number(x.kl_mean),
                    number(x.kl_se),
                    quantile(x.kl_median),
                    quantile(x.kl_q90),
                    quantile(x.kl_q99),
                    quantile(x.kl_max)
                ),
            ),
            ("same top token", format!("{:.2} %", 100.0 * x.same_top)),
            ("new tokens", new_tokens(&x.decodes_exactly)),
            (
                "change of p",
                format!(
                    "mean {:+.3} %, root mean square {:.3} %",
                    100.0 * x.delta_p_mean,
                    100.0 * x.delta_p_rms
                ),
            ),
            ("scores computed", format!("{:.1} % of exact attention's", 100.0 * x.keys_share)),
            ("time", format!("{}, exact {}", seconds(r.seconds), seconds(x.exact_seconds))),
        ]);
    } else {
        rows.push(("time", seconds(r.seconds)));
    }
    rows.push(("speed", format!("{} tokens/s, logits included", number(r.tokens_per_second))));
    if let Some(s) = &r.spread_keys {
        rows.push((
            "keys",
            format!("on {}, at most {} each", count(s.processes, "process"), bytes(s.cache_bytes)),
        ));
    }
    rows
}

/// Names the type that products were computed in, and the matrices left in f32.
fn products(compute: Compute, in_f32: &BTreeMap<&str, usize>) -> String {
    let others: Vec<String> = in_f32.iter().map(|(format, n)| format!("{n} in {format}")).collect();
    if others.is_empty() { compute.to_string() } else { format!("{compute}; f32 of {}", others.join(", ")) }
}

/// Describes the attention of new tokens.
fn new_tokens(decodes_exactly: &[usize]) -> String {
    match decodes_exactly {
        [] => "by the streams of the same attention".into(),
        layers => format!("by exact attention in layers {}: a method there has no stream", numbers(layers)),
    }
}

fn numbers(layers: &[usize]) -> Numbers {
    layers.iter().copied().collect()
}

/// Names the attention that ran, and says if it was exact.
fn attention(r: &Record) -> String {
    let mut named = format!("{} {}", r.attention, r.params).trim_end().to_string();
    if r.cache != CacheFormat::F32 {
        named += &format!(", cache in {}", r.cache.name());
    }
    match &r.against_exact {
        Some(x) if x.fell_back => {
            format!("{named}: exact at this length, its settings cover {} tokens", r.context)
        }
        _ => named,
    }
}

/// Prints a note if `tokens` exceed the context that the model was trained for.
fn note_past(common: &Common, tokens: usize, trained: usize) {
    if tokens > trained {
        let what =
            format!("note: the model was made for {trained} tokens; beyond, its positions are extrapolated");
        note(common, &what);
    }
}

pub(crate) fn generate(args: &GenerateArgs, common: &Common) -> Outcome {
    let recipe = args.attention.attention().resolve()?;
    interrupt::catch(common);
    let (model, trained) = open_model_for(&args.model.path, args.context)?;
    recipe.as_ref().map_or(Ok(()), |r| check_recipe(r, &model))?;
    let prompt = match (&args.prompt, &args.prompt_file) {
        (Some(text), _) => text.clone(),
        (None, Some(path)) => read_prompt(path)?,
        (None, None) => return Err(Error::argument("--prompt", "a text", "none")),
    };
    let ids = if args.chat {
        let rendered = chat_prompt(&model, args.system.as_deref(), &prompt)?;
        model.tokenizer.encode(&rendered, false)?
    } else {
        model.tokenizer.encode(&prompt, true)?
    };
    if let Some(warning) = recipe.as_ref().and_then(|r| past_recipe(r, ids.len() + args.max_tokens)) {
        tell!("warning: {warning}");
    }
    note_past(common, (ids.len() + args.max_tokens).min(model.config.longest_context()), trained);
    let settings = generate::Settings {
        max_tokens: args.max_tokens,
        sampling: Sampling {
            temperature: args.temperature,
            top_k: args.top_k,
            top_p: args.top_p,
            seed: common.seed,
        },
        stop: args.stop.clone(),
        ignore_eos: args.ignore_eos,
        recipe,
        cache: args.cache,
        compute: args.compute,
        threads: common.threads,
    };
    let live = !common.json && !common.csv;
    let mut show = |piece: &str| {
        if live {
            print(piece);
        }
    };
    let progress = Progress::new(common);
    let mut read = |done: usize, total: usize| match done < total {
        true => progress.at(done, total, "reading the prompt"),
        false => progress.end(),
    };
    let result = generate::generate(&model, &ids, &settings, &mut show, &mut read, &STOP)
        .inspect_err(|_| progress.end())?;
    if result.fell_back {
        let id = args.attention.method.as_deref().unwrap_or("the method");
        note(common, &format!("{id} is exact at this length: its settings cover {} tokens", ids.len()));
    }
    if !result.decodes_exactly.is_empty() {
        let layers = numbers(&result.decodes_exactly);
        let what = format!("exact attention decodes in layers {layers}: a method there has no stream");
        note(common, &what);
    }
    if common.json {
        print_json(&result);
    } else if common.csv {
        print(&csv(&result)?);
    } else {
        print("\n");
        let rate = result.tokens_per_second.map_or("-".into(), number);
        note(
            common,
            &format!(
                "{} after a prompt of {}: {rate} tokens/s, prompt {} tokens/s, cache {} in {}, products {}",
                count(result.ids.len(), "token"),
                result.prompt_ids.len(),
                number(result.prompt_tokens_per_second),
                bytes(result.cache_bytes),
                result.cache.name(),
                products(result.compute, &result.in_f32)
            ),
        );
    }
    Ok(ExitCode::from(if result.ended == generate::Ended::Interrupted { 130 } else { 0 }))
}

fn read_prompt(path: &Path) -> Result<String, Error> {
    let mut text = String::new();
    let read = if path == Path::new("-") {
        std::io::stdin().read_to_string(&mut text)
    } else {
        std::fs::File::open(path).and_then(|mut f| f.read_to_string(&mut text))
    };
    read.map_err(|e| Error::reading(path, e))?;
    Ok(text)
}

/// Formats a message with the model's chat template.
fn chat_prompt(model: &Model, system: Option<&str>, user: &str) -> Result<String, Error> {
    let mut messages: Vec<Message> = system.map(|s| Message::new("system", s)).into_iter().collect();
    messages.push(Message::user(user));
    Ok(ChatTemplate::of(model)?.render(&messages, true)?)
}
