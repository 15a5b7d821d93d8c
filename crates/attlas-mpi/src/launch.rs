//! Detection of a launcher that started several processes.

/// Number of processes that a launcher announces in the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    /// The variable that announces it.
    pub variable: &'static str,
    /// Processes.
    pub processes: usize,
}

/// Variables that name the number of processes: Open MPI, MPICH and its kin (PMI), Intel MPI, MVAPICH, PALS.
const SIZES: [&str; 6] = [
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MPI_LOCALNRANKS_TOTAL",
    "MV2_COMM_WORLD_SIZE",
    "PALS_NRANKS",
    "FLUX_JOB_SIZE",
];

/// Returns the launcher of this process, if it started more than one, from the variables that `get` finds. Slurm sets
/// its own in every step, even for programs without MPI; its steps count only if they offer PMI or PMIx.
pub fn launched(get: impl Fn(&str) -> Option<String>) -> Option<Launched> {
    let number = |name: &str| get(name).and_then(|v| v.trim().parse::<usize>().ok());
    let found =
        SIZES.iter().find_map(|&variable| number(variable).map(|processes| Launched { variable, processes }));
    let slurm = || {
        let connects = ["PMIX_RANK", "PMI_RANK", "PMI_FD", "PMIX_NAMESPACE"].iter().any(|v| get(v).is_some());
        let processes = number("SLURM_STEP_NUM_TASKS").filter(|_| connects)?;
        Some(Launched { variable: "SLURM_STEP_NUM_TASKS", processes })
    };
    found.or_else(slurm).filter(|l| l.processes > 1)
}

/// Returns the launcher of this process.
pub fn of_this_process() -> Option<Launched> {
    launched(|name| std::env::var(name).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(vars: &[(&str, &str)]) -> Option<usize> {
        let get = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
        launched(get).map(|l| l.processes)
    }

    #[test]
    fn launchers_are_known_by_what_they_say() {
        assert_eq!(with(&[("OMPI_COMM_WORLD_SIZE", "4")]), Some(4));
        assert_eq!(with(&[("PMI_SIZE", "2"), ("PMI_RANK", "0")]), Some(2));
        assert_eq!(with(&[("OMPI_COMM_WORLD_SIZE", "1")]), None);
        assert_eq!(with(&[("SLURM_STEP_NUM_TASKS", "8"), ("PMIX_RANK", "3")]), Some(8));
        // A step of a job array that runs eight programs side by side.
        assert_eq!(with(&[("SLURM_STEP_NUM_TASKS", "8")]), None);
        assert_eq!(with(&[("SLURM_NTASKS", "8"), ("PMIX_RANK", "0")]), None);
        assert_eq!(with(&[]), None);
    }
}
