//! `attlas simulate`.

use crate::args::{Common, KhopArgs, MatchArgs, ParticlesArgs, SimulateArgs, Simulation};
use crate::{Outcome, note, print, print_json};
use attlas::{Mat, Options, registry};
use attlas_lab::simulate::{KHop, Matching, Model, Particles, ParticlesRun, Scheme, Score, Task};
use attlas_lab::table::{Table, count, number};
use attlas_lab::words::setting;
use attlas_lab::{Error, output};
use std::process::ExitCode;

pub(crate) fn run(args: &SimulateArgs, common: &Common) -> Outcome {
    match &args.what {
        Simulation::Particles(a) => particles(a, common),
        Simulation::Match3(a) => matching(a, common),
        Simulation::Khop(a) => khop(a, common),
    }
}

fn khop(args: &KhopArgs, common: &Common) -> Outcome {
    let mut options = Options::new();
    for text in &args.set {
        let (name, value) = setting(text, "window=64")?;
        options.set(name, value);
    }
    let task = KHop {
        n: args.n,
        k: args.k,
        vocabulary: args.vocabulary,
        count: args.count,
        method: registry::method(&args.method)?,
        options,
        seed: common.seed,
    };
    let run = task.run(common.threads)?;
    if common.json {
        print_json(&run);
        return Ok(ExitCode::SUCCESS);
    }
    let percent = |x: f64| format!("{:.1} %", 100.0 * x);
    let mut table = Table::new(&["<method", "layers", "right", "chains that long", "keys visited"]);
    table.push(vec![
        run.method.into(),
        run.layers.to_string(),
        percent(run.accuracy),
        percent(run.reached),
        percent(run.keys_visited),
    ]);
    if !common.csv {
        let tokens = count(run.answers, "token");
        print(&format!("{} hops in sequences of {}, {tokens} answered\n\n", run.k, run.n));
    }
    print(&form(&table, common));
    Ok(ExitCode::SUCCESS)
}

fn form(table: &Table, common: &Common) -> String {
    if common.csv {
        table.csv()
    } else if common.md {
        table.markdown()
    } else {
        table.text()
    }
}

fn particles(args: &ParticlesArgs, common: &Common) -> Outcome {
    if let Some(path) = &args.svg {
        output::check(&[("--svg", path)], &[])?;
    }
    let model = args.model;
    let (n, d) = match model {
        Model::Sphere => (64, 3),
        _ => (20, 2),
    };
    let mut system = Particles::new(model, args.n.unwrap_or(n), args.d.unwrap_or(d), common.seed);
    let matrices = [
        ("--query-matrix", &args.query_matrix),
        ("--key-matrix", &args.key_matrix),
        ("--value-matrix", &args.value_matrix),
    ];
    for (place, (flag, text)) in system.qkv.iter_mut().zip(matrices) {
        if let Some(text) = text {
            *place = matrix(flag, text)?;
        }
    }
    system.beta = args.beta;
    system.causal = args.causal;
    system.t_end = args.t_end.unwrap_or(system.t_end);
    system.dt = args.dt;
    system.scheme = if args.euler { Scheme::Euler } else { Scheme::Rk4 };
    let run = if args.refine { system.run_converged()? } else { system.run()? };
    if let Some(path) = &args.svg {
        output::write_figure(path, &run.svg())?;
        note(common, &format!("wrote {}", path.display()));
    }
    if common.json {
        print_json(&run);
        return Ok(ExitCode::SUCCESS);
    }
    if !common.csv {
        print(&format!("{}\n\n", headline(&run).join("\n")));
    }
    let mut table = Table::new(&["cluster", "particles", "<centre"]);
    for (c, (size, centre)) in run.cluster_sizes.iter().zip(&run.centres).enumerate() {
        let shown: Vec<String> = centre.iter().take(4).map(|x| format!("{x:.3}")).collect();
        let more = if centre.len() > 4 { ", …" } else { "" };
        table.push(vec![c.to_string(), size.to_string(), format!("({}{more})", shown.join(", "))]);
    }
    print(&form(&table, common));
    Ok(ExitCode::SUCCESS)
}

