//! `attlas decompose`.

use crate::args::{Common, DecomposeArgs};
use crate::{Outcome, note, print, print_json};
use attlas_lab::decompose::{Size, decompose, error_curve, read_tensor, write_factors};
use attlas_lab::figures::{Line, lines};
use attlas_lab::table::{Table, number, seconds};
use attlas_lab::{Error, decompose as lab, output};
use std::process::ExitCode;

pub(crate) fn run(args: &DecomposeArgs, common: &Common) -> Outcome {
    let mut outputs: Vec<(&str, &std::path::Path)> = Vec::new();
    outputs.extend(args.out.as_deref().map(|path| ("--out", path)));
    outputs.extend(args.curve.as_deref().map(|path| ("--curve", path)));
    output::check(&outputs, &[&args.path])?;
    let tensor = read_tensor(&args.path, args.tensor.as_deref())?;
    let size = match (&args.rank, args.error) {
        (Some(ranks), _) => Size::Ranks(ranks.clone()),
        (None, Some(error)) => Size::Error(error),
        (None, None) => return Err(Error::argument("--rank", "ranks, or --error", "neither")),
    };
    let settings = lab::Settings {
        form: args.form,
        size,
        blocks: args.blocks,
        restarts: args.restarts,
        seed: common.seed,
    };
    let (record, factors) = decompose(&tensor, &settings)?;
    if let Some(path) = &args.out {
        write_factors(path, &factors)?;
    }
    if let Some(path) = &args.curve {
        let most = record.blocks.or(record.ranks.iter().copied().max()).unwrap_or(1);
        let points = error_curve(&tensor, &settings, most)?;
        let text = if path.extension().is_some_and(|e| e == "csv") {
            let mut table = Table::new(&["ranks", "parameters", "rel_error"]);
            for p in &points {
                let ranks: Vec<String> = p.ranks.iter().map(usize::to_string).collect();
                table.push(vec![ranks.join("x"), p.parameters.to_string(), p.rel_error.to_string()]);
            }
            table.csv()
        } else {
            // The axis is logarithmic: an error of zero is drawn at rounding.
            let at = |p: &attlas_num::tensor::curve::Point| (p.parameters as f64, p.rel_error.max(1e-16));
            let name = args.path.file_name().unwrap_or_default().to_string_lossy();
            let line = Line {
                name: format!("{:?}", record.form).to_lowercase(),
                points: points.iter().map(at).collect(),
                dashed: false,
            };
            let level = ("this decomposition", record.rel_error.max(1e-16));
            lines(&name, ["numbers stored", "relative error"], level, &[line])
        };
        output::write_figure(path, &text)?;
    }
    if common.json {
        print_json(&record);
        return Ok(ExitCode::SUCCESS);
    }
    let list = |n: &[usize]| n.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
    let mut table = Table::new(&["<what", "<value"]);
    let share = 100.0 * record.parameters as f64 / record.entries.max(1) as f64;
    let mut rows = vec![
        ("tensor", format!("{} ({} numbers)", list(&record.shape), record.entries)),
        ("form", format!("{:?}, rank {}", record.form, list(&record.ranks)).to_lowercase()),
        ("relative error", number(record.rel_error)),
        ("numbers stored", format!("{} ({share:.1} %)", record.parameters)),
        ("ended", record.status.clone()),
        ("time", seconds(record.seconds)),
    ];
    if let Some(blocks) = record.blocks {
        rows.insert(2, ("blocks", blocks.to_string()));
    }
    rows.into_iter().for_each(|(k, v)| table.push(vec![k.into(), v]));
    print(&if common.csv {
        table.csv()
    } else if common.md {
        table.markdown()
    } else {
        table.text()
    });
    if let Some(warning) = &record.warning {
        note(common, &format!("note: {warning}"));
    }
    Ok(ExitCode::SUCCESS)
}
