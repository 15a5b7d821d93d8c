//! `attlas compress`.

use crate::args::{Common, CompressArgs};
use crate::{Outcome, note, print, print_json, verdict};
use attlas::conversions::common::network::Role;
use attlas::{Options, registry};
use attlas_lab::Error;
use attlas_lab::rewrite::factors::{Accept, Acceptance, Calibrate, Record, Settings, set_rank};
use attlas_lab::table::{Table, number, wrap};
use attlas_lab::words::setting;
use std::process::ExitCode;

/// Lines of losses shown in the text output.
const SHOWN: usize = 12;

pub(crate) fn run(args: &CompressArgs, common: &Common) -> Outcome {
    let settings = settings(args, common)?;
    let record = verdict::rewritten(&settings, common);
    if matches!(record, Err(Error::Model(attlas_model::Error::Interrupted))) && args.out.path.exists() {
        tell!("interrupted: {} is written and whole, but was not measured", args.out.path.display());
        return Ok(ExitCode::from(130));
    }
    let record = record?;
    let judged = record
        .quality
        .as_ref()
        .map(|q| verdict::of(q, args.limit, Some((record.before.bytes, record.after.bytes))));
    show(&record, judged.as_ref().map(|j| j.0.as_str()), common);
    Ok(judged.map_or(ExitCode::SUCCESS, |(_, within)| verdict::status(within, common)))
}

fn settings(args: &CompressArgs, common: &Common) -> Result<Settings, Error> {
    let conversion = registry::conversion(&args.with)?;
    let mut options = Options::new();
    match &args.rank[..] {
        [] => {}
        &[rank] => set_rank(conversion, &mut options, rank),
        _ if args.accept => {}
        several => {
            let found = format!("{} of them", several.len());
            return Err(Error::argument("--rank", "one rank, or --accept to try several", found));
        }
    }
    for (name, value) in
        [("rel_error", args.max_weight_error), ("keep", args.keep), ("max_loss", args.max_loss)]
    {
        value.into_iter().for_each(|value| options.set(name, value));
    }
    if common.seed != 0 && conversion.params.iter().any(|p| p.name == "seed") {
        options.set("seed", common.seed);
    }
    for text in &args.set {
        let (name, value) = setting(text, "layer_rank=48")?;
        options.set(name, value);
    }
    Ok(Settings {
        model: args.model.path.clone(),
        conversion,
        options,
        layers: args.layers.as_ref().map(|l| l.iter().collect()),
        roles: args.matrices.as_deref().map(Role::parse_list).transpose()?,
        elements: args.dtype.map(Into::into),
        out: args.out.path.clone(),
        text: args.text.clone(),
        tokens: args.tokens,
        window: args.context,
        repeats: args.repeats,
        threads: common.threads,
        accept: args.accept.then(|| Accept {
            tokens: args.accept_tokens,
            ranks: if args.rank.len() > 1 { args.rank.clone() } else { Vec::new() },
        }),
        calibrate: args.calibrate.as_ref().map(|text| Calibrate {
            text: text.clone(),
            tokens: args.calibrate_tokens,
            probe: args.probe_tokens,
        }),
    })
}

fn show(r: &Record, judged: Option<&str>, common: &Common) {
    if common.json {
        return print_json(r);
    }
    let table = r.table();
    if common.csv {
        return print(&table.csv());
    }
    let form = |t: &Table| if common.md { t.markdown() } else { t.text() };
    let params = if r.params.is_empty() { "defaults".to_owned() } else { r.params.to_string() };
    let read = match (&r.quality, &r.embeddings) {
        (Some(q), _) => format!("{} tokens of {} in windows of {}", q.scored, r.text, q.window),
        (None, Some(e)) => format!("{} paragraphs of {}", e.texts, r.text),
        (None, None) => r.text.clone(),
    };
    print(&format!("{} with {} ({params}), measured on {read}\n\n{}\n", r.model, r.conversion, form(&table)));
    if let Some(a) = &r.acceptance {
        print(&format!("{}\n{}\n", form(&a.table()), outcome(a)));
    }
    let mut losses = Table::new(&["<weights", "rank", "error", "on text", "numbers", "kept"]);
    let share = |a: usize, b: usize| format!("{:.1} %", 100.0 * b as f64 / a.max(1) as f64);
    for l in r.losses.iter().take(SHOWN) {
        let seen = l.seen_error.map_or("-".into(), number);
        let cells = [l.what.clone(), l.rank.to_string(), number(l.rel_error), seen, l.after.to_string()];
        losses.push(cells.into_iter().chain([share(l.before, l.after)]).collect());
    }
    if !losses.is_empty() {
        print(&form(&losses));
    }
    if r.losses.len() > SHOWN {
        print(&format!("and {} more; --json has all\n", r.losses.len() - SHOWN));
    }
    print(&format!("\nrelative error of the weights {}; {}\n", number(r.rel_error), r.verdict()));
    if let Some(c) = &r.calibration {
        let predicted = c.predicted_kl.map_or(String::new(), |kl| {
            format!("; losses of single matrices add up to a KL of {}", number(kl))
        });
        let said = format!(
            "fitted to {} tokens of {}: relative error of the outputs on them {}{predicted}",
            c.tokens,
            c.text,
            number(c.seen_error)
        );
        print(&format!("{}\n", wrap(&said)));
    }
    if let Some(judged) = judged {
        print(&format!("{}\n", wrap(judged)));
    }
    let how = if attlas_model::export::is_gguf(std::path::Path::new(&r.out)) {
        "and llama.cpp run it, factors multiplied out"
    } else {
        "runs it on its factors"
    };
    note(common, &format!("wrote {}; `attlas generate {}` {how}", r.out, r.out));
}

/// Describes the accepted and rejected changes.
fn outcome(a: &Acceptance) -> String {
    let layers = a.layers();
    let kept = match &layers[..] {
        [] => "no change was kept: what is written predicts as the model does".to_owned(),
        list => format!(
            "kept in {} of the layers tried: {}",
            list.len(),
            list.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
        ),
    };
    format!(
        "{kept}\nperplexity of the {} tokens set aside {:.3} -> {:.3}; what is chosen by a text looks better on it\n",
        a.scored, a.ppl_before, a.ppl_after
    )
}