/// Reads a matrix from a file, or from its rows.
fn matrix(flag: &'static str, text: &str) -> Result<Mat<f64>, Error> {
    if text.ends_with(".npy") {
        let t = attlas_lab::decompose::read_tensor(std::path::Path::new(text), None)?;
        return match t.shape() {
            [rows, cols] => Ok(Mat::from_vec(t.data().to_vec(), *rows, *cols)),
            other => Err(Error::argument(flag, "a file that holds a matrix", format!("shape {other:?}"))),
        };
    }
    let wrong =
        || Error::argument(flag, "rows of numbers such as 1,0;0,2, or a .npy file", format!("'{text}'"));
    let rows: Vec<Vec<f64>> = text
        .split(';')
        .map(|row| row.split(',').map(|x| x.trim().parse().map_err(|_| wrong())).collect())
        .collect::<Result<_, Error>>()?;
    let cols = rows[0].len();
    if rows.iter().any(|row| row.len() != cols) {
        return Err(wrong());
    }
    Ok(Mat::from_vec(rows.concat(), rows.len(), cols))
}

fn headline(run: &ParticlesRun) -> Vec<String> {
    let last = |series: &[f64]| series.last().copied().unwrap_or(0.0);
    let mut lines = vec![
        format!("{} particles in {} dimensions, t = {:.3}", run.n, run.d, run.t),
        format!(
            "{}; attention of rank {}, at most {} from a matrix of zeros and ones",
            count(run.cluster_sizes.len(), "cluster"),
            run.rank,
            number(run.boolean_gap)
        ),
        format!("diameter {} -> {}", number(run.diameter[0]), number(last(&run.diameter))),
    ];
    if let Some(rate) = run.contraction_rate {
        lines.push(format!("the diameter falls like exp(-{} t)", number(rate)));
    }
    if let Some(hull) = &run.hull {
        let what = if run.d == 1 { "length" } else { "area" };
        lines.push(format!("{what} of the convex hull {} -> {}", number(hull[0]), number(last(hull))));
    }
    if let Some(energy) = &run.energy {
        lines.push(format!("energy {:.6} -> {:.6}", energy[0], last(energy)));
    }
    lines
}

fn matching(args: &MatchArgs, common: &Common) -> Outcome {
    let run = Matching {
        n: args.n,
        modulus: args.modulus,
        count: args.count,
        task: args.task,
        single: args.single,
        seed: common.seed,
    }
    .run(common.threads)?;
    if common.json {
        print_json(&run);
        return Ok(ExitCode::SUCCESS);
    }
    let name = match run.task {
        Task::Match2 => "match2: x_i + x_j = 0",
        Task::Match3 => "match3: x_i + x_j + x_k = 0",
    };
    if !common.csv {
        print(&format!(
            "{name} (mod {}), {} tokens a sequence, {} labels, {:.1} % with a match\n\n",
            run.modulus,
            run.n,
            run.labels,
            100.0 * run.positive
        ));
    }
    let mut table = Table::new(&["<head", "width", "right", "errors", "least yes", "most no"]);
    let mut line = |name: &str, width: &str, s: &Score| {
        let shown = |x: Option<f64>| x.map_or("-".into(), |x| format!("{x:.6}"));
        table.push(vec![
            name.into(),
            width.into(),
            format!("{:.2} %", 100.0 * s.accuracy),
            s.errors.to_string(),
            shown(s.least_yes),
            shown(s.most_no),
        ]);
    };
    line("third order", "5", &run.third_order);
    line("pairwise", "3", &run.pairwise);
    table.push(vec![
        "majority".into(),
        "-".into(),
        format!("{:.2} %", 100.0 * run.majority),
        "-".into(),
        "-".into(),
        "-".into(),
    ]);
    print(&form(&table, common));
    note(common, "\nweights are written by hand: this shows what a head can represent, not what it learns");
    Ok(ExitCode::SUCCESS)
}
