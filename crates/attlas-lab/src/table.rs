//! Tables for people, in three forms, and numbers short enough to read.

use crate::bench::Bench;
use crate::budget::Budget;
use crate::compare::{Comparison, Matching, Summary};

/// A table of words.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Column titles; a title that begins with `<` (not shown) is set flush left.
    headers: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table. A title that begins with `<` makes its column flush left.
    pub fn new(headers: &[&'static str]) -> Self {
        Self { headers: headers.to_vec(), rows: Vec::new() }
    }

    /// Adds a row; missing cells are empty.
    pub fn push(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }

    /// No row was added.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    fn titles(&self) -> impl Iterator<Item = &'static str> {
        self.headers.iter().map(|h| h.trim_start_matches('<'))
    }

    fn cell<'a>(&'a self, row: &'a [String], column: usize) -> &'a str {
        row.get(column).map_or("", String::as_str)
    }

    /// Columns padded with spaces, one space between them.
    pub fn text(&self) -> String {
        let widths: Vec<usize> = self
            .titles()
            .enumerate()
            .map(|(c, title)| {
                let cells = self.rows.iter().map(|r| self.cell(r, c).chars().count());
                cells.chain([title.chars().count()]).max().unwrap_or(0)
            })
            .collect();
        let line = |cells: Vec<&str>| {
            let mut out = String::new();
            for (c, cell) in cells.into_iter().enumerate() {
                let pad = " ".repeat(widths[c] - cell.chars().count());
                if c > 0 {
                    out.push(' ');
                }
                if self.headers[c].starts_with('<') {
                    out += &(cell.to_string() + &pad)
                } else {
                    out += &(pad + cell)
                }
            }
            out.trim_end().to_string() + "\n"
        };
        let mut out = line(self.titles().collect());
        for row in &self.rows {
            out += &line((0..self.headers.len()).map(|c| self.cell(row, c)).collect());
        }
        out
    }

    /// A Markdown table.
    pub fn markdown(&self) -> String {
        let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
        let mut out = line(self.titles().map(String::from).collect());
        out += &line(
            self.headers.iter().map(|h| if h.starts_with('<') { "---" } else { "---:" }.into()).collect(),
        );
        for row in &self.rows {
            let escape = |c: usize| self.cell(row, c).replace('|', "\\|").replace('\n', " ");
            out += &line((0..self.headers.len()).map(escape).collect());
        }
        out
    }

    /// Comma-separated values as in RFC 4180.
    pub fn csv(&self) -> String {
        let mut lines = vec![self.titles().map(String::from).collect::<Vec<String>>()];
        let row = |row: &Vec<String>| (0..self.headers.len()).map(|c| self.cell(row, c).into()).collect();
        lines.extend(self.rows.iter().map(row));
        csv_lines(&lines)
    }
}

/// Lines of comma-separated values as in RFC 4180.
pub fn csv_lines(lines: &[Vec<String>]) -> String {
    let quote = |cell: &String| {
        if cell.contains([',', '"', '\n']) {
            format!("\"{}\"", cell.replace('"', "\"\""))
        } else {
            cell.clone()
        }
    };
    lines.iter().map(|line| line.iter().map(quote).collect::<Vec<String>>().join(",") + "\n").collect()
}

/// Three significant digits; `-` for what is no number.
pub fn number(x: f64) -> String {
    match x.abs() {
        a if !a.is_finite() => "-".into(),
        0.0 => "0".into(),
        a if !(0.001..1e6).contains(&a) => format!("{x:.1e}"),
        a if a < 9.995 => {
            let decimals = (2 - a.log10().floor() as i32).max(0) as usize;
            format!("{x:.decimals$}")
        }
        a if a < 99.95 => format!("{x:.1}"),
        _ => format!("{x:.0}"),
    }
}

