//! `attlas layer`.

use crate::args::{Common, LayerArgs};
use crate::{Outcome, print, print_json};
use attlas::{Mask, Options, Schedule, Workspace, registry};
use attlas_lab::layer::{Settings, WeightSource, read_states, write_npy};
use attlas_lab::table::{Table, number, seconds};
use attlas_lab::words::setting;
use attlas_lab::{Error, layer as lab, output};
use std::path::Path;
use std::process::ExitCode;

pub(crate) fn run(args: &LayerArgs, common: &Common) -> Outcome {
    let kind = registry::layer(&args.id)?;
    if let Some(path) = &args.out {
        let mut read: Vec<&Path> = vec![&args.input];
        read.extend(args.weights.as_deref().into_iter().chain(args.context.as_deref()));
        output::check(&[("--out", path)], &read)?;
        if path.extension().is_none_or(|e| e != "npy") {
            return Err(Error::argument("--out", "a name that ends in .npy", path.display()));
        }
    }
    let mut options = Options::new();
    for text in &args.set {
        let (name, value) = setting(text, "dims=32x32")?;
        options.set(name, value);
    }
    let settings = Settings {
        options,
        heads: args.heads,
        kv_heads: args.kv_heads.unwrap_or(args.heads),
        d: args.d,
        d_v: args.d_v,
        mask: if args.causal { Mask::Causal } else { Mask::None },
        context: args.context.as_deref().map(|path| read_states(path, None)).transpose()?,
        weights: match &args.weights {
            Some(path) => WeightSource::File(path.clone()),
            None => WeightSource::Random(args.random.unwrap_or(common.seed)),
        },
    };
    let x = read_states(&args.input, args.tensor.as_deref())?;
    let mut ws = Workspace::new(Schedule { threads: common.threads, ..Schedule::default() })?;
    let (record, y) = lab::run(kind, &x, &settings, &mut ws)?;
    if let Some(path) = &args.out {
        write_npy(path, &record.shape, &y)?;
    }
    if common.json {
        print_json(&record);
        return Ok(ExitCode::SUCCESS);
    }
    let list = |n: &[usize]| n.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
    let [heads, kv_heads, d, d_v] = record.heads;
    let mut rows = vec![
        ("layer", format!("{} ({})", record.layer, kind.title)),
        ("hidden states", format!("{} ({} tokens)", list(&record.shape), record.tokens)),
        ("heads", format!("{heads} of queries, {kv_heads} of keys; widths {d} and {d_v}")),
        ("mask", record.mask.to_string()),
        ("parameters", record.parameters.to_string()),
        ("cache per token", format!("{} numbers", record.cache_elements)),
        ("norm out / in", number(record.gain)),
        ("time", seconds(record.seconds)),
    ];
    if !record.params.is_empty() {
        rows.insert(1, ("set", record.params.clone()));
    }
    if let Some(tokens) = record.context_tokens {
        rows.insert(rows.len() - 5, ("keys and values", format!("of another sequence of {tokens} tokens")));
    }
    if let Some(flops) = record.flops {
        rows.insert(rows.len() - 2, ("operations", number(flops as f64)));
    }
    let mut table = Table::new(&["<what", "<value"]);
    rows.into_iter().for_each(|(k, v)| table.push(vec![k.into(), v]));
    print(&if common.csv {
        table.csv()
    } else if common.md {
        table.markdown()
    } else {
        table.text()
    });
    Ok(ExitCode::SUCCESS)
}
