//! The tables and the figure of docs/latent.md: the loss of converting SmolLM2 to latent attention.
//!
//! ```text
//! scripts/fetch-models --lee
//! cargo run --release -p xtask --example latent_tables -- \
//!     .models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf .models/lee/lee_background.cor [stages|ranks|sweep] [figure.svg]
//! ```
//!
//! `latent_tables draw lines.txt figure.svg` redraws the figure from the standard error of a sweep.
//!
//! Calibration on tokens 0 to 8191 as sequences of 256, once; perplexity in windows of 512 without overlap. Known
//! perplexities are printed beside the measured ones; a difference of more than 1 % is a failure.

use attlas::conversions::mla::{Calibration, Metric, Params, Rotate, Stage};
use attlas::{Schedule, Workspace};
use attlas_lab::figures::{Line, lines};
use attlas_lab::self_check::SelfCheck;
use attlas_lab::table::Table;
use attlas_lab::text::{Text, open_model};
use attlas_model::Model;
use attlas_model::convert::{Latents, calibrate, convert};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

static NEVER_STOP: AtomicBool = AtomicBool::new(false);

struct Run {
    model: Arc<Model>,
    tokens: Vec<u32>,
    threads: Workspace,
    first: Vec<Calibration>,
    /// Largest relative distance from a known perplexity.
    worst: f64,
}

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [word, kept, figure] = &args[..]
        && word == "draw"
    {
        return Sweep::read(Path::new(kept))?.show(Some(Path::new(figure)));
    }
    let [path, text, rest @ ..] = &args[..] else { return Err("a model and a text are missing".into()) };
    let part = rest.first().map_or("all", String::as_str);
    let model = open_model(Path::new(path))?;
    let tokens = Text::read(Path::new(text), &model, None)?.tokens;
    let threads = Workspace::new(Schedule::default())?;
    let mut run = Run { model, tokens, threads, first: Vec::new(), worst: 0.0 };
    run.first = run.moments(&run.model)?;
    if matches!(part, "all" | "stages") {
        run.stages()?;
    }
    if matches!(part, "all" | "ranks") {
        run.ranks()?;
    }
    if matches!(part, "all" | "sweep") {
        run.sweep(rest.get(1).map(Path::new))?;
    }
    eprintln!("largest distance from a known perplexity: {:.2} %", 100.0 * run.worst);
    if run.worst > 0.01 { Err("a perplexity is off by more than 1 %".into()) } else { Ok(()) }
}

fn params(rotate: Rotate, rope_dim: usize, fold: usize) -> Params {
    Params { rotate, rope_dim: Some(rope_dim), fold: Some(fold), ..Params::default() }
}

impl Run {
    fn perplexity(&self, model: &Arc<Model>, range: std::ops::Range<usize>) -> Outcome<f64> {
        let read =
            SelfCheck::new(model, &self.tokens[range], 512, &self.threads, &mut |_, _| {}, &NEVER_STOP)?;
        Ok(read.perplexity().0)
    }

    /// Collects moments of the model's layers on the hidden states of this one.
    fn moments(&self, hidden_of: &Arc<Model>) -> Outcome<Vec<Calibration>> {
        let (tokens, never) = (&self.tokens[..8192], &NEVER_STOP);
        Ok(calibrate(&self.model, hidden_of, tokens, 256, true, &self.threads, &mut |_, _| {}, never)?)
    }

    fn convert(&self, params: &Params, stage: Stage, again: Option<&[Calibration]>) -> Outcome<Latents> {
        Ok(self.threads.install(|_| convert(&self.model, params, stage, &self.first, again, false))?)
    }

    /// Returns the perplexity at a stage, and the mean share of the keys' energy that is still rotated.
    fn at(&self, params: &Params, stage: Stage, range: std::ops::Range<usize>) -> Outcome<(f64, f64)> {
        let latents = self.convert(params, stage, None)?;
        let energy =
            latents.figures.iter().map(|f| f.kept_energy).sum::<f64>() / latents.figures.len() as f64;
        Ok((self.perplexity(&Arc::new(latents.model), range)?, energy))
    }

    /// Formats a known and a measured perplexity as cells.
    fn compare(&mut self, known: f64, found: f64) -> [String; 3] {
        let off = found / known - 1.0;
        self.worst = self.worst.max(off.abs());
        eprintln!("known {known}, found {found:.3}");
        [format!("{known}"), format!("{found:.3}"), format!("{:+.2} %", 100.0 * off)]
    }