/// Seconds with a unit: `12.3ms`.
pub fn seconds(x: f64) -> String {
    let three = |x: f64| match x {
        x if x < 9.995 => format!("{x:.2}"),
        x if x < 99.95 => format!("{x:.1}"),
        x => format!("{x:.0}"),
    };
    match x {
        x if !x.is_finite() => "-".into(),
        0.0 => "0".into(),
        x if x < 0.9995e-6 => format!("{}ns", three(x * 1e9)),
        x if x < 0.9995e-3 => format!("{}µs", three(x * 1e6)),
        x if x < 0.9995 => format!("{}ms", three(x * 1e3)),
        x => format!("{}s", three(x)),
    }
}

/// Bytes with a binary unit: `1.5M`.
pub fn bytes(x: usize) -> String {
    let x = x as f64;
    let (value, unit) = match x {
        x if x < 1024.0 => return format!("{x}B"),
        x if x < 1024.0 * 1024.0 => (x / 1024.0, "K"),
        x if x < 1024.0 * 1024.0 * 1024.0 => (x / 1024.0 / 1024.0, "M"),
        x => (x / 1024.0 / 1024.0 / 1024.0, "G"),
    };
    if value < 9.95 { format!("{value:.1}{unit}") } else { format!("{value:.0}{unit}") }
}

/// A share in percent.
pub fn percent(x: f64) -> String {
    match x {
        x if !x.is_finite() => "-".into(),
        0.0 => "0%".into(),
        x if x < 0.095 => format!("{:.1}%", 100.0 * x),
        x => format!("{:.0}%", 100.0 * x),
    }
}

/// A share in percent for a sentence: `24 %`, `0.4 %`.
pub fn percent_of(x: f64) -> String {
    match 100.0 * x {
        p if !p.is_finite() => "-".into(),
        p if p >= 9.95 => format!("{p:.0} %"),
        p if p < 0.095 && p > 0.0 => format!("{p:.0e} %"),
        p => format!("{} %", (10.0 * p).round() / 10.0),
    }
}

/// A number of things: `1 head`, `3 heads`.
pub fn count(n: usize, thing: &str) -> String {
    format!("{n} {thing}{}", if n == 1 { "" } else { "s" })
}

/// A sentence broken into lines of 80 characters at most, further ones indented.
pub fn wrap(text: &str) -> String {
    let mut out = String::new();
    let mut width = 0;
    for word in text.split_whitespace() {
        let len = word.chars().count();
        if width > 0 && width + 1 + len > 79 {
            out += "\n  ";
            width = 2;
        } else if width > 0 {
            out.push(' ');
            width += 1;
        }
        out += word;
        width += len;
    }
    out
}

/// How many times faster: `12.3x`.
pub fn times(x: f64) -> String {
    match x {
        x if !x.is_finite() => "-".into(),
        x if x >= 999.5 => format!("{x:.0e}x"),
        x if x >= 9.95 => format!("{x:.0}x"),
        x if x < 0.0995 => format!("{x:.3}x"),
        x => format!("{x:.2}x"),
    }
}

/// A number as it stands in a CSV file: all its digits, empty where there is none.
pub fn raw(x: f64) -> String {
    if x.is_finite() { x.to_string() } else { String::new() }
}

impl Matching {
    /// One line for each method.
    pub fn table(&self) -> Table {
        let mut table = Table::new(&["<method", "<set", "spends", "<within"]);
        for m in &self.methods {
            let spent = |x: f64| match self.budget {
                Budget::Keys(_) => number(x),
                Budget::Time(_) => percent(x),
                Budget::Memory(_) => bytes(x as usize),
            };
            let mut set: Vec<String> =
                m.value.iter().flat_map(|v| m.params.iter().map(move |name| format!("{name}={v}"))).collect();
            set.extend(m.switch.map(|(name, length)| format!("{name}={length}")));
            table.push(vec![
                m.method.into(),
                if set.is_empty() { "defaults".into() } else { set.join(" ") },
                m.measured.or(m.spent).map_or("-".into(), spent),
                match (m.within, m.measured.or(m.spent)) {
                    (true, _) => "yes".into(),
                    (false, None) => "unknown".into(),
                    (false, Some(_)) => "cannot match".into(),
                },
            ]);
        }
        table
    }

