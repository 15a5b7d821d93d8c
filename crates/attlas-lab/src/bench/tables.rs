//! Tables of a benchmark.

use super::{Bench, Row};
use crate::table::{Column, Table, bytes, params_text, percent, raw, raw_or_empty, seconds, times};

/// A row with the run it belongs to.
type Line<'a> = (&'a Bench, &'a Row);

/// Columns of tables and CSV files.
fn columns<'a>(peers: bool) -> Vec<Column<Line<'a>>> {
    let mut columns: Vec<Column<Line<'a>>> = vec![
        Column::both("<method", "method", |(_, r)| r.method.into(), |(_, r)| r.method.into()),
        Column::file("family", |(_, r)| r.family.into()),
        Column::file("params", |(_, r)| params_text(&r.params)),
        Column::both("n", "n", |(_, r)| r.n.to_string(), |(_, r)| r.n.to_string()),
        Column::both("d", "d", |(_, r)| r.d.to_string(), |(_, r)| r.d.to_string()),
        Column::file("heads", |(b, _)| b.heads.to_string()),
        Column::file("kv_heads", |(b, _)| b.kv_heads.to_string()),
        Column::file("mask", |(b, _)| b.mask.to_string()),
        Column::file("mode", |(_, r)| r.mode.into()),
        Column::file("threads", |(b, _)| b.machine.threads.to_string()),
        Column::both(
            "set-up",
            "setup_seconds",
            |(_, r)| seconds(r.setup_seconds.median),
            |(_, r)| raw(r.setup_seconds.median),
        ),
        Column::both(
            "run",
            "run_seconds",
            |(_, r)| seconds(r.run_seconds.median),
            |(_, r)| raw(r.run_seconds.median),
        ),
        Column::table("+-", |(_, r)| {
            percent((r.run_seconds.max - r.run_seconds.min) / 2.0 / r.run_seconds.median)
        }),
        Column::file("run_min", |(_, r)| raw(r.run_seconds.min)),
        Column::file("run_max", |(_, r)| raw(r.run_seconds.max)),
        Column::file("runs", |(_, r)| r.run_seconds.runs.to_string()),
        Column::file("exact_seconds", |(_, r)| raw_or_empty(r.exact_seconds)),
        Column::table("share", |(_, r)| {
            let flop = r.flop_share.unwrap_or(0.0);
            if flop >= r.read_share { percent(flop) + "F" } else { percent(r.read_share) + "B" }
        }),
        Column::both(
            "faster",
            "speedup",
            |(_, r)| match r.status {
                "exact" => "exact".into(),
                _ => r.speedup.map_or("-".into(), times),
            },
            |(_, r)| raw_or_empty(r.speedup),
        ),
        Column::file("flops", |(_, r)| r.flops.map_or(String::new(), |f| f.to_string())),
        Column::file("gflops", |(_, r)| raw_or_empty(r.gflops)),
        Column::file("flop_share", |(_, r)| raw_or_empty(r.flop_share)),
        Column::file("bytes", |(_, r)| r.bytes.to_string()),
        Column::file("read_share", |(_, r)| raw(r.read_share)),
        Column::both(
            "scratch",
            "scratch_bytes",
            |(_, r)| bytes(r.scratch_bytes),
            |(_, r)| r.scratch_bytes.to_string(),
        ),
        Column::both("memory", "peak_bytes", |(_, r)| bytes(r.peak_bytes), |(_, r)| r.peak_bytes.to_string()),
        Column::file("fma_gflops", |(b, _)| raw_or_empty(b.machine.fma_gflops)),
        Column::file("read_gbs", |(b, _)| raw(b.machine.read_gbs)),
        Column::file("scattered_gbs", |(b, _)| raw(b.machine.scattered_gbs)),
        Column::file("copy_gbs", |(b, _)| raw(b.machine.copy_gbs)),
    ];
    if peers {
        columns.push(Column::table("vs peer", |(_, r)| {
            r.peers.first().map_or(String::new(), |p| times(p.ratio))
        }));
    }
    columns
}

impl Bench {
    fn lines(&self) -> Vec<Line<'_>> {
        self.rows.iter().map(|r| (self, r)).collect()
    }

    /// One line for each method, width and length.
    pub fn table(&self) -> Table {
        Table::of(&self.lines(), &columns(self.rows.iter().any(|r| !r.peers.is_empty())))
    }

    /// Every row with all digits, for other programs.
    pub fn csv_table(&self) -> Table {
        Table::csv_of(&self.lines(), &columns(false))
    }
}