    fn stages(&mut self) -> Outcome<()> {
        let range = 40_000..42_048;
        let mut table =
            Table::new(&["<stage", "energy, known", "energy", "perplexity, known", "perplexity", "off"]);
        let found = self.perplexity(&self.model, range.clone())?;
        let [a, b, c] = self.compare(25.147, found);
        table.push(vec!["original, cache 384".into(), String::new(), String::new(), a, b, c]);
        let (real, complex) = (Rotate::Real, Rotate::Complex);
        for (name, rotate, rope_dim, fold, energy, known) in [
            ("key head 0 as it is", Rotate::None, 64, 1, None, 118.86),
            ("real", real, 64, 1, Some(0.761), 30.83),
            ("real", real, 64, 2, Some(0.864), 27.70),
            ("real", real, 64, 4, Some(0.891), 28.92),
            ("real", real, 64, 8, Some(0.911), 62.00),
            ("complex", complex, 64, 1, Some(0.865), 27.57),
            ("complex", complex, 64, 2, Some(0.891), 26.86),
            ("complex", complex, 64, 4, Some(0.912), 36.20),
            ("real", real, 32, 2, Some(0.657), 37.69),
            ("real", real, 32, 4, Some(0.818), 31.78),
            ("complex", complex, 32, 2, Some(0.818), 28.88),
            ("complex", complex, 32, 4, Some(0.849), 36.36),
        ] {
            let (found, kept) =
                self.at(&params(rotate, rope_dim, fold), Stage::PartialRope, range.clone())?;
            let [a, b, c] = self.compare(known, found);
            let name = format!("{name}, {rope_dim} rotated, fold {fold}");
            let energy = energy.map_or(String::new(), |e: f64| format!("{e}"));
            table.push(vec![name, energy, format!("{kept:.3}"), a, b, c]);
        }
        let (found, _) = self.at(&params(complex, 64, 2), Stage::Balanced, range)?;
        let [a, b, c] = self.compare(26.856, found);
        table.push(vec![
            "complex, 64 rotated, fold 2, at full rank 320".into(),
            String::new(),
            String::new(),
            a,
            b,
            c,
        ]);
        println!("{}", table.markdown());
        Ok(())
    }

    fn ranks(&mut self) -> Outcome<()> {
        let range = 50_000..58_192;
        let mut table =
            Table::new(&["<partial rotation, 64 rotated", "perplexity, known", "perplexity", "off"]);
        let found = self.perplexity(&self.model, range.clone())?;
        let [a, b, c] = self.compare(27.22, found);
        table.push(vec!["original".into(), a, b, c]);
        for (name, rotate, known) in [
            ("real", Rotate::Real, [32.91, 30.10, 32.05]),
            ("complex", Rotate::Complex, [30.02, 29.19, 40.77]),
        ] {
            for (fold, known) in [1, 2, 4].into_iter().zip(known) {
                let (found, _) = self.at(&params(rotate, 64, fold), Stage::PartialRope, range.clone())?;
                let [a, b, c] = self.compare(known, found);
                table.push(vec![format!("{name}, fold {fold}"), a, b, c]);
            }
        }
        println!("{}", table.markdown());
        let mut table =
            Table::new(&["<basis and metric", "rank", "<balance", "perplexity, known", "perplexity", "off"]);
        for (name, rotate, pca, known) in [
            (
                "real, activation (published)",
                Rotate::Real,
                Metric::Activation,
                [[38.83, 36.24, 34.04], [59.71, 47.61, 47.34]],
            ),
            (
                "complex, activation",
                Rotate::Complex,
                Metric::Activation,
                [[38.19, 34.46, 33.31], [56.83, 47.47, 44.10]],
            ),
            (
                "real, functional",
                Rotate::Real,
                Metric::Functional,
                [[33.46, 32.10, 31.77], [43.63, 39.99, 40.14]],
            ),
            (
                "complex, functional (ours)",
                Rotate::Complex,
                Metric::Functional,
                [[32.15, 30.90, 30.61], [44.18, 38.45, 38.14]],
            ),
        ] {
            for (rank, known) in [192, 128].into_iter().zip(known) {
                for (balance, known) in [2.0, 1.0, 0.5].into_iter().zip(known) {
                    let p = Params { pca, balance, rank: Some(rank), ..params(rotate, 64, 2) };
                    let (found, _) = self.at(&p, Stage::LowRank, range.clone())?;
                    let [a, b, c] = self.compare(known, found);
                    table.push(vec![name.into(), rank.to_string(), format!("{balance}"), a, b, c]);
                }
            }
        }
        let published = Params { pca: Metric::Activation, ..params(Rotate::Real, 64, 2) };
        let partial = self.convert(&published, Stage::PartialRope, None)?.model;
        let again = self.moments(&Arc::new(partial))?;
        for (rank, known) in [(192, 36.09), (128, 46.45)] {
            let p = Params { rank: Some(rank), ..published.clone() };
            let model = Arc::new(self.convert(&p, Stage::LowRank, Some(&again))?.model);
            let found = self.perplexity(&model, range.clone())?;
            let [a, b, c] = self.compare(known, found);
            table.push(vec!["published, calibrated twice".into(), rank.to_string(), "1".into(), a, b, c]);
        }
        println!("{}", table.markdown());
        Ok(())
    }