    /// The methods that are over the budget, each with the reason; none where all are within.
    pub fn unmatched(&self) -> Option<String> {
        let over = self.methods.iter().filter(|m| self.is_over(m.method));
        let named: Vec<String> = over
            .map(|m| format!("{} ({})", m.method, m.reason.as_deref().unwrap_or("more than the budget")))
            .collect();
        (!named.is_empty()).then(|| format!("Cannot match: {}.", named.join(", ")))
    }
}

impl Comparison {
    /// Whether any method has a bound from fewer rows than there are.
    pub fn has_bounds(&self) -> bool {
        self.rows.iter().any(|r| r.certified.bound.is_some() && r.certified.confidence < 1.0)
    }

    /// One line for each method, smallest error first; methods that computed exact attention, or that refuse some of the
    /// heads, are not ranked and come last. Bounds stand in it where there are any.
    pub fn table(&self) -> Table {
        let many = self.exact.heads.len() > 1;
        let spread = if many { "worst" } else { "+-" };
        let mut titles = vec!["<method", "error", spread];
        titles.extend(self.has_bounds().then_some("sure"));
        titles.extend(["set-up", "run", "faster", "memory", "keys", "<status"]);
        let mut table = Table::new(&titles);
        let mut lines: Vec<&Summary> = self.summary.iter().collect();
        let part = |s: &Summary| s.heads < self.exact.heads.len();
        let over = |s: &Summary| self.matched.as_ref().is_some_and(|m| m.is_over(s.method));
        let unranked = |s: &Summary| !self.ranks(s);
        lines.sort_by(|a, b| unranked(a).cmp(&unranked(b)).then(a.rel_fro.mean.total_cmp(&b.rel_fro.mean)));
        for s in lines {
            let gap = if many { s.rel_fro.hi } else { s.rel_fro.hi - s.rel_fro.mean };
            let mut row = vec![s.method.into(), number(s.rel_fro.mean), number(gap)];
            row.extend(self.has_bounds().then(|| s.certified.map_or("-".into(), number)));
            row.extend([
                seconds(s.setup_seconds),
                seconds(s.run_seconds),
                times(s.speedup),
                bytes(s.peak_bytes),
                if s.keys_share == 0.0 { "-".into() } else { percent(s.keys_share) },
                match s.status {
                    _ if part(s) => count(s.heads, "head"),
                    _ if over(s) => "over".into(),
                    "complete" if s.front => "front".into(),
                    "complete" => "".into(),
                    "stopped_early" => "early".into(),
                    "not_finite" => "NaN".into(),
                    other => other.into(),
                },
            ]);
            table.push(row);
        }
        table
    }

    /// One line for each method and head, smallest error first within a head. A head of a layer reads `layer/head`.
    pub fn head_table(&self) -> Table {
        let mut titles = vec!["head", "<method", "error", "lo", "hi"];
        titles.extend(self.has_bounds().then_some("sure"));
        titles.extend(["run", "faster", "keys", "<status"]);
        let mut table = Table::new(&titles);
        let mut lines: Vec<_> = self.rows.iter().collect();
        lines.sort_by(|a, b| {
            (a.layer, a.head).cmp(&(b.layer, b.head)).then(a.rel_fro.mean.total_cmp(&b.rel_fro.mean))
        });
        for r in lines {
            let mut row = vec![
                r.layer.map_or(r.head.to_string(), |l| format!("{l}/{}", r.head)),
                r.method.into(),
                number(r.rel_fro.mean),
                number(r.rel_fro.lo),
                number(r.rel_fro.hi),
            ];
            row.extend(self.has_bounds().then(|| r.certified.bound.map_or("-".into(), number)));
            row.extend([
                seconds(r.run_seconds),
                times(r.speedup),
                percent(r.keys_share),
                if r.status == "complete" { String::new() } else { r.status.into() },
            ]);
            table.push(row);
        }
        table
    }

