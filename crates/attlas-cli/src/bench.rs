//! `attlas bench`.

use crate::args::{BenchArgs, Common, WireName};
use crate::compare::meter;
use crate::interrupt;
use crate::progress::measured;
use crate::{Outcome, note, print, print_json};
use attlas::Mask;
use attlas_lab::bench::{Bench, Crossover, Settings, bench, read_peer};
use attlas_lab::device::{Gpu, GpuBench};
use attlas_lab::machine::Machine;
use attlas_lab::select::Selection;
use attlas_lab::table::{Table, count, number, wrap};
use std::process::ExitCode;

pub(crate) fn run(args: &BenchArgs, common: &Common) -> Outcome {
    let selection = args.methods.choice().resolve()?;
    if !args.cluster.is_empty() {
        return crate::spread::predict(&selection, args, common);
    }
    if let Some(outcome) = crate::team::with(|t| crate::spread::bench(t, &selection, args, common)) {
        return outcome;
    }
    if args.wire != WireName::Full {
        let expected = "several processes, as under mpirun, between which keys travel";
        return Err(attlas_lab::Error::argument("--wire", expected, "one process"));
    }
    if let Some(gpu) = args.device.open()? {
        return on_gpu(&gpu, selection, args, common);
    }
    let settings = Settings {
        lengths: args.n.clone(),
        widths: args.d.clone(),
        heads: args.heads,
        kv_heads: args.kv_heads.unwrap_or(args.heads),
        mask: if args.causal { Mask::Causal } else { Mask::None },
        decode: args.decode,
        runs: args.runs as usize,
        max_seconds: args.max_seconds,
        meter: meter(),
        peers: args.peer_json.iter().map(|path| read_peer(path)).collect::<Result<_, _>>()?,
        ..Settings::default()
    };
    interrupt::catch(common);
    let result = measured(common, "", |run| bench(&selection, &settings, run))?;
    if common.json {
        print_json(&result);
    } else if common.csv {
        print(&result.csv_table().csv());
    } else {
        show(common, &heading(&result), &[(String::new(), result.table()), (String::new(), growth(&result))]);
        notes(&result, common);
    }
    Ok(ending(result.interrupted))
}

/// Prints device times of the methods' GPU kernels.
fn on_gpu(gpu: &Gpu, selection: Selection, args: &BenchArgs, common: &Common) -> Outcome {
    let (selection, left_out) = gpu.select(selection)?;
    let settings = GpuBench {
        lengths: args.n.clone(),
        widths: args.d.clone(),
        heads: args.heads,
        kv_heads: args.kv_heads.unwrap_or(args.heads),
        mask: if args.causal { Mask::Causal } else { Mask::None },
        runs: args.runs as usize,
    };
    let (table, notes) = gpu.bench(&selection, &settings)?;
    if common.csv {
        print(&table.csv());
    } else {
        let shape = format!(
            "mask {}, {} query heads, {} key heads, bf16",
            settings.mask, settings.heads, settings.kv_heads
        );
        show(common, &[gpu.heading(), shape], &[(String::new(), table)]);
    }
    left_out.iter().chain(&notes).for_each(|line| note(common, line));
    note(
        common,
        "\nms: median of replayed graphs; of memory: inputs and output once over the time; faster: the device's\n\
         own exact attention over it",
    );
    Ok(ExitCode::SUCCESS)
}

/// Prints the heading lines and then the tables, each under its own sentence if it has one.
fn show(common: &Common, heading: &[String], tables: &[(String, Table)]) {
    print(&(heading.join(if common.md { "  \n" } else { "\n" }) + "\n"));
    for (above, table) in tables {
        let form = if common.md { table.markdown() } else { table.text() };
        let above = if above.is_empty() { String::new() } else { format!("{above}\n\n") };
        print(&format!("\n{above}{form}"));
    }
}

fn ending(interrupted: bool) -> ExitCode {
    if interrupted {
        tell!("interrupted: what was finished is printed");
        return ExitCode::from(130);
    }
    ExitCode::SUCCESS
}

fn heading(b: &Bench) -> Vec<String> {
    let [machine, ceiling] = ceilings(&b.machine);
    let shape = format!(
        "{}mask {}, {}, {}",
        if b.decode { "one token at a time, " } else { "" },
        b.mask,
        count(b.heads, "query head"),
        count(b.kv_heads, "key head")
    );
    vec![machine, ceiling, shape]
}

fn ceilings(m: &Machine) -> [String; 2] {
    [
        format!("{} ({}), {}, {}", m.cpu, m.platform, count(m.threads, "thread"), m.isa),
        format!(
            "ceiling: {} multiply-add; {} GB/s read, {} scattered, {} copy",
            m.fma_gflops.map_or("unknown".into(), |g| number(g) + " GF/s"),
            number(m.read_gbs),
            number(m.scattered_gbs),
            number(m.copy_gbs)
        ),
    ]
}

fn growth(b: &Bench) -> Table {
    let mut table = Table::new(&["<method", "d", "grows as", "claimed", "<overtakes exact at n"]);
    for g in &b.summary {
        table.push(vec![
            g.method.into(),
            g.d.to_string(),
            g.exponent.map_or("-".into(), |e| format!("N^{e:.2}")),
            format!("N^{}", g.claimed),
            match g.crossover {
                Crossover::At(n) => format!("{n:.0}"),
                Crossover::Below(n) => format!("below {n}"),
                Crossover::Above(n) => format!("above {n}, if at all"),
                Crossover::Unknown => "-".into(),
            },
        ]);
    }
    table
}

fn notes(b: &Bench, common: &Common) {
    for r in &b.refused {
        note(common, &wrap(&format!("{} refused: {}", r.method, r.reasons.join("; "))));
    }
    b.notes.iter().for_each(|n| note(common, n));
    note(
        common,
        "\n+-: half the range of the runs; share: F of the multiply-add peak, B of the read\n\
         bandwidth, the larger; faster: exact over set-up and run in the same rounds, or\n\
         exact where the settings covered all keys (left out of the fitted growth);\n\
         scratch: most scratch in use; memory: most allocated, the output apart",
    );
}
