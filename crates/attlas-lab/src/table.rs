//! Text tables in three formats, and short readable numbers.
//!
//! A [`Serialize`] record describes its columns once ([`Column`]); its table, its CSV file and its objects in a page
//! are made from that description. As JSON it is serialised directly.

use serde::Serialize;
use serde_json::Value;

/// A table of text cells.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Column titles; a title that begins with `<` (not shown) is set flush left.
    headers: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates an empty table. A title that begins with `<` makes its column flush left.
    pub fn new(headers: &[&'static str]) -> Self {
        Self { headers: headers.to_vec(), rows: Vec::new() }
    }

    /// Adds a row; missing cells are empty.
    pub fn push(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }

    /// Returns true if the table has no row.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    fn titles(&self) -> impl Iterator<Item = &'static str> {
        self.headers.iter().map(|h| h.trim_start_matches('<'))
    }

    fn cell<'a>(&'a self, row: &'a [String], column: usize) -> &'a str {
        row.get(column).map_or("", String::as_str)
    }

    /// Formats the columns padded with spaces, one space between them.
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

    /// Formats a Markdown table.
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

    /// Formats comma-separated values as in RFC 4180.
    pub fn csv(&self) -> String {
        let mut lines = vec![self.titles().map(String::from).collect::<Vec<String>>()];
        let row = |row: &Vec<String>| (0..self.headers.len()).map(|c| self.cell(row, c).into()).collect();
        lines.extend(self.rows.iter().map(row));
        csv_lines(&lines)
    }
}

/// Formats lines of comma-separated values as in RFC 4180.
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

/// Formats three significant digits; `-` for NaN and infinities.
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

/// Formats seconds with a unit: `12.3ms`.
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

/// Formats bytes with a binary unit: `1.5M`.
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

/// Formats a share in percent.
pub fn percent(x: f64) -> String {
    match x {
        x if !x.is_finite() => "-".into(),
        0.0 => "0%".into(),
        x if x < 0.095 => format!("{:.1}%", 100.0 * x),
        x => format!("{:.0}%", 100.0 * x),
    }
}

/// Formats a share in percent for a sentence: `24 %`, `0.4 %`.
pub fn percent_of(x: f64) -> String {
    match 100.0 * x {
        p if !p.is_finite() => "-".into(),
        p if p >= 9.95 => format!("{p:.0} %"),
        p if p < 0.095 && p > 0.0 => format!("{p:.0e} %"),
        p => format!("{} %", (10.0 * p).round() / 10.0),
    }
}

/// Formats a number of things: `1 head`, `3 heads`.
pub fn count(n: usize, thing: &str) -> String {
    format!("{n} {thing}{}", if n == 1 { "" } else { "s" })
}

/// Wraps a sentence to lines of at most 80 characters; continuation lines are indented.
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

/// Formats a speed-up: `12.3x`.
pub fn times(x: f64) -> String {
    match x {
        x if !x.is_finite() => "-".into(),
        x if x >= 999.5 => format!("{x:.0e}x"),
        x if x >= 9.95 => format!("{x:.0}x"),
        x if x < 0.0995 => format!("{x:.3}x"),
        x => format!("{x:.2}x"),
    }
}

/// One column of a record: the place of its value in the record's JSON, its name in files, and its title and format in
/// tables. A column without a title is only in files, one without a name only in tables.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    title: &'static str,
    name: &'static str,
    at: &'static str,
    shown: Shown,
}

/// Format of a value in tables; files have all its digits.
#[derive(Clone, Copy, Debug)]
pub enum Shown {
    /// Unchanged.
    Text,
    /// [`number`].
    Number,
    /// [`seconds`].
    Seconds,
    /// [`bytes`].
    Bytes,
    /// [`percent`].
    Percent,
    /// [`times`].
    Times,
    /// Computed from the value.
    Made(fn(&Value) -> String),
}

impl Shown {
    fn cell(self, value: &Value) -> String {
        let x = value.as_f64().unwrap_or(f64::NAN);
        match self {
            Shown::Text if value.is_null() => "-".into(),
            Shown::Text => raw(value),
            Shown::Number => number(x),
            Shown::Seconds => seconds(x),
            Shown::Bytes if value.is_null() => "-".into(),
            Shown::Bytes => bytes(x as usize),
            Shown::Percent => percent(x),
            Shown::Times => times(x),
            Shown::Made(make) => make(value),
        }
    }
}