    /// What the methods with feature maps or sketches predict of themselves, the worst head of each: the relative
    /// standard deviation of an entry of their kernel, the features there are and those that their `target_error` would
    /// take (kept keys, where keys are what is kept), and the bytes that decoding holds for each key head. Empty where no method was one.
    pub fn feature_table(&self) -> Table {
        let mut table = Table::new(&["<method", "features", "entry sd", "needed", "for sd", "decode"]);
        for s in &self.summary {
            let rows = || self.rows.iter().filter(|r| r.method == s.method);
            let worst = |name: &str| {
                rows()
                    .filter_map(|r| r.figures.get(name))
                    .copied()
                    .fold(None, |m: Option<f64>, x| Some(m.map_or(x, |m| m.max(x))))
            };
            let Some(needed) = worst("features_needed").or(worst("keys_needed")) else { continue };
            let rank = rows().filter_map(|r| r.rank).max();
            let target = rows().find_map(|r| r.params.get("target_error")?.as_f64());
            table.push(vec![
                s.method.into(),
                worst("features").or(rank.map(|m| m as f64)).map_or("-".into(), number),
                worst("predicted_rel_sd").map_or("-".into(), number),
                number(needed),
                target.map_or("-".into(), number),
                worst("decode_bytes").map_or("-".into(), |b| bytes(b as usize)),
            ]);
        }
        table
    }

    /// Every row with all digits, for other programs.
    pub fn csv_table(&self) -> Table {
        let mut table = Table::new(&[
            "method",
            "family",
            "params",
            "layer",
            "head",
            "seeds",
            "rel_fro",
            "rel_fro_lo",
            "rel_fro_hi",
            "rel_spectral",
            "max_abs",
            "cosine",
            "rel_l1",
            "certified",
            "confidence",
            "setup_seconds",
            "run_seconds",
            "speedup",
            "peak_bytes",
            "scratch_bytes",
            "keys_visited",
            "keys_share",
            "predicted_rel_sd",
            "features_needed",
            "decode_bytes",
            "status",
        ]);
        for r in &self.rows {
            let figure = |name: &str| r.figures.get(name).map_or(String::new(), |&x| raw(x));
            table.push(vec![
                r.method.into(),
                r.family.into(),
                params_text(&r.params),
                r.layer.map_or(String::new(), |l| l.to_string()),
                r.head.to_string(),
                r.seeds.to_string(),
                raw(r.rel_fro.mean),
                raw(r.rel_fro.lo),
                raw(r.rel_fro.hi),
                raw(r.errors.rel_spectral),
                raw(r.errors.max_abs),
                raw(r.errors.cosine),
                raw(r.errors.rel_l1),
                r.certified.bound.map_or(String::new(), raw),
                raw(r.certified.confidence),
                raw(r.setup_seconds),
                raw(r.run_seconds),
                raw(r.speedup),
                r.peak_bytes.to_string(),
                r.scratch_bytes.to_string(),
                r.keys_visited.to_string(),
                raw(r.keys_share),
                figure("predicted_rel_sd"),
                figure("features_needed"),
                figure("decode_bytes"),
                r.status.into(),
            ]);
        }
        table
    }
}

impl Bench {
    /// One line for each method, width and length.
    pub fn table(&self) -> Table {
        let peers = self.rows.iter().any(|r| !r.peers.is_empty());
        let mut headers =
            vec!["<method", "n", "d", "set-up", "run", "+-", "share", "faster", "scratch", "memory"];
        if peers {
            headers.push("vs peer");
        }
        let mut table = Table::new(&headers);
        for r in &self.rows {
            let run = r.run_seconds;
            let flop = r.flop_share.unwrap_or(0.0);
            let share = if flop >= r.read_share { percent(flop) + "F" } else { percent(r.read_share) + "B" };
            let mut row = vec![
                r.method.into(),
                r.n.to_string(),
                r.d.to_string(),
                seconds(r.setup_seconds.median),
                seconds(run.median),
                percent((run.max - run.min) / 2.0 / run.median),
                share,
                match r.status {
                    "exact" => "exact".into(),
                    _ => r.speedup.map_or("-".into(), times),
                },
                bytes(r.scratch_bytes),
                bytes(r.peak_bytes),
            ];
            row.extend(r.peers.first().map(|p| times(p.ratio)));
            table.push(row);
        }
        table
    }

