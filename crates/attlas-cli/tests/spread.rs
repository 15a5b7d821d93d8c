//! Several processes on the command line.

#[cfg(not(feature = "mpi"))]
mod without_mpi {
    use std::process::Command;

    #[test]
    fn several_processes_are_refused_with_what_to_do() {
        for (variable, rank, said) in [
            ("OMPI_COMM_WORLD_SIZE", "0", true),
            ("PMI_SIZE", "0", true),
            ("OMPI_COMM_WORLD_SIZE", "1", false),
        ] {
            let done = Command::new(env!("CARGO_BIN_EXE_attlas"))
                .args(["methods"])
                .env(variable, "2")
                .env("OMPI_COMM_WORLD_RANK", rank)
                .output()
                .unwrap();
            let error = String::from_utf8_lossy(&done.stderr);
            assert_eq!(done.status.code(), Some(2), "{error}");
            assert!(done.stdout.is_empty());
            assert_eq!(error.contains("--features mpi") && error.contains("libopenmpi-dev"), said, "{error}");
        }
        let alone = Command::new(env!("CARGO_BIN_EXE_attlas"))
            .args(["methods"])
            .env("OMPI_COMM_WORLD_SIZE", "1")
            .output()
            .unwrap();
        assert!(alone.status.success());
    }
}

#[cfg(feature = "mpi")]
#[path = "../../attlas-mpi/tests/common/mod.rs"]
mod mpi;

#[cfg(feature = "mpi")]
mod with_mpi {
    use serde_json::Value;
    use std::process::{Command, Output};

    fn mpirun(processes: usize, args: &[&str]) -> Output {
        super::mpi::mpirun(env!("CARGO_BIN_EXE_attlas"), processes, args)
    }

    fn json(processes: usize, args: &[&str]) -> Value {
        let done = mpirun(processes, args);
        let error = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{args:?}: {error}");
        serde_json::from_slice(&done.stdout)
            .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&done.stdout)))
    }

    #[test]
    fn one_sequence_over_several_processes() {
        let args = ["bench", "--methods", "sink_window,linear,wildcat,top_k", "--n", "300", "--heads", "4"];
        let args =
            [&args[..], &["--kv-heads", "2", "--causal", "--runs", "2", "--threads", "1", "--json"]].concat();
        for processes in [2, 3] {
            let found = json(processes, &args);
            let rows = found["rows"].as_array().unwrap();
            let schedules: Vec<&str> = rows.iter().map(|r| r["schedule"].as_str().unwrap()).collect();
            assert_eq!(schedules, ["ring", "ring", "gather", "scan"], "{found}");
            assert!(rows.iter().all(|r| r["bytes"].as_u64().unwrap() > 0 && r["processes"] == processes));
            assert_eq!(rows[0]["nodes"].as_array().unwrap().len(), processes);
            assert_eq!(found["refused"][0]["method"], "top_k");
        }
        let decoded =
            json(2, &["bench", "--n", "1000", "--decode", "--runs", "2", "--threads", "1", "--json"]);
        assert_eq!(decoded["rows"][0]["schedule"], "decode");
    }

    #[test]
    fn heads_are_shared_out_and_come_back_in_order() {
        let args = ["inspect", "synthetic:clustered,n=64,d=8,heads=6,kv_heads=3", "--threads", "1", "--json"];
        let clean = |mut x: Value| {
            for head in x["heads"].as_array_mut().unwrap() {
                for name in ["seconds", "node"] {
                    head.as_object_mut().unwrap().remove(name);
                }
            }
            x
        };
        let done = Command::new(env!("CARGO_BIN_EXE_attlas")).args(args).output().unwrap();
        let alone = clean(serde_json::from_slice(&done.stdout).unwrap());
        assert_eq!(clean(json(3, &args)), alone);
    }

    #[test]
    fn other_commands_are_refused_once() {
        let done = mpirun(2, &["methods"]);
        let error = String::from_utf8_lossy(&done.stderr);
        assert!(!done.status.success() && done.stdout.is_empty(), "{error}");
        assert_eq!(error.matches("error: more than one process").count(), 1, "{error}");
        assert!(error.contains("bench, compare, inspect, perplexity or tune"), "{error}");
    }

    #[test]
    fn an_error_ends_all_processes_and_is_told_once() {
        let done = mpirun(3, &["inspect", "no-such-file.safetensors"]);
        let error = String::from_utf8_lossy(&done.stderr);
        assert!(!done.status.success());
        assert_eq!(error.matches("no such file").count(), 1, "{error}");
    }
}

#[test]
fn clusters_are_predicted_from_this_machine() {
    let done = std::process::Command::new(env!("CARGO_BIN_EXE_attlas"))
        .args(["bench", "--methods", "linear,wildcat,top_k", "--n", "512,1024", "--causal", "--runs", "1"])
        .args(["--cluster", "nodes=8,gbps=100,us=2", "--cluster", "nodes=64", "--json"])
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{error}");
    let found: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    let rows = found["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 3 * 2 * 2, "exact, linear and wildcat on two clusters at two lengths");
    assert!(rows.iter().all(|r| r["efficiency"].as_f64().unwrap() <= 1.0 + 1e-9));
    assert_eq!(found["refused"][0]["method"], "top_k");
    let bad = std::process::Command::new(env!("CARGO_BIN_EXE_attlas"))
        .args(["bench", "--cluster", "nodes=many"])
        .output()
        .unwrap();
    assert_eq!(bad.status.code(), Some(2));
}