impl Column {
    /// Creates a column only for files: a name, and the JSON pointer of the value.
    pub const fn file(name: &'static str, at: &'static str) -> Self {
        Self { title: "", name, at, shown: Shown::Text }
    }

    /// Creates a column only for tables.
    pub const fn table(title: &'static str, at: &'static str, shown: Shown) -> Self {
        Self { title, name: "", at, shown }
    }

    /// Creates a column for files and tables.
    pub const fn both(title: &'static str, name: &'static str, at: &'static str, shown: Shown) -> Self {
        Self { title, name, at, shown }
    }

    fn value<'v>(&self, record: &'v Value) -> &'v Value {
        record.pointer(self.at).unwrap_or(&Value::Null)
    }
}

fn json<R: Serialize>(record: R) -> Value {
    serde_json::to_value(record).unwrap_or_default()
}

/// Returns records as objects with the columns' names, for a page.
pub fn objects_of<R: Serialize>(records: impl IntoIterator<Item = R>, columns: &[Column]) -> Vec<Value> {
    let named = |record: &Value| {
        let columns = columns.iter().filter(|c| !c.name.is_empty());
        columns.map(|c| (c.name.to_string(), c.value(record).clone())).collect()
    };
    records.into_iter().map(|r| Value::Object(named(&json(r)))).collect()
}

impl Table {
    /// Builds the text table of records.
    pub fn of<R: Serialize>(records: impl IntoIterator<Item = R>, columns: &[Column]) -> Self {
        Self::from_columns(records, columns, |c| c.title, |c, v| c.shown.cell(v))
    }

    /// Builds the CSV table of records.
    pub fn csv_of<R: Serialize>(records: impl IntoIterator<Item = R>, columns: &[Column]) -> Self {
        Self::from_columns(records, columns, |c| c.name, |_, v| raw(v))
    }

    fn from_columns<R: Serialize>(
        records: impl IntoIterator<Item = R>,
        columns: &[Column],
        header: fn(&Column) -> &'static str,
        cell: fn(&Column, &Value) -> String,
    ) -> Self {
        let columns: Vec<&Column> = columns.iter().filter(|c| !header(c).is_empty()).collect();
        let mut table = Table::new(&columns.iter().map(|c| header(c)).collect::<Vec<_>>());
        for record in records {
            let record = json(record);
            table.push(columns.iter().map(|c| cell(c, c.value(&record))).collect());
        }
        table
    }
}

/// Formats a value for CSV: all its digits, empty if there is none, `name=value;name=value` for an object.
pub fn raw(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(s) => s.clone(),
        Value::Bool(b) => b.to_string(),
        Value::Number(n) if n.is_f64() => n.as_f64().map_or(String::new(), |x| x.to_string()),
        Value::Number(n) => n.to_string(),
        Value::Array(list) => list.iter().map(raw).collect::<Vec<_>>().join(" "),
        Value::Object(pairs) => params_text(pairs),
    }
}

/// Formats parameters as one cell: `name=value;name=value`.
pub(crate) fn params_text(params: &serde_json::Map<String, Value>) -> String {
    params.iter().map(|(k, v)| format!("{k}={}", raw(v))).collect::<Vec<_>>().join(";")
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
    fn columns_without_a_title_are_in_files_and_those_without_a_name_in_tables() {
        let columns = [
            Column::both("<x", "x", "/x", Shown::Number),
            Column::file("y", "/inner/y"),
            Column::table("half", "/x", Shown::Made(|x| number(x.as_f64().unwrap() / 2.0))),
            Column::both("left", "left", "/missing", Shown::Text),
        ];
        let record = [serde_json::json!({ "x": 1.23456, "inner": { "y": { "a": 1, "b": "c" } } })];
        assert_eq!(Table::of(&record, &columns).csv(), "x,half,left\n1.23,0.617,-\n");
        assert_eq!(Table::csv_of(&record, &columns).csv(), "x,y,left\n1.23456,a=1;b=c,\n");
        let object = serde_json::json!({ "x": 1.23456, "y": { "a": 1, "b": "c" }, "left": null });
        assert_eq!(objects_of(&record, &columns), [object]);
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