    /// Every row with all digits, for other programs.
    pub fn csv_table(&self) -> Table {
        let mut table = Table::new(&[
            "method",
            "family",
            "params",
            "n",
            "d",
            "heads",
            "kv_heads",
            "mask",
            "mode",
            "threads",
            "setup_seconds",
            "run_seconds",
            "run_min",
            "run_max",
            "runs",
            "exact_seconds",
            "speedup",
            "flops",
            "gflops",
            "flop_share",
            "bytes",
            "read_share",
            "scratch_bytes",
            "peak_bytes",
            "fma_gflops",
            "read_gbs",
            "scattered_gbs",
            "copy_gbs",
        ]);
        let optional = |x: Option<f64>| x.map_or(String::new(), raw);
        for r in &self.rows {
            table.push(vec![
                r.method.into(),
                r.family.into(),
                params_text(&r.params),
                r.n.to_string(),
                r.d.to_string(),
                self.heads.to_string(),
                self.kv_heads.to_string(),
                self.mask.to_string(),
                r.mode.into(),
                self.machine.threads.to_string(),
                raw(r.setup_seconds.median),
                raw(r.run_seconds.median),
                raw(r.run_seconds.min),
                raw(r.run_seconds.max),
                r.run_seconds.runs.to_string(),
                optional(r.exact_seconds),
                optional(r.speedup),
                r.flops.map_or(String::new(), |f| f.to_string()),
                optional(r.gflops),
                optional(r.flop_share),
                r.bytes.to_string(),
                raw(r.read_share),
                r.scratch_bytes.to_string(),
                r.peak_bytes.to_string(),
                optional(self.machine.fma_gflops),
                raw(self.machine.read_gbs),
                raw(self.machine.scattered_gbs),
                raw(self.machine.copy_gbs),
            ]);
        }
        table
    }
}

/// Parameters as one cell: `name=value;name=value`.
fn params_text(params: &serde_json::Map<String, serde_json::Value>) -> String {
    let pairs: Vec<String> =
        params.iter().map(|(k, v)| format!("{k}={}", v.to_string().trim_matches('"'))).collect();
    pairs.join(";")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_three_digits() {
        for (x, text) in [
            (0.0, "0"),
            (0.12345, "0.123"),
            (1.0, "1.00"),
            (9.999, "10.0"),
            (12.34, "12.3"),
            (123.4, "123"),
            (0.00123, "0.00123"),
            (1.2e-7, "1.2e-7"),
            (f64::NAN, "-"),
        ] {
            assert_eq!(number(x), text);
        }
        for (x, text) in
            [(1.5e-8, "15.0ns"), (2e-5, "20.0µs"), (0.0123, "12.3ms"), (0.9996, "1.00s"), (123.4, "123s")]
        {
            assert_eq!(seconds(x), text);
        }
        assert_eq!((bytes(100), bytes(1536), bytes(20 << 20)), ("100B".into(), "1.5K".into(), "20M".into()));
        assert_eq!(
            (percent(0.034), percent(0.5), percent(1.0)),
            ("3.4%".into(), "50%".into(), "100%".into())
        );
        assert_eq!((times(0.05), times(1.234), times(45.6)), ("0.050x".into(), "1.23x".into(), "46x".into()));
    }

    #[test]
    fn one_table_has_three_forms() {
        let mut t = Table::new(&["<name", "x"]);
        t.push(vec!["a,b".into(), "1".into()]);
        t.push(vec!["long \"name\"".into()]);
        assert_eq!(t.text(), "name        x\na,b         1\nlong \"name\"\n");
        assert_eq!(t.csv(), "name,x\n\"a,b\",1\n\"long \"\"name\"\"\",\n");
        assert_eq!(t.markdown(), "| name | x |\n| --- | ---: |\n| a,b | 1 |\n| long \"name\" |  |\n");
    }
}