    /// Measures perplexity over the kept rank for every rotary width, with both recipes.
    fn sweep(&mut self, figure: Option<&Path>) -> Outcome<()> {
        let range = 60_000..62_048;
        let mut found = Sweep { before: self.perplexity(&self.model, range.clone())?, points: Vec::new() };
        eprintln!("original: {:.3}", found.before);
        let recipes =
            [("ours", Rotate::Complex, Metric::Functional), ("published", Rotate::Real, Metric::Activation)];
        for (rope_dim, fold) in [(64, 2), (32, 2), (16, 4)] {
            for (name, rotate, pca) in recipes {
                for rank in [64, 128, 192, 256, 384 - rope_dim] {
                    let p = Params { pca, rank: Some(rank), ..params(rotate, rope_dim, fold) };
                    let (ppl, _) = self.at(&p, Stage::LowRank, range.clone())?;
                    eprintln!("{name}, {rope_dim} rotated, rank {rank}: {ppl:.3}");
                    found.points.push((name.to_owned(), rope_dim, rank, ppl));
                }
            }
        }
        found.show(figure)
    }
}

/// Perplexities over ranks.
struct Sweep {
    before: f64,
    /// Recipe, rotated width, rank, perplexity.
    points: Vec<(String, usize, usize, f64)>,
}

impl Sweep {
    /// Reads the lines of a sweep's standard error.
    fn read(path: &Path) -> Outcome<Self> {
        let mut sweep = Self { before: f64::NAN, points: Vec::new() };
        for line in std::fs::read_to_string(path)?.lines() {
            let Some((what, ppl)) = line.split_once(": ") else { continue };
            let Ok(ppl) = ppl.parse() else { continue };
            let parts: Vec<&str> = what.split(", ").collect();
            match parts[..] {
                ["original"] => sweep.before = ppl,
                [name, rotated, rank] => {
                    let number = |text: &str| text.split(' ').find_map(|word| word.parse::<usize>().ok());
                    let (Some(rotated), Some(rank)) = (number(rotated), number(rank)) else { continue };
                    sweep.points.push((name.to_owned(), rotated, rank, ppl));
                }
                _ => {}
            }
        }
        Ok(sweep)
    }

    /// Prints a table with one line per recipe and width, and draws it.
    fn show(&self, figure: Option<&Path>) -> Outcome<()> {
        let mut table = Table::new(&["<recipe", "rotated", "rank 64", "128", "192", "256", "all"]);
        let mut drawn: Vec<Line> = Vec::new();
        for points in self.points.chunk_by(|a, b| (&a.0, a.1) == (&b.0, b.1)) {
            let (name, rotated) = (&points[0].0, points[0].1);
            let mut row = vec![name.clone(), rotated.to_string()];
            row.extend(points.iter().map(|p| format!("{:.2}", p.3)));
            table.push(row);
            drawn.push(Line {
                name: format!("{name}, {rotated} rotated"),
                points: points.iter().map(|p| ((p.2 + p.1) as f64, p.3)).collect(),
                dashed: name == "published",
            });
        }
        println!("before: {:.2}\n\n{}", self.before, table.markdown());
        if let Some(path) = figure {
            let title = "SmolLM2-135M as latent attention, no training";
            let axes = ["numbers cached a token and layer (384 before)", "perplexity"];
            std::fs::write(path, lines(title, axes, ("before", self.before), &drawn))?;
        }
        Ok(())
    }
}
