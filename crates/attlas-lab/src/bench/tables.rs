//! Tables of a benchmark.

use super::{Bench, Row};
use crate::machine::Machine;
use crate::table::Shown::{Bytes, Made, Seconds, Text};
use crate::table::{Column, Table, percent, times};
use attlas::Mask;
use serde::Serialize;
use serde_json::Value;

/// A row with the run it belongs to.
#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    row: &'a Row,
    heads: usize,
    kv_heads: usize,
    mask: Mask,
    machine: &'a Machine,
}

fn x(record: &Value, at: &str) -> f64 {
    record.pointer(at).and_then(Value::as_f64).unwrap_or(f64::NAN)
}

/// Returns half the range of the runs, over their median.
fn spread(seconds: &Value) -> String {
    percent((x(seconds, "/max") - x(seconds, "/min")) / 2.0 / x(seconds, "/median"))
}

/// Returns the larger share of the two ceilings, and its name.
fn share(r: &Value) -> String {
    let (flop, read) = (x(r, "/flop_share").max(0.0), x(r, "/read_share"));
    if flop >= read { percent(flop) + "F" } else { percent(read) + "B" }
}

fn faster(r: &Value) -> String {
    if r["status"] == "exact" { "exact".into() } else { times(x(r, "/speedup")) }
}

const COLUMNS: [Column; 31] = [
    Column::both("<method", "method", "/method", Text),
    Column::file("family", "/family"),
    Column::file("params", "/params"),
    Column::both("n", "n", "/n", Text),
    Column::both("d", "d", "/d", Text),
    Column::file("heads", "/heads"),
    Column::file("kv_heads", "/kv_heads"),
    Column::file("mask", "/mask"),
    Column::file("mode", "/mode"),
    Column::file("threads", "/machine/threads"),
    Column::both("set-up", "setup_seconds", "/setup_seconds/median", Seconds),
    Column::both("run", "run_seconds", "/run_seconds/median", Seconds),
    Column::table("+-", "/run_seconds", Made(spread)),
    Column::file("run_min", "/run_seconds/min"),
    Column::file("run_max", "/run_seconds/max"),
    Column::file("runs", "/run_seconds/runs"),
    Column::file("exact_seconds", "/exact_seconds"),
    Column::table("share", "", Made(share)),
    Column::table("faster", "", Made(faster)),
    Column::file("speedup", "/speedup"),
    Column::file("flops", "/flops"),
    Column::file("gflops", "/gflops"),
    Column::file("flop_share", "/flop_share"),
    Column::file("bytes", "/bytes"),
    Column::file("read_share", "/read_share"),
    Column::both("scratch", "scratch_bytes", "/scratch_bytes", Bytes),
    Column::both("memory", "peak_bytes", "/peak_bytes", Bytes),
    Column::file("fma_gflops", "/machine/fma_gflops"),
    Column::file("read_gbs", "/machine/read_gbs"),
    Column::file("scattered_gbs", "/machine/scattered_gbs"),
    Column::file("copy_gbs", "/machine/copy_gbs"),
];

impl Bench {
    fn lines(&self) -> impl Iterator<Item = Line<'_>> {
        let Self { heads, kv_heads, mask, machine, .. } = self;
        self.rows.iter().map(|row| Line { row, heads: *heads, kv_heads: *kv_heads, mask: *mask, machine })
    }

    /// Returns a table with one line per method, width and length.
    pub fn table(&self) -> Table {
        let mut columns = COLUMNS.to_vec();
        if self.rows.iter().any(|r| !r.peers.is_empty()) {
            let ratio = |r: &Value| r.as_f64().map_or(String::new(), times);
            columns.push(Column::table("vs peer", "/peers/0/ratio", Made(ratio)));
        }
        Table::of(self.lines(), &columns)
    }

    /// Returns every row with all digits, for other programs.
    pub fn csv_table(&self) -> Table {
        Table::csv_of(self.lines(), &COLUMNS)
    }
}
